"""The builder: a Program written in Python, by hand or by code. Leaving the `with` validates it.

with interlace.program("gather", team=2) as p:
    x, y = p.input("x", "f32", (2, 4)), p.output("y", "f32", (4, 4))
    full = p.alloc("full", "f32", (4, 4), symmetric=p.tp)
    p.copy(x, full[p.tp.rank])
    p.notify("ready", to=p.tp.others)
    p.expect("ready", p.tp.rank + 1)
    p.get(full[p.tp.rank + 1], peer=p.tp.rank + 1)
    p.copy(full, y)
    p.free(full)
print(p.program)

Views are handles: `full[p.tp.rank + 1]` is the chunk after this rank's, of as many as the team has
ranks; `x[:, 0:8].permute(1, 0)` is a slice, then the steps that torch has.

Note [Generated methods]
    Each op has a method of the word that the text has for it, with its fields as arguments: made
    from the op's form (roles.py), and its values by their roles. The class states signatures and
    docstrings of these methods for type checkers and readers; a test holds them against the forms.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, TypedDict, Unpack, cast

from interlace.errors import ProgramError
from interlace.ir.ops import (
    KINDS,
    Alloc,
    Arg,
    Call,
    Free,
    Fused,
    FusedKernel,
    FusedMember,
    Group,
    Loc,
    Name,
    Op,
    Record,
    Recv,
    Send,
)
from interlace.ir.program import Program, Site
from interlace.ir.roles import TEAM, Form, form_of, op_words
from interlace.ir.sizes import FIXED, Int, NamedSize, Size, SizeClass, named
from interlace.ir.text.printer import print_view
from interlace.ir.text.spelling import did_you_mean
from interlace.ir.types import (
    Buffer,
    Dim,
    DType,
    Index,
    Others,
    RankIndex,
    Table,
    Team,
    even_parts,
    team_sizes,
)
from interlace.ir.validate import validate
from interlace.ir.view import Cast, Step, Steps, View


def program(
    name: str = "main",
    *,
    team: int | None = None,
    mesh: Mapping[str, int] | None = None,
    groups: Mapping[str, Sequence[Sequence[int]]] | None = None,
    ranks: Sequence[int] | None = None,
    lines: bool = True,
) -> Builder:
    """Begins a Program in Python: `with interlace.program("name", team=4) as p:`.

    Args:
        name: the Program's name.
        team: the size of one team, which is named `tp`.
        mesh: the sizes of several teams by name, the axes of a mesh: `{"dp": 2, "tp": 4}`.
        groups: further teams, of global ranks: `{"pipe": [[0, 2], [1, 3]]}`.
        ranks: the global ranks that run the Program, where it is not the whole mesh.
        lines: records in each op the line of Python that wrote it; False for generated code.

    Returns:
        A builder; `p.program` is the validated Program, at the end of the block or before.

    Raises:
        ProgramError: `team` and a mesh axis `tp` are both given; from the builder: what is written
            breaks a structural rule.
    """
    axes = dict(mesh or {})
    if team is not None:
        if "tp" in axes:
            raise ProgramError("give `team` or a mesh axis `tp`, not both")
        axes["tp"] = team
    teams = [Team(axis, size) for axis, size in axes.items()]
    for key, listed in (groups or {}).items():
        found = tuple(tuple(group) for group in listed)
        teams.append(Team(key, len(found[0]) if found else 0, found))
    return Builder(name, tuple(teams), None if ranks is None else tuple(ranks), lines)


class TorchDType(Protocol):
    """A dtype of torch, which this room does not import."""

    @property
    def is_floating_point(self) -> bool: ...
    @property
    def itemsize(self) -> int: ...


ElementType = DType | str | TorchDType


@dataclass(frozen=True, slots=True)
class Handle(Steps):
    """A view of a buffer; each step gives another handle. `ir` is the `View` itself."""

    builder: Builder = field(repr=False, compare=False)
    ir: View

    def __getitem__(self, key: Index | slice | tuple[slice, ...]) -> Handle:
        """A chunk of dimension 0 (`x[1]`, `x[p.tp.rank]`), or slices (`x[2:4]`, `x[:, 2:4]`)."""
        if isinstance(key, int | RankIndex):
            return self.chunk(key, self.builder.parts(key))
        found = self
        for dim, part in enumerate(key if isinstance(key, tuple) else (key,)):
            if part.step not in (None, 1):
                raise ProgramError(f"{self} has slices without steps only: write start:stop")
            if part.start is not None or part.stop is not None:
                start = 0 if part.start is None else part.start
                stop = self.shape[dim] if part.stop is None else part.stop
                found = found.slice(dim, start, stop)
        return found

    def __str__(self) -> str:
        return print_view(self.ir, Program(teams=self.builder.teams))

    @property
    def buffer(self) -> Buffer:
        """The buffer that it is a view of."""
        return self.builder.buffers[self.ir.buffer]

    @property
    def shape(self) -> tuple[Int, ...]:
        """The sizes, where every rank has the same."""
        tables = tuple(self.builder.tables.values())
        frame = Program(teams=self.builder.teams, tables=tables, ranks=self.builder.ranks)
        found = {self.ir.box(self.buffer, frame.where(rank)).sizes for rank in frame.world}
        if len(found) != 1:
            raise ProgramError(
                f"{self} has sizes {sorted(found)} on different ranks: give both ends of a slice"
            )
        return found.pop()

    def then(self, step: Step) -> Handle:
        return Handle(self.builder, self.ir.then(step))

    def t(self) -> Handle:
        """The transpose of a matrix."""
        return self.permute(1, 0)

    def cast(self, dtype: ElementType) -> Handle:
        """The same bytes as another element type."""
        return self.then(Cast(element_type(dtype)))


def element_type(dtype: ElementType) -> DType:
    """An element type by its name, such as `"bf16"`, or as a dtype of torch."""
    name = str(dtype).removeprefix("torch.")
    try:
        return DType(_OF_TORCH.get(name, name))
    except ValueError:
        fix = did_you_mean(name, (known.value for known in DType), "element types are")
        raise ProgramError(f"no element type is named {name!r}: {fix}") from None


_OF_TORCH = {
    **{f"float{n}": f"f{n}" for n in (16, 32, 64)},
    **{f"{kind}{n}": f"{kind[0]}{n}" for kind in ("int", "uint") for n in (8, 16, 32, 64)},
    **{f"complex{n}": f"c{n}" for n in (64, 128)},
    **{"bfloat16": "bf16", "float8_e4m3fn": "f8e4m3", "float8_e5m2": "f8e5m2"},
}


Viewed = Handle | View
TeamOrName = Team | str | None


class BufferOptions(TypedDict, total=False):
    """Strides in elements, where they are not row-major."""

    strides: Sequence[int] | None


class AllocOptions(BufferOptions, total=False):
    """The same, with the team of a symmetric buffer, and a place in a storage."""

    symmetric: TeamOrName
    storage: str | None
    offset: int


class TeamOptions(TypedDict, total=False):
    """Who takes part, and what moves the bytes."""

    team: TeamOrName
    backend: str | None


class CollectiveOptions(TeamOptions, total=False):
    """The same, with a table of uneven parts or counts that are data, and what some kinds have."""

    splits: Table | str | None
    sent: Viewed | None
    received: Viewed | None
    reduce: str | None
    root: Index | None


class CollectiveMethod(Protocol):
    """A method that adds a collective."""

    def __call__(
        self, src: Viewed, dst: Viewed | None = None, **how: Unpack[CollectiveOptions]
    ) -> None: ...


class SiteOptions(TypedDict, total=False):
    """The strategy of a site, its times and the reason for it."""

    strategy: str
    protocol: str | None
    chunks: int | None
    reason: str
    serial_ms: float | None
    predicted_ms: float | None


class Builder:
    """Collects the ops of one Program; `p.tp` is the team of that name.

    Methods for ops take views (what `input`, `alloc` and so on return, and views of these) and the
    fields of the op ([Ops](../ops.md)): `team` where the peer does not name it, and `backend`,
    `splits`, `sent`, `received`, `reduce` and `root` of collectives. Buffers take `strides`,
    `alloc` also `storage` and `offset`; sites what a `Site` has.

    Args:
        name, ranks, lines: as of `interlace.program`, which makes builders.
        teams: the teams.

    Raises:
        ProgramError: from a method, or at the end: what is written breaks a structural rule.
    """

    def __init__(
        self, name: str, teams: tuple[Team, ...], ranks: tuple[int, ...] | None, lines: bool = True
    ) -> None:
        self.name, self.lines = name, lines
        self.teams, self.ranks = teams, ranks
        self.tables: dict[str, Table] = {}
        self.buffers: dict[str, Buffer] = {}
        self.ops: list[Op] = []
        self.pending: dict[str, Buffer] = {}
        self.current_stream = "main"
        self.current_site: int | None = None
        self.current_module = ""
        self.open_group: list[Send | Recv] | None = None
        self.open_fused: list[tuple[FusedMember, ...]] | None = None
        self.open_part: list[FusedMember] | None = None
        self.num_events = 0
        self.sizes: SizeClass = FIXED
        """The named sizes, and which values of them the Program is for."""
        self.params: list[Buffer] = []
        self.sites: list[Site] = []
        self.results: tuple[Arg, ...] | None = None
        self._program: Program | None = None

    def __getattr__(self, name: str) -> Team:
        known: tuple[Team, ...] = self.__dict__.get("teams", ())
        teams = {team.name: team for team in known}
        if name not in teams:
            fix = did_you_mean(
                name, [*teams, *(name for name in dir(Builder) if name[0] != "_")], "teams are"
            )
            raise AttributeError(
                f"no team, and nothing else of a builder, is named {name!r}: {fix}"
            )
        return teams[name]

    def __enter__(self) -> Builder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.build()

    @property
    def program(self) -> Program:
        """The Program that was built."""
        return self._program if self._program is not None else self.build()

    def build(self) -> Program:
        """The validated Program of what was written so far."""
        self._program = validate(
            Program(
                name=self.name,
                teams=self.teams,
                sizes=self.sizes,
                tables=tuple(self.tables.values()),
                params=tuple(self.params),
                ops=tuple(self.ops),
                results=self.results,
                sites=tuple(self.sites),
                ranks=self.ranks,
            )
        )
        return self._program

    def size(self, name: str, value: int) -> Size:
        """A size `name` that differs from run to run; decisions are made for `value`."""
        if name in self.sizes.values:
            raise ProgramError(f"size {name!r} is declared twice: give the second another name")
        self.sizes = SizeClass((*self.sizes.sizes, NamedSize(name, value)), self.sizes.facts)
        return named(name)

    def table(self, name: str, values: Sequence[int], team: TeamOrName = None) -> Table:
        """A table `name` of `values` by rank of a `team`: `rows[p.tp.rank]` is this rank's."""
        table = Table(name, self.team_name(team), tuple(values))
        if name in self.tables:
            raise ProgramError(f"table {name!r} is declared twice: give the second another name")
        self.tables[name] = table
        return table

    def input(
        self, name: str, dtype: ElementType, shape: Sequence[Dim], **how: Unpack[BufferOptions]
    ) -> Handle:
        """A tensor of the caller, by its `name`, `dtype` (`"bf16"` or torch's) and `shape`."""
        return self._param("input", name, dtype, shape, **how)

    def output(
        self, name: str, dtype: ElementType, shape: Sequence[Dim], **how: Unpack[BufferOptions]
    ) -> Handle:
        """A tensor that a run fills and returns, by its `name`, `dtype` and `shape`."""
        return self._param("output", name, dtype, shape, **how)

    def alloc(
        self, name: str, dtype: ElementType, shape: Sequence[Dim], **how: Unpack[AllocOptions]
    ) -> Handle:
        """A buffer of the Executor's memory, by its `name`, `dtype` and `shape`.

        With `symmetric=p.tp` it is on every rank of that team, and its peers may read and write it.
        """
        team = how.pop("symmetric", None)
        kind = "local" if team is None else "symmetric"
        return self._alloc(self._buffer(kind, name, dtype, shape, team, **how))

    def empty(
        self, name: str, dtype: ElementType, shape: Sequence[Dim], **how: Unpack[BufferOptions]
    ) -> Handle:
        """A buffer that torch allocates in a run (`name`, `dtype`, `shape`); it may be returned."""
        return self._alloc(self._buffer("fresh", name, dtype, shape, **how))

    def fresh(
        self, name: str, dtype: ElementType, shape: Sequence[Dim], **how: Unpack[BufferOptions]
    ) -> Handle:
        """A buffer that a call makes itself (`name`, `dtype`, `shape`), given in its `out`."""
        buffer = self.pending[name] = self._buffer("fresh", name, dtype, shape, **how)
        return self.handle(buffer)

    def returns(self, *results: object) -> None:
        """Sets the `results` of a run instead of the outputs: handles, numbers and None."""
        self.results = tuple(map(self.arg, results))

    def stream(self, name: str) -> AbstractContextManager[str]:
        """A context whose ops run on the stream `name`."""
        return self._holding("current_stream", name)

    def module(self, path: str) -> AbstractContextManager[str]:
        """A context whose ops come from the module at `path` in a model."""
        return self._holding("current_module", path)

    def at_site(self, number: int | None) -> AbstractContextManager[int | None]:
        """The ops inside serve the site of that number."""
        return self._holding("current_site", number)

    def site(
        self, kind: str, module: str = "", **how: Unpack[SiteOptions]
    ) -> AbstractContextManager[int]:
        """A context whose ops serve a new site, whose number it gives.

        Args:
            kind: what is overlapped, such as "all_gather_matmul"; of a schedule by hand any name.
            module: the path of the module in the model.
        """
        number = max((site.id for site in self.sites), default=0) + 1
        self.sites.append(Site(id=number, kind=kind, module=module, **how))
        return self._holding("current_site", number)

    def add(self, kind: type[Op], /, **given: object) -> None:
        """An op of any kind; its fields may be handles, teams and tables.

        A team may be left out where the peer names it, or where there is only one.
        """
        for each in form_of(kind).fields:
            if each.name in given or each.role is TEAM:
                peer = given.get(each.implied_by)
                given[each.name] = each.role.build(self, given.get(each.name), peer)
        self.emit(kind(**given, **self.common()))

    def emit(self, op: Op) -> None:
        """Adds an op, to the open group or part if there is one."""
        name = type(op).__name__
        if self.open_part is not None:
            if not isinstance(op, FusedMember):
                parts, _ = form_of(Fused).fields
                raise ProgramError(
                    f"a part holds {parts.how.holding} only: move the {name} out of it"
                )
            self.open_part.append(op)
        elif self.open_fused is not None:
            raise ProgramError(f"a fused op holds parts: put the {name} in `with p.part():`")
        elif self.open_group is None:
            self.ops.append(op)
        elif isinstance(op, Send | Recv):
            self.open_group.append(op)
        else:
            raise ProgramError(f"a group holds sends and receives only: move the {name} out of it")

    @contextmanager
    def group(self) -> Generator[None]:
        """The sends and receives inside start and end together."""
        common = self.common()
        with self._holding("open_group", []) as members:
            yield
        self.emit(Group(ops=tuple(members), **common))

    @contextmanager
    def fused(self, kernel: FusedKernel | None = None) -> Generator[None]:
        """The parts inside are one op: what `kernel` does, or else done one after another."""
        common = self.common()
        with self._holding("open_fused", []) as parts:
            yield
        self.emit(Fused(parts=tuple(parts), kernel=kernel, **common))

    @contextmanager
    def part(self) -> Generator[None]:
        """The calls, waits, expects, records and notifies inside are one part of a fused op."""
        if self.open_fused is None or self.open_part is not None:
            raise ProgramError("a part stands in a fused op: open it with `with p.fused():`")
        with self._holding("open_part", []) as members:
            yield
        self.open_fused.append(tuple(members))

    @contextmanager
    def _holding(self, name: str, value: Any) -> Generator[Any]:
        """An attribute of the builder has another value inside."""
        before: object = getattr(self, name)
        setattr(self, name, value)
        try:
            yield value
        finally:
            setattr(self, name, before)

    def common(self) -> dict[str, Any]:
        """Stream, site and location of the op that the caller is about to emit."""
        if not self.lines:
            loc = Loc(self.current_module)
            return {"stream": self.current_stream, "site": self.current_site, "loc": loc}
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        while frame.f_back is not None and frame.f_globals.get("__name__", "") in _INSIDE:
            frame = frame.f_back
        loc = Loc(self.current_module, frame.f_code.co_filename, frame.f_lineno)
        return {"stream": self.current_stream, "site": self.current_site, "loc": loc}

    def handle(self, buffer: Buffer) -> Handle:
        """A handle of a whole buffer, which is known from here on."""
        self.buffers[buffer.name] = buffer
        return Handle(self, View(buffer.name))

    def team_name(self, team: object, peer: object = None) -> str:
        """The name of a team: as given, or the peer's, or the only one there is."""
        if team is not None:
            return team.name if isinstance(team, Team) else str(team)
        if isinstance(peer, RankIndex | Others):
            return peer.team
        if len(self.teams) == 1:
            return self.teams[0].name
        raise ProgramError("it is unclear which team this is for: give team=")

    def view(self, value: Viewed | None) -> View | None:
        """The view that a handle is."""
        return value.ir if isinstance(value, Handle) else value

    def arg(self, value: object) -> Arg:
        """A value as an argument of a call, or as a result."""
        if isinstance(value, Handle):
            return value.ir
        if isinstance(value, list | tuple):
            return tuple(map(self.arg, cast("Sequence[object]", value)))
        if value is None or isinstance(value, View | Name | DType | int | float | str | complex):
            return value
        if (type(value).__module__, type(value).__name__) == ("torch", "dtype"):
            return element_type(str(value))
        raise ProgramError(
            f"{value!r} cannot be an argument: give handles, numbers, strings, element types, "
            "None, or tuples of these"
        )

    def call(
        self,
        fn: str,
        *args: object,
        out: Viewed | Sequence[Viewed] = (),
        mutates: bool = False,
        rng: bool = False,
        **kwargs: object,
    ) -> None:
        """Calls an aten overload, a kernel or a region.

        Args:
            fn: its name, such as "aten.mm.out".
            args, kwargs: its arguments: handles, numbers, strings, element types, None, or tuples.
            out: the views that it fills; handles of `fresh(...)` are what it makes itself.
            mutates, rng: it writes its arguments `out`, or draws, and the table of operators does
                not know it.
        """
        listed = (out,) if isinstance(out, Handle | View) else tuple(out)
        views = [item.ir if isinstance(item, Handle) else item for item in listed]
        fresh = tuple(
            self.pending.pop(view.buffer)
            for view in views
            if view.covers_buffer and view.buffer in self.pending
        )
        made = {buffer.name for buffer in fresh}
        self.add(
            Call,
            fn=fn,
            args=args,
            kwargs=tuple(kwargs.items()),
            outs=tuple(view for view in views if view.buffer not in made),
            fresh=fresh,
            mutates=mutates,
            rng=rng,
        )

    def mm(self, a: Viewed, b: Viewed, out: Viewed) -> None:
        """Multiplies matrices: `out` = `a` @ `b`."""
        self.call("aten.mm.out", a, b, out=out)

    def free(self, *buffers: Handle | str) -> None:
        """Gives the storage of `buffers` back, once the stream gets here."""
        for buffer in buffers:
            name = buffer if isinstance(buffer, str) else buffer.ir.buffer
            self.add(Free, buffer=name)

    def record(self, event: str | None = None) -> str:
        """An event at this point of the stream; gives its name, `event` if that is given."""
        if event is None:
            self.num_events += 1
            event = f"e{self.num_events}"
        self.add(Record, event=event)
        return event

    # Note [Generated methods]: of these the signatures and docstrings alone

    def copy(self, src: Viewed, dst: Viewed) -> None:
        """`src` into `dst`."""

    def wait(self, event: str) -> None:
        """The stream waits for an `event`."""

    def host_sync(self) -> None:
        """The host waits for the stream."""

    def send(self, src: Viewed, peer: Index, **how: Unpack[TeamOptions]) -> None:
        """Sends `src` to a `peer`, which receives it."""

    def recv(self, dst: Viewed, peer: Index, **how: Unpack[TeamOptions]) -> None:
        """Receives into `dst` from a `peer`, which sends it."""

    def put(self, src: Viewed, dst: Viewed, peer: Index, *, team: TeamOrName = None) -> None:
        """Copies `src` into `dst` of a `peer`, a view of a symmetric buffer of a `team`."""

    def get(
        self, src: Viewed, dst: Viewed | None = None, *, peer: Index, team: TeamOrName = None
    ) -> None:
        """Copies `src` of a `peer`, in a symmetric buffer of a `team`, to `dst` (or `src`) here."""

    def notify(
        self, signal: str, to: Index | Others, *, team: TeamOrName = None, value: int = 1
    ) -> None:
        """Raises a `signal` `to` a peer of a `team`, or all, to the `value` of this run."""

    def expect(
        self, signal: str, peer: Index | Others, *, team: TeamOrName = None, value: int = 1
    ) -> None:
        """The stream waits for a `signal` of a `peer` of a `team`, or all, and its `value`."""

    all_gather: CollectiveMethod
    """Every rank's `src`, in order of ranks, into every rank's `dst`."""
    reduce_scatter: CollectiveMethod
    """Part r of every rank's `src`, reduced (default: summed), into rank r's `dst`."""
    all_reduce: CollectiveMethod
    """Every rank's `src`, reduced (default: summed), into each `dst` (default: `src`)."""
    broadcast: CollectiveMethod
    """The `src` of the root (default: 0) into every rank's `dst` (default: `src`)."""
    all_to_all: CollectiveMethod
    """Part r of this rank's `src` into this rank's part of rank r's `dst`."""
    gather: CollectiveMethod
    """Every rank's `src`, in order of ranks, into the `dst` of the root (default: 0)."""
    scatter: CollectiveMethod
    """Part r of the `src` of the root (default: 0) into rank r's `dst`."""
    reduce: CollectiveMethod
    """Every rank's `src`, reduced (default: summed), into the root's `dst`."""

    def barrier(self, **how: Unpack[TeamOptions]) -> None:
        """No rank's stream goes on before every rank's has come here."""

    def parts(self, index: Index) -> int:
        """Number of chunks that `x[index]` cuts dimension 0 into."""
        if isinstance(index, RankIndex):
            sizes: Mapping[str, int] = team_sizes(self.teams)
            if index.team not in sizes:
                fix = did_you_mean(index.team, sizes, "teams are")
                raise ProgramError(f"no team is named {index.team!r}: {fix}")
            return sizes[index.team]
        even = even_parts(self.teams)
        if even is None:
            raise ProgramError(
                f"[{index}] is a chunk of as many as the team has ranks, and it is unclear which "
                f"team: write .chunk({index}, parts)"
            )
        return even

    def _param(
        self,
        kind: str,
        name: str,
        dtype: ElementType,
        shape: Sequence[Dim],
        **how: Unpack[BufferOptions],
    ) -> Handle:
        self.params.append(self._buffer(kind, name, dtype, shape, **how))
        return self.handle(self.params[-1])

    def _alloc(self, buffer: Buffer) -> Handle:
        self.add(Alloc, buffer=buffer)
        return self.handle(buffer)

    def _buffer(
        self,
        kind: str,
        name: str,
        dtype: ElementType,
        shape: Sequence[Dim],
        team: TeamOrName = None,
        strides: Sequence[int] | None = None,
        **placed: Any,
    ) -> Buffer:
        if name in self.buffers:
            raise ProgramError(f"buffer {name!r} is declared twice: give the second another name")
        team_name = None if team is None else self.team_name(team)
        steps = None if strides is None else tuple(strides)
        return Buffer(name, element_type(dtype), tuple(shape), kind, team_name, steps, **placed)


_INSIDE = frozenset({__name__, "contextlib"})
"""Modules whose frames are skipped to find the line that wrote an op."""


def _emitter(word: str, form: Form) -> Callable[..., None]:
    """The method of a word. A collective sums, has root 0, and may work in place, if not told."""
    positional = form.signature.positional
    names = {each.keyword: each.name for each in form.fields}
    row, usual = KINDS.get(word), dict[str, object](form.fixed)
    if row is not None:
        usual |= {"reduce": "sum"} if row.reduces else {}
        usual |= {"root": 0} if row.rooted else {}

    def emit(self: Builder, *args: object, **options: object) -> None:
        given = dict(zip(positional, args, strict=False))
        if len(given) < len(args) or given.keys() & options:
            raise TypeError(f"write {form.signature.usage(word)}")
        given |= options
        if word in _IN_PLACE:
            given["dst"] = given.get("dst") or given.get("src")
        self.add(form.kind, **(usual | {names.get(key, key): given[key] for key in given}))

    return emit


_IN_PLACE = ("all_reduce", "broadcast")
"""Collectives whose result is where their operand was, if no other place is given."""
_BY_HAND = ("call", "free", "fused", "group", "record")
"""Words whose methods take more, or other things, than the fields of the op."""


def _generate() -> None:
    """Note [Generated methods]."""
    for word, form in op_words().items():
        if word not in _BY_HAND:
            stated = getattr(Builder, word, None)
            emit = _emitter(word, form)
            if stated is None:
                emit.__doc__ = f"Adds {form.signature.usage(word)}."
            setattr(Builder, word, emit if stated is None else functools.wraps(stated)(emit))


_generate()
