"""An Executor's share of a team beside slots: signals and a staging area.

    demand = Demand(signals=("ready",), stage_nbytes=4096)
    space = Workspace(team, "forward", demand, timeout_s=60)      # all ranks, together
    space.notify("ready", member=1, value=2)
    space.expect("ready", member=1, value=2, wait=wait)

Every rank has one segment: cells that count, then bytes. Its layout may differ from rank to rank,
so each tells it to the others. Stamps carry the number of the run and are never reset.
"""

from __future__ import annotations

from dataclasses import dataclass

from interlace.comm.host.shared_memory import PAGE, align, share
from interlace.comm.host.signals import BoundedWait, fence, stamp
from interlace.comm.rendezvous.board import Note
from interlace.comm.teams import TeamComm

ARRIVED = 0
"""The cell that says which collective this rank's staging area is for."""


@dataclass(frozen=True, slots=True)
class Demand:
    signals: tuple[str, ...] = ()
    stage_nbytes: int = 0
    """The largest part that one rank gives to a collective of the backend `peer`."""


class Workspace:
    def __init__(self, team: TeamComm, topic: str, demand: Demand, timeout_s: float) -> None:
        self.team, size = team, team.size
        if team.apart:  # which may ask for nothing that is here
            return
        first = {name: 1 + i * size for i, name in enumerate(demand.signals)}
        at = align(8 * (1 + size * len(first)), PAGE)
        note: Note = {"signals": first, "stage": [at, align(demand.stage_nbytes)]}
        at += note["stage"][1]
        place = f"{team.topic}/space/{topic}"
        shared = share(team.board, place, at, note, timeout_s)
        self._notes = shared.notes
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
        self._cells[self.team.me][ARRIVED] = mark

    def await_arrivals(self, mark: int, wait: BoundedWait) -> None:
        def missing() -> str:
            late = [i for i, cells in enumerate(self._cells) if cells[ARRIVED] < mark]
            return self.team.control.where(late)

        wait.until(lambda: all(cells[ARRIVED] >= mark for cells in self._cells), missing)
