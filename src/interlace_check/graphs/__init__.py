"""FX graphs as Programs: user streams and functional collectives in compiled graphs.

    report = check_graph(gm)
    gm = check(gm, example_inputs)     # as a pass: raises

Reading order: steps.py (what a graph does), reading/ (nodes to steps), programs.py (steps to a
Program), findings.py (what is reported), checking.py.
"""

from interlace_check.graphs.checking import check, check_graph
from interlace_check.graphs.findings import KINDS

__all__ = ["KINDS", "check", "check_graph"]
