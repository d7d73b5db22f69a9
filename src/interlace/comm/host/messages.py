"""Send and Recv: a rendezvous of two ranks, alone or in a Group whose members block no other.

Both sides meet in shared memory first; the bytes then go by the team's backend or, with the
backend `peer`, through the sender's segment. So a message that nobody takes leaves no half-done
operation in a backend, and a time-out can say who did not come.

    exchange([Transfer(..., sends=True), Transfer(..., sends=False)], [a, b], wait)      # a Group

Note [Both or neither]
    A transfer by a backend blocks until the other side starts it too, and only its time-out ends
    that: whoever leaves because of a failure must not leave the other behind. So each side's cell
    says what it does: away, there, about to go (it saw the other there), going. Whoever is about to
    go looks once more whether the other is there still; whoever leaves says that it is away, waits
    while the other is about to go, and goes along if the other goes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from interlace.comm.backends import MARGIN_S, cut
from interlace.comm.collectives import as_bytes
from interlace.comm.host.signals import BoundedWait, fence, leave, stamp
from interlace.comm.host.workspace import MessageBox
from interlace.comm.rendezvous.patience import Errand
from interlace.comm.teams import TeamComm

AWAY, THERE, ABOUT, GOING = range(4)
"""States in a side's cell for this run: Note [Both or neither]."""
SETTLED_S = 1.0
"""Longest time for which a live side is about to go."""


class Transfer:
    """One side of a message by a torch.distributed backend: begin, then try_move until True; its
    `works` end later. An interrupt may come between any two steps: `leave` does what is left."""

    def __init__(
        self,
        team: TeamComm,
        peer: int,
        box: MessageBox,
        sends: bool,
        backend: Any = None,
        nth: int = 0,
    ) -> None:
        self.team, self.peer, self.sends = team, peer, sends
        self._box, self.backend, self._tag = box, backend, nth
        (self._own, self._own_at), (self._other, self._other_at) = (
            (box.sent, box.ready) if sends else (box.ready, box.sent)
        )
        self._run = 0
        self.works: list[Any] = []
        """Works that were started in the backend for this run."""
        self._ended: list[Any] = []
        """Works that have ended. One thread at a time waits, for gloo tells an end once."""
        self._turn = threading.Lock()

    def _say(self, what: int) -> None:
        self._own[self._own_at] = stamp(self._run, what)

    def _hear(self) -> int:
        return self._other[self._other_at]

    def begin(self, tensor: torch.Tensor) -> None:
        """Tells the other side that this rank is there."""
        self._forget()
        self._run = self.team.control.run
        fence()
        self._say(THERE)

    def try_move(self, tensor: torch.Tensor) -> bool:
        """Starts the transfer once the other side is there."""
        there = stamp(self._run, THERE)
        if self._hear() < there:
            return False
        self._say(ABOUT)
        fence()
        if self._hear() < there:
            self._say(THERE)
            return False
        self._go(tensor)
        return True

    def leave(self, tensor: torch.Tensor) -> None:
        """Leaves because of a failure, if neither side is going."""
        if self._run != self.team.control.run:
            return  # it has not begun
        if self._own[self._own_at] == stamp(self._run, GOING):
            return self._go(tensor)
        self._say(AWAY)
        fence()
        about, deadline = stamp(self._run, ABOUT), time.monotonic() + SETTLED_S
        while self._hear() == about and time.monotonic() < deadline:
            time.sleep(1e-4)
        if self._hear() > about:
            self._go(tensor)

    def _go(self, tensor: torch.Tensor) -> None:
        self._say(GOING)
        fence()
        self._start(tensor)

    def _start(self, tensor: torch.Tensor) -> None:
        """Starts the transfer, once. `extend` calls it and keeps its Work in one step, between
        which no interrupt comes: a Work that is lost has no end."""
        if tensor.numel() and not self.works:
            start = self.backend.send if self.sends else self.backend.recv
            self.works.extend(map(start, [[as_bytes(tensor)]], [self.peer], [self._tag]))

    def _forget(self) -> None:
        self.works, self._ended = [], []
        self._turn = threading.Lock()

    def ending(self, limit: timedelta) -> Callable[[], None]:
        """Returns a function that waits, in a thread, for the end of the started works."""
        works, ended, turn = self.works, self._ended, self._turn

        def wait() -> None:
            with turn:
                for work in works[len(ended) :]:
                    work.wait(limit)
                    ended.append(work)

        return wait


class HostsTransfer(Transfer):
    """One side of a message between hosts: the sides meet in gloo itself. Who leaves cuts it."""

    def begin(self, tensor: torch.Tensor) -> None:
        self._forget()
        self._start(tensor)

    def try_move(self, tensor: torch.Tensor) -> bool:
        return True

    def leave(self, tensor: torch.Tensor) -> None:
        """Ends the transfer, and all others of the team."""
        cut(self.backend)


class PeerTransfer(Transfer):
    """One side of a message through shared memory; a receiver is there once it has taken it."""

    def begin(self, tensor: torch.Tensor) -> None:
        """The sender puts the message where the receiver finds it, and tells so."""
        self._run = self.team.control.run
        if self.sends:
            if self._box.data is not None:
                self._box.data[: tensor.nbytes].copy_(as_bytes(tensor))
            fence()
            self._say(THERE)

    def try_move(self, tensor: torch.Tensor) -> bool:
        """The receiver takes the message if it is there; the sender looks whether it was taken."""
        if self._hear() < stamp(self._run, THERE):
            return False
        if not self.sends:
            fence()
            if self._box.data is not None:
                as_bytes(tensor).copy_(self._box.data[: tensor.nbytes])
            fence()
            self._say(THERE)
        return True

    def leave(self, tensor: torch.Tensor) -> None:
        """Nothing: the other side hears of the failure."""


def exchange(parts: Sequence[Transfer], tensors: Sequence[torch.Tensor], wait: BoundedWait) -> None:
    """Carries out Sends and Recvs together: each moves as soon as its peer is there."""
    packed = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
    try:
        _move(parts, packed, wait)
        _end(parts, wait)
    except BaseException:
        for part, tensor in zip(parts, packed, strict=True):
            with contextlib.suppress(RuntimeError):  # gloo's, of a peer that is gone
                part.leave(tensor)
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
        return "\n".join(part.team.control.where([part.peer]) for part in parts if part.works)

    wait.result_of(_ends(parts, wait.timeout_s), missing)


def _ends(parts: Sequence[Transfer], timeout_s: float) -> Errand:
    limit = timedelta(seconds=timeout_s + MARGIN_S)
    waits = [part.ending(limit) for part in parts]
    return Errand(lambda: [wait() for wait in waits])


def _leave(parts: Sequence[Transfer]) -> None:
    """After a failure: the other sides that are going take part to the end, or are cut off."""
    if any(part.works for part in parts):
        call = _ends(parts, 0.0)
        leave(lambda: call.is_back(0.0), lambda: _cut(parts))


def _cut(parts: Sequence[Transfer]) -> None:
    for part in parts:
        if part.works:
            cut(part.backend)
