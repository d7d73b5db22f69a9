"""What the machine of machine.py is made of: the acts, their two moves, and what each move awaits.

An act is an op on one rank in one run, or the begin or the end of a run there. It begins and it
ends: two moves, and it may touch its memory between them. What a move awaits is written down here
from semantics.md alone, rule by rule, for either of the page's two extremes.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Iterable

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
from interlace.ir.types import Buffer, Index, Others
from interlace.ir.view import AsStrided, Box, View

Clause = tuple[int, ...]
"""Moves, one of which has to be done first; none: the move that awaits it is never done."""
Key = tuple[Hashable, ...]


def bytes_of(box: Box, hull: bool = False) -> int:
    """The bytes of a box as the bits of an integer; with `hull`, also those between them."""
    if box.numel == 0:
        return 0
    item = box.dtype.itemsize
    found = (1 << item) - 1
    for size, stride in zip(numbers(box.sizes), numbers(box.strides), strict=True):
        have = 1
        while have < size:  # twice as many in each round
            more = min(have, size - have)
            found |= found << (more * stride * item)
            have += more
    if hull:
        found = (1 << found.bit_length()) - 1
    return found << (number(box.offset) * item)


@dataclasses.dataclass(frozen=True, slots=True)
class OracleTouch:
    """One access: which bytes of which memory, and through which name."""

    memory: Key
    name: Key
    """The buffer, and for what a pool or an arena gives again, which time it was given."""
    bytes: int
    """Counted from the start of the memory."""
    covers: int
    """What is compared with accesses through the same name: as_strided is the whole buffer."""
    hull: int
    """What is compared with accesses through other names."""
    write: bool
    marks: bool = False
    """No access, but the begin or the end of the name's life, or what the caller may do."""

    def conflicts(self, other: OracleTouch) -> bool:
        if self.memory != other.memory or not (self.write or other.write):
            return False
        if self.name == other.name:
            return self.covers & other.covers != 0
        return self.hull & other.hull != 0


@dataclasses.dataclass(eq=False, slots=True)
class Act:
    """An op (None: the begin or the end of a run), its touches, and what its moves await."""

    number: int
    run: int
    op: Op | None
    touches: list[OracleTouch] = dataclasses.field(default_factory=list[OracleTouch])
    empties: list[OracleTouch] = dataclasses.field(default_factory=list[OracleTouch])
    """Outputs that hold nothing from here on."""
    begin: list[Clause] = dataclasses.field(default_factory=list[Clause])
    end: list[Clause] = dataclasses.field(default_factory=list[Clause])
    gives: bool = True
    """Whether a collective has anything to contribute."""

    @property
    def began(self) -> int:
        return 2 * self.number

    @property
    def ended(self) -> int:
        return 2 * self.number + 1


class Script:
    """All acts of `runs` unjoined runs of a set of Programs.

    `strong`: a collective waits for all members, a send for its receive, and the parts of a Fused
    are done one after another. Otherwise nothing waits for more than it has to.
    """

    def __init__(self, programs: Iterable[Program], runs: int, *, strong: bool) -> None:
        self.strong = strong
        self.acts: list[Act] = []
        self.lists: defaultdict[Key, list[Act]] = defaultdict(list)
        """In the order listed, over all runs: a rank's collectives of one queue, the sends and the
        receives between two ranks, and a rank's takes of a slot."""
        self.frees: dict[Key, Act] = {}
        self.raised: defaultdict[Key, list[tuple[int, int]]] = defaultdict(list)
        ranks = [
            _Rank(self, program.instantiate(rank), rank)
            for program in programs
            for rank in (program.world if program.rank is None else (program.rank,))
        ]
        for rank in ranks:
            for run in range(runs):
                rank.add_run(run)
        for rank in ranks:
            for act in rank.acts:
                rank.meet(act)


class _Rank:
    """Lists the acts of one rank, and then has them meet those of others."""

    def __init__(self, script: Script, program: Program, rank: int) -> None:
        self.script, self.program, self.rank = script, program, rank
        self.box, self.buffers = program.boxes(rank), program.buffers()
        self.places = program.where(rank).members
        self.acts: list[Act] = []
        self.takes: dict[Key, int] = {}

    # One run of this rank by itself

    def add_run(self, run: int) -> None:
        self.run = run
        params = self.program.params
        start = self.act(None, [(self.acts[-1].ended,)] if self.acts else [])
        start.touches = [touch for b in params if b.registered for touch in self.whole(b)]
        outputs = [b for b in params if b.kind == "output"]
        start.empties = [touch for b in outputs for touch in self.whole(b)]
        lanes: dict[str, Act] = {}
        self.host, self.events = start, dict[str, Act]()
        for op in self.program.ops:
            if isinstance(op, Alloc) and op.buffer.kind != "symmetric":
                continue  # takes effect when it is issued, and no stream gets to it
            before = lanes.get(op.stream, start)
            lanes[op.stream] = self.add(op, [(self.host.ended,), (before.ended,)])
            if isinstance(op, HostSync):
                self.host = lanes[op.stream]
        over = self.act(None, [(self.host.ended,), *((act.ended,) for act in lanes.values())])
        results = [view for result in self.program.returned() for view in views_in(result)]
        results += [View(b.name) for b in params if b.kind == "output"]
        over.touches = [touch for view in results for touch in self.touch(Access(view), False)]
        over.touches += start.touches

    def act(self, op: Op | None, begin: list[Clause]) -> Act:
        act = Act(len(self.script.acts), self.run, op, begin=begin)
        self.script.acts.append(act)
        self.acts.append(act)
        return act

    def add(self, op: Op, begin: list[Clause]) -> Act:
        act = self.act(op, begin)
        match op:
            case Group():
                act.end += [(self.add(item, [(act.began,)]).ended,) for item in op.ops]
            case Fused():
                last = act.began
                for part in op.parts:
                    last = last if self.script.strong else act.began
                    for member in part:
                        last = self.add(member, [(last,)]).ended
                    act.end.append((last,))
            case Record():
                self.events[op.event] = act
            case Wait():  # without a Record, it is another finding's
                found = self.events.get(op.event)
                act.begin += [(found.ended,)] if found is not None else []
            case _:
                reads, writes = op.reads(), op.writes()
                if isinstance(op, Collective):  # what is given to one that does not use it
                    reads = reads if self.takes_part(op, KINDS[op.kind].reads) else ()
                    writes = writes if self.takes_part(op, KINDS[op.kind].writes) else ()
                act.touches = [touch for a in reads for touch in self.touch(a, False)]
                act.touches += [touch for a in writes for touch in self.touch(a, True)]
                self.enlist(act, op)
        return act

    def takes_part(self, op: Collective, who: str) -> bool:
        return who == "all" or (who == "root" and self.places[op.team].index == op.root)

    def enlist(self, act: Act, op: Op) -> None:
        """Writes down what others, or later acts, look for."""
        script = self.script
        match op:
            case Collective():
                script.lists[*self.queue(op), self.rank].append(act)
                member = self.places[op.team]
                from_root = op.kind in ("broadcast", "scatter")
                act.gives = op.src is None or self.box(op.src).numel > 0
                act.gives = act.gives and (not from_root or member.index == op.root)
            case Send() | Recv():
                script.lists[self.channel(op)].append(act)
            case Alloc(buffer=buffer):
                takes = script.lists[*self.slot(buffer), self.rank]
                self.takes[self.run, buffer.name] = len(takes)
                takes.append(act)
                act.touches = [self.life(buffer)]
            case Free(buffer=name):
                buffer = self.buffers[name]
                act.touches = [self.life(buffer)]
                if buffer.kind == "symmetric":
                    number = self.takes.get((self.run, name), 0)
                    script.frees[*self.slot(buffer), self.rank, number] = act
                else:  # the bytes are others' only after it
                    act.touches += self.whole(buffer)
            case Notify():
                for reader in self.peers(op.peer, op.team):
                    key = (op.signal, *self.team(op.team), self.rank, reader, self.run)
                    script.raised[key].append((op.value, act.ended))
            case Call() | Copy() | Put() | Get() | Expect() | HostSync():
                pass
            case _:
                raise UnsupportedError(
                    f"the oracle knows no op {type(op).__name__}: add a case to oracle/script.py"
                )

    # Names of what ranks share

    def team(self, name: str) -> Key:
        return (name, self.places[name].ranks)

    def peers(self, peer: Index | Others, team: str) -> list[int]:
        ranks = self.places[team].ranks
        if isinstance(peer, Others):
            return [rank for rank in ranks if rank != self.rank]
        assert isinstance(peer, int)
        return [ranks[peer]]

    def queue(self, op: Collective) -> Key:
        return ("collectives", *self.team(op.team), op.backend)

    def channel(self, op: Send | Recv, other: bool = False) -> Key:
        """This end of the messages between two ranks, or the other end."""
        (peer,) = self.peers(op.peer, op.team)
        sends = isinstance(op, Send)
        ends = (self.rank, peer) if sends else (peer, self.rank)
        return ("messages", *self.team(op.team), op.backend, ends, sends != other)

    def slot(self, buffer: Buffer) -> Key:
        assert buffer.team is not None
        return ("slot", *self.team(buffer.team), buffer.storage or buffer.name)

    # Memory

    def memory(self, buffer: Buffer, owner: int) -> tuple[Key, Key]:
        """Where a buffer of some rank lies, and its name there."""
        if buffer.kind == "symmetric":
            number = self.takes.get((self.run, buffer.name), 0)
            return (*self.slot(buffer), owner, number % 2), (buffer.name, number)
        if buffer.kind in ("input", "output"):
            return ("param", owner, buffer.name), (buffer.kind,)
        if buffer.storage is not None:
            return ("arena", owner, buffer.storage), (buffer.name, self.run)
        return ("own", owner, buffer.name), (self.run,)

    def touch(self, access: Access, write: bool) -> list[OracleTouch]:
        """An access, and that it is a use of a name of this rank's."""
        view = access.view
        if view == RNG:
            return [OracleTouch(("rng", self.rank), ("input",), 1, 1, 1, write)]
        buffer, box = self.buffers[view.buffer], self.box(view)
        if box.numel == 0:
            return []
        owner = self.rank
        if access.peer is not None and access.team is not None:
            (owner,) = self.peers(access.peer, access.team)
        exact, hull = bytes_of(box), bytes_of(box, hull=True)
        covers = exact
        if exact and any(isinstance(step, AsStrided) for step in view.steps):
            covers = hull = bytes_of(self.box(View(buffer.name)), hull=True)
        at = number(buffer.offset)
        memory, name = self.memory(buffer, owner)
        found = OracleTouch(memory, name, exact << at, covers << at, hull << at, write)
        return [found, dataclasses.replace(self.life(buffer), write=False)]

    def whole(self, buffer: Buffer) -> list[OracleTouch]:
        """A touch of the whole buffer, as the caller may touch a parameter out of a run."""
        found = self.touch(Access(View(buffer.name)), True)[:1]
        return [dataclasses.replace(touch, marks=True) for touch in found]

    def life(self, buffer: Buffer) -> OracleTouch:
        """What a use and a Free of a buffer, or a use and the take of a slot, conflict in."""
        memory = ("life", self.rank, self.run, buffer.name)
        return OracleTouch(memory, (buffer.kind,), 0, 1, 1, True, marks=True)

    # Meeting others

    def meet(self, act: Act) -> None:
        self.run = act.run
        match act.op:
            case Collective() as op:
                self.meet_collective(act, op)
            case Send() | Recv() as op:
                place = self.script.lists[self.channel(op)].index(act)
                if self.script.strong or (isinstance(op, Recv) and self.box(op.dst).numel > 0):
                    act.end.append(self.began(self.channel(op, other=True), place))
            case Alloc(buffer=buffer):
                number = self.takes[self.run, buffer.name] - 2
                for rank in self.places[buffer.team or ""].ranks if number >= 0 else ():
                    free = self.script.frees.get((*self.slot(buffer), rank, number))
                    act.begin.append((free.ended,) if free is not None else ())
            case Expect() as op:
                for writer in self.peers(op.peer, op.team):
                    key = (op.signal, *self.team(op.team), writer, self.rank, self.run)
                    raised = self.script.raised.get(key, [])
                    act.begin.append(tuple(end for value, end in raised if value >= op.value))
            case _:
                pass

    def began(self, key: Key, place: int) -> Clause:
        """That the act at a place of a list has begun."""
        acts = self.script.lists.get(key, [])
        return (acts[place].began,) if place < len(acts) else ()

    def meet_collective(self, act: Act, op: Collective) -> None:
        queue, member = self.queue(op), self.places[op.team]
        mine = self.script.lists[*queue, self.rank]
        place = mine.index(act)
        if place > 0:
            act.begin.append((mine[place - 1].ended,))
        root = op.root
        from_root = op.kind in ("broadcast", "scatter")
        to_root = op.kind in ("gather", "reduce")
        needs = (member.index == root) if to_root else not (from_root and member.index == root)
        needs = needs and not (op.dst is not None and self.box(op.dst).numel == 0)
        for index, rank in enumerate(member.ranks):
            theirs = self.script.lists.get((*queue, rank), [])
            gives = index == root or not from_root
            gives = theirs[place].gives if place < len(theirs) else gives
            if rank != self.rank and (self.script.strong or (needs and gives)):
                act.end.append(self.began((*queue, rank), place))
