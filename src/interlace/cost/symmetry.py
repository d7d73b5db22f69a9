"""Symmetry: which ranks are simulated so that each of the others does as one of them does.

    >>> symmetry = Symmetry.of([program], fold=True)      # on dp[32] x pp[4] x tp[8]
    >>> symmetry.ranks, symmetry.folded
    ({0: 1024}, frozenset({'dp', 'pp', 'tp'}))

Note [Folded teams]
    A team is folded, one of its ranks standing for all, if its ranks run one Program that does not
    tell them apart: peers are at a distance (`tp.rank + 1`), not numbers; tables have equal
    entries; and each message has its ends on different hosts, or none has. Then all that differs
    is where in a buffer a rank works, which costs nothing. What a rank sends at some distance it
    receives from that distance, at the same time. Other teams are simulated whole, among them those
    with ranks in several Programs, such as the stages of a pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from interlace.errors import ProgramError
from interlace.ir import Program, Team, Where, spots
from interlace.ir.types import Member

Homes = Mapping[int, Program]
"""The Program of each rank."""
Places = Mapping[int, Mapping[str, Member]]
"""The place of each rank in its teams."""


@dataclass(frozen=True, slots=True)
class Symmetry:
    """The ranks that are simulated, and where the ranks are that they stand for."""

    ranks: Mapping[int, int]
    """Number of ranks that each simulated rank stands for, itself included."""
    folded: frozenset[str]
    """The teams of which one rank stands for all."""
    hosts: Mapping[int, int]
    """The host of each, told by its first rank; empty where no team spans hosts."""
    beside: Mapping[int, int]
    """Number of ranks on its own host that each simulated rank stands for, itself included."""

    @classmethod
    def of(cls, programs: Sequence[Program], fold: bool = False) -> Symmetry:
        """All ranks of a set of Programs; with `fold`, as few as Note [Folded teams] allows."""
        homes: dict[int, Program] = {}
        for program in programs:
            for rank in _ranks(program):
                if rank in homes:
                    raise ProgramError(f"two Programs of the set run on rank {rank}")
                homes[rank] = program
        spans = any(team.hosts for program in programs for team in program.teams)
        if not (fold or spans):
            return cls(dict.fromkeys(homes, 1), frozenset(), {}, {})
        places = {w.rank: w.members for p in programs for w in p.wheres(_ranks(p))}
        folded, stand = (
            _folded(homes, places) if fold else (frozenset[str](), {r: r for r in homes})
        )
        hosts = _Sets()
        for rank, members in places.items():
            for name, member in members.items():
                team = homes[rank].team(name)
                hosts.join(rank, member.ranks[_host(team, member)[0] if team.hosts else 0])
        beside = Counter(s for r, s in stand.items() if hosts.first(r) == hosts.first(s))
        counts = Counter(stand.values())
        return cls(counts, folded, {r: hosts.first(r) for r in counts} if spans else {}, beside)

    def alike(self, team: Team, where: Where) -> float:
        """The number of collectives at a host's interface for which a simulated one stands."""
        if team.hosts is None:
            return 1.0
        near = _host(team, where.member(team.name)) if team.name in self.folded else (0,)
        return self.beside[where.rank] / len(near)


def _ranks(program: Program) -> tuple[int, ...]:
    return program.world if program.rank is None else (program.rank,)


def _host(team: Team, member: Member) -> tuple[int, ...]:
    """Places in the team of the ranks on a member's host, for a team that spans hosts."""
    return next(host for host in team.hosts or () if member.index in host)


def _folded(homes: Homes, places: Places) -> tuple[frozenset[str], dict[int, int]]:
    """Teams of Note [Folded teams] that leave the others whole, and the rank that stands for each:
    of all that may be folded one after another is left out, that which tears the others least."""
    programs = {id(program): program for program in homes.values()}.values()
    kept = {name for program in programs for name in _told_apart(program)}
    teams = {(name, id(m.ranks)): m.ranks for each in places.values() for name, m in each.items()}
    kept |= {
        name for (name, _), ranks in teams.items() if len({id(homes.get(r)) for r in ranks}) > 1
    }
    folded = sorted({team.name for program in programs for team in program.teams} - kept)
    stand, torn = _standing(places, folded)
    while torn:
        without = [[name for name in folded if name != left] for left in reversed(folded)]
        folded = min(without, key=lambda names: _standing(places, names)[1])
        stand, torn = _standing(places, folded)
    return frozenset(folded), stand


def _standing(places: Places, folded: Sequence[str]) -> tuple[dict[int, int], int]:
    """The first of those that each rank is folded with; and how many ranks the other teams of these
    have that are not such."""
    alike = _Sets()
    for rank, members in places.items():
        for name in members.keys() & {*folded}:
            alike.join(rank, members[name].ranks[0])
    stand = {rank: alike.first(rank) for rank in places}
    others = (
        other
        for rank in {*stand.values()}
        for name, member in places[rank].items()
        if name not in folded
        for other in member.ranks
    )
    return stand, sum(stand.get(other, other) != other for other in others)


def _told_apart(program: Program) -> Iterator[str]:
    """The teams whose ranks a Program tells apart."""
    for table in program.tables:
        if len({*table.values}) > 1:
            yield table.team
    for _, op in spots(program.ops):
        ordering = op.ordering()
        signals = [level for level in (ordering.raises, ordering.expects) if level is not None]
        for end in (*ordering.messages, *signals, *op.reads(), *op.writes()):
            if isinstance(end.peer, int) and end.team is not None:
                yield end.team
        for end in ordering.messages:
            if max(map(len, program.team(end.team).hosts or ((),))) > 1:
                yield end.team


class _Sets:
    """Ranks in disjoint sets, each known by its first."""

    def __init__(self) -> None:
        self._before: dict[int, int] = {}

    def first(self, rank: int) -> int:
        while (before := self._before.get(rank, rank)) != rank:
            rank = before
        return rank

    def join(self, one: int, other: int) -> None:
        low, high = sorted((self.first(one), self.first(other)))
        self._before[high] = low
