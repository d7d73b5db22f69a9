"""FX graphs as Programs: user streams and functional collectives in compiled graphs.

    report = interlace.check_graph(gm)

Reading order: steps.py (what a graph does), reading/ (nodes to steps), programs.py (steps to a
Program), findings.py (what is reported), check.py.
"""

from interlace_check.graphs.check import check_graph
from interlace_check.graphs.findings import KINDS

__all__ = ["KINDS", "check_graph"]
