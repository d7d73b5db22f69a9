"""Which maps of the ranks change nothing: they keep every Program, and turn every team as a whole.

    turns = Turns.of(sources)
    turns.first[1023], turns.folded        # (0, ("dp", "tp")): rank 0 stands for rank 1023
    turns.carry(9)[0]                      # 9: by the map that carries 0 there

Note [A turn is an automorphism]
    For a team T, let a turn take each rank in T to the next one of its instance of T, and leave the
    others where they are. Say that it takes each rank to one that runs the same Program, and each
    instance of each team U to an instance of U, all by one number of places c(U); and that c(U) is
    0 where a Program tells the ranks of U apart: by a number or a rank of another team as a peer,
    by a root, by a table of different entries; and where it is by U's rank that such a peer, root
    or entry is found. Then it maps an op to the same op, a peer at some distance to the peer of
    the image at that distance, an event or a meeting to the image's: each edge of semantics.md to
    an edge. So what comes before what, and what waits in a circle, is the same for a rank and its
    image. Turns of several teams compose.

    A turn that leaves one rank where it is leaves all ranks of its teams there, since they keep
    their distance from it; so all ranks that it could ever have to do with. Hence it does not
    matter which composition of turns carries a rank to another.

Note [Two ranks stand for any number]
    Say that ranks of T meet in collectives without a root alone, that all ranks are in T, and that
    each instance of another team has one place in T. Map the ranks of any two places d and e of T
    to the places 0 and 1, and those of the other places to 1 as well: each edge becomes an edge,
    since those from one place to another come from collectives, and so exist between any two. The
    other way round, two places with what is between them are a part of the whole. So an op of
    place d comes before one of place e exactly if so it is in a world with two places, and
    something waits in a circle exactly if it does there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from interlace.ir.ops import Collective, MessageEnd, SignalLevel
from interlace.ir.types import Index, Others, TableEntry, Where
from interlace.verify.happens_before.source import LoweredProgram
from interlace.verify.report import Symmetry
from interlace.verify.symmetry.turning import spots_of, turning

MOST = 2048
"""Ranks among which order is worked out, at most: each knows how far each of them has come."""
Map = dict[int, int]
"""A map of the ranks, by rank."""
MOST_TEAMS = 256
"""Teams of a Program that may turn: of a set with more, all ranks are visited."""


@dataclass(slots=True, eq=False)
class Turns:
    """The maps, and which rank stands for each."""

    folded: tuple[str, ...]
    """The teams that are turned."""
    few: frozenset[str]
    """Folded teams of which two ranks stand for all: Note [Two ranks stand for any number]."""
    first: Map
    """Rank that stands for each rank, by rank."""
    among: tuple[int, ...]
    """The ranks between which order is worked out: of the teams in `few`, the first two."""
    _turns: Sequence[Map]
    """The turn of each folded team, on `among`."""
    _steps: dict[int, tuple[int, Map]] = field(default_factory=dict[int, tuple[int, Map]])
    """For each rank, one nearer to the rank that stands for both, and the map from there."""
    _carry: dict[int, Map] = field(default_factory=dict[int, Map])
    _back: dict[int, Map] = field(default_factory=dict[int, Map])

    @classmethod
    def of(cls, sources: Sequence[LoweredProgram]) -> Turns | None:
        """The Turns of a set that runs together; None where nothing can be folded."""
        for source in sources:
            if any(source.program.team(name).size > MOST for name, _ in _ends(source)):
                return None
        homes = {rank: source for source in sources for rank in source.ranks}
        wheres = {w.rank: w for s in sources for w in s.program.wheres(s.ranks)}
        if len(homes) < sum(len(source.ranks) for source in sources):
            return None  # a rank runs two Programs
        if any(len(source.program.teams) > MOST_TEAMS for source in sources):
            return None
        finder = _Finder(homes, wheres)
        everyone = {rank for groups in finder.groups.values() for group in groups for rank in group}
        return finder.run(sources) if everyone <= homes.keys() else None

    def carry(self, rank: int) -> Map:
        """A map that takes the rank which stands for this one to it, on `among`."""
        path = [rank]
        while path[-1] not in self._carry:
            path.append(self._steps[path[-1]][0])
        while len(path) > 1:
            carried, (at, (_, step)) = self._carry[path.pop()], (path[-1], self._steps[path[-1]])
            self._carry[at] = dict(
                zip(carried, map(step.__getitem__, carried.values()), strict=True)
            )
        return self._carry[rank]

    def back(self, rank: int) -> Map:
        """The map that takes this rank to the one that stands for it, on `among`."""
        found = self._back.get(rank)
        if found is None:
            carried = self.carry(rank)
            found = self._back[rank] = dict(zip(carried.values(), carried, strict=True))
        return found

    def told(self) -> Symmetry:
        """The symmetry as a report has it."""
        return Symmetry(self.visited, self.folded, tuple(sorted(self.few)))

    @property
    def visited(self) -> tuple[int, ...]:
        """The ranks that stand for others, or for themselves alone."""
        return tuple(sorted({*self.first.values()}))

    def spread(self) -> None:
        """Finds the way to each rank of `among`."""
        maps = [*self._turns, *({to: at for at, to in turn.items()} for turn in self._turns)]
        for rank in self.visited:
            self._carry[rank] = {one: one for one in self.among}
            reached = [rank]
            for at in reached:  # grows while it is walked
                for step in maps:
                    if step[at] not in self._steps and step[at] not in self._carry:
                        self._steps[step[at]] = at, step
                        reached.append(step[at])


class _Finder:
    def __init__(self, homes: Mapping[int, LoweredProgram], wheres: Mapping[int, Where]) -> None:
        self.homes, self.wheres = homes, wheres
        self.groups: dict[str, list[tuple[int, ...]]] = {}
        shared = {  # members of an instance have one tuple, which is long to hash
            (name, id(m.ranks)): m.ranks
            for where in wheres.values()
            for name, m in where.members.items()
        }
        for group in dict.fromkeys((name, ranks) for (name, _), ranks in shared.items()):
            self.groups.setdefault(group[0], []).append(group[1])

    def run(self, sources: Sequence[LoweredProgram]) -> Turns | None:
        ends = {source.number: _ends(source) for source in sources}
        told = {name for s in sources for name in _told_apart(s, ends[s.number])}
        turns: dict[str, tuple[Map, dict[str, int]]] = {}
        for name, groups in self.groups.items():
            if name not in told and max(map(len, groups)) > 1:
                turn = self.turn(name)
                if turn is not None and not any(turn[1].get(one) for one in told):
                    turns[name] = turn
        while turns:
            moving = {name for _, shifts in turns.values() for name, by in shifts.items() if by}
            stuck = turning(sources, moving)
            if not stuck:
                break
            turns = {
                name: (turn, shifts)
                for name, (turn, shifts) in turns.items()
                if not any(shifts.get(one) for one in stuck)
            }
        if not turns:
            return None
        counted = {name for found in ends.values() for name, _ in found}
        few = frozenset(
            name for name in turns if name not in counted and self.is_level(name, turns[name][1])
        )
        among = tuple(
            rank
            for rank, where in sorted(self.wheres.items())
            if all(where.members[name].index < 2 for name in few)
        )
        if len(among) > MOST:
            return None
        on_few = [self.swap(name) if name in few else turn for name, (turn, _) in turns.items()]
        first = self.stand([turn for turn, _ in turns.values()], among)
        made = Turns(tuple(turns), few, first, among, on_few)
        made.spread()
        return made

    def turn(self, team: str) -> tuple[Map, dict[str, int]] | None:
        """The turn of a team, and by how many places it turns each team: None if it is no
        automorphism."""
        turn: Map = {}
        for rank, where in self.wheres.items():
            member = where.members.get(team)
            if member is not None:
                turn[rank] = member.ranks[(member.index + 1) % len(member.ranks)]
            else:
                turn[rank] = rank
            there = self.wheres[turn[rank]]
            if self.homes[turn[rank]] is not self.homes[rank]:
                return None
            if there.members.keys() != where.members.keys():
                return None
        shifts: dict[str, int] = {}
        for name, groups in self.groups.items():
            for ranks in groups:
                image = self.wheres[turn[ranks[0]]].members[name]
                by, count = image.index, len(ranks)
                if len(image.ranks) != count or shifts.setdefault(name, by) != by:
                    return None
                if any(turn[r] != image.ranks[(i + by) % count] for i, r in enumerate(ranks)):
                    return None
        return turn, shifts

    def is_level(self, team: str, shifts: Mapping[str, int]) -> bool:
        """Returns True if each instance of another team has one place in this one."""
        if any(by for name, by in shifts.items() if name != team):
            return False
        if any(team not in where.members for where in self.wheres.values()):
            return False
        return all(
            len({self.wheres[rank].members[team].index for rank in ranks}) == 1
            for name, groups in self.groups.items()
            if name != team
            for ranks in groups
        )

    def swap(self, team: str) -> Map:
        """The turn of a team of which two ranks stand for all."""
        members = {rank: where.members[team] for rank, where in self.wheres.items()}
        return {r: m.ranks[1 - m.index] for r, m in members.items() if m.index < 2}

    def stand(self, turns: Sequence[Map], among: Sequence[int]) -> Map:
        """The rank that stands for each: the first of those that it can be carried to."""
        first: Map = {}
        for start in among:
            if start in first:
                continue
            first[start] = start
            reached = [start]
            for at in reached:  # grows while it is walked
                for turn in turns:
                    if turn[at] not in first:
                        first[turn[at]] = start
                        reached.append(turn[at])
        return first


Ends = set[tuple[str, Index | Others]]
"""Other ranks, by team."""


def _told_apart(source: LoweredProgram, ends: Ends) -> Iterator[str]:
    """The teams whose ranks a Program tells apart."""
    teams = {table.name: table.team for table in source.program.tables}
    uneven = {table.name for table in source.program.tables if len({*table.values}) > 1}
    yield from map(teams.__getitem__, sorted(uneven))
    spots = (spot for _, spot in spots_of(source))
    for spot in (*(version.spot for version in source.versions), *spots):
        for entry in spot.by_rank:
            if isinstance(entry, TableEntry) and not isinstance(entry.index, int):
                if entry.table in uneven or entry.index.team != teams.get(entry.table):
                    yield entry.index.team
    for team, peer in ends:
        if isinstance(peer, int) or peer.team != team:  # one counted from another team's rank
            yield team
            yield from _counted_from(peer)
    for item in source.items:
        for one in (item, *item.members):
            if isinstance(one.op, Collective) and one.op.root is not None:
                yield one.op.team
                yield from _counted_from(one.op.root)


def _counted_from(index: Index | Others) -> Iterator[str]:
    """The team of a rank that is no number."""
    if not isinstance(index, int):
        yield index.team


def _ends(source: LoweredProgram) -> Ends:
    """The single ranks that a rank has to do with."""
    found: Ends = set()
    seen: set[int] = set()
    for item in source.items:
        for one in (item, *item.members):
            found |= {(t.team, t.peer) for t in one.touches if t.team and t.peer is not None}
            order = one.ordering
            if id(order) not in seen:  # ops that are alike have one
                seen.add(id(order))
                ends: list[MessageEnd | SignalLevel] = [*order.messages]
                ends += [level for level in (order.raises, order.expects) if level is not None]
                found |= {(end.team, end.peer) for end in ends if end.team}
    return found
