"""Seeing what was compiled: the Programs behind a model, and what becomes of each communication.

    with interlace.frontend.capture() as captured:
        model(x).sum().backward()
    for program in captured.programs:
        print(program)

Only what is compiled inside the block is seen; call `torch.compiler.reset()` first to see it all.
The text has strategy, gain, reason, and what it was chosen from:

>>> print(explain(compiled.bound))
forward: 2 communications, sound
  1  all_gather_matmul      layers.0.mlp.up    peer/get x4   0.314 ms  1.31x   ...
       serial 0.412 ms (measured 0.420), peer/get 0.314 ms (measured 0.331), ring 0.352 ms

A site shows its strategy, its predicted time, the gain over serial, and, where a run was recorded,
what it took there, from the first start of its computation and communication to the last end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from interlace.cost import Timeline
from interlace.cost.choose import Estimate
from interlace.frontend.binding import Bound
from interlace.frontend.compiled_graph import CompiledGraph
from interlace.frontend.importing.exchanges import communications
from interlace.frontend.importing.nodes import location
from interlace.ir import Program, Site, communication
from interlace.passes.strategies.choose import candidates
from interlace.trace.figures import site_figures


def explain(bound: Iterable[Bound], why: bool = False) -> str:
    """The sites and remarks of bound Programs, one Program after another; `why` leaves only the
    sites that stay serial."""
    return "\n\n".join(_one(each, why) for each in bound)


def explain_graphs(graphs: Iterable[CompiledGraph], why: bool = False) -> str:
    """The same of compiled graphs, with what becomes of those that have no Program."""
    texts = [
        _unbound(graph) if graph.unscheduled or not graph.bound else explain(graph.bound, why)
        for graph in graphs
    ]
    return "\n\n".join(texts)


def explain_program(program: Program, why: bool = False, measured: Timeline | None = None) -> str:
    """The sites and remarks of a Program; without sites, how much communication it has."""
    if not program.sites and (found := communication.told(program)):
        return "\n".join(
            [f"{program.name}: it states no sites; it has {found}", *_sites(program, why, measured)]
        )
    return "\n".join([_head(program.name, program.sites, why), *_sites(program, why, measured)])


def _one(bound: Bound, why: bool) -> str:
    program = bound.program
    verdict = "sound" if bound.report.sound else "unsound"
    sizes = f" where {bound.executor.sizes}" if bound.executor.sizes.sizes else ""
    found = candidates(bound.serial, bound.executor.options, bound.machine)
    lines = _sites(program, why, bound.measured, found)
    lines += [f"  sizes: {told}" for told in bound.about_sizes]
    return "\n".join([f"{_head(bound.kind, program.sites, why)}, {verdict}{sizes}", *lines])


def _sites(
    program: Program,
    why: bool,
    measured: Timeline | None,
    found: Mapping[int, Sequence[Estimate]] | None = None,
) -> list[str]:
    lines: list[str] = []
    sites = [site for site in program.sites if not why or site.strategy == "serial"]
    for site, row in zip(sites, _columns([_row(s, measured) for s in sites]), strict=True):
        lines.append(row)
        if found and site.id in found:
            lines.append(f"       {', '.join(map(told, found[site.id]))}")
    ids = {site.id for site in sites}
    for remark in program.remarks:
        if why and remark.site not in ids and remark.pass_name != "frontend":
            continue
        place = "" if remark.site is None else f" (site {remark.site})"
        lines.append(f"  {remark.pass_name}{place}: {remark.text}")
    return lines


def _unbound(graph: CompiledGraph) -> str:
    """Describes a graph that has no Program, or none yet."""
    nodes = communications(graph.graph)
    rows = [
        (str(i), kind, str(location(node)) or "-", "serial" if graph.unscheduled else "")
        for i, node in enumerate(nodes, 1)
        for _, kind, _ in [str(node.target).split(".")]
    ]
    state = graph.unscheduled or "not bound now: it is when it is called, or was and was freed"
    return "\n".join([f"{_count(graph.kind, len(rows))}, {state}", *_columns(rows)])


def _head(kind: str, sites: Sequence[Site], why: bool) -> str:
    serial = sum(site.strategy == "serial" for site in sites)
    return _count(kind, len(sites)) + (f", {serial} serial" if why else "")


def _count(kind: str, count: int) -> str:
    return f"{kind}: {count} communication{'' if count == 1 else 's'}"


def told(estimate: Estimate) -> str:
    """A candidate and its times, predicted and measured."""
    text = f"{estimate.label} {estimate.predicted_ms:.3f} ms"
    if estimate.measured_ms is not None:
        return f"{text} (measured {estimate.measured_ms:.3f})"
    return text


def _row(site: Site, measured: Timeline | None) -> tuple[str, ...]:
    how = f"{site.strategy}/{site.protocol}" if site.protocol else site.strategy
    how = f"{how} x{site.chunks}" if site.chunks else how
    predicted = gain = took = ""
    if site.serial_ms and site.predicted_ms:
        predicted = f"{site.predicted_ms:.3f} ms"
        gain = f"{site.serial_ms / site.predicted_ms:.2f}x"
    if measured is not None:
        ranks = site_figures(measured.of(site=site.id)).values()
        took = f"took {max((rank.took_s for rank in ranks), default=0.0) * 1e3:.3f} ms"
    return str(site.id), site.kind, site.module or "-", how, predicted, gain, took, site.reason


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True) if w).rstrip()
        for row in rows
    ]


@dataclass(slots=True)
class Captured:
    """The compiled graphs, in the order in which they were compiled."""

    graphs: list[CompiledGraph] = field(default_factory=list)

    @property
    def bound(self) -> list[Bound]:
        """Every bound Program with its proof and its Executor. What runs as traced has none."""
        return [bound for graph in self.graphs for bound in graph.bound]

    @property
    def programs(self) -> list[Program]:
        """The overlapped Programs: forward and backward of each graph."""
        return [bound.program for bound in self.bound]

    def explain(self) -> str:
        """Each communication with its strategy, the reason and what is predicted and measured."""
        return explain_graphs(self.graphs)


_CAPTURING: ContextVar[tuple[Captured, ...]] = ContextVar("interlace_capturing", default=())


@contextmanager
def capture() -> Iterator[Captured]:
    """Collects what the `interlace` backend compiles inside the block."""
    captured = Captured()
    token = _CAPTURING.set((*_CAPTURING.get(), captured))
    try:
        yield captured
    finally:
        _CAPTURING.reset(token)


def notice(graph: CompiledGraph) -> None:
    """Tells every `capture` around about a compiled graph."""
    for captured in _CAPTURING.get():
        captured.graphs.append(graph)
