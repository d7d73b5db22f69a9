"""What each rank of the oracle issues, op by op over all runs, and which bytes every op touches.

Bytes are sets of addresses, one by one, so nothing here is clever. See `oracle.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from interlace.ir.ops import (
    KINDS,
    RNG,
    Access,
    Alloc,
    Call,
    Collective,
    Free,
    Fused,
    Group,
    HostSync,
    Op,
    Record,
    Recv,
    Send,
    Wait,
    views_in,
)
from interlace.ir.program import Program
from interlace.ir.types import Buffer, DType, Index, Others, Where
from interlace.ir.view import AsStrided, Box, View

Bytes = frozenset[int]
Life = tuple[int, int, str, int]
"""A buffer in a run of a rank: rank, run, name, and the position of its declaration."""
Key = tuple[str, tuple[str, tuple[int, ...]], object]
"""A queue of collectives, a channel of messages or a slot: family, team, and which of them."""
Lane = tuple[str, int]
"""A stream, and 0; for a part of a Fused on that stream its number from 1."""
End = tuple[int, int, int]
"""One end of a message: number of the rank, position in its script, member of the group or -1."""


@dataclass(frozen=True, slots=True)
class Touch:
    """Bytes that a move reads or writes."""

    home: tuple[object, ...]
    """The memory: equal for what shares bytes."""
    owner: object
    """The buffer in it."""
    bytes: Bytes
    write: bool
    life: Life
    """The declaration through which this rank reaches it."""
    exact: Bytes = frozenset()
    """The bytes it surely touches: fewer than `bytes` for `as_strided`."""
    whole_life: bool = False
    """An Alloc or a Free: it stands against every use of that declaration by its rank."""

    def conflicts(self, other: Touch) -> bool:
        """Whether the two must be ordered."""
        if not (self.write or other.write):
            return False
        if self.life == other.life and (self.whole_life or other.whole_life):
            return True
        if self.home != other.home or self.whole_life or other.whole_life:
            if self.home != other.home or self.home[0] != "arena":
                return False
        if not self.bytes or not other.bytes:
            return False
        if self.owner == other.owner:
            return not self.bytes.isdisjoint(other.bytes)
        return min(self.bytes) <= max(other.bytes) and min(other.bytes) <= max(self.bytes)


@dataclass(slots=True)
class Rank:
    """One rank: what it issues, in order, over all runs."""

    rank: int
    where: Where
    script: list[tuple[Op | None, int]] = field(default_factory=list[tuple[Op | None, int]])
    """(op, run); None is the return at the end of a run."""
    lanes: dict[Lane, list[int]] = field(default_factory=dict[Lane, list[int]])
    """Stream, or part of a Fused on it -> the positions that it holds, in order."""
    spot: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """Position -> (lane, place in the lane)."""
    gates: list[list[int]] = field(default_factory=list[list[int]])
    """Position -> positions that must be done before the host gets here."""
    events: dict[int, int] = field(default_factory=dict[int, int])
    """Position of a Wait -> of its Record."""
    touches: dict[tuple[int, int], list[Touch]] = field(
        default_factory=dict[tuple[int, int], list[Touch]]
    )
    takes: dict[Life, tuple[Key, int]] = field(default_factory=dict[Life, tuple[Key, int]])
    inputs: set[object] = field(default_factory=set[object])


@dataclass(slots=True)
class Ledger:
    """What the ranks have in common: who meets whom, and which Free ends which take."""

    calls: dict[Key, dict[int, list[int]]] = field(default_factory=dict[Key, dict[int, list[int]]])
    """Queue -> rank -> the positions of its collectives."""
    mail: dict[Key, tuple[list[End], list[End]]] = field(
        default_factory=dict[Key, tuple[list[End], list[End]]]
    )
    """Channel -> its sends and its receives."""
    frees: dict[tuple[Key, int, int], tuple[int, int]] = field(
        default_factory=dict[tuple[Key, int, int], tuple[int, int]]
    )
    """(slot, take, rank) -> number of the rank, and the position of its Free."""


class Script:
    """Writes what one rank issues over all runs, and which memory each op touches."""

    def __init__(
        self,
        ledger: Ledger,
        number: int,
        rank: Rank,
        program: Program,
        runs: int,
        beside: bool = True,
    ) -> None:
        """`beside` runs the parts of a Fused beside each other, else one after another."""
        self.beside = beside
        self.ledger = ledger
        self.rank = rank
        self.program = program
        self.runs = runs
        self.number = number
        self.buffers: dict[str, tuple[Buffer, Life]] = {}
        self.taken: dict[Key, int] = {}
        self.records: dict[str, int] = {}
        self.syncs: list[int] = []

    def write(self) -> None:
        rank = self.rank
        for op in self.program.ops:
            rank.lanes.setdefault((op.stream, 0), [])
            for part in range(len(op.parts) if isinstance(op, Fused) and self.beside else 0):
                rank.lanes.setdefault((op.stream, part + 1), [])
        rank.lanes.setdefault(("main", 0), [])
        for run in range(self.runs):
            self.buffers, self.records = {}, {}
            for buffer in (*self.program.params, Buffer(RNG.buffer, DType.u8, (1,), "input")):
                self.declare(buffer, run, -1)
            if any(buffer.registered for buffer in self.program.params):
                self.syncs = [self.place(None, ("main", 0), run, begins=True)]
            for op in self.program.ops:
                if isinstance(op, Fused):
                    self.fused(op, run)
                else:
                    self.place(op, (op.stream, 0), run)
            end = self.place(None, ("main", 0), run)
            self.syncs = [end]

    def fused(self, op: Fused, run: int) -> None:
        """A start, the parts, and an end that awaits them."""
        start = self.place(op, (op.stream, 0), run)
        last: list[int] = []
        for number, part in enumerate(op.parts):
            lane = (op.stream, number + 1 if self.beside else 0)
            placed = [self.place(member, lane, run) for member in part]
            self.rank.gates[placed[0]].append(start)
            last.append(placed[-1])
        self.rank.gates[self.place(op, (op.stream, 0), run)] += last

    def place(self, op: Op | None, stream: Lane, run: int, begins: bool = False) -> int:
        rank = self.rank
        position = len(rank.script)
        rank.script.append((op, run))
        lane = rank.lanes[stream]
        rank.spot.append((list(rank.lanes).index(stream), len(lane)))
        lane.append(position)
        rank.gates.append(list(self.syncs) if op is not None else self.all_before(position))
        if op is None:
            self.callers(position, not begins)
        else:
            self.note(op, position, run)
        return position

    def all_before(self, position: int) -> list[int]:
        lane = self.rank.spot[position][0]
        return [p for p in range(position) if self.rank.spot[p][0] != lane]

    def note(self, op: Op, position: int, run: int) -> None:
        rank = self.rank
        match op:
            case HostSync():
                self.syncs.append(position)
            case Record():
                self.records[op.event] = position
            case Wait():
                if op.event in self.records:
                    rank.events[position] = self.records[op.event]
            case Alloc():
                self.declare(op.buffer, run, position)
                if op.buffer.kind == "symmetric":
                    self.take(op.buffer, position)
            case Free():
                self.free(op, position)
            case Fused():
                pass
            case Group():
                for i, member in enumerate(op.ops):
                    self.mail(member, position, i)
                    self.touch(member, position, i)
            case _:
                for buffer in op.fresh if isinstance(op, Call) else ():
                    self.declare(buffer, run, position)
                if isinstance(op, Collective):
                    key: Key = ("call", team_of(rank, op.team), op.backend)
                    mine = self.ledger.calls.setdefault(key, {}).setdefault(self.number, [])
                    mine.append(position)
                elif isinstance(op, Send | Recv):
                    self.mail(op, position, -1)
                self.touch(op, position, -1)

    def declare(self, buffer: Buffer, run: int, position: int) -> None:
        self.buffers[buffer.name] = (buffer, (self.rank.rank, run, buffer.name, position))

    def take(self, buffer: Buffer, position: int) -> None:
        assert buffer.team is not None
        slot: Key = ("slot", team_of(self.rank, buffer.team), buffer.storage or buffer.name)
        life = self.buffers[buffer.name][1]
        self.rank.takes[life] = (slot, self.taken.get(slot, 0))
        self.taken[slot] = self.taken.get(slot, 0) + 1
        self.rank.touches[position, -1] = [_whole(life, ("life",))]

    def free(self, op: Free, position: int) -> None:
        buffer, life = self.buffers[op.buffer]
        if life in self.rank.takes:
            self.ledger.frees[(*self.rank.takes[life], self.rank.rank)] = (self.number, position)
        home, owner, base = self.home(buffer, life, None, None)
        del owner
        shared = {base + byte for byte in _span(buffer, self.rank.where)}
        self.rank.touches[position, -1] = [_whole(life, home, frozenset(shared))]

    def mail(self, op: Send | Recv, position: int, member: int) -> None:
        (peer,) = peers_of(self.rank, op.team, op.peer)
        sends = isinstance(op, Send)
        pair = (self.rank.rank, peer) if sends else (peer, self.rank.rank)
        key: Key = ("mail", team_of(self.rank, op.team), pair)
        ends = self.ledger.mail.setdefault(key, ([], []))
        ends[0 if sends else 1].append((self.number, position, member))

    def touch(self, op: Op, position: int, member: int) -> None:
        reads, writes = list(op.reads()), list(op.writes())
        if isinstance(op, Collective) and op.root is not None:
            here = self.rank.where.member(op.team).index
            if self.rank.where.index(op.root) != here:
                reads = [] if KINDS[op.kind].reads == "root" else reads
                writes = [] if KINDS[op.kind].writes == "root" else writes
        touches = [self.access(access, False) for access in reads]
        touches += [self.access(access, True) for access in writes]
        self.rank.touches[position, member] = touches

    def callers(self, position: int, ends: bool) -> None:
        """What a caller reads at the end, and may do to what is registered out of a run."""
        params = self.program.params
        views = [view for arg in self.program.returned() for view in views_in(arg)]
        views += [View(buffer.name) for buffer in params if buffer.kind == "output"]
        found = [self.access(Access(view), False) for view in views] if ends else []
        for buffer in params:
            if buffer.registered:
                whole = self.access(Access(View(buffer.name)), True)
                found.append(replace(whole, exact=frozenset()))  # nothing that a run may read
        self.rank.touches[position, -1] = found

    def access(self, access: Access, write: bool) -> Touch:
        buffer, life = self.buffers[access.view.buffer]
        home, owner, base = self.home(buffer, life, access.team, access.peer)
        where = self.rank.where
        exact = _bytes(access.view.box(buffer, where))
        if any(isinstance(step, AsStrided) for step in access.view.steps):
            found = _span(buffer, where)
        else:
            found = exact
        if buffer.kind == "input":
            self.rank.inputs.add(owner)
        claimed, surely = (frozenset(base + byte for byte in part) for part in (found, exact))
        return Touch(home, owner, claimed, write, life, surely)

    def home(
        self, buffer: Buffer, life: Life, team: str | None, peer: Index | None
    ) -> tuple[tuple[object, ...], object, int]:
        """Where a buffer lives: the memory, the buffer in it, and its first byte."""
        rank, run = life[0], life[1]
        if life in self.rank.takes:
            slot, take = self.rank.takes[life]
            if team is not None and peer is not None:
                (rank,) = peers_of(self.rank, team, peer)
            return ("copy", slot, rank, take % 2), (slot, rank, take), 0
        if buffer.kind == "local" and buffer.storage is not None:
            return ("arena", rank, buffer.storage), life, buffer.offset
        if buffer.kind in ("input", "output"):
            if team is not None and peer is not None:
                (rank,) = peers_of(self.rank, team, peer)
            return ("caller", rank, buffer.name), (rank, run, buffer.name), 0
        return ("own", *life), life, 0


def _whole(life: Life, home: tuple[object, ...], found: Bytes = frozenset()) -> Touch:
    return Touch(home, life, found, True, life, whole_life=True)


def _bytes(box: Box) -> Bytes:
    """Every byte of a box, one by one."""
    starts = {box.offset} if box.numel else set[int]()
    for size, stride in zip(box.sizes, box.strides, strict=True):
        starts = {start + i * stride for start in starts for i in range(size)}
    item = box.dtype.itemsize
    return frozenset(start * item + i for start in starts for i in range(item))


def _span(buffer: Buffer, where: Where) -> Bytes:
    return _bytes(View(buffer.name).box(buffer, where))


def team_of(rank: Rank, name: str) -> tuple[str, tuple[int, ...]]:
    return name, rank.where.member(name).ranks


def peers_of(rank: Rank, team: str, peer: Index | Others) -> tuple[int, ...]:
    """The global ranks that a peer of an op means."""
    ranks = rank.where.member(team).ranks
    if isinstance(peer, Others):
        return tuple(other for other in ranks if other != rank.rank)
    return (ranks[rank.where.index(peer)],)
