"""Send and Recv: a rendezvous of two ranks, alone or in a Group whose members block no other.

The sides meet in the backend itself, gloo or UCC; `peer` has none, and messages go by gloo. A side
that leaves a message because of a failure cuts gloo's connections, so that none of its peers stays
behind: they find the failure in the control block, and `reset()` makes new connections.

    exchange([Transfer(..., sends=True), Transfer(..., sends=False)], [a, b], wait)      # a Group
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from interlace.comm.backends import MARGIN_S, cut
from interlace.comm.collectives import as_bytes
from interlace.comm.host.signals import BoundedWait, leave
from interlace.comm.rendezvous.patience import Errand
from interlace.comm.teams import TeamComm

LOOK_S = 0.05
"""Time for a transfer that has ended to say so, when a wait for several is over."""


class Transfer:
    """One side of a message by a torch.distributed backend, in which both sides meet."""

    def __init__(
        self, team: TeamComm, peer: int, sends: bool, backend: Any = None, nth: int = 0
    ) -> None:
        self.team, self.peer, self.sends = team, peer, sends
        self.backend, self._tag = backend, nth
        self.works: list[Any] = []
        """Works that were started in the backend for this run."""
        self._ended: list[Any] = []
        """Works that have ended. One thread at a time waits, for gloo tells an end once."""
        self._turn = threading.Lock()

    def begin(self, tensor: torch.Tensor) -> None:
        """Starts the transfer. `extend` calls it and keeps its Work in one step, between which no
        interrupt comes: a Work that is lost has no end."""
        self.works, self._ended, self._turn = [], [], threading.Lock()
        if tensor.numel():
            start = self.backend.send if self.sends else self.backend.recv
            self.works.extend(map(start, [[as_bytes(tensor)]], [self.peer], [self._tag]))

    def try_move(self, tensor: torch.Tensor) -> bool:
        """Returns True once this side has done what it does before the transfer's end."""
        return True

    def ending(self, limit: timedelta) -> Callable[[], None]:
        """Returns a function that waits, in a thread, for the end of the started works."""
        works, ended, turn = self.works, self._ended, self._turn

        def wait() -> None:
            with turn:
                for work in works[len(ended) :]:
                    work.wait(limit)
                    ended.append(work)

        return wait


@dataclass(slots=True)
class OwnMessage:
    """A message of a rank to itself: the tensor, and the runs in which the sides came to it."""

    tensor: torch.Tensor | None = None
    sent: int = 0
    taken: int = 0


class OwnTransfer(Transfer):
    """One side of a message of a rank to itself, for which gloo has no connection."""

    def __init__(self, team: TeamComm, peer: int, sends: bool, message: OwnMessage) -> None:
        super().__init__(team, peer, sends)
        self._message = message

    def begin(self, tensor: torch.Tensor) -> None:
        if self.sends:
            self._message.tensor = tensor
            self._message.sent = self.team.control.run

    def try_move(self, tensor: torch.Tensor) -> bool:
        """The receiver takes the message if it is there; the sender looks whether it was taken."""
        message, run = self._message, self.team.control.run
        if self.sends:
            return message.taken == run
        if message.sent != run or message.tensor is None:
            return False
        tensor.copy_(message.tensor.view(tensor.shape))
        message.tensor, message.taken = None, run
        return True


def exchange(parts: Sequence[Transfer], tensors: Sequence[torch.Tensor], wait: BoundedWait) -> None:
    """Carries out Sends and Recvs together: each moves as soon as its peer is there."""
    packed = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
    try:
        _move(parts, packed, wait)
        _end(parts, wait)
    except BaseException:
        _leave(parts)
        raise
    for part, tensor, pack in zip(parts, tensors, packed, strict=True):
        if pack is not tensor and not part.sends:
            tensor.copy_(pack)


def _move(parts: Sequence[Transfer], tensors: Sequence[torch.Tensor], wait: BoundedWait) -> None:
    for part in parts:
        part.team.control.meet(part.peer, wait)
    for part, tensor in zip(parts, tensors, strict=True):
        part.begin(tensor)
    waiting = list(zip(parts, tensors, strict=True))

    def moved() -> bool:
        waiting[:] = [(part, tensor) for part, tensor in waiting if not part.try_move(tensor)]
        return not waiting

    def missing() -> str:
        return "\n".join(part.team.control.where([part.peer]) for part, _ in waiting)

    wait.until(moved, missing)


def _end(parts: Sequence[Transfer], wait: BoundedWait) -> None:
    """Waits for the ends of what was started. A thread waits in gloo, whose own clock also runs
    while a whole job is paused, and which breaks its connections where a wait is given up."""
    if not any(part.works for part in parts):
        return

    def missing() -> str:
        calls = [(part, _ends([part], wait.timeout_s)) for part in parts if part.works]
        late = [part for part, call in calls if not call.is_back(LOOK_S)]
        return "\n".join(part.team.control.where([part.peer]) for part in late)

    wait.result_of(_ends(parts, wait.timeout_s), missing)


def _ends(parts: Sequence[Transfer], timeout_s: float) -> Errand:
    limit = timedelta(seconds=timeout_s + MARGIN_S)
    waits = [part.ending(limit) for part in parts]
    return Errand(lambda: [wait() for wait in waits])


def _leave(parts: Sequence[Transfer]) -> None:
    """After a failure: the transfers end soon, as their other sides are there, or are cut off."""
    if any(part.works for part in parts):
        call = _ends(parts, 0.0)
        leave(lambda: call.is_back(0.0), lambda: _cut(parts))


def _cut(parts: Sequence[Transfer]) -> None:
    for part in parts:
        if part.works:
            cut(part.backend)
