"""Input of the machine in machine.py: acts, their two moves, and the clauses of each move.

An act is an op on one rank in one run, or the begin or the end of a run there. It begins and it
ends: two moves, and it may touch its memory between them. The clauses of a move are written down
here from semantics.md alone, rule by rule, for either of the page's two extremes.

    script = Script([program], runs=2)
    script.acts[0].touches, script.acts[0].begin
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, cast

from interlace.errors import UnsupportedError
from interlace.ir.ops import (
    KINDS,
    RNG,
    Access,
    Alloc,
    Call,
    Collective,
    Copy,
    Expect,
    Free,
    Fused,
    Get,
    Group,
    HostSync,
    Notify,
    Op,
    Put,
    Record,
    Recv,
    Send,
    Wait,
    views_in,
)
from interlace.ir.program import Program
from interlace.ir.sizes import number, numbers
from interlace.ir.types import Buffer, DType, Index, Others, Where
from interlace.ir.view import AsStrided, View

Storage = tuple[int, str]
"""A rank, and the name of a storage there."""
Clause = tuple[int, ...]
"""Moves, one of which has to be done first; none: the move that awaits it is never done."""
Key = tuple[Hashable, ...]
Place = tuple[int, int]
"""A rank, and the index of an op in its list: -1 for the begin of a run, after the last its end."""


@lru_cache(1 << 14)
def bytes_of(sizes: tuple[int, ...], strides: tuple[int, ...], item: int) -> int:
    """The bytes of a box from its first on, as the bits of an integer."""
    if 0 in sizes:
        return 0
    found = (1 << item) - 1
    for size, stride in zip(sizes, strides, strict=True):
        have = 1
        while have < size:  # twice as many in each round
            more = min(have, size - have)
            found |= found << (more * stride * item)
            have += more
    return found


class OracleTouch(NamedTuple):
    """One access: which bytes of which memory, and through which name."""

    memory: Key
    name: Key
    """The buffer, and for what a pool or an arena gives again, which time it was given."""
    bytes: int
    """Counted from the start of the memory."""
    covers: int
    """Bytes compared with accesses through the same name: for as_strided the whole buffer."""
    hull: int
    """Bytes compared with accesses through other names."""
    write: bool
    marks: bool = False
    """No access, but the begin or the end of the name's life, or what the caller may do."""

    @property
    def storage(self) -> Storage:
        """Whose memory it is, and what it is called there."""
        return cast("Storage", self.memory[-2:])

    @property
    def life(self) -> bool:
        """True if it is a use, the take or the Free of a name, and of no bytes."""
        return self.memory[0] == "life"

    def conflicts(self, other: OracleTouch) -> bool:
        """Returns True if the two, of one memory, share bytes and at least one of them writes."""
        if not (self.write or other.write):
            return False
        if self.name == other.name:
            return self.covers & other.covers != 0
        return self.hull & other.hull != 0


class Extent(NamedTuple):
    """The bytes of one access, whichever the run."""

    buffer: Buffer
    owner: int
    """The rank whose memory it is."""
    bytes: int
    """None where no contents are taken or given."""
    covers: int
    hull: int
    write: bool


class Act:
    """An op (None: the begin or the end of a run), its touches, and what its moves await."""

    __slots__ = (
        *("begin", "began", "empties", "end", "ended", "gives", "may_begin", "may_end"),
        *("number", "op", "place", "run", "touches"),
    )

    def __init__(
        self, number: int, place: Place, run: int, op: Op | None, begin: list[Clause]
    ) -> None:
        self.number, self.place, self.run, self.op = number, place, run, op
        self.began, self.ended = 2 * number, 2 * number + 1
        self.touches: Sequence[OracleTouch] = ()
        self.empties: Sequence[OracleTouch] = ()
        """Outputs that hold nothing from here on."""
        self.begin = begin
        self.end: list[Clause] = []
        self.may_begin: list[Clause] = []
        """Further clauses that it awaits where everything waits for all that it may wait for."""
        self.may_end: list[Clause] = []
        self.gives = True
        """A collective has something to contribute."""

    def awaits(self, strong: bool) -> tuple[list[Clause], list[Clause]]:
        """Clauses of its begin and of its end; `strong`: at the extreme that decides deadlocks."""
        begin, end = self.begin, [*self.end, (self.began,)]
        return ([*begin, *self.may_begin], [*end, *self.may_end]) if strong else (begin, end)


class Script:
    """All acts of `runs` unjoined runs of a set of Programs.

    At one extreme nothing waits for more than it has to; at the other a collective waits for all
    members, a send for its receive, and the parts of a Fused are done one after another.
    """

    def __init__(
        self, programs: Iterable[Program], runs: int, counts: random.Random | None = None
    ) -> None:
        """Where counts are data, `counts` draws them; without it each rank keeps all of its rows:
        it reads and writes as much as it may, and no rank has anything of another."""
        self.acts: list[Act] = []
        self.counts = counts
        self.drawn: dict[Key, int] = {}
        """The rows of an exchange from one rank to another, by its queue and number there."""
        self.lists: defaultdict[Key, list[Act]] = defaultdict(list)
        """In the order listed, over all runs: a rank's collectives of one queue, the sends and the
        receives between two ranks, and a rank's takes of a slot."""
        self.frees: dict[Key, Act] = {}
        self.raised: defaultdict[Key, list[tuple[int, Act]]] = defaultdict(list)
        self.faults: set[str] = set()
        """Faults that each rank's list alone shows, by the names that reports give them."""
        ranks = [
            _Rank(self, program, where)
            for program in programs
            for where in program.wheres(program.world if program.rank is None else (program.rank,))
        ]
        for rank in ranks:
            for run in range(runs):
                rank.add_run(run)
        for rank in ranks:
            for act in rank.acts:
                rank.meet(act)


class _Rank:
    """Lists the acts of one rank, and then has them meet those of others."""

    def __init__(self, script: Script, program: Program, where: Where) -> None:
        self.script, self.program, self.where = script, program, where
        self.rank, self.places = where.rank, where.members
        self.buffers = program.buffers()
        self.acts: list[Act] = []
        self.run = 0
        self.takes: dict[tuple[int, str], int] = {}
        self.extents: dict[int, list[Extent]] = {}
        """Extents by the id of an op (which the Program keeps alive)."""
        self.names: dict[tuple[str, int], tuple[Key, Key]] = {}
        """Memory of this run, and the buffer's name in it, by buffer and rank."""
        freed = {op.buffer for op in program.ops if isinstance(op, Free)}
        self.mortal = freed | {b.name for b in self.buffers.values() if b.kind == "symmetric"}
        """Buffers that are not always there."""
        params = program.params
        self.outputs = [self.whole(b) for b in params if b.kind == "output"]
        results = [view for result in program.returned() for view in views_in(result)]
        results += [View(b.name) for b in params if b.kind == "output"]
        self.results = [e for v in dict.fromkeys(results) for e in self.extent(Access(v), False)]

    # One run of this rank by itself

    def add_run(self, run: int) -> None:
        self.run, self.index = run, -1
        self.names = {}
        inputs = [b for b in self.program.params if b.kind == "input"]
        self.held = {b.name: True for b in inputs}
        start = self.act(None, [(self.acts[-1].ended,)] if self.acts else [])
        start.empties = [self.touch(extent, marks=True) for extent in self.outputs]
        lanes: dict[str, Act] = {}
        self.host, self.events = start, dict[str, Act]()
        for index, op in enumerate(self.program.ops):
            self.index = index
            for buffer in op.declares():
                self.held[buffer.name] = True
            if isinstance(op, Alloc) and op.buffer.kind != "symmetric":
                continue  # takes effect when it is issued, and no stream gets to it
            before = lanes.get(op.stream, start)
            lanes[op.stream] = self.add(op, [(self.host.ended,), (before.ended,)])
            if isinstance(op, HostSync):
                self.host = lanes[op.stream]
        self.index = len(self.program.ops)
        over = self.act(None, [(self.host.ended,), *((act.ended,) for act in lanes.values())])
        over.touches = [*self.touches(self.results)]
        if any(held and self.buffers[name].kind == "symmetric" for name, held in self.held.items()):
            self.script.faults.add("leak")

    def act(self, op: Op | None, begin: list[Clause]) -> Act:
        place = self.rank, self.index
        act = Act(len(self.script.acts), place, self.run, op, begin)
        self.script.acts.append(act)
        self.acts.append(act)
        return act

    def add(self, op: Op, begin: list[Clause]) -> Act:
        act = self.act(op, begin)
        match op:
            case Group():
                act.end += [(self.add(item, [(act.began,)]).ended,) for item in op.ops]
            case Fused():
                self.add_parts(act, op)
            case Record():
                self.events[op.event] = act
            case Wait():
                found = self.events.get(op.event)
                if found is None:
                    self.script.faults.add("event")
                else:
                    begin.append((found.ended,))
            case HostSync():
                pass
            case _:
                extents = self.extents.get(id(op))
                if extents is None:
                    extents = self.extents[id(op)] = self.extents_of(op)
                act.touches = self.touches(extents)
                self.enlist(act, op)
                if isinstance(op, Collective) and op.sent is not None and self.script.counts:
                    act.touches = self.touches(self.counted(op))
        return act

    def add_parts(self, act: Act, op: Fused) -> None:
        """The parts of a Fused: beside each other, or one after another."""
        end_of_part = act.began
        for part in op.parts:
            last = act.began
            for k, member in enumerate(part):
                one = self.add(member, [(last,)])
                if k == 0:
                    one.may_begin.append((end_of_part,))
                last = one.ended
            end_of_part = last
            act.end.append((last,))

    def enlist(self, act: Act, op: Op) -> None:
        """Writes down what others, or later acts, look for."""
        script = self.script
        match op:
            case Collective():
                script.lists[*self.queue(op), self.rank].append(act)
                from_root = op.kind in ("broadcast", "scatter")
                act.gives = op.src is None or self.has_elements(op.src)
                act.gives = act.gives and (not from_root or self.is_root(op))
                act.gives = act.gives and op.sent is None  # else the draw says
            case Send() | Recv():
                script.lists[self.channel(op)].append(act)
            case Alloc(buffer=buffer):
                takes = script.lists[*self.slot(buffer), self.rank]
                self.takes[self.run, buffer.name] = len(takes)
                takes.append(act)
                act.touches = [self.life(buffer, True)]
            case Free(buffer=name):
                self.free(act, self.buffers[name])
            case Notify():
                for reader in self.peers(op.peer, op.team):
                    key = (op.signal, *self.team(op.team), self.rank, reader, self.run)
                    script.raised[key].append((op.value, act))
            case Call() | Copy() | Put() | Get() | Expect():
                pass
            case _:
                raise UnsupportedError(
                    f"the oracle knows no op {type(op).__name__}: add a case to oracle/script.py"
                )

    def free(self, act: Act, buffer: Buffer) -> None:
        held = self.held.get(buffer.name)
        if not held:
            self.script.faults.add("bad-free" if held is None else "double-free")
        self.held[buffer.name] = False
        act.touches = [self.life(buffer, True)]
        if buffer.kind == "symmetric":
            number = self.takes.get((self.run, buffer.name), 0)
            self.script.frees[*self.slot(buffer), self.rank, number] = act
        else:  # the bytes are others' only after it
            act.touches.append(self.touch(self.whole(buffer), marks=True))

    def counted(self, op: Collective) -> list[Extent]:
        """The extents of an exchange, whose source is read as far as its rows are sent."""
        assert op.src is not None
        place = len(self.script.lists[*self.queue(op), self.rank]) - 1
        count = sum(self.rows(op, place, self.rank, peer) for peer in self.places[op.team].ranks)
        sent = replace(op, src=op.src.slice(0, 0, count))
        return self.extents_of(sent)

    def rows(self, op: Collective, place: int, sender: int, receiver: int) -> int:
        """The rows of the exchange number `place` from one rank to another; none in half of all."""
        key = (*self.queue(op), place, sender, receiver)
        draw = self.script.counts
        if draw is None:
            return 0
        if key not in self.script.drawn:
            assert op.src is not None
            size = number(op.src.box(self.buffers[op.src.buffer], self.where).sizes[0])
            most = size // len(self.places[op.team].ranks)
            self.script.drawn[key] = draw.choice((0, 0, draw.randint(0, most), most))
        return self.script.drawn[key]

    # Names of what ranks share

    def team(self, name: str) -> Key:
        return (name, self.places[name].ranks)

    def peers(self, peer: Index | Others, team: str) -> list[int]:
        ranks = self.places[team].ranks
        if isinstance(peer, Others):
            return [rank for rank in ranks if rank != self.rank]
        return [ranks[self.where.index(peer)]]

    def is_root(self, op: Collective) -> bool:
        return op.root is not None and self.places[op.team].index == self.where.index(op.root)

    def queue(self, op: Collective) -> Key:
        return ("collectives", *self.team(op.team), op.backend)

    def channel(self, op: Send | Recv, other: bool = False) -> Key:
        """This end of the messages between two ranks, or the other end."""
        (peer,) = self.peers(op.peer, op.team)
        sends = isinstance(op, Send)
        ends = (self.rank, peer) if sends else (peer, self.rank)
        return ("messages", *self.team(op.team), ends, sends != other)

    def slot(self, buffer: Buffer) -> Key:
        assert buffer.team is not None
        return ("slot", *self.team(buffer.team), buffer.storage or buffer.name)

    # Memory

    def has_elements(self, view: View) -> bool:
        return 0 not in view.box(self.buffers[view.buffer], self.where).sizes

    def extents_of(self, op: Op) -> list[Extent]:
        """Extents that an op reads and writes."""
        reads, writes = op.reads(), op.writes()
        if isinstance(op, Collective):  # what is given to one that does not use it
            kind, root = KINDS[op.kind], self.is_root(op)
            reads = reads if kind.reads == "all" or (root and kind.reads == "root") else ()
            writes = writes if kind.writes == "all" or (root and kind.writes == "root") else ()
        found = [extent for access in reads for extent in self.extent(access, False)]
        return found + [extent for access in writes for extent in self.extent(access, True)]

    def extent(self, access: Access, write: bool) -> list[Extent]:
        """The bytes of an access; none where there is no element."""
        view = access.view
        if view == RNG:
            return [Extent(_RANDOM, self.rank, 1, 1, 1, write)]
        buffer = self.buffers[view.buffer]
        box = view.box(buffer, self.where)
        item = box.dtype.itemsize
        exact = bytes_of(numbers(box.sizes), numbers(box.strides), item)
        if not exact:
            return []
        exact <<= number(box.offset) * item
        covers, hull = exact, _filled(exact)
        owner, at = self.rank, number(buffer.offset)
        if any(isinstance(step, AsStrided) for step in view.steps):
            covers = hull = self.whole(buffer).hull >> at
        if access.peer is not None and access.team is not None:
            (owner,) = self.peers(access.peer, access.team)
        own = exact << at if access.contents else 0
        return [Extent(buffer, owner, own, covers << at, hull << at, write)]

    def whole(self, buffer: Buffer) -> Extent:
        """The whole buffer, as the caller may touch a parameter out of a run."""
        found = self.extent(Access(View(buffer.name)), True)
        return found[0] if found else Extent(buffer, self.rank, 0, 0, 0, True)

    def touches(self, extents: Sequence[Extent]) -> list[OracleTouch]:
        """Accesses in this run, and that each is a use of a name of this rank's."""
        found = [self.touch(extent) for extent in extents]
        buffers = [extent.buffer for extent in extents if extent.buffer.name in self.mortal]
        return found + [self.life(buffer, False) for buffer in buffers] if buffers else found

    def touch(self, extent: Extent, marks: bool = False) -> OracleTouch:
        buffer, owner, exact, covers, hull, write = extent
        key = (buffer.name, owner)
        named = self.names.get(key)
        if named is None or buffer.kind == "symmetric":  # which may be used before it is taken
            named = self.names[key] = self.memory(buffer, owner)
        return OracleTouch(*named, exact, covers, hull, write, marks)

    def memory(self, buffer: Buffer, owner: int) -> tuple[Key, Key]:
        """Where a buffer of some rank lies, and its name there."""
        if buffer.kind == "symmetric":
            number = self.takes.get((self.run, buffer.name), 0)
            _, *team, storage = self.slot(buffer)
            return ("slot", *team, number % 2, owner, storage), (buffer.name, number)
        if buffer is _RANDOM:
            return ("rng", owner, buffer.name), ("input",)
        if buffer.kind in ("input", "output"):
            return ("param", owner, buffer.name), (buffer.kind,)
        if buffer.storage is not None:
            return ("arena", owner, buffer.storage), (buffer.name, self.run)
        return ("own", owner, buffer.name), (self.run,)

    def life(self, buffer: Buffer, write: bool) -> OracleTouch:
        """The touch by which a use conflicts with the Free of a buffer or the take of a slot."""
        storage = buffer.storage or buffer.name
        memory = ("life", self.run, buffer.name, self.rank, storage)
        return OracleTouch(memory, (buffer.kind,), 0, 1, 1, write, marks=True)

    # Meeting others

    def meet(self, act: Act) -> None:
        self.run = act.run
        match act.op:
            case Collective() as op:
                self.meet_collective(act, op)
            case Send() | Recv() as op:
                place = self.script.lists[self.channel(op)].index(act)
                has_to = isinstance(op, Recv) and self.has_elements(op.dst)
                awaits = act.end if has_to else act.may_end
                awaits.append(self.began(self.channel(op, other=True), place))
            case Alloc(buffer=buffer):
                number = self.takes[self.run, buffer.name] - 2
                for rank in self.places[buffer.team or ""].ranks if number >= 0 else ():
                    free = self.script.frees.get((*self.slot(buffer), rank, number))
                    act.begin.append((free.ended,) if free is not None else ())
            case Expect() as op:
                for writer in self.peers(op.peer, op.team):
                    key = (op.signal, *self.team(op.team), writer, self.rank, self.run)
                    raised = self.script.raised.get(key, [])
                    act.begin.append(tuple(by.ended for value, by in raised if value >= op.value))
            case _:
                pass

    def began(self, key: Key, place: int) -> Clause:
        """Clause that the act at a place of a list has begun; none can hold without such an act."""
        acts = self.script.lists.get(key, [])
        return (acts[place].began,) if place < len(acts) else ()

    def meet_collective(self, act: Act, op: Collective) -> None:
        queue, member = self.queue(op), self.places[op.team]
        mine = self.script.lists[*queue, self.rank]
        place = mine.index(act)
        if place > 0:
            act.begin.append((mine[place - 1].ended,))
        root = None if op.root is None else self.where.index(op.root)
        from_root = op.kind in ("broadcast", "scatter")
        to_root = op.kind in ("gather", "reduce")
        needs = (member.index == root) if to_root else not (from_root and member.index == root)
        needs = needs and not (op.dst is not None and not self.has_elements(op.dst))
        for index, rank in enumerate(member.ranks):
            if rank == self.rank:
                continue
            theirs = self.script.lists.get((*queue, rank), [])
            gives = index == root or not from_root
            gives = theirs[place].gives if place < len(theirs) else gives
            if op.sent is not None:
                gives = self.rows(op, place, rank, self.rank) > 0
            awaits = act.end if needs and gives else act.may_end
            awaits.append(self.began((*queue, rank), place))


def _filled(found: int) -> int:
    """The bits from the first that is set to the last."""
    return (1 << found.bit_length()) - (found & -found)


_RANDOM = Buffer(RNG.buffer, DType.u8, (1,), "input")
"""The state of the random numbers of a rank."""
