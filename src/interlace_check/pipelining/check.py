"""`check_pipelining`: proof that a schedule of torch.distributed.pipelining cannot go wrong, or how
it does.

>>> report = check_pipelining("interleaved.csv")
>>> report.sound, report.verdicts
(False, {'rank': False, 'pair': False, 'direction': False})
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path

from interlace.errors import UnsupportedError
from interlace.verify import Finding, check
from interlace.verify.report import MAX_FINDINGS
from interlace_check.pipelining.csv_file import read_csv
from interlace_check.pipelining.live import take
from interlace_check.pipelining.matching import exchanges
from interlace_check.pipelining.programs import PipelineProgram, to_programs
from interlace_check.pipelining.report import MODELS, PipeliningFinding, PipeliningReport, fault
from interlace_check.pipelining.rules import faults
from interlace_check.pipelining.schedule import Layout, PipelineOrder, Placed

MAX_COUNTED = 10_000
"""After so many findings no more are looked for."""
BROKEN = frozenset({"order", "missing", "duplicate", "placement", "unmatched"})
"""Kinds with which a step does not come to its end, whatever the queues are: what would wait for
what is no news then."""


def check_pipelining(schedule: object) -> PipeliningReport:
    """Checks a pipeline schedule under three models of communication.

    Args:
        schedule: a CSV file as torch's `_dump_csv` writes it (a path, or `-` for standard input), a
            live schedule object, of which all ranks' actions are checked, or the actions of each
            rank (a mapping or a list of rows; torch's actions or their text).

    Returns:
        A report; its `verdicts` are by model.

    Raises:
        ParseError: a file is malformed.
        UnsupportedError: an object has no known order, or a schedule of several ranks no messages.
    """
    began = time.perf_counter()
    is_file = isinstance(schedule, str | os.PathLike)
    order = read_csv(Path(schedule)) if is_file else take(schedule)
    layout = Layout.of(order)
    sequences = [list(order.placed(rank)) for rank in range(layout.num_ranks)]
    if layout.num_ranks > 1 and not order.has_messages:
        raise UnsupportedError(
            "the schedule has computations alone, to which torch adds the messages: fix: give the "
            'object after `_load_csv(file, format="compute_only")`, or what `_dump_csv(file, '
            'format="compute_comms")` writes of it'
        )
    found = list(islice(faults(order, layout, sequences), MAX_COUNTED))
    found += islice(exchanges(sequences, layout), MAX_COUNTED)
    if not any(finding.kind in BROKEN for finding in found):
        found += _by_model(sequences, layout)
    merged = _merged(found[:MAX_COUNTED])
    return PipeliningReport(
        findings=tuple(merged[:MAX_FINDINGS]),
        num_ops=sum(cell is not None for row in order.cells for cell in row),
        num_ranks=layout.num_ranks,
        seconds=time.perf_counter() - began,
        num_left_out=len(merged[MAX_FINDINGS:]),
        num_stages=order.num_stages or len(layout.rank_of),
        num_microbatches=order.num_microbatches or _num_microbatches(order),
    )


def _num_microbatches(order: PipelineOrder) -> int:
    every = (placed for rank in range(len(order.cells)) for placed in order.placed(rank))
    return len({placed.action.microbatch for placed in every} - {None})


def _by_model(sequences: Sequence[Sequence[Placed]], layout: Layout) -> Iterator[PipeliningFinding]:
    """Deadlocks, model by model, of a schedule whose messages pair up.

    The models differ in the order of queues alone, and each has all the order of the next: what
    does not deadlock in one does not in those behind it.
    """
    for model in MODELS:
        ranks = to_programs(sequences, layout, model)
        errors = check([rank.program for rank in ranks]).errors
        if not errors:
            break
        for finding in errors:
            if finding.kind != "mismatch":  # matching.py names the messages
                yield _in_words(finding, ranks, model)


def _in_words(finding: Finding, ranks: Sequence[PipelineProgram], model: str) -> PipeliningFinding:
    """A finding about the Programs, as one about the actions that their ops stand for."""
    places: list[tuple[Placed, str]] = []
    for op in finding.ops:
        rank, index = op.at
        origins = ranks[rank].origins if rank < len(ranks) else []
        if index < len(origins) and (origin := origins[index]) is not None:
            places.append((origin, op.role))
    if not places:
        return fault("deadlock", finding.message, "", models=(model,))
    if finding.kind != "deadlock" or len(places) == 1:
        message = "; ".join(f"{place} {role}" for place, role in places)
        kind = finding.kind if finding.kind == "deadlock" else "order"
        fix = "add the other end, or remove this one"
        return fault(kind, message, fix, *(place for place, _ in places), models=(model,))
    path = [place for k, (place, _) in enumerate(places) if place != places[k - 1][0]]
    words = [str(path[0])]
    for before, place in pairwise([*path, path[0]]):
        words.append(f"comes after {place}" if place.rank == before.rank else f"meets {place}")
    message = f"{words[0]} {', which '.join(words[1:])}"
    fix = "issue the messages of both ranks in one order"
    return fault("deadlock", message, fix, *path, models=(model,))


def _merged(findings: Sequence[PipeliningFinding]) -> list[PipeliningFinding]:
    """Findings that several models share, once."""
    models: dict[tuple[str, str], list[str]] = {}
    first: dict[tuple[str, str], PipeliningFinding] = {}
    for finding in findings:
        key = (finding.kind, finding.message)
        models.setdefault(key, []).extend(finding.models)
        first.setdefault(key, finding)
    return [
        dataclasses.replace(one, models=tuple(name for name in MODELS if name in models[key]))
        for key, one in first.items()
    ]
