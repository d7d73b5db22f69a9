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
from itertools import chain, islice, pairwise
from pathlib import Path

from interlace.verify import Finding, check
from interlace.verify.report import MAX_FINDINGS
from interlace_check.pipelining.actions import COMPUTE
from interlace_check.pipelining.csv_file import read_csv
from interlace_check.pipelining.live import take
from interlace_check.pipelining.lowering import add_messages
from interlace_check.pipelining.matching import exchanges, is_mixed
from interlace_check.pipelining.programs import RankProgram, to_programs
from interlace_check.pipelining.report import MODELS, PipeliningFinding, PipeliningReport, fault
from interlace_check.pipelining.rules import faults
from interlace_check.pipelining.schedule import Layout, PipelineOrder, Placed, Step, plan_of

MAX_COUNTED = 10_000
"""After so many findings no more are looked for."""
BROKEN = frozenset({"order", "missing", "duplicate", "placement", "unmatched"})
"""Kinds with which a step does not come to its end, whatever the queues are."""


def check_pipelining(schedule: object) -> PipeliningReport:
    """Checks a pipeline schedule under three models of communication.

    `schedule` is a CSV file as torch's `_dump_csv` writes it (a path, or `-` for standard input), a
    live schedule object, or the actions of each rank (a mapping or a list of rows; torch's actions
    or their text). Of an object, all ranks' actions are checked, not its own alone.

    Raises ParseError for a file that is malformed, and UnsupportedError for an object that has no
    known order.
    """
    began = time.perf_counter()
    is_file = isinstance(schedule, str | os.PathLike)
    order = read_csv(Path(schedule)) if is_file else take(schedule)
    layout = Layout.of(order)
    remarks = (fault("format", remark, "", level="remark") for remark in order.remarks)
    plans, form, stuck = order.plans, order.form, ()
    if plans:
        sequences = [list(order.placed(rank)) for rank in range(len(order.cells))]
    elif order.is_lowered:
        sequences, form = [list(order.placed(rank)) for rank in range(layout.num_ranks)], LOWERED
        remarks = chain(remarks, _unreduced(order))
    else:
        lowered = add_messages(order, layout)
        sequences, form, stuck = lowered.sequences, "compute_only", lowered.stuck
        remarks = chain(remarks, _beside_computations(order))
    own = list(islice(faults(order, layout, sequences, form == "compute_only"), MAX_COUNTED))
    if stuck:
        waits = "; ".join(f"{placed} needs `{source}`" for placed, source in stuck[:16])
        message = f"no rank can go on, so torch cannot add messages: {waits}"
        fix = "order the computations so that each comes after the one whose result it takes"
        models = iter([fault("deadlock", message, fix, *(placed for placed, _ in stuck[:16]))])
    else:
        models = _by_model(plans or plan_of(sequences), layout, own)
    merged = _merged(list(islice(chain(own, models, remarks), MAX_COUNTED)))
    left_out = sum(finding.level == "error" for finding in merged[MAX_FINDINGS:])
    return PipeliningReport(
        findings=tuple(merged[:MAX_FINDINGS]),
        num_ops=sum(cell is not None for row in order.cells for cell in row),
        num_ranks=layout.num_ranks,
        seconds=time.perf_counter() - began,
        num_left_out=left_out,
        form=form,
        num_stages=order.num_stages or len(layout.rank_of),
        num_microbatches=order.num_microbatches or _num_microbatches(order),
    )


LOWERED = "compute_comms"


def _unreduced(order: PipelineOrder) -> Iterator[PipeliningFinding]:
    """A remark on a schedule that is run as it is, and in which no gradient is ever scaled."""
    kinds = {cell.kind for row in order.cells for cell in row if cell is not None}
    count = _num_microbatches(order)
    if "REDUCE_GRAD" not in kinds and count > 1:
        message = (
            f"no stage has REDUCE_GRAD: gradients are sums over the {count} microbatches, neither "
            "divided by their number nor reduced between data-parallel ranks"
        )
        fix = (
            "put a REDUCE_GRAD behind the last backward of each stage, unless that is meant "
            "(scale_grads=False)"
        )
        yield fault("reduce-grad", message, fix, level="remark")


def _beside_computations(order: PipelineOrder) -> Iterator[PipeliningFinding]:
    """A remark on the first action of a compute-only schedule that is no computation."""
    every = (placed for rank in range(len(order.cells)) for placed in order.placed(rank))
    placed = next((placed for placed in every if placed.action.kind not in COMPUTE), None)
    if placed is not None:
        message = f"{placed}: torch's loader refuses it in a schedule without messages"
        yield fault("format", message, "remove it: torch adds it", placed, level="remark")


def _num_microbatches(order: PipelineOrder) -> int:
    every = (placed for rank in range(len(order.cells)) for placed in order.placed(rank))
    return len({placed.action.microbatch for placed in every} - {None})


def _by_model(
    plans: Sequence[Sequence[Step]], layout: Layout, own: Sequence[PipeliningFinding]
) -> Iterator[PipeliningFinding]:
    """Messages that go wrong, and deadlocks.

    Of a schedule whose runtime stops before, or whose messages lack an end, what would wait for
    what is no news. Without batches, the models differ in the order of queues alone, and each has
    all the order of the next: what does not deadlock in one does not in those behind it.
    """
    broken = any(finding.kind in BROKEN for finding in own)
    batches = any(is_mixed(step) for plan in plans for step in plan if step.what == "issue")
    proved = False
    for model in MODELS:
        crossed = list(exchanges(plans, layout, model))
        yield from crossed
        if broken or proved or any(finding.kind in BROKEN for finding in crossed):
            continue
        ranks = to_programs(plans, layout, model)
        errors = check([rank.program for rank in ranks]).errors
        for finding in errors:
            if finding.kind != "mismatch":  # matching.py names the messages
                yield _in_words(finding, ranks, model)
        proved = not errors and not batches


def _in_words(finding: Finding, ranks: Sequence[RankProgram], model: str) -> PipeliningFinding:
    """A finding about the Programs, as one about the actions that their ops stand for."""
    places: list[tuple[Placed, str]] = []
    for op in finding.ops:
        rank, index = op.at
        origins = ranks[rank].origins if rank < len(ranks) else []
        if index < len(origins) and origins[index]:
            places.append((origins[index][0], op.role))
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
    """Findings that several models share, once; errors first."""
    models: dict[tuple[str, str], list[str]] = {}
    first: dict[tuple[str, str], PipeliningFinding] = {}
    for finding in findings:
        key = (finding.kind, finding.message)
        models.setdefault(key, []).extend(finding.models)
        first.setdefault(key, finding)
    merged = [
        dataclasses.replace(one, models=tuple(name for name in MODELS if name in models[key]))
        for key, one in first.items()
    ]
    return sorted(merged, key=lambda finding: finding.level != "error")
