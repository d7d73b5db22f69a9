"""The kinds of collective through shared memory: the backend `peer`.

Every rank copies what it gives into its staging area, tells so, and reads what it needs from the
others' areas. The rendezvous before each collective (`Control.reach`) says that everybody has left
the one before it, so one area is enough. Reductions go in rank order and accumulate in fp32: the
same bits on every rank, whatever the number of chunks.

    run = bind_peer_collective(workspace, Spec("all_reduce", 4, me=0, parts=(64,), ...), number=1)
    control.reach(queue, 1, wait)
    run(src, dst, wait)
"""

from __future__ import annotations

import math
from typing import Any

import torch

from interlace.comm.collectives import (
    Counts,
    Moves,
    Run,
    Spec,
    as_bytes,
    check_reduction,
    reduce_into,
    split,
)
from interlace.comm.host.signals import BoundedWait, stamp
from interlace.comm.host.workspace import Workspace


def staged_nbytes(spec: Spec) -> int:
    """Bytes that this rank copies into its staging area."""
    total, own = sum(spec.parts), spec.parts[spec.me] if len(spec.parts) == spec.size else 0
    elements = {
        "all_gather": own,
        "gather": own,
        "broadcast": total if spec.me == spec.root else 0,
        "scatter": total if spec.me == spec.root else 0,
        "barrier": 0,
    }
    if spec.merges:
        total = spec.size * spec.parts[spec.me]
    if spec.counted:
        return 8 * spec.size + total * spec.dtype.itemsize
    return elements.get(spec.kind, total) * spec.dtype.itemsize


def bind_peer_collective(
    space: Workspace, spec: Spec, number: int, counts: Counts | None = None
) -> Run:
    """The function that runs this collective, the `number`-th of this backend in its Program."""
    if counts is not None:
        counted: Any = _counted(space, spec, number, counts)
        return counted
    if spec.reduce is not None:
        check_reduction(spec.reduce, spec.dtype)
    nbytes, team = staged_nbytes(spec), space.team

    def staged(member: int) -> torch.Tensor:
        """The part of a member's staging area that this rank takes."""
        parts = (spec.parts[member],) * spec.size if spec.merges else spec.parts
        elements = parts[member] if spec.kind in ("all_gather", "gather") else sum(parts)
        area = space.stages[member][: elements * spec.dtype.itemsize].view(spec.dtype)
        if spec.kind in ("scatter", "reduce_scatter", "all_to_all"):
            return split(area, parts)[spec.me]
        return area

    def read(dst: torch.Tensor) -> None:
        """This rank's result, from everyone's staging areas."""
        into = dst.reshape(-1)
        if spec.kind in ("broadcast", "scatter"):
            into.copy_(staged(spec.root))
            return
        taken = [staged(member) for member in range(spec.size)]
        if spec.kind in ("all_gather", "gather", "all_to_all"):
            places = into.split([part.numel() for part in taken])
            for place, part in zip(places, taken, strict=True):
                place.copy_(part)
        else:
            reduce_into(taken, spec.reduce or "sum", out=into)

    rooted = spec.kind in ("gather", "reduce") and spec.me != spec.root
    wants = spec.kind != "barrier" and not rooted

    def run(src: torch.Tensor | None, dst: torch.Tensor | None, wait: BoundedWait) -> None:
        mark = stamp(team.control.run, number)
        if nbytes and src is not None:
            space.stages[spec.me][:nbytes].copy_(as_bytes(src))
        space.arrived(mark)
        space.await_arrivals(mark, wait)
        if wants and dst is not None and dst.numel():
            read(dst)

    return run


def _counted(space: Workspace, spec: Spec, number: int, counts: Counts) -> Moves:
    """An all-to-all whose counts are data: each area has what its rank sends to each, then rows."""
    me, head = spec.me, 8 * spec.size

    def run(src: torch.Tensor, dst: torch.Tensor, wait: BoundedWait) -> None:
        sent, received = counts.tensors()
        mark, own = stamp(space.team.control.run, number), space.stages[me]
        given, counts.received = sent.tolist(), received.tolist()
        counts.sent = given
        # Before it arrives, so that peers, which wait for it, hear of the error.
        counts.check(counts.received, src.shape[0], dst.shape[0], me)
        width = math.prod(dst.shape[1:]) * dst.element_size()
        rows = as_bytes(src[: sum(given)])
        own[:head].copy_(as_bytes(sent))
        own[head : head + rows.numel()].copy_(rows)
        space.arrived(mark)
        space.await_arrivals(mark, wait)
        all_sent = [stage[:head].view(torch.int64).tolist() for stage in space.stages]
        told = [counts_of[me] for counts_of in all_sent]
        counts.check(told, src.shape[0], dst.shape[0], me)
        start = 0
        for stage, counts_of in zip(space.stages, all_sent, strict=True):
            first, count = sum(counts_of[:me]), counts_of[me]
            part = stage[head + first * width : head + (first + count) * width]
            as_bytes(dst[start : start + count]).copy_(part)
            start += count
        dst[start:].zero_()

    return run
