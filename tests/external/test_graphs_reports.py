"""Public reports about streams and collectives in compiled graphs: each with its fault, and fixed.

The graphs are those of the reports, node for node where the thread shows them, else as Dynamo and
AOTAutograd spell what the thread describes. `url` is the thread.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from tests.external.graphs_support import AOT, C10D, STREAMS, Maker
from torch import fx

from interlace import check_graph

PYTORCH = "https://github.com/pytorch/pytorch"


@dataclass(frozen=True)
class Pair:
    """A graph with a fault and without: `make(fixed)`."""

    url: str
    make: Callable[[bool], fx.GraphModule]
    kinds: tuple[str, ...]
    """The kinds of the faults: these, and no others."""
    nodes: tuple[str, ...]
    """Nodes that the first finding names."""
    options: tuple[tuple[str, Any], ...] = ()


def two_waits(fixed: bool) -> fx.GraphModule:
    """Two streams wait for one event; the consumer of the second does not go through its wait."""
    g = Maker()
    add = g.call(AOT.add.Tensor, g.input("x"), 1)
    record, y = g.control("record_event", (1, 0), (add,), add)
    wait, y1 = g.control("wait_event", (1, 3), (record, y), y)
    mul = g.call(AOT.mul.Tensor, y1, 2, stream=3)
    join, out1, y2 = g.control("record_event", (4, 3), (mul, wait, y1), mul, y1)
    if fixed:
        wait2, y3 = g.control("wait_event", (1, 5), (record, y2), y2)
    else:
        (wait2,), y3 = g.control("wait_event", (1, 5), (record, y)), y2
    mul_1 = g.call(AOT.mul.Tensor, y3, 3, stream=5)
    join2, out2 = g.control("record_event", (6, 5), (mul_1, wait2), mul_1)
    done, out1 = g.control("wait_event", (4, 0), (join, out1), out1)
    _, out1, out2 = g.control("wait_event", (6, 0), (join2, done, out1, out2), out1, out2)
    return g.done(g.call(AOT.add.Tensor, out1, out2))


def threaded_wait(fixed: bool) -> fx.GraphModule:
    """The consumer hangs on the record's data alone, so that it may be issued before the wait."""
    g = Maker()
    x = g.input("x")
    fork, x1 = g.control("record_event", (1, 0), (x,), x)
    _, x2 = g.control("wait_event", (1, 19), (fork, x1), x1)
    reload = g.call(AOT.clone.default, x2, stream=19)
    record, reloaded = g.control("record_event", (2, 19), (reload,), reload)
    if fixed:
        _, reloaded = g.control("wait_event", (2, 0), (record, reloaded), reloaded)
    else:
        g.control("wait_event", (2, 0), (record,))
    return g.done(g.call(AOT.mul.Tensor, reloaded, 2))


def wait_stream(fixed: bool) -> fx.GraphModule:
    """`wait_stream` hangs on no data: a scheduler issues it first, where it waits for nothing."""
    g = Maker()
    mul = g.call(AOT.mul.Tensor, g.input("x"), 2)
    if fixed:
        _, mul1 = g.control("wait_stream", (1, 0), (mul,), mul)
    else:
        g.sync("wait_stream", 1, 0)
        mul1 = mul
    add = g.call(AOT.add.Tensor, mul1, 1, stream=1)
    if fixed:
        _, add = g.control("wait_stream", (0, 1), (add,), add)
    else:
        g.sync("wait_stream", 0, 1)
    return g.done(g.call(AOT.sub.Tensor, add, 1))


def independent_kernel(fixed: bool) -> fx.GraphModule:
    """As before, where the waiting stream's kernel reads another input: threading what was waited
    for is not enough (a review of the fix shows it)."""
    g = Maker()
    x, y = g.input("x"), g.input("y")
    mul = g.call(AOT.mul.Tensor, x, 2)
    if fixed:
        _, mul, y1 = g.control("wait_stream", (1, 0), (mul, y), mul, y)
    else:
        (_, mul), y1 = g.control("wait_stream", (1, 0), (mul,), mul), y
    add = g.call(AOT.add.Tensor, y1, 1, stream=1)
    _, add, mul = g.control("wait_stream", (0, 1), (add, mul), add, mul)
    return g.done(g.call(AOT.add.Tensor, add, mul))


def host_barrier(fixed: bool) -> fx.GraphModule:
    """The host waits for a stream between its work and the readers, which records cut off."""
    g = Maker()
    x = g.input("x")
    fork, x1 = g.control("record_event", (9, 0), (x,), x)
    wait, x2 = g.control("wait_event", (9, 1), (fork, x1), x1)
    mm = g.call(AOT.mul.Tensor, x2, 2, stream=1)
    first, a = g.control("record_event", (2, 1), (mm, wait), mm)
    mm_1 = g.call(AOT.mul.Tensor, a, 3, stream=1)
    second, b = g.control("record_event", (3, 1), (mm_1, first), mm_1)
    if fixed:
        _, a, b = g.control("synchronize_stream", (1,), (second, a, b), a, b)
    else:
        g.sync("synchronize_stream", 1)
    return g.done(g.call(AOT.add.Tensor, g.call(AOT.neg.default, a), g.call(AOT.neg.default, b)))


def bare_record(fixed: bool) -> fx.GraphModule:
    """Of two records one after another the second has no data left, and floats."""
    g = Maker()
    x = g.input("x")
    fork, x1 = g.control("record_event", (9, 0), (x,), x)
    wait, x2 = g.control("wait_event", (9, 1), (fork, x1), x1)
    mm = g.call(AOT.mul.Tensor, x2, 2, stream=1)
    first, a = g.control("record_event", (2, 1), (mm, wait), mm)
    if fixed:
        second, a = g.control("record_event", (3, 1), (first, a), a)
    else:
        second = g.sync("record_event", 3, 1)
    _, a = g.control("wait_event", (3, 0), (second, a), a)
    return g.done(g.call(AOT.neg.default, a))


def written_back(fixed: bool) -> fx.GraphModule:
    """An input's new value is copied into it on the side stream, after the join."""
    g = Maker()
    x, small = g.input("x"), g.input("small")
    g.sync("wait_stream", 1, 0)
    add = g.call(AOT.add.Tensor, x, 1, stream=1)
    if fixed:
        g.call(AOT.copy_.default, x, add, stream=1)
    g.sync("wait_stream", 0, 1)
    out = g.call(AOT.add.Tensor, small, 1)
    if not fixed:
        g.call(AOT.copy_.default, x, add, stream=1)
    return g.done(out)


def recorded_before_write(fixed: bool) -> fx.GraphModule:
    """An event is recorded after an input was written, but before the copy into it."""
    g = Maker()
    x = g.input("x")
    g.sync("wait_stream", 1, 0)
    add = g.call(AOT.add.Tensor, x, 1, stream=1)
    if fixed:
        g.call(AOT.copy_.default, x, add, stream=1)
    g.sync("record_event", 2, 1, stream=1)
    if not fixed:
        g.call(AOT.copy_.default, x, add, stream=1)
    g.sync("wait_event", 2, 3, stream=3)
    out = g.call(AOT.mul.Tensor, x, 2, stream=3)
    g.sync("wait_stream", 0, 1)
    g.sync("wait_stream", 0, 3)
    return g.done(out)


def side_input(fixed: bool) -> fx.GraphModule:
    """A side stream reads an input that the caller's stream may still be making."""
    g = Maker()
    x = g.input("x")
    if fixed:
        g.sync("wait_stream", 1, 0)
    mul = g.call(AOT.mul.Tensor, x, 2, stream=1)
    g.sync("wait_stream", 0, 1)
    return g.done(g.call(AOT.add.Tensor, mul, 1))


def side_consumer(fixed: bool) -> fx.GraphModule:
    """A side stream reads what the caller's stream makes, without a wait."""
    g = Maker()
    add = g.call(AOT.add.Tensor, g.input("x"), 1)
    if fixed:
        g.sync("wait_stream", 1, 0)
    mul = g.call(AOT.mul.Tensor, add, 2, stream=1)
    g.sync("wait_stream", 0, 1)
    return g.done(g.call(AOT.add.Tensor, mul, 1))


def freed_on_side(fixed: bool) -> fx.GraphModule:
    """A tensor is read last on a side stream, and its memory used again by another on its own."""
    g = Maker()
    x = g.input("x")
    y = g.call(AOT.rand_like.default, x)
    g.sync("wait_stream", 1, 0)
    z = g.call(AOT.mul.Tensor, y, x, stream=1)
    if fixed:
        g.sync("record_event", 5, 1)
        g.call(STREAMS.sync_dealloc.default, 5, 0, y)
    w = g.call(AOT.add.Tensor, x, 1)
    g.sync("wait_stream", 0, 1)
    return g.done(z, w)


def lost_join(fixed: bool) -> fx.GraphModule:
    """Dynamo 2.11 calls `Stream.wait_event` as a method, which is gone from AOTAutograd's graph."""
    g = Maker()
    add = g.call(AOT.add.Tensor, g.input("x"), 1)
    g.sync("record_event", 0, 1)
    g.sync("wait_event", 0, 2, stream=2)
    mul = g.call(AOT.mul.Tensor, add, 2, stream=2)
    g.sync("record_event", 3, 2, stream=2)
    if fixed:
        g.sync("wait_event", 3, 1)
    return g.done(g.call(AOT.neg.default, mul))


def beside_the_wait(fixed: bool) -> fx.GraphModule:
    """A reader takes the collective's result, and not what its wait gives."""
    g = Maker()
    x = g.input("x")
    gathered = g.call(C10D.all_gather_into_tensor.default, x, 2, "0")
    if not fixed:
        out = g.call(AOT.mul.Tensor, gathered, 2)
    waited = g.call(C10D.wait_tensor.default, gathered)
    if fixed:
        out = g.call(AOT.mul.Tensor, waited, 2)
    return g.done(out)


def wait_in_another_graph(fixed: bool) -> fx.GraphModule:
    """A graph break between a collective and its wait: the graph returns what is not there yet."""
    g = Maker()
    pending = g.call(C10D.all_reduce.default, g.input("x"), "sum", "0")
    if fixed:
        pending = g.call(C10D.wait_tensor.default, pending)
    return g.done(pending)


PAIRS = {
    "two_waits": Pair(f"{PYTORCH}/issues/193409", two_waits, ("race",), ("add", "mul_1")),
    "threaded_wait": Pair(f"{PYTORCH}/pull/186022", threaded_wait, ("race",), ("clone", "mul")),
    "wait_stream": Pair(
        f"{PYTORCH}/issues/185546",
        wait_stream,
        ("race",),
        ("mul", "add"),
        (("order", "any"),),
    ),
    "independent_kernel": Pair(
        f"{PYTORCH}/pull/185627", independent_kernel, ("not-forked",), ("add",)
    ),
    "host_barrier": Pair(f"{PYTORCH}/pull/189096", host_barrier, ("race",), ("neg",)),
    "bare_record": Pair(f"{PYTORCH}/pull/189096", bare_record, ("race",), ("neg",)),
    "written_back": Pair(f"{PYTORCH}/issues/197416", written_back, ("written-back",), ("copy_",)),
    "recorded_before_write": Pair(
        f"{PYTORCH}/pull/177580", recorded_before_write, ("race",), ("copy_", "mul")
    ),
    "side_input": Pair(f"{PYTORCH}/pull/197562", side_input, ("not-forked",), ("mul",)),
    "side_consumer": Pair(f"{PYTORCH}/pull/183711", side_consumer, ("race",), ("add", "mul")),
    "freed_on_side": Pair(f"{PYTORCH}/pull/168061", freed_on_side, ("freed-early",), ("mul",)),
    "lost_join": Pair(f"{PYTORCH}/pull/178027", lost_join, ("race", "freed-early"), ("mul", "neg")),
    "beside_the_wait": Pair(
        f"{PYTORCH}/pull/115104", beside_the_wait, ("unwaited",), ("all_gather_into_tensor",)
    ),
    "wait_in_another_graph": Pair(
        f"{PYTORCH}/issues/192000", wait_in_another_graph, ("unwaited",), ("all_reduce",)
    ),
}

if not hasattr(STREAMS, "synchronize_stream"):  # from torch 2.12 on
    del PAIRS["host_barrier"]


@pytest.mark.parametrize("name", PAIRS)
def test_the_fault_is_found(name: str) -> None:
    pair = PAIRS[name]
    report = check_graph(pair.make(False), **dict(pair.options))
    assert report.kinds() == set(pair.kinds), str(report)
    named = {op.text.partition(" = ")[0] for op in report.errors[0].ops}
    assert set(pair.nodes) <= named, str(report)
    assert all(op.loc.startswith("model.py:") for op in report.errors[0].ops if op.line)


@pytest.mark.parametrize("name", PAIRS)
def test_the_fixed_graph_is_sound(name: str) -> None:
    pair = PAIRS[name]
    report = check_graph(pair.make(True), **dict(pair.options))
    assert report.sound, str(report)
