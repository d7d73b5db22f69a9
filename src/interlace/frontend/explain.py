"""`interlace.explain` and `interlace.report`: what became of the communication of a model.

Nothing is wrapped and nothing is compiled again: the backend knows in whose calls it compiled what
torch still keeps. The text has strategy, gain, reason, and what it was chosen from:

    forward: 2 communications, sound
      1  all_gather_matmul      layers.0.mlp.up    peer/get x4   0.314 ms  1.31x   ...
           serial 0.412 ms (measured 0.420), peer/get 0.314 ms (measured 0.331), ring 0.352 ms
      memory: peak 81,920 bytes at op 17 (layers.0.mlp): 49,152 of outputs, ...

A site shows its strategy, its predicted time, the gain over serial, and, where a run was recorded
(`options={"trace": True}`), what it took there, from the first start of its computation and
communication to the last end.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from interlace.cost import Timeline, simulate
from interlace.cost.choose import Estimate
from interlace.cost.memory import HEADINGS, RunMemory, run_memory
from interlace.errors import ExecutorError
from interlace.frontend.backend import backend
from interlace.frontend.binding import Bound
from interlace.frontend.compile import Compiled
from interlace.frontend.compiled_graph import CompiledGraph
from interlace.frontend.dynamo import name_of
from interlace.frontend.importing.exchanges import communications
from interlace.frontend.importing.nodes import location
from interlace.ir import Program, Site
from interlace.ir.program import ProgramOrPath, communication_in_words, together
from interlace.passes import candidates, lower
from interlace.torch_private.dynamo import OptimizedModule, innermost_fn
from interlace.trace import Run
from interlace.trace.figures import site_figures


def explain(
    model: Callable[..., object] | ProgramOrPath,
    *,
    why: bool = False,
    memory: bool = False,
    account: bool = False,
) -> str:
    """Describes how each communication of a compiled model is overlapped, and why.

    Args:
        model: a module or a function that `torch.compile` made or compiled in place, a module with
            such parts, what `interlace.compile` gave, a Program, or the path of a schedule's file.
        why: leaves only what stays serial, and says what keeps a model from being overlapped where
            nothing is.
        memory: adds what is alive at the peak of memory, by module.
        account: adds where the time of a recorded run went: computation by kind, exposed
            communication by site, and idle time by what was waited for, with ops and modules.

    Returns:
        A text: of each communication the strategy, the reason, the predicted time and, where a run
        was recorded, the measured one; and the memory that a run takes at most. Where a model has
        no graphs, the text says what usually causes that.

    Raises:
        ParseError: a file cannot be read.

    Examples:
        >>> text = interlace.explain(compiled)
        >>> "2 communications, sound" in text
        True
    """
    if isinstance(model, Program | str | os.PathLike):
        programs = together(model, "interlace.explain")
        told = [explain_program(program, why, memory) for program in programs]
        return "\n\n".join([*told, *(["account: a schedule has no recorded run"] * account)])
    graphs, texts = graphs_of(model), list[str]()
    if not graphs:
        return none_of(model)
    groups = [list(group) for _, group in itertools.groupby(graphs, lambda g: id(g.setting.origin))]
    for number, group in enumerate(groups, 1):
        if (origin := group[0].setting.origin) is not None:
            texts.append(f"graph {number} of {len(groups)}: {origin.name}")
        texts.append(explain_graphs(group, why, memory, account))
    return "\n\n".join([*texts, *(_hints(graphs) if why else ())])


def report(model: Callable[..., object], path: str | Path) -> Path:
    """Writes one HTML page with the timelines of a compiled model, predicted and measured.

    A run is measured with the option `trace`, on the rank that calls this; predictions are of all
    ranks. On several ranks, call it on one, or give each a path of its own.

    Args:
        model: what `explain` takes, but no schedules.
        path: the file, which is replaced.

    Returns:
        The path.

    Raises:
        ExecutorError: there is no schedule to show.

    Examples:
        >>> interlace.report(compiled, f"step{rank}.html").suffix
        '.html'
    """
    if isinstance(model, Program | str | os.PathLike):
        raise ExecutorError(
            "report shows compiled models, and this is a schedule: `interlace simulate FILE --html "
            "PAGE` draws it as predicted, `interlace run FILE --html PAGE` as measured"
        )
    graphs = graphs_of(model)
    bound = [each for graph in graphs for each in graph.bound[-1:]]
    if not bound:
        raise ExecutorError(f"there is no schedule to show. {none_of(model)}")
    runs = [_run(each) for each in bound]
    sound = all(each.report.sound for each in bound)
    facts = [("verifier", "sound" if sound else "unsound"), ("machine", bound[0].machine.name)]
    from interlace.trace import write_page  # a run loads no page

    return write_page(runs, path, name_of(_plain(model)), facts)


def timelines(model: Callable[..., object]) -> list[Timeline]:
    """Returns this rank's measured timelines of a compiled model: the last run of each schedule.

    Args:
        model: what `report` takes, compiled with the option `trace`.

    Returns:
        A timeline for each schedule that ran, in the order in which they were compiled. Each gives
        `figures()`: how long this rank computed and communicated, and how much of both at once.

    Examples:
        >>> all(0 <= each.figures().hidden <= 1 for each in interlace.timelines(compiled))
        True
    """
    bound = [each for graph in graphs_of(model) for each in graph.bound]
    return [timeline for each in bound if (timeline := each.measured) is not None]


def _run(bound: Bound) -> Run:
    """A bound Program for the page, beside its serial schedule, as predicted; where the ranks'
    Programs differ, this one has only its own, and nothing is compared."""
    before = None
    if len(bound.programs) == 1:
        options = dataclasses.replace(bound.executor.options, overlap=False)
        serial = lower(bound.serial, options, bound.machine)
        before = Run((serial,), simulate(serial, bound.machine), label="serial")
    predicted = simulate(bound.programs, bound.machine)
    return Run(bound.programs, predicted, bound.measured, bound.kind, before=before)


def graphs_of(model: object) -> list[CompiledGraph]:
    """The graphs that were compiled in calls of a model or of its parts, in that order."""
    if isinstance(model, Compiled):
        return [*model.graphs]
    plain = _plain(model)
    parts = plain.modules() if isinstance(plain, nn.Module) else [plain]
    wanted = {id(getattr(part, "__self__", part)) for part in parts}
    known = [(graph, graph.setting.origin) for graph in backend.graphs]
    return [graph for graph, origin in known if origin is not None and origin.is_of(wanted)]


def _plain(model: Any) -> object:
    """Model or function that torch.compile or interlace.compile was given."""
    if isinstance(model, Compiled):
        return model.fn
    return model._orig_mod if isinstance(model, OptimizedModule) else innermost_fn(model)


def none_of(model: object) -> str:
    """Why there are no graphs of a model."""
    name = name_of(_plain(model))
    if isinstance(model, Compiled):
        return f"{name}: nothing is compiled yet: call it, or give interlace.compile its arguments"
    return (
        f"{name} has no graph now. Either it was not compiled by "
        'torch.compile(..., backend="interlace"), or not called since, or torch.compiler.reset() '
        "freed it; or TorchDynamo is off (TORCH_COMPILE_DISABLE), runs graphs of another "
        f"{name} for it, whose guards pass, or found no tensor operators in it "
        "(TORCH_LOGS=graph_breaks says what it skips)"
    )


def _hints(graphs: Sequence[CompiledGraph]) -> Iterator[str]:
    """Yields reasons why these graphs are not overlapped, beyond the reason of each site."""
    options = graphs[0].setting.options
    if not options.overlap or options.strategy == "serial":
        yield 'everything is serial by option: leave out overlap=False and strategy="serial"'
    if not any(any(communications(graph.graph)) for graph in graphs):
        yield (
            "no graph communicates. Interlace overlaps collectives that are in the graph: those of "
            "DTensors (parallelize_module, redistribute) and functional ones "
            "(torch.distributed._functional_collectives). What DDP, fully_shard and hooks do runs "
            "outside of it (wrap the compiled module in DDP, not the other way round), and so does "
            "what comes after a graph break; in a world of one rank there is nothing to send"
        )
    if any(graph.setting.origin and graph.setting.origin.ended for graph in graphs):
        yield (
            "a communication overlaps only with computation of its own graph, and a graph ends at "
            "a graph break"
        )


# -- texts of Programs and graphs ----------------------------------------------------------------


def explain_bound(
    bound: Iterable[Bound], why: bool = False, memory: bool = False, account: bool = False
) -> str:
    """The sites, remarks and memory of bound Programs, one Program after another; `why` leaves only
    the sites that stay serial, `memory` adds what is alive at the peak, `account` where the time of
    a recorded run went."""
    return "\n\n".join(_one(each, why, memory, account) for each in bound)


def explain_graphs(
    graphs: Iterable[CompiledGraph], why: bool = False, memory: bool = False, account: bool = False
) -> str:
    """The same of compiled graphs, with what becomes of those that have no Program."""
    texts = [
        _unbound(graph)
        if graph.unscheduled or not graph.bound
        else explain_bound(graph.bound, why, memory, account)
        for graph in graphs
    ]
    return "\n\n".join(texts)


def explain_program(program: Program, why: bool = False, memory: bool = False) -> str:
    """The sites, remarks and memory of a Program; without sites, how much communication it has."""
    head = _head(program.name, program.sites, why)
    if not program.sites and (found := communication_in_words(program)):
        head = f"{program.name}: it states no sites; it has {found}"
    lines = [] if why and not memory else _memory(run_memory(program), memory)
    return "\n".join([head, *_sites(program, why), *lines])


def _memory(taken: RunMemory, table: bool) -> list[str]:
    """The memory that a run takes at most, and (`table`) what is alive then, by module."""
    rows = _columns([HEADINGS, *taken.rows()]) if table else []
    return [f"  memory: {taken.line()}", *(f"     {row}" for row in rows)]


def _one(bound: Bound, why: bool, memory: bool, account: bool) -> str:
    program, sizes = bound.program, bound.executor.sizes
    head = [_head(bound.kind, program.sites, why), "sound" if bound.report.sound else "unsound"]
    found = candidates(bound.serial, bound.executor.options, bound.machine)
    lines = _sites(program, why, bound.measured, found)
    if bound.why_single:
        lines.append(f"  sizes: for these sizes alone: {bound.why_single}")
    if memory or not why:
        lines += _memory(run_memory(bound.programs, sizes), memory)
        if sizes.sizes and (engine := bound.executor.engine) is not None:
            now = run_memory(bound.programs, sizes, engine.context.values.sizes.values)
            lines += _memory(now, False)
    if account:
        lines += _account(bound)
    return "\n".join([", ".join(head) + (f" where {sizes}" if sizes.sizes else ""), *lines])


def _account(bound: Bound) -> list[str]:
    """Where the time of the run that was recorded last went, or that none was."""
    from interlace.trace import account as of  # a run loads no account

    timeline, engine = bound.measured, bound.executor.engine
    if timeline is None or engine is None:
        return ["  account: no run was recorded: compile with the option trace"]
    sizes = {**bound.program.sizes.values, **engine.context.values.sizes.values}
    lines = of.account(bound.program.at(sizes), timeline)
    cells = [of.HEADINGS, *of.account_rows(lines)]
    head = f"  account of the last run, {timeline.makespan_s * 1e3:.3f} ms:"
    return [head, *(f"     {row}" for row in _columns(cells))]


def _sites(
    program: Program,
    why: bool,
    measured: Timeline | None = None,
    found: Mapping[int, Sequence[Estimate]] | None = None,
) -> list[str]:
    lines: list[str] = []
    sites = [site for site in program.sites if not why or site.strategy == "serial"]
    for site, row in zip(sites, _columns([_row(s, measured) for s in sites]), strict=True):
        lines.append(row)
        if found and site.id in found:
            lines.append(f"       {', '.join(map(_candidate, found[site.id]))}")
    ids = {site.id for site in sites}
    for remark in program.remarks:
        if not why or remark.site in ids or remark.pass_name == "frontend":
            place = "" if remark.site is None else f" (site {remark.site})"
            lines.append(f"  {remark.pass_name}{place}: {remark.text}")
    return lines


def _unbound(graph: CompiledGraph) -> str:
    """Describes a graph that has no Program, or none yet."""
    strategy = "serial" if graph.unscheduled else ""
    rows = [
        (str(i), str(node.target).split(".")[1], str(location(node)) or "-", strategy)
        for i, node in enumerate(communications(graph.graph), 1)
    ]
    state = graph.unscheduled or "not bound now: it is when it is called, or was and was freed"
    return "\n".join([f"{_count(graph.kind, len(rows))}, {state}", *_columns(rows)])


def _head(kind: str, sites: Sequence[Site], why: bool) -> str:
    serial = sum(site.strategy == "serial" for site in sites)
    return _count(kind, len(sites)) + (f", {serial} serial" if why else "")


def _count(kind: str, count: int) -> str:
    return f"{kind}: {count} communication{'' if count == 1 else 's'}"


def _candidate(estimate: Estimate) -> str:
    """A candidate and its times, predicted and measured."""
    measured = "" if estimate.measured_ms is None else f" (measured {estimate.measured_ms:.3f})"
    return f"{estimate.label} {estimate.predicted_ms:.3f} ms{measured}"


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
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True) if w).rstrip()
        for row in rows
    ]
