"""Runs that hung, from what their ranks had recorded.

    report = check_recorded("dumps")     # also: interlace check --recorded dumps
    print(report)

Reading order: entries.py (what a rank records), reading.py (the files), alignment.py (the ranks
side by side), programs.py (what is open, for the verifier), explain.py and report.py (the verdict
in the run's words), check.py; saving.py writes files.
"""

from interlace_check.recorded.check import check_recorded, explain_hang
from interlace_check.recorded.report import KINDS, RecordedFinding, RecordedReport
from interlace_check.recorded.saving import save_recording

__all__ = [
    "KINDS",
    "RecordedFinding",
    "RecordedReport",
    "check_recorded",
    "explain_hang",
    "save_recording",
]
