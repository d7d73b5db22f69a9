"""An Executor's share of a team beside slots: signals, message boxes and a staging area.

    demand = Demand(signals=("ready",), sends=(Message("peer", 1, 0, 4096),))
    space = Workspace(team, "forward", demand, timeout_s=60)      # all ranks, together
    space.notify("ready", member=1, value=2)
    space.expect("ready", member=1, value=2, wait=wait)

Every rank has one segment: cells that count, then bytes. Its layout may differ from rank to rank,
so each tells it to the others. Stamps carry the number of the run and are never reset.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from interlace.comm.host.shared_memory import PAGE, align, share
from interlace.comm.host.signals import BoundedWait, fence, stamp
from interlace.comm.rendezvous.board import Note
from interlace.comm.teams import TeamComm
from interlace.errors import ProgramError


@dataclass(frozen=True, slots=True)
class Message:
    """A Send to (or a Recv from) a member of the team: the `nth` of the pair in this direction."""

    backend: str
    member: int
    nth: int
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Demand:
    signals: tuple[str, ...] = ()
    sends: tuple[Message, ...] = ()
    recvs: tuple[Message, ...] = ()
    stage_nbytes: int = 0
    """The largest part that one rank gives to a collective of the backend `peer`."""


Cell = tuple[memoryview, int]


@dataclass(slots=True)
class MessageBox:
    """Where a message is: counters of both sides, and the bytes if they pass through memory."""

    sent: Cell
    ready: Cell
    data: torch.Tensor | None = None


class Workspace:
    def __init__(self, team: TeamComm, topic: str, demand: Demand, timeout_s: float) -> None:
        self.team, size, cell = team, team.size, 0

        def cells(count: int) -> int:
            nonlocal cell
            cell += count
            return cell - count

        note: Note = {"arrived": cells(1)}
        note["signals"] = {name: cells(size) for name in demand.signals}
        note["sends"] = [[m.member, cells(1), 0] for m in demand.sends]
        note["recvs"] = [[m.member, cells(1)] for m in demand.recvs]
        at = align(cell * 8, PAGE)
        for message, entry in zip(demand.sends, note["sends"], strict=True):
            entry[2] = at
            at += align(message.nbytes)
        note["stage"] = [at, align(demand.stage_nbytes)]
        at += align(demand.stage_nbytes)
        place = f"{team.topic}/space/{topic}"
        if team.apart:  # messages meet in gloo, and nothing else may be asked for
            self._notes = tuple(team.board.exchange(f"{place}/messages", note, timeout_s))
            self._cells = [memoryview(b"")] * size
            return
        shared = share(team.board, place, at, note, timeout_s)
        self._segments, self._notes = shared.segments, shared.notes
        self._cells = [segment.cells for segment in shared.segments]
        members = zip(shared.segments, shared.notes, strict=True)
        self.stages = [segment.bytes(*told["stage"]) for segment, told in members]

    def notifier(self, signal: str, members: tuple[int, ...]) -> list[tuple[memoryview, int]]:
        """The cells that raise `signal` on these members; a member that never looks has none."""
        firsts = [(member, self._notes[member]["signals"].get(signal)) for member in members]
        me = self.team.me
        return [(self._cells[member], first + me) for member, first in firsts if first is not None]

    def notify(self, cells: list[tuple[memoryview, int]], value: int) -> None:
        """Raises a signal, after everything that came before it."""
        mark = stamp(self.team.control.run, value)
        fence()
        for cell, at in cells:
            cell[at] = mark

    def expect(self, signal: str, members: tuple[int, ...], value: int, wait: BoundedWait) -> None:
        """Returns when all these members have raised `signal` to `value` in this run."""
        control, mine = self.team.control, self._cells[self.team.me]
        mark = stamp(control.run, value)
        first = self._notes[self.team.me]["signals"][signal]
        for member in members:
            at = first + member
            if mine[at] < mark:
                control.meet(member, wait)
                wait.until(lambda at=at: mine[at] >= mark, lambda m=member: control.where([m]))
        fence()

    def arrived(self, mark: int) -> None:
        """This rank's staging area holds what it gives to the collective with this stamp."""
        fence()
        self._cells[self.team.me][self._notes[self.team.me]["arrived"]] = mark

    def await_arrivals(self, mark: int, wait: BoundedWait) -> None:
        pairs = [
            (cells, note["arrived"]) for cells, note in zip(self._cells, self._notes, strict=True)
        ]

        def missing() -> str:
            late = [i for i, (cells, at) in enumerate(pairs) if cells[at] < mark]
            return self.team.control.where(late)

        wait.until(lambda: all(cells[at] >= mark for cells, at in pairs), missing)

    def box(self, message: Message, sends: bool) -> MessageBox:
        """Where this rank's Send meets its Recv, or (not `sends`) its Recv its Send."""
        me, nth = self.team.me, message.nth
        sender, receiver = (me, message.member) if sends else (message.member, me)
        sent = [entry for entry in self._notes[sender]["sends"] if entry[0] == receiver]
        recvs = [entry for entry in self._notes[receiver]["recvs"] if entry[0] == sender]
        if nth >= len(sent) or nth >= len(recvs):
            ranks = self.team.ranks
            raise ProgramError(
                f"rank {ranks[sender]} sends {len(sent)} messages to rank {ranks[receiver]} in "
                f"team {self.team.name}, which receives {len(recvs)}: each Send needs its Recv"
            )
        _, sent_at, data_at = sent[nth]
        nbytes = message.nbytes
        data = self._segments[sender].bytes(data_at, nbytes) if nbytes else None
        return MessageBox(
            (self._cells[sender], sent_at), (self._cells[receiver], recvs[nth][1]), data
        )
