"""Device memory that every rank of a team maps: plain allocations, shared by CUDA IPC handles.

    memory = share_memory(driver, board, "slots/1", 1 << 26, time_out_s=60)
    memory.bases[2]            # the address, here, of the memory of rank 2 of the team

Handles go through the store, so set-up is bounded and needs neither MPI nor multicast objects. An
allocation is a multiple of 2 MiB: smaller ones would share one with others, and so their handle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from interlace.comm.cuda.driver import Driver
from interlace.comm.rendezvous.board import Board
from interlace.errors import InterlaceError, PeerError

GRAIN = 2 << 20


def rounded(nbytes: int) -> int:
    """Bytes of the allocation that holds so many."""
    return max(-(-nbytes // GRAIN), 1) * GRAIN


@dataclass(slots=True)
class PeerMemory:
    """One block on every member of a team, mapped here."""

    driver: Driver
    me: int
    nbytes: int
    bases: tuple[int, ...]

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
    driver: Driver, board: Board, topic: str, nbytes: int, time_out_s: float
) -> PeerMemory:
    """Every rank of the board allocates a block and maps everyone's. All of them call this.

    Where one fails, all raise its error, and give back what no peer can have mapped.
    """
    size, me = rounded(nbytes), board.ranks.index(board.rank)
    problem: InterlaceError | None = None
    base, told, bases = 0, dict[str, object](), list[int]()
    try:
        base = driver.alloc(size, time_out_s)
        told = {"handle": driver.handle(base)}
    except InterlaceError as error:
        problem = error
    try:
        place = f"{topic}/device memory"
        notes = board.exchange(place, told, time_out_s, problem=problem)
    except InterlaceError as error:
        if base and not isinstance(error, PeerError):  # of a lost store: others may have met
            driver.free(base)
        raise
    try:
        for member, their in enumerate(notes):
            bases.append(base if member == me else driver.open(their["handle"]))
    except InterlaceError as error:
        problem = error
    try:
        place = f"{topic}/mapped device memory"
        board.exchange(place, {}, time_out_s, problem=problem)
    except InterlaceError:
        for member, opened in enumerate(bases):
            if member != me:
                driver.close(opened)
        raise
    return PeerMemory(driver, me, size, tuple(bases))


def tensor_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Bytes of device memory as a tensor that does not own them."""
    make = torch._C._construct_storage_from_data_pointer  # pyright: ignore
    storage = make(address, device, nbytes)
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    return empty.set_(storage, 0, (nbytes,), (1,))
