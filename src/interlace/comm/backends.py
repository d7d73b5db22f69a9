"""A team's backends of torch: the user's own NCCL where it serves, others that the team connects.

    connections = Connections(team, weakref.ref(group), store)
    gloo = connections.get("gloo", "cpu", None, "connect/1", timeout_s=60)    # all ranks, together

Note [Connected by all or by none]
    Ranks connect in a meeting (Note [All or none] in board.py), a new one whenever they prepare a
    Program or reset, so nothing of an earlier one is in the store, such as NCCL's id. Of the user's
    backends NCCL alone serves, for it takes memory of the GPU; a rank that fails cuts what gloo has
    under way. It serves in the first meeting only, and not where it is marked as spent: a failed
    run was on it, or its ranks did not meet, and it is aborted. What the first rank there finds of
    the mark holds for all.

Note [Whose time-out]
    Interlace's watchdog bounds what NCCL does, and aborts it. torch's own watchdog would see the
    same op late at the same moment, keep Python's lock for a minute, and end the process. So its
    time-out is longer by `MARGIN_S`. gloo's is longer too: `BoundedWait` bounds its ops and names
    who is late; gloo's own clock also runs while a whole job is paused (Note [Observed time]).
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from interlace.comm.mirror import MirrorGroup
from interlace.comm.rendezvous.board import named
from interlace.comm.rendezvous.liveness import END_S, can_open, silent_store
from interlace.comm.rendezvous.patience import LONGER, Errand, Patience
from interlace.errors import BackendError, CommTimeoutError, InterlaceError, TeamError
from interlace.options import BACKENDS, LONGEST_S
from interlace.torch_private import backend_of, backends_of, default_group

if TYPE_CHECKING:
    from interlace.comm.teams import TeamComm

Key = tuple[str, str]
T = TypeVar("T")


class BackendGroup(Protocol):
    """A backend of torch.distributed, such as `ProcessGroupGloo`, as far as the host uses it."""

    def name(self) -> str: ...

    def rank(self) -> int: ...

    def size(self) -> int: ...

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> dist.Work: ...

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> dist.Work: ...

    def barrier(self) -> dist.Work: ...


_CLASSES = {"gloo": "Gloo", "nccl": "NCCL", "ucc": "UCC"}
MARGIN_S = 300.0
"""Seconds by which torch's time-outs exceed Interlace's: Note [Whose time-out]."""
CUT_TAG = (1 << 30) + 8
"""The tag of a message that nobody sends."""
LOOK_S = 0.05
SOCKET_FILES = 4
"""Descriptors that a connection may take: its own, and those of a look-up of names."""
_MEND = {
    "gloo": "this torch was built without gloo; install torch from pip's index, which has it",
    "nccl": "this torch has no NCCL; install a CUDA build of torch, or choose gloo or peer",
    "ucc": "this torch was built without UCC; build torch with USE_UCC=1, or choose gloo or peer",
}


def require_backend(name: str) -> None:
    """Raises `BackendError` where this torch lacks the backend."""
    if name not in BACKENDS:
        raise BackendError(f"no backend named {name!r}: choose one of {', '.join(BACKENDS)}")
    there = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "ucc": getattr(c10d, "is_ucc_available", lambda: False),
    }
    if name in there and not there[name]():
        raise BackendError(f"the backend {name!r} is not there: {_MEND[name]}")


def limit_s(asked: float | None, groups: Iterable[dist.ProcessGroup] = ()) -> float:
    """The bound of every wait: the option `timeout_s`, else the longest time-out that these
    process groups have themselves, or the default group."""
    if asked is not None:
        return asked
    found = [_own_limit_s(group) for group in groups]
    if not found and dist.is_available() and dist.is_initialized():
        found = [_own_limit_s(default_group())]
    return max(found, default=c10d.default_pg_timeout.total_seconds())


def _own_limit_s(group: dist.ProcessGroup) -> float:
    limits: list[float] = []
    for backend in backends_of(group):
        options = getattr(backend, "options", None)
        limit = getattr(options, "_timeout", c10d.default_pg_timeout)
        limits.append(min(limit.total_seconds(), LONGEST_S))
    return max(limits, default=c10d.default_pg_timeout.total_seconds())


def connect(
    name: str,
    store: dist.Store,
    me: int,
    size: int,
    timeout_s: float,
    whose: str,
    look: Callable[[], object] = lambda: None,
    ended: Callable[[], Collection[int]] = tuple,
    label: tuple[str, Sequence[int]] = ("", ()),
) -> BackendGroup:
    """A new backend, which all its members make together. `look` raises where one of them has given
    up, `ended` tells whose processes are gone, `whose` is for messages, `label` has its name
    and ranks for flight records."""
    cls: Any = getattr(c10d, f"ProcessGroup{_CLASSES[name]}")
    limit, own = timedelta(seconds=timeout_s + MARGIN_S), _within(store, timeout_s)
    if name == "gloo":
        call = Errand(lambda: cls(own, me, size, _gloo_options(cls, limit, *label)))
    else:
        call = Errand(lambda: cls(own, me, size, timeout=limit))
    try:
        return await_ranks(call, timeout_s, ended, look)
    except (RuntimeError, ValueError, TimeoutError) as error:
        raise BackendError(
            f"the backend {name!r} of {whose} could not be connected: {error}"
        ) from error


def _gloo_options(cls: Any, limit: timedelta, name: str, ranks: Sequence[int]) -> Any:
    """gloo's default options, with the name and ranks that flight records need of each group."""
    options = cls._Options()
    names = [*filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))]
    devices = [cls.create_device(interface=name) for name in names]
    options._devices = devices or [cls.create_default_device()]
    options._threads, options._timeout = 2 * len(options._devices), limit
    options.group_name, options.global_ranks_in_group = name, [*ranks]
    return options


def await_ranks(
    call: Errand[T],
    timeout_s: float,
    ended: Callable[[], Collection[int]],
    look: Callable[[], object],
) -> T:
    """The result of a call in which the ranks of a backend meet. Raises what it or `look` raises;
    `TimeoutError` where not all come in time, or the process of one has ended."""
    patience = Patience(timeout_s)

    def check_ended() -> None:
        if gone := sorted(ended()):
            raise TimeoutError(f"the process of {named(gone)} has ended. Start the job anew")

    while not call.is_back(LOOK_S):
        look()
        check_ended()
        if patience.is_over():
            raise TimeoutError(
                f"not all of its ranks came within {timeout_s:g} s: see whether one failed, "
                f"stalled or took another path through the model; {LONGER}"
            )
    deadline = Patience(END_S)
    while call.failed and not deadline.is_over():  # a process ends after its connections do
        check_ended()
        time.sleep(LOOK_S)
    return call.result()


def cut(backend: BackendGroup) -> None:
    """Ends what a gloo backend has under way, on all ranks: an op that is late at once does."""
    if backend.name() == "gloo" and backend.size() > 1:
        word, peer = torch.empty(1, dtype=torch.uint8), (backend.rank() + 1) % backend.size()
        with contextlib.suppress(RuntimeError):
            backend.recv([word], peer, CUT_TAG).wait(timedelta(milliseconds=1))


def _within(store: dist.Store, timeout_s: float) -> dist.Store:
    """The store with a time-out of its own. NCCL connects with its first op: there ranks wait in
    the store for the first of them, by default for half an hour, and no abort reaches them."""
    own = apart(store, timeout_s)
    if own is not store:
        own.set_timeout(timedelta(seconds=timeout_s))
    return own


def apart(store: dist.Store, limit_s: float) -> dist.Store:
    """The same store by a connection of its own, where it can be cloned: a thread that waits in
    another keeps it from all others. Of a server that is gone it is the store itself, which says
    so: to connect to it anew takes as long as torch's own time-out, also for a process that has no
    file descriptor left. One that does not answer within `limit_s` is an error: its process is
    stopped, or looks up names for longer."""
    if not can_open(SOCKET_FILES):
        return store
    call = Errand(lambda: store.clone())  # pyright: ignore  # its stub has none
    patience = Patience(limit_s)
    asked: Errand[bool] | None = None
    while not call.is_back(LOOK_S):
        asked = asked or Errand(lambda: store.check(["interlace"]))
        if asked.failed:
            return store
        if patience.is_over():
            raise CommTimeoutError(silent_store(limit_s))
    try:
        return call.result()
    except (AttributeError, RuntimeError):  # what cannot be cloned, too
        return store


def end(made: list[BackendGroup], timeout_s: float, whose: str) -> None:
    """Ends what was made, and forgets it (Note [Aborts] in nccl.py), or raises `TeamError`."""
    left = [backend for backend in made if backend.name() == "nccl"]
    if left:
        from interlace.comm.cuda.nccl import abort, all_ended

        if not all_ended(abort(left), timeout_s):
            raise TeamError(
                f"NCCL did not end the connections of {whose} within {timeout_s:g} s: end the "
                "process"
            )
    made.clear()


class Connections:
    """The backends of a team, each connected when it is first asked for."""

    def __init__(
        self, team: TeamComm, group: weakref.ref[dist.ProcessGroup], store: dist.Store
    ) -> None:
        self._team, self._group, self._store = team, group, store
        self._kept: dict[Key, BackendGroup] = {}
        self.made: list[BackendGroup] = []

    @property
    def whose(self) -> str:
        return f"team {self._team.name} on rank {self._team.rank}"

    def users(self, device: str) -> BackendGroup | None:
        """The backend that the user's group has for a device, if any."""
        group = self._group()
        if group is None:
            raise TeamError(f"the process group of team {self._team.name} was destroyed")
        try:
            return backend_of(group, torch.device(device))
        except RuntimeError:
            return None

    def name(self, name: str | None, device: str) -> str:
        """The backend's name, None resolved for this group and device; checks that it exists."""
        if name is None:
            mine = self.users(device)
            usual = "gloo" if device == "cpu" else "nccl"
            name = str(mine.name()) if mine is not None else usual
        if name == "nccl" and device == "cpu":
            raise BackendError(
                "the backend 'nccl' is not there for tensors of the CPU (team "
                f"{self._team.name}): run the Program on device 'cuda', or choose gloo or peer"
            )
        require_backend(name)
        return name

    def get(
        self, name: str, device: str, on: torch.device | None, where: str, timeout_s: float
    ) -> BackendGroup:
        """The backend; `where` its ranks meet to connect it, NCCL's with their devices `on`."""
        key = (name, device)
        if key not in self._kept:
            self._kept[key] = self._connect(key, on, where, timeout_s)
        return self._kept[key]

    def renew(self, on: torch.device | None, where: str, timeout_s: float) -> None:
        for key in sorted(self._kept):
            self._spend(key)
            self._kept[key] = self._connect(key, on, where, timeout_s)

    def end(self, timeout_s: float) -> None:
        end(self.made, timeout_s, self.whose)

    def close(self, timeout_s: float, failed: bool) -> None:
        """Ends and forgets all; `failed` says whether runs on them did."""
        if failed:
            with contextlib.suppress(InterlaceError):
                for key in self._kept:
                    self._spend(key)
        self._kept.clear()
        self.end(timeout_s)

    def _spend(self, key: Key) -> None:
        """Says, also to teams of this group that come later, that the user's backend is no good."""
        self._team.board.post(self._mark(key), {})

    def _mark(self, key: Key) -> str:
        return f"{self._team.key}/{'/'.join(key)}/spent"

    def _connect(
        self, key: Key, on: torch.device | None, where: str, timeout_s: float
    ) -> BackendGroup:
        """The user's backend or a new one, once all ranks have it: see the Note above."""
        (name, device), team, board = key, self._team, self._team.board
        if isinstance(group := self._group(), MirrorGroup):
            return group.as_backend(name)
        topic = f"{team.topic or team.key}/{name}/{device}"
        place, unspent = f"{topic}/{where}", board.read(self._mark(key)) is None
        first, serves = board.first(f"{topic}/first", [where, unspent])
        # A rank that fails cuts what a team between hosts runs on, so that is its own.
        serves = serves and name == "nccl" and not team.apart
        users = self.users(device) if serves and first == where else None
        theirs = users is not None and users.name() == name
        backend = users if theirs else None
        joined = False

        def look() -> None:
            if board.is_over(place):
                board.decide(place)  # raises what a peer gave up for

        def ended() -> set[int]:
            return board.ended(team.ranks) & {*team.ranks}

        try:
            with board.attending([place]):
                look()
                if backend is None:
                    store = c10d.PrefixStore(f"interlace/{place}/backend", self._store)
                    known = self.whose, look, ended, (f"interlace/{place}", team.ranks)
                    backend = connect(name, store, team.me, team.size, timeout_s, *known)
                    self.made.append(backend)
                if name == "nccl":
                    from interlace.comm.cuda.nccl import join  # which needs the CUDA driver

                    join(backend, on, timeout_s, self.whose, board.ended, look)
                    joined = True
            board.exchange(place, {}, timeout_s)
        except BaseException:
            if theirs:
                with contextlib.suppress(InterlaceError):
                    self._spend(key)
            if joined:  # and a peer has not
                from interlace.comm.cuda.nccl import abort

                abort([backend])
            raise
        return backend
