"""The strategy of a site: the one requested, or the one that is expected to be fastest.

A prediction schedules and simulates the site alone; `cost/choose.py` compares. All this reads sizes
and the machine's figures, nothing of one rank, so that all ranks choose alike.

    >>> estimate(machine, values, site, row, chunks).predicted_ms
    0.44
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from interlace.cost import Machine, SiteKey, default_machine, run_after_run
from interlace.cost.choose import MARGIN, Estimate, pick
from interlace.cost.op_times import matmul_shape
from interlace.ir import (
    Buffer,
    Collective,
    Op,
    Program,
    Site,
    View,
)
from interlace.ir.kernels import FLOAT8
from interlace.ir.overlap import teams_of
from interlace.ir.program import map_values
from interlace.ir.sizes import at_hand, supposing
from interlace.passes.dependencies import dependencies
from interlace.passes.fuse import Fuse
from interlace.passes.insert_sync import with_events
from interlace.passes.rewrite import tagged
from interlace.passes.schedule import Schedule
from interlace.passes.sites.cone import result_of
from interlace.passes.sites.recognise import GatherSite, MatmulSite, site_kind
from interlace.passes.sites.values import Dataflow
from interlace.passes.strategies.emitter import Names
from interlace.passes.strategies.pieces import DEFAULT_SLICES, parts
from interlace.passes.strategies.whole import lifted
from interlace.passes.strategies.write import refusal, write
from interlace.passes.take_turns import TakeTurns
from interlace.strategies import STRATEGIES, Strategy

SERIAL = "serial"
BE = {"measured": "was", "predicted": "is"}
ALONE = 1
"""The number of a site in the Program that holds it alone."""


def estimate(
    machine: Machine, values: Dataflow, site: MatmulSite, row: Strategy | None, chunks: int = 0
) -> Estimate:
    """The estimate of a strategy on a machine; None: serial."""
    label = label_of(row, chunks)
    predicted = seconds_alone(_alone(values, site, row, chunks, machine), machine)
    spread = values.program.team(site.op.team).hosts is not None
    known = None
    if _plain(values, site) and not spread:  # sites are measured on one host
        known = machine.measured_site(site_key(values, site, machine.captured), label)
    return Estimate(label, row, chunks, predicted * 1e3, None if known is None else known * 1e3)


def _alone(
    values: Dataflow, site: MatmulSite, row: Strategy | None, chunks: int, machine: Machine
) -> Program:
    """A site with a strategy as a Program of its own."""
    names, op = values.names.copy(), site.op
    if row is None:
        return isolated(values, op, [values.program.ops[i] for i in site.ops])
    ops, slots = write(values, names, site, row, chunks, ALONE, machine.device == "cuda")
    alone = isolated(values, op, lifted(ops, slots), names)
    marked = Site(id=ALONE, kind=site_kind(op.kind, site), strategy=row.name)
    return alone.replace(sites=(marked,))


def seconds_alone(program: Program, machine: Machine) -> float:
    """The time of a site's Program once it is scheduled.

    Turns cost what issuing them does, and gain nothing: the ranks of the simulation are in step,
    and never meet.
    """
    played, before = Schedule().played(program)
    ordered = with_events(played, before or dependencies(played, listed=False))
    return timed(TakeTurns().run(ordered), machine)[1]


def timed(program: Program, machine: Machine) -> tuple[Program, float]:
    """A scheduled Program with its chunks brought together, and the seconds that it takes, run
    after run: as long as its ranks take, or as its host does."""
    program = Fuse().run(program)
    timeline, host = run_after_run(program, machine, fold=True)
    return program, max(timeline.makespan_s, host)


def label_of(row: Strategy | None, chunks: int = 0) -> str:
    """A strategy as measured sites and `explain` call it: `peer/put`, `pipeline x4`."""
    if row is None:
        return SERIAL
    return f"{row.label} x{chunks}" if row.sliced else row.label


def site_key(values: Dataflow, site: MatmulSite, graph: bool = False) -> SiteKey:
    """The site as measurements know it: M, K and N are those of a rank's matmuls together, and of
    FP8 the type and the numbers of packed rows."""
    op = site.op
    assert op.dst is not None
    world = values.program.team(op.team).size
    found = [matmul_shape(values.calls[i], values.box) for i in site.calls]
    shapes = [shape for shape in found if shape is not None]
    packed = next((shape for shape in shapes if shape.dtype in FLOAT8), None)
    if isinstance(site, GatherSite):
        outs = (result_of(values.calls[i]) for i in site.calls)
        columns = sum(values.box(out).sizes[-1] for out in outs if out is not None)
        sizes = site.layout.total, packed.inner if packed else site.width, columns
    else:
        sizes = site.cone.rows, sum(shape.inner for shape in shapes), site.cone.width
    m, k, n = (max(1, at_hand(size)) for size in sizes)
    dtype = str(packed.dtype if packed else values.box(op.dst).dtype)
    kind = site_kind(op.kind, site)
    return SiteKey(kind=kind, dtype=dtype, m=m, k=k, n=n, world=world, graph=graph)


def _plain(values: Dataflow, site: MatmulSite) -> bool:
    """True if it is one matmul, of one matrix, and its communication, as sites are measured."""
    if len(site.calls) != 1 or (isinstance(site, GatherSite) and site.whole):
        return False
    shape = matmul_shape(values.calls[site.calls[0]], values.box)
    return shape is not None and shape.batch == 1


# a site alone: its ops as a Program of their own


def isolated(
    values: Dataflow, collective: Collective, ops: Sequence[Op], names: Names | None = None
) -> Program:
    """The ops of a site as a Program of its own: what they only read are its inputs."""
    program, team = values.program, values.program.team(collective.team)
    declared = Program(teams=program.teams, ops=tuple(ops)).buffers()
    views = [access.view for op in ops for access in (*op.reads(), *op.writes())]
    params: list[Buffer] = []
    for name in dict.fromkeys(view.buffer for view in views):
        if name not in declared:
            buffer = values.buffers[name]
            kind = "output" if buffer.kind == "output" else "input"
            params.append(dataclasses.replace(buffer, kind=kind))
    tables = tuple(names.tables) if names is not None else program.tables
    alone = program.replace(tables=tables, params=tuple(params), ops=tuple(ops), results=())
    alone = alone.replace(sites=(), remarks=())
    teams = {meets[0] for op in ops if (meets := op.ordering().meets) is not None}
    if teams | teams_of(alone, views) <= {team.name}:
        mine = tuple(table for table in tables if table.team == team.name)
        lone = dataclasses.replace(team, groups=None)
        return alone.replace(teams=(lone,), tables=mine, ranks=None)
    return alone


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
            protocol=row.protocol if row is not None else None,
            chunks=self.chunks or None,
            reason=self.reason,
            serial_ms=self.serial_ms,
            predicted_ms=self.predicted_ms,
        )


@dataclass(slots=True)
class Chooser:
    """Chooses; sites that are alike get the same answer from one simulation."""

    machine: Machine | None
    chunks: int
    known: dict[object, Choice] = field(default_factory=dict[object, Choice])

    def choose(self, values: Dataflow, site: MatmulSite, rows: Sequence[Strategy] = ()) -> Choice:
        """The strategy that is expected to be fastest, or of those requested the fastest row."""
        if rows and self.machine is None:
            return Choice(rows[0], parts(values, site, rows[0], self.chunks), "requested")
        key = tuple(rows), _signature(values, site)
        if key not in self.known:
            self.known[key] = self._choose(values, site, rows)
        return self.known[key]

    def candidates(
        self, values: Dataflow, site: MatmulSite, rows: Sequence[Strategy] = ()
    ) -> tuple[Estimate, ...]:
        """Serial, and every strategy that can serve a site, or those requested."""
        gpu = self._machine.device != "cpu"
        asked = [row for row in rows if gpu or not row.on_gpus] or rows
        served = [(row, self.chunks) for row in asked] or self._candidates(values, site)
        others = [estimate(self._machine, values, site, row, chunks) for row, chunks in served]
        return estimate(self._machine, values, site, None, 0), *others

    def _choose(self, values: Dataflow, site: MatmulSite, rows: Sequence[Strategy]) -> Choice:
        with supposing():
            candidates = self.candidates(values, site, rows)
        found, name = pick(candidates), self._machine.name
        best, serial_ms = found.best, found.serial_ms
        if best.row is None:
            return Choice(reason="no strategy can serve it", serial_ms=serial_ms)
        if not rows:
            if not found.gains:
                gain = f"{found.source} to gain less than {1 - MARGIN:.0%}"
                text = f"{best.label}, the fastest, {BE[found.source]} {gain} ({name})"
                return Choice(None, 0, text, "", serial_ms, serial_ms)
            why = refusal(values, site, best.row)  # for the whole class
            assert not why
        count = parts(values, site, best.row, best.chunks)
        reason = "requested" if rows else f"{found.source} fastest ({name})"
        return Choice(best.row, count, reason, "", serial_ms, found.best_ms)

    def _candidates(self, values: Dataflow, site: MatmulSite) -> Iterator[tuple[Strategy, int]]:
        gpu = self._machine.device != "cpu"
        apart = values.program.team(site.op.team).hosts is not None
        reach = "peer" in dict(self._machine.links)
        for row in STRATEGIES.values():
            outdone = row.outdone and gpu and reach and not apart
            if row.amid or outdone or (row.peers and not reach):
                continue
            if (row.on_gpus or row.kernel) and not gpu:
                continue
            if refusal(values, site, row, self._machine):
                continue
            counts = {self.chunks}
            if not self.chunks and row.sliced:
                counts = {2, DEFAULT_SLICES, *([2 * DEFAULT_SLICES] if apart else ())}
            for chunks in sorted(counts):
                yield row, chunks

    @property
    def _machine(self) -> Machine:
        return self.machine or default_machine("cpu")


def _signature(values: Dataflow, site: MatmulSite) -> object:
    """All facts of a site's ops that decide the predicted times and whether a strategy can serve.

    Of buffers it holds which are the same, and the layout of the parts that are used.
    """
    numbers: dict[str, int] = {}

    def fact(value: object) -> object:
        match value:
            case Buffer():
                return fact(View(value.name))
            case View():
                return numbers.setdefault(value.buffer, len(numbers)), values.box(value)
            case _:
                return type(value), value

    ops = [map_values(tagged(values.program.ops[i], site=None), fact) for i in site.ops]
    whole = site.whole if isinstance(site, GatherSite) else len(site.cone.used)
    return type(site).__name__, site.layout, whole, tuple(ops)
