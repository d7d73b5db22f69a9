"""Collectives and messages, bound to NCCL or to one kernel over peer memory.

issue = collective(binder, lane, index, op)
issue = messages(binder, lane, index, (send, recv))
ensure_area(side, topic, specs, timeout_s)          # all ranks, together, while they prepare
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from interlace.comm import Spec
from interlace.comm.collectives import check_reduction
from interlace.comm.cuda.nccl import bind_messages, bind_on_stream
from interlace.comm.cuda.side import CudaSide
from interlace.errors import UnsupportedError
from interlace.ir import Collective, Recv, Send
from interlace.runtime.calling.calls import Thunk, in_turn
from interlace.runtime.cuda.lanes import EventPoint, Lane
from interlace.runtime.prepare.plan import largest
from interlace.runtime.run_sizes import RunSizes

if TYPE_CHECKING:
    from interlace.runtime.cuda.binder import Binder


def collective(binder: Binder, lane: Lane, index: int, op: Collective) -> Thunk | None:
    turn, spec, sizes = binder.plan.turns[index], binder.plan.specs[index], binder.values.sizes
    items = binder.values.items
    src = None if op.src is None else binder.values.own(op.src)
    dst = None if op.dst is None else binder.values.own(op.dst)
    counts = binder.values.counts(index, op, binder.plan.known_counts.get(index))
    if counts is not None and (turn.backend == "peer" or binder.context.options.graph):
        how = "in a CUDA graph" if binder.context.options.graph else "by peer memory"
        raise UnsupportedError(
            f"an all-to-all whose counts are data does not go {how}: the host reads the counts. "
            "fix: leave graph=True and transport='peer' out, so that it goes by NCCL"
        )
    if turn.backend == "peer":
        side = binder.spaces[op.team].side
        issue = bind_exchange(side, spec, sizes, lambda: lane.handle, items, src, dst)
        if issue is None or spec.size == 1:
            return None if issue is None else lane.within(issue)
        return _after_the_last(binder, lane, op.team, issue)
    backend = binder.resources.backends[op.team, turn.backend]
    check = binder.check
    limit = binder.context.timeout_s
    bound = sizes.sized(
        spec.parts, lambda parts: bind_on_stream(backend, replace(spec, parts=parts), limit, counts)
    )

    def run() -> None:
        check()  # Note [Aborts] in nccl.py
        bound.now(None if src is None else items[src], None if dst is None else items[dst])

    return lane.within(run)


def _after_the_last(binder: Binder, lane: Lane, team: str, issue: Thunk) -> Thunk:
    """An exchange after the team's last one: they share flags and staging memory."""
    last = binder.exchanged.get(team)
    mine = EventPoint(binder.driver, binder.event())
    binder.exchanged[team] = lane, mine
    before = [] if last is None or last[0] is lane else [last[1].wait(lane)]
    # Recorded only where a later one stands on another stream.
    ops = binder.plan.program.ops
    streams = {op.stream for op in ops if isinstance(op, Collective) and op.team == team}
    after = [mine.record(lane)] if len(streams) > 1 else []
    return in_turn([*before, issue, *after])


def messages(binder: Binder, lane: Lane, index: int, ops: Sequence[Send | Recv]) -> Thunk:
    backends = {
        (op.team, binder.plan.messages[index, number].backend) for number, op in enumerate(ops)
    }
    if len(backends) > 1:
        raise UnsupportedError(
            f"a group on CUDA has messages of teams {sorted(team for team, _ in backends)}: NCCL "
            "starts those of one team together, and those of another after them. Give each team a "
            "group of its own, on a stream of its own where one may have to wait for the other"
        )
    ((team, name),) = backends
    if name in ("gloo", ""):
        raise UnsupportedError(
            "messages go by NCCL on CUDA: leave the backend of sends and receipts open, or "
            "use one-sided copies (strategy peer)"
        )
    parts = [
        ("send" if isinstance(op, Send) else "recv", binder.plan.members(team, op.peer)[0])
        for op in ops
    ]
    issue = bind_messages(binder.resources.backends[team, name], parts, binder.context.device)
    check, items = binder.check, binder.values.items  # Note [Aborts] in nccl.py
    places = [binder.values.own(op.src if isinstance(op, Send) else op.dst) for op in ops]
    return lane.within(in_turn([check, lambda: issue([items[place] for place in places])]))


def ensure_area(side: CudaSide, topic: str, specs: Sequence[Spec], timeout_s: float) -> None:
    """Staging memory that is large enough for these collectives on every rank."""
    from interlace.kernels.exchange import exchange

    sizes = [
        exchange.staging_nbytes(spec.kind, spec.dtype, largest(spec).parts, spec.size)
        for spec in specs
        if spec.size > 1
    ]
    facts = exchange.FLAG_NBYTES, exchange.WORDS_NBYTES, exchange.STOP_AT
    side.ensure_area(topic, max(sizes, default=0), *facts, timeout_s)


def bind_exchange(
    side: CudaSide,
    spec: Spec,
    sizes: RunSizes,
    handle: Callable[[], int],
    items: Sequence[torch.Tensor],
    src: int | None,
    dst: int | None,
) -> Thunk | None:
    """The function that issues this collective on the stream that `handle` gives; `src` and `dst`
    are places of the table `items`."""
    from interlace.kernels.exchange.exchange import PeerExchange

    if spec.reduce is not None:
        check_reduction(spec.reduce, spec.dtype)
    if spec.kind != "barrier" and not sum(spec.parts):
        return None
    if spec.size == 1:
        return _alone(items, src, dst)
    area = side.the_area

    def exchange_of(parts: tuple[int, ...]) -> PeerExchange:
        return PeerExchange(
            *(spec.kind, spec.dtype, parts, spec.me, spec.size, side.device),
            *(area.stages, area.stage_nbytes, area.flags, area.words),
            reduce=spec.reduce,
            root=spec.root,
            merges=spec.merges,
            seen_by=side.team.seen_by,
        ).prepare()

    bound = sizes.sized(spec.parts, exchange_of)

    def run() -> None:
        into = 0 if dst is None else items[dst].data_ptr()
        bound.now.launch(handle(), into if src is None else items[src].data_ptr(), into)

    return run


def _alone(items: Sequence[torch.Tensor], src: int | None, dst: int | None) -> Thunk | None:
    """A team of one: the source is the result."""
    if src is None or dst is None:
        return None

    def run() -> None:
        a, b = items[src], items[dst]
        if a.data_ptr() != b.data_ptr():
            b.copy_(a)

    return run
