"""Which maps of the ranks change nothing: they keep every Program, and turn every team as a whole.

    turns = turns_of(actors)                # by team; none where nothing can be folded
    first = standing(turns, ranks)          # the rank that stands for each

The verifier visits, and the simulator plays, only ranks that stand for themselves.

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
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from interlace.ir.program import Program
from interlace.ir.types import Index, Others, Where

Map = dict[int, int]
"""A map of the ranks, by rank."""
Ends = Collection[tuple[str, Index | Others]]
"""The single ranks that a rank has to do with, by team."""
MOST_TEAMS = 256
"""Teams of a Program that may turn: of a set with more, nothing is folded."""


@dataclass(frozen=True, slots=True, eq=False)
class Actor:
    """A Program, the ranks that run it, and how it tells ranks apart."""

    program: Program
    ranks: Sequence[int]
    ends: Ends
    apart: Collection[str] = ()
    """Further teams whose ranks it tells apart."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The turn of a team."""

    to: Map
    shifts: Mapping[str, int]
    """The number of places by which it turns each team."""

    def moves(self, teams: Iterable[str]) -> bool:
        """Returns True if some of these teams do not stay in place."""
        return any(self.shifts.get(name) for name in teams)


def turns_of(
    actors: Sequence[Actor],
    stuck: Callable[[Collection[str]], Collection[str]] = lambda moving: (),
) -> tuple[dict[str, Turn], Members]:
    """The turns that are automorphisms, by team, and who is where. Of the teams that would move,
    `stuck` says which must not."""
    if any(len(actor.program.teams) > MOST_TEAMS for actor in actors):
        return {}, Members(())
    members = Members(actors)
    if not members.complete:
        return {}, members
    told = {name for actor in actors for name in _told_apart(actor)}
    turns: dict[str, Turn] = {}
    for name, groups in members.groups.items():
        if name not in told and max(map(len, groups)) > 1:
            turn = members.turn(name)
            if turn is not None and not turn.moves(told):
                turns[name] = turn
    while turns:
        fixed = stuck({name for turn in turns.values() for name, by in turn.shifts.items() if by})
        if not fixed:
            break
        turns = {name: turn for name, turn in turns.items() if not turn.moves(fixed)}
    return turns, members


def standing(turns: Iterable[Map], ranks: Iterable[int]) -> Map:
    """The rank that stands for each: the first of those that turns can carry to it."""
    first, steps = Map(), [*turns]
    for start in ranks:
        if start in first:
            continue
        first[start] = start
        reached = [start]
        for at in reached:  # grows while it is walked
            for turn in steps:
                if turn[at] not in first:
                    first[turn[at]] = start
                    reached.append(turn[at])
    return first


class Members:
    """The ranks of a set that runs together, and the instances of its teams."""

    def __init__(self, actors: Sequence[Actor]) -> None:
        self.homes = {rank: actor for actor in actors for rank in actor.ranks}
        self.wheres: dict[int, Where] = {
            where.rank: where for actor in actors for where in actor.program.wheres(actor.ranks)
        }
        self.groups: dict[str, list[tuple[int, ...]]] = {}
        shared = {  # members of an instance have one tuple, which is long to hash
            (name, id(m.ranks)): m.ranks
            for where in self.wheres.values()
            for name, m in where.members.items()
        }
        for group in dict.fromkeys((name, ranks) for (name, _), ranks in shared.items()):
            self.groups.setdefault(group[0], []).append(group[1])
        everyone = {rank for groups in self.groups.values() for group in groups for rank in group}
        several = len(self.homes) < sum(len(actor.ranks) for actor in actors)
        self.complete = everyone <= self.homes.keys() and not several
        """Each rank of each team runs one Program."""

    def turn(self, team: str) -> Turn | None:
        """The turn of a team; None if it is no automorphism."""
        turn = Map()
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
        return Turn(turn, shifts)


def _told_apart(actor: Actor) -> Iterator[str]:
    """The teams whose ranks a Program tells apart."""
    yield from actor.apart
    for table in actor.program.tables:
        if len({*table.values}) > 1:
            yield table.team
    for team, peer in actor.ends:
        if isinstance(peer, int) or peer.team != team:  # one counted from another team's rank
            yield team
            yield from counted_from(peer)


def counted_from(index: Index | Others) -> Iterator[str]:
    """The team of a rank that is no number."""
    if not isinstance(index, int):
        yield index.team
