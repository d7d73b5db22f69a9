"""Send and Recv: a rendezvous of two ranks, alone or in a Group whose members block no other.

The sides meet in gloo, whatever moves the bytes of collectives on the CPU: of a message that nobody
takes, gloo alone can be told that nobody waits any longer. A side that leaves a message because of
a failure cuts gloo's connections, so that none of its peers stays behind: they find the failure in
the control block, and `reset()` makes new connections.

    exchange([Transfer(..., sends=True), Transfer(..., sends=False)], [a, b], wait)      # a Group
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Protocol

import torch

from interlace.comm.backends import MARGIN_S, BackendGroup, cut
from interlace.comm.collectives import as_bytes
from interlace.comm.host.signals import BoundedWait, leave
from interlace.comm.rendezvous.patience import Errand
from interlace.comm.teams import TeamComm

LOOK_S = 0.05
"""Time for a transfer that has ended to say so, when a wait for several is over."""


class Started(Protocol):
    """A transfer under way, such as a Work of torch."""

    def wait(self, timeout: timedelta, /) -> object:
        """Returns at its end; raises RuntimeError after the time-out."""


class Transfer:
    """One side of a message."""

    def __init__(
        self, team: TeamComm, peer: int, sends: bool, carrier: BackendGroup | Mailbox, nth: int
    ) -> None:
        self.team, self.peer, self.sends = team, peer, sends
        self.carrier, self._tag = carrier, nth
        self.works: list[Started] = []
        """Transfers that were started in this run."""
        self._ended: list[Started] = []
        """Works that have ended. One thread at a time waits, for gloo tells an end once."""
        self._turn = threading.Lock()

    def begin(self, tensor: torch.Tensor) -> None:
        """Starts the transfer. `extend` calls it and keeps its Work in one step, between which no
        interrupt comes: a Work that is lost has no end."""
        self.works, self._ended, self._turn = [], [], threading.Lock()
        if tensor.numel():
            start = self.carrier.send if self.sends else self.carrier.recv
            self.works.extend(map(start, [[as_bytes(tensor)]], [self.peer], [self._tag]))

    def ending(self, limit: timedelta) -> Callable[[], None]:
        """Returns a function that waits, in a thread, for the end of the started works."""
        works, ended, turn = self.works, self._ended, self._turn

        def wait() -> None:
            with turn:
                for work in works[len(ended) :]:
                    work.wait(limit)
                    ended.append(work)

        return wait


class Mailbox:
    """Messages of a rank to itself, for which gloo has no connection; kept until they are taken."""

    def __init__(self) -> None:
        self._kept = defaultdict[int, SimpleQueue[torch.Tensor]](SimpleQueue)

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> Started:
        self._kept[tag].put(tensors[0].clone())
        return OwnMessage(lambda _: None)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> Started:
        return OwnMessage(lambda limit: tensors[0].copy_(self._kept[tag].get(timeout=limit)))


@dataclass(frozen=True, slots=True)
class OwnMessage:
    """One side of a message in a Mailbox."""

    end: Callable[[float], object]

    def wait(self, timeout: timedelta, /) -> None:
        self.end(timeout.total_seconds())


def exchange(parts: Sequence[Transfer], tensors: Sequence[torch.Tensor], wait: BoundedWait) -> None:
    """Carries out Sends and Recvs together: each moves as soon as its peer is there."""
    packed = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
    try:
        for part in parts:
            part.team.control.meet(part.peer, wait)
        for part, pack in zip(parts, packed, strict=True):
            part.begin(pack)
        _end(parts, wait)
    except BaseException:
        _leave(parts)
        raise
    for part, tensor, pack in zip(parts, tensors, packed, strict=True):
        if pack is not tensor and not part.sends:
            tensor.copy_(pack)


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


def _ends(parts: Sequence[Transfer], timeout_s: float) -> Errand[list[None]]:
    limit = timedelta(seconds=timeout_s + MARGIN_S)
    waits = [part.ending(limit) for part in parts]
    return Errand(lambda: [wait() for wait in waits])


def _leave(parts: Sequence[Transfer]) -> None:
    """After a failure: the transfers end soon, as their other sides are there, or are cut off."""
    begun = [part for part in parts if part.works]
    if begun:
        call = _ends(parts, 0.0)
        leave(lambda: call.is_back(0.0), lambda: _cut(begun))


def _cut(parts: Sequence[Transfer]) -> None:
    for part in parts:
        if not isinstance(part.carrier, Mailbox):
            cut(part.carrier)
