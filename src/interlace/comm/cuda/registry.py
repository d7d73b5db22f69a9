"""Memory of callers that peers map: any CUDA tensor, by the IPC handle of the allocation it is in.

    registry = side.registry
    held = registry.register("3/tp", {"w": (w, nbytes)}, ("w",), writes=(), timeout_s=60)
    held["w"].copies[1]         # the bytes of rank 1's tensor, mapped here
    registry.let_go(held["w"])  # by whoever got it, when none of its runs is under way

Note [Mapped once]
    A handle names a whole allocation (a segment of torch's caching allocator). Ranks exchange, once
    for all parameters of a Program, the handle, the driver's number of the allocation, which is
    never used again, and where in it the tensor lies. A mapping stands under (member, number) and
    counts its users: tensors of one allocation, and Programs, share it. It ends with its last user.

Note [Let go at any time]
    Executors end in any thread, and in finalizers, which may begin amid what is done here, in the
    same thread. So books are changed under a re-entrant lock, a mapping counts as used before
    anything else is done with it, and what ends one looks whether it still stands in the books. No
    lock is held while peers are waited for.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from interlace.comm.cuda.driver import Driver
from interlace.comm.cuda.memory import tensor_at
from interlace.comm.host.registered import Registered, Wanted, tell
from interlace.comm.rendezvous.board import Note
from interlace.errors import BackendError, InterlaceError

if TYPE_CHECKING:
    from interlace.comm.teams import TeamComm

Key = tuple[int, int]


@dataclass(slots=True)
class MappedAllocation:
    """An allocation of a peer's, mapped here."""

    base: int
    users: int = 1


class Registry:
    """Tensors that the ranks of a team have registered on their devices."""

    def __init__(self, team: TeamComm, driver: Driver, device: torch.device) -> None:
        self._team, self._driver, self._device = team, driver, device
        self._lock = threading.RLock()
        self.mapped: dict[Key, MappedAllocation] = {}
        """Allocations of peers that are mapped here."""

    def register(
        self,
        topic: str,
        wanted: Wanted,
        inputs: Collection[str],
        writes: Collection[str],
        timeout_s: float,
    ) -> dict[str, Registered]:
        """Makes these tensors reachable on every rank of the team, or raises on every rank."""
        team, note = self._team, dict[str, Any]()
        problem: InterlaceError | None = None
        try:
            note = {name: self._describe(name, *wanted[name]) for name in sorted(wanted)}
        except Exception as error:
            problem = _as_ours(error, "told to its peers")
        notes, written = tell(team, topic, note, writes, problem, timeout_s)
        held: dict[str, Registered] = {}
        with contextlib.ExitStack() as failed:
            try:
                for name, (tensor, nbytes) in wanted.items():
                    copies, keys = self._map(name, tensor, nbytes, notes)
                    facts = name in written, name in inputs
                    held[name] = Registered(tensor, team.me, copies, *facts, mappings=keys)
                    failed.callback(self.let_go, held[name])
            except Exception as error:
                problem = _as_ours(error, "mapped")
            place = f"{team.topic}/registered/{topic}/mapped parameters"
            team.board.exchange(place, {}, timeout_s, problem=problem)
            failed.pop_all()
        return held

    def _describe(self, name: str, tensor: torch.Tensor, nbytes: int) -> list[str | int]:
        """Data with which peers map a tensor: handle, number of the allocation, offset."""
        driver, address = self._driver, tensor.data_ptr()
        if not nbytes:
            return ["", 0, 0]
        if not driver.can_share(address):
            raise BackendError(
                f"the registered parameter {name!r} lies in memory that other processes cannot map "
                "by a CUDA IPC handle, such as that of expandable segments or of cudaMallocAsync: "
                "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False,backend:native before the "
                "first tensor on the GPU is made, or use a symmetric buffer"
            )
        base, size = driver.allocation(address)
        if address + nbytes > base + size:
            raise BackendError(
                f"the registered parameter {name!r} spans several allocations of CUDA memory: "
                "register a tensor that lies in one, such as torch.empty makes it"
            )
        return [driver.handle(base), driver.buffer_id(base), address - base]

    def _map(
        self, name: str, tensor: torch.Tensor, nbytes: int, notes: list[Note]
    ) -> tuple[tuple[torch.Tensor, ...], tuple[Key, ...]]:
        if not nbytes:
            return (torch.empty(0, dtype=torch.uint8, device=self._device),) * len(notes), ()
        copies: list[torch.Tensor] = []
        keys: list[Key] = []
        try:
            for member, theirs in enumerate(notes):
                handle, number, offset = theirs[name]
                address, key = tensor.data_ptr(), (member, int(number))
                if member != self._team.me:
                    address = self._use(key, handle).base + int(offset)
                    keys.append(key)
                copies.append(tensor_at(address, nbytes, self._device))
        except BaseException:
            self._release(keys)
            raise
        return tuple(copies), tuple(keys)

    def _use(self, key: Key, handle: str) -> MappedAllocation:
        with self._lock:
            mapping = self.mapped.get(key)
            if mapping is not None:
                mapping.users += 1
                if self.mapped.get(key) is mapping:  # a finalizer may have ended it before
                    return mapping
            mapping = self.mapped[key] = MappedAllocation(self._driver.open(handle))
            return mapping

    def let_go(self, held: Registered) -> None:
        """Releases a tensor that `register` returned; no run that used it may be under way."""
        self._release(held.mappings)

    def _release(self, keys: Iterable[Key]) -> None:
        with self._lock:
            for key in keys:
                mapping = self.mapped.get(key)
                if mapping is None:
                    continue
                mapping.users -= 1
                if not mapping.users and self.mapped.pop(key, None) is mapping:
                    on_gpu = self._device.type == "cuda"
                    with torch.cuda.device(self._device) if on_gpu else contextlib.nullcontext():
                        self._driver.close(mapping.base)


def _as_ours(error: Exception, what: str) -> InterlaceError:
    if isinstance(error, InterlaceError):
        return error
    ours = BackendError(
        f"registered parameters could not be {what}: {type(error).__name__}: {error}"
    )
    ours.__cause__ = error
    return ours
