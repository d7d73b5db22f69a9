"""Symmetric slots in device memory: two copies of each on every rank, used in turn.

Run n of a team on this device takes copy n % 2 of every slot, once all ranks have ended their run
n - 2 (`CudaSide`), so one rule stands for the takes of all slots. It is at least as strict as a
Program's own rule (a take awaits every rank's Free of the take before the last). A Program that
takes a slot more than once in a run has a slot for each of these takes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from interlace.comm.cuda.driver import Driver
from interlace.comm.cuda.memory import PeerMemory, share_memory, tensor_at
from interlace.comm.host.slots import SlotPool, Use
from interlace.comm.rendezvous.board import Board
from interlace.ir import Buffer

ALIGN = 512


def slot_keys(takes: Mapping[str, str], buffers: Mapping[str, Buffer]) -> dict[str, str]:
    """The slot of each symmetric buffer, apart for every take of a run."""
    found: dict[str, str] = {}
    seen: dict[str, int] = {}
    for name in takes:
        slot = buffers[name].storage or name
        number = seen[slot] = seen.get(slot, 0) + 1
        found[name] = slot if number == 1 else f"{slot}#{number}"
    return found


class CudaSlot:
    """Two copies of a block of device memory on every rank."""

    def __init__(
        self, name: str, nbytes: int, memory: PeerMemory, start: int, device: torch.device
    ) -> None:
        self.name = name
        self.nbytes = nbytes
        self.me = memory.me
        step = -(-nbytes // ALIGN) * ALIGN
        self.bases = [(base + start, base + start + step) for base in memory.bases]
        """`bases[member][copy]`: the address, here, of that rank's memory."""
        self.copies = [
            (tensor_at(first, nbytes, device), tensor_at(second, nbytes, device))
            for first, second in self.bases
        ]
        """The same as tensors of bytes."""
        self.gotten = False
        """Whether any Executor that has it, of any rank, reads it from its peers' memory."""

    def next_use(self) -> Use:
        """Runs of the team say which copy it is, not the slot."""
        raise NotImplementedError


class CudaSlotPool(SlotPool):
    """The slots of a team on one device, by name and size."""

    def __init__(
        self,
        driver: Driver,
        board: Board,
        topic: str,
        ranks: tuple[int, ...],
        me: int,
        device: torch.device,
    ) -> None:
        super().__init__(board, topic, ranks, me)
        self._driver = driver
        self._device = device
        self._memories: list[tuple[PeerMemory, set[tuple[str, int]]]] = []
        """Each block, and the slots that lie in it."""

    def _add(self, topic: str, keys: list[tuple[str, int]], time_out_s: float) -> None:
        starts: list[int] = []
        total = 0
        for _, nbytes in keys:
            starts.append(total)
            total += 2 * (-(-nbytes // ALIGN) * ALIGN)
        memory = share_memory(
            *(self._driver, self._board, topic, self._ranks, self._me),
            *(total, {}, time_out_s),
        )
        self._memories.append((memory, set(keys)))
        for (name, nbytes), start in zip(keys, starts, strict=True):
            slot = CudaSlot(name, nbytes, memory, start, self._device)
            self.slots[name, nbytes] = slot  # pyright: ignore

    def _drop(self, topic: str, keys: list[tuple[str, int]], time_out_s: float) -> None:
        """Frees the blocks of which no slot is left, once no rank maps them."""
        super()._drop(topic, keys, time_out_s)
        gone: list[PeerMemory] = []
        for memory, held in self._memories:
            held.difference_update(keys)
            if not held:
                memory.unmap()
                gone.append(memory)
        if not gone:
            return
        self._memories = [item for item in self._memories if item[1]]
        rank = self._ranks[self._me]
        self._board.exchange(f"{topic}/unmapped", self._ranks, rank, {}, time_out_s)
        for memory in gone:
            memory.free()

    def reset(self) -> None:
        """Nothing: which copy a run takes follows from its number."""
