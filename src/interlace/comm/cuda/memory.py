"""Device memory that every rank of a team maps: plain allocations, shared by CUDA IPC handles.

    memory = share_memory(driver, board, "slots/1", 1 << 26, timeout_s=60)
    memory.bases[2]            # the address, here, of the memory of rank 2 of the team

Handles go through the store, so set-up is bounded. An allocation is a multiple of 2 MiB: smaller
ones would share one with others, and so their handle.

Symmetric slots lie in such memory: two copies of each on every rank. Run n of a team takes copy
n % 2 of every slot, once all ranks have ended their run n - 2 (`CudaSide`): at least as strict as a
Program's own rule. Of what a Program takes within a run: `slot_keys`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from interlace.comm.cuda.driver import Driver
from interlace.comm.host.shared_memory import align
from interlace.comm.host.slots import SlotPool
from interlace.comm.rendezvous.board import Board
from interlace.errors import InterlaceError, PeerError
from interlace.ir import Buffer
from interlace.torch_private import storage_at

GRAIN, ALIGN = 2 << 20, 512
"""Bytes at whose multiples allocations and slots end."""


@dataclass(slots=True)
class PeerMemory:
    """One block on every member of a team, mapped here."""

    driver: Driver
    me: int
    nbytes: int
    bases: tuple[int, ...]

    def unmap(self) -> None:
        for base in self.bases:
            if base != self.bases[self.me]:
                self.driver.close(base)

    def free(self) -> None:
        """Frees the own block, which nobody may map any more."""
        self.driver.free(self.bases[self.me])
        self.bases = ()


def share_memory(
    driver: Driver, board: Board, topic: str, nbytes: int, timeout_s: float
) -> PeerMemory:
    """All ranks of the board allocate a block and map everyone's. Where one fails, all raise its
    error, and give back what no peer can have mapped."""
    size, me = align(max(nbytes, 1), GRAIN), board.me
    problem: InterlaceError | None = None
    base, told, bases = 0, dict[str, object](), list[int]()
    try:
        base = driver.alloc(size, timeout_s)
        told = {"handle": driver.handle(base)}
    except InterlaceError as error:
        problem = error
    try:
        notes = board.exchange(f"{topic}/device memory", told, timeout_s, problem=problem)
    except InterlaceError as error:
        if base and not isinstance(error, PeerError):  # of a lost store: others may have met
            driver.free(base)
        raise
    try:
        for member, their in enumerate(notes):
            own = member == me or their == told  # of a mirror team, all are
            bases.append(base if own else driver.open(their["handle"]))
    except InterlaceError as error:
        problem = error
    try:
        board.exchange(f"{topic}/mapped device memory", {}, timeout_s, problem=problem)
    except InterlaceError:
        for opened in bases:
            if opened != base:
                driver.close(opened)
        raise
    return PeerMemory(driver, me, size, tuple(bases))


def own_memory(driver: Driver, me: int, size: int, nbytes: int, timeout_s: float) -> PeerMemory:
    """A block that no other of the `size` ranks maps, nor has one here: their bases are 0."""
    nbytes = align(nbytes, GRAIN)
    base = driver.alloc(nbytes, timeout_s)
    return PeerMemory(driver, me, nbytes, tuple(base if n == me else 0 for n in range(size)))


def tensor_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Bytes of device memory as a tensor that does not own them."""
    make = storage_at
    storage = make(address, device, nbytes)
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    return empty.set_(storage, 0, (nbytes,), (1,))


def slot_keys(
    takes: Mapping[str, str],
    buffers: Mapping[str, Buffer],
    shared: Callable[[], Mapping[tuple[str, int], int]],
) -> dict[str, str]:
    """The slot of each symmetric buffer. Within a run no rank waits until others have given a slot
    back, so each take of a run has a slot of its own, but for those that are `shared`."""
    counts: dict[str, int] = {}
    found: dict[str, tuple[str, int]] = {}
    for name in takes:
        slot = buffers[name].storage or name
        found[name] = slot, counts.get(slot, 0)
        counts[slot] = counts.get(slot, 0) + 1
    places = shared() if max(counts.values(), default=1) > 1 else dict.fromkeys(found.values(), 0)
    return {
        name: f"{take[0]}#{places[take] + 1}" if places[take] else take[0]
        for name, take in found.items()
    }


class CudaSlot:
    def __init__(
        self, name: str, nbytes: int, memory: PeerMemory, start: int, device: torch.device
    ) -> None:
        self.name, self.nbytes, self.me = name, nbytes, memory.me
        step = align(nbytes, ALIGN)
        self.bases = [(base + start, base + start + step) for base in memory.bases]
        """`bases[member][copy]`: the address, here, of that rank's memory."""
        self.copies = [
            (tensor_at(first, nbytes, device), tensor_at(second, nbytes, device))
            for first, second in self.bases
        ]
        """The same as tensors of bytes."""
        self.gotten = False
        """True if any Executor that has it, of any rank, reads it from its peers' memory."""


class CudaSlotPool(SlotPool):
    """The slots of a team on one device, by name and size."""

    def __init__(self, driver: Driver, board: Board, topic: str, device: torch.device) -> None:
        super().__init__(board, topic)
        self._driver = driver
        self._device = device
        self._memories: list[tuple[PeerMemory, set[tuple[str, int]]]] = []

    def _add(self, topic: str, keys: list[tuple[str, int]], timeout_s: float) -> None:
        total = sum(2 * align(nbytes, ALIGN) for _, nbytes in keys)
        memory = share_memory(self._driver, self._board, topic, total, timeout_s)
        self._memories.append((memory, set(keys)))
        start = 0
        for name, nbytes in keys:
            slot = CudaSlot(name, nbytes, memory, start, self._device)
            self.slots[name, nbytes] = slot  # pyright: ignore
            start += 2 * align(nbytes, ALIGN)

    def _drop(self, topic: str, keys: list[tuple[str, int]], timeout_s: float) -> None:
        super()._drop(topic, keys, timeout_s)
        for _, held in self._memories:
            held.difference_update(keys)
        gone = [memory for memory, held in self._memories if not held]
        if not gone:
            return
        for memory in gone:
            memory.unmap()
        self._memories = [item for item in self._memories if item[1]]
        self._board.exchange(f"{topic}/unmapped", {}, timeout_s)
        for memory in gone:
            memory.free()

    def reset(self) -> None:
        """Nothing: which copy a run takes follows from its number."""
