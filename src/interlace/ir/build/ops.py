"""The builder's ops, a method for each, and the handles that they take: views written by hand.

full[p.tp.rank + 1]        chunk 1 further than this rank's, of as many as the team has ranks
x[:, 0:8].permute(1, 0)    a slice, then the steps that torch has
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypedDict, Unpack, cast

from interlace.errors import ProgramError
from interlace.ir.fields import form_of
from interlace.ir.ops import (
    KINDS,
    Arg,
    Call,
    Collective,
    Copy,
    Expect,
    Free,
    Fused,
    FusedKernel,
    FusedMember,
    Get,
    Group,
    HostSync,
    Loc,
    Name,
    Notify,
    Op,
    Put,
    Record,
    Recv,
    Send,
    Wait,
)
from interlace.ir.program import Program
from interlace.ir.sizes import Int
from interlace.ir.text.printer import print_view
from interlace.ir.text.spelling import did_you_mean
from interlace.ir.types import (
    Buffer,
    DType,
    Index,
    Others,
    RankIndex,
    Table,
    Team,
    even_parts,
    team_sizes,
)
from interlace.ir.view import Cast, Step, Steps, View


class TorchDType(Protocol):
    """A `torch.dtype`, in words that do without torch."""

    @property
    def is_floating_point(self) -> bool: ...
    @property
    def itemsize(self) -> int: ...


ElementType = DType | str | TorchDType


@dataclass(slots=True)
class Scope:
    """Context that resolves handles: the teams, tables and buffers of the Program being built."""

    teams: tuple[Team, ...]
    ranks: tuple[int, ...] | None = None
    tables: dict[str, Table] = field(default_factory=dict[str, Table])
    buffers: dict[str, Buffer] = field(default_factory=dict[str, Buffer])

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


@dataclass(frozen=True, slots=True)
class Handle(Steps):
    """A view of a buffer; each step gives another handle. `ir` is the `View` itself."""

    scope: Scope = field(repr=False, compare=False)
    ir: View

    def __getitem__(self, key: Index | slice | tuple[slice, ...]) -> Handle:
        """A chunk of dimension 0 (`x[1]`, `x[p.tp.rank]`), or slices (`x[2:4]`, `x[:, 2:4]`)."""
        if isinstance(key, int | RankIndex):
            return self.chunk(key, self.scope.parts(key))
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
        return print_view(self.ir, Program(teams=self.scope.teams))

    @property
    def buffer(self) -> Buffer:
        """The buffer that it is a view of."""
        return self.scope.buffers[self.ir.buffer]

    @property
    def shape(self) -> tuple[Int, ...]:
        """The sizes, where every rank has the same."""
        frame = Program(
            teams=self.scope.teams, tables=tuple(self.scope.tables.values()), ranks=self.scope.ranks
        )
        found = {self.ir.box(self.buffer, frame.where(rank)).sizes for rank in frame.world}
        if len(found) != 1:
            raise ProgramError(
                f"{self} has sizes {sorted(found)} on different ranks: give both ends of a slice"
            )
        return found.pop()

    def then(self, step: Step) -> Handle:
        return Handle(self.scope, self.ir.then(step))

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


class TeamOptions(TypedDict, total=False):
    """Who takes part, and what moves the bytes."""

    team: TeamOrName
    backend: str | None


class CollectiveOptions(TeamOptions, total=False):
    """The same, with a table of uneven parts, and what some kinds have."""

    splits: Table | str | None
    reduce: str | None
    root: Index | None


CollectiveName = Literal[
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "broadcast",
    "all_to_all",
    "gather",
    "scatter",
    "reduce",
    "barrier",
]
"""The names in `KINDS`."""


class BuilderOps:
    """Emits ops onto the current stream, for the current site and module."""

    def __init__(self, teams: tuple[Team, ...], ranks: tuple[int, ...] | None) -> None:
        self.scope = Scope(teams, ranks)
        self.ops: list[Op] = []
        self.pending: dict[str, Buffer] = {}
        self.current_stream = "main"
        self.current_site: int | None = None
        self.current_module = ""
        self.open_group: list[Send | Recv] | None = None
        self.open_fused: list[tuple[FusedMember, ...]] | None = None
        self.open_part: list[FusedMember] | None = None
        self.num_events = 0

    def add(self, kind: type[Op], /, **given: object) -> None:
        """An op of any kind; its fields may be handles, teams and tables.

        A team may be left out where the peer names it, or where there is only one.
        """
        for each in form_of(kind).fields:
            if each.role == "team":
                given[each.name] = self.team_name(given.get(each.name), given.get(each.implied_by))
        fields = {name: _plain(value) for name, value in given.items()}
        self.emit(kind(**fields, **self.common()))

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
        frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
        while frame.f_back is not None and frame.f_globals.get("__name__", "") in _INSIDE:
            frame = frame.f_back
        loc = Loc(self.current_module, frame.f_code.co_filename, frame.f_lineno)
        return {"stream": self.current_stream, "site": self.current_site, "loc": loc}

    def handle(self, buffer: Buffer) -> Handle:
        """A handle of a whole buffer, which is known from here on."""
        self.scope.buffers[buffer.name] = buffer
        return Handle(self.scope, View(buffer.name))

    def team_name(self, team: object, peer: object = None) -> str:
        """The name of a team: as given, or the peer's, or the only one there is."""
        if team is not None:
            return team.name if isinstance(team, Team) else str(team)
        if isinstance(peer, RankIndex | Others):
            return peer.team
        if len(self.scope.teams) == 1:
            return self.scope.teams[0].name
        raise ProgramError("it is unclear which team this is for: give team=")

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
        """Runs an aten overload, a kernel or a region; `out` are the views that it fills.

        Handles of `fresh(...)` in `out` are what the call makes itself.
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
            args=tuple(map(self.arg, args)),
            kwargs=tuple((key, self.arg(value)) for key, value in kwargs.items()),
            outs=tuple(view for view in views if view.buffer not in made),
            fresh=fresh,
            mutates=mutates,
            rng=rng,
        )

    def mm(self, a: Viewed, b: Viewed, out: Viewed) -> None:
        """`out = a @ b` for matrices."""
        self.call("aten.mm.out", a, b, out=out)

    def copy(self, src: Viewed, dst: Viewed) -> None:
        """`src` into `dst`."""
        self.add(Copy, src=src, dst=dst)

    def free(self, *buffers: Handle | str) -> None:
        """Gives the storage of buffers back, once the stream gets here."""
        for buffer in buffers:
            name = buffer if isinstance(buffer, str) else buffer.ir.buffer
            self.add(Free, buffer=name)

    def record(self, event: str | None = None) -> str:
        """An event at this point of the stream; gives its name."""
        if event is None:
            self.num_events += 1
            event = f"e{self.num_events}"
        self.add(Record, event=event)
        return event

    def wait(self, event: str) -> None:
        """The stream waits for an event."""
        self.add(Wait, event=event)

    def host_sync(self) -> None:
        """The host waits for the stream."""
        self.add(HostSync)

    def send(self, src: Viewed, peer: Index, **how: Unpack[TeamOptions]) -> None:
        """`src` to a peer that receives it."""
        self.add(Send, src=src, peer=peer, **how)

    def recv(self, dst: Viewed, peer: Index, **how: Unpack[TeamOptions]) -> None:
        """Into `dst` from a peer that sends it."""
        self.add(Recv, dst=dst, peer=peer, **how)

    def put(self, src: Viewed, dst: Viewed, peer: Index, *, team: TeamOrName = None) -> None:
        """`src` into `dst` of a peer: a view of a symmetric buffer."""
        self.add(Put, src=src, dst=dst, peer=peer, team=team)

    def get(
        self, src: Viewed, dst: Viewed | None = None, *, peer: Index, team: TeamOrName = None
    ) -> None:
        """`src` of a peer, a view of a symmetric buffer, into `dst` here (default: the same)."""
        self.add(Get, src=src, dst=dst, peer=peer, team=team)

    def notify(
        self, signal: str, to: Index | Others, *, value: int = 1, team: TeamOrName = None
    ) -> None:
        """Raises a signal on a peer."""
        self.add(Notify, signal=signal, peer=to, value=value, team=team)

    def expect(
        self, signal: str, peer: Index | Others, *, value: int = 1, team: TeamOrName = None
    ) -> None:
        """The stream waits for a signal of a peer."""
        self.add(Expect, signal=signal, peer=peer, value=value, team=team)

    def collective(
        self,
        kind: CollectiveName,
        src: Viewed | None = None,
        dst: Viewed | None = None,
        **how: Unpack[CollectiveOptions],
    ) -> None:
        """A collective of any kind; `team` may be left out where there is only one."""
        self.add(Collective, kind=kind, src=src, dst=dst, **how)

    def all_gather(self, src: Viewed, dst: Viewed, **how: Unpack[CollectiveOptions]) -> None:
        """Every rank's `src`, in order of ranks, into every rank's `dst`."""
        self._collective("all_gather", src, dst, how)

    def reduce_scatter(self, src: Viewed, dst: Viewed, **how: Unpack[CollectiveOptions]) -> None:
        """Part r of every rank's `src`, reduced (default: summed), into rank r's `dst`."""
        self._collective("reduce_scatter", src, dst, how)

    def all_reduce(
        self, src: Viewed, dst: Viewed | None = None, **how: Unpack[CollectiveOptions]
    ) -> None:
        """Every rank's `src`, reduced (default: summed), into each `dst` (default: `src`)."""
        self._collective("all_reduce", src, dst or src, how)

    def broadcast(
        self, src: Viewed, dst: Viewed | None = None, **how: Unpack[CollectiveOptions]
    ) -> None:
        """The `src` of the root (default: 0) into every rank's `dst` (default: `src`)."""
        self._collective("broadcast", src, dst or src, how)

    def all_to_all(self, src: Viewed, dst: Viewed, **how: Unpack[CollectiveOptions]) -> None:
        """Part r of this rank's `src` into this rank's part of rank r's `dst`."""
        self._collective("all_to_all", src, dst, how)

    def gather(self, src: Viewed, dst: Viewed, **how: Unpack[CollectiveOptions]) -> None:
        """Every rank's `src`, in order of ranks, into the `dst` of the root (default: 0)."""
        self._collective("gather", src, dst, how)

    def scatter(self, src: Viewed, dst: Viewed, **how: Unpack[CollectiveOptions]) -> None:
        """Part r of the `src` of the root (default: 0) into rank r's `dst`."""
        self._collective("scatter", src, dst, how)

    def reduce(self, src: Viewed, dst: Viewed, **how: Unpack[CollectiveOptions]) -> None:
        """Every rank's `src`, reduced (default: summed), into the root's `dst`."""
        self._collective("reduce", src, dst, how)

    def barrier(self, **how: Unpack[TeamOptions]) -> None:
        """No rank's stream goes on before every rank's has come here."""
        self.collective("barrier", **how)

    def _collective(
        self, kind: CollectiveName, src: Viewed, dst: Viewed, how: CollectiveOptions
    ) -> None:
        row = KINDS[kind]
        if row.reduces:
            how.setdefault("reduce", "sum")
        if row.rooted:
            how.setdefault("root", 0)
        self.collective(kind, src, dst, **how)


def _plain(value: Any) -> Any:
    """A value as an op has it."""
    if isinstance(value, Handle):
        return value.ir
    return value.name if isinstance(value, Table) else value


_INSIDE = frozenset({__name__, "interlace.ir.build.builder", "contextlib"})
"""Modules whose frames are skipped to find the line that wrote an op."""
