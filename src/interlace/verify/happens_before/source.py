"""Programs made ready to be checked: every op with the buffers it touches, names resolved once.

A `LoweredProgram` is one Program, still for all of its ranks: names are bound in list order (which
Alloc a name means, which Record a Wait sees), and what is wrong in that order alone is a `Flaw`.

    source = lower(program, Regions())
    source.items[3].touches        # what the op on line 4 reads and writes
    source.versions[0].symmetric   # a buffer, from its declaration on
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from interlace.errors import ProgramError
from interlace.ir.ops import (
    KINDS,
    RNG,
    UNORDERED,
    Access,
    Collective,
    Fused,
    Group,
    Op,
    Ordering,
    views_in,
)
from interlace.ir.order import in_order
from interlace.ir.program import Program, spots
from interlace.ir.types import Buffer, DType, Index, Where
from interlace.ir.view import View
from interlace.verify.accesses.regions import Regions, Spot


class Touch(NamedTuple):
    """A read or a write of a view, in this rank's memory or in a peer's."""

    write: bool
    version: int
    spot: Spot
    peer: Index | None
    team: str | None
    root_only: bool
    """Whether only the root of the collective does it."""


@dataclass(slots=True, eq=False)
class Item:
    """An op of a Program; the members of a Group or a Fused are items too, with its index."""

    index: int
    op: Op | None
    """None: the begin of the run (whose index is -1), or the return."""
    stream: int
    """Part k > 0 of a Fused counts as a stream of its own."""
    touches: tuple[Touch, ...] = ()
    version: int = -1
    """The buffer that an Alloc or a Free means."""
    record: int = -1
    """The place of the Record that a Wait sees."""
    members: tuple[Item, ...] = ()
    turn: int = -1
    """When it is issued: of two ops of a stream, the one with the lower turn goes first."""
    place: int = -1
    """Where a frame keeps its node: the index, or for a member of a Fused a number after all."""
    ordering: Ordering = field(init=False)

    def __post_init__(self) -> None:
        self.ordering = UNORDERED if self.op is None else self.op.ordering()

    @property
    def begins_run(self) -> bool:
        """Whether this is no op, but the begin of the run."""
        return self.op is None and self.index < 0

    @property
    def ends_run(self) -> bool:
        """Whether this is no op, but the return."""
        return self.op is None and self.index >= 0

    @property
    def is_group(self) -> bool:
        """Whether its members begin and end together."""
        return bool(self.members and self.ordering.messages)

    @property
    def is_fused(self) -> bool:
        """Whether its members are the parts of a kernel."""
        return isinstance(self.op, Fused)

    def does(self, touch: Touch, where: Where) -> bool:
        """Whether a rank does what a touch of this op says: some only the root does."""
        return not touch.root_only or self.is_root(where)

    def is_root(self, where: Where) -> bool:
        """Whether the rank is the root of this collective."""
        op = self.op
        assert isinstance(op, Collective)
        return op.root is not None and where.index(op.root) == where.member(op.team).index


@dataclass(slots=True, eq=False)
class Version:
    """A buffer from its declaration on: what a name means between an Alloc and the next."""

    buffer: Buffer
    spot: Spot
    """The whole of it."""
    alloc: int = -1
    """The index of the op that declares it; -1 for a parameter."""
    free: int = -1
    shared: bool = False
    """Whether other buffers share its storage."""

    @property
    def symmetric(self) -> bool:
        """Whether peers can reach it."""
        return self.buffer.kind == "symmetric"

    @property
    def registered(self) -> bool:
        """Whether it is memory of the caller's that peers can reach."""
        return self.buffer.registered

    @property
    def storage(self) -> str:
        """The name of its bytes: a slot, an arena storage, or its own."""
        return self.buffer.storage or self.buffer.name


class Flaw(NamedTuple):
    """A fault that list order alone shows, so it is the same on every rank."""

    kind: str
    message: str
    ops: tuple[tuple[Item, str, str], ...]
    """Item, role and buffer of each op."""
    fix: tuple[str | int, ...]
    """Text, and numbers of ops whose line stands there."""


@dataclass(slots=True, eq=False)
class LoweredProgram:
    """One Program, ready to be placed on its ranks."""

    number: int
    """Its place in the set."""
    program: Program
    ranks: tuple[int, ...]
    streams: tuple[str, ...]
    items: list[Item]
    exit: Item
    versions: list[Version]
    flaws: list[Flaw] = field(default_factory=list[Flaw])
    sequence: list[Item] = field(default_factory=list[Item])
    """The items in the order of issue; checked in order, with members of Fuseds on their own."""
    num_places: int = 0
    """Items, the return, the members of Fuseds, and the begin."""
    enter: Item | None = None
    """The begin of the run, where parameters are registered: what their callers do before it."""


def lower(
    program: Program, regions: Regions, in_order: bool = False, number: int = 0
) -> LoweredProgram:
    """The Program's items and versions; `in_order` puts every op on one stream."""
    return _Lowering(program, regions, in_order, number).run()


class _Lowering:
    def __init__(self, program: Program, regions: Regions, in_order: bool, number: int) -> None:
        self.program = program
        self.number = number
        self.regions = regions
        self.streams: dict[tuple[str, int], int] = {}
        if in_order or not program.ops:
            self.streams["main", 0] = 0
        self.num_places = len(program.ops) + 1
        self.in_order = in_order
        self.versions: list[Version] = []
        self.current: dict[str, int] = {}
        self.spots: dict[tuple[int, View], Spot] = {}
        self.records: dict[str, int] = {}
        self.flaws: list[Flaw] = []
        self.declares = {
            buffer.name: (i, buffer)
            for i, op in reversed(list(enumerate(program.ops)))
            for buffer in op.declares()
        }
        self.ahead: dict[str, int] = {}  # declared, because used before its Alloc

    def run(self) -> LoweredProgram:
        program = self.program
        for buffer in program.params:
            self.declare(buffer, -1)
        items = [self.item(i, op) for i, op in enumerate(program.ops)]
        end = len(items)
        callers = self.callers()
        leave = Item(end, None, 0, (*self.results(end), *callers), place=end)
        enter: Item | None = None
        if callers:
            enter = Item(-1, None, 0, callers, place=self.num_places)
            self.num_places += 1
        self.find_sharing()
        for version in self.versions:
            if version.symmetric and version.free < 0 and version.alloc >= 0:
                self.leak(items, version)
        ranks = program.world if program.rank is None else (program.rank,)
        streams = tuple(f"{name}, part {k + 1}" if k else name for name, k in self.streams)
        sequence = self.in_sequence(items) if self.in_order else items
        for turn, item in enumerate([*_with_members(sequence), leave]):
            item.turn = turn
        return LoweredProgram(
            number=self.number,
            program=program,
            ranks=ranks,
            streams=streams,
            items=items,
            exit=leave,
            versions=self.versions,
            flaws=self.flaws,
            sequence=sequence,
            num_places=self.num_places,
            enter=enter,
        )

    def callers(self) -> tuple[Touch, ...]:
        """What the callers may do to registered parameters before a run and after it: all."""
        return tuple(
            Touch(True, number, version.spot, None, None, False)
            for number, version in enumerate(self.versions)
            if version.registered
        )

    def in_sequence(self, items: list[Item]) -> list[Item]:
        """The items, and the members of Fuseds, one after another."""
        found = in_order(self.program.ops)
        return [items[i].members[k] if items[i].is_fused else items[i] for i, k in found]

    def item(self, index: int, op: Op) -> Item:
        item = Item(index, op, self.stream(op), place=index)
        match op:
            case Group():
                item.members = tuple(
                    Item(index, one, item.stream, self.touches(item, one)) for one in op.ops
                )
            case Fused():
                item.members = tuple(
                    self.member(index, member, number)
                    for number, part in enumerate(op.parts)
                    for member in part
                )
            case _:
                self.bind(item)
                for buffer in op.declares():
                    item.version = self.declare(buffer, index)
                item.touches = self.touches(item, op)
        return item

    def stream(self, op: Op, part: int = 0) -> int:
        """The number of an op's stream; each part of a Fused but the first has one of its own."""
        key = ("main", 0) if self.in_order else (op.stream, part)
        return self.streams.setdefault(key, len(self.streams))

    def member(self, index: int, op: Op, part: int) -> Item:
        """A member of a Fused."""
        item = Item(index, op, self.stream(op, part), place=self.num_places)
        self.num_places += 1
        self.bind(item)
        item.touches = self.touches(item, op)
        return item

    def bind(self, item: Item) -> None:
        """Which Record a Wait sees, and which buffer a Free means."""
        ordering = item.ordering
        if ordering.records is not None:
            self.records[ordering.records] = item.place
        if ordering.waits is not None:
            item.record = self.records.get(ordering.waits, -1)
            if item.record < 0:
                self.unrecorded(item, ordering.waits)
        if ordering.frees is not None:
            self.free(item, ordering.frees)

    def declare(self, buffer: Buffer, index: int) -> int:
        if buffer.name in self.ahead:
            version = self.ahead.pop(buffer.name)
            self.current[buffer.name] = version
            return version
        version = len(self.versions)
        spot = self.regions.spot(View(buffer.name), buffer, self.program.tables)
        self.versions.append(Version(buffer, spot, index))
        self.current[buffer.name] = version
        return version

    def version(self, item: Item, name: str) -> int:
        """What a name means here; a name that is declared only later is a flaw."""
        found = self.current.get(name)
        if found is not None:
            return found
        if name == RNG.buffer:
            return self.declare(Buffer(name, DType.u8, (1,), "input"), -1)
        later = self.declares.get(name)
        if later is None:
            raise ProgramError(
                f"{self.program.name}, op {item.index}: no buffer named {name!r}: declare "
                f"it as a parameter, or allocate it before this line"
            )
        version = self.declare(later[1], later[0])
        self.ahead[name] = version
        self.flaws.append(
            Flaw(
                "use-before-alloc",
                f"{name} is used before it is allocated",
                ((item, f"uses {name}", name), (self.later(*later), f"allocates {name}", name)),
                ("move line ", later[0], " before line ", item.index),
            )
        )
        return version

    def later(self, index: int, buffer: Buffer) -> Item:
        return Item(index, self.program.ops[index], 0)

    def touches(self, item: Item, op: Op) -> tuple[Touch, ...]:
        reads = writes = False
        if isinstance(op, Collective):
            kind = KINDS[op.kind]
            reads, writes = kind.reads == "root", kind.writes == "root"
        found = [self.touch(item, False, access, reads) for access in op.reads()]
        found += [self.touch(item, True, access, writes) for access in op.writes()]
        return tuple(found)

    def touch(self, item: Item, write: bool, access: Access, root_only: bool) -> Touch:
        version = self.version(item, access.view.buffer)
        key = (version, access.view)
        spot = self.spots.get(key)
        if spot is None:
            buffer = self.versions[version].buffer
            spot = self.regions.spot(access.view, buffer, self.program.tables)
            self.spots[key] = spot
        return Touch(write, version, spot, access.peer, access.team, root_only)

    def results(self, end: int) -> list[Touch]:
        """What the return reads: the results, and every output parameter."""
        program = self.program
        item = Item(end, None, 0)
        views = [view for arg in program.returned() for view in views_in(arg)]
        returned = {view.buffer for view in views if not view.steps}
        for buffer in program.params:
            if buffer.kind == "output" and buffer.name not in returned:
                views.append(View(buffer.name))
        found: list[Touch] = []
        for view in dict.fromkeys(views):
            found.append(self.touch(item, False, Access(view), False))
            buffer = self.versions[found[-1].version].buffer
            if buffer.kind in ("local", "symmetric"):
                home = "the arena" if buffer.kind == "local" else "a communication slot"
                self.flaws.append(
                    Flaw(
                        "result",
                        f"the result {view.buffer} lives in {home}, which the next run overwrites",
                        ((item, f"returns {view.buffer}", view.buffer),),
                        (f"allocate {view.buffer} as fresh, or copy it to an output at the end",),
                    )
                )
        return found

    def free(self, item: Item, name: str) -> None:
        item.version = self.version(item, name)
        version = self.versions[item.version]
        if version.alloc < 0 or (version.free < 0 and item.index < version.alloc):
            self.flaws.append(
                Flaw(
                    "bad-free",
                    f"{name} is freed, and the Program did not allocate it",
                    ((item, f"frees {name}", name),),
                    ("remove line ", item.index),
                )
            )
            item.version = -1
        elif version.free >= 0:
            first = Item(version.free, self.program.ops[version.free], 0)
            self.flaws.append(
                Flaw(
                    "double-free",
                    f"{name} is freed twice",
                    ((first, "frees it first", name), (item, "frees it again", name)),
                    ("remove line ", item.index),
                )
            )
            item.version = -1
        else:
            version.free = item.index

    def unrecorded(self, item: Item, event: str) -> None:
        later = next(
            (i for (i, _), other in spots(self.program.ops) if other.ordering().records == event),
            None,
        )
        ops = [(item, f"waits for {event}", "")]
        if later is not None:
            record = Item(later, self.program.ops[later], 0)
            ops.append((record, f"records {event} only after that", ""))
        self.flaws.append(
            Flaw(
                "event",
                f"a wait for {event}, which nothing recorded before it in this run",
                tuple(ops),
                (f"record {event} before line ", item.index, ", after what must be awaited"),
            )
        )

    def leak(self, items: list[Item], version: Version) -> None:
        name = version.buffer.name
        self.flaws.append(
            Flaw(
                "leak",
                f"the symmetric buffer {name} is not freed: the slot never comes back",
                ((items[version.alloc], f"takes a slot for {name}", name),),
                (f"free {name} after the last op that uses it",),
            )
        )

    def find_sharing(self) -> None:
        """Marks the local buffers whose storage other local buffers use too."""
        users: dict[str, list[Version]] = {}
        for version in self.versions:
            if version.buffer.kind == "local":
                users.setdefault(version.storage, []).append(version)
        for versions in users.values():
            for version in versions if len(versions) > 1 else ():
                version.shared = True


def _with_members(items: Iterable[Item]) -> Iterator[Item]:
    """The items in the order of issue, those of which they are made after each."""
    for item in items:
        yield item
        yield from item.members
