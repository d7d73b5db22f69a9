"""Seeing what was compiled: the Programs behind a model, and what becomes of each communication.

    with interlace.frontend.capture() as captured:
        model(x).sum().backward()
    for program in captured.programs:
        print(program)

Only what is compiled inside the block is seen; call `torch.compiler.reset()` first to see it all.
The text has strategy, gain, reason, and what it was chosen from:

>>> print(explain(compiled.bound))
forward: 2 communications, sound
  1  all_gather_matmul      layers.0.mlp.up    peer/get x4   1.31x   ...
       serial 0.412 ms (measured 0.420), peer/get 0.314 ms (measured 0.331), ring 0.352 ms
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from interlace.frontend.binding import Bound
from interlace.frontend.compiled_graph import CompiledGraph
from interlace.frontend.importing.exchanges import communications
from interlace.frontend.importing.nodes import location
from interlace.ir import Program, Site
from interlace.passes.strategies.candidates import candidates
from interlace.passes.strategies.choose import Estimate


def explain(bound: Iterable[Bound]) -> str:
    """The sites and remarks of bound Programs, one Program after another."""
    return "\n\n".join(map(_one, bound))


def explain_graphs(graphs: Iterable[CompiledGraph]) -> str:
    """The same of compiled graphs, with what becomes of those that have no Program."""
    texts = [_unscheduled(graph) if graph.unscheduled else explain(graph.bound) for graph in graphs]
    return "\n\n".join(filter(None, texts))


def _one(bound: Bound) -> str:
    program = bound.program
    verdict = "sound" if bound.report.sound else "unsound"
    sizes = f" where {bound.executor.sizes}" if bound.executor.sizes.sizes else ""
    lines = [f"{_head(bound.kind, len(program.sites))}, {verdict}{sizes}"]
    found = candidates(bound.serial, bound.executor.options, bound.machine)
    rows = _columns([_row(site) for site in program.sites])
    for site, row in zip(program.sites, rows, strict=True):
        lines.append(row)
        if site.id in found:
            lines.append(f"       {', '.join(map(told, found[site.id]))}")
    for remark in program.remarks:
        place = "" if remark.site is None else f" (site {remark.site})"
        lines.append(f"  {remark.pass_name}{place}: {remark.text}")
    return "\n".join(lines)


def _unscheduled(graph: CompiledGraph) -> str:
    nodes = communications(graph.graph)
    rows = [
        (str(i), kind, str(location(node)) or "-", "serial")
        for i, node in enumerate(nodes, 1)
        for _, kind, _ in [str(node.target).split(".")]
    ]
    return "\n".join([f"{_head(graph.kind, len(rows))}, {graph.unscheduled}", *_columns(rows)])


def _head(kind: str, count: int) -> str:
    return f"{kind}: {count} communication{'' if count == 1 else 's'}"


def told(estimate: Estimate) -> str:
    """A candidate and its times: predicted, what the calibration makes of that, measured."""
    text = f"{estimate.label} {estimate.predicted_ms:.3f} ms"
    if estimate.measured_ms is not None:
        return f"{text} (measured {estimate.measured_ms:.3f})"
    if abs(estimate.expected_ms - estimate.predicted_ms) > 0.01 * estimate.predicted_ms:
        return f"{text} (by others measured {estimate.expected_ms:.3f})"
    return text


def _row(site: Site) -> tuple[str, ...]:
    how = f"{site.strategy}/{site.protocol}" if site.protocol else site.strategy
    how = f"{how} x{site.chunks}" if site.chunks else how
    gain = ""
    if site.serial_ms and site.predicted_ms:
        gain = f"{site.serial_ms / site.predicted_ms:.2f}x"
    return str(site.id), site.kind, site.module or "-", how, gain, site.reason


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
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
        """Each communication with its strategy, the reason and the gain that is predicted."""
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
