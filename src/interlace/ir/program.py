"""Program: an ordered list of ops for one rank of a team, with all that its text says.

A Program is data and never changes: `replace` makes another. `instantiate(rank)` resolves all that
depends on the rank, and gives the concrete Program that an Executor runs and the verifier reads.

    >>> program = interlace.parse(text)
    >>> program.instantiate(0).ops[0]
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import operator
import os
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast, get_args

from interlace.errors import OptionError, ProgramError
from interlace.ir.ops import (
    Arg,
    Call,
    Collective,
    Fused,
    Get,
    Group,
    Name,
    Op,
    Put,
    Recv,
    Send,
    once,
)
from interlace.ir.roles import PLAIN, form_of
from interlace.ir.sizes import DECIDER, FIXED, Int, Size, SizeClass, deciding, named, names_of
from interlace.ir.types import (
    COMMON,
    Buffer,
    RankIndex,
    Table,
    TableEntry,
    Team,
    TeamLayout,
    Where,
    spanned,
    written,
)
from interlace.ir.view import Box, Step, View

AnyOp = TypeVar("AnyOp", bound=Op)


@dataclass(frozen=True, slots=True)
class Node:
    """One aten call in a region's body: `outs = fn(*args, **kwargs)`."""

    outs: tuple[str, ...] = field(metadata=COMMON)
    fn: str = field(metadata=COMMON)
    args: tuple[Arg, ...] = field(default=(), metadata=written(rest=True))
    kwargs: tuple[tuple[str, Arg], ...] = field(default=(), metadata=written("keywords"))


@dataclass(frozen=True, slots=True)
class Region:
    """A group of aten calls that runs as one: eager, or compiled at bind time."""

    name: str
    inputs: tuple[str, ...]
    body: tuple[Node, ...]
    outputs: tuple[str, ...]


def names_in(arg: Arg) -> tuple[str, ...]:
    """The values of a region that are in an argument, however deep."""
    if isinstance(arg, Name):
        return (arg.name,)
    if isinstance(arg, tuple):
        return tuple([name for item in arg for name in names_in(item)])
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A communication and the compute it feeds or follows, with how it is overlapped and why."""

    id: int
    """The number by which ops name it."""
    kind: str
    """`all_gather_matmul`, `matmul_reduce_scatter`, `matmul_all_reduce`, `all_to_all_matmul`,
    `matmul_all_to_all`, or a collective's kind."""
    module: str = field(default="", metadata=written(positional=True))
    """The path of the module in the model."""
    strategy: str = field(default="serial", metadata=written(always=True))
    """The way that it is overlapped (docs/explanation/strategies.md)."""
    protocol: str | None = None
    """With `peer`: `put` or `get`."""
    chunks: int | None = None
    """The number of chunks, where it is not the size of the team."""
    reason: str = ""
    """Why this strategy was taken, or why the site stays serial."""
    serial_ms: float | None = None
    """The predicted time of the serial strategy, in milliseconds,"""
    predicted_ms: float | None = None
    """and of this one."""


@dataclass(frozen=True, slots=True)
class Remark:
    """Note of something that a pass declined to do, or did on purpose, and why."""

    pass_name: str
    """The pass."""
    text: str
    """Its reason."""
    site: int | None = None
    """The number of the site, if it is about one."""


class _KnownBuffers:
    """Place for the buffers of a Program: passes ask each Program several times."""

    __slots__ = ("_buffers",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program(_KnownBuffers):
    """A list of ops for every rank of its teams or, after `instantiate`, for one."""

    name: str = "main"
    teams: tuple[Team, ...] = ()
    """The axes of the mesh, in order, and further teams."""
    sizes: SizeClass = FIXED
    """The named sizes, and which values of them it is for."""
    tables: tuple[Table, ...] = ()
    """Integers by rank, such as uneven numbers of rows."""
    params: tuple[Buffer, ...] = ()
    """The buffers of the caller: inputs, and outputs that a run fills."""
    ops: tuple[Op, ...] = ()
    """The ops, in the order in which the host issues them."""
    results: tuple[Arg, ...] | None = None
    """Results of a run: views, scalars and None. None itself: the output parameters, in order."""
    regions: tuple[Region, ...] = ()
    """Groups of calls that run as one."""
    sites: tuple[Site, ...] = ()
    """The communications, each with its strategy."""
    remarks: tuple[Remark, ...] = ()
    """Notes of passes."""
    ranks: tuple[int, ...] | None = None
    """The global ranks that run it; None: 0 up to the product of the mesh teams' sizes."""
    rank: int | None = None
    """Set by `instantiate`: the global rank that this concrete Program is for."""

    def __str__(self) -> str:
        from interlace.ir.text.printer import print_program  # the printer imports this module

        return print_program(self)

    def replace(self, **changes: object) -> Program:
        """This Program with other `changes` of fields."""
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]

    def remarked(self, remarks: Iterable[Remark]) -> Program:
        """This Program with these `remarks` added, each of them once."""
        return self.replace(remarks=tuple(dict.fromkeys((*self.remarks, *remarks))))

    @property
    def world(self) -> tuple[int, ...]:
        """The global ranks that run this Program."""
        return self.ranks if self.ranks is not None else spanned(self.teams)

    def team(self, name: str) -> Team:
        """The team of that `name`; ProgramError if there is none."""
        for team in self.teams:
            if team.name == name:
                return team
        raise ProgramError(f"no team named {name!r}; known are {[t.name for t in self.teams]}")

    def where(self, rank: int) -> Where:
        """The resolver of rank-dependent values for global `rank`."""
        return next(self.wheres((rank,)))

    def wheres(self, ranks: Iterable[int]) -> Iterator[Where]:
        """The resolvers for several ranks, which share what is the same for all."""
        layout = TeamLayout(self.teams, self.ranks)
        tables = {table.name: table for table in self.tables}
        for rank in ranks:
            yield Where(rank, layout.members(rank), tables)

    @once
    def buffers(self) -> Mapping[str, Buffer]:
        """The buffers by name: the parameters, and what Allocs and Calls declare."""
        found = {buffer.name: buffer for buffer in self.params}
        for op in self.ops:
            for buffer in op.declares():
                found[buffer.name] = buffer
        return found

    def calls(self) -> dict[int, Call]:
        """The calls, by their place in the list."""
        return {i: op for i, op in enumerate(self.ops) if isinstance(op, Call)}

    def collectives(self) -> dict[int, Collective]:
        """The collectives, by their place in the list."""
        return {i: op for i, op in enumerate(self.ops) if isinstance(op, Collective)}

    def fused(self) -> dict[int, Fused]:
        """The fused ops, by their place in the list."""
        return {i: op for i, op in enumerate(self.ops) if isinstance(op, Fused)}

    def streams(self) -> tuple[str, ...]:
        """The streams in order of first use."""
        return tuple(dict.fromkeys(op.stream for op in self.ops))

    def site(self, site: int) -> Site:
        """The `site` of that number; ProgramError if there is none."""
        for candidate in self.sites:
            if candidate.id == site:
                return candidate
        raise ProgramError(f"no site {site}; known are {[s.id for s in self.sites]}")

    def returned(self) -> tuple[Arg, ...]:
        """The results of a run, with the default filled in."""
        if self.results is not None:
            return self.results
        return tuple(View(buffer.name) for buffer in self.params if buffer.kind == "output")

    def boxes(self, rank: int) -> Callable[[View], Box]:
        """A function that gives the box of a view on one rank, cached."""
        where, buffers = self.where(rank), self.buffers()
        own: dict[object, Box] = {}
        symbolic, token = bool(self.sizes.sizes), object()

        def box(view: View) -> Box:
            buffer = buffers.get(view.buffer)
            if buffer is None:
                raise ProgramError(f"no buffer named {view.buffer!r}")
            facts = buffer.shape, buffer.strides, buffer.dtype, view.steps  # layers have them alike
            cache, key = own, facts
            if symbolic and (decider := DECIDER.get()) is not None:
                # What was noted on the way to a box is noted for one class alone.
                cache, key = decider.cache, (token, facts)
            found = cache.get(key)
            if found is None:
                found = cache[key] = view.box(buffer, where)
            return found

        return box

    def instantiate(self, rank: int) -> Program:
        """The concrete Program of a global `rank`: every index, size and peer an integer.

        Raises:
            ProgramError: it is another rank's already.
            TeamError: no such rank runs it.
        """
        if self.rank is not None:
            if self.rank != rank:
                raise ProgramError(f"{self.name} is already instantiated for rank {self.rank}")
            return self
        where, by_rank = self.where(rank), (RankIndex, TableEntry)

        def resolve(value: object) -> object:
            return where.value(value) if isinstance(value, by_rank) else value

        return _changed(self, resolve).replace(rank=rank, ranks=self.world)

    def at(self, values: Mapping[str, int]) -> Program:
        """The Program for these `values` of its named sizes: every size an integer."""
        if not self.sizes.sizes:
            return self
        return _resized(self, lambda size: size.at(values)).replace(sizes=FIXED)

    def pin(self, names: Collection[str]) -> Program:
        """The Program with these sizes as numbers, for the part of its class where they have the
        values at hand. The class names them still."""
        values = {name: value for name, value in self.sizes.values.items() if name in names}
        made = _resized(self, lambda size: size.partly_at(values))
        return made.replace(sizes=self.sizes.pin(names))

    def numbered(self) -> tuple[Program, dict[str, str]]:
        """The Program with its named sizes called `s0`, `s1` and so on, in the order in which they
        occur, and what each was called before; those that do not matter are left out."""
        names: dict[str, str] = {}

        def rename(size: Size) -> Int:
            for name in sorted(size.names):
                names.setdefault(name, f"s{len(names)}")
            return size.renamed(names)

        made = _resized(self, rename)
        for fact in self.sizes.facts:
            rename(fact.value)
        for size in self.sizes.sizes:
            if size.narrowed:  # it steered what was made
                rename(named(size.name))
        before = {new: old for old, new in names.items()}
        return made.replace(sizes=self.sizes.renamed(names)), before


ProgramOrPath = Program | str | os.PathLike[str]
"""A Program, or the path of a file that holds one or a set."""


def together(programs: ProgramOrPath | Sequence[ProgramOrPath], caller: str) -> list[Program]:
    """A Program or a set of them, or those of files, as a list. Raises OptionError for anything
    else, and what `interlace.load_set` raises of a file."""
    from interlace.ir.text.load import load_set

    one = isinstance(programs, Program | str) or not isinstance(cast("object", programs), Iterable)
    listed: list[Program] = []
    for item in [programs] if one else cast("Iterable[object]", programs):
        if isinstance(item, Program):
            listed.append(item)
        elif isinstance(item, str | os.PathLike) and "\n" not in str(cast("object", item)):
            listed += load_set(cast("str | os.PathLike[str]", item))
        else:
            raise OptionError(
                f"{caller} takes Programs and paths of schedules, and was given {item!r}: read a "
                "text with interlace.parse(text)"
            )
    return listed


@contextmanager
def no_collections() -> Generator[None]:
    """A time without garbage collection, for work on large Programs.

    What such work makes is in use until its end, and collections, each of which looks through
    millions of ops, nodes and edges, take longer than the work.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _resized(program: Program, change: Callable[[Size], Int]) -> Program:
    """The Program with every size that is symbolic changed."""
    return _changed(program, lambda value: change(value) if isinstance(value, Size) else value)


def _changed(program: Program, change: Callable[[object], object]) -> Program:
    """The Program with every value in it changed, as `map_values` does."""
    parts = program.tables, program.params, program.ops, program.results
    tables, params, ops, results = (_mapped(part, change) for part in parts)
    return program.replace(tables=tables, params=params, ops=ops, results=results)


Spot = tuple[int, int]
"""An op's place in the list, and a member's place in all parts of a Fused (0 outside of one)."""


def spots(ops: Sequence[Op]) -> Iterator[tuple[Spot, Op]]:
    """Every op with its spot; the members of a Fused instead of the Fused."""
    for index, op in enumerate(ops):
        for number, member in enumerate(op.steps):
            yield (index, number), member


def calls_in(ops: Iterable[Op]) -> Iterator[Call]:
    """The calls, those in a Fused included."""
    for op in ops:
        for member in op.steps:
            if isinstance(member, Call):
                yield member


def map_views(op: AnyOp, change: Callable[[View], View]) -> AnyOp:
    """The op with every view changed."""
    return map_values(op, lambda value: change(value) if isinstance(value, View) else value)


def map_values(op: AnyOp, change: Callable[[object], object]) -> AnyOp:
    """The op with every value in it changed, also within tuples, ops, buffers and views that it
    holds; of a view that was changed as a whole, no further."""
    return _mapped(op, change)


def _mapped(value: Any, change: Callable[[object], object]) -> Any:
    names = _mapped_fields(value.__class__)
    if names is None:
        return change(value)
    if isinstance(value, tuple):
        items = cast("tuple[object, ...]", value)
        parts = [_mapped(item, change) for item in items]
        return items if all(map(operator.is_, parts, items)) else tuple(parts)
    if not isinstance(value, Op):
        new = change(value)
        if new is not value or (isinstance(value, View) and not value.steps):
            return new
    if not names:
        return value
    before = [*map(value.__getattribute__, names)]
    after = [_mapped(each, change) for each in before]
    if all(map(operator.is_, before, after)):
        return value
    return dataclasses.replace(value, **dict(zip(names, after, strict=True)))


_HOLDERS = (View, Buffer, Table, *get_args(Step))


@functools.cache
def _mapped_fields(kind: type[Any]) -> tuple[str, ...] | None:
    """The fields that may hold more than names, numbers and flags; None of what holds nothing."""
    if issubclass(kind, Op):
        return tuple(each.name for each in form_of(kind).fields if each.role not in PLAIN)
    if kind in _HOLDERS:
        plain = ("str", "bool", "DType")
        return tuple(f.name for f in dataclasses.fields(kind) if f.init and f.type not in plain)
    return () if issubclass(kind, tuple) else None


# Communication

_BETWEEN_RANKS = Collective | Put | Get | Send | Recv


def communication_in_words(program: Program) -> str:
    """The numbers of collectives, one-sided copies and messages of one rank; empty: none."""
    found = [op for op in _single(program) if isinstance(op, _BETWEEN_RANKS)]
    words = Counter(form_of(type(op)).of(op).word for op in found)
    return ", ".join(f"{number} {word}" for word, number in words.items())


def exchanged_sizes(program: Program) -> frozenset[str]:
    """The named sizes that what ranks exchange depends on: all ranks must run the same of them."""
    tables = [size for table in program.tables for size in table.values]
    buffers = program.buffers().values()
    shared = {b.name: b for b in buffers if b.kind == "symmetric"}
    found: list[object] = [*tables, *_dimensions(shared.values())]
    box = program.boxes(program.world[0] if program.rank is None else program.rank)
    with deciding(program.sizes):
        for op in _single(program):
            between = isinstance(op, _BETWEEN_RANKS)
            for access in (*op.reads(), *op.writes()):
                reached = access.view.buffer in shared  # by peers, where this rank does not look
                if between or reached:
                    part = box(access.view)
                    found += (*part.sizes, *part.strides, part.offset) if reached else part.sizes
    return names_of(found)


def lasting_sizes(program: Program) -> frozenset[str]:
    """The named sizes that memory which stays between runs depends on."""
    kinds = ("local", "symmetric")
    return names_of(_dimensions(b for b in program.buffers().values() if b.kind in kinds))


def _dimensions(buffers: Iterable[Buffer]) -> Iterator[object]:
    return (size for b in buffers for size in (*b.shape, *(b.strides or ())))


def _single(program: Program) -> list[Op]:
    """All ops, those of groups one by one."""
    found = [op for _, op in spots(program.ops)]
    return [each for op in found for each in (op.ops if isinstance(op, Group) else (op,))]
