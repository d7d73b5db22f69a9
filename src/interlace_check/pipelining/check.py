"""`check_pipelining`: whether a schedule of torch.distributed.pipelining can go wrong, and how.

>>> report = check_pipelining("interleaved.csv")
>>> report.sound, report.verdicts
(False, {'rank': False, 'pair': False, 'direction': False})
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path

from interlace.verify import Finding, check
from interlace_check.pipelining.actions import COMPUTE, Action
from interlace_check.pipelining.csv_file import read_csv
from interlace_check.pipelining.live import Taken, take
from interlace_check.pipelining.lowering import add_messages
from interlace_check.pipelining.matching import exchanges, is_mixed
from interlace_check.pipelining.programs import RankPrograms, to_programs
from interlace_check.pipelining.report import (
    MAX_FINDINGS,
    MODELS,
    PipeliningFinding,
    PipeliningReport,
)
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
    if isinstance(schedule, str | os.PathLike):
        taken = Taken(read_csv(Path(schedule)))
    else:
        taken = take(schedule)
    found, form, order, layout = _found(taken)
    every = list(islice(found, MAX_COUNTED))
    merged = _merged(every)
    errors = sum(finding.level == "error" for finding in merged)
    listed = merged[:MAX_FINDINGS]
    left_out = errors - sum(finding.level == "error" for finding in listed)
    return PipeliningReport(
        tuple(listed),
        form,
        layout.num_ranks,
        order.num_stages or len(layout.rank_of),
        order.num_microbatches or _num_microbatches(order),
        sum(cell is not None for row in order.cells for cell in row),
        time.perf_counter() - began,
        left_out,
    )


def _found(taken: Taken) -> tuple[Iterator[PipeliningFinding], str, PipelineOrder, Layout]:
    if taken.order is None:
        sequences = [_listed(plan) for plan in taken.plans]
        order = PipelineOrder(tuple(tuple(p.action for p in row) for row in sequences))
        layout = Layout.of(order)
        own = list(islice(faults(order, layout, sequences, False), MAX_COUNTED))
        return chain(own, _by_model(taken.plans, layout, own)), taken.form, order, layout
    order = taken.order
    layout = Layout.of(order)
    remarks = (PipeliningFinding("format", remark, level="remark") for remark in order.remarks)
    if order.is_lowered:
        sequences = [list(order.placed(rank)) for rank in range(layout.num_ranks)]
        form, stuck = "compute_comms", ()
        remarks = chain(remarks, _unreduced(order))
    else:
        lowered = add_messages(order, layout)
        sequences, form, stuck = lowered.sequences, "compute_only", lowered.stuck
        remarks = chain(remarks, _beside_computations(order))
    own = list(islice(faults(order, layout, sequences, form == "compute_only"), MAX_COUNTED))
    models = _stuck(stuck) if stuck else _by_model(plan_of(sequences), layout, own)
    return chain(own, models, remarks), form, order, layout


def _unreduced(order: PipelineOrder) -> Iterator[PipeliningFinding]:
    """A remark on a schedule that is run as it is, and in which no gradient is ever scaled."""
    kinds = {cell.kind for row in order.cells for cell in row if cell is not None}
    count = _num_microbatches(order)
    if "REDUCE_GRAD" not in kinds and count > 1:
        yield PipeliningFinding(
            "reduce-grad",
            f"no stage has REDUCE_GRAD: gradients are sums over the {count} microbatches, neither "
            "divided by their number nor reduced between data-parallel ranks",
            (),
            "put a REDUCE_GRAD behind the last backward of each stage, unless that is meant "
            "(scale_grads=False)",
            level="remark",
        )


def _beside_computations(order: PipelineOrder) -> Iterator[PipeliningFinding]:
    """A remark on the first action of a compute-only schedule that is no computation."""
    every = (placed for rank in range(len(order.cells)) for placed in order.placed(rank))
    placed = next((placed for placed in every if placed.action.kind not in COMPUTE), None)
    if placed is not None:
        message = f"{placed}: torch's loader refuses it in a schedule without messages"
        yield PipeliningFinding(
            "format", message, (placed,), "remove it: torch adds it", level="remark"
        )


def _listed(plan: Sequence[Step]) -> list[Placed]:
    return [placed for step in plan if step.what != "await" for placed in step.actions]


def _num_microbatches(order: PipelineOrder) -> int:
    seen = {
        leaf.microbatch
        for row in order.cells
        for cell in row
        if cell is not None
        for leaf in cell.leaves()
    }
    return len(seen - {None})


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
        found = list(exchanges(plans, layout, model))
        yield from found
        if broken or proved or any(finding.kind in BROKEN for finding in found):
            continue
        made = to_programs(plans, layout, model)
        errors = check(made.programs).errors
        for finding in errors:
            if finding.kind != "mismatch":  # matching.py names the messages
                yield _in_words(finding, made, model)
        proved = not errors and not batches


def _in_words(finding: Finding, made: RankPrograms, model: str) -> PipeliningFinding:
    """A finding about the Programs, as one about the actions that their ops stand for."""
    steps = [(made.origins[op.at[0]][op.at[1]], op) for op in finding.ops if _stands(op.at, made)]
    places = [(origin[0], op) for origin, op in steps if origin]
    if not places:
        return PipeliningFinding("deadlock", finding.message, models=(model,))
    if finding.kind != "deadlock" or len(places) == 1:
        message = "; ".join(f"{place} {op.role}" for place, op in places)
        return PipeliningFinding(
            finding.kind if finding.kind == "deadlock" else "order",
            message,
            tuple(place for place, _ in places),
            "add the other end, or remove this one",
            models=(model,),
        )
    path = [place for k, (place, _) in enumerate(places) if place != places[k - 1][0]]
    said = [str(path[0])]
    for before, place in pairwise([*path, path[0]]):
        said.append(f"comes after {place}" if place.rank == before.rank else f"meets {place}")
    message = f"{said[0]} {', which '.join(said[1:])}"
    return PipeliningFinding(
        "deadlock",
        message,
        tuple(path),
        "issue the messages of both ranks in one order",
        models=(model,),
    )


def _stands(at: tuple[int, int], made: RankPrograms) -> bool:
    return at[0] < len(made.origins) and at[1] < len(made.origins[at[0]])


def _stuck(stuck: Sequence[tuple[Placed, Action]]) -> Iterator[PipeliningFinding]:
    """A compute-only schedule that torch refuses: no rank can go on."""
    waits = [f"{placed} needs `{source}`" for placed, source in stuck]
    yield PipeliningFinding(
        "deadlock",
        f"no rank can go on, so torch cannot add messages: {'; '.join(waits[:16])}",
        tuple(placed for placed, _ in stuck[:16]),
        "order the computations so that each comes after the one whose result it takes",
    )


def _merged(found: Sequence[PipeliningFinding]) -> list[PipeliningFinding]:
    """Findings that several models share, once; errors first."""
    models: dict[tuple[object, ...], list[str]] = {}
    first: dict[tuple[object, ...], PipeliningFinding] = {}
    for finding in found:
        key = (finding.kind, finding.message)
        models.setdefault(key, []).extend(finding.models)
        first.setdefault(key, finding)
    merged = [
        PipeliningFinding(
            one.kind,
            one.message,
            one.places,
            one.fix,
            one.level,
            tuple(name for name in MODELS if name in models[key]),
        )
        for key, one in first.items()
    ]
    return sorted(merged, key=lambda finding: finding.level != "error")
