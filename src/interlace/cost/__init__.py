"""What a Program costs: a machine model, op times, the simulator and the timelines it predicts.

timeline.py      spans and overlap figures, predicted or measured
machine.py       the figures of a machine, built in or from a calibration file
op_times.py      what one op costs
graph.py         the ops of all ranks as tasks, and what each waits for
simulate.py      the tasks played: a predicted timeline
calibration.py   the figures of a machine, from measured timelines
"""

from interlace.cost.calibration import calibrate
from interlace.cost.curve import Curve
from interlace.cost.machine import Link, Machine, default_machine, fingerprint
from interlace.cost.op_times import op_cost, op_kind, op_name, op_seconds
from interlace.cost.samples import Sample, read_samples, write_samples
from interlace.cost.simulate import simulate, site_seconds
from interlace.cost.timeline import Figures, Span, Timeline

__all__ = [
    "Curve",
    "Figures",
    "Link",
    "Machine",
    "Sample",
    "Span",
    "Timeline",
    "calibrate",
    "default_machine",
    "fingerprint",
    "op_cost",
    "op_kind",
    "op_name",
    "op_seconds",
    "read_samples",
    "simulate",
    "site_seconds",
    "write_samples",
]
