"""`check_graph`: whether a compiled graph's streams and collectives can go wrong; `check`: the same
as a pass.

from interlace_check.graphs import check

compiler = make_boxed_func(check(gm, example_inputs).forward)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Literal, TypedDict, TypeVar, Unpack

from torch import fx

from interlace.errors import InterlaceError, OptionError, ProgramError
from interlace.verify import Finding, Report
from interlace.verify import check as prove
from interlace_check.graphs.findings import KINDS, GraphExplainer, plain_findings
from interlace_check.graphs.programs import to_program
from interlace_check.graphs.reading.walk import walk

Order = Literal["auto", "listed", "any"]
Inputs = Literal["queued", "ready"]
Results = Literal["joined", "later"]
Graph = TypeVar("Graph", fx.GraphModule, fx.Graph)
log = logging.getLogger(__name__)


class GraphOptions(TypedDict, total=False):
    """The options of `check_graph`."""

    order: Order
    inputs: Inputs
    results: Results
    current: Iterable[int] | None


def check(
    gm: Graph,
    example_inputs: Sequence[object] = (),
    *,
    on_fault: Literal["raise", "log"] = "raise",
    **options: Unpack[GraphOptions],
) -> Graph:
    """Checks a graph, and gives it back as it is: a pass for any pipeline of graph passes.

    Args:
        gm: what every rank runs, as for `check_graph`, or its `graph` (Inductor's passes get that).
        example_inputs: what passes are called with; nothing is done with it.
        on_fault: `raise`: a graph that can go wrong raises an error. `log`: the error is logged by
            the logger `interlace_check.graphs.checking`, also where a graph cannot be checked.
        options: those of `check_graph`.

    Returns:
        `gm`, unchanged.

    Raises:
        SoundnessError: the graph can go wrong; the message is the report.
        ProgramError, UnsupportedError, OptionError: as `check_graph`.

    Examples:
        >>> from interlace_check.graphs import check
        >>> gm = check(gm, example_inputs, on_fault="log")
    """
    check_options(on_fault=on_fault, **options)
    module = gm.owning_module if isinstance(gm, fx.Graph) else gm
    try:
        check_graph(module, **options).raise_if_unsound()  # pyright: ignore[reportArgumentType]
    except InterlaceError as error:
        if on_fault == "raise":
            raise
        log.error("%s", error)
    return gm


def check_graph(
    graph: fx.GraphModule,
    *,
    order: Order = "auto",
    inputs: Inputs = "queued",
    results: Results = "joined",
    current: Iterable[int] | None = None,
) -> Report:
    """Checks an FX graph of aten operators: its user streams and its functional collectives.

    Graphs are those that AOTAutograd makes (backends of `torch.compile` get them from
    `aot_autograd`, or as Inductor's post-grad graphs). Nothing is run.

    Args:
        graph: what every rank runs.
        order: `listed`: nodes are issued in the order of the graph. `any`: in any order that its
            dependences allow, as Inductor's scheduler may. `auto`: as listed, and in any order
            as well where a graph has `control_deps`, which are there for Inductor.
        inputs: `queued`: the caller's stream may still be making the inputs, so a side stream
            that reads one has to wait for it. `ready`: the caller has waited before.
        results: `joined`: results and inputs written in place have to be there for the caller's
            stream when the graph returns. `later`: the caller waits for the side streams itself
            (a forward graph's saved activations, say, that a backward on that stream reads).
        current: the indices by which the graph calls the caller's stream. None: 0, and one that
            syncs name and no node is annotated with, if 0 is not used (a remark says so).

    Returns:
        A report as `interlace.check` gives: `sound`, `findings`, `raise_if_unsound()`,
        `to_json()`. Findings name nodes, with their place in the graph as `line` and their
        source line as `loc`; `interlace_check.graphs.findings.KINDS` lists the kinds.

    What is assumed of operators, streams, collectives and memory is on the page "Check compiled
    graphs". With `any`, what two writes or a write and a read of one storage do in the order
    listed is a dependence, and so is the order of one group's collectives and of the waits for
    one storage.

    Raises:
        ProgramError: the graph is malformed.
        UnsupportedError: an operator may order others in a way that is unknown (a `streams::` or
            `c10d::` operator without a meaning here, a Python function on tensors), or the graph
            is too large for `any`.
        OptionError: an option has an unknown value.
    """
    began = time.perf_counter()
    check_options(order=order, inputs=inputs, results=results)
    if not isinstance(graph, fx.GraphModule):
        raise ProgramError(
            f"check_graph takes a GraphModule, not a {type(graph).__name__}; fix: give the graph "
            "that every rank runs (where ranks differ, check_recorded says so of a run that hung)"
        )
    trace = walk(graph, None if current is None else frozenset(current))
    both = order == "auto" and trace.has_control_deps
    orders = [False, True] if both else [order == "any"]
    found = list(plain_findings(trace, results == "joined"))
    for any_order in orders:
        program = to_program(trace, any_order, inputs == "ready", results == "joined")
        explainer = GraphExplainer(trace, program, any_order)
        report = prove([program.program])
        found += map(explainer.finding, report.errors)
    return Report(tuple(_distinct(found)), len(trace.steps), 1, time.perf_counter() - began)


def check_options(**options: object) -> None:
    """Raises OptionError for an option that is unknown, or has an unknown value."""
    names = ("on_fault", *GraphOptions.__annotations__)
    if unknown := [name for name in options if name not in names]:
        raise OptionError(f"no option {unknown[0]!r}; fix: the options are {', '.join(names)}")
    for name, known in (
        ("on_fault", ("raise", "log")),
        ("order", ("auto", "listed", "any")),
        ("inputs", ("queued", "ready")),
        ("results", ("joined", "later")),
    ):
        if options.get(name, known[0]) not in known:
            raise OptionError(f"{name}={options[name]!r}; fix: it is one of {', '.join(known)}")


def _distinct(found: list[Finding]) -> list[Finding]:
    """Each fault once: one found as listed is not repeated for other orders."""
    kept: dict[tuple[object, ...], Finding] = {}
    for finding in found:
        nodes = tuple(op.line for op in finding.ops if op.line)
        kept.setdefault((finding.kind, nodes), finding)
    unwaited = {op.text for each in kept.values() if each.kind == "unwaited" for op in each.ops}
    distinct = [
        each
        for each in kept.values()
        if each.kind != "never-waited" or each.ops[0].text not in unwaited
    ]
    ranked = {kind: number for number, kind in enumerate(KINDS)}
    return sorted(
        distinct, key=lambda each: (each.level == "remark", ranked.get(each.kind, len(KINDS)))
    )
