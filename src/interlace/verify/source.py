"""Programs made ready to be checked: every op with the buffers it touches, names resolved once.

A `LoweredProgram` is one Program, still for all of its ranks: names are bound in list order (which
Alloc a name means, which Record a Wait sees), and what is wrong in that order alone is a `Flaw`.

    source = lower(program, Regions())
    source.items[3].touches        # what the op on line 4 reads and writes
    source.versions[0].symmetric   # a buffer, from its declaration on
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from interlace.errors import ProgramError
from interlace.ir.operators import NO_ROWS, ROW_SCALES, base_of
from interlace.ir.ops import (
    KINDS,
    RNG,
    UNORDERED,
    Access,
    Call,
    Collective,
    Fused,
    Group,
    Op,
    Ordering,
    views_in,
)
from interlace.ir.order import in_order
from interlace.ir.program import Program, calls_in, spots
from interlace.ir.types import Buffer, DType, Index, Where
from interlace.ir.view import View
from interlace.verify.regions import Regions, Spot


class Touch(NamedTuple):
    """A read or a write of a view, in this rank's memory or in a peer's."""

    write: bool
    version: int
    spot: Spot
    peer: Index | None
    team: str | None
    root_only: bool
    """Only the root of the collective makes this touch."""
    contents: bool = True
    """Bytes are taken or given: `Access.contents`."""


@dataclass(slots=True, eq=False)
class Item:
    """An op of a Program; the members of a Group or a Fused are items too, with its index."""

    index: int
    op: Op | None
    """None: the return."""
    stream: int = 0
    """Part k > 0 of a Fused counts as a stream of its own."""
    touches: tuple[Touch, ...] = ()
    version: int = -1
    """The buffer that an Alloc or a Free means."""
    record: int = -1
    """The place of the Record that a Wait sees."""
    members: tuple[Item, ...] = ()
    turn: int = -1
    """The order of issue: of two ops of a stream, the one with the lower turn goes first."""
    place: int = -1
    """The index of its node among those of a rank; members of a Fused come after all ops."""
    ordering: Ordering = field(init=False)

    def __post_init__(self) -> None:
        self.ordering = UNORDERED if self.op is None else self.op.ordering()

    @property
    def ends_run(self) -> bool:
        """True for the return."""
        return self.op is None

    @property
    def is_group(self) -> bool:
        """True if its members begin and end together."""
        return bool(self.members and self.ordering.messages)

    @property
    def is_fused(self) -> bool:
        """True if its members are the parts of a kernel."""
        return bool(self.members) and not self.ordering.messages

    @property
    def call(self) -> Call | None:
        """The op, if it is a Call."""
        return self.op if isinstance(self.op, Call) else None

    @property
    def collective(self) -> Collective | None:
        """The op, if it is a Collective."""
        return self.op if isinstance(self.op, Collective) else None

    def does(self, touch: Touch, where: Where) -> bool:
        """Returns True if a rank makes this touch of the op: some only the root makes."""
        return not touch.root_only or self.is_root(where)

    def is_root(self, where: Where) -> bool:
        """Returns True if the rank is the root of this collective."""
        op = self.collective
        assert op is not None
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
    """Other buffers share its storage."""

    @property
    def symmetric(self) -> bool:
        """True if the buffer lies in a slot that peers can reach."""
        return self.buffer.kind == "symmetric"

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
    fix: str
    """With a `{}` for the line of each op in `lines`."""
    lines: tuple[int, ...]


@dataclass(slots=True, eq=False)
class LoweredProgram:
    """One Program, ready to be placed on its ranks."""

    number: int
    """Its index in the set."""
    program: Program
    ranks: tuple[int, ...]
    streams: tuple[str, ...]
    items: list[Item]
    exit: Item
    versions: list[Version]
    flaws: list[Flaw]
    sequence: list[Item]
    """The items in the order of issue; checked in order, with members of Fuseds on their own."""
    num_places: int
    """Items, the return, and the members of Fuseds."""
    sharing: dict[str, list[Version]]
    """Local buffers that share a storage, by storage."""


def lower(
    program: Program, regions: Regions, in_order: bool = False, number: int = 0
) -> LoweredProgram:
    """The Program's items and versions; `in_order` puts every op on one stream."""
    return _Lowering(program, regions, in_order).run(number)


class _Lowering:
    def __init__(self, program: Program, regions: Regions, in_order: bool) -> None:
        self.program = program
        self.regions = regions
        self.in_order = in_order
        self.streams: dict[tuple[str, int], int] = {}
        if in_order or not program.ops:
            self.streams["main", 0] = 0
        self.num_places = len(program.ops) + 1
        self.versions: list[Version] = []
        self.current: dict[str, int] = {}
        self.spots: dict[tuple[int, View], Spot] = {}
        self.records: dict[str, int] = {}
        self.flaws: list[Flaw] = []

    def run(self, number: int) -> LoweredProgram:
        program = self.program
        for buffer in program.params:
            self.declare(buffer, -1)
        items = [self.item(i, op) for i, op in enumerate(program.ops)]
        end = len(items)
        leave = Item(end, None, touches=tuple(self.results(end)), place=end)
        sharing = self.mark_shared()
        for version in self.versions:
            if version.symmetric and version.free < 0 <= version.alloc:
                self.leak(items, version)
        sequence = items
        if self.in_order:  # with the members of Fuseds one after another
            places = [(items[i], k) for i, k in in_order(program.ops)]
            sequence = [item.members[k] if item.is_fused else item for item, k in places]
        issued = [one for item in sequence for one in (item, *item.members)]
        for turn, item in enumerate([*issued, leave]):
            item.turn = turn
        return LoweredProgram(
            number=number,
            program=program,
            ranks=program.world if program.rank is None else (program.rank,),
            streams=tuple(f"{name}, part {k + 1}" if k else name for name, k in self.streams),
            items=items,
            exit=leave,
            versions=self.versions,
            flaws=self.flaws,
            sequence=sequence,
            num_places=self.num_places,
            sharing=sharing,
        )

    def item(self, index: int, op: Op) -> Item:
        item = Item(index, op, self.stream(op), place=index)
        if isinstance(op, Group):
            item.members = tuple(self.filled(Item(index, one, item.stream)) for one in op.ops)
        elif isinstance(op, Fused):
            item.members = tuple(
                self.filled(Item(index, one, self.stream(op, part), place=self.new_place()))
                for part, members in enumerate(op.parts)
                for one in members
            )
        else:
            self.filled(item)
        return item

    def filled(self, item: Item) -> Item:
        """An op by itself, with the names that it uses and declares bound."""
        op = item.op
        assert op is not None
        self.bind(item)
        for buffer in op.declares():
            item.version = self.declare(buffer, item.index)
        kind = None if item.collective is None else KINDS[item.collective.kind]
        by_root = (kind.reads == "root", kind.writes == "root") if kind else (False, False)
        reads = [self.touch(item, False, access, by_root[0]) for access in op.reads()]
        writes = [self.touch(item, True, access, by_root[1]) for access in op.writes()]
        item.touches = (*reads, *writes)
        return item

    def stream(self, op: Op, part: int = 0) -> int:
        """The number of an op's stream; each part of a Fused but the first has one of its own."""
        key = ("main", 0) if self.in_order else (op.stream, part)
        return self.streams.setdefault(key, len(self.streams))

    def new_place(self) -> int:
        self.num_places += 1
        return self.num_places - 1

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
        version = self.current[buffer.name] = len(self.versions)
        spot = self.regions.spot(View(buffer.name), buffer, self.program.tables)
        self.versions.append(Version(buffer, spot, index))
        return version

    def version(self, item: Item, name: str) -> int:
        """The version that a name means here. Raises ProgramError where none is declared."""
        found = self.current.get(name)
        if found is not None:
            return found
        if name == RNG.buffer:
            return self.declare(Buffer(name, DType.u8, (1,), "input"), -1)
        raise ProgramError(
            f"{self.program.name}, op {item.index}: no buffer named {name!r} here: declare it as "
            "a parameter, or allocate it before this line"
        )

    def op_at(self, index: int) -> Item:
        return Item(index, self.program.ops[index])

    def flaw(
        self, kind: str, message: str, ops: list[tuple[Item, str, str]], fix: str, *lines: int
    ) -> None:
        self.flaws.append(Flaw(kind, message, tuple(ops), fix, lines))

    def touch(self, item: Item, write: bool, access: Access, root_only: bool) -> Touch:
        version = self.version(item, access.view.buffer)
        key = (version, access.view)
        spot = self.spots.get(key)
        if spot is None:
            buffer = self.versions[version].buffer
            spot = self.spots[key] = self.regions.spot(access.view, buffer, self.program.tables)
        return Touch(write, version, spot, access.peer, access.team, root_only, access.contents)

    def results(self, end: int) -> list[Touch]:
        """The reads of the return: the results, and every output parameter."""
        program, item = self.program, Item(end, None)
        views = [view for arg in program.returned() for view in views_in(arg)]
        returned = {view.buffer for view in views if not view.steps}
        for buffer in program.params:
            if buffer.kind == "output" and buffer.name not in returned:
                views.append(View(buffer.name))
        found: list[Touch] = []
        for view in dict.fromkeys(views):
            found.append(self.touch(item, False, Access(view), False))
            name, kind = view.buffer, self.versions[found[-1].version].buffer.kind
            if kind in ("local", "symmetric"):
                home = "the arena" if kind == "local" else "a communication slot"
                self.flaw(
                    "result",
                    f"the result {name} lives in {home}, which the next run overwrites",
                    [(item, f"returns {name}", name)],
                    f"allocate {name} as fresh, or copy it to an output at the end",
                )
        return found

    def free(self, item: Item, name: str) -> None:
        number = self.version(item, name)
        version = self.versions[number]
        if version.alloc < 0 and version.buffer.kind != "input":
            self.flaw(
                "bad-free",
                f"{name} is freed, and the Program did not allocate it",
                [(item, f"frees {name}", name)],
                "remove line {}",
                item.index,
            )
        elif version.free >= 0:
            first = self.op_at(version.free)
            self.flaw(
                "double-free",
                f"{name} is freed twice",
                [(first, "frees it first", name), (item, "frees it again", name)],
                "remove line {}",
                item.index,
            )
        else:
            item.version, version.free = number, item.index

    def unrecorded(self, item: Item, event: str) -> None:
        ops = [(item, f"waits for {event}", "")]
        for (later, _), other in spots(self.program.ops):
            if other.ordering().records == event:
                ops.append((self.op_at(later), f"records {event} only after that", ""))
                break
        self.flaw(
            "event",
            f"a wait for {event}, which nothing recorded before it in this run",
            ops,
            f"record {event} before line {{}}, after what must be awaited",
            item.index,
        )

    def leak(self, items: list[Item], version: Version) -> None:
        name = version.buffer.name
        self.flaw(
            "leak",
            f"the symmetric buffer {name} is not freed: the slot never comes back",
            [(items[version.alloc], f"takes a slot for {name}", name)],
            f"free {name} after the last op that uses it",
        )

    def mark_shared(self) -> dict[str, list[Version]]:
        """Marks the local buffers whose storage other local buffers use too: these, by storage."""
        users: dict[str, list[Version]] = {}
        for version in self.versions:
            if version.buffer.kind == "local":
                users.setdefault(version.storage, []).append(version)
        sharing = {storage: versions for storage, versions in users.items() if len(versions) > 1}
        for version in (version for versions in sharing.values() for version in versions):
            version.shared = True
        return sharing


def takes_blocks(sources: Iterable[LoweredProgram]) -> bool:
    """Returns True if some call multiplies rows of FP8 in blocks (scales.py)."""
    names = {op.fn for source in sources for op in calls_in(source.program.ops)}
    return any(ROW_SCALES.get(base_of(name), NO_ROWS).cut for name in names)
