"""What a site is expected to take with a strategy: measured, or predicted and corrected.

    estimate = Estimator(machine).of(values, site, row, chunks)
    estimate.label, estimate.predicted_ms, estimate.measured_ms, estimate.expected_ms
    ('peer/put', 0.41, None, 0.44)

A prediction plays the site alone: its ops become a Program of their own, scheduled and simulated as
the whole will be. Where this very site was measured (the machine's table of sites), that counts; a
site that only has more to it, or other sizes, takes its prediction times what was measured over
predicted nearby.

Note [A busy host]
    A host is half as fast in some minutes as in others, and a strategy that takes as long as its
    host does is then as slow, where one with less to issue is not. So of two strategies that gain
    about as much the one that leaves the host more time is taken: they are compared as if issuing
    them took `BUSY` times as long (and it takes no more than this run does, or that of a smaller
    site). Much more than 1.25 would give up what overlap gains where the host is not busy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from interlace.cost import Machine, SiteKey, run_issue_seconds, simulate
from interlace.cost.op_times import matmul_shape
from interlace.cost.site_times import correction, doubt, host_at_most, measured
from interlace.ir import Call, Op, Program, Site
from interlace.passes.choosing.alone import isolated
from interlace.passes.fuse import Fuse
from interlace.passes.insert_sync import with_events
from interlace.passes.order.dependencies import dependencies
from interlace.passes.schedule import Schedule
from interlace.passes.sites.cone import result_of
from interlace.passes.sites.recognise import GatherSite, ScatterSite, site_kind
from interlace.passes.sites.values import Values
from interlace.passes.strategies.pieces import collective_of
from interlace.passes.strategies.table import Strategy
from interlace.passes.strategies.write import write
from interlace.passes.take_turns import TakeTurns

SERIAL = "serial"
BUSY = 1.25
"""Note [A busy host]."""
ALONE = 1
"""The number of a site in the Program that holds it alone."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A strategy for a site, and what it is expected to take."""

    label: str
    row: Strategy | None
    chunks: int
    predicted_ms: float
    """By the model alone."""
    measured_ms: float | None
    """This very site, where the calibration has it."""
    expected_ms: float
    """What to go by,"""
    busy_ms: float
    """and what strategies are compared by: Note [A busy host]."""


@dataclass(frozen=True, slots=True)
class Estimator:
    """Estimates on one machine."""

    machine: Machine

    def of(
        self,
        values: Values,
        site: GatherSite | ScatterSite,
        row: Strategy | None,
        chunks: int = 0,
    ) -> Estimate:
        """The estimate of a strategy; None: serial."""
        label = label_of(row, chunks)
        predicted, host = self._seconds(values, site, row, chunks)
        key, table = site_key(values, site, self.machine.captured), self.machine.sites
        known = measured(table, key, label) if _plain(values, site) else None
        # One of which nothing was measured is taken to be as far off as the worst of the others.
        told = correction(table, key, label, predicted)
        ratio = told or doubt(table, key, predicted) or 1.0
        expected = predicted * ratio if known is None else known
        busy = max(expected, BUSY * min(host_at_most(table, key, label, host), expected))
        known_ms = None if known is None else known * 1e3
        times = predicted * 1e3, known_ms, expected * 1e3, busy * 1e3
        return Estimate(label, row, chunks, *times)

    def _seconds(
        self,
        values: Values,
        site: GatherSite | ScatterSite,
        row: Strategy | None,
        chunks: int,
    ) -> tuple[float, float]:
        names, op = values.names.copy(), collective_of(values, site)
        if row is None or row.cut == "whole":
            backend = op.backend if row is None else "peer"
            serial = [values.program.ops[i] for i in site.ops]
            ops: Sequence[Op] = [
                dataclasses.replace(item, backend=backend) if item is op else item
                for item in serial
            ]
        else:
            ops = write(values, names, site, row, chunks, ALONE)
        alone = isolated(values, op, ops, names)
        if row is not None:
            kind = site_kind(op.kind, site)
            alone = alone.replace(sites=(Site(id=ALONE, kind=kind, strategy=row.name),))
        return seconds_alone(alone, self.machine)


def seconds_alone(program: Program, machine: Machine) -> tuple[float, float]:
    """How long a Program takes, run after run, which is as long as its ranks do, or as its host;
    and how long the host takes, as far as is known.

    A machine that does not tell what issuing costs is taken from idle. Turns cost what issuing
    them does, and gain nothing: the ranks of the simulation are in step, and never meet.
    """
    played, before = Schedule().played(program)
    ordered = with_events(played, before or dependencies(played, listed=False))
    timed = Fuse().run(TakeTurns().run(ordered))
    if not machine.issue:
        return simulate(timed, machine).makespan_s, 0.0
    device = simulate(timed, machine.replayed).makespan_s
    host = run_issue_seconds(timed, machine)
    return max(device, host), host


def label_of(row: Strategy | None, chunks: int) -> str:
    """A strategy as measured sites and `explain` call it: `peer/put`, `pipeline x4`."""
    if row is None:
        return SERIAL
    name = f"{row.name}/{row.transport}" if row.name == "peer" else row.name
    return f"{name} x{chunks}" if row.cut == "slices" else name


def site_key(values: Values, site: GatherSite | ScatterSite, graph: bool = False) -> SiteKey:
    """The site as measurements know it: M, K and N are those of a rank's matmuls together."""
    op = collective_of(values, site)
    assert op.dst is not None
    world = values.program.team(op.team).size
    if isinstance(site, GatherSite):
        outs = (result_of(values.program.ops[i]) for i in site.matmuls)
        columns = sum(values.box(out).sizes[-1] for out in outs if out is not None)
        sizes = site.layout.total, site.width, columns
    else:
        calls = [values.program.ops[i] for i in site.cone.ops]
        shapes = [matmul_shape(c, values.box) for c in calls if isinstance(c, Call)]
        inner = sum(shape.inner for shape in shapes if shape is not None)
        sizes = site.cone.rows, inner, site.cone.width
    m, k, n = (max(1, size) for size in sizes)
    dtype = str(values.box(op.dst).dtype)
    kind = site_kind(op.kind, site)
    return SiteKey(kind=kind, dtype=dtype, m=m, k=k, n=n, world=world, graph=graph)


def _plain(values: Values, site: GatherSite | ScatterSite) -> bool:
    """Whether it is one matmul, of one matrix, and its communication, as sites are measured."""
    if isinstance(site, GatherSite):
        if len(site.matmuls) != 1 or site.whole:
            return False
        (matmul,) = site.matmuls
    elif len(site.cone.ops) != 1:
        return False
    else:
        (matmul,) = site.cone.ops
    call = values.program.ops[matmul]
    shape = matmul_shape(call, values.box) if isinstance(call, Call) else None
    return shape is not None and shape.batch == 1
