"""`check_recorded`: why a run hung, from what its ranks recorded; `explain_hang`: the same as text.

>>> report = check_recorded("dumps")
>>> report.findings[0].missing
(2,)
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from interlace.errors import InterlaceError
from interlace.verify import check
from interlace.verify.report import MAX_FINDINGS
from interlace_check.recorded.alignment import Aligned, align
from interlace_check.recorded.explain import RecordedExplainer
from interlace_check.recorded.programs import programs_of
from interlace_check.recorded.reading import read_folder
from interlace_check.recorded.report import RecordedReport, in_order


def check_recorded(folder: str | os.PathLike[str]) -> RecordedReport:
    """Says why a run hung: which rank waits in which op, what for, and who is missing.

    Args:
        folder: what torch's flight recorder wrote on each rank, as JSON, in files named after the
            rank (`trace_rank_3.json`).

    Returns:
        A report as `interlace.check` gives, whose ops are the collectives of the ranks.

    Raises:
        RecordingError: a file cannot be read; a pickle is not.
    """
    began = time.perf_counter()
    dumps, left_out = read_folder(Path(folder))
    aligned = align(dumps)
    if left_out:
        aligned.assumed.append(f"not named after a rank, so not read: {', '.join(left_out)}")
    if not any(dump.entries for dump in dumps):
        aligned.assumed.append(
            "no dump holds a record: nothing was issued, or the recorder was off "
            "(TORCH_FR_BUFFER_SIZE=0)"
        )
    return explained(aligned, began)


def explained(aligned: Aligned, began: float) -> RecordedReport:
    """The report of dumps that were laid side by side."""
    ranks = programs_of(aligned)
    programs = tuple(rank.program for rank in ranks)
    verdict = check(programs).findings if programs else ()
    findings = in_order(RecordedExplainer(aligned, ranks, verdict).findings())
    return RecordedReport(
        findings=tuple(findings[:MAX_FINDINGS]),
        num_ops=sum(len(dump.entries) for dump in aligned.dumps.values()),
        num_ranks=len(aligned.world),
        seconds=time.perf_counter() - began,
        num_left_out=max(0, len(findings) - MAX_FINDINGS),
        assumed=tuple(aligned.assumed),
        programs=programs,
    )


def explain_hang(folder: str | os.PathLike[str]) -> str:
    """Says in words why a run hung: a callback for what watches a job, which takes a text.

    Args:
        folder: what the ranks recorded, as for `check_recorded`.

    Returns:
        The report of `check_recorded`, or why there is none: it raises no InterlaceError, which
        would hide the hang behind another failure.
    """
    try:
        return str(check_recorded(folder))
    except InterlaceError as error:
        return f"why the run hung is not known: {error}"
