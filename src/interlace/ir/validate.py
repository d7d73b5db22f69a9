"""Structural validation: what must hold before a schedule can mean anything.

Names are unique and declared before use, views lie within their buffers on every rank, shapes and
element types agree, teams and peers exist. Most rules hold for any op: for its fields by their
roles (roles.py), for what it reads and writes, for what it waits for, raises and frees; `_RULES`
has what else an op must keep. Whether the schedule is *sound* (races, deadlocks, lifetimes, events,
signals, members that agree) is for `interlace.verify`, and is not looked at twice.

    >>> validate(parse(text), text)
    ProgramError: schedule.ilc:7: no buffer is named 'ful'
        6 |     full = alloc(f32[8, 4])
      > 7 |     main: copy(x, ful)
    did you mean 'full'?

A view is resolved once for each rank that can see it differently; two ranks with the same place in
every team see the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from interlace.errors import InterlaceError, ProgramError
from interlace.ir.operators import (
    FIX,
    KNOWN_NAMESPACES,
    WORDS,
    facts_of,
    is_known,
    matmul_of,
    refusal,
)
from interlace.ir.ops import (
    KINDS,
    REDUCTIONS,
    RNG,
    UNORDERED,
    Arg,
    Call,
    Collective,
    Copy,
    Fused,
    Get,
    Op,
    Ordering,
    Put,
    views_in,
)
from interlace.ir.program import Program, Region, calls_in, names_in
from interlace.ir.roles import form_of
from interlace.ir.sizes import Int, at_hand, deciding
from interlace.ir.text.printer import Tag, print_lines, print_view
from interlace.ir.text.spelling import did_you_mean, excerpt, lines_of
from interlace.ir.types import (
    MAX_BYTES,
    MAX_DIMS,
    VALUE_BITS,
    Buffer,
    Dim,
    DType,
    Index,
    RankIndex,
    Table,
    TableEntry,
    Team,
    Where,
    contiguous_strides,
)
from interlace.ir.view import AsStrided, Box, Chunk, View, varying

MAX_PLACES = 1 << 19
"""Places of ranks in teams, at most: of all ranks that there may be, in 8 teams."""
MAX_STEPS = 1 << 25
"""Steps of one rank that a Program takes to validate, at most: some seconds."""


def validate(
    program: Program, text: str | None = None, ranks: Iterable[int] | None = None
) -> Program:
    """Raises ProgramError for the first rule that a Program breaks; gives the Program back.

    The error shows the line of the printed Program, or of `text`, which is what it was parsed from.
    `ranks` are those to look at: what they do, the others do; by default all.
    """
    try:
        with deciding(program.sizes):
            Checker(program, ranks).check_program()
    except BrokenRule as fault:
        raise ProgramError(_message(program, fault, text)) from None
    return program


def _message(program: Program, fault: BrokenRule, text: str | None) -> str:
    family, place = fault.tag
    loc = program.ops[place].loc if family == "op" else None
    if text is not None and loc is not None and loc.text is not None:
        file, line = loc.text
        origin = f" (from {loc})" if loc.module else ""
        shown = excerpt(lines_of(text), line)
        return f"{file}:{line}: {fault.what}{origin}\n{shown}\n{fault.fix}"
    try:
        lines = print_lines(program)
    except (InterlaceError, TypeError, ValueError):  # it holds what no text can say
        return f"{program.name}: {fault.what}\n{fault.fix}"
    line = next((i for i, found in enumerate(lines) if found.tag == fault.tag), 0) + 1
    head = f"{program.name}, line {line}"
    if loc is not None and str(loc):
        head = f"{head}, from {loc}"
    shown = excerpt([found.text for found in lines], line)
    return f"{head}: {fault.what}\n{shown}\n{fault.fix}"


class BrokenRule(Exception):
    """A broken rule: what, the line that says how to fix it, and which line it is about."""

    def __init__(self, tag: Tag, what: str, fix: str) -> None:
        super().__init__(what)
        self.tag, self.what, self.fix = tag, what, f"fix: {fix}"


class Checker:
    """Checks one Program, its ops in order, with what is known of it so far."""

    def __init__(self, program: Program, ranks: Iterable[int] | None = None) -> None:
        self.program, self._asked = program, ranks
        self.tag: Tag = ("header", 0)
        self.teams: dict[str, Team] = {}
        self.tables: dict[str, Table] = {}
        self.buffers: dict[str, Buffer] = {}
        self.ranks: tuple[int, ...] = ()
        self.wheres: tuple[Where, ...] = ()
        self._boxes: dict[object, tuple[Box, ...]] = {}
        self._joined: set[str] = set()
        self._steps = 0
        self.regions = {region.name: region for region in program.regions}
        self.sites = {site.id for site in program.sites}
        self.agreed: set[tuple[object, ...]] = set()
        """Collectives and the boxes of their two views, by what they are: they fit together."""

    def spend(self, steps: int) -> None:
        """Counts what is looked at on each rank; a Program that needs too much is refused."""
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise self.fault(
                f"what differs between {len(self.wheres):,} ranks takes more than {MAX_STEPS:,} "
                "steps to look at",
                "write the Program for fewer ranks, or in parts",
            )

    def fault(self, what: str, fix: str) -> BrokenRule:
        """The fault to raise at the place that is being checked."""
        return BrokenRule(self.tag, what, fix)

    def unknown(self, family: str, name: str, known: Iterable[str]) -> BrokenRule:
        """The fault to raise for a name that is not there."""
        what = f"no {family} is named {name!r}"
        return self.fault(what, did_you_mean(name, known, f"{family}s are"))

    def place_ranks(self) -> None:
        """Finds the ranks to look at, once the teams are known to be well formed."""
        program = self.program
        seen: dict[tuple[int, ...], Where] = {}
        try:
            ranks = program.world if program.rank is None else (program.rank,)
            asked = ranks if self._asked is None else tuple(self._asked)
            if len(asked) * len(program.teams) > MAX_PLACES:
                raise self.fault(
                    f"{len(asked):,} ranks, each with a place in {len(program.teams):,} teams: "
                    f"{MAX_PLACES:,} places are looked up at most",
                    "write the Program with fewer teams, or for fewer ranks",
                )
            for where in program.wheres(asked):
                places = where.members
                key = tuple(places[name].index if name in places else -1 for name in self.teams)
                seen.setdefault(key, where)
        except InterlaceError as error:
            raise self.fault(str(error), "fix ranks(...), rank(...) or the teams") from None
        self.wheres = tuple(seen.values())
        self.ranks = tuple(where.rank for where in self.wheres)

    def team(self, name: str) -> Team:
        """A team of the Program, of which every rank is a member."""
        team = self.teams.get(name)
        if team is None:
            raise self.unknown("team", name, self.teams)
        if name in self._joined:
            return team
        self._joined.add(name)
        for where in self.wheres:
            if name not in where.members:
                raise self.fault(
                    f"rank {where.rank} runs this, but no group of team {name!r} has it",
                    "add the rank to a group, or give that rank a Program of its own (ranks(...))",
                )
        return team

    def indices(self, index: Index) -> tuple[int, ...]:
        """The value of an index on each rank."""
        if isinstance(index, RankIndex):
            self.team(index.team)
        self.spend(len(self.wheres))
        return tuple(where.index(index) for where in self.wheres)

    def dims(self, dim: Dim) -> tuple[Int, ...]:
        """The value of a size on each rank."""
        if not isinstance(dim, TableEntry):
            return (dim,) * len(self.wheres)
        if dim.table not in self.tables:
            raise self.unknown("table", dim.table, self.tables)
        self.indices(dim.index)
        try:
            return tuple(where.dim(dim) for where in self.wheres)
        except InterlaceError as error:
            raise self.fault(str(error), "index a table with a rank of its team") from None

    def declare(self, buffer: Buffer, kinds: tuple[str, ...]) -> None:
        """Makes a buffer known from here on: its name is new, and kind, sizes, strides and team
        make sense together."""
        name = buffer.name
        if name in self.buffers or name in self.teams or name in self.tables:
            raise self.fault(
                f"{name!r} is declared already",
                "give each buffer, team and table a name of its own; a second alloc a second name",
            )
        if name == "rng":
            raise self.fault(
                "'rng' is the state of the random numbers", "give the buffer another name"
            )
        if buffer.kind not in kinds:
            raise self.fault(
                f"{name!r} is declared as {buffer.kind}", f"here a buffer is {' or '.join(kinds)}"
            )
        sizes = [self.dims(dim) for dim in buffer.shape]
        if any(size < 0 for found in sizes for size in found):
            raise self.fault(f"{name!r} has a size below 0", "give sizes >= 0")
        strides = buffer.strides
        if strides is not None and (
            len(strides) != len(sizes) or any(step < 0 for step in strides)
        ):
            raise self.fault(
                f"{name!r} has {len(sizes)} sizes and strides {list(strides)}",
                "give one stride >= 0, in elements, for each dimension",
            )
        for found in set(zip(*sizes, strict=True)):
            steps = strides if strides is not None else contiguous_strides(found)
            if len(found) > MAX_DIMS or _too_long(found, steps, buffer.dtype, buffer.offset):
                raise self.fault(
                    f"{name!r} has too many dimensions or bytes",
                    f"keep to {MAX_DIMS} dimensions, and to what 64 bits count in bytes",
                )
        if (buffer.team is not None) != (buffer.kind == "symmetric"):
            raise self.fault(
                f"{name!r} is {buffer.kind} and has {'no' if buffer.team is None else 'a'} team",
                "a symmetric buffer, and no other, has a team: alloc(..., symmetric=tp)",
            )
        if buffer.offset < 0 or (buffer.offset and buffer.kind != "local"):
            raise self.fault(
                f"{name!r} is {buffer.kind} at offset {buffer.offset}",
                "an offset is a number of bytes >= 0 into the storage of local buffers",
            )
        if buffer.storage is not None and buffer.kind not in ("local", "symmetric"):
            raise self.fault(
                f"{name!r} is {buffer.kind} and names a storage",
                "only local and symmetric buffers share storage",
            )
        if buffer.offset % buffer.dtype.itemsize:
            raise self.fault(
                f"{name!r} starts at byte {buffer.offset}, amid an element",
                f"choose a multiple of {buffer.dtype.itemsize}",
            )
        if buffer.team is not None:
            self._check_reach(buffer, buffer.team)
        self.buffers[name] = buffer

    def _check_reach(self, buffer: Buffer, team: str) -> None:
        """Ranks that reach a buffer of each other share a host."""
        if self.team(team).hosts is not None:
            raise self.fault(
                f"peers are to reach {buffer.name!r}, and team {team!r} spans hosts, which share "
                "no memory",
                "use messages and collectives, or a team of the ranks of each host",
            )

    def buffer(self, view: View) -> Buffer:
        """The buffer of a view."""
        buffer = self.buffers.get(view.buffer)
        if buffer is None:
            later = self.program.buffers()
            if view.buffer in later:
                what = f"{view.buffer!r} is used before it is declared"
                raise self.fault(what, "move its alloc, or the call that makes it, up")
            raise self.unknown("buffer", view.buffer, self.buffers)
        return buffer

    def boxes(self, view: View) -> tuple[Box, ...]:
        """The box of a view on each rank."""
        buffer = self.buffer(view)
        facts = buffer.shape, buffer.strides, buffer.dtype, view.steps  # layers have them alike
        found = self._boxes.get(facts)
        if found is None:
            found = self._boxes[facts] = self._resolve(view, buffer)
        return found

    def _resolve(self, view: View, buffer: Buffer) -> tuple[Box, ...]:
        depends = varying(view, buffer)
        for value in depends:
            if isinstance(value, TableEntry):
                self.dims(value)
            else:
                self.indices(value)
        for step in view.steps:
            if isinstance(step, Chunk) and isinstance(step.parts, str):
                if step.parts not in self.tables:
                    raise self.unknown("table", step.parts, self.tables)
        self.spend(len(self.wheres) * (16 if depends else 1))
        boxes: list[Box] = []
        for where in self.wheres if depends else self.wheres[:1]:
            try:
                box = view.box(buffer, where)
            except InterlaceError as error:
                shown = print_view(view, self.program)
                cause = error.__cause__
                reason = "no such dimension" if isinstance(cause, IndexError) else cause or error
                what = f"{shown} does not exist on rank {where.rank}: {reason}"
                fix = f"choose a view within {buffer.name!r}"
                raise self.fault(what, fix) from None
            if any(isinstance(step, AsStrided) for step in view.steps):
                self._within(box, buffer, where, view)
            self._spans(box, view)
            boxes.append(box)
        return tuple(boxes) if depends else tuple(boxes) * len(self.wheres)

    def _spans(self, box: Box, view: View) -> None:
        if len(box.sizes) > MAX_DIMS or _too_long(box.sizes, box.strides, box.dtype):
            raise self.fault(
                f"{print_view(view, self.program)} has too many dimensions or elements",
                f"keep to {MAX_DIMS} dimensions, and to what 64 bits count in bytes",
            )

    def _within(self, box: Box, buffer: Buffer, where: Where, view: View) -> None:
        whole = View(buffer.name).box(buffer, where)
        end = whole.hull[1]
        if box.numel and (
            box.offset < 0 or any(step < 0 for step in box.strides) or box.hull[1] > end
        ):
            raise self.fault(
                f"{print_view(view, self.program)} reaches byte {box.hull[1]} of {buffer.name!r}, "
                f"which has {end} on rank {where.rank}",
                "keep offset + sum of (size - 1) * stride below the buffer's elements",
            )

    # A Program

    def check_program(self) -> None:
        """Raises BrokenRule for the first rule that the Program breaks."""
        self._check_header()
        for place, op in enumerate(self.program.ops):
            self.tag = ("op", place)
            self.check(op)
        self._check_results()

    def _check_header(self) -> None:
        """Everything but the ops and the results."""
        program = self.program
        self._unique([team.name for team in program.teams], "team")
        for team in program.teams:
            self._check_team(team)
            self.teams[team.name] = team
        self.tag = ("ranks", 0)
        ranks = program.ranks
        if ranks is not None and (not ranks or len(set(ranks)) != len(ranks) or min(ranks) < 0):
            raise self.fault(
                f"ranks{ranks} are no set of ranks", "name each global rank once, from 0"
            )
        self.place_ranks()
        self._unique([table.name for table in program.tables], "table")
        for place, table in enumerate(program.tables):
            self.tag = ("table", place)
            if table.team not in self.teams:
                raise self.unknown("team", table.team, self.teams)
            size = self.teams[table.team].size
            if len(table.values) != size or any(size < 0 for size in table.values):
                what = f"table {table.name!r} holds {list(table.values)} for {size} ranks"
                raise self.fault(what, f"give one number >= 0 for each rank of {table.team!r}")
            self.tables[table.name] = table
        self.tag = ("header", 0)
        for buffer in program.params:
            self.declare(buffer, ("input", "output"))
        self._check_sites()
        for place, region in enumerate(program.regions):
            self.tag = ("region", place)
            self._check_region(region)
        self._unique([region.name for region in program.regions], "region")

    def _check_results(self) -> None:
        """Checks the results of a run: views, numbers and None."""
        self.tag = ("results", 0)
        for result in self.program.returned():
            if names_in(result):
                raise self.fault(
                    "a result is no value of a region", "return views of buffers, numbers or None"
                )
            for view in views_in(result):
                self.boxes(view)

    def _check_team(self, team: Team) -> None:
        if team.size < 1:
            raise self.fault(f"team {team.name!r} has {team.size} ranks", "give it 1 or more")
        if team.hosts is not None:
            placed = sorted(rank for host in team.hosts for rank in host)
            if placed != [*range(team.size)] or len(team.hosts) < 2 or not all(team.hosts):
                raise self.fault(
                    f"the hosts of team {team.name!r} do not have each of its {team.size} ranks "
                    "once",
                    "write Team[4].on([0, 1], [2, 3]), or leave .on() out where it has one host",
                )
        if team.groups is None:
            return
        listed = [rank for group in team.groups for rank in group]
        if not listed or any(len(group) != team.size for group in team.groups):
            raise self.fault(
                f"team {team.name!r} of {team.size} ranks has groups of another size",
                "give each group as many ranks as the team has",
            )
        if len(set(listed)) != len(listed) or min(listed) < 0:
            raise self.fault(
                f"the groups of team {team.name!r} name a rank twice, or one below 0",
                "each global rank stands in one group at most",
            )

    def _check_sites(self) -> None:
        ids: set[int] = set()
        for place, site in enumerate(self.program.sites):
            if site.id in ids:
                self.tag = ("site", place)
                raise self.fault(
                    f"site {site.id} is declared twice", "number each site differently"
                )
            ids.add(site.id)
        for place, remark in enumerate(self.program.remarks):
            if remark.site is not None and remark.site not in ids:
                self.tag = ("remark", place)
                raise self.fault(f"no site {remark.site}", f"sites are {sorted(ids)[:12]}")

    def _check_region(self, region: Region) -> None:
        known = set(region.inputs)
        if len(known) != len(region.inputs):
            raise self.fault(
                f"region {region.name!r} has an input twice", "name each input differently"
            )
        for node in region.body:
            self._check_operator(node.fn)
            self._check_arguments(node.args, node.kwargs)
            for arg in (*node.args, *(value for _, value in node.kwargs)):
                for name in names_in(arg):
                    self._known_value(region, name, known)
                if any(True for _ in views_in(arg)):
                    raise self.fault(
                        f"region {region.name!r} uses a buffer of the program",
                        "make it an input of the region",
                    )
            for out in node.outs:
                if out in known:
                    what = f"region {region.name!r} gives {out!r} twice"
                    raise self.fault(what, "name each value differently")
                known.add(out)
        for name in region.outputs:
            self._known_value(region, name, known)
        self._check_region_effects(region)

    def _known_value(self, region: Region, name: str, known: set[str]) -> None:
        if name not in known:
            what = f"region {region.name!r} has no value {name!r} here"
            raise self.fault(what, did_you_mean(name, known, "values are"))

    def _unique(self, names: Iterable[str], family: str) -> None:
        seen: set[str] = set()
        for place, name in enumerate(names):
            if name in seen:
                if family != "team":
                    self.tag = (family, place)
                raise self.fault(
                    f"{family} {name!r} is declared twice", "give the second another name"
                )
            seen.add(name)

    def _check_region_effects(self, region: Region) -> None:
        """A region's calls compute values: none writes another, draws, or leaves its own so."""
        for node in region.body:
            facts = facts_of(node.fn)
            if facts is None:
                continue
            what = ""
            if facts.written(node.args, node.kwargs):
                what = "writes an argument in place"
            elif facts.outs:
                what = "fills memory that it is given"
            elif facts.drawn(node.args, node.kwargs):
                what = "draws random numbers"
            elif facts.unwritten:
                what = "leaves its result unwritten"
            if what:
                raise self.fault(
                    f"{node.fn} in region {region.name!r} {what}, which a region cannot",
                    "call it outside of the region",
                )

    # Ops

    def check(self, op: Op) -> None:
        """Raises a BrokenRule if the op breaks a rule."""
        if op.site is not None and op.site not in self.sites:
            fix = f'declare it: site({op.site}, "all_gather_matmul")'
            raise self.fault(f"no site {op.site}", fix)
        for field in form_of(type(op)).fields:
            value = getattr(op, field.name)
            if value is not None:
                field.role.check(self, op, field, value)
        reads, writes = op.reads(), op.writes()
        for access in (*reads, *writes):
            if access.peer is not None:
                self.remote(access.view, access.team)
        ordering = op.ordering()
        if ordering is not UNORDERED:
            self.order(ordering)
        rule = _RULES.get(type(op))
        if rule is not None:
            rule(self, op)
        for access in (*reads, *writes):
            if access.view != RNG:
                self.boxes(access.view)
        for access in writes:
            if access.view != RNG:
                self.writable(access.view)

    def show(self, view: View) -> str:
        """A view with its element type and sizes (on the first rank that is looked at)."""
        box = self.boxes(view)[0]
        return f"{print_view(view, self.program)} ({_type(box)})"

    def writable(self, view: View) -> None:
        """Two elements of what is written are never the same bytes."""
        boxes = self.boxes(view)
        if not any(box.overlaps_itself for box in boxes):
            return
        if any(0 in box.strides for box in boxes):
            why, fix = "a stride of 0", "write the view that was expanded"
        else:
            why, fix = (
                f"strides {boxes[0].strides}",
                "write a view whose strides step over its rows",
            )
        raise self.fault(f"{self.show(view)} is written, but its elements overlap ({why})", fix)

    def same(self, op: Copy | Put | Get) -> None:
        """Two views have equal sizes, and equal element types if these are not converted."""
        what = form_of(type(op)).word
        src, dst = op.src, op.target if isinstance(op, Get) else op.dst
        converts = isinstance(op, Copy)
        pairs = zip(self.ranks, self.boxes(src), self.boxes(dst), strict=True)
        for rank, from_, to in pairs:
            if from_.sizes != to.sizes or (from_.dtype != to.dtype and not converts):
                raise self.fault(
                    f"{what} from {print_view(src, self.program)} ({_type(from_)}) to "
                    f"{print_view(dst, self.program)} ({_type(to)}) on rank {rank}",
                    f"{what} between equal sizes" + ("" if converts else " and element types"),
                )

    def call(self, op: Call) -> None:
        region = self.regions.get(op.fn)
        if region is None and "." not in op.fn:
            raise self.fault(
                f"{op.fn!r} is no region of this program, and no operator such as aten.mm.out",
                did_you_mean(op.fn, self.regions, "regions are"),
            )
        if region is None:
            self._check_operator(op.fn)
            self._check_effects(op)
        self._check_arguments(op.args, op.kwargs)
        if op.outs and op.fresh and not op.mutates:
            raise self.fault(
                "a call fills views or makes its outputs, not both",
                "allocate all of them before the call, or declare all in out=(t := ...)",
            )
        if op.mutates:
            args = {view.buffer for view in op.views()}
            for view in op.outs:
                if view.buffer not in args:
                    raise self.fault(
                        f"{view.buffer!r} is written in place, but is no argument",
                        "mutates=True lists in out= those arguments that are written",
                    )
        if region is not None:
            takes, gives = len(region.inputs), len(region.outputs)
            has = (len(op.args), len(op.fresh or op.outs))
            if has != (takes, gives) or op.kwargs:
                raise self.fault(
                    f"region {op.fn!r} takes {takes} and gives {gives}; here it has {has[0]} "
                    f"arguments{' and keywords' if op.kwargs else ''} and {has[1]} outputs",
                    f"call it as {op.fn}({', '.join(region.inputs)})",
                )
        for view in (*op.views(), *op.outs):
            self.boxes(view)
        for buffer in op.fresh:
            self.declare(buffer, ("fresh",))
        wrong = _matmul_mismatch(op, self.boxes)
        if wrong is not None:
            raise self.fault(wrong, "write views of (m, k), (k, n) and (m, n)")

    def collective(self, op: Collective) -> None:
        kind = KINDS.get(op.kind)
        if kind is None:
            raise self.unknown("collective", op.kind, KINDS)
        team = self.team(op.team)
        if kind.reduces and op.reduce not in REDUCTIONS:
            reduce = (
                f"no reduction {op.reduce!r}" if op.reduce else f"{op.kind} lacks its reduction"
            )
            raise self.fault(reduce, f"write reduce= one of {', '.join(REDUCTIONS)}")
        if not kind.reduces and op.reduce is not None:
            raise self.fault(f"{op.kind} reduces nothing", "leave reduce= out")
        if kind.rooted != (op.root is not None):
            fix = "write root=0 or another rank of the team" if kind.rooted else "leave root= out"
            has = "lacks its" if kind.rooted else "has no"
            raise self.fault(f"{op.kind} {has} root", fix)
        at_root = self.at_root(op)
        for view, role, name in ((op.src, kind.reads, "src"), (op.dst, kind.writes, "dst")):
            needed = role == "all" or (role == "root" and any(at_root))
            if view is None and needed:
                raise self.fault(f"{op.kind} lacks {name}", f"give {op.kind}(src, dst, ...)")
            if view is not None and role == "none":
                raise self.fault(f"{op.kind} takes no views", f"write {op.kind}(team={op.team})")
            boxes = {} if view is None else {id(box): box for box in self.boxes(view)}
            if view is not None and not all(box.contiguous for box in boxes.values()):
                raise self.fault(
                    f"{self.show(view)} is not contiguous", "copy it to a contiguous buffer first"
                )
        counted = self.counts(op, team) if op.sent is not None or op.received is not None else False
        values = None if op.splits is None else self.tables[op.splits].values
        if values is not None and len(values) != team.size:
            what = f"table {op.splits!r} has {len(values)} entries for {team.size} ranks"
            raise self.fault(what, f"give one for each rank of {op.team!r}")
        if values is not None and (op.src is None) != (op.dst is None):  # a rank that is no root
            (view,) = (view for view in (op.src, op.dst) if view is not None)
            for where, box in zip(self.wheres, self.boxes(view), strict=True):
                own = values[where.members[op.team].index]
                if box.sizes[:1] != (own,):
                    what = f"{op.kind} of {_type(box)} on rank {where.rank}, whose part is {own}"
                    raise self.fault(f"{what} rows", "correct the view, or the table")
        if op.src is not None and op.dst is not None:
            both = self.boxes(op.src), self.boxes(op.dst)
            key = op.kind, op.team, op.splits, counted, *map(id, both)  # layers have them alike
            if key in self.agreed:
                return
            self.spend(len(self.wheres))
            self.agreed.add(key)
            found = zip(self.wheres, *both, strict=True)
            if values is None:  # then it does not matter which rank has them
                found = {(id(src), id(dst)): (w, src, dst) for w, src, dst in found}.values()
            for where, src, dst in found:
                index = where.members[op.team].index
                wrong = _collective_mismatch(op.kind, src, dst, index, team.size, values, counted)
                if wrong is not None:
                    raise self.fault(
                        f"{op.kind} from {_type(src)} to {_type(dst)} on rank {where.rank}: "
                        f"{wrong}",
                        "correct the views, or name the table of uneven parts: splits=rows",
                    )

    def counts(self, op: Collective, team: Team) -> bool:
        """Rules for the counts of an all-to-all that are data."""
        if op.kind != "all_to_all" or op.splits is not None:
            what = f"{op.kind}{' with splits=' * (op.splits is not None)} takes no counts"
            raise self.fault(what, "leave sent= and received= out")
        for view, name in ((op.sent, "sent"), (op.received, "received")):
            if view is None:
                raise self.fault(f"all_to_all lacks {name}=", "give both sent= and received=")
            for box in {id(box): box for box in self.boxes(view)}.values():
                if box.dtype != DType.i64 or box.sizes != (team.size,) or not box.contiguous:
                    what = f"{name}= is {_type(box)}: it holds one count for each rank"
                    raise self.fault(what, f"give a contiguous i64[{team.size}]")
        return True

    def at_root(self, op: Collective) -> list[bool]:
        """True for each rank that is the root."""
        if op.root is None:
            return [False] * len(self.wheres)
        places = [where.members[op.team].index for where in self.wheres]
        return [place == root for place, root in zip(places, self.indices(op.root), strict=True)]

    def remote(self, view: View, team: str | None) -> None:
        """A view of a peer's memory: of a symmetric buffer of that team."""
        buffer = self.buffer(view)
        if buffer.team != team:
            of = buffer.kind if buffer.team is None else f"{buffer.kind} on {buffer.team!r}"
            fix = f"declare it {buffer.name} = alloc(..., symmetric={team})"
            if buffer.kind in ("input", "output"):
                fix = f"copy it from or to a buffer that they reach: alloc(..., symmetric={team})"
            raise self.fault(f"{buffer.name!r} is {of}: peers of {team!r} cannot reach it", fix)

    def fused(self, op: Fused) -> None:
        for member in op.members:
            if isinstance(member, Call) and member.fresh:
                raise self.fault(
                    f"a fused {member.fn} makes its outputs itself",
                    "allocate them before the fused op, and give them as out=",
                )
        if op.kernel is None:
            return
        from interlace.ir.kernels import kernel_matmul  # few schedules have such a kernel

        self.spend(len(self.wheres) * len(op.members))
        for rank, where in enumerate(self.wheres):
            try:
                box: Callable[[View], Box] = lambda view, at=rank: self.boxes(view)[at]  # noqa: E731
                kernel_matmul(op, box, self.buffers, where)
            except InterlaceError as error:
                raise self.fault(
                    f"the parts are not what {op.kernel.kind} does: {error}",
                    "write them as it does, or leave kernel= out: they then run one after another",
                ) from None

    def order(self, ordering: Ordering) -> None:
        """Checks what an op frees, and the value of a signal that it raises or awaits."""
        if ordering.frees is not None:
            self.buffer(View(ordering.frees))
        for level in (ordering.raises, ordering.expects):
            if level is not None and not 1 <= level.value < 1 << VALUE_BITS:
                fix = f"count from 1, and to {(1 << VALUE_BITS) - 1} at most"
                raise self.fault(f"value {level.value} of signal {level.signal!r}", fix)

    def _check_operator(self, fn: str) -> None:
        """Checks the name of what a call runs: nothing of Python's, nothing that opens files."""
        why = refusal(fn)
        if why is not None:
            raise self.fault(why, FIX)

    def _check_arguments(self, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...]) -> None:
        """Keywords are names of arguments, and words for values of torch's are of the table."""
        for key, _ in kwargs:
            if not key.isidentifier():
                raise self.fault(
                    f"{key!r} is no name of an argument", "write it as the operator's schema does"
                )
        for arg in (*args, *(value for _, value in kwargs)):
            for word in _texts_in(arg):
                if word.startswith("@") and word not in WORDS:
                    raise self.fault(
                        f"no value named {word!r} that an operator could take",
                        did_you_mean(word, WORDS, "values are"),
                    )

    def _check_effects(self, op: Call) -> None:
        """Checks the `out=` and `mutates=` of a call against what its operator fills and writes."""
        facts = facts_of(op.fn)
        if facts is None:
            return
        for key, _ in op.kwargs:
            if key in facts.outs:
                raise self.fault(
                    f"{op.fn} fills {key!r}, which is given as an argument",
                    f"write what it fills in out=, in the order {', '.join(facts.outs)}",
                )
        if facts.outs and not op.outs:
            raise self.fault(
                f"{op.fn} fills memory that it is given ({', '.join(facts.outs)}), and has none",
                "allocate it before the call, and give it in out=",
            )
        if op.mutates:
            written = views_in(tuple(facts.written(op.args, op.kwargs)))
            for view in op.outs:
                if view not in written:
                    what = f"{op.fn} does not write {view.buffer!r} in place, as mutates=True says"
                    raise self.fault(what, "leave mutates= out: the result is put into out=")


_RULES: dict[type[Op], Callable[[Checker, Any], None]] = {
    Call: Checker.call,
    Collective: Checker.collective,
    Copy: Checker.same,
    Fused: Checker.fused,
    Get: Checker.same,
    Put: Checker.same,
}
"""Rules of a kind of op beside the rules for all: how the sizes of its views fit together."""


def _type(box: Box) -> str:
    return f"{box.dtype}[{', '.join(map(str, box.sizes))}]"


def _collective_mismatch(
    kind: str,
    src: Box,
    dst: Box,
    index: int,
    size: int,
    splits: tuple[Int, ...] | None,
    counted: bool,
) -> str | None:
    """Why `src` and `dst` of member `index` do not fit the kind; None if they do."""
    if src.dtype != dst.dtype:
        return "the element types differ"
    scales = KINDS[kind].scales
    if splits is None and not scales and not counted:
        if src.sizes != dst.sizes:
            return "the sizes differ"
        if kind == "all_to_all" and (not src.sizes or src.sizes[0] % size):
            return f"dimension 0 does not divide into {size} parts"
        return None
    if not src.sizes or not dst.sizes or src.sizes[1:] != dst.sizes[1:]:
        return "the sizes after dimension 0 differ"
    if counted:
        return None
    rows = (src.sizes[0], dst.sizes[0])
    if scales:
        part, whole = rows if scales == "gather" else rows[::-1]
        own = part if splits is None else splits[index]
        total = size * part if splits is None else sum(splits)
        if (part, whole) != (own, total):
            return f"the whole has {whole} rows, and this rank's part {part}: {own} of {total}"
        return None
    if splits is not None and kind == "all_to_all":
        total, even = sum(splits), size * splits[index]
        if rows not in ((total, even), (even, total)):
            return f"one has {total} rows (one part a rank), the other {even} (this rank's parts)"
        return None
    return "this kind takes no splits"


def _matmul_mismatch(op: Call, boxes: Callable[[View], tuple[Box, ...]]) -> str | None:
    """Why the views of a matmul do not fit together; None if they do, or if it is no matmul."""
    matmul = matmul_of(op.fn)
    if matmul is None or len(op.args) < matmul.lhs + 2:
        return None
    a, b = op.args[matmul.lhs : matmul.lhs + 2]
    outs = (*op.outs, *(View(buffer.name) for buffer in op.fresh))
    if not (isinstance(a, View) and isinstance(b, View)) or len(outs) != 1:
        return None
    for left, right, out in zip(boxes(a), boxes(b), boxes(outs[0]), strict=True):
        rank = 3 if matmul.batched else 2
        if not len(left.sizes) == len(right.sizes) == len(out.sizes) == rank:
            return f"{op.fn} takes views of {rank} dimensions: {_sizes(left, right, out)}"
        (m, k), (k2, n) = left.sizes[-2:], right.sizes[-2:]
        batches = {left.sizes[:-2], right.sizes[:-2], out.sizes[:-2]}
        if k != k2 or out.sizes[-2:] != (m, n) or len(batches) != 1:
            return f"{op.fn} of sizes that do not fit: {_sizes(left, right, out)}"
        blocks = op.args[matmul.blocks] if matmul.blocks is not None else 0
        if isinstance(blocks, int) and blocks > 1 and m % blocks:
            return f"{op.fn} of {m} rows, which are not {blocks} equal blocks of one scale each"
        if not matmul.scaled and not left.dtype == right.dtype == out.dtype:
            return f"{op.fn} of {left.dtype} and {right.dtype} into {out.dtype}"
    return None


def _sizes(left: Box, right: Box, out: Box) -> str:
    return f"{left.sizes} times {right.sizes} into {out.sizes}"


def _too_long(sizes: Sequence[Int], strides: Sequence[Int], dtype: DType, offset: int = 0) -> bool:
    """True if the bytes of its elements or reach exceed `MAX_BYTES`; an empty size counts as 1."""
    count, reach = 1, 1
    for size, stride in zip(sizes, strides, strict=True):
        count *= max(size, 1)
        reach += max(size - 1, 0) * stride
    numbers = at_hand(count), at_hand(reach)  # of all sizes it would be a fact of the class
    return max(numbers) * dtype.itemsize + offset > MAX_BYTES


def _texts_in(arg: Arg) -> list[str]:
    if isinstance(arg, str) and not isinstance(arg, DType):
        return [arg]
    return [text for item in arg for text in _texts_in(item)] if isinstance(arg, tuple) else []


def called(program: Program) -> Iterator[tuple[str, str]]:
    """Every operator that a Program calls, and where."""
    regions = {region.name for region in program.regions}
    for op in calls_in(program.ops):
        if op.fn not in regions:
            yield op.fn, str(op.loc) or program.name
    for region in program.regions:
        for node in region.body:
            yield node.fn, f"region {region.name!r} of {program.name}"


def others(program: Program) -> frozenset[str]:
    """The operators of a Program that are neither PyTorch's own nor Interlace's."""
    return frozenset(fn for fn, _ in called(program) if not is_known(fn))


def refuse_others(program: Program, allowed: Collection[str] = ()) -> None:
    """Raises ProgramError for a call of an operator of others that is not allowed."""
    for fn, place in called(program):
        if not (is_known(fn) or fn in allowed or fn.partition(".")[0] in allowed):
            raise ProgramError(
                f"{place}: a schedule may not call {fn!r}, for it is of none of "
                f"{', '.join(KNOWN_NAMESPACES)}: if you know that it touches its arguments and "
                f"results alone, name it (Executor(..., operators=[{fn!r}]), or "
                f"interlace check --operators {fn})"
            )
