"""Which strategy a site gets: the one asked for, or the one that is expected to be fastest.

What was measured on the machine goes before what is predicted (`estimate.py`), and serial stays
where the gain is not certain. All this reads sizes of the site's buffers and the machine's figures,
nothing of one rank, so that all ranks choose alike; of equals the first row of the table counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from interlace.cost import Machine, default_machine
from interlace.ir import Arg, Call, Collective, Op, Site, View
from interlace.passes.sites.recognise import GatherSite, MatmulSite
from interlace.passes.sites.values import Dataflow
from interlace.passes.strategies.estimate import Estimate, estimate
from interlace.passes.strategies.pieces import DEFAULT_SLICES, collective_of, slices
from interlace.passes.strategies.write import refusal
from interlace.strategies import STRATEGIES, Strategy

MARGIN = 0.97
"""A strategy must be predicted to take less than this part of the serial time,"""
SURE = 0.98
"""or, where both were measured, less than this;"""
GUESS = 0.9
"""and where it alone was not measured, less than this part of the best that was."""


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

    def asked(self, values: Dataflow, site: MatmulSite, row: Strategy) -> Choice:
        """The strategy that was asked for."""
        count = self._count(values, site, row, self.chunks)
        if self.machine is None:
            return Choice(row, count, "asked for")
        key = row, _signature(values, site)
        if key not in self.known:
            serial = estimate(self._machine, values, site, None, 0)
            took = estimate(self._machine, values, site, row, self.chunks)
            expected = serial.expected_ms, took.expected_ms
            self.known[key] = Choice(row, count, "asked for", "", *expected)
        return self.known[key]

    def fastest(self, values: Dataflow, site: MatmulSite) -> Choice:
        """The strategy that is expected to be fastest."""
        key = _signature(values, site)
        if key not in self.known:
            self.known[key] = self._fastest(values, site)
        return self.known[key]

    def candidates(self, values: Dataflow, site: MatmulSite) -> tuple[Estimate, ...]:
        """Every strategy that can serve a site, serial first."""
        rows = self._candidates(values, site)
        others = [estimate(self._machine, values, site, row, chunks) for row, chunks in rows]
        return estimate(self._machine, values, site, None, 0), *others

    def _fastest(self, values: Dataflow, site: MatmulSite) -> Choice:
        found = self.candidates(values, site)
        serial, name = found[0], self._machine.name
        if len(found) == 1:
            reason = "no strategy can serve it"
            return Choice(reason=reason, serial_ms=serial.expected_ms)
        best, sure = pick(found, self._machine.doubt_s * 1e3)
        if best.row is None:
            fastest = min(found[1:], key=lambda e: e.expected_ms)
            told = sure and fastest.measured_ms is not None
            gain = f"was measured to gain less than {1 - SURE:.0%}"
            if not told:
                least = 1 - (MARGIN if serial.measured_ms is None else GUESS)
                gain = f"is predicted to gain less than {least:.0%}"
            took = serial.expected_ms
            reason = f"{fastest.label}, the fastest, {gain} ({name})"
            return Choice(None, 0, reason, "", took, took)
        count = self._count(values, site, best.row, best.chunks)
        told = "measured" if sure else "predicted"
        idle, _ = pick(found, self._machine.doubt_s * 1e3, by=lambda e: e.expected_ms)
        reason = f"{told} fastest ({name})"
        if idle is not best:
            reason = f"{told} about as fast as {idle.label}, with less work of the host ({name})"
        return Choice(best.row, count, reason, "", serial.expected_ms, best.expected_ms)

    def _candidates(self, values: Dataflow, site: MatmulSite) -> Iterator[tuple[Strategy, int]]:
        gpu = self._machine.device != "cpu"
        for row in STRATEGIES.values():
            # On GPUs `put`, which must be asked for, leaves `get` out; `get` goes without saying.
            other = row.name == "peer" and row.transport != self.protocol
            if not _serves(row, self._machine) or (other and (not gpu or self.protocol == "put")):
                continue
            if refusal(values, site, row):
                continue
            counts = {self.chunks} if self.chunks else {2, DEFAULT_SLICES}
            for chunks in sorted(counts) if row.cut == "slices" else (0,):
                yield row, chunks

    def _count(self, values: Dataflow, site: MatmulSite, row: Strategy, chunks: int) -> int:
        if row.cut == "slices":
            return slices(values, site, chunks)
        if row.cut == "whole":
            return 0
        return values.program.team(collective_of(values, site).team).size

    @property
    def _machine(self) -> Machine:
        return self.machine or default_machine("cpu")


def pick(
    found: Sequence[Estimate],
    doubt_ms: float = 0.0,
    by: Callable[[Estimate], float] = lambda estimate: estimate.busy_ms,
) -> tuple[Estimate, bool]:
    """Which of some estimates (serial first) to take, and whether measurements alone say so.

    Measured ones are compared with one another first. What is only predicted must gain more, since
    a prediction errs: by `MARGIN` or `GUESS`, and by more than `doubt_ms`. Of those that gain
    enough the least by `by` is taken.
    """
    best = serial = found[0]
    sure = serial.measured_ms is not None
    if sure:
        for other in found[1:]:
            gains = other.expected_ms < SURE * serial.expected_ms
            if other.measured_ms is not None and gains and (best is serial or by(other) < by(best)):
                best = other
    known, margin, measured = best, GUESS if sure else MARGIN, sure
    for other in found[1:]:
        if measured and other.measured_ms is not None:
            continue
        certain = known.expected_ms - other.expected_ms >= doubt_ms
        gains = other.expected_ms < margin * known.expected_ms
        if certain and gains and (best is serial or by(other) < by(best)):
            best, sure = other, False
    return best, sure


def _serves(row: Strategy, machine: Machine) -> bool:
    """Whether a strategy is worth a look on a machine."""
    gpu, reach = machine.device != "cpu", "peer" in dict(machine.links)
    if row.kernel and not gpu:
        return False
    if (row.peers and not reach) or (row.name == "fused" and not machine.kernels):
        return False
    return not (row.outdone and gpu and reach)


def _signature(values: Dataflow, site: MatmulSite) -> object:
    """What the predicted times depend on, and whether a strategy can serve: all that the ops say.

    Of buffers, which are the same and how what is used of them lies.
    """
    numbers: dict[str, int] = {}

    def plain(arg: Arg) -> object:
        if isinstance(arg, View):
            return numbers.setdefault(arg.buffer, len(numbers)), values.box(arg)
        return tuple(map(plain, arg)) if isinstance(arg, tuple) else (type(arg), arg)

    def describe(op: Op) -> object:
        touched = tuple(plain(access.view) for access in (*op.reads(), *op.writes()))
        match op:
            case Call():
                options = tuple((name, plain(arg)) for name, arg in op.kwargs)
                return op.fn, tuple(map(plain, op.args)), options, touched
            case Collective():
                facts = op.kind, op.team, op.reduce, op.root, op.splits, op.backend
                return *facts, touched
            case _:
                return type(op).__name__, touched

    whole = site.whole if isinstance(site, GatherSite) else len(site.cone.used)
    ops = tuple(describe(values.program.ops[i]) for i in site.ops)
    return type(site).__name__, site.layout, whole, ops
