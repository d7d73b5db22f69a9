"""The dependencies that a Program's list order gives: which op must stay before which.

An op depends on an earlier one where both touch the same bytes and one writes, on any rank that
runs the Program. `Alloc` stays before, and `Free` after, every access of the buffer; `HostSync`
stays where it is. So does all communication with ranks of other Programs, and that of one rank's
own Program: those lists are not ours to permute. Edges that a chain of others implies may be
missing; `Record` and `Wait` count for nothing.

    >>> dependencies(program)[7]        # the ops that op 7 must follow, as list indices
    (3, 5)

Note [Signals publish]
    All ranks run one list, so a pass that moves an op moves it on every rank. Take an access X and
    a later access Y of one symmetric buffer, one of them a write, such that what rank p touches in
    X rank p + d touches in Y, for a distance d other than 0. A Notify N after X to distance d, with
    an Expect E of it before Y, orders them; the edges X -> N and E -> Y keep that. Of several E the
    nearest to Y is taken, one on its stream first, then one of its site. Where no single signal
    orders X and Y, all that meets peers between them stays where it is, on all teams; but on the
    buffer's own team alone where a collective of it stands between them that begins on all members
    before it ends.
    What callers register has no copies. There, what publishes, on any team, stays after all earlier
    accesses, what admits before all later ones; and with three ranks or more, which may pass on
    what they learned, what publishes stays after all that admitted before.
    An Expect stays after its Notify, which keeps the list free of deadlocks in order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise

from interlace.ir import (
    KINDS,
    Access,
    Buffer,
    Collective,
    Index,
    Op,
    Others,
    Program,
    RankIndex,
)
from interlace.ir.ops import SignalLevel
from interlace.ir.overlap import Overlaps, Touched, ViewExtent, touched_by
from interlace.ir.sizes import Int

Before = tuple[tuple[int, ...], ...]
Edges = list[set[int]]


def dependencies(program: Program, listed: bool = True, touched: Touched | None = None) -> Before:
    """For each op, by list index, the earlier ops that it must follow.

    With `listed`, also those that need only stand before it in the list: they keep the ranks in
    step (an Expect after the Notify of its value), but no stream need wait for them. `touched` are
    the accesses of the ops, where the caller has them.
    """
    edges: Edges = [set() for _ in program.ops]
    touched = touched or touched_by(program)
    overlaps = Overlaps(program, touched)
    _data_edges(program, overlaps, touched, edges)
    _storage_edges(overlaps, touched, edges)
    order: Edges = edges if listed else [set() for _ in program.ops]  # in the list alone
    _lifetime_edges(program, touched, edges, order)
    frozen = is_frozen(program)
    _signal_edges(program, overlaps, touched, edges, order, frozen)
    if frozen:
        held = symmetric_buffers(program)
        met = [i for i, op in enumerate(program.ops) if meets_peers(op, held)]
        for one, other in pairwise(met):
            order[other].add(one)
    return tuple(tuple(sorted(earlier)) for earlier in edges)


def followers(before: Sequence[Iterable[int]]) -> Before:
    """The same edges from the other end: for each op the later ones that follow it."""
    found: list[list[int]] = [[] for _ in before]
    for index, earlier in enumerate(before):
        for other in earlier:
            found[other].append(index)
    return tuple(map(tuple, found))


def symmetric_buffers(program: Program) -> dict[str, Buffer]:
    """The symmetric buffers by name."""
    return {n: b for n, b in program.buffers().items() if b.kind == "symmetric"}


def meets_peers(op: Op, symmetric: Mapping[str, Buffer]) -> bool:
    """True if other ranks wait for this op, or it for them."""
    ordering = op.ordering()
    if ordering.takes is not None:
        return ordering.takes.name in symmetric
    return ordering.frees in symmetric or ordering.meets_peers


def is_frozen(program: Program) -> bool:
    """True if the Program has teams with ranks of other Programs."""
    world = set(program.world)
    return any(
        not world.issuperset(group)
        for team in program.teams
        for group in team.groups or ()
        if not world.isdisjoint(group)
    )


# data


_Live = defaultdict[object, list[tuple[ViewExtent, int]]]
"""Accesses of each buffer with which a later op may conflict, with their ops."""


def _data_edges(program: Program, overlaps: Overlaps, touched: Touched, edges: Edges) -> None:
    owner = _Owners(program, touched)
    written, read = _Live(list), _Live(list)
    last_sync, since_sync = -1, list[int]()
    for index, op in enumerate(program.ops):
        mine = edges[index]
        reads, writes = [
            [(owner(access), overlaps.extent(access.view)) for access in accesses]
            for accesses in touched[index]
        ]
        for where, extent in reads:
            mine.update([i for other, i in written[where] if extent.meets(other)])
        for where, extent in writes:
            for known in filter(None, (written[where], read[where])):
                mine.update([i for other, i in known if extent.meets(other)])
                known[:] = [item for item in known if not extent.covers(item[0])]
        for where, extent in reads:
            read[where].append((extent, index))
        for where, extent in writes:
            written[where].append((extent, index))
        if op.ordering().holds_host:
            mine.update(since_sync)
            last_sync, since_sync = index, []
        elif last_sync >= 0:
            mine.add(last_sync)
        since_sync.append(index)
        mine.discard(index)


class _Owners:
    """Whose memory an access touches: this rank's own, or a certain peer's copy of a buffer."""

    def __init__(self, program: Program, touched: Touched) -> None:
        self.sizes = {team.name: team.size for team in program.teams}
        self.shared = {
            access.view.buffer
            for both in touched
            for accesses in both
            for access in accesses
            if isinstance(access.peer, int)
        }
        """Buffers of which `peer=<int>` is some rank's own copy, and a peer's for the others."""

    def __call__(self, access: Access) -> object:
        name, peer = access.view.buffer, access.peer
        if not isinstance(peer, RankIndex) or name in self.shared:
            return name
        offset = peer.offset % self.sizes[peer.team]
        return (name, offset) if offset else name


# storage


@dataclass(slots=True)
class _Holder:
    """A buffer that shares bytes with others: it holds them for a while, then another does."""

    start: Int
    stop: Int
    since: int = -1
    """The op that last took the bytes over,"""
    after: set[int] = field(default_factory=set[int])
    """what that must follow,"""
    ops: set[int] = field(default_factory=set[int])
    """the uses since then,"""
    ends: set[int] = field(default_factory=set[int])
    """and those of them that no other follows."""
    last: int = -1


def _storage_edges(overlaps: Overlaps, touched: Touched, edges: Edges) -> None:
    """A buffer takes bytes over after all uses of those that held them before."""
    shared = {
        name for name, b in overlaps.buffers.items() if b.kind == "local" and b.storage is not None
    }
    if not shared:
        return
    tenants: dict[str, dict[str, _Holder]] = {}  # by storage: who may still hold bytes of it
    known: dict[str, _Holder] = {}
    for index, (reads, writes) in enumerate(touched):
        for name in sorted(shared.intersection(a.view.buffer for a in (*reads, *writes))):
            buffer = overlaps.buffers[name]
            assert buffer.storage is not None
            mine = known.get(name)
            if mine is None:
                size = overlaps.size(buffer)
                mine = known[name] = _Holder(buffer.offset, buffer.offset + size)
            holders = tenants.setdefault(buffer.storage, {})
            rivals = [
                (other, tenant)
                for other, tenant in holders.items()
                if tenant is not mine and tenant.start < mine.stop and mine.start < tenant.stop
            ]
            if any(tenant.last > mine.since for _, tenant in rivals):
                mine.since, mine.ops = index, set()
                mine.after = {end for _, tenant in rivals for end in tenant.ends} - {index}
                for other, tenant in rivals:
                    if mine.start <= tenant.start and tenant.stop <= mine.stop:
                        del holders[other]
            holders[name] = mine
            if edges[index].isdisjoint(mine.ops):  # else an earlier use has seen to it
                edges[index] |= mine.after
            mine.ops.add(index)
            mine.ends -= edges[index]
            mine.ends.add(index)
            mine.last = index


# lifetimes


def _lifetime_edges(program: Program, touched: Touched, edges: Edges, order: Edges) -> None:
    symmetric = symmetric_buffers(program)
    taken: dict[str, tuple[int, Edges]] = {}
    """The op that declares each buffer, and the edges that uses behind it get."""
    users: dict[str, list[int]] = {}
    given_back: dict[tuple[str | None, str | None], list[int]] = {}
    """Uses of the buffer that gave each slot back last."""
    for index, op in enumerate(program.ops):
        ordering = op.ordering()
        if (buffer := ordering.takes) is not None:
            used = given_back.pop((buffer.team, buffer.storage), ())
            before = program.ops[index - 1] if index else op
            if before.ordering().expects and before.stream == op.stream:
                edges[index].update(used)  # it awaits that all are done: this rank as well
            # other kinds are there as soon as the host has listed them
            taken[buffer.name] = index, edges if buffer.name in symmetric else order
        elif (name := ordering.frees) is not None:
            used = users.pop(name, [])
            edges[index].update(used)
            if (freed := symmetric.get(name)) is not None and freed.storage is not None:
                given_back[freed.team, freed.storage] = used
            if name in taken:
                edges[index].add(taken[name][0])
        else:
            reads, writes = touched[index]
            for name in {access.view.buffer for access in (*reads, *writes)}:
                if name in taken:
                    declared, behind = taken[name]
                    behind[index].add(declared)
                users.setdefault(name, []).append(index)
            for buffer in op.declares():
                taken[buffer.name] = index, edges  # also uses of no bytes stay behind it


# signals


Raise = tuple[int, SignalLevel]
"""An op, and what it raises or expects."""


@dataclass(frozen=True, slots=True)
class _Use:
    """An access of a symmetric buffer: by which op, of whose copy, of what."""

    op: int
    write: bool
    offset: int | None
    """Distance of the copy's rank; None for a fixed rank."""
    extent: ViewExtent


class _Team:
    """Events in one team, in list order."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.notifies: defaultdict[str, list[Raise]] = defaultdict(list)
        self.expects: defaultdict[str, list[Raise]] = defaultdict(list)
        self.meetings: list[int] = []
        """All that meets peers: signals, collectives, messages."""
        self.uses: defaultdict[str, list[_Use]] = defaultdict(list)
        self.registered: list[int] = []
        """The ops that touch what callers registered."""
        self.proofs: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        """For each distance the Expects, each with the Notify that satisfies it."""


def _signal_edges(
    program: Program,
    overlaps: Overlaps,
    touched: Touched,
    edges: Edges,
    listed: Edges,
    frozen: bool,
) -> None:
    """Adds what signals and one-sided accesses must follow: Note [Signals publish]."""
    teams = _teams(program, overlaps, touched)
    meetings = sorted({index for team in teams.values() for index in team.meetings})
    for name, team in teams.items():
        for signal in dict.fromkeys((*team.notifies, *team.expects)):
            _match(name, team, signal, edges, listed)
        relays = max(each.size for each in teams.values()) > 2
        _keep(program, team.registered, meetings, relays, edges)
    if frozen:  # other Programs share the signals
        used = {use.op for team in teams.values() for uses in team.uses.values() for use in uses}
        levels = (
            level for t in teams.values() for level in (*t.notifies.values(), *t.expects.values())
        )
        _keep(program, sorted(used), sorted({i for each in levels for i, _ in each}), False, edges)
        return
    for name, team in teams.items():
        for uses in team.uses.values():
            if all(use.offset == 0 for use in uses):
                continue
            for j, y in enumerate(uses):
                for x in uses[:j]:
                    if x.op < y.op and (x.write or y.write):
                        _order(program, name, team, x, y, edges, meetings)


def _teams(program: Program, overlaps: Overlaps, touched: Touched) -> dict[str, _Team]:
    teams = {team.name: _Team(team.size) for team in program.teams}
    shared = {name: b for name, b in program.buffers().items() if b.team is not None}
    for index, op in enumerate(program.ops):
        ordering, (reads, writes) = op.ordering(), touched[index]
        met = {end.team for end in ordering.messages}
        if ordering.meets is not None:
            met.add(ordering.meets[0])
        for level, raises in ((ordering.raises, True), (ordering.expects, False)):
            if level is not None:
                team = teams[level.team]
                (team.notifies if raises else team.expects)[level.signal].append((index, level))
                met.add(level.team)
        for name in met:
            teams[name].meetings.append(index)
        for write, accesses in ((False, reads), (True, writes)) if shared else ():
            for access in accesses:
                buffer = shared.get(access.view.buffer)
                if buffer is not None and buffer.team is not None:
                    team = teams[buffer.team]
                    if buffer.registered:
                        team.registered.append(index)
                        continue
                    offset = 0 if access.peer is None else _offset(access.peer, team.size)
                    use = _Use(index, write, offset, overlaps.extent(access.view))
                    team.uses[buffer.name].append(use)
    return teams


def _offset(peer: Index, size: int) -> int | None:
    return peer.offset % size if isinstance(peer, RankIndex) else None


def _distances(level: SignalLevel, team: str, size: int) -> frozenset[int]:
    """Distances of a signal's peers; every distance for a fixed rank."""
    if isinstance(level.peer, RankIndex) and level.peer.team == team:
        return frozenset((level.peer.offset % size,))
    return frozenset(range(1 if isinstance(level.peer, Others) else 0, size))


def _match(name: str, team: _Team, signal: str, edges: Edges, listed: Edges) -> None:
    """Every Expect after the Notify of its value, Notifies in the order of their values, and an
    Expect after the nearest one listed of a lower value."""
    raised: defaultdict[int, list[tuple[int, int, bool]]] = defaultdict(list)
    """Notifies at each distance: (value, op, by all alike)."""
    for index, level in team.notifies[signal]:
        for distance in _distances(level, name, team.size):
            edges[index].update(op for _, op, _ in raised[distance][-1:])
            raised[distance].append((level.value, index, not isinstance(level.peer, int)))
    awaited: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # the same: (value, op)
    for index, level in team.expects[signal]:
        for distance in _distances(level, name, team.size):
            lower = (op for value, op in reversed(awaited[distance]) if value < level.value)
            listed[index].update(islice(lower, 1))
            awaited[distance].append((level.value, index))
            early = [item for item in raised[-distance % team.size] if item[1] < index]
            enough = next((item for item in early if item[0] >= level.value), None)
            if isinstance(level.peer, int):  # some rank's own, at any distance: the last of all
                listed[index].update(other for _, other, _ in early[-1:])
            elif enough is not None:
                _, notify, alike = enough
                listed[index].add(notify)
                if alike:
                    team.proofs[-distance % team.size].append((index, notify))


def _keep(
    program: Program, uses: Sequence[int], meetings: Sequence[int], relays: bool, edges: Edges
) -> None:
    """Every meeting after the uses that it may publish, and before those that it may admit, as it
    is listed; with `relays` also after the meetings that admitted something before."""
    admitted: list[int] = []
    for index in meetings if uses else ():
        ordering = program.ops[index].ordering()
        if ordering.expects is None:
            edges[index].update(used for used in uses if used < index)
            edges[index].update(admitted if relays else ())
        if ordering.raises is None:
            admitted.append(index)
            for used in uses:
                if used > index:
                    edges[used].add(index)


def _order(
    program: Program,
    name: str,
    team: _Team,
    x: _Use,
    y: _Use,
    edges: Edges,
    meetings: Sequence[int],
) -> None:
    """Keeps what orders two accesses that may touch the same bytes on different ranks."""
    if x.offset is not None and y.offset is not None:
        distance = (x.offset - y.offset) % team.size
        if distance == 0 or not x.extent.meets_at(y.extent, name, distance):
            return
        ops, later = program.ops, program.ops[y.op]
        proofs = [
            (
                ops[expect].stream == later.stream,
                later.site is not None and ops[expect].site == later.site,
                expect,
                notify,
            )
            for expect, notify in team.proofs[distance]
            if x.op < notify and expect < y.op
        ]
        if proofs:
            *_, expect, notify = max(proofs)
            edges[notify].add(x.op)
            edges[y.op].add(expect)
            return
    between = _between(team.meetings, x.op, y.op)
    if not any(orders_all(program, program.ops[index]) for index in between):
        between = _between(meetings, x.op, y.op)
    for one, other in pairwise((x.op, *between, y.op) if between else ()):
        edges[other].add(one)


def orders_all(program: Program, op: Op) -> bool:
    """True if each member's end of this op comes after the begin of all."""
    if not isinstance(op, Collective) or KINDS[op.kind].rooted:
        return False
    splits = next((t.values for t in program.tables if t.name == op.splits), ())
    return 0 not in splits


def _between(ops: Sequence[int], start: int, end: int) -> Sequence[int]:
    return ops[bisect_right(ops, start) : bisect_left(ops, end)]
