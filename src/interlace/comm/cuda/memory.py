"""Device memory that every rank of a team maps: plain allocations, shared by CUDA IPC handles.

    memory = share_memory(driver, board, "slots/1", ranks, me, 1 << 26, note={}, time_out_s=60)
    memory.bases[2]            # the address, here, of the memory of rank 2 of the team

Handles go through the store, so set-up is bounded and needs neither MPI nor multicast objects. An
allocation is a multiple of 2 MiB: smaller ones would share one with others, and so their handle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from interlace.comm.cuda.driver import Driver
from interlace.comm.host.sharing import meet
from interlace.comm.rendezvous.board import Board, Note, failure
from interlace.errors import InterlaceError, PeerError

GRAIN = 2 << 20


def rounded(nbytes: int) -> int:
    """Bytes of the allocation that holds so many."""
    return max(-(-nbytes // GRAIN), 1) * GRAIN


@dataclass(slots=True)
class PeerMemory:
    """One block on every member of a team, mapped here, with each member's note."""

    driver: Driver
    me: int
    nbytes: int
    bases: tuple[int, ...]
    notes: tuple[Note, ...]

    def unmap(self) -> None:
        """Unmaps the others' blocks."""
        for member, base in enumerate(self.bases):
            if member != self.me:
                self.driver.close(base)

    def free(self) -> None:
        """Frees the own block, which nobody may map any more."""
        self.driver.free(self.bases[self.me])
        self.bases = ()


def share_memory(
    driver: Driver,
    board: Board,
    topic: str,
    ranks: Sequence[int],
    me: int,
    nbytes: int,
    note: Note,
    time_out_s: float,
) -> PeerMemory:
    """Every rank of `ranks` allocates a block and maps everyone's. All of them call this.

    Where one fails, all raise its error, and give back what no peer can have mapped.
    """
    rank, size = ranks[me], rounded(nbytes)
    problem: InterlaceError | None = None
    base = 0
    try:
        base = driver.alloc(size, time_out_s)
        told: Note = {"handle": driver.handle(base), "note": note}
    except InterlaceError as error:
        problem, told = error, failure(error)
    try:
        notes = meet(board, f"{topic}/device memory", ranks, rank, told, time_out_s, problem)
    except InterlaceError as error:
        if base and not isinstance(
            error, PeerError
        ):  # of a store that is lost: others may have met
            driver.free(base)
        raise
    bases: list[int] = []
    try:
        for member, their in enumerate(notes):
            bases.append(base if member == me else driver.open(their["handle"]))
        told = {}
    except InterlaceError as error:
        problem, told = error, failure(error)
    try:
        meet(board, f"{topic}/mapped device memory", ranks, rank, told, time_out_s, problem)
    except InterlaceError:
        for member, opened in enumerate(bases):
            if member != me:
                driver.close(opened)
        raise
    their_notes = tuple(their["note"] for their in notes)
    return PeerMemory(driver, me, size, tuple(bases), their_notes)


def tensor_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Bytes of device memory as a tensor that does not own them."""
    make = torch._C._construct_storage_from_data_pointer  # pyright: ignore
    storage = make(address, device, nbytes)
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    return empty.set_(storage, 0, (nbytes,), (1,))
