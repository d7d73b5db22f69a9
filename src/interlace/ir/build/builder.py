"""The builder: a Program written by hand, in Python. Leaving the `with` block validates it.

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
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, TypedDict, Unpack

from interlace.errors import ProgramError
from interlace.ir.build.ops import (
    BuilderOps,
    ElementType,
    Handle,
    Scope,
    TeamOrName,
    element_type,
)
from interlace.ir.checks.validate import validate
from interlace.ir.ops import Alloc, Arg, Name
from interlace.ir.program import Node, Program, Region, Remark, Site
from interlace.ir.size_class import FIXED, NamedSize, SizeClass
from interlace.ir.sizes import Size, named
from interlace.ir.text.spelling import did_you_mean
from interlace.ir.types import Buffer, Dim, Table, Team


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
    """The strategy of a site, its times and the reason for it."""

    strategy: str
    protocol: str | None
    chunks: int | None
    reason: str
    serial_ms: float | None
    predicted_ms: float | None


class Builder(BuilderOps):
    """Collects the ops of one Program; `p.tp` is the team of that name."""

    def __init__(self, name: str, teams: tuple[Team, ...], ranks: tuple[int, ...] | None) -> None:
        super().__init__(teams, ranks)
        self.name = name
        self.sizes: SizeClass = FIXED
        """The named sizes, and which values of them the Program is for."""
        self.params: list[Buffer] = []
        self.regions: list[Region] = []
        self.sites: list[Site] = []
        self.remarks: list[Remark] = []
        self.results: tuple[Arg, ...] | None = None
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
                sizes=self.sizes,
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

    def size(self, name: str, value: int) -> Size:
        """A size that differs from run to run; decisions are made for `value`."""
        if name in self.sizes.values:
            raise ProgramError(f"size {name!r} is declared twice: give the second another name")
        self.sizes = SizeClass((*self.sizes.sizes, NamedSize(name, value)), self.sizes.facts)
        return named(name)

    def table(self, name: str, values: Sequence[int], team: TeamOrName = None) -> Table:
        """One integer for each rank of a team; `rows[p.tp.rank]` is this rank's."""
        table = Table(name, self.team_name(team), tuple(values))
        if name in self.scope.tables:
            raise ProgramError(f"table {name!r} is declared twice: give the second another name")
        self.scope.tables[name] = table
        return table

    def input(
        self,
        name: str,
        dtype: ElementType,
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
        dtype: ElementType,
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
        dtype: ElementType,
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
        dtype: ElementType,
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
        dtype: ElementType,
        shape: Sequence[Dim],
        *,
        strides: Sequence[int] | None = None,
    ) -> Handle:
        """A buffer that a call will make itself: give it to one call's `out=`, then use it."""
        buffer = self._buffer(name, dtype, shape, "fresh", strides)
        self.pending[buffer.name] = buffer
        return self.handle(buffer)

    def returns(self, *results: object) -> None:
        """Sets what a run returns instead of the outputs: handles, numbers and None."""
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
        """Declares a site; the ops inside serve it. Gives its number.

        `kind` says what is overlapped, such as "all_gather_matmul"; of a schedule by hand it may be
        any name. `module` is the path of the module in the model.
        """
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
        dtype: ElementType,
        shape: Sequence[Dim],
        kind: str,
        strides: Sequence[int] | None,
        team: TeamOrName = None,
        **placed: Any,
    ) -> Buffer:
        if name in self.scope.buffers:
            raise ProgramError(f"buffer {name!r} is declared twice: give the second another name")
        team_name = None if team is None else self.team_name(team)
        steps = None if strides is None else tuple(strides)
        return Buffer(name, element_type(dtype), tuple(shape), kind, team_name, steps, **placed)


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
        """Sets the values that the region returns."""
        self.outputs = tuple(value.name for value in values)


def _public(kind: type) -> list[str]:
    return [name for name in dir(kind) if not name.startswith("_")]
