"""`check_recorded`: why a run hung, from what its ranks recorded.

>>> report = check_recorded("dumps")
>>> report.findings[0].missing
(2,)
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from interlace.verify import check
from interlace_check.recorded.alignment import Aligned, align
from interlace_check.recorded.explain import RecordedExplainer
from interlace_check.recorded.flights import stalled
from interlace_check.recorded.programs import programs_of
from interlace_check.recorded.reading import read_folder
from interlace_check.recorded.report import MAX_FINDINGS, RecordedReport, in_order


def check_recorded(folder: str | os.PathLike[str]) -> RecordedReport:
    """Says why a run hung: which rank waits in which op, what for, and who is missing.

    The folder holds what torch's flight recorder wrote on each rank, as JSON, in files named after
    the rank (`trace_rank_3.json`). Raises RecordingError for what cannot be read, pickles among it.
    """
    began = time.perf_counter()
    dumps = read_folder(Path(folder))
    aligned = align(dumps)
    if dumps.left_out:
        aligned.assumed.append(f"not named after a rank, so not read: {', '.join(dumps.left_out)}")
    if not any(dump.entries or dump.flights for dump in dumps):
        aligned.assumed.append(
            "no dump holds a record: nothing was issued, or the recorder was off "
            "(TORCH_FR_BUFFER_SIZE=0)"
        )
    return explained(aligned, began)


def explained(aligned: Aligned, began: float) -> RecordedReport:
    """The report of dumps that were laid side by side."""
    recorded = programs_of(aligned)
    verdict = check(recorded.programs, runs=1) if recorded.programs else None
    logs = [log for dump in aligned.dumps.values() for log in dump.flights]
    own, assumed = stalled(logs, aligned.absent)
    findings = in_order([*own, *RecordedExplainer(aligned, recorded, verdict).findings()])
    return RecordedReport(
        tuple(findings[:MAX_FINDINGS]),
        (*aligned.assumed, *assumed),
        len(aligned.world),
        sum(len(dump.entries) for dump in aligned.dumps.values()),
        recorded,
        max(0, len(findings) - MAX_FINDINGS),
        verdict,
        time.perf_counter() - began,
    )
