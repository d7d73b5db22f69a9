"""SimulatedRanks: which ranks are simulated so that each of the others does as one of them does.

    >>> symmetry = SimulatedRanks.of([program], fold=True)      # on dp[32] x pp[4] x tp[8]
    >>> symmetry.ranks, symmetry.folded
    ({0: 1024}, frozenset({'dp', 'pp', 'tp'}))

Note [Folded teams]
    A team is folded, one of its ranks standing for all, by its turn (ir/symmetry.py), if each
    message of it has its ends on different hosts, or none has. Where in a buffer a rank works and
    who is the root of a collective cost nothing. What a rank sends at some distance it receives
    from that distance, at the same time. Other teams are simulated whole, among them those with
    ranks in several Programs, such as the stages of a pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from interlace.errors import ProgramError
from interlace.ir import Program, Team, Where, spots
from interlace.ir.symmetry import Actor, Map, standing, turns_of
from interlace.ir.types import Index, Member, Others


@dataclass(frozen=True, slots=True)
class SimulatedRanks:
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
    def of(cls, programs: Sequence[Program], fold: bool = False) -> SimulatedRanks:
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
        folded, stand = _folded(programs) if fold else (frozenset[str](), {})
        stand = stand or {rank: rank for rank in homes}
        names = dict.fromkeys(name for members in places.values() for name in members)
        hosts = standing([_to_neighbours(homes, places, name) for name in names], sorted(homes))
        beside = Counter(s for r, s in stand.items() if hosts[r] == hosts[s])
        counts = Counter(stand.values())
        return cls(counts, folded, {r: hosts[r] for r in counts} if spans else {}, beside)

    def alike(self, team: Team, where: Where) -> float:
        """The number of collectives at a host's interface for which a simulated one stands."""
        if team.hosts is None:
            return 1.0
        near = _host(team, where.member(team.name)) if team.name in self.folded else (0,)
        return self.beside[where.rank] / len(near)


def _ranks(program: Program) -> tuple[int, ...]:
    return program.world if program.rank is None else (program.rank,)


def _to_neighbours(
    homes: Mapping[int, Program], places: Mapping[int, Mapping[str, Member]], name: str
) -> Map:
    """Takes each rank to the next one of its team on its host, and the last to the first."""
    to = Map()
    for rank, members in places.items():
        member = members.get(name)
        to[rank] = rank
        if member is not None:
            team = homes[rank].team(name)
            near = _host(team, member) if team.hosts else range(team.size)
            place = near.index(member.index)
            others = (member.ranks[i] for i in chain(near[place + 1 :], near[: place + 1]))
            to[rank] = next(other for other in others if other in homes)
    return to


def _host(team: Team, member: Member) -> tuple[int, ...]:
    """Places in the team of the ranks on a member's host, for a team that spans hosts."""
    return next(host for host in team.hosts or () if member.index in host)


def _folded(programs: Sequence[Program]) -> tuple[frozenset[str], Map]:
    """Teams of Note [Folded teams] that leave the others whole; the rank that stands for each."""
    turns, members = turns_of([_actor(program) for program in programs])
    single = {name for name, groups in members.groups.items() if max(map(len, groups)) == 1}
    teams = {*members.groups} - single
    while torn := {name for name, turn in turns.items() if turn.moves(teams - {*turns})}:
        turns = {name: turn for name, turn in turns.items() if name not in torn}
    if not turns:
        return frozenset(single), {}
    first = standing([turn.to for turn in turns.values()], sorted(members.wheres))
    for name in teams - {*turns}:
        if any(len({first[rank] == rank for rank in ranks}) > 1 for ranks in members.groups[name]):
            return frozenset(), {}
    return frozenset(turns) | single, first


def _actor(program: Program) -> Actor:
    ends, apart = set[tuple[str, Index | Others]](), set[str]()
    for _, op in spots(program.ops):
        ordering = op.ordering()
        signals = [level for level in (ordering.raises, ordering.expects) if level is not None]
        for end in (*ordering.messages, *signals, *op.reads(), *op.writes()):
            if end.peer is not None and end.team is not None:
                ends.add((end.team, end.peer))
        for end in ordering.messages:
            if max(map(len, program.team(end.team).hosts or ((),))) > 1:
                apart.add(end.team)
    return Actor(program, _ranks(program), ends, apart)
