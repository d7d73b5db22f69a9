"""Programs made ready to be checked: every op with the buffers it touches, names resolved once.

A `Source` is one Program, still for all of its ranks: names are bound in list order (which Alloc a
name means, which Record a Wait sees), and what is wrong in that order alone is a `Flaw`.

    source = lower(program, Regions())
    source.items[3].touches        # what the op on line 4 reads and writes
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from interlace.errors import ProgramError
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
    Op,
    Record,
    Wait,
    views_in,
)
from interlace.ir.order import in_order
from interlace.ir.program import Program, spots
from interlace.ir.types import Buffer, DType
from interlace.ir.view import View
from interlace.verify.accesses.regions import Regions, Spot
from interlace.verify.happens_before.source import Flaw, Item, Source, Touch, Version


def lower(program: Program, regions: Regions, in_order: bool = False) -> Source:
    """The Program's items and versions; `in_order` puts every op on one stream."""
    return _Lowering(program, regions, in_order).run()


class _Lowering:
    def __init__(self, program: Program, regions: Regions, in_order: bool) -> None:
        self.program = program
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
            for buffer in _declared(op)
        }
        self.ahead: dict[str, int] = {}  # declared, because used before its Alloc

    def run(self) -> Source:
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
        return Source(
            *(program, ranks, streams, items, leave, self.versions, self.flaws, sequence),
            *(self.num_places, enter),
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
            case Alloc():
                item.version = self.declare(op.buffer, index)
            case Free():
                self.free(item, op)
            case Record() | Wait():
                self.event(item, op)
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
                if isinstance(op, Call):
                    for buffer in op.fresh:
                        self.declare(buffer, index)
                item.touches = self.touches(item, op)
        return item

    def stream(self, op: Op, part: int = 0) -> int:
        """The number of an op's stream; each part of a Fused but the first has one of its own."""
        key = ("main", 0) if self.in_order else (op.stream, part)
        return self.streams.setdefault(key, len(self.streams))

    def member(self, index: int, op: Op, part: int) -> Item:
        """A member of a Fused."""
        place = self.num_places
        item = Item(index, op, self.stream(op, part), place=place)
        self.num_places += 1
        if isinstance(op, Record | Wait):
            self.event(item, op)
        item.touches = self.touches(item, op)
        return item

    def event(self, item: Item, op: Record | Wait) -> None:
        """Which Record a Wait sees."""
        if isinstance(op, Record):
            self.records[op.event] = item.place
            return
        item.record = self.records.get(op.event, -1)
        if item.record < 0:
            self.unrecorded(item, op)

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

    def free(self, item: Item, op: Free) -> None:
        item.version = self.version(item, op.buffer)
        version = self.versions[item.version]
        if version.alloc < 0 or (version.free < 0 and item.index < version.alloc):
            self.flaws.append(
                Flaw(
                    "bad-free",
                    f"{op.buffer} is freed, and the Program did not allocate it",
                    ((item, f"frees {op.buffer}", op.buffer),),
                    ("remove line ", item.index),
                )
            )
            item.version = -1
        elif version.free >= 0:
            first = Item(version.free, self.program.ops[version.free], 0)
            self.flaws.append(
                Flaw(
                    "double-free",
                    f"{op.buffer} is freed twice",
                    ((first, "frees it first", op.buffer), (item, "frees it again", op.buffer)),
                    ("remove line ", item.index),
                )
            )
            item.version = -1
        else:
            version.free = item.index

    def unrecorded(self, item: Item, op: Wait) -> None:
        later = next(
            (
                i
                for (i, _), other in spots(self.program.ops)
                if isinstance(other, Record) and other.event == op.event
            ),
            None,
        )
        ops = [(item, f"waits for {op.event}", "")]
        if later is not None:
            record = Item(later, self.program.ops[later], 0)
            ops.append((record, f"records {op.event} only after that", ""))
        self.flaws.append(
            Flaw(
                "event",
                f"a wait for {op.event}, which nothing recorded before it in this run",
                tuple(ops),
                (f"record {op.event} before line ", item.index, ", after what must be awaited"),
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


def _declared(op: Op) -> tuple[Buffer, ...]:
    if isinstance(op, Alloc):
        return (op.buffer,)
    return op.fresh if isinstance(op, Call) else ()
