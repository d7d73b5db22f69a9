"""The cost of a Program: a machine model, op times, the simulator and the timelines it predicts.

timeline.py      spans and overlap figures, predicted or measured
machine.py       the figures of a machine, and those known without measuring
machine_file.py  calibration files, and where they live
gemm.py          how long matmuls take
op_times.py      what one op costs the device, and what it costs the host
choose.py        the strategy of a site, from measured and predicted times
graph.py         the ops of all ranks as tasks, and what each waits for
simulate.py      the tasks played: a predicted timeline

What makes a machine of measurements is `interlace_bench.calibration.fit`.
"""

from interlace.cost.machine import Machine, SiteKey, SiteTime, default_machine
from interlace.cost.machine_file import default_path, fingerprint
from interlace.cost.op_times import op_kind, op_name, run_issue_seconds
from interlace.cost.simulate import Prediction, predict, run_after_run, simulate
from interlace.cost.timeline import Span, Timeline

__all__ = [
    "Machine",
    "Prediction",
    "SiteKey",
    "SiteTime",
    "Span",
    "Timeline",
    "default_machine",
    "default_path",
    "fingerprint",
    "op_kind",
    "op_name",
    "predict",
    "run_after_run",
    "run_issue_seconds",
    "simulate",
]
