"""The builder: a Program written by hand, in Python.

    with interlace.program("gather", team=4) as p:
        x = p.input("x", "f32", (2, 4))
        y = p.output("y", "f32", (8, 4))
        full = p.alloc("full", "f32", (8, 4), symmetric=p.tp)
        p.copy(x, full[p.tp.rank])
        p.notify("ready", to=p.tp.others)
        for k in range(1, 4):
            p.expect("ready", p.tp.rank + k)
            p.get(full[p.tp.rank + k], peer=p.tp.rank + k)
        p.copy(full, y)
        p.free(full)
    print(p.program)

Leaving the `with` block validates the Program. Each op remembers the line of Python that wrote it.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, TypedDict, Unpack, cast

from interlace.errors import ProgramError
from interlace.ir.fields import form_of
from interlace.ir.handle import Handle, Scope, element_type
from interlace.ir.ops import (
    KINDS,
    Alloc,
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
from interlace.ir.program import Node, Program, Region, Remark, Site
from interlace.ir.text.spelling import did_you_mean
from interlace.ir.types import Buffer, Dim, DType, Index, Others, RankIndex, Table, Team
from interlace.ir.validate import validate
from interlace.ir.view import View

Viewed = Handle | View
TeamOrName = Team | str | None


def program(
    name: str = "main",
    *,
    team: int | None = None,
    mesh: Mapping[str, int] | None = None,
    groups: Mapping[str, Sequence[Sequence[int]]] | None = None,
    ranks: Sequence[int] | None = None,
) -> Builder:
    """A builder of a Program, to be used as `with interlace.program("name", team=4) as p:`.

    `team=4` is one team named `tp`; `mesh={"dp": 2, "tp": 4}` names the axes of a mesh; `groups`
    adds teams of global ranks, such as `{"pipe": [[0, 2], [1, 3]]}`; `ranks` are the global ranks
    that run the Program, where it is not the whole mesh.
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
    return Builder(name, tuple(teams), None if ranks is None else tuple(ranks))


class SiteOptions(TypedDict, total=False):
    """How a site is overlapped, and why."""

    strategy: str
    protocol: str | None
    chunks: int | None
    reason: str
    serial_ms: float | None
    predicted_ms: float | None


class TeamOptions(TypedDict, total=False):
    """Who takes part, and what moves the bytes."""

    team: TeamOrName
    backend: str | None


class CollectiveOptions(TeamOptions, total=False):
    """The same, with a table of uneven parts, and what some kinds have."""

    splits: Table | str | None
    reduce: str | None
    root: Index | None


class Builder:
    """Collects the ops of one Program; `p.tp` is the team of that name."""

    def __init__(self, name: str, teams: tuple[Team, ...], ranks: tuple[int, ...] | None) -> None:
        self.name = name
        self.scope = Scope(teams, ranks)
        self.ops: list[Op] = []
        self.params: list[Buffer] = []
        self.regions: list[Region] = []
        self.sites: list[Site] = []
        self.remarks: list[Remark] = []
        self.results: tuple[Arg, ...] | None = None
        self.pending: dict[str, Buffer] = {}
        self.current_stream = "main"
        self.current_site: int | None = None
        self.current_module = ""
        self.open_group: list[Send | Recv] | None = None
        self.open_fused: list[tuple[FusedMember, ...]] | None = None
        self.open_part: list[FusedMember] | None = None
        self.num_events = 0
        self._program: Program | None = None

    def __getattr__(self, name: str) -> Team:
        scope: Scope | None = self.__dict__.get("scope")
        teams = {team.name: team for team in scope.teams} if scope else {}
        if name not in teams:
            fix = did_you_mean(name, [*teams, *_public(Builder)], "teams are")
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
                teams=self.scope.teams,
                tables=tuple(self.scope.tables.values()),
                params=tuple(self.params),
                ops=tuple(self.ops),
                results=self.results,
                regions=tuple(self.regions),
                sites=tuple(self.sites),
                remarks=tuple(self.remarks),
                ranks=self.scope.ranks,
            )
        )
        return self._program

    def table(self, name: str, values: Sequence[int], team: TeamOrName = None) -> Table:
        """One integer for each rank of a team; `rows[p.tp.rank]` is this rank's."""
        table = Table(name, self.team_name(team), tuple(values))
        if name in self.scope.tables:
            raise ProgramError(f"table {name!r} is there twice: give the second another name")
        self.scope.tables[name] = table
        return table

    def input(
        self,
        name: str,
        dtype: DType | str,
        shape: Sequence[Dim],
        *,
        strides: Sequence[int] | None = None,
        registered: TeamOrName = None,
    ) -> Handle:
        """A tensor that the caller gives.

        With `registered` it is the same tensor in every run, which peers of that team read and
        write where it lies.
        """
        return self._param(self._buffer(name, dtype, shape, "input", strides, registered))

    def output(
        self,
        name: str,
        dtype: DType | str,
        shape: Sequence[Dim],
        *,
        strides: Sequence[int] | None = None,
        registered: TeamOrName = None,
    ) -> Handle:
        """A tensor that a run fills and returns; `registered` as for inputs."""
        return self._param(self._buffer(name, dtype, shape, "output", strides, registered))

    def alloc(
        self,
        name: str,
        dtype: DType | str,
        shape: Sequence[Dim],
        *,
        symmetric: TeamOrName = None,
        strides: Sequence[int] | None = None,
        storage: str | None = None,
        offset: int = 0,
    ) -> Handle:
        """Memory of the Executor's; with `symmetric`, present on every rank of that team."""
        kind = "local" if symmetric is None else "symmetric"
        placed = {"storage": storage, "offset": offset}
        buffer = self._buffer(name, dtype, shape, kind, strides, symmetric, **placed)
        self.add(Alloc, buffer=buffer)
        return self.handle(buffer)

    def empty(
        self,
        name: str,
        dtype: DType | str,
        shape: Sequence[Dim],
        *,
        strides: Sequence[int] | None = None,
    ) -> Handle:
        """Memory that torch allocates in every run: the only kind that may be returned."""
        buffer = self._buffer(name, dtype, shape, "fresh", strides)
        self.add(Alloc, buffer=buffer)
        return self.handle(buffer)

    def fresh(
        self,
        name: str,
        dtype: DType | str,
        shape: Sequence[Dim],
        *,
        strides: Sequence[int] | None = None,
    ) -> Handle:
        """What a call will make itself: give it to one call's `out=`, then use it."""
        buffer = self._buffer(name, dtype, shape, "fresh", strides)
        self.pending[buffer.name] = buffer
        return self.handle(buffer)

    def returns(self, *results: object) -> None:
        """What a run returns, instead of the outputs: handles, numbers and None."""
        self.results = tuple(map(self.arg, results))

    def remark(self, pass_name: str, text: str, site: int | None = None) -> None:
        """A note that `explain` prints."""
        self.remarks.append(Remark(pass_name, text, site))

    def stream(self, name: str) -> AbstractContextManager[str]:
        """The ops inside run on that stream."""
        return self._holding("current_stream", name)

    def module(self, path: str) -> AbstractContextManager[str]:
        """The ops inside come from that module of a model."""
        return self._holding("current_module", path)

    def at_site(self, number: int | None) -> AbstractContextManager[int | None]:
        """The ops inside serve the site of that number."""
        return self._holding("current_site", number)

    def site(
        self, kind: str, module: str = "", **how: Unpack[SiteOptions]
    ) -> AbstractContextManager[int]:
        """Declares a site; the ops inside serve it. Gives its number."""
        number = max((site.id for site in self.sites), default=0) + 1
        self.sites.append(Site(id=number, kind=kind, module=module, **how))
        return self._holding("current_site", number)

    @contextmanager
    def region(self, name: str, *inputs: str) -> Generator[RegionBuilder]:
        """A group of aten calls that runs as one; `p.call(name, ...)` calls it."""
        region = RegionBuilder(name, inputs)
        yield region
        self.regions.append(Region(name, inputs, tuple(region.body), region.outputs))

    def _param(self, buffer: Buffer) -> Handle:
        self.params.append(buffer)
        return self.handle(buffer)

    def _buffer(
        self,
        name: str,
        dtype: DType | str,
        shape: Sequence[Dim],
        kind: str,
        strides: Sequence[int] | None,
        team: TeamOrName = None,
        **placed: Any,
    ) -> Buffer:
        if name in self.scope.buffers:
            raise ProgramError(f"buffer {name!r} is there twice: give the second another name")
        team_name = None if team is None else self.team_name(team)
        steps = None if strides is None else tuple(strides)
        return Buffer(name, element_type(dtype), tuple(shape), kind, team_name, steps, **placed)

    def add(self, kind: type[Op], /, **given: object) -> None:
        """An op of any kind; its fields may be handles, teams and tables.

        A team may be left out where the peer names it, or where there is only one.
        """
        for field in form_of(kind).fields:
            if field.role == "team":
                given[field.name] = self.team_name(
                    given.get(field.name), given.get(field.implied_by)
                )
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
        kind: str,
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

    def _collective(self, kind: str, src: Viewed, dst: Viewed, how: CollectiveOptions) -> None:
        row = KINDS[kind]
        if row.reduces:
            how.setdefault("reduce", "sum")
        if row.rooted:
            how.setdefault("root", 0)
        self.collective(kind, src, dst, **how)


class RegionBuilder:
    """The body of a region: `x, y = r.inputs`, `t = r.call("aten.mul.Tensor", x, y)`."""

    def __init__(self, name: str, inputs: tuple[str, ...]) -> None:
        self.name = name
        self.inputs = tuple(map(Name, inputs))
        self.body: list[Node] = []
        self.outputs: tuple[str, ...] = ()

    def call(self, fn: str, *args: Arg, **kwargs: Arg) -> Name:
        """A call with one result."""
        return self.calls(1, fn, *args, **kwargs)[0]

    def calls(self, results: int, fn: str, *args: Arg, **kwargs: Arg) -> tuple[Name, ...]:
        """A call with several results."""
        first = sum(len(node.outs) for node in self.body)
        outs = tuple(f"t{first + i}" for i in range(results))
        self.body.append(Node(outs, fn, args, tuple(kwargs.items())))
        return tuple(map(Name, outs))

    def returns(self, *values: Name) -> None:
        """What the region gives."""
        self.outputs = tuple(value.name for value in values)


def _public(kind: type) -> list[str]:
    return [name for name in dir(kind) if not name.startswith("_")]


def _plain(value: Any) -> Any:
    """A value as an op has it."""
    if isinstance(value, Handle):
        return value.ir
    return value.name if isinstance(value, Table) else value


_INSIDE = frozenset({__name__, "contextlib"})
"""Modules whose frames are passed over when an op is told which line wrote it."""
