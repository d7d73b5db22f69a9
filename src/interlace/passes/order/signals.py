"""What signals order: the part of the dependencies that reaches into peers' memory.

    signal_edges(program, edges, listed, frozen=False)

adds to `edges[i]` what op i must follow on its streams, and to `listed[i]` what must stand before
it in the list though no stream of this rank need wait for it.

Note [Signals publish]
    All ranks run one list, so a pass that moves an op moves it on every rank. Take an access X and
    a later access Y of one symmetric buffer, one of them a write, such that what rank p touches in
    X rank p + d touches in Y, for a distance d other than 0. Streams and events of one rank do not
    order them; a Notify N after X to distance d does, with an Expect E of it before Y. Such a pair
    is proof enough, and exact: the edges X -> N and E -> Y keep it. Of several E the nearest
    to Y is taken, one of the same site first. Where no single signal orders X and Y, all that
    meets peers between them stays where it is: on all teams, since what one team signals may order
    accesses to another's memory; but on the buffer's own team alone where a collective of that
    stands between them whose end comes after the begin of all its members (none with a root).
    What callers register has no copies, and a rank's begin and end count as accesses too. There no
    pair is looked for: what publishes, on any team, stays after all earlier accesses, what admits
    before all later ones; and with three ranks or more, which may pass on what they were told, what
    publishes stays after all that admitted before.
    An Expect stays after its Notify, which keeps the list free of deadlocks in order: whatever a
    rank waits for stands earlier in the list that its peer runs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain

from interlace.ir import (
    KINDS,
    Box,
    Buffer,
    Collective,
    Index,
    Op,
    Others,
    Program,
    RankIndex,
    SignalLevel,
    View,
)
from interlace.passes.order.overlaps import compared_box, representatives

Edges = list[set[int]]
Raise = tuple[int, SignalLevel]
"""An op, and what it raises or expects."""


@dataclass(frozen=True, slots=True)
class _Use:
    """An access of a symmetric buffer: by which op, of whose copy, of what."""

    op: int
    write: bool
    offset: int | None
    """How far away the copy's rank is; None for a fixed rank."""
    view: View


@dataclass(slots=True)
class _Team:
    """What happens in one team, in list order."""

    size: int
    notifies: dict[str, list[Raise]] = field(default_factory=dict[str, list["Raise"]])
    expects: dict[str, list[Raise]] = field(default_factory=dict[str, list["Raise"]])
    meetings: list[int] = field(default_factory=list[int])
    """All that meets peers: signals, collectives, messages."""
    uses: dict[str, list[_Use]] = field(default_factory=dict[str, list[_Use]])
    registered: list[int] = field(default_factory=list[int])
    """The ops that touch what callers registered."""
    proofs: dict[int, list[tuple[int, int]]] = field(
        default_factory=dict[int, list[tuple[int, int]]]
    )
    """By distance: the Expects, each with the Notify that satisfies it."""


def signal_edges(program: Program, edges: Edges, listed: Edges, frozen: bool) -> None:
    """Adds what signals and one-sided accesses must follow: Note [Signals publish]."""
    teams = _teams(program)
    meets = _Meets(program)
    meetings = sorted({index for team in teams.values() for index in team.meetings})
    if frozen:
        _keep_all(teams.values(), edges)
    for name, team in teams.items():
        for signal in dict.fromkeys((*team.notifies, *team.expects)):
            _match(name, team, signal, edges, listed)
        _keep_registered(program, team, meetings, edges)
        if frozen:
            continue
        for buffer, uses in team.uses.items():
            remote = any(use.offset != 0 for use in uses)
            for j, y in enumerate(uses if remote else ()):
                for x in uses[:j]:
                    if x.op < y.op and (x.write or y.write):
                        _order(program, team, x, y, edges, meets.at(name, buffer), meetings)


def _teams(program: Program) -> dict[str, _Team]:
    teams = {team.name: _Team(team.size) for team in program.teams}
    shared = {name: b for name, b in program.buffers().items() if b.team is not None}
    for index, op in enumerate(program.ops):
        ordering = op.ordering()
        met = {end.team for end in ordering.messages}
        if ordering.meets is not None:
            met.add(ordering.meets[0])
        for level, raises in ((ordering.raises, True), (ordering.expects, False)):
            if level is not None:
                team = teams[level.team]
                ends = team.notifies if raises else team.expects
                ends.setdefault(level.signal, []).append((index, level))
                met.add(level.team)
        for name in met:
            teams[name].meetings.append(index)
        for write, accesses in ((False, op.reads()), (True, op.writes())):
            for access in accesses:
                buffer = shared.get(access.view.buffer)
                if buffer is not None and buffer.team is not None:
                    team = teams[buffer.team]
                    if buffer.registered:
                        team.registered.append(index)
                        continue
                    offset = 0 if access.peer is None else _offset(access.peer, team.size)
                    use = _Use(index, write, offset, access.view)
                    team.uses.setdefault(buffer.name, []).append(use)
    return teams


def _offset(peer: Index, size: int) -> int | None:
    return peer.offset % size if isinstance(peer, RankIndex) else None


def _distances(level: SignalLevel, team: str, size: int) -> frozenset[int]:
    """How far away the peers of a signal are; every distance for a fixed rank."""
    if isinstance(level.peer, RankIndex) and level.peer.team == team:
        return frozenset((level.peer.offset % size,))
    return frozenset(range(1 if isinstance(level.peer, Others) else 0, size))


def _match(name: str, team: _Team, signal: str, edges: Edges, listed: Edges) -> None:
    """Every Expect after the Notify of its value, and both in the order of their values."""
    raised: dict[int, list[tuple[int, int, bool]]] = {}  # by distance: (value, op, by all alike)
    for index, level in team.notifies.get(signal, ()):
        for distance in _distances(level, name, team.size):
            before = raised.setdefault(distance, [])
            if before:
                edges[index].add(before[-1][1])
            before.append((level.value, index, not isinstance(level.peer, int)))
    awaited: dict[int, list[tuple[int, int]]] = {}  # by distance: (value, op)
    for index, level in team.expects.get(signal, ()):
        for distance in _distances(level, name, team.size):
            before = awaited.setdefault(distance, [])
            listed[index].update(other for value, other in before if value != level.value)
            before.append((level.value, index))
            early = [item for item in raised.get(-distance % team.size, ()) if item[1] < index]
            enough = next((item for item in early if item[0] >= level.value), None)
            if isinstance(level.peer, int):  # some rank's own, at any distance: the last of all
                listed[index].update(other for _, other, _ in early[-1:])
            elif enough is not None:
                _, notify, alike = enough
                listed[index].add(notify)
                if alike:
                    team.proofs.setdefault(-distance % team.size, []).append((index, notify))


def _keep_all(teams: Collection[_Team], edges: Edges) -> None:
    """Where other Programs share the signals: after all they may publish, before all they admit."""
    used = sorted({use.op for team in teams for uses in team.uses.values() for use in uses})
    for team in teams:
        for index, _ in chain.from_iterable(team.notifies.values()):
            edges[index].update(op for op in used if op < index)
        for index, _ in chain.from_iterable(team.expects.values()):
            for op in used:
                if op > index:
                    edges[op].add(index)


def _keep_registered(program: Program, team: _Team, meetings: Sequence[int], edges: Edges) -> None:
    """Every meeting after what it may publish, and before what it may admit, as it is listed."""
    relays = max(each.size for each in program.teams) > 2
    admitted: list[int] = []
    for index in meetings if team.registered else ():
        ordering = program.ops[index].ordering()
        if ordering.expects is None:
            edges[index].update(used for used in team.registered if used < index)
            edges[index].update(admitted if relays else ())
        if ordering.raises is None:
            admitted.append(index)
            for used in team.registered:
                if used > index:
                    edges[used].add(index)


def _order(
    program: Program,
    team: _Team,
    x: _Use,
    y: _Use,
    edges: Edges,
    meet: Callable[[View, View, int], bool],
    meetings: Sequence[int],
) -> None:
    """Keeps what orders two accesses that may touch the same bytes on different ranks."""
    if x.offset is not None and y.offset is not None:
        distance = (x.offset - y.offset) % team.size
        if distance == 0 or not meet(x.view, y.view, distance):
            return
        site = program.ops[y.op].site
        proofs = [
            (site is not None and program.ops[expect].site == site, expect, notify)
            for expect, notify in team.proofs.get(distance, ())
            if x.op < notify and expect < y.op
        ]
        if proofs:
            _, expect, notify = max(proofs)
            edges[notify].add(x.op)
            edges[y.op].add(expect)
            return
    between = _between(team.meetings, x.op, y.op)
    if not any(_orders_all(program, program.ops[index]) for index in between):
        between = _between(meetings, x.op, y.op)
    last = x.op
    for index in between:
        edges[index].add(last)
        last = index
    if last != x.op:
        edges[y.op].add(last)


def _orders_all(program: Program, op: Op) -> bool:
    """Whether each member's end of this op comes after the begin of all."""
    if not isinstance(op, Collective) or KINDS[op.kind].rooted:
        return False
    splits = next((t.values for t in program.tables if t.name == op.splits), ())
    return 0 not in splits


def _between(ops: Sequence[int], start: int, end: int) -> Sequence[int]:
    return ops[bisect_right(ops, start) : bisect_left(ops, end)]


class _Meets:
    """Whether what a rank touches of a buffer is what another, so far away, touches of it."""

    def __init__(self, program: Program) -> None:
        self.program, self.buffers = program, program.buffers()
        self.ranks = representatives(program)
        self.known: dict[object, bool] = {}

    def at(self, team: str, name: str) -> Callable[[View, View, int], bool]:
        """The question for one buffer of a team. Buffers of one shape have the same answers."""
        buffer = self.buffers[name]
        shape = (team, buffer.shape, buffer.strides, buffer.dtype)

        def meet(one: View, other: View, distance: int) -> bool:
            key = (shape, one.steps, other.steps, distance)
            if key not in self.known:
                self.known[key] = self.compare(team, buffer, one, other, distance)
            return self.known[key]

        return meet

    def compare(self, team: str, buffer: Buffer, one: View, other: View, distance: int) -> bool:
        """Compares the boxes of every rank with those of the rank so far away."""
        for rank in self.ranks:
            where = self.program.where(rank)
            member = where.members.get(team)
            if member is None:
                continue
            peer = member.ranks[(member.index + distance) % len(member.ranks)]
            boxes: list[Box | None] = [
                compared_box(one, buffer, where),
                compared_box(other, buffer, self.program.where(peer)),
            ]
            mine, theirs = boxes
            if mine is not None and theirs is not None and mine.overlaps(theirs):
                return True
        return False
