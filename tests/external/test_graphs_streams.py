"""User streams in graphs: traced ones, those that torch's own pass rewrites, each rule alone."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from tests.external.graphs_support import AOT, STREAMS, Maker, streams_on_cpu, traced
from torch import fx
from torch._functorch._aot_autograd import streams

from interlace import check_graph

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
THREADS = hasattr(streams, "_collect_wait_stream_forward_deps") or hasattr(
    streams, "_collect_sync_forward_deps"
)


def two_consumers() -> fx.GraphModule:
    """Traced: one event, two streams that wait for it, two joins."""
    with streams_on_cpu() as current:
        one, two = torch.Stream(device="cpu"), torch.Stream(device="cpu")
        fork, join, join2 = (torch.Event(device="cpu") for _ in range(3))

        def function(x: torch.Tensor) -> torch.Tensor:
            y = x + 1
            fork.record(current)
            with one:
                fork.wait()
                a = y * 2
                join.record()
            with two:
                fork.wait()
                b = y * 3
                join2.record()
            current.wait_event(join)
            current.wait_event(join2)
            return a + b

        graphs: list[fx.GraphModule] = []
        try:
            traced(function, torch.ones(4), into=graphs)
        except (RuntimeError, ValueError):  # a CPU's event cannot be recorded; the graph is there
            pass
    return graphs[0]


def test_a_traced_graph_as_listed() -> None:
    """Dynamo 2.11 calls `Stream.wait_event` as a method, and the joins are gone (#178027)."""
    report = check_graph(two_consumers(), order="listed")
    if TORCH < (2, 12):
        assert report.kinds() == {"race", "freed-early"}
        return
    assert report.sound, str(report)
    assert {finding.kind for finding in report.findings} == {"current-stream"}


def test_a_traced_graph_in_any_order() -> None:
    """Up to 2.13, torch's pass lets consumers of an event go before their wait (#186022)."""
    report = check_graph(two_consumers())
    assert report.sound == (TORCH >= (2, 15))
    if TORCH < (2, 12):
        return
    for finding in report.errors:
        assert finding.kind == "race"
        assert "control_deps" in finding.fix
        assert all("test_graphs_streams.py" in op.loc for op in finding.ops)


def wrapped(make: Any) -> fx.GraphModule:
    """A graph after torch's own pass."""
    g = Maker()
    gm = make(g)
    streams.wrap_all_sync_nodes_with_control_deps(gm)
    gm.graph.lint()
    return gm


@pytest.mark.skipif(not THREADS, reason="torch < 2.13 leaves wait_stream alone")
def test_torch_threads_a_wait_stream() -> None:
    """`wait_stream` is threaded from 2.13 on: no order of the nodes is wrong."""

    def make(g: Maker) -> fx.GraphModule:
        x, y = g.input("x"), g.input("y")
        a = g.call(AOT.mul.Tensor, x, 2)
        g.sync("wait_stream", 1, 0)
        b = g.call(AOT.add.Tensor, a, 1, stream=1)
        c = g.call(AOT.add.Tensor, y, 1, stream=1)
        g.sync("wait_stream", 0, 1)
        return g.done(g.call(AOT.add.Tensor, b, c))

    assert check_graph(make(Maker()), order="listed").sound
    assert not check_graph(make(Maker()), order="any").sound
    gm = wrapped(make)
    assert check_graph(gm, order="listed").sound
    report = check_graph(gm)
    assert report.sound, str(report)


JOINS = ["join", *(["host", "device", "record2"] if hasattr(STREAMS, "synchronize_event") else [])]


def joined(*, listed: tuple[str, ...]) -> set[str]:
    """The kinds of fault of: y on the caller's stream, z of it on stream 1, w of both; with these
    syncs, of `fork record wait join`."""
    g = Maker()
    x = g.input("x")
    y = g.call(AOT.add.Tensor, x, 1)
    if "record" in listed:
        g.sync("record_event", 5, 0)
    if "wait" in listed:
        g.sync("wait_event", 5, 1)
    if "fork" in listed:
        g.sync("wait_stream", 1, 0)
    z = g.call(AOT.mul.Tensor, y, 2, stream=1)
    if "join" in listed:
        g.sync("wait_stream", 0, 1)
    if "host" in listed:
        g.sync("synchronize_stream", 1)
    if "device" in listed:
        g.call(STREAMS.synchronize_device.default, "cuda", 0)
    if "record2" in listed:
        g.sync("record_event", 6, 1)
        g.sync("synchronize_event", 6)
    w = g.call(AOT.add.Tensor, z, y)
    return set(check_graph(g.done(w)).kinds())


@pytest.mark.parametrize("fork", [("fork",), ("record", "wait")])
@pytest.mark.parametrize("join", JOINS)
def test_every_fork_and_join(fork: tuple[str, ...], join: str) -> None:
    assert joined(listed=(*fork, join)) == set()
    assert joined(listed=fork) == {"race", "freed-early"}
    assert joined(listed=(join,)) == {"race"}


def test_a_wait_before_its_record() -> None:
    g = Maker()
    x = g.input("x")
    g.sync("wait_event", 5, 1)
    y = g.call(AOT.add.Tensor, x, 1)
    g.sync("record_event", 5, 0)
    z = g.call(AOT.mul.Tensor, y, 2, stream=1)
    g.sync("wait_stream", 0, 1)
    report = check_graph(g.done(z))
    assert report.kinds() == {"early-wait", "race"}
    assert "records only later" in str(report)


def test_an_event_from_outside_orders_nothing_here() -> None:
    g = Maker()
    x = g.input("x")
    g.sync("wait_event", 9, 1)
    y = g.call(AOT.add.Tensor, x, 1, stream=1)
    g.sync("wait_stream", 0, 1)
    gm = g.done(y)
    assert check_graph(gm).kinds() == {"not-forked"}
    report = check_graph(gm, inputs="ready")
    assert report.sound
    assert "outside-event" in {finding.kind for finding in report.findings}


def test_results_that_the_caller_joins() -> None:
    g = Maker()
    x = g.input("x")
    g.sync("wait_stream", 1, 0)
    y = g.call(AOT.add.Tensor, x, 1, stream=1)
    gm = g.done(y)
    assert check_graph(gm).kinds() == {"not-joined"}
    assert check_graph(gm, results="later").sound


def test_the_callers_stream_by_another_index() -> None:
    g = Maker()
    x = g.input("x")
    y = g.call(AOT.add.Tensor, x, 1)
    g.sync("wait_stream", 1, 4)
    z = g.call(AOT.mul.Tensor, y, 2, stream=1)
    g.sync("wait_stream", 4, 1)
    gm = g.done(z)
    report = check_graph(gm)
    assert report.sound
    assert "current-stream" in {finding.kind for finding in report.findings}
    assert check_graph(gm, current=(0, 4)).sound
    assert {"race", "not-joined"} <= check_graph(gm, current=(0,)).kinds()


def test_record_stream_keeps_memory_from_use_by_others() -> None:
    """As `sync_dealloc` does: the report freed_on_side shows that, and the fault without either."""
    g = Maker()
    x = g.input("x")
    y = g.call(AOT.add.Tensor, x, 1)
    g.sync("wait_stream", 1, 0)
    z = g.call(AOT.mul.Tensor, y, 2, stream=1)
    g.call(STREAMS.record_stream.default, y, 1)
    w = g.call(AOT.add.Tensor, x, 2)
    g.sync("wait_stream", 0, 1)
    assert check_graph(g.done(z, w)).sound


def test_views_share_memory_and_halves_do_not() -> None:
    def halves(second: int) -> set[str]:
        g = Maker()
        x = g.input("x", 8, 4)
        g.sync("wait_stream", 1, 0)
        y = g.call(AOT.clone.default, x)
        g.sync("wait_stream", 1, 0)
        left = g.call(AOT.slice.Tensor, y, 1, 0, 2)
        right = g.call(AOT.slice.Tensor, y, 1, second, second + 2)
        g.call(AOT.mul_.Tensor, left, 2)
        g.call(AOT.mul_.Tensor, right, 3, stream=1)
        g.sync("wait_stream", 0, 1)
        return set(check_graph(g.done(y)).kinds())

    assert halves(2) == set()
    assert halves(1) == {"race"}


def test_random_programs_against_vector_clocks(seed: int) -> None:
    """Random nodes and syncs on three streams: the verdict of a few lines that run them."""
    rng = random.Random(seed)
    unsound = 0
    for _ in range(60):
        gm, racy = random_program(rng)
        report = check_graph(gm, inputs="ready", results="later")
        assert ("race" in report.kinds()) == racy, f"{gm.graph}\n{report}"
        unsound += racy
    assert 0 < unsound < 60


def random_program(rng: random.Random, threads: bool = False) -> tuple[fx.GraphModule, bool]:
    """A graph, and whether two of its nodes race.

    A clock of each stream says which nodes of every stream come before its next one. With
    `threads`, most syncs have a few tensors go through them (`control_deps`).
    """
    g = Maker()

    def sync(name: str, *args: int) -> None:
        if not threads or rng.random() < 0.2:
            anchors[name, args[0]] = g.sync(name, *args)
            return
        passed = rng.sample(range(len(tensors)), rng.randint(1, min(3, len(tensors))))
        before = [anchors[key] for key in sorted(anchors) if rng.random() < 0.7]
        given = [tensors[index] for index in passed]
        anchor, *after = g.control(name, args, (*before, *given), *given)
        anchors[name, args[0]] = anchor
        for index, tensor in zip(passed, after, strict=True):
            if tensors[index] in home:
                home[tensor] = home[tensors[index]]
            tensors[index] = tensor

    anchors: dict[tuple[str, int], fx.Node] = {}
    tensors = [g.input("x"), g.input("y")]
    home: dict[fx.Node, tuple[int, int]] = {}
    clocks = [[0, 0, 0] for _ in range(3)]
    events: dict[int, list[int]] = {}
    racy = False
    for _ in range(rng.randint(4, 14)):
        stream, other = rng.randrange(3), rng.randrange(3)
        match rng.randrange(6):
            case 0:
                event = rng.randrange(10, 12)
                sync("record_event", event, stream)
                events[event] = list(clocks[stream])
            case 1 if events:
                event = rng.choice(sorted(events))
                sync("wait_event", event, stream)
                clocks[stream] = list(map(max, clocks[stream], events[event]))
            case 2:
                sync("wait_stream", stream, other)
                clocks[stream] = list(map(max, clocks[stream], clocks[other]))
            case _:
                used = rng.choice(tensors)
                if used in home:
                    where, when = home[used]
                    racy |= clocks[stream][where] < when
                node = g.call(AOT.neg.default, used, stream=stream)
                clocks[stream][stream] += 1
                home[node] = stream, clocks[stream][stream]
                tensors.append(node)
    return g.done(*tensors), racy


def test_no_order_of_the_nodes_is_worse_than_any_order(seed: int) -> None:
    """What races in one order that the dependences allow is found without that order."""
    rng = random.Random(seed)
    found = {True: 0, False: 0}
    for _ in range(25):
        gm = random_program(rng, threads=True)[0]
        report = check_graph(gm, order="any", inputs="ready", results="later")
        racy = False
        for _ in range(6):
            shuffle(gm, rng)
            listed = check_graph(gm, order="listed", inputs="ready", results="later")
            racy |= "race" in listed.kinds()
        assert "race" in report.kinds() or not racy, f"{gm.graph}\n{report}"
        found[racy] += 1
    assert found[True]


def shuffle(gm: fx.GraphModule, rng: random.Random) -> None:
    """The nodes in a random order in which each comes after its arguments."""
    output = gm.graph.output_node()
    waiting = [node for node in gm.graph.nodes if node not in (output,)]
    done: set[fx.Node] = set()
    while waiting:
        ready = [n for n in waiting if all(used in done for used in n.all_input_nodes)]
        node = rng.choice(ready)
        waiting.remove(node)
        done.add(node)
        output.prepend(node)
    gm.graph.lint()
