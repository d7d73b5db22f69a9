"""Send and Recv: a rendezvous of two ranks, alone or in a Group whose members block no other.

Both sides meet in shared memory first; the bytes then go by the team's backend or, with the
backend `peer`, through the sender's segment. So a message that nobody takes leaves no half-done
operation in a backend, and a time-out can say who did not come.

    exchange([Outgoing(...), Incoming(...)], [a, b], wait)      # a Group
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch

from interlace.comm.collectives import as_bytes
from interlace.comm.signals import Wait, fence, stamp
from interlace.comm.teams import TeamComm
from interlace.comm.workspace import Box

FIRST_TAG = 1 << 20
"""Tags from here on are ours; users of the same group have the lower ones."""


class Part(Protocol):
    """One member of a Group, bound; it goes begin, try_move until True, end."""

    team: TeamComm
    peer: int

    def begin(self, tensor: torch.Tensor) -> None: ...

    def try_move(self, tensor: torch.Tensor) -> bool: ...

    def end(self, wait: Wait) -> None: ...


class Outgoing:
    """A Send by a torch.distributed backend."""

    def __init__(self, team: TeamComm, peer: int, box: Box, backend: Any, nth: int) -> None:
        self.team = team
        self.peer = peer
        self._box = box
        self._backend = backend
        self._tag = FIRST_TAG + nth
        self._work: Any = None

    def begin(self, tensor: torch.Tensor) -> None:
        """Tells the receiver that this rank is there."""
        self._mark = stamp(self.team.control.run, 1)
        fence()
        self._box.sent[self._box.sent_at] = self._mark

    def try_move(self, tensor: torch.Tensor) -> bool:
        """Starts the transfer once the receiver is there."""
        if self._box.ready[self._box.ready_at] < self._mark:
            return False
        fence()
        if tensor.numel():
            self._work = self._backend.send([as_bytes(tensor)], self.peer, self._tag)
        return True

    def end(self, wait: Wait) -> None:
        """Waits for the transfer."""
        work, self._work = self._work, None
        if work is not None:
            work.wait(timedelta(seconds=wait.time_out_s))


class Incoming:
    """A Recv by a torch.distributed backend."""

    def __init__(self, team: TeamComm, peer: int, box: Box, backend: Any, nth: int) -> None:
        self.team = team
        self.peer = peer
        self._box = box
        self._backend = backend
        self._tag = FIRST_TAG + nth
        self._work: Any = None

    def begin(self, tensor: torch.Tensor) -> None:
        """Tells the sender that this rank is there."""
        self._mark = stamp(self.team.control.run, 1)
        fence()
        self._box.ready[self._box.ready_at] = self._mark

    def try_move(self, tensor: torch.Tensor) -> bool:
        """Starts the transfer once the sender is there."""
        if self._box.sent[self._box.sent_at] < self._mark:
            return False
        fence()
        if tensor.numel():
            self._work = self._backend.recv([as_bytes(tensor)], self.peer, self._tag)
        return True

    def end(self, wait: Wait) -> None:
        """Waits for the transfer."""
        work, self._work = self._work, None
        if work is not None:
            work.wait(timedelta(seconds=wait.time_out_s))


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

    wait.until(moved, missing)
    for part in parts:
        part.end(wait)
