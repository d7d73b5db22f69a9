"""The kinds of collective through shared memory: the backend `peer`.

Every rank copies what it gives into its staging area, tells so, and reads what it needs from the
others' areas. Two areas are used in turn, so a rank may start the next collective while a peer
still reads. Reductions go in rank order and accumulate in fp32: the same bits on every rank,
whatever the number of chunks.

    run = bind_peer_collective(workspace, Spec("all_reduce", 4, me=0, parts=(64,), ...), number=1)
    run(src, dst, wait)
"""

from __future__ import annotations

import torch

from interlace.comm.collectives import Run, Spec, as_bytes, split
from interlace.comm.reductions import check_reduction, reduce_into
from interlace.comm.signals import Wait, stamp
from interlace.comm.workspace import Workspace


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
    return elements.get(spec.kind, total) * spec.dtype.itemsize


def bind_peer_collective(space: Workspace, spec: Spec, number: int) -> Run:
    """The function that runs this collective, the `number`-th of this backend in its Program."""
    if spec.reduce is not None:
        check_reduction(spec.reduce, spec.dtype)
    nbytes, team, turns = staged_nbytes(spec), space.team, space.turns
    everyone = range(spec.size)

    def staged(member: int, copy: int, elements: int) -> torch.Tensor:
        area = space.stages[member][copy]
        return area[: elements * spec.dtype.itemsize].view(spec.dtype)

    def part_of(member: int, copy: int) -> torch.Tensor:
        parts = (spec.parts[member],) * spec.size if spec.merges else spec.parts
        return split(staged(member, copy, sum(parts)), parts)[spec.me]

    def read(dst: torch.Tensor, copy: int) -> None:
        """This rank's result, from everyone's staging areas."""
        into = dst.reshape(-1)
        match spec.kind:
            case "all_gather" | "gather":
                for member, place in zip(everyone, split(into, spec.parts), strict=True):
                    place.copy_(staged(member, copy, spec.parts[member]))
            case "broadcast":
                into.copy_(staged(spec.root, copy, sum(spec.parts)))
            case "scatter":
                into.copy_(part_of(spec.root, copy))
            case "all_to_all":
                alike = (spec.parts[spec.me],) * spec.size
                taken = split(into, spec.parts if spec.merges else alike)
                for member, place in zip(everyone, taken, strict=True):
                    place.copy_(part_of(member, copy))
            case "reduce_scatter":
                parts = [part_of(member, copy) for member in everyone]
                reduce_into(into, parts, spec.reduce or "sum")
            case _:
                parts = [staged(member, copy, sum(spec.parts)) for member in everyone]
                reduce_into(into, parts, spec.reduce or "sum")

    wants = spec.kind != "barrier" and (
        spec.kind not in ("gather", "reduce") or spec.me == spec.root
    )

    def run(src: torch.Tensor | None, dst: torch.Tensor | None, wait: Wait) -> None:
        if turns.resets != team.resets:
            turns.last, turns.resets = [0, 0], team.resets
        mark = stamp(team.control.run, number)
        copy, turns.next = turns.next, turns.next ^ 1
        space.await_all("done", turns.last[copy], wait)
        if nbytes and src is not None:
            space.stages[spec.me][copy][:nbytes].copy_(as_bytes(src))
        space.arrived(mark)
        space.await_all("arrived", mark, wait)
        if wants and dst is not None and dst.numel():
            read(dst, copy)
        space.done(mark)
        turns.last[copy] = mark

    return run
