"""Teams over the process groups that the user already has.

A `TeamComm` adds to a `torch.distributed.ProcessGroup` what a schedule needs: the control block,
the pool of symmetric slots, a backend for each op that asks for one, and a bounded set-up through
the store:

    team = team_of(mesh.get_group("tp"), "tp")
    team.setup(timeout_s=60)                        # all ranks of the group, together

Note [One queue per team]
    What ranks do on a team must happen in one order, whatever Executor does it, so everything that
    counts (runs, takes of slots) belongs to the process group. Hence the one registry of this
    package: it maps a live group to its TeamComm, and forgets that with the group.

Note [Resets before a set-up]
    A rank that calls reset() before a team of it is set up has no block in which its peers would
    see that, and may have left out a step that they are in. So each rank counts the resets of a
    process group, known by its name and ranks. The first that calls one leaves a note under its
    number in the store, and each forgets what teams there are that are not set up. Processes greet
    one another under this number: ranks that were reset as often meet, and one that was reset less
    often finds the note, in whatever meeting it waits or comes to, and must call reset() too.
    Nobody is waited for. Where a team is set up, its reset is collective and the ranks agree on the
    count; but a rank that was interrupted as the last one set up leaves a note, and its peers, in
    their reset(), forget their team as well.

Note [Forked processes]
    A process that was forked from a rank has that rank's shared memory, and its connections to the
    store and to the peers: whatever it did on a team, it would do in the parent's place. So in a
    child all groups of the parent are refused, and its teams have no control block, without which
    nothing runs and nothing is told. Nothing is given back either: that is the parent's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from interlace.comm.backends import BackendGroup, Connections, apart
from interlace.comm.between_hosts import STORE_S as SHORT_S
from interlace.comm.between_hosts import HostsControl
from interlace.comm.control import NBYTES, Control, called_reset
from interlace.comm.host.shared_memory import default_folder, share
from interlace.comm.host.slots import SlotPool
from interlace.comm.mirror import MirrorGroup, seen_by
from interlace.comm.rendezvous.board import LOOK_EVERY_S, STORE_S, Board, Party, meet, named
from interlace.comm.rendezvous.liveness import PeerProcess, boot_id, precedes
from interlace.errors import BackendError, InterlaceError, TeamError
from interlace.torch_private import default_store, is_process_group, process_groups

if TYPE_CHECKING:
    from interlace.comm.cuda.side import CudaSide

END_S = 10.0


def host() -> str:
    """The name of this host and what tells it from others; containers of one machine that have
    shared memory of their own are hosts of their own."""
    return f"{socket.gethostname()}/{boot_id()}/{os.stat(default_folder()).st_dev}"


class User(Protocol):
    """Holder of something that must go before the team does."""

    def leave(self) -> None:
        """Lets go of it."""


class TeamComm:
    """A team's process group, with what its ranks share. Get it from `team_of`."""

    def __init__(self, group: dist.ProcessGroup, name: str, limit_s: float) -> None:
        check_alive(group, name)
        self.group = weakref.ref(group)
        ranks, rank = dist.get_process_group_ranks(group), dist.get_rank()
        store = apart(default_store(), limit_s)
        self.ranks = tuple(ranks)
        if rank not in self.ranks:
            raise TeamError(f"rank {rank} is not in the process group of team {name!r}")
        self.name, self.rank, self.me = name, rank, self.ranks.index(rank)
        self.lock = threading.RLock()
        self.mirrors = isinstance(group, MirrorGroup)
        """True if this rank is its own peers (mirror.py)."""
        world = range(dist.get_world_size()) if self.mirrors else ()
        self.board = Board(store, self.ranks, rank, limit_s=limit_s, mirrors=world)
        self._control: Control | None = None
        self._lives: list[PeerProcess] = []
        self.resets = 0
        """The round of the last reset: Note [All or none] in board.py. -1 once it was released."""
        self.num_prepared = 0
        """The round in which the last Program was prepared."""
        self.key = key_of(group)
        self.party = Party(f"{self.key}/greeting/{counts[self.key]}", self.ranks, host())
        self._next_look, self._in_reset = 0.0, False
        own = weakref.WeakMethod(self.hear_resets)
        self.board.look = lambda: (hear := own()) and hear()
        self.topic = ""
        """Where the notes of its present processes are; `meet` finds it."""
        self.slots = SlotPool(self.board)
        self._connections = Connections(weakref.proxy(self), self.group, store)
        self._cuda: CudaSide | None = None
        self._users: weakref.WeakSet[User] = weakref.WeakSet()

    @property
    def size(self) -> int:
        return len(self.ranks)

    def seen_by(self, member: int) -> int:
        """As which member another one knows this rank."""
        return seen_by(self.me, member, self.size) if self.mirrors else self.me

    @property
    def is_gone(self) -> bool:
        """True if its process group was destroyed."""
        return not is_process_group(self.group())

    def check_alive(self) -> None:
        check_alive(self.group(), self.name)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank, once its processes have met."""
        return tuple(self.party.facts[rank]["host"] for rank in self.ranks)

    @property
    def by_host(self) -> tuple[tuple[int, ...], ...]:
        """The team's members, grouped by host."""
        places: dict[str, list[int]] = {}
        for member, place in enumerate(self.hosts):
            places.setdefault(place, []).append(member)
        return tuple(map(tuple, places.values()))

    @property
    def apart(self) -> str:
        """Which ranks are on which hosts; empty for a team within one."""
        by_host = self.by_host
        if len(by_host) == 1:
            return ""
        told = [
            f"{named([self.ranks[m] for m in members])} on {self._names()[members[0]]}"
            for members in by_host
        ]
        return f"team {self.name} spans hosts ({', '.join(told)})"

    def _names(self) -> list[str]:
        """The name of each rank's host."""
        return [place.split("/")[0] for place in self.hosts]

    def refuse_memory(self, what: str) -> None:
        """Raises where the team spans hosts: `what` needs memory that all its ranks share."""
        if why := self.apart:
            raise BackendError(
                f"{why}, which share no memory, and {what}: choose serial, pipeline, ring "
                "or auto, or make teams that stay within one host"
            )

    @property
    def control(self) -> Control:
        """The control block; `setup` makes it."""
        if self._control is None:
            check_process(self.group)
            raise TeamError(
                f"team {self.name} is not set up, or was released: make and prepare new Executors "
                "(what torch.compile made goes with torch.compiler.reset(), what interlace.compile "
                "made with its close())"
            )
        return self._control

    @property
    def is_set_up(self) -> bool:
        return self._control is not None

    @property
    def shares_memory(self) -> bool:
        """True if it is set up, within one host."""
        return self._control is not None and not isinstance(self._control, HostsControl)

    def name_topics(self) -> None:
        """Its processes have met: from now on its notes have a place."""
        self.topic = f"{self.key}/{self.party.name}"
        self.slots.topic = f"{self.topic}/slots"

    def setup(self, timeout_s: float) -> None:
        """Makes the control block, once. All ranks of the team call it together."""
        if self._control is not None:
            return
        meet([self], "set up its team", timeout_s)
        topic, facts = f"{self.topic}/setup/{self.num_prepared}", self.party.facts
        with self.board.attending([f"{topic}/memory", f"{topic}/control"]):  # who comes next
            lives = [PeerProcess.of(*facts[rank]["process"]) for rank in self.ranks]
        if self.apart:
            self.backend("gloo", "cpu", timeout_s)
            store = apart(default_store(), timeout_s)
            board = Board(store, self.ranks, self.rank, limit_s=SHORT_S)
            board.lives.update(zip(self.ranks, lives, strict=True))
            own = weakref.proxy(self)
            gloo = lambda: own.backend("gloo", "cpu", timeout_s)  # noqa: E731
            store_facts = self._names(), board, f"{topic}/control"
            control: Control = HostsControl(
                self.name, self.ranks, self.me, *store_facts, gloo, between_hosts
            )
        else:
            shared = share(self.board, topic, NBYTES, {}, timeout_s)
            cells = [segment.cells for segment in shared.segments]
            control = Control(self.name, self.ranks, self.me, cells, lives, self.board.word)
        self._lives, self._control = lives, control
        self.board.lives.update(zip(self.ranks, lives, strict=True))

    def fail(self, error: BaseException) -> None:
        """Tells the team why this rank stops, and other teams' ranks, in the store, if it ends."""
        self.control.fail(error)
        self.board.leave_word(error)

    def hear_resets(self) -> None:
        """Raises where a peer called reset() that this rank has not called; asks the store a few
        times a second."""
        control = None if self._in_reset else self._control
        if control is not None and (first := control.resetting()) is not None:
            raise called_reset(first)
        if time.monotonic() >= self._next_look:
            self._next_look = time.monotonic() + LOOK_EVERY_S
            if (first := self._ahead()) is not None:
                raise called_reset(first)

    def _ahead(self) -> int | None:
        """The rank that called the next reset first, where its team was not set up."""
        note = self.board.read(reset_topic(self.key))
        return None if note is None or precedes(note) else note["first"]

    @contextlib.contextmanager
    def attending(self, meeting: str) -> Iterator[Callable[[], None]]:
        """While this rank waits for all others in a meeting, which peers that wait for it in a run
        are to know; gives what raises a failure that comes meanwhile."""
        control = self._control
        if control is None:
            self._next_look = 0.0
            yield self.hear_resets
            return
        quiet = control.quiet()  # else what failed was heard before this meeting

        def look() -> None:
            if quiet:
                control.check()
            if (first := control.resetting()) is not None:
                raise called_reset(first)

        try:
            control.attend(meeting)
            yield look
        finally:
            control.attend("")

    def backend(self, name: str | None, device: str, timeout_s: float) -> BackendGroup:
        """The torch backend of that name (or as the group's own) for tensors on `device`; the
        user's NCCL where it has one. The first time, all ranks ask for it together."""
        on = None if self._cuda is None else self._cuda.device
        meet([self], "set up its team", timeout_s)
        name, where = self.backend_name(name, device), f"connect/{self.num_prepared}"
        return self._connections.get(name, device, on, where, timeout_s)

    def backend_name(self, name: str | None, device: str) -> str:
        return self._connections.name(name, device)

    def cuda(self, device: torch.device, timeout_s: float) -> CudaSide:
        """The team's device side; all ranks make it together, with their first Program on CUDA."""
        if self._cuda is None:
            from interlace.comm.cuda.side import CudaSide  # which needs the CUDA driver

            self._cuda = CudaSide(self, device, timeout_s)
        elif self._cuda.device != device:
            raise TeamError(
                f"team {self.name} is on {self._cuda.device}, and a Program is to run on {device}: "
                "a process uses one device for all Programs of a team (torch.cuda.set_device)"
            )
        return self._cuda

    def begin_reset(self, timeout_s: float) -> None:
        """Peers that wait for this rank, in a run or in a meeting, hear that it resets."""
        with self.lock:
            if self._cuda is not None:
                self._cuda.finish(self.control.quiet, timeout_s)
            self.control.begin_reset()

    def reset(self, timeout_s: float, renew: bool = True) -> None:
        """Forgets a failure, on all ranks together: counts start anew, and connections that may be
        unusable are replaced (without `renew` only where a rank tells of a failure). Memory stays;
        a reset that fails leaves the team out of order."""
        self._in_reset = True
        try:
            self._reset(timeout_s, renew)
        finally:
            self._in_reset = False

    def _reset(self, timeout_s: float, renew: bool) -> None:
        with self.lock:
            self.begin_reset(timeout_s)
            on = None
            if self._cuda is not None:
                on = self._cuda.device
                self._cuda.drain(timeout_s)
            for user in list(self._users):
                user.leave()  # they are bound anew before their next run
            own = {"run": self.control.run, "renew": renew or self.control.failed}
            own["resets"] = counts[self.key]
            before = self.resets
            self.resets = self.board.round(f"{self.topic}/reset", before)  # runs of before are past
            topic = f"{self.topic}/reset/{self.resets}"
            try:
                notes = self.board.exchange(topic, own, timeout_s)
                renew = any(note["renew"] for note in notes)
                if renew:
                    self._connections.end(timeout_s)
            except BaseException as error:
                self.resets = before
                if isinstance(error, InterlaceError) and self._ahead() is not None:
                    counts[self.key] += 1
                    return self.forget()  # that rank was interrupted as it set up this team
                self.control.give_up_reset(error)
                raise
            try:
                counts[self.key] = 1 + max(note["resets"] for note in notes)
                self.control.reset(max(note["run"] for note in notes))
                self.slots.reset()
                if self._cuda is not None:
                    self._cuda.reset()
                self.board.exchange(f"{topic}/renewal", {}, timeout_s)
                if renew:
                    self._connections.renew(on, f"reconnect/{self.resets}", timeout_s)
            except BaseException as error:
                self.control.fail(error)
                raise

    def forget(self) -> None:
        """Ends it, so that `team_of` makes another: Note [Resets before a set-up]."""
        with _teams_lock:
            for group in [group for group, team in _teams.items() if team is self]:
                del _teams[group]
        self.close()

    def leave_to_parent(self) -> None:
        """In a forked process: Note [Forked processes]."""
        self._control, self.resets = None, -1
        self.lock = threading.RLock()

    def used_by(self, user: User) -> None:
        self._users.add(user)

    def left_by(self, user: User) -> None:
        self._users.discard(user)

    def close(self) -> None:
        """Lets go of the team's memory and connections; waits, bounded, for ranks that still use
        them."""
        failed = self._control is not None and self._control.failure() is not None
        try:
            for user in list(self._users):
                user.leave()
            made = [backend.name() for backend in self._connections.made]
            if "nccl" in made and self.is_set_up and not failed:
                with contextlib.suppress(InterlaceError):
                    self.board.exchange(f"{self.topic}/end", {}, END_S)
        finally:
            self._control, self.resets = None, -1
            self.slots.slots.clear()
            self._cuda = None
            for life in self._lives:
                life.close()
            self._connections.close(END_S, failed)


_teams: weakref.WeakKeyDictionary[dist.ProcessGroup, TeamComm] = weakref.WeakKeyDictionary()
"""One TeamComm for each live process group: Note [One queue per team]."""
_teams_lock = threading.Lock()
counts = Counter[str]()
"""The resets of each process group that this rank called, by `key_of`. They outlive teams and
groups: the notes in the store do, and torch reuses a name after `destroy_process_group`."""

_parents: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""In a forked process the groups of its parent: Note [Forked processes]."""


def _forked() -> None:
    _teams_lock._at_fork_reinit()  # pyright: ignore  # another thread may have held it
    _parents.update(process_groups())
    for team in _teams.values():
        team.leave_to_parent()


os.register_at_fork(after_in_child=_forked)


def key_of(group: dist.ProcessGroup) -> str:
    """Name and ranks of a process group, which tell it from others of its name."""
    name = f"{group.group_name}/{'-'.join(map(str, dist.get_process_group_ranks(group)))}"
    return f"mirror/{name}" if isinstance(group, MirrorGroup) else name


def reset_topic(key: str) -> str:
    """Where the next reset of a process group is told: Note [Resets before a set-up]."""
    return f"{key}/resets/{counts[key]}"


def check_process(group: weakref.ref[dist.ProcessGroup] | None = None) -> None:
    """Raises `TeamError` in a process that was forked from the one that made this group, or those
    that live: Note [Forked processes]."""
    groups = process_groups() if group is None else [group()]
    if any(each in _parents for each in groups if each is not None):
        raise TeamError(
            f"process {os.getpid()} was forked from a rank, and has its process groups: what it "
            "ran or reset on a team would take that rank's place. Run models in the rank's own "
            "process, or start others by spawn, with process groups of their own"
        )


def team_of(group: dist.ProcessGroup, name: str, limit_s: float = STORE_S) -> TeamComm:
    """The TeamComm of a process group, made at the first call; the first `name` that is not empty
    is for messages, `limit_s` bounds what it asks the store."""
    check_process(weakref.ref(group))
    check_alive(group, name)
    with _teams_lock:
        team = _teams.get(group)
        if team is None:
            team = _teams[group] = TeamComm(group, name, limit_s)
        team.name = team.name or name
        return team


def check_alive(group: dist.ProcessGroup | None, name: str) -> None:
    """Raises `TeamError` for a process group that torch.distributed does not have (any more)."""
    if not is_process_group(group):
        raise TeamError(
            f"the process group of team {name!r} was destroyed, or torch.distributed never had it. "
            "Nothing can run on it any more, nor can a backward whose forward did. Fix: make a "
            "group (init_process_group, new_group, a DeviceMesh) and what runs on it anew; destroy "
            "groups after the last backward"
        )


def group_of_mesh(mesh: dist.DeviceMesh, dim: int = 0) -> dist.ProcessGroup:
    """The process group of a dimension of a mesh, which keeps its name; raises `TeamError`."""
    try:
        return mesh.get_group(dim)
    except (RuntimeError, IndexError) as error:  # which torch raises on a rank outside the mesh
        raise TeamError(
            f"the process group of {mesh} was destroyed, or is not this rank's ({error}). Fix: "
            "make the group, its mesh and what runs on it anew; destroy groups after the last "
            "backward"
        ) from error


def live_teams() -> list[TeamComm]:
    """The teams of groups that were not destroyed, in an order that all ranks share."""
    check_process()
    with _teams_lock:
        teams = [*_teams.values()]
    return sorted((team for team in teams if not team.is_gone), key=lambda team: team.key)


def between_hosts() -> list[HostsControl]:
    """The control blocks of the teams that span hosts."""
    found = [team._control for team in live_teams()]
    return [control for control in found if isinstance(control, HostsControl)]


@contextlib.contextmanager
def attending(meetings: Iterable[tuple[TeamComm, str]]) -> Iterator[Callable[[], object]]:
    """While this rank waits in a meeting of each team: gives what raises a failure of any."""
    with contextlib.ExitStack() as attended:
        looks = [attended.enter_context(team.attending(topic)) for team, topic in meetings]
        yield lambda: [look() for look in looks]


def release_teams() -> None:
    """Ends all teams: call it before `destroy_process_group`.

    Their connections, shared memory and CUDA graphs go, and Executors made before can no longer
    run. Runs under way are waited for, bounded. Device memory that peers map stays to the end of
    the process: a peer may still read it.

    Raises:
        TeamError: this process was forked from the one that made the teams.
    """
    check_process()
    with _teams_lock:
        teams = sorted(_teams.values(), key=lambda team: team.key, reverse=True)
        _teams.clear()
    with contextlib.ExitStack() as each:  # the last first; also after one that fails
        for team in teams:
            each.callback(team.close)


def check_size(team: TeamComm, size: int) -> None:
    """Raises `TeamError` unless the process group has as many ranks as the Program's team."""
    if team.size != size:
        raise TeamError(
            f"team {team.name} has {size} ranks in the Program, but its process group has "
            f"{team.size} ({list(team.ranks)}): give the Program another "
            "team size, or the team another group"
        )
