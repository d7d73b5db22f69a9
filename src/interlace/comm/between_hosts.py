"""What the ranks of a team know of each other where they are on hosts that share no memory.

    control = HostsControl("dp", ranks, me, hosts, store, topic, lambda: gloo)
    control.enter(tag, "forward")
    control.begin(time_out_s=60)            # all ranks

Note [Between hosts]
    Runs go by gloo or NCCL. Where a run begins its ranks tell each other which Program they run, in
    one gather of 16 bytes by gloo, so that none takes the data of another Program; on GPUs too, so
    there the host of a rank is at most one run ahead of the hosts of the others. No store is asked.

    A rank that fails leaves its block in the store and cuts its connections; gloo then raises on
    its peers, which find in the store what was behind it. Who waits longer looks there too, a few
    times a second, at one counter. A rank whose wait is over asks where the others are: those that
    wait as well answer, and the error names the others, which may be stalled, or out of reach. Of
    a rank that was killed, gloo's closed connection tells (`disconnected` in liveness.py).
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from interlace.comm.backends import cut
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
from interlace.comm.rendezvous.board import Board
from interlace.comm.rendezvous.liveness import PeerProcess, default_gloo, refuses
from interlace.errors import AgreementError, InterlaceError, PeerError

LOOK_EVERY_S, PAUSE_S = 0.25, 0.02
ANSWER_S = 1.5
"""How long ranks may take to answer one whose wait is over: several looks,"""
BEHIND_S = 2.0
"""and to leave word of what made them cut their connections."""
STORE_S = 1.0
"""How long the store may take to answer; it may be out of reach."""
ASK_S = ANSWER_S + STORE_S
"""How long a rank whose wait is over may take to find out who is late."""
RUN_AND_TAG = struct.Struct("QQ")
"""What is gathered where a run begins; the tag is that of the Program."""


def of_hosts(controls: Iterable[Control]) -> tuple[list[HostsControl], list[HostsControl]]:
    """Those whose ranks meet where a run begins, and those whose ranks are among these."""
    found = [control for control in controls if isinstance(control, HostsControl)]
    within = [c for c in found if any({*c.ranks} < {*other.ranks} for other in found)]
    return [control for control in found if control not in within], within


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
        gloo: Callable[[], Any],
    ) -> None:
        """`board` is this object's own, since it waits for the store for `STORE_S` only. `gloo`
        gives the backend of the team's runs."""
        lives = [PeerProcess(None) for _ in ranks]  # `cause` has the board tell who ended
        super().__init__(team, ranks, me, [blank() for _ in ranks], lives, board.word)
        self._hosts, self._board, self._topic, self._gloo = [*hosts], board, topic, gloo
        if default_gloo() is None:  # that of NCCL's jobs
            board.probe = lambda rank: refuses(gloo(), self.ranks.index(rank))
        self._others = {*self.ranks} - {self.ranks[me]}
        self._next_look, self._said, self._asked = 0.0, 0, float("-inf")
        self._last = [0] * len(ranks)
        """When each rank left the note that was read last, by its own clock."""
        self._heard: set[int] = set()
        """Who has answered since this rank asked."""

    def begin(self, time_out_s: float) -> None:
        """Once this rank has entered a run: waits for all others, and sees that they run the same
        Program."""
        run, gloo = self.run, self._gloo()
        mine = self._entry(self.me, run)
        assert mine is not None
        tag, name = mine
        wait = BoundedWait(
            time_out_s,
            lambda: f"run {run} of team {self.team}, of {name!r}, begins",
            self._check_absent,
            behind=self.behind,
            cut=partial(cut, gloo),
        )
        size = len(self.ranks)
        spec = Spec("all_gather", size, self.me, (RUN_AND_TAG.size,) * size, torch.uint8)
        given = bytearray(RUN_AND_TAG.pack(run, tag))
        gathered = bytearray(size * RUN_AND_TAG.size)
        src, dst = (torch.frombuffer(each, dtype=torch.uint8) for each in (given, gathered))
        try:
            bind_collective(gloo, spec, time_out_s)(src, dst, wait)
        except RuntimeError as error:
            raise self._cause(error) from error
        for peer, theirs in enumerate(RUN_AND_TAG.iter_unpack(gathered)):
            if theirs != (run, tag):
                self._ask()
                self._compare(peer, run)
                raise AgreementError(
                    f"{self._who(peer)} of team {self.team} begins run {theirs[0]} of another "
                    f"Program than {self._who(self.me)} run {run}: every rank of a team must run "
                    "the same Programs in the same order"
                )
            self._met[peer] = run

    def begun(self) -> None:
        """All ranks of this team are in the run: they met as ranks of a team that has more."""
        self._met = [self.run] * len(self.ranks)

    def meet(self, peer: int, wait: BoundedWait) -> None:
        """Nothing: where the run began, all met."""

    def reach(self, backend: int, count: int, wait: BoundedWait) -> None:
        """Nothing: gloo's own collective is the rendezvous."""

    def check(self) -> None:
        if (error := self.heard()) is not None:
            raise error

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
        """What made a transfer fail: ranks that cut their connections said why before."""
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

    def attend(self, meeting: str) -> None:
        super().attend(meeting)
        self._publish()

    def resetting(self) -> int | None:
        self._look()
        return super().resetting()

    def begin_reset(self) -> None:
        super().begin_reset()
        self._publish()

    def give_up_reset(self, error: BaseException) -> None:
        super().give_up_reset(error)
        self._publish()

    def reset(self, run: int) -> None:
        super().reset(run)
        self._heard.clear()
        self._asked = float("-inf")
        for peer, _ in self._peers:
            self._cells[peer] = blank()
            self._cells[peer][ENTERED] = self._cells[peer][EXITED] = run
        self._publish()

    def behind(self) -> str:
        """Where the ranks stand that do not answer; or all others, if they do."""
        self._ask()
        silent = [n for n, _ in self._peers if n not in self._heard]
        return super().where(silent or [n for n, _ in self._peers])

    def where(self, members: Sequence[int]) -> str:
        self._ask()
        return super().where(members)

    def _ask(self) -> None:
        """Has the peers say where they are in this run, unless they just did."""
        if time.monotonic() < self._asked + 2 * ASK_S:
            return
        self._heard.clear()
        self._publish(asks=True)
        self._asked = time.monotonic()
        while time.monotonic() < self._asked + ANSWER_S and len(self._heard) < len(self._peers):
            time.sleep(PAUSE_S)
            self._look(now=True)

    def _who(self, member: int) -> str:
        return f"{super()._who(member)} on host {self._hosts[member]}"

    def _stand(self, member: int) -> str:
        host = f"on host {self._hosts[member]}"
        if member not in self._heard:
            run = self._mine[ENTERED]
            if self._met[member] == run:
                return (
                    f"{host} is in run {run}, and does not answer: an op stalls it, or its host "
                    "cannot be reached"
                )
            return (
                f"{host} does not answer: it has not come to run {run}, is stalled, or its host "
                "cannot be reached"
            )
        return f"{host} {super()._stand(member)}"

    def _publish(self, asks: bool = False) -> None:
        """Leaves this rank's block in the store, for who looks; one that `asks` is answered."""
        cells = [[at, cell] for at, cell in enumerate(self._mine) if cell]
        note = {"cells": cells, "asks": asks, "now": time.monotonic_ns()}
        with contextlib.suppress(InterlaceError):
            self._board.post(f"{self._topic}/{self.me}", note)
            self._board.count(f"{self._topic}/said")

    def _look(self, now: bool = False) -> None:
        """Reads what ranks left in the store since the last look, and answers those that ask."""
        if not now and time.monotonic() < self._next_look:
            return
        self._next_look, asked = time.monotonic() + LOOK_EVERY_S, False
        with contextlib.suppress(InterlaceError):
            said: Any = self._board.read(f"{self._topic}/said")
            if said is None or said == self._said:
                return
            for peer, _ in self._peers:
                note = self._board.read(f"{self._topic}/{peer}")
                if note is None or note["now"] == self._last[peer]:
                    continue
                self._cells[peer], self._last[peer] = _block(note), note["now"]
                asked |= note["asks"]
                if self._cells[peer][ENTERED] >= self._mine[ENTERED]:
                    self._heard.add(peer)
            self._said = said
        if asked:
            self._publish()


def _block(note: dict[str, Any]) -> memoryview:
    """A rank's block as it left it, its times by this host's clock."""
    cells, ahead = blank(), time.monotonic_ns() - note["now"]
    for at, cell in note["cells"]:
        cells[at] = cell
    for at in range(PROGRESS, PROGRESS + 2 * STREAMS, 2):
        if cells[at]:
            cells[at + 1] = max(0, cells[at + 1] + ahead)
    return cells
