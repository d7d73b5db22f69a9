"""Order of ops: all edges between the ops of a list, and between those of several ranks.

An op declares what it waits for, raises, meets and takes (`Op.ordering`). `Meetings` collects the
ops of all ranks and says which belong together, by the rules of semantics.md. The caller
chooses what represents an op (a node, a task). The exhaustive oracle shares nothing with this file.

    >>> meetings = Meetings[str]()
    >>> meetings.add(program.where(rank), op.ordering(), f"op {index} of rank {rank}")
    >>> [(level.expect, level.notify) for level in meetings.levels()]
    [('op 2 of rank 0', 'op 1 of rank 1'), ('op 2 of rank 1', 'op 1 of rank 0')]
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from typing import Generic, TypeVar

from interlace.errors import TeamError
from interlace.ir.ops import Fused, MessageEnd, Op, Ordering, SignalLevel
from interlace.ir.program import Spot, spots
from interlace.ir.types import Buffer, Others, Where

T = TypeVar("T")


def bindings(ops: Sequence[Op]) -> dict[Spot, Spot]:
    """The Record that each Wait means: the last one of its event that is listed before."""
    records: dict[str, Spot] = {}
    found: dict[Spot, Spot] = {}
    for spot, op in spots(ops):
        ordering = op.ordering()
        if ordering.records is not None:
            records[ordering.records] = spot
        elif ordering.waits in records:
            found[spot] = records[ordering.waits]
    return found


def in_order(ops: Sequence[Op]) -> list[Spot]:
    """Every op (the members of a Fused instead of the Fused) in an order that streams allow.

    So runs the twin of an overlapped Program, one op after another: in the list's own order, but a
    part of a Fused may await what peers send only once they saw an earlier part's Record, by ops
    that stand behind the Fused. So before such a wait come all ops of other streams that wait for
    nobody.
    """
    if not any(isinstance(op, Fused) for op in ops):
        return [(index, 0) for index in range(len(ops))]
    return _OneByOne(ops).run()


class _OneByOne:
    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = ops
        self.waits = bindings(ops)
        self.done: set[Spot] = set()
        self.listed: list[Spot] = []

    def run(self) -> list[Spot]:
        for index, op in enumerate(self.ops):
            if not isinstance(op, Fused):
                self.add((index, 0))
                continue
            recorded = False  # whether others may have seen a Record of this op
            for number, member in enumerate(op.members):
                ordering = member.ordering()
                if recorded and (ordering.expects or ordering.waits is not None):
                    self.go_on(index, op.stream)
                    recorded = False
                recorded = recorded or ordering.records is not None
                self.add((index, number))
        return self.listed

    def add(self, spot: Spot) -> None:
        if spot not in self.done:
            self.done.add(spot)
            self.listed.append(spot)

    def go_on(self, index: int, stream: str) -> None:
        """Adds the later ops of other streams that can run without waiting for anybody."""
        held = {stream}
        for later in range(index + 1, len(self.ops)):
            op, spot = self.ops[later], (later, 0)
            ordering = op.ordering()
            if ordering.holds_host:
                return
            if op.stream in held or spot in self.done:
                continue
            due = ordering.waits is not None and self.waits.get(spot, spot) not in self.done
            peers = ordering.meets or ordering.messages or ordering.expects or ordering.takes
            if due or peers or isinstance(op, Fused):
                held.add(op.stream)
            else:
                self.add(spot)


@dataclass(frozen=True, slots=True, eq=False)
class TeamKey:
    """A team: its name and the global ranks of this instance of it. There is one object of each."""

    name: str
    ranks: tuple[int, ...]


Queue = tuple[TeamKey, str | None]
"""The collectives of one team and backend."""
Channel = tuple[TeamKey, int, int]
"""The messages of one team from one global rank to another."""
Slot = tuple[TeamKey, str]
"""A slot of a team's pool."""
Signal = tuple[str, TeamKey, int, int]
"""A signal: name, team, writer, reader."""


@dataclass(frozen=True, slots=True)
class Delivery(Generic[T]):
    """A message: its two ends, or the one that there is."""

    channel: Channel
    number: int
    send: T | None
    recv: T | None


@dataclass(frozen=True, slots=True)
class Awaited(Generic[T]):
    """A value that a signal has to reach, and the first that raises it so far, if any does."""

    signal: Signal
    value: int
    expect: T
    notify: T | None
    highest: int
    """The highest value that the signal is raised to; 0: it is never raised."""


@dataclass(frozen=True, slots=True)
class Retake(Generic[T]):
    """Take n >= 2 of a slot on all ranks, which awaits every rank's `free` of take n - 2."""

    slot: Slot
    number: int
    takers: list[T]
    frees: dict[int, T | None]
    """The op that frees take n - 2, by rank; None where a rank never frees it."""


class Meetings(Generic[T]):
    """Meeting points of the ops of all ranks: collectives, messages, signals and slots.

    Ops are added rank by rank, in the order of each list.
    """

    def __init__(self, folded: Collection[str] = ()) -> None:
        """One rank stands for all of a team named in `folded`: what it does with a peer at some
        distance, each of them does with the peer at that distance."""
        self._folded = folded
        self.queues: dict[Queue, dict[int, list[T]]] = {}
        """The collectives of each rank."""
        self.channels: dict[Channel, tuple[list[T], list[T]]] = {}
        """The sends and the receives."""
        self.taken: dict[Slot, dict[int, list[T]]] = {}
        """The takes of each rank."""
        self.freed: dict[tuple[Slot, int, int], T] = {}
        """The ops that free slots, by slot, number of the take and rank."""
        self.raised: dict[Signal, list[tuple[int, T]]] = {}
        """Values and notifies by signal, in the order in which they raise it."""
        self.awaited: list[tuple[Signal, int, T]] = []
        """Signal, value."""
        self._tops: dict[Signal, list[int]] = {}
        """The highest value so far after each notify, by signal."""
        self._held: dict[tuple[int, str], tuple[Slot, int]] = {}  # by rank and buffer
        self._teams: dict[tuple[int, str], TeamKey] = {}
        self._instances: dict[tuple[str, int], list[TeamKey]] = {}  # by name and first rank

    def add(self, where: Where, ordering: Ordering, at: T) -> None:
        """Notes what an op of a rank meets others in."""
        if ordering.meets is not None:
            self.collective(where, ordering.meets, at)
        for end in ordering.messages:
            self.message(where, end, at)
        if ordering.raises is not None:
            for signal in self._signals(where, ordering.raises, raises=True):
                self.raised.setdefault(signal, []).append((ordering.raises.value, at))
        if ordering.expects is not None:
            for signal in self._signals(where, ordering.expects, raises=False):
                self.awaited.append((signal, ordering.expects.value, at))
        if ordering.takes is not None and ordering.takes.kind == "symmetric":
            self.take(where, ordering.takes, at)
        if ordering.frees is not None:
            self.free(where, ordering.frees, at)

    def collective(self, where: Where, meets: tuple[str, str | None], at: T) -> tuple[Queue, int]:
        """The queue of a collective, and which it is of this rank's there, from 0."""
        team, backend = meets
        queue = self.team(where, team), backend
        mine = self.queues.setdefault(queue, {}).setdefault(where.rank, [])
        mine.append(at)
        return queue, len(mine) - 1

    def message(self, where: Where, end: MessageEnd, at: T) -> tuple[Channel, int]:
        """The channel of a message, and which it is there, from 0."""
        team = self.team(where, end.team)
        channel = team, *self._ends(where, team, where.index(end.peer), end.sends)
        mine = self.channels.setdefault(channel, ([], []))[0 if end.sends else 1]
        mine.append(at)
        return channel, len(mine) - 1

    def take(self, where: Where, buffer: Buffer, at: T) -> int:
        """Which take of its slot an Alloc is on this rank, from 0."""
        slot = self.slot(where, buffer)
        mine = self.taken.setdefault(slot, {}).setdefault(where.rank, [])
        self._held[where.rank, buffer.name] = slot, len(mine)
        mine.append(at)
        return len(mine) - 1

    def free(self, where: Where, buffer: str, at: T) -> None:
        """Gives back the slot that a buffer took last, if it took one."""
        held = self._held.pop((where.rank, buffer), None)
        if held is not None:
            slot, number = held
            self.freed[slot, number, where.rank] = at

    def team(self, where: Where, name: str) -> TeamKey:
        """The instance of a team that a rank is in."""
        key = self._teams.get((where.rank, name))
        if key is None:
            ranks = (where.rank,) if name in self._folded else where.member(name).ranks
            known = self._instances.setdefault((name, ranks[0]), [])
            key = next((k for k in known if k.ranks is ranks or k.ranks == ranks), None)
            if key is None:
                key = TeamKey(name, ranks)
                known.append(key)
            self._teams[where.rank, name] = key
        return key

    def slot(self, where: Where, buffer: Buffer) -> Slot:
        """The slot that a symmetric buffer takes."""
        if buffer.team is None:
            raise TeamError(f"the symmetric buffer {buffer.name} has no team")
        return self.team(where, buffer.team), buffer.storage or buffer.name

    def _ends(self, where: Where, team: TeamKey, peer: int, forth: bool) -> tuple[int, int]:
        """From where to where something goes, `forth` from this rank to the peer of that index:
        global ranks, of a folded team 0 and the distance."""
        me = where.member(team.name)
        if not 0 <= peer < len(me.ranks):
            raise TeamError(f"team {team.name} has {len(me.ranks)} ranks, and no rank {peer}")
        if team.name in self._folded:
            return 0, (peer - me.index if forth else me.index - peer) % len(me.ranks)
        other = me.ranks[peer]
        return (where.rank, other) if forth else (other, where.rank)

    def _signals(self, where: Where, level: SignalLevel, raises: bool) -> Iterator[Signal]:
        team, me = self.team(where, level.team), where.member(level.team)
        if isinstance(level.peer, Others):
            peers = [peer for peer in range(len(me.ranks)) if peer != me.index]
        else:
            peers = [where.index(level.peer)]
        for peer in peers:
            yield level.signal, team, *self._ends(where, team, peer, raises)

    # Ranks that others stand for: none, unless a subclass says so.

    def first(self, rank: int) -> int:
        """The rank that stands for another: its ops are added, and count for both."""
        return rank

    def back(self, rank: int, other: int) -> int:
        """A second rank, as seen from the rank that stands for the first."""
        return other

    def own(self, team: TeamKey, rank: int) -> TeamKey:
        """The instance of a team that the rank is in which stands for another."""
        return team

    def queue(self, queue: Queue, rank: int) -> list[T]:
        """The collectives of a rank."""
        return self.queues.get((self.own(queue[0], rank), queue[1]), {}).get(self.first(rank), [])

    def takes(self, slot: Slot, rank: int) -> list[T]:
        """The takes of a slot by a rank."""
        return self.taken.get((self.own(slot[0], rank), slot[1]), {}).get(self.first(rank), [])

    def ends(self, channel: Channel, sends: bool) -> list[T]:
        """The sends or the receives of a channel."""
        team, sender, receiver = channel
        rank = sender if sends else receiver
        here = self.own(team, rank), self.back(rank, sender), self.back(rank, receiver)
        return self.channels.get(here, ([], []))[0 if sends else 1]

    # What belongs together, once all ops are there.

    def collectives(self) -> Iterator[tuple[Queue, int, dict[int, T], dict[int, T]]]:
        """The k-th collective of each queue: the k-th op of each rank that has one, of those whose
        ops are added and of all."""
        for queue, members in [*self.queues.items()]:
            standing = {rank: self.queue(queue, rank) for rank in queue[0].ranks}
            for k in range(max(map(len, members.values()))):
                yield queue, k, _kth(members, k), _kth(standing, k)

    def deliveries(self) -> Iterator[Delivery[T]]:
        """The k-th send of each channel with its k-th receive."""
        for channel in [*self.channels]:
            both = zip_longest(self.ends(channel, True), self.ends(channel, False))
            for k, (send, recv) in enumerate(both):
                yield Delivery(channel, k, send, recv)

    def levels(self) -> Iterator[Awaited[T]]:
        """Each awaited value, with the first notify that suffices."""
        for signal, value, at in self.awaited:
            name, team, writer, reader = signal
            raised = name, self.own(team, writer), self.first(writer), self.back(writer, reader)
            notify, highest = self.first_raise(raised, value)
            yield Awaited(signal, value, at, notify, highest)

    def first_raise(self, signal: Signal, value: int) -> tuple[T | None, int]:
        """The first notify that raises a signal so far, and the highest value of any. Asked for
        once all ops are there."""
        raised = self.raised.get(signal, ())
        tops = self._tops.get(signal)
        if tops is None:
            tops = self._tops[signal] = list(accumulate((reached for reached, _ in raised), max))
        at = bisect_left(tops, value)
        return (raised[at][1] if at < len(tops) else None), tops[-1] if tops else 0

    def retakes(self) -> Iterator[Retake[T]]:
        """The takes of each slot that await what ranks free of it."""
        for (team, name), members in [*self.taken.items()]:
            for n in range(2, max(map(len, members.values()))):
                frees = {
                    rank: self.freed.get(((self.own(team, rank), name), n - 2, self.first(rank)))
                    for rank in team.ranks
                }
                yield Retake((team, name), n, [*_kth(members, n).values()], frees)


def _kth(issued: Mapping[int, Sequence[T]], k: int) -> dict[int, T]:
    """The op number `k` of each rank that has so many."""
    return {rank: ops[k] for rank, ops in issued.items() if len(ops) > k}
