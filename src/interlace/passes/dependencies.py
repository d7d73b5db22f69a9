"""What must stay before what: the dependencies that a Program's list order gives.

An op depends on an earlier one where both touch the same bytes and one writes (read after write,
write after read, write after write), on any rank that runs the Program. Beyond data:

- `Alloc` stays before, and `Free` after, every access of the buffer, a peer's copy included. (The
  takes of one slot need no edge: an Alloc waits by itself until a copy of the slot is free.)
- One-sided accesses are ordered with the peers by signals alone: Note [Signals publish].
- `HostSync` stays where it is. So does the order of all communication that ranks of another Program
  take part in, or where the Program is one rank's own: those lists are not ours to permute.

    >>> before = dependencies(program)
    >>> before[7]        # the ops that op 7 must follow, as list indices
    (3, 5)

Edges that a chain of others implies may be missing; `Record` and `Wait` count for nothing.

Note [Signals publish]
    All ranks run the same list, so a pass that moves an op moves it on every rank, and what rank p
    did before its Notify is what any rank did before its own. A Notify of a signal must therefore
    stay after an earlier access X, and an Expect of it before a later access Y, where some such X
    and Y touch the same symmetric buffer, one of them in a peer's memory and one of them writing:
    that is what the signal is for. A barrier is a Notify and an Expect at once. An Expect stays
    after the Notify of its value, which keeps the list free of deadlocks in order: whatever a rank
    waits for stands earlier in the list that its peer runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from interlace.ir import (
    Access,
    Alloc,
    Buffer,
    Collective,
    Expect,
    Free,
    Group,
    HostSync,
    Notify,
    Op,
    Program,
    RankIndex,
    Recv,
    Send,
)
from interlace.passes.overlaps import Overlaps

Before = tuple[tuple[int, ...], ...]


def dependencies(program: Program) -> Before:
    """For each op, by list index, the earlier ops that it must follow."""
    edges: list[set[int]] = [set() for _ in program.ops]
    _data_edges(program, edges)
    _lifetime_edges(program, edges)
    frozen = _is_frozen(program)
    _signal_edges(program, edges, frozen)
    if frozen:
        held = symmetric_buffers(program)
        _chain((i for i, op in enumerate(program.ops) if meets_peers(op, held)), edges)
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
    match op:
        case Alloc(buffer=buffer):
            return buffer.name in symmetric
        case Free(buffer=name):
            return name in symmetric
        case _:
            return isinstance(op, Collective | Send | Recv | Group | Notify | Expect)


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
    """The accesses of one storage that a later op may still conflict with: (view number, op)."""

    writes: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    reads: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


def _data_edges(program: Program, edges: list[set[int]]) -> None:
    overlaps = Overlaps(program)
    place = _Places(program, overlaps)
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
        if isinstance(op, HostSync):
            mine.update(since_sync)
            last_sync, since_sync = index, []
        elif last_sync >= 0:
            mine.add(last_sync)
        since_sync.append(index)
        mine.discard(index)


class _Places:
    """Whose memory an access touches: this rank's storage, or a certain peer's copy of a buffer."""

    def __init__(self, program: Program, overlaps: Overlaps) -> None:
        self.program, self.overlaps = program, overlaps
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
            return self.overlaps.storage(name)
        assert access.team is not None
        if isinstance(peer, RankIndex):
            offset = peer.offset % self.sizes[peer.team]
            return (name, offset) if offset else self.overlaps.storage(name)
        assert self.program.rank is not None
        own = self.program.where(self.program.rank).member(access.team).index
        return (name, peer) if peer != own else self.overlaps.storage(name)


# lifetimes


def _lifetime_edges(program: Program, edges: list[set[int]]) -> None:
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
                    edges[index].add(taken[name])
                users.setdefault(name, []).append(index)


# signals

_CONFLICTS = {
    ("write", "peer read"),
    ("read", "peer write"),
    ("write", "peer write"),
    ("peer read", "peer write"),
    ("peer write", "peer write"),
}


@dataclass(slots=True)
class _Signal:
    notifies: list[int] = field(default_factory=list[int])
    expects: list[int] = field(default_factory=list[int])
    buffers: frozenset[str] = frozenset()
    """The symmetric buffers whose accesses it orders."""


_Used = dict[str, list[tuple[int, str]]]
"""The accesses of each symmetric buffer: (op, how)."""


def _signal_edges(program: Program, edges: list[set[int]], frozen: bool) -> None:
    buffers = symmetric_buffers(program)
    teams: dict[str, _Used] = {}
    signals: dict[tuple[str, str], _Signal] = {}
    barriers: list[tuple[int, str]] = []
    for index, op in enumerate(program.ops):
        if isinstance(op, Notify | Expect):
            signal = signals.setdefault((op.team, op.signal), _Signal())
            (signal.notifies if isinstance(op, Notify) else signal.expects).append(index)
        elif isinstance(op, Collective) and op.kind == "barrier":
            barriers.append((index, op.team))
        for how, accesses in (("read", op.reads()), ("write", op.writes())):
            for a in accesses:
                buffer = buffers.get(a.view.buffer)
                if buffer is not None and buffer.team is not None:
                    used = teams.setdefault(buffer.team, {}).setdefault(buffer.name, [])
                    used.append((index, how if a.peer is None else f"peer {how}"))
    for (team, _), signal in signals.items():
        _publish(signal, teams.get(team, {}), edges, frozen)
        _match(program, team, signal, edges)
    _relay(signals, edges)
    for index, team in barriers:
        ends = [i for (t, _), s in signals.items() if t == team for i in (*s.notifies, *s.expects)]
        touched = [i for used in teams.get(team, {}).values() for i, _ in used]
        for other in (*ends, *touched):
            edges[max(index, other)].add(min(index, other))
        edges[index].discard(index)


def _conflict(one: str, other: str) -> bool:
    return (one, other) in _CONFLICTS or (other, one) in _CONFLICTS


def _publish(signal: _Signal, used: _Used, edges: list[set[int]], frozen: bool) -> None:
    """What stays before a Notify, and after an Expect: Note [Signals publish]."""
    every = frozen or not signal.notifies or not signal.expects
    ordered: dict[str, tuple[list[int], list[int]]] = {}
    for name, accesses in used.items() if not every else ():
        last, first = signal.notifies[-1], signal.expects[0]
        early = [(i, how) for i, how in accesses if i < last]
        late = [(i, how) for i, how in accesses if i > first]
        hows, late_hows = {how for _, how in early}, {how for _, how in late}
        publish = [i for i, how in early if any(_conflict(how, other) for other in late_hows)]
        admit = [i for i, how in late if any(_conflict(how, other) for other in hows)]
        if publish and admit:
            ordered[name] = publish, admit
    if not ordered:  # it orders something that is not seen from here: keep everything in place
        ordered = {name: ([i for i, _ in a], [i for i, _ in a]) for name, a in used.items()}
    signal.buffers = frozenset(ordered)
    for publish, admit in ordered.values():
        for index in signal.notifies:
            edges[index].update(i for i in publish if i < index)
        for index in signal.expects:
            for i in admit:
                if i > index:
                    edges[i].add(index)


def _match(program: Program, team: str, signal: _Signal, edges: list[set[int]]) -> None:
    """Every Expect after the Notify of its value, and both in the order of their values."""
    size = program.team(team).size

    def offsets(index: int) -> frozenset[int]:
        """How far away in the team the peer is: every distance for `others` and for a number."""
        op = program.ops[index]
        assert isinstance(op, Notify | Expect)
        if isinstance(op.peer, RankIndex) and op.peer.team == team:
            return frozenset((op.peer.offset % size,))
        return frozenset(range(size))

    raised: dict[int, list[tuple[int, int]]] = {}  # by distance: (value, op)
    for index in signal.notifies:
        op = program.ops[index]
        assert isinstance(op, Notify)
        for offset in offsets(index):
            before = raised.setdefault(offset, [])
            if before:
                edges[index].add(before[-1][1])
            before.append((op.value, index))
    awaited: dict[int, int] = {}
    for index in signal.expects:
        op = program.ops[index]
        assert isinstance(op, Expect)
        for offset in offsets(index):
            if offset in awaited:
                edges[index].add(awaited[offset])
            awaited[offset] = index
            early = [(value, i) for value, i in raised.get(-offset % size, ()) if i < index]
            enough = [i for value, i in early if value >= op.value]
            if isinstance(op.peer, int):  # some rank's own, at any distance: the last of all
                edges[index].update(i for _, i in early[-1:])
            else:
                edges[index].update(enough[:1])


def _relay(signals: dict[tuple[str, str], _Signal], edges: list[set[int]]) -> None:
    """A Notify passes on what an earlier Expect of the same buffers admitted."""
    by_buffer: dict[str, list[_Signal]] = {}
    for signal in signals.values():
        for name in signal.buffers:
            by_buffer.setdefault(name, []).append(signal)
    for sharing in by_buffer.values():
        expects = sorted({i for signal in sharing for i in signal.expects})
        for index in {i for signal in sharing for i in signal.notifies}:
            edges[index].update(i for i in expects if i < index)
