"""Which strategy a site gets: the one asked for, or the one with the shortest predicted time.

A prediction plays the site alone: its ops become a Program of their own, scheduled and simulated as
the whole will be. It reads sizes of the site's buffers and the machine's figures, nothing of one
rank, so that all ranks choose alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from interlace.cost import Machine, default_machine, simulate
from interlace.ir import (
    Alloc,
    Buffer,
    Call,
    Collective,
    Dim,
    Op,
    Program,
    RankIndex,
    Site,
    Team,
    View,
    map_views,
)
from interlace.ir.types import TableEntry
from interlace.passes.emitter import Names
from interlace.passes.insert_sync import InsertSync
from interlace.passes.recognise import GatherSite, ScatterSite
from interlace.passes.schedule import Schedule
from interlace.passes.strategies import STRATEGIES, Strategy
from interlace.passes.values import Values
from interlace.passes.write import DEFAULT_SLICES, refusal, slices, write

MARGIN = 0.97
"""A strategy must be predicted to take less than this part of the serial time."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A strategy (None: serial), and why."""

    row: Strategy | None = None
    chunks: int = 0
    reason: str = ""
    remark: str = ""
    serial_ms: float | None = None
    predicted_ms: float | None = None

    def on(self, site: Site) -> Site:
        """The site with this choice."""
        row = self.row
        return dataclasses.replace(
            site,
            strategy=row.name if row is not None else "serial",
            protocol=row.transport if row is not None and row.name == "peer" else None,
            chunks=self.chunks or None,
            reason=self.reason,
            serial_ms=self.serial_ms,
            predicted_ms=self.predicted_ms,
        )


@dataclass(slots=True)
class Chooser:
    """Chooses; sites that are alike get the same answer from one simulation."""

    machine: Machine | None
    protocol: str
    chunks: int
    known: dict[object, Choice] = dataclasses.field(default_factory=dict[object, Choice])

    def asked(self, values: Values, site: GatherSite | ScatterSite, row: Strategy) -> Choice:
        """The strategy that was asked for."""
        count = self._count(values, site, row, self.chunks)
        if self.machine is None:
            return Choice(row, count, "asked for")
        key = row, _signature(values, site)
        if key not in self.known:
            serial, took = self._serial(values, site), self._with(values, site, row, self.chunks)
            self.known[key] = Choice(row, count, "asked for", "", serial, took)
        return self.known[key]

    def fastest(self, values: Values, site: GatherSite | ScatterSite) -> Choice:
        """The strategy with the shortest predicted time."""
        key = _signature(values, site)
        if key not in self.known:
            self.known[key] = self._fastest(values, site)
        return self.known[key]

    def _fastest(self, values: Values, site: GatherSite | ScatterSite) -> Choice:
        machine, serial = self._machine, self._serial(values, site)
        best: tuple[float, Strategy, int] | None = None
        for row, chunks in self._candidates(values, site):
            took = self._with(values, site, row, chunks)
            if best is None or took < best[0]:
                best = took, row, chunks
        if best is None:
            return Choice(reason="no strategy can serve it", serial_ms=serial)
        took, row, chunks = best
        if took >= MARGIN * serial:
            gain = f"{row.name}, the fastest, is predicted to gain less than {1 - MARGIN:.0%}"
            reason = f"{gain} ({machine.name})"
            return Choice(reason=reason, serial_ms=serial, predicted_ms=serial)
        count = self._count(values, site, row, chunks)
        return Choice(row, count, f"predicted fastest ({machine.name})", "", serial, took)

    def _candidates(
        self, values: Values, site: GatherSite | ScatterSite
    ) -> Iterator[tuple[Strategy, int]]:
        for row in STRATEGIES.values():
            if row.name == "peer" and row.transport != self.protocol:
                continue
            if refusal(values, site, row):
                continue
            counts = {self.chunks} if self.chunks else {2, DEFAULT_SLICES}
            for chunks in sorted(counts) if row.cut == "slices" else (0,):
                yield row, chunks

    def _count(
        self, values: Values, site: GatherSite | ScatterSite, row: Strategy, chunks: int
    ) -> int:
        if row.cut == "slices":
            return slices(values, site, chunks)
        return values.program.team(_collective(values, site).team).size

    @property
    def _machine(self) -> Machine:
        return self.machine or default_machine("cpu")

    def _serial(self, values: Values, site: GatherSite | ScatterSite) -> float:
        return self._ms(values, site, [values.program.ops[i] for i in site.ops], None)

    def _with(
        self, values: Values, site: GatherSite | ScatterSite, row: Strategy, chunks: int
    ) -> float:
        names = Names(values.program)
        return self._ms(values, site, write(values, names, site, row, chunks, None), names)

    def _ms(
        self,
        values: Values,
        site: GatherSite | ScatterSite,
        ops: Sequence[Op],
        names: Names | None,
    ) -> float:
        alone = isolated(values, _collective(values, site), ops, names)
        timed = InsertSync().run(Schedule().run(alone))
        return simulate(timed, self._machine).makespan_s * 1e3


def _collective(values: Values, site: GatherSite | ScatterSite) -> Collective:
    op = values.program.ops[site.collective]
    assert isinstance(op, Collective)
    return op


def _signature(values: Values, site: GatherSite | ScatterSite) -> object:
    """What the predicted times depend on."""

    def describe(op: Op) -> object:
        reads, writes = op.reads(), op.writes()
        boxes = tuple(values.box(access.view) for access in (*reads, *writes))
        match op:
            case Call(fn=fn):
                return fn, len(reads), boxes
            case Collective(kind=kind, team=team, splits=splits, backend=backend):
                return kind, team, splits, backend, boxes
            case _:
                return type(op).__name__, boxes

    whole = site.whole if isinstance(site, GatherSite) else len(site.cone.used)
    ops = tuple(describe(values.program.ops[i]) for i in site.ops)
    return type(site).__name__, site.layout, whole, ops


def isolated(
    values: Values, collective: Collective, ops: Sequence[Op], names: Names | None
) -> Program:
    """The ops of a site as a Program of all its ranks: what they only read are its inputs."""
    program, team = values.program, values.program.team(collective.team)
    ops = [_for_all(op, collective, team, program.rank) for op in ops]
    known = dict(values.buffers)
    made: set[str] = set()
    used: dict[str, None] = {}
    for op in ops:
        for buffer in _declared(op):
            made.add(buffer.name)
            known[buffer.name] = buffer
        used.update((access.view.buffer, None) for access in (*op.reads(), *op.writes()))
    params: list[Buffer] = []
    for name in used:
        if name not in made:
            kind = "output" if known[name].kind == "output" else "input"
            shape = _shape(known[name], collective, team, program.rank)
            params.append(dataclasses.replace(known[name], kind=kind, shape=shape))
    tables = tuple(names.tables) if names is not None else program.tables
    alone = Program(
        name=program.name,
        teams=program.teams,
        tables=tables,
        params=tuple(params),
        ops=tuple(ops),
        results=(),
        regions=program.regions,
        ranks=program.ranks,
    )
    if _teams_in(alone) <= {team.name}:
        mine = tuple(table for table in tables if table.team == team.name)
        alone = alone.replace(teams=(Team(team.name, team.size),), tables=mine, ranks=None)
    return alone


def _for_all(op: Op, collective: Collective, team: Team, rank: int | None) -> Op:
    if isinstance(op, Alloc):
        shape = _shape(op.buffer, collective, team, rank)
        return dataclasses.replace(op, buffer=dataclasses.replace(op.buffer, shape=shape))
    return op


def _shape(buffer: Buffer, collective: Collective, team: Team, rank: int | None) -> tuple[Dim, ...]:
    """A shape for all ranks: in one rank's own Program an uneven shard has that rank's size."""
    shard = collective.src if collective.kind == "all_gather" else collective.dst
    if rank is None or collective.splits is None or shard != View(buffer.name):
        return buffer.shape
    return (TableEntry(collective.splits, team.rank), *buffer.shape[1:])


def _declared(op: Op) -> tuple[Buffer, ...]:
    match op:
        case Alloc(buffer=buffer):
            return (buffer,)
        case Call(fresh=fresh):
            return fresh
        case _:
            return ()


def _teams_in(program: Program) -> set[str]:
    """The teams that sizes, views and collectives name."""
    teams = {op.team for op in program.ops if isinstance(op, Collective)}
    owners = {table.name: table.team for table in program.tables}
    for buffer in program.buffers().values():
        teams.update(owners[dim.table] for dim in buffer.shape if isinstance(dim, TableEntry))

    def look(view: View) -> View:
        for step in view.steps:
            for name in ("index", "start", "stop", "parts"):
                value = getattr(step, name, None)
                if isinstance(value, RankIndex):
                    teams.add(value.team)
                elif isinstance(value, TableEntry):
                    teams.add(owners[value.table])
                elif isinstance(value, str):
                    teams.add(owners[value])
        return view

    for op in program.ops:
        map_views(op, look)
    return teams
