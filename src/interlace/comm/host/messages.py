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
from typing import Any

import torch

from interlace.comm.collectives import as_bytes
from interlace.comm.host.signals import Wait, fence, stamp
from interlace.comm.host.workspace import Cell, MessageBox
from interlace.comm.teams import TeamComm

FIRST_TAG = 1 << 20
"""Tags from here on are ours; users of the same group have the lower ones."""


class MessagePart:
    """One member of a Group, bound; it goes begin, try_move until True, end."""

    def __init__(self, team: TeamComm, peer: int, box: MessageBox) -> None:
        self.team, self.peer, self._box = team, peer, box

    def begin(self, tensor: torch.Tensor) -> None:
        """Tells the other side that this rank is there."""

    def try_move(self, tensor: torch.Tensor) -> bool:
        """Moves the message, if the other side is there."""
        raise NotImplementedError

    def leave(self, tensor: torch.Tensor) -> None:
        """Leaves because of a failure."""

    def end(self, wait: Wait) -> None:
        """Waits for the end of the transfer."""


AWAY, THERE, ABOUT, GOING = range(4)
"""What a side's cell says of this run: Note [Both or neither]."""
SETTLED_S = 1.0
"""How long a side that lives is about to go, at most."""


class _Meeting(MessagePart):
    """One side of a message by a torch.distributed backend."""

    def __init__(self, team: TeamComm, peer: int, box: MessageBox, backend: Any, nth: int) -> None:
        super().__init__(team, peer, box)
        self._start, (self._own, self._own_at), (self._other, self._other_at) = self._side(backend)
        self._tag = FIRST_TAG + nth
        self._run = 0
        self._work: Any = None

    def _side(self, backend: Any) -> tuple[Callable[..., Any], Cell, Cell]:
        """The backend's method for this side, its cell, and the other's."""
        raise NotImplementedError

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

    def _side(self, backend: Any) -> tuple[Callable[..., Any], Cell, Cell]:
        return backend.send, self._box.sent, self._box.ready


class Incoming(_Meeting):
    """A Recv by a torch.distributed backend."""

    def _side(self, backend: Any) -> tuple[Callable[..., Any], Cell, Cell]:
        return backend.recv, self._box.ready, self._box.sent


class PeerOutgoing(MessagePart):
    """A Send through the sender's shared memory, where it stays if the sender leaves."""

    def begin(self, tensor: torch.Tensor) -> None:
        """Puts the message where the receiver finds it, and tells so."""
        if self._box.data is not None:
            self._box.data[: tensor.nbytes].copy_(as_bytes(tensor))
        self._mark = stamp(self.team.control.run, 1)
        fence()
        cells, at = self._box.sent
        cells[at] = self._mark

    def try_move(self, tensor: torch.Tensor) -> bool:
        """Whether the receiver has taken it."""
        cells, at = self._box.ready
        return cells[at] >= self._mark


class PeerIncoming(MessagePart):
    """A Recv from the sender's shared memory. The sender waits for an answer, and hears of failures
    meanwhile."""

    def try_move(self, tensor: torch.Tensor) -> bool:
        """Takes the message if it is there."""
        (sent, at), mark = self._box.sent, stamp(self.team.control.run, 1)
        if sent[at] < mark:
            return False
        fence()
        if self._box.data is not None:
            as_bytes(tensor).copy_(self._box.data[: tensor.nbytes])
        fence()
        ready, at = self._box.ready
        ready[at] = mark
        return True


def exchange(parts: Sequence[MessagePart], tensors: Sequence[torch.Tensor], wait: Wait) -> None:
    """Carries out Sends and Recvs together: each moves as soon as its peer is there."""
    packed = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
    _exchange(parts, packed, wait)
    for part, tensor, pack in zip(parts, tensors, packed, strict=True):
        if pack is not tensor and isinstance(part, Incoming | PeerIncoming):
            tensor.copy_(pack)


def _exchange(parts: Sequence[MessagePart], tensors: Sequence[torch.Tensor], wait: Wait) -> None:
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
