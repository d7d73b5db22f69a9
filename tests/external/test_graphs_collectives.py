"""Functional collectives in graphs, and their waits."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.fsdp  # registers its operators
from tests.external.graphs_support import AOT, C10D, Maker, fake_world, traced
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from interlace import check_graph
from interlace.errors import SoundnessError, UnsupportedError
from interlace_check.graphs.checking import Order

TRACED = ("_allgather_base_", "_reduce_scatter_base_", "alltoall_base_", "allreduce_")


def every_form(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    world = dist.group.WORLD
    assert world is not None
    summed = funcol.all_reduce(x, "sum", world)
    gathered = funcol.all_gather_tensor(w, 0, world)
    part = funcol.reduce_scatter_tensor(gathered @ summed, "sum", 0, world)
    swapped = funcol.all_to_all_single(part, None, None, world)
    both = funcol.all_reduce_coalesced([part, swapped], "sum", world)
    return both[0] + funcol.broadcast(both[1], 0, world)


@pytest.fixture(scope="module")
def collectives() -> fx.GraphModule:
    with fake_world(4):
        return traced(every_form, torch.ones(4, 4), torch.ones(4, 4))[0]


def changed(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy to change."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, copy)


def named(gm: fx.GraphModule, name: str) -> fx.Node:
    return next(node for node in gm.graph.nodes if node.name == name)


def test_every_form_is_sound(collectives: fx.GraphModule) -> None:
    report = check_graph(collectives)
    assert report.sound, str(report)


def test_each_wait_that_is_left_out_is_found(collectives: fx.GraphModule) -> None:
    waits = [n.name for n in collectives.graph.nodes if n.name.startswith("wait_tensor")]
    waits = [name for name in waits if name != "wait_tensors"]  # of 2.15, for a coalesced one
    assert len(waits) >= 5
    for name in waits:
        gm = changed(collectives)
        wait = named(gm, name)
        begun = wait.args[0]
        wait.replace_all_uses_with(begun)  # pyright: ignore
        gm.graph.erase_node(wait)
        report = check_graph(gm)
        if "getitem" in begun.name:  # pyright: ignore
            continue  # one of two results of one collective: the other's wait is its wait, too
        assert report.kinds() == {"unwaited"}, f"{name}: {report}"
        assert begun.name in {op.text.partition(" = ")[0] for op in report.errors[0].ops}  # pyright: ignore


def test_a_read_before_the_wait_is_found() -> None:
    g = Maker()
    x = g.input("x")
    begun = g.call(C10D.all_reduce.default, x, "sum", "0")
    early = g.call(AOT.neg.default, begun)
    waited = g.call(C10D.wait_tensor.default, begun)
    report = check_graph(g.done(early, waited))
    assert report.kinds() == {"unwaited"}
    assert "neg reads all_reduce, and does not wait for all_reduce" in str(report)


def test_an_argument_written_under_way_is_found() -> None:
    g = Maker()
    x = g.call(AOT.clone.default, g.input("x"))
    begun = g.call(C10D.all_reduce.default, x, "sum", "0")
    g.call(AOT.mul_.Tensor, x, 2)
    report = check_graph(g.done(g.call(C10D.wait_tensor.default, begun), x))
    assert report.kinds() == {"unwaited"}


def test_in_place_forms() -> None:
    for waited in (True, False):
        g = Maker()
        x = g.call(AOT.clone.default, g.input("x"))
        begun = g.call(C10D.all_reduce_.default, x, "sum", "0")
        if waited:
            g.call(C10D.wait_tensor.default, begun)
        report = check_graph(g.done(g.call(AOT.neg.default, x)))
        assert report.kinds() == (set() if waited else {"unwaited"})


def test_a_result_that_nobody_waits_for() -> None:
    g = Maker()
    x = g.input("x")
    g.call(C10D.all_reduce.default, x, "sum", "0")
    report = check_graph(g.done(g.call(AOT.neg.default, x)))
    assert report.kinds() == {"never-waited"}


def test_a_wait_in_another_graph() -> None:
    """A caller that waits later may be given what is under way."""
    g = Maker()
    gm = g.done(g.call(C10D.all_reduce.default, g.input("x"), "sum", "0"))
    assert check_graph(gm).kinds() == {"unwaited"}
    assert check_graph(gm, results="later").sound


def test_a_wait_on_another_stream() -> None:
    """`wait_tensor` makes the stream of its own node wait, and no other."""
    g = Maker()
    x = g.input("x")
    begun = g.call(C10D.all_reduce.default, x, "sum", "0")
    g.sync("wait_stream", 1, 0)
    g.call(C10D.wait_tensor.default, begun, stream=1)
    report = check_graph(g.done(g.call(AOT.neg.default, begun)))
    assert report.kinds() == {"unwaited", "freed-early"}


@pytest.mark.parametrize("order", ["listed", "any"])
@pytest.mark.parametrize("stream", [0, 1])
def test_a_second_wait_is_for_nothing(stream: int, order: Order) -> None:
    """Torch forgets what was waited for, so that another stream has to wait for the first."""
    g = Maker()
    begun = g.call(C10D.all_reduce.default, g.input("x"), "sum", "0")
    first = g.call(C10D.wait_tensor.default, begun)
    second = g.call(C10D.wait_tensor.default, begun, stream=stream)
    gm = g.done(first, g.call(AOT.neg.default, second, stream=stream))
    report = check_graph(gm, order=order, results="later")
    assert report.kinds() == ({"unwaited"} if stream else set())


def test_one_wait_is_for_all_of_a_coalesced_collective() -> None:
    """Its results have one work: whichever is waited for, all are there."""
    g = Maker()
    begun = g.call(C10D.all_reduce_coalesced_.default, [g.input("x"), g.input("y")], "sum", "0")
    results = []
    for index in range(2):
        results.append(g.graph.call_function(operator.getitem, (begun, index)))
        results[-1].meta["val"] = begun.meta["val"][index]
    g.call(C10D.wait_tensor.default, results[0])
    assert check_graph(g.done(g.call(AOT.neg.default, results[1]))).sound


@pytest.mark.parametrize("early", [False, True])
def test_what_fsdp_copies_into_its_gathered_tensor(early: bool) -> None:
    """Its schema does not say that it fills its argument, of which both results are views."""
    g = Maker()
    full = g.call(AOT.neg.default, g.input("full", 8))
    copy_in = torch.ops.fsdp.all_gather_copy_in.default
    both = g.graph.call_function(copy_in, ([g.input("x", 4)], full, [4], 4, 0))
    both.meta["val"] = (full.meta["val"][:4], full.meta["val"])
    part, whole = (g.graph.call_function(operator.getitem, (both, i)) for i in range(2))
    for index, node in enumerate((part, whole)):
        node.meta["val"] = both.meta["val"][index]
    gathered = g.call(C10D.all_gather_into_tensor_out.default, part, 2, "0", out=whole)
    results = [g.call(AOT.neg.default, full)] if early else []
    g.call(C10D.wait_tensor.default, gathered)
    results.append(g.call(AOT.abs.default, full))
    report = check_graph(g.done(*results))
    assert report.kinds() == ({"unwaited"} if early else set())


def test_the_report_is_data(collectives: fx.GraphModule) -> None:
    g = Maker()
    begun = g.call(C10D.all_reduce.default, g.input("x"), "sum", "0")
    report = check_graph(g.done(g.call(AOT.neg.default, begun)))
    data = report.to_json()
    assert data["sound"] is False
    assert data["findings"][0]["kind"] == "unwaited"
    assert data["findings"][0]["ops"][0]["loc"].startswith("model.py:")
    with pytest.raises(SoundnessError, match="unsound: 1 fault"):
        report.raise_if_unsound()
    check_graph(collectives).raise_if_unsound()


def every_call(x: torch.Tensor, later: bool) -> torch.Tensor:
    """torch.distributed's functions, which make_fx traces as operators of `c10d::`."""
    full, part, swapped = torch.empty(16, 4), torch.empty(4, 4), torch.empty(4, 4)
    dist.all_gather_into_tensor(full, x)
    dist.reduce_scatter_tensor(part, full)
    dist.all_to_all_single(swapped, part)
    dist.all_reduce(swapped, async_op=later)
    return swapped + 1


@pytest.mark.parametrize("later", [False, True])
def test_calls_that_make_fx_traces(later: bool) -> None:
    with fake_world(4):
        graph = make_fx(lambda x: every_call(x, later), tracing_mode="fake")(torch.ones(4, 4))
        names = {str(node.target) for node in graph.graph.nodes}
        assert {f"c10d.{name}.default" for name in TRACED} <= names
        if later:
            with pytest.raises(UnsupportedError, match="allreduce_ with async_op=True"):
                check_graph(graph)
        else:
            assert str(check_graph(graph)).startswith("sound (1 ranks, 12 ops")
