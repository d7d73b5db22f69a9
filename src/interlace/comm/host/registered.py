"""Registered parameters: memory that the caller allocated and that peers read and write.

    held = share_on_host(team, "3/tp", {"w": (w, nbytes)}, ("w",), writes=(), timeout_s=60)
    held["w"].copies[1]        # the bytes of the parameter on rank 1 of the team

Ranks exchange where their parameters lie once, while they prepare a Program; runs exchange nothing.
A process cannot map another's private memory: on the CPU, a parameter has a block of shared memory
on each rank. A run copies the tensor in when it begins and out when it has ended, which is when the
caller may look. On CUDA nothing is copied.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from interlace.comm.host.shared_memory import align, share
from interlace.comm.rendezvous.board import Note
from interlace.errors import InterlaceError

if TYPE_CHECKING:
    from interlace.comm.teams import TeamComm

Wanted = Mapping[str, tuple[torch.Tensor, int]]


@dataclass(frozen=True, slots=True)
class Registered:
    """One registered parameter, on all ranks of its team."""

    tensor: torch.Tensor
    """The caller's; it stays alive as long as this does."""
    me: int
    copies: tuple[torch.Tensor, ...]
    """The bytes of each member's, as reached from here, from its first element on."""
    written: bool
    input: bool = True
    staged: torch.Tensor | None = None
    """On the CPU: the block that peers reach, with the sizes and strides of the tensor."""
    mappings: tuple[tuple[int, int], ...] = ()
    """On CUDA: what of the peers' memory is mapped here for it."""
    address: int = field(init=False)
    """Where the tensor lay when it was registered: where peers reach it."""
    memory: torch.UntypedStorage = field(init=False)
    """Its storage then, which stays alive whatever becomes of the tensor."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", self.tensor.data_ptr())
        object.__setattr__(self, "memory", self.tensor.untyped_storage())

    def enter(self) -> None:
        if self.staged is not None and self.input:
            self.staged.copy_(self.tensor)

    def leave(self) -> None:
        if self.staged is not None and self.written:
            self.tensor.copy_(self.staged)


def tell(
    team: TeamComm,
    topic: str,
    note: Note,
    writes: Collection[str],
    problem: InterlaceError | None,
    timeout_s: float,
) -> tuple[list[Note], frozenset[str]]:
    """Exchanges notes on what is registered; gives the names that any rank writes."""
    told = {"note": note, "writes": sorted(writes)}
    place = f"{team.topic}/registered/{topic}/registered parameters"
    notes = team.board.exchange(place, told, timeout_s, problem=problem)
    return [n["note"] for n in notes], frozenset(name for n in notes for name in n["writes"])


def share_on_host(
    team: TeamComm,
    topic: str,
    wanted: Wanted,
    inputs: Collection[str],
    writes: Collection[str],
    timeout_s: float,
) -> dict[str, Registered]:
    """Blocks of shared memory for parameters in the memory of the CPU; all ranks call it."""
    _, written = tell(team, topic, {}, writes, None, timeout_s)
    total = sum(align(nbytes) for _, nbytes in wanted.values())
    place = f"{team.topic}/registered/{topic}"
    shared, start = share(team.board, place, total, {}, timeout_s), 0
    held: dict[str, Registered] = {}
    for name, (tensor, nbytes) in sorted(wanted.items()):
        copies = tuple(segment.bytes(start, nbytes) for segment in shared.segments)
        start += align(nbytes)
        mine = copies[team.me]
        staged = torch.empty(0, dtype=tensor.dtype)
        at = int(mine.storage_offset()) // tensor.itemsize
        staged.set_(mine.untyped_storage(), at, tensor.shape, tensor.stride())  # pyright: ignore
        held[name] = Registered(tensor, team.me, copies, name in written, name in inputs, staged)
    return held
