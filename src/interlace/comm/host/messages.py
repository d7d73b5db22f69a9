"""Send and Recv: a rendezvous of two ranks, alone or in a Group whose members block no other.

Both sides meet in shared memory first; the bytes then go by the team's backend or, with the
backend `peer`, through the sender's segment. So a message that nobody takes leaves no half-done
operation in a backend, and a time-out can say who did not come.

    exchange([Outgoing(...), Incoming(...)], [a, b], wait)      # a Group

Note [Both or neither]
    A transfer by a backend blocks until the other side starts it too, and only its time-out ends
    that: whoever leaves because of a failure must not leave the other behind. So each side's cell
    says what it does: away, there, about to go (it saw the other there), going. Whoever is about to
    go looks once more whether the other is there still; whoever leaves says that it is away, waits
    while the other is about to go, and goes along if the other goes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from interlace.comm.collectives import as_bytes
from interlace.comm.host.signals import Wait, fence, stamp
from interlace.comm.host.workspace import Box
from interlace.comm.teams import TeamComm

FIRST_TAG = 1 << 20
"""Tags from here on are ours; users of the same group have the lower ones."""


class Part(Protocol):
    """One member of a Group, bound; it goes begin, try_move until True, end."""

    team: TeamComm
    peer: int

    def begin(self, tensor: torch.Tensor) -> None: ...

    def try_move(self, tensor: torch.Tensor) -> bool: ...

    def leave(self, tensor: torch.Tensor) -> None: ...

    def end(self, wait: Wait) -> None: ...


AWAY, THERE, ABOUT, GOING = range(4)
"""What a side's cell says of this run: Note [Both or neither]."""
SETTLED_S = 1.0
"""How long a side that lives is about to go, at most."""


Cell = tuple[memoryview, int]


class _Meeting:
    """One side of a message by a torch.distributed backend."""

    def __init__(
        self, team: TeamComm, peer: int, own: Cell, other: Cell, start: Callable[..., Any], nth: int
    ) -> None:
        """`start` is the backend's method for this side."""
        self.team = team
        self.peer = peer
        self._own, self._own_at = own
        self._other, self._other_at = other
        self._start = start
        self._tag = FIRST_TAG + nth
        self._run = 0
        self._work: Any = None

    def _say(self, what: int) -> None:
        self._own[self._own_at] = stamp(self._run, what)

    def _hear(self) -> int:
        return self._other[self._other_at]

    def begin(self, tensor: torch.Tensor) -> None:
        """Tells the other side that this rank is there."""
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
        """Leaves because of a failure, if the other side is not going."""
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
        if tensor.numel():
            self._work = self._start([as_bytes(tensor)], self.peer, self._tag)

    def end(self, wait: Wait) -> None:
        """Waits for the transfer."""
        work, self._work = self._work, None
        if work is None:
            return
        begun = time.monotonic()
        try:
            work.wait(timedelta(seconds=wait.time_out_s))
        except RuntimeError as error:
            if time.monotonic() - begun < wait.time_out_s:
                raise
            raise wait.late(self.team.control.where([self.peer])) from error


class Outgoing(_Meeting):
    """A Send by a torch.distributed backend."""

    def __init__(self, team: TeamComm, peer: int, box: Box, backend: Any, nth: int) -> None:
        sent, ready = (box.sent, box.sent_at), (box.ready, box.ready_at)
        super().__init__(team, peer, sent, ready, backend.send, nth)


class Incoming(_Meeting):
    """A Recv by a torch.distributed backend."""

    def __init__(self, team: TeamComm, peer: int, box: Box, backend: Any, nth: int) -> None:
        sent, ready = (box.sent, box.sent_at), (box.ready, box.ready_at)
        super().__init__(team, peer, ready, sent, backend.recv, nth)


class PeerOutgoing:
    """A Send through the sender's shared memory."""

    def __init__(self, team: TeamComm, peer: int, box: Box) -> None:
        self.team = team
        self.peer = peer
        self._box = box

    def begin(self, tensor: torch.Tensor) -> None:
        """Puts the message where the receiver finds it, and tells so."""
        if self._box.data is not None:
            self._box.data[: tensor.nbytes].copy_(as_bytes(tensor))
        self._mark = stamp(self.team.control.run, 1)
        fence()
        self._box.sent[self._box.sent_at] = self._mark

    def try_move(self, tensor: torch.Tensor) -> bool:
        """Whether the receiver has taken it."""
        return self._box.ready[self._box.ready_at] >= self._mark

    def leave(self, tensor: torch.Tensor) -> None:
        """Nothing: it lies where the receiver finds it."""

    def end(self, wait: Wait) -> None:
        """Nothing is left to do."""


class PeerIncoming:
    """A Recv from the sender's shared memory."""

    def __init__(self, team: TeamComm, peer: int, box: Box) -> None:
        self.team = team
        self.peer = peer
        self._box = box

    def begin(self, tensor: torch.Tensor) -> None:
        """Nothing: the receiver answers when it has the message."""

    def try_move(self, tensor: torch.Tensor) -> bool:
        """Takes the message if it is there."""
        mark = stamp(self.team.control.run, 1)
        if self._box.sent[self._box.sent_at] < mark:
            return False
        fence()
        if self._box.data is not None:
            as_bytes(tensor).copy_(self._box.data[: tensor.nbytes])
        fence()
        self._box.ready[self._box.ready_at] = mark
        return True

    def leave(self, tensor: torch.Tensor) -> None:
        """Nothing: the sender waits for an answer, and hears of failures meanwhile."""

    def end(self, wait: Wait) -> None:
        """Nothing is left to do."""


def exchange(parts: Sequence[Part], tensors: Sequence[torch.Tensor], wait: Wait) -> None:
    """Carries out Sends and Recvs together: each moves as soon as its peer is there."""
    packed = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
    _exchange(parts, packed, wait)
    for part, tensor, pack in zip(parts, tensors, packed, strict=True):
        if pack is not tensor and isinstance(part, Incoming | PeerIncoming):
            tensor.copy_(pack)


def _exchange(parts: Sequence[Part], tensors: Sequence[torch.Tensor], wait: Wait) -> None:
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

    try:
        wait.until(moved, missing)
    except BaseException:
        for part, tensor in waiting:
            part.leave(tensor)
        for part in parts:
            with contextlib.suppress(RuntimeError):  # what is raised is the failure
                part.end(wait)
        raise
    for part in parts:
        part.end(wait)
