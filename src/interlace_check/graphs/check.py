"""`check_graph`: whether a compiled graph's streams and collectives can go wrong.

import interlace

def backend(gm, example_inputs):
    interlace.check_graph(gm).raise_if_unsound()
    return gm
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from torch import fx

from interlace.errors import OptionError, ProgramError, UnsupportedError
from interlace.ir.types import Team
from interlace.verify import Finding, Report, check
from interlace_check.graphs.findings import KINDS, GraphWords
from interlace_check.graphs.programs import to_program
from interlace_check.graphs.ranks import groups_of, mismatches, teams_of
from interlace_check.graphs.reading.walk import walk
from interlace_check.graphs.remarks import plain_findings
from interlace_check.graphs.steps import Trace

Order = Literal["auto", "listed", "any"]


def check_graph(
    graphs: fx.GraphModule | Sequence[fx.GraphModule],
    *,
    order: Order = "auto",
    inputs: Literal["queued", "ready"] = "queued",
    results: Literal["joined", "later"] = "joined",
    current: Iterable[int] | None = None,
    groups: Mapping[str, Iterable[int]] | None = None,
) -> Report:
    """Checks an FX graph of aten operators: its user streams and its functional collectives.

    One GraphModule is what every rank runs; a sequence has the graph of rank 0, 1, ... Graphs are
    those that AOTAutograd makes (backends of `torch.compile` get them from `aot_autograd`, or as
    Inductor's post-grad graphs). Nothing is run.

    Args:
        graphs: the graph, or one for each rank.
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
        groups: the ranks of process groups by their names, each rank the place of its graph,
            where the operators' `group_size` and the graphs that use a group do not say it.

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
            `c10d::` operator without a meaning here, a Python function on tensors, messages in
            one graph for all ranks), or the graph is too large for `any`.
        TeamError: the ranks of a group are not the graphs given.
        OptionError: an option has an unknown value.
    """
    began = time.perf_counter()
    _check_options(order, inputs, results)
    modules = [graphs] if isinstance(graphs, fx.GraphModule) else list(graphs)
    if not modules or not all(isinstance(module, fx.GraphModule) for module in modules):
        raise ProgramError("check_graph takes a GraphModule, or one for each rank; fix: give it")
    mine = None if current is None else frozenset(current)
    walked = {id(module): walk(module, mine) for module in {id(m): m for m in modules}.values()}
    traces = [walked[id(module)] for module in modules]
    spmd = len(traces) == 1 and groups is None
    teams = _spmd_teams(traces[0]) if spmd else None
    found: list[Finding] = []
    if teams is None:
        ranks = groups_of(traces, groups)
        teams = teams_of(ranks)
        found += mismatches(traces, ranks)
    both = any(trace.has_control_deps for trace in traces)
    orders = [False, True] if order == "auto" and both else [order == "any"]
    for rank, trace in enumerate(traces):
        found += plain_findings(trace, rank, True in orders, results == "joined")
    num_ops = sum(len(trace.steps) for trace in traces)
    for any_order in orders:
        programs = [
            to_program(
                trace,
                teams,
                None if spmd else rank,
                any_order,
                inputs == "ready",
                results == "joined",
            )
            for rank, trace in enumerate(traces)
        ]
        report = check([each.program for each in programs])
        words = GraphWords(traces, programs, any_order)
        found += [each for each in map(words.finding, report.findings) if each is not None]
    kept = _distinct(found)
    return Report(tuple(kept), num_ops, len(traces), time.perf_counter() - began)


def _check_options(order: str, inputs: str, results: str) -> None:
    for name, value, known in (
        ("order", order, ("auto", "listed", "any")),
        ("inputs", inputs, ("queued", "ready")),
        ("results", results, ("joined", "later")),
    ):
        if value not in known:
            raise OptionError(f"{name}={value!r}; fix: it is one of {', '.join(known)}")


def _spmd_teams(trace: Trace) -> dict[str, Team]:
    """Two ranks stand for all that run one graph: each does what every other does."""
    found: dict[str, Team] = {}
    for step in trace.steps:
        if step.issue is None:
            continue
        if step.issue.peer is not None:
            raise UnsupportedError(
                f"{step.place.name} is a message to one rank, in a graph that all ranks run; fix: "
                f"give the graph of each rank: check_graph([graph_of_rank_0, ...])"
            )
        found.setdefault(step.issue.group, Team(f"g{len(found)}", 2, ((0, 1),)))
    return found


def _distinct(found: list[Finding]) -> list[Finding]:
    """Each fault once: one found as listed is not told again for other orders."""
    kept: dict[tuple[object, ...], Finding] = {}
    for finding in found:
        nodes = tuple((op.rank, op.line) for op in finding.ops if op.line)
        key = (finding.kind, finding.ranks, nodes)
        kept.setdefault(key, finding)
    unwaited = {op.text for each in kept.values() if each.kind == "unwaited" for op in each.ops}
    listed_ones = [
        each
        for each in kept.values()
        if each.kind != "never-waited" or each.ops[0].text not in unwaited
    ]
    mismatch = any(each.kind == "mismatch" for each in listed_ones)
    listed_ones = [each for each in listed_ones if not (mismatch and each.kind == "deadlock")]
    ranked = {kind: number for number, kind in enumerate(KINDS)}
    return sorted(
        listed_ones, key=lambda each: (each.level == "remark", ranked.get(each.kind, len(KINDS)))
    )
