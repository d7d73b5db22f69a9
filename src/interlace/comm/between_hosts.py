"""The control block of a team whose ranks are on hosts that share no memory.

    control = HostsControl("dp", ranks, me, hosts, board, topic, lambda: gloo, family)
    control.enter(tag, "forward")
    control.begin(Contacts(sources=(1,)))   # tells nobody, and will hear rank 1 of the team
    control.meet_all(wait)                  # rank 1 is in the same run of the same Program

Note [Between hosts]
    Runs go by gloo or NCCL. As a run begins, a rank hears from all whose data it takes in it, in 16
    bytes by gloo, which Program they run, so that none takes the data of another Program: members
    of a team with collectives gather that, and who sends messages posts it. No store is asked.

    A rank that fails leaves its block in the store and cuts its connections; gloo then raises on
    its peers, which find in the store what was behind it. Who waits longer looks there too, a few
    times a second, at one counter. A rank whose wait is over asks, on all its teams, where the
    others are: those that wait as well answer, and the error names the others, which may be
    stalled, or out of reach. If all answer, they wait for somebody else: their own errors, which
    come soon, are passed on. Of a rank that was killed, gloo's closed connection tells
    (`disconnected` in liveness.py).
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist

from interlace.comm.backends import BackendGroup, cut
from interlace.comm.collectives import Spec, bind_collective
from interlace.comm.control import (
    ATTENDS,
    ENTERED,
    ERROR,
    EXITED,
    NBYTES,
    PROGRESS,
    RESETTING,
    STREAMS,
    Control,
)
from interlace.comm.host.signals import BoundedWait
from interlace.comm.rendezvous.board import Board, Note
from interlace.comm.rendezvous.liveness import PeerProcess, default_gloo, refuses
from interlace.comm.rendezvous.patience import Errand
from interlace.errors import AgreementError, InterlaceError, PeerError

LOOK_EVERY_S, PAUSE_S = 0.25, 0.02
ANSWER_S = 1.5
"""Time for ranks to answer one whose wait is over: several looks."""
BEHIND_S = 2.0
"""Time for ranks to report why they cut their connections."""
STORE_S = 1.0
"""Time for the store to answer; it may be out of reach."""
ASK_S = ANSWER_S + STORE_S
"""Time for a rank whose wait is over to find out who is late."""
TELL_AFTER_S = 0.5
"""Time that a rank waits for another to begin a run before it posts which run it is in."""
HEAD = struct.Struct("QQ")
"""Message between ranks before data moves: the run, and the tag of the Program."""
HEAD_TAG = (1 << 30) + 9
MOST_HEADS = 64
"""Largest number of runs that a sending rank may be ahead of the peer."""


@dataclass(frozen=True, slots=True)
class Contacts:
    """Whom a rank meets on a team in a run, as indices of its members."""

    gathers: bool = False
    """All, in collectives."""
    sources: tuple[int, ...] = ()
    """Members whose messages this rank takes."""
    targets: tuple[int, ...] = ()
    """Members that take this rank's messages."""


def blank() -> memoryview:
    return memoryview(bytearray(NBYTES)).cast("Q")


class HostsControl(Control):
    """The control block of a team that spans hosts: Note [Between hosts]. The blocks of other
    ranks are as they last left them in the store."""

    def __init__(
        self,
        team: str,
        ranks: Sequence[int],
        me: int,
        hosts: Sequence[str],
        board: Board,
        topic: str,
        gloo: Callable[[], BackendGroup],
        family: Callable[[], Sequence[HostsControl]],
    ) -> None:
        """`board` is this object's own, since it waits for the store for `STORE_S` only. `gloo`
        gives the backend of the team's runs, `family` the controls of all such teams."""
        lives = [PeerProcess(None) for _ in ranks]  # `cause` has the board tell who ended
        super().__init__(team, ranks, me, [blank() for _ in ranks], lives, board.word)
        self._hosts, self._board, self._topic, self._gloo = [*hosts], board, topic, gloo
        if default_gloo() is None:  # that of NCCL's jobs
            board.probe = lambda rank: refuses(gloo(), self.ranks.index(rank))
        self._family = family
        self._others = {*self.ranks} - {self.ranks[me]}
        self._next_look, self._said = 0.0, 0
        self._lost = False
        """True if the store did not answer when it was last asked."""
        self._last = [0] * len(ranks)
        """When each rank left the note that was read last, by its own clock."""
        self._asked, self._questions = float("-inf"), 0
        """When this rank asked where the others are, and how often any did, as it saw last;"""
        self._heard: set[int] = set()
        """who has answered since this rank asked."""
        self._given: dict[int, deque[tuple[torch.Tensor, dist.Work]]] = {}
        """Heads that peers may not have taken yet,"""
        self._posted: dict[int, tuple[torch.Tensor, dist.Work]] = {}
        """and those of peers that this rank waits for in this run."""
        self._gathers, self._told_of = False, 0
        """True if the run that begins has collectives; the run that peers were last told of."""

    def begin(self, contacts: Contacts) -> None:
        """Once this rank has entered a run: tells those that take its messages which Program it
        runs. `meet_all` hears that of those whose it takes."""
        self._gathers = contacts.gathers
        if not (contacts.sources or contacts.targets):
            return
        try:
            self._post(self._gloo(), contacts)
        except RuntimeError as error:  # a connection is closed
            raise self._cause(error) from error

    def _post(self, gloo: BackendGroup, contacts: Contacts) -> None:
        for peer in contacts.targets:
            head = torch.frombuffer(bytearray(self._head()), dtype=torch.uint8)
            sent = self._given.setdefault(peer, deque())
            if len(sent) == MOST_HEADS:
                sent.popleft()[1].wait()  # bounded by gloo's own time-out
            sent.append((head, gloo.send([head], peer, HEAD_TAG)))
        for peer in contacts.sources:
            room = torch.empty(HEAD.size, dtype=torch.uint8)
            self._posted[peer] = room, gloo.recv([room], peer, HEAD_TAG)

    def meet_all(self, wait: BoundedWait) -> None:
        """Returns once all whose data this rank takes in this run run the same Program."""
        if self._gathers:
            self._gather(wait)
        while self._posted:
            peer = next(iter(self._posted))
            room, work = self._posted[peer]
            call, gloo = Errand(work.wait), self._gloo()
            try:
                self._watching(wait).result_of(call, lambda peer=peer: self.where([peer]))
            except RuntimeError as error:
                raise self._cause(error) from error
            except BaseException:
                cut(gloo)
                raise
            self._see(peer, *HEAD.unpack(bytes(room.tolist())))
            del self._posted[peer]

    def meet(self, peer: int, wait: BoundedWait) -> None:
        """Nothing: they met as the run began."""

    def reach(self, backend: int, count: int, wait: BoundedWait) -> None:
        """Nothing: gloo's own collective is the rendezvous."""

    def check_run(self) -> None:
        """Raises where a rank has stopped: they met as the run began."""
        self.check()

    def _gather(self, wait: BoundedWait) -> None:
        gloo, size = self._gloo(), len(self.ranks)
        wait = replace(self._watching(wait), behind=self.behind, cut=partial(cut, gloo))
        spec = Spec("all_gather", size, self.me, (HEAD.size,) * size, torch.uint8)
        gathered = bytearray(size * HEAD.size)
        mine = bytearray(self._head())
        src, dst = (torch.frombuffer(each, dtype=torch.uint8) for each in (mine, gathered))
        try:
            bind_collective(gloo, spec, wait.timeout_s)(src, dst, wait)
        except RuntimeError as error:
            raise self._cause(error) from error
        for peer, theirs in enumerate(HEAD.iter_unpack(gathered)):
            self._see(peer, *theirs)

    def _head(self) -> bytes:
        mine = self._entry(self.me, self.run)
        assert mine is not None
        return HEAD.pack(self.run, mine[0])

    def _watching(self, wait: BoundedWait) -> BoundedWait:
        """A wait that also ends where a peer runs another Program, or waits for this rank in a
        meeting; of a wait that lasts, this rank tells."""
        since = time.monotonic()

        def check() -> None:
            wait.check()
            if self._told_of < self.run and time.monotonic() > since + TELL_AFTER_S:
                self._told_of = self.run
                self._publish()
            if (error := self.disagreement()) is not None:
                raise error
            self._check_absent()

        return replace(wait, check=check)

    def _see(self, peer: int, run: int, tag: int) -> None:
        """Raises unless the peer is in this rank's run, of the same Program."""
        if (run, tag) != HEAD.unpack(self._head()):
            self._ask(awaits=False)
            self._compare(peer, self.run)
            raise AgreementError(
                f"{self._who(peer)} of team {self.team} begins run {run} of another Program than "
                f"{self._who(self.me)} run {self.run}: every rank of a team must run the same "
                "Programs in the same order"
            )
        self._met[peer] = self.run

    def _check_absent(self) -> None:
        """Also whether a peer that has not begun this run waits for this rank in a meeting."""
        self.check()
        if any(self._cells[peer][ATTENDS] for peer, _ in self._peers):
            self._look(now=True)
            for peer, _ in self._peers:
                self._check_attends(peer)

    def failure(self) -> InterlaceError | None:
        self._look(now=True)
        return super().failure()

    def heard(self) -> InterlaceError | None:
        self._look()
        return super().failure()

    def cause(self) -> InterlaceError | None:
        return self.failure() or self._death()

    def _death(self) -> InterlaceError | None:
        gone = sorted(self._board.ended(self._others) & self._others)
        if not gone:
            return None
        who = self._who(self.ranks.index(gone[0]))
        if word := self._board.word(gone[0]):
            return PeerError(f"{who} of team {self.team} stopped: {word}")
        return PeerError(f"{who} of team {self.team} died: its process has ended")

    def _cause(self, error: RuntimeError) -> InterlaceError:
        """The error behind a failed transfer: ranks that cut their connections said why before."""
        deadline = time.monotonic() + BEHIND_S
        while time.monotonic() < deadline:
            if (found := self.cause()) is not None:
                return found
            time.sleep(PAUSE_S)
        return PeerError(f"a transfer of team {self.team} failed: {str(error).splitlines()[0]}")

    def fail(self, error: BaseException, kind: int | None = None) -> None:
        before = self._mine[ERROR]
        super().fail(error, kind)
        if self._mine[ERROR] == before:
            return
        self._publish()
        if self._mine[ERROR] != RESETTING:
            cut(self._gloo())

    def resetting(self) -> int | None:
        self._look()
        return super().resetting()

    def reset(self, run: int) -> None:
        super().reset(run)
        self._heard.clear()
        self._asked, self._gathers, self._told_of = float("-inf"), False, run
        self._given.clear()
        self._posted.clear()
        for peer, _ in self._peers:
            self._cells[peer] = blank()
            self._cells[peer][ENTERED] = self._cells[peer][EXITED] = run
        self._publish()

    def behind(self) -> str:
        return self.where([n for n, _ in self._peers])

    def silent(self) -> list[int]:
        """Who did not answer: of ranks on this host, where the store is out of reach, that means
        nothing."""
        silent = [n for n, _ in self._peers if n not in self._heard]
        if self._lost:
            return [n for n in silent if self._hosts[n] != self._hosts[self.me]]
        return silent

    def where(self, members: Sequence[int]) -> str:
        """Who is missing, and where each of them stands. A member that answered waits for somebody
        else, as in a ring: where all did, the ranks that did not answer are named instead."""
        self._ask()
        silent = self.silent()
        shown = [n for n in members if n in silent]
        text = super().where(shown or (silent if members else ()) or members)
        if self._lost:
            text += "\nthe store of the job does not answer: its host may be out of reach"
        return text.lstrip()

    def _ask(self, awaits: bool = True) -> None:
        """Has the peers on all such teams say where they are, unless they just did. Where all of
        this one's answer, they wait for others: `awaits` their errors, which say for whom."""
        due = [c for c in self._family() if time.monotonic() > c._asked + 2 * ASK_S]
        if self not in due:
            return
        for control in due:
            control._heard.clear()
            control._asked = time.monotonic()
            with contextlib.suppress(InterlaceError):
                control._board.count(f"{control._topic}/asked")
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline and any(
            len(control._heard) < len(control._peers) for control in due
        ):
            time.sleep(PAUSE_S)
            for control in self._family():
                control._look(now=True)
        deadline = time.monotonic() + ASK_S * (awaits and not self._lost and not self.silent())
        while time.monotonic() < deadline and not any(c.failure() for c in self._family()):
            time.sleep(PAUSE_S)

    def _who(self, member: int) -> str:
        return f"{super()._who(member)} on host {self._hosts[member]}"

    def _stand(self, member: int) -> str:
        host, run = f"on host {self._hosts[member]}", self.run
        if member in self._heard:
            return f"{host} {super()._stand(member)}"
        why = "its host cannot be reached"
        if self._met[member] == run:
            return f"{host} is in run {run}, and does not answer: an op stalls it, or {why}"
        return f"{host} does not answer: it has not come to run {run}, is stalled, or {why}"

    def _publish(self) -> None:
        """Leaves this rank's block in the store, for who looks."""
        cells = [[at, cell] for at, cell in enumerate(self._mine) if cell]
        note = {"cells": cells, "now": time.monotonic_ns()}
        with contextlib.suppress(InterlaceError):
            self._board.post(f"{self._topic}/{self.me}", note)
            self._board.count(f"{self._topic}/said")

    def _look(self, now: bool = False) -> None:
        """Reads what ranks left in the store since the last look, and answers those that ask."""
        if not now and time.monotonic() < self._next_look:
            return
        self._next_look, self._lost = time.monotonic() + LOOK_EVERY_S, True
        with contextlib.suppress(InterlaceError):
            topics = [f"{self._topic}/{what}" for what in ("asked", "said")]
            counts = self._board.read_all(topics)
            self._lost = False
            asked, said = (int(count or 0) for count in counts)  # pyright: ignore  # no notes
            if asked != self._questions:
                self._questions = asked
                self._publish()
            if said == self._said:
                return
            for peer, _ in self._peers:
                note = self._board.read(f"{self._topic}/{peer}")
                if note is None or note["now"] == self._last[peer]:
                    continue
                self._cells[peer], self._last[peer] = _block(note), note["now"]
                if self._cells[peer][ENTERED] >= self._mine[ENTERED]:
                    self._heard.add(peer)
            self._said = said


def _block(note: Note) -> memoryview:
    """A rank's block as it left it, its times by this host's clock."""
    cells, ahead = blank(), time.monotonic_ns() - note["now"]
    for at, cell in note["cells"]:
        cells[at] = cell
    for at in range(PROGRESS, PROGRESS + 2 * STREAMS, 2):
        if cells[at]:
            cells[at + 1] = max(0, cells[at + 1] + ahead)
    return cells
