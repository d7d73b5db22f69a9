"""`check_graph`: whether a compiled graph's streams and collectives can go wrong.

import interlace

def backend(gm, example_inputs):
    interlace.check_graph(gm).raise_if_unsound()
    return gm
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Literal

from torch import fx

from interlace.errors import OptionError, ProgramError
from interlace.verify import Finding, Report, check
from interlace_check.graphs.findings import KINDS, GraphExplainer, plain_findings
from interlace_check.graphs.programs import to_program
from interlace_check.graphs.reading.walk import walk

Order = Literal["auto", "listed", "any"]


def check_graph(
    graph: fx.GraphModule,
    *,
    order: Order = "auto",
    inputs: Literal["queued", "ready"] = "queued",
    results: Literal["joined", "later"] = "joined",
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

    What is assumed: an operator touches its arguments and its results, and nothing else; it
    writes the arguments that its schema says, and its results share storage where its schema
    says; a Triton kernel in a graph that mutates writes all of its tensors. A node runs on the
    stream that it is annotated with (`node.meta["custom"]["stream"]`), else on the caller's. A
    collective runs on a stream of its group's own, after the stream that begins it, and
    `wait_tensor` makes the stream of its node wait: the first for a result, and a later one for
    the same result is for nothing. Memory goes back when the last node that
    holds a tensor is done on the host, and may be used by what is allocated next on the stream
    where the tensor was made (torch's caching allocator); what side streams do between two calls
    of a graph is not seen. Where sizes are symbolic or unknown, an access counts as the whole
    storage. With `any`, what two writes or a write and a read of one storage do in the order
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
    _check_options(order, inputs, results)
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
        report = check([program.program])
        found += map(explainer.finding, report.errors)
    return Report(tuple(_distinct(found)), len(trace.steps), 1, time.perf_counter() - began)


def _check_options(order: str, inputs: str, results: str) -> None:
    for name, value, known in (
        ("order", order, ("auto", "listed", "any")),
        ("inputs", inputs, ("queued", "ready")),
        ("results", results, ("joined", "later")),
    ):
        if value not in known:
            raise OptionError(f"{name}={value!r}; fix: it is one of {', '.join(known)}")


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
