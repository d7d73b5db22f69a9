"""Malformed graphs: each gives a report or a typed error, in bounded time and memory."""

from __future__ import annotations

import operator
import random
import resource
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.external.graphs_support import AOT, C10D, STREAMS, Maker
from tests.external.test_graphs_reports import PAIRS
from torch import fx

from interlace import InterlaceError, check_graph
from interlace.errors import OptionError, ProgramError, UnsupportedError
from interlace_check.graphs import programs


def everything(fixed: bool) -> fx.GraphModule:
    """Collectives of every form, messages, views and in-place operators, on two streams."""
    g = Maker()
    x, y = g.input("x", 8, 4), g.input("y", 8, 4)
    g.sync("wait_stream", 1, 0)
    gathered = g.call(C10D.all_gather_into_tensor.default, x, 2, "0", stream=1)
    waited = g.call(C10D.wait_tensor.default, gathered, stream=1)
    half = g.call(AOT.slice.Tensor, waited, 0, 0, 8, stream=1)
    g.call(AOT.mul_.Tensor, half, 2, stream=1)
    g.sync("record_event", 7, 1, stream=1)
    sums = g.call(C10D.all_reduce_coalesced.default, [x, y], "sum", "0")
    parts = [g.call(C10D.wait_tensor.default, _item(g, sums, i)) for i in (0, 1)]
    g.sync("wait_event", 7, 0)
    split = g.call(AOT.split.Tensor, half, 4)
    total = g.call(AOT.add.Tensor, _item(g, split, 0), 1)
    swapped = g.call(
        C10D.all_to_all_single.default, g.call(AOT.add.Tensor, *parts), [4, 4], [4, 4], "1"
    )
    return g.done(total, g.call(C10D.wait_tensor.default, swapped))


def _item(g: Maker, node: fx.Node, index: int) -> fx.Node:
    item = g.graph.call_function(operator.getitem, (node, index))
    item.meta["val"] = node.meta["val"][index]
    return item


MAKERS: list[Callable[[bool], fx.GraphModule]] = [pair.make for pair in PAIRS.values()]
MAKERS.append(everything)
JUNK: list[Any] = [
    None,
    -1,
    0,
    1,
    3,
    1 << 40,
    1 << 70,
    "x",
    "",
    1.5,
    True,
    [],
    [1, [2, [3]]],
    {"a": 1},
    slice(0, 1),
    torch.float32,
    torch.device("cpu"),
]
METAS: list[Any] = [
    *JUNK,
    torch.zeros(3),
    torch.zeros(4, 4).t(),
    torch.zeros(0),
    torch.zeros(8).expand(1 << 30, 8),
    torch.zeros(6).as_strided((3, 3), (1, 1)),
    torch.empty(1 << 20, device="meta"),
    torch.zeros(2, 2).to_sparse(),
    (torch.zeros(2), None),
]
TARGETS: list[Any] = [
    AOT.add.Tensor,
    AOT.view.default,
    AOT.copy_.default,
    AOT.split.Tensor,
    AOT.reshape.default,
    AOT.rand.default,
    AOT.mm.out,
    AOT.native_dropout.default,
    AOT._foreach_add_.Scalar,
    STREAMS.record_event,
    STREAMS.fork.default,
    STREAMS.record_stream.default,
    STREAMS.sync_dealloc.default,
    C10D.wait_tensor.default,
    C10D.all_reduce_.default,
    torch.ops.higher_order.control_deps,
    torch.ops.higher_order.cond,
    torch.add,
    getattr,
]
if hasattr(C10D, "isend"):
    TARGETS += [C10D.isend.default, C10D.irecv.default, C10D.batch_p2p_ops.default]
if hasattr(STREAMS, "synchronize_event"):  # torch 2.12
    TARGETS += [STREAMS.synchronize_event.default, STREAMS.synchronize_device.default]


def mutated(rng: random.Random) -> fx.GraphModule:
    """A graph with a few random faults."""
    gm = rng.choice(MAKERS)(rng.random() < 0.5)
    for _ in range(rng.randint(1, 4)):
        graph, nodes = gm.graph, list(gm.graph.nodes)
        if rng.random() < 0.2:
            held = [each for each in gm.children() if isinstance(each, fx.GraphModule)]
            if held:
                graph = rng.choice(held).graph
                nodes = list(graph.nodes)
        if nodes:
            _mutate(rng, gm, graph, rng.choice(nodes), nodes)
    return gm


def _mutate(
    rng: random.Random, gm: fx.GraphModule, graph: fx.Graph, node: fx.Node, nodes: list[fx.Node]
) -> None:
    junk = rng.choice([*JUNK, *nodes[:8], [rng.choice(nodes)], (node,)])
    args, kwargs = list(node.args), dict(node.kwargs)
    match rng.randrange(12):
        case 0 | 1 if args:
            args[rng.randrange(len(args))] = junk
            node.args = tuple(args)
        case 2 if args:
            del args[rng.randrange(len(args))]
            node.args = tuple(args)
        case 3:
            node.args = (*args, junk)
        case 4:
            kwargs[rng.choice(["input", "out", "group_name", "x", "dim"])] = junk
            node.kwargs = kwargs
        case 5 if node.op == "call_function":
            node.target = rng.choice(TARGETS)
        case 6:
            node.meta["custom"] = rng.choice([{"stream": junk}, junk, {"stream": rng.choice(JUNK)}])
        case 7:
            node.meta["val"] = rng.choice(METAS)
        case 8:
            node.meta["stack_trace"] = rng.choice([*JUNK, 'File "' * 500])
        case 9:
            rng.choice(nodes).append(node)
        case 10 if not node.users:
            graph.erase_node(node)
        case 11 if node.op == "get_attr":
            if rng.random() < 0.5:
                node.target = rng.choice(["gone", "a.b", ""])
            else:
                held = getattr(gm, str(node.target), None)
                if isinstance(held, fx.GraphModule):
                    setattr(held, str(node.target), held)
                    with held.graph.inserting_before(next(iter(held.graph.nodes))):
                        again = held.graph.get_attr(str(node.target))
                        held.graph.call_function(torch.ops.higher_order.control_deps, ((), again))
        case _:
            node.meta.clear()


def survive(seed: int, count: int) -> None:
    rng = random.Random(seed)
    outcomes: dict[str, int] = {}
    slowest = 0.0
    for number in range(count):
        gm = mutated(rng)
        began = time.process_time()
        error = None
        try:
            report = check_graph(gm, order=rng.choice(["auto", "listed", "any"]))
            str(report)
            report.to_json()
            outcome = "sound" if report.sound else "unsound"
        except InterlaceError as raised:
            error, outcome = raised, type(raised).__name__
        assert error is None or "fix: " in str(error), f"mutation {number}: {error}"
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        slowest = max(slowest, time.process_time() - began)
    print(outcomes, f"slowest {slowest:.2f} s")
    assert slowest < 5
    assert {"sound", "unsound", "ProgramError"} <= set(outcomes)


@pytest.mark.parametrize(
    "count", [300, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(7200)])]
)
def test_mutations_give_typed_errors(seed: int, count: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    survive(seed, count)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


def test_everything_is_sound() -> None:
    assert check_graph(everything(True)).sound


def test_graphs_and_options_of_other_kinds() -> None:
    gm = everything(True)
    with pytest.raises(ProgramError, match="GraphModule"):
        check_graph(gm.graph)  # pyright: ignore
    with pytest.raises(ProgramError, match="not a list; fix: give the graph that every rank runs"):
        check_graph([gm, gm])  # pyright: ignore
    with pytest.raises(OptionError, match="order="):
        check_graph(gm, order="none")  # pyright: ignore


def test_operators_of_unknown_order_are_refused() -> None:
    g = Maker()
    x = g.input("x")
    node = g.graph.call_function(torch.add, (x, x))
    with pytest.raises(UnsupportedError, match="AOTAutograd"):
        check_graph(g.done(node))
    g = Maker()
    node = g.graph.call_function(torch.ops.c10d.barrier.default, (g.input("x"), "0", [0]))
    with pytest.raises(InterlaceError, match="fix: "):
        check_graph(g.done(node))
    if not hasattr(C10D, "isend"):  # from torch 2.12 on
        return
    g = Maker()
    node = g.graph.call_function(C10D.isend.default, (g.input("x"), 1, 0, "0"))
    with pytest.raises(UnsupportedError, match="what it waits for or orders is unknown"):
        check_graph(g.done(node))


@pytest.mark.parametrize("op", [STREAMS.fork.default, STREAMS.wait_event.default])
def test_order_within_a_branch_is_refused(op: Any) -> None:
    inner, outer = fx.Graph(), fx.Graph()
    x, predicate, y = inner.placeholder("x"), outer.placeholder("p"), outer.placeholder("y")
    inner.call_function(op, (0, 1))
    negated = inner.call_function(AOT.neg.default, (x,))
    inner.output((negated,))
    branch = outer.get_attr("branch")
    called = outer.call_function(torch.ops.higher_order.cond, (predicate, branch, branch, (y,)))
    result = outer.call_function(operator.getitem, (called, 0))
    outer.output((result,))
    predicate.meta["val"] = torch.empty((), dtype=torch.bool, device="meta")
    for node in (x, negated, y, result):
        node.meta["val"] = torch.empty(4, device="meta")
    called.meta["val"] = (torch.empty(4, device="meta"),)
    root = torch.nn.Module()
    root.branch = fx.GraphModule(torch.nn.Module(), inner)
    with pytest.raises(UnsupportedError, match=r"calls streams::(fork|wait_event)"):
        check_graph(fx.GraphModule(root, outer))


def test_a_graph_too_large_for_every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "MAX_STEPS", 3)
    assert check_graph(everything(True)).sound
    with pytest.raises(UnsupportedError, match="order='listed'"):
        check_graph(everything(True), order="any")


def test_a_long_graph_takes_time_in_proportion() -> None:
    g = Maker()
    x = g.input("x")
    for _ in range(800):
        x = g.graph.call_function(AOT.neg.default, (x,))
    gm = g.done(x)
    began = time.process_time()
    assert check_graph(gm).sound
    assert check_graph(gm, order="any").sound
    assert time.process_time() - began < 3
