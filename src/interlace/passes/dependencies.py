"""The dependencies that a Program's list order gives: which op must stay before which.

An op depends on an earlier one where both touch the same bytes and one writes, on any rank that
runs the Program. `Alloc` stays before, and `Free` after, every access of the buffer; `HostSync`
stays where it is. So does all communication of a Program that has teams with ranks of others, and
that of one rank's own: those lists are not ours to permute. Edges that a chain of others implies
may be missing; `Record` and `Wait` count for nothing.

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
    An Expect stays after its Notify, which keeps the list free of deadlocks in order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from interlace.errors import PassError
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
from interlace.ir.sizes import greatest, least

Before = tuple[tuple[int, ...], ...]
Edges = list[set[int]]


def dependencies(program: Program, listed: bool = True, touched: Touched | None = None) -> Before:
    """For each op, by list index, the earlier ops that it must follow.

    With `listed`, also those that need only stand before it in the list: they keep the ranks in
    step (an Expect after the Notify of its value), but no stream need wait for them. `touched` are
    the accesses of the ops, where the caller has them. Raises PassError for what strategies never
    write: one-sided ops and signals of ranks by number.
    """
    edges: Edges = [set() for _ in program.ops]
    touched = touched or touched_by(program)
    overlaps = Overlaps(program, touched)
    _data_edges(program, overlaps, touched, edges)
    _storage_edges(overlaps, touched, edges)
    order: Edges = edges if listed else [set() for _ in program.ops]  # in the list alone
    _lifetime_edges(program, touched, edges, order)
    _signal_edges(program, overlaps, touched, edges, order)
    if is_frozen(program):
        held = symmetric_buffers(program)
        met = [
            i
            for i, (op, (reads, writes)) in enumerate(zip(program.ops, touched, strict=True))
            if meets_peers(op, held) or any(a.view.buffer in held for a in (*reads, *writes))
        ]
        kept = edges if held else order
        for one, other in pairwise(met):
            kept[other].add(one)
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
    sizes = {team.name: team.size for team in program.teams}
    written, read = _Live(list), _Live(list)
    last_sync, since_sync = -1, list[int]()
    for index, op in enumerate(program.ops):
        mine = edges[index]
        reads, writes = [
            [(_owner(access, sizes), overlaps.extent(access.view)) for access in accesses]
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


def _owner(access: Access, sizes: Mapping[str, int]) -> object:
    """Whose memory an access touches: this rank's own, or a peer's copy of a buffer."""
    name, peer = access.view.buffer, access.peer
    offset = peer.offset % sizes[peer.team] if isinstance(peer, RankIndex) else 0
    return (name, offset) if offset else name


# storage


@dataclass(slots=True)
class _Held:
    """Bytes of a storage that an op has touched, as far as no later write took them over."""

    index: int
    name: str
    write: bool
    start: int
    stop: int


class _Storage:
    """Accesses of a storage that several buffers share.

    One that a later write of another buffer spans counts for that buffer alone: all others that
    follow it follow the write. Else each access would be compared with all that came before.
    """

    def __init__(self) -> None:
        self.held: list[_Held] = []
        self.spanned: defaultdict[str, list[_Held]] = defaultdict(list)
        """Accesses by the buffer that a write spans them with."""

    def add(self, new: _Held) -> None:
        """Adds an access, which has been compared with the others."""
        if new.write:
            before, self.held = self.held, []
            for other in before:
                inside = new.start <= other.start and other.stop <= new.stop
                spanned = inside and other.name != new.name
                if other.start < other.stop:
                    (self.spanned[new.name] if spanned else self.held).append(other)
        self.held.append(new)


def _storage_edges(overlaps: Overlaps, touched: Touched, edges: Edges) -> None:
    """An access follows those of other buffers that lie in its bytes, if one of both writes."""
    shared = {n: b for n, b in overlaps.buffers.items() if b.kind == "local" and b.storage}
    storages: defaultdict[str | None, _Storage] = defaultdict(_Storage)
    for index, (reads, writes) in enumerate(touched if shared else ()):
        for write, accesses in ((False, reads), (True, writes)):
            for access in accesses:
                buffer = shared.get(access.view.buffer)
                if buffer is None:
                    continue
                extent, storage = overlaps.extent(access.view), storages[buffer.storage]
                start, stop = least(extent.start), greatest(extent.stop)
                start, stop = buffer.offset + start, buffer.offset + stop
                inner = greatest(extent.full_start), least(extent.full_stop)
                for other in (*storage.held, *storage.spanned[buffer.name]):
                    meets = other.start < stop and start < other.stop
                    if meets and other.name != buffer.name and (write or other.write):
                        edges[index].add(other.index)
                        if write:
                            _take_over(other, *(buffer.offset + end for end in inner))
                storage.add(_Held(index, buffer.name, write, start, stop))
        edges[index].discard(index)


def _take_over(other: _Held, start: int, stop: int) -> None:
    """Cuts off bytes at either end."""
    if start <= other.start < stop:
        other.start = stop
    elif start < other.stop <= stop:
        other.stop = start


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
    offset: int
    """Distance of the copy's rank."""
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
        self.proofs: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
        """For each distance the Expects, each with the Notify that satisfies it."""


def _signal_edges(
    program: Program,
    overlaps: Overlaps,
    touched: Touched,
    edges: Edges,
    listed: Edges,
) -> None:
    """Adds what signals and one-sided accesses must follow: Note [Signals publish]."""
    teams = _teams(program, overlaps, touched)
    meetings = sorted({index for team in teams.values() for index in team.meetings})
    collectives = program.collectives()
    joins = {index for index, op in collectives.items() if orders_all(program, op)}
    for name, team in teams.items():
        for signal in dict.fromkeys((*team.notifies, *team.expects)):
            _match(name, team, signal, edges, listed)
    for name, team in teams.items():
        for uses in team.uses.values():
            if all(use.offset == 0 for use in uses):
                continue
            for j, y in enumerate(uses):
                for x in uses[:j]:
                    if x.op < y.op and (x.write or y.write):
                        _order(program, name, team, x, y, edges, meetings, joins)


def _refuse_number(program: Program, op: Op, peer: Index | Others | None) -> None:
    """Raises for a peer that strategies never write."""
    if isinstance(peer, int):
        raise PassError(
            f"{program.name}: {op} names a rank by number: passes take peers at a distance, such "
            "as tp.rank + 1. fix: leave such a Program as it is written"
        )


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
                _refuse_number(program, op, level.peer)
                team = teams[level.team]
                (team.notifies if raises else team.expects)[level.signal].append((index, level))
                met.add(level.team)
        for name in met:
            teams[name].meetings.append(index)
        for write, accesses in ((False, reads), (True, writes)) if shared else ():
            for access in accesses:
                buffer = shared.get(access.view.buffer)
                if buffer is not None and buffer.team is not None:
                    _refuse_number(program, op, access.peer)
                    team, peer = teams[buffer.team], access.peer
                    offset = peer.offset % team.size if isinstance(peer, RankIndex) else 0
                    use = _Use(index, write, offset, overlaps.extent(access.view))
                    team.uses[buffer.name].append(use)
    return teams


def _distances(level: SignalLevel, team: str, size: int) -> frozenset[int]:
    """Distances of a signal's peers; every distance for a rank of another team."""
    if isinstance(level.peer, RankIndex) and level.peer.team == team:
        return frozenset((level.peer.offset % size,))
    return frozenset(range(1 if isinstance(level.peer, Others) else 0, size))


def _match(name: str, team: _Team, signal: str, edges: Edges, listed: Edges) -> None:
    """Every Expect after the Notify of its value, Notifies in the order of their values, and an
    Expect after the nearest one listed of a lower value."""
    raised: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    """Notifies at each distance: (value, op)."""
    for index, level in team.notifies[signal]:
        for distance in _distances(level, name, team.size):
            edges[index].update(op for _, op in raised[distance][-1:])
            raised[distance].append((level.value, index))
    awaited: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # the same: (value, op)
    for index, level in team.expects[signal]:
        for distance in _distances(level, name, team.size):
            lower = (op for value, op in reversed(awaited[distance]) if value < level.value)
            listed[index].update(islice(lower, 1))
            awaited[distance].append((level.value, index))
            enough = (op for value, op in raised[-distance % team.size] if value >= level.value)
            notify = next(enough, index)
            if notify < index:
                listed[index].add(notify)
                team.proofs[-distance % team.size].append((index, notify))


def _order(
    program: Program,
    name: str,
    team: _Team,
    x: _Use,
    y: _Use,
    edges: Edges,
    meetings: Sequence[int],
    joins: set[int],
) -> None:
    """Keeps what orders two accesses that may touch the same bytes on different ranks."""
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
    if joins.isdisjoint(between):
        between = _between(meetings, x.op, y.op)
    for one, other in pairwise((x.op, *between, y.op) if between else ()):
        edges[other].add(one)


def orders_all(program: Program, op: Collective) -> bool:
    """True if each member's end of a collective comes after the begin of all."""
    if KINDS[op.kind].rooted or op.sent is not None:
        return False
    splits = next((t.values for t in program.tables if t.name == op.splits), ())
    return 0 not in splits


def _between(ops: Sequence[int], start: int, end: int) -> Sequence[int]:
    return ops[bisect_right(ops, start) : bisect_left(ops, end)]
