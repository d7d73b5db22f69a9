"""Checks schedules of torch.distributed.pipelining: files and live objects, without running them.

    report = check_pipelining("schedule.csv")
    print(report)

Reading order: actions.py (one token), csv_file.py, schedule.py (a schedule as data), live.py
(torch's objects), rules.py (faults that have nothing to do with queues), matching.py (microbatches
that are exchanged), programs.py (the three models of communication), report.py, check.py.
"""

from interlace_check.pipelining.check import check_pipelining
from interlace_check.pipelining.report import KINDS, MODELS, PipeliningFinding, PipeliningReport

__all__ = ["KINDS", "MODELS", "PipeliningFinding", "PipeliningReport", "check_pipelining"]
