"""What must stay before what: the dependencies that a Program's list order gives.

An op depends on an earlier one where both touch the same bytes and one writes (read after write,
write after read, write after write), on any rank that runs the Program. Beyond data:

- `Alloc` stays before, and `Free` after, every access of the buffer, a peer's copy included; only
  a symmetric buffer's Alloc is something that a stream waits for. (The takes of one slot need no
  edge: an Alloc waits by itself until a copy of the slot is free.)
- One-sided accesses are ordered with the peers by signals: Note [Signals publish] in signals.py.
- `HostSync` stays where it is. So does the order of all communication that ranks of another Program
  take part in, or where the Program is one rank's own: those lists are not ours to permute.

    >>> before = dependencies(program)
    >>> before[7]        # the ops that op 7 must follow, as list indices
    (3, 5)

Edges that a chain of others implies may be missing; `Record` and `Wait` count for nothing. That a
collective or a message has ended on one rank says nothing of the others (docs/semantics.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from interlace.ir import (
    Access,
    Alloc,
    Buffer,
    Call,
    Free,
    Op,
    Program,
    RankIndex,
)
from interlace.passes.order.overlaps import Overlaps
from interlace.passes.order.signals import signal_edges

Before = tuple[tuple[int, ...], ...]


def dependencies(program: Program, listed: bool = True) -> Before:
    """For each op, by list index, the earlier ops that it must follow.

    With `listed`, also those that need only stand before it in the list: they keep the ranks in
    step (an Expect after the Notify of its value), but no stream need wait for them.
    """
    edges: list[set[int]] = [set() for _ in program.ops]
    overlaps = Overlaps(program)
    _data_edges(program, overlaps, edges)
    _storage_edges(program, overlaps, edges)
    places: list[set[int]] = [set() for _ in program.ops]
    _lifetime_edges(program, edges, places)
    frozen = _is_frozen(program)
    signal_edges(program, edges, places, frozen)
    if frozen:
        held = symmetric_buffers(program)
        _chain((i for i, op in enumerate(program.ops) if meets_peers(op, held)), places)
    if listed:
        edges = [one | other for one, other in zip(edges, places, strict=True)]
    return tuple(tuple(sorted(earlier)) for earlier in edges)


def followers(before: Before) -> Before:
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
    """Whether other ranks wait for this op, or it for them."""
    ordering = op.ordering()
    if ordering.takes is not None:
        return ordering.takes.name in symmetric
    return ordering.frees in symmetric or ordering.meets_peers


def _chain(indices: Iterable[int], edges: list[set[int]]) -> None:
    last = -1
    for index in indices:
        if last >= 0:
            edges[index].add(last)
        last = index


def _is_frozen(program: Program) -> bool:
    if program.rank is not None:
        return True
    world = set(program.world)
    return any(
        not world.issuperset(group)
        for team in program.teams
        for group in team.groups or ()
        if not world.isdisjoint(group)
    )


# data


@dataclass(slots=True)
class _Live:
    """The accesses of one buffer that a later op may still conflict with: (view number, op)."""

    writes: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    reads: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


def _data_edges(program: Program, overlaps: Overlaps, edges: list[set[int]]) -> None:
    place = _Places(program)
    live: dict[object, _Live] = {}
    last_sync, since_sync = -1, list[int]()
    for index, op in enumerate(program.ops):
        mine = edges[index]
        reads = [(place(a), overlaps.number(a.view)) for a in op.reads()]
        writes = [(place(a), overlaps.number(a.view)) for a in op.writes()]
        for key, number in reads:
            state = live.setdefault(key, _Live())
            mine.update(i for n, i in state.writes if overlaps.between(number, n))
        for key, number in writes:
            state = live.setdefault(key, _Live())
            mine.update(i for n, i in state.writes if overlaps.between(number, n))
            mine.update(i for n, i in state.reads if overlaps.between(number, n))
            state.writes = [item for item in state.writes if not overlaps.covers(number, item[0])]
            state.reads = [item for item in state.reads if not overlaps.covers(number, item[0])]
        for key, number in reads:
            live[key].reads.append((number, index))
        for key, number in writes:
            live[key].writes.append((number, index))
        if op.ordering().holds_host:
            mine.update(since_sync)
            last_sync, since_sync = index, []
        elif last_sync >= 0:
            mine.add(last_sync)
        since_sync.append(index)
        mine.discard(index)


class _Places:
    """Whose memory an access touches: this rank's own, or a certain peer's copy of a buffer."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.sizes = {team.name: team.size for team in program.teams}
        accesses = [
            a for op in program.ops for a in (*op.reads(), *op.writes()) if a.peer is not None
        ]
        fixed = program.rank is None
        self.shared = {a.view.buffer for a in accesses if fixed and isinstance(a.peer, int)}
        """Buffers of which `peer=<int>` is some rank's own copy, and a peer's for the others."""

    def __call__(self, access: Access) -> object:
        name, peer = access.view.buffer, access.peer
        if peer is None or name in self.shared:
            return name
        assert access.team is not None
        if isinstance(peer, RankIndex):
            offset = peer.offset % self.sizes[peer.team]
            return (name, offset) if offset else name
        assert self.program.rank is not None
        own = self.program.where(self.program.rank).member(access.team).index
        return (name, peer) if peer != own else name


# storage


@dataclass(slots=True)
class _Tenant:
    """A buffer that shares bytes with others: it holds them for a while, then another does."""

    start: int
    stop: int
    since: int = -1
    """The op that last took the bytes over,"""
    after: set[int] = field(default_factory=set[int])
    """what that must follow,"""
    ops: set[int] = field(default_factory=set[int])
    """the uses since then,"""
    ends: set[int] = field(default_factory=set[int])
    """and those of them that no other follows."""
    last: int = -1


def _storage_edges(program: Program, overlaps: Overlaps, edges: list[set[int]]) -> None:
    """Whoever takes bytes over does so after all uses by who held them before."""
    tenants: dict[str, dict[str, _Tenant]] = {}  # by storage: who may still hold bytes of it
    known: dict[str, _Tenant] = {}
    for index, op in enumerate(program.ops):
        for name in sorted({access.view.buffer for access in (*op.reads(), *op.writes())}):
            buffer = overlaps.buffers[name]
            if buffer.kind != "local" or buffer.storage is None:
                continue
            mine = known.get(name)
            if mine is None:
                size = overlaps.size(buffer)
                mine = known[name] = _Tenant(buffer.offset, buffer.offset + size)
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


def _lifetime_edges(program: Program, edges: list[set[int]], places: list[set[int]]) -> None:
    symmetric = symmetric_buffers(program)
    taken: dict[str, int] = {}
    users: dict[str, list[int]] = {}
    for index, op in enumerate(program.ops):
        if isinstance(op, Alloc):
            taken[op.buffer.name] = index
        elif isinstance(op, Free):
            edges[index].update(users.pop(op.buffer, ()))
            if op.buffer in taken:
                edges[index].add(taken[op.buffer])
        else:
            for name in {a.view.buffer for a in (*op.reads(), *op.writes())}:
                if name in taken:
                    # other kinds are there as soon as the host has listed them
                    declared = isinstance(program.ops[taken[name]], Alloc) and name not in symmetric
                    (places if declared else edges)[index].add(taken[name])
                users.setdefault(name, []).append(index)
            for buffer in op.fresh if isinstance(op, Call) else ():
                taken[buffer.name] = index  # so that a use of no bytes stays behind it as well
