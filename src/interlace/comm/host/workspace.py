"""An Executor's share of a team beside slots: signals and a staging area.

    demand = Demand(signals=("ready",), stage_nbytes=4096)
    space = Workspace(team, "forward", demand, timeout_s=60)      # all ranks, together
    tell(space.raised("ready", members=(1,)), stamp(run, 2))
    wait.for_marks(space.awaited("ready", members=(1,)), stamp(run, 2), missing)

Every rank has one segment: cells that count, then bytes. Its layout may differ from rank to rank,
so each tells it to the others. Stamps carry the number of the run and are never reset.
"""

from __future__ import annotations

from dataclasses import dataclass

from interlace.comm.host.shared_memory import PAGE, align, share
from interlace.comm.host.signals import BoundedWait, tell
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

    def raised(self, signal: str, members: tuple[int, ...]) -> list[tuple[memoryview, int]]:
        """The cells that raise `signal` on these members; a member that never looks has none."""
        firsts = [(member, self._notes[member]["signals"].get(signal)) for member in members]
        seen = self.team.seen_by
        return [(self._cells[m], first + seen(m)) for m, first in firsts if first is not None]

    def awaited(self, signal: str, members: tuple[int, ...]) -> list[tuple[memoryview, int]]:
        """The cells by which these members raise `signal` here."""
        first, mine = self._notes[self.team.me]["signals"][signal], self._cells[self.team.me]
        return [(mine, first + member) for member in members]

    def arrived(self, mark: int) -> None:
        """This rank's staging area holds what it gives to the collective with this stamp."""
        tell([(self._cells[self.team.me], ARRIVED)], mark)

    def await_arrivals(self, mark: int, wait: BoundedWait) -> None:
        cells = [(each, ARRIVED) for each in self._cells]
        wait.for_marks(cells, mark, self.team.control.where)
