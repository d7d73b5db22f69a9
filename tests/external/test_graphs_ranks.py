"""Functional collectives in graphs: waits, ranks that differ, messages, groups."""

from __future__ import annotations

import operator
import random

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.fsdp  # registers its operators
from tests.external.graphs_support import AOT, C10D, Maker, fake_world, traced
from torch import fx

from interlace import check_graph
from interlace.errors import SoundnessError, TeamError
from interlace_check.graphs.check import Order


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
    assert check_graph(collectives).sound
    report = check_graph([collectives] * 4)
    assert report.sound, str(report)
    assert report.num_ranks == 4


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


def two(order: str, groups: str = "00", wait_between: bool = False) -> fx.GraphModule:
    """Two collectives in an order, of groups."""
    g = Maker()
    inputs = {"a": g.input("x"), "b": g.input("y")}
    begun = {}
    results = []
    for name in order:
        group = groups["ab".index(name)]
        op = C10D.all_reduce if name == "a" else C10D.all_gather_into_tensor
        arguments = ("sum", group) if name == "a" else (2, group)
        begun[name] = g.call(op.default, inputs[name], *arguments)
        if wait_between:
            results.append(g.call(C10D.wait_tensor.default, begun[name]))
    if not wait_between:
        results = [g.call(C10D.wait_tensor.default, begun[name]) for name in "ab"]
    return g.done(*results)


def test_ranks_that_issue_in_another_order() -> None:
    report = check_graph([two("ab"), two("ba")])
    assert report.kinds() == {"mismatch"}
    told = str(report)
    assert "ranks 0 and 1 meet in collective 1 of group '0'" in told
    assert "all_reduce and all_gather" in told
    assert check_graph([two("ba"), two("ba")]).sound


def test_groups_in_another_order_deadlock_where_ranks_wait_between() -> None:
    report = check_graph([two("ab", "01", True), two("ba", "01", True)])
    assert report.kinds() == {"deadlock"}
    nodes = {op.text.partition(" = ")[0] for op in report.errors[0].ops}
    assert {"all_reduce", "all_gather_into_tensor"} <= nodes
    report = check_graph([two("ab", "01"), two("ba", "01")])
    assert report.sound
    assert "launch-order" in {finding.kind for finding in report.findings}


def test_a_rank_that_leaves_a_collective_out() -> None:
    report = check_graph([two("ab"), short()])
    assert report.kinds() == {"mismatch"}
    assert "rank 1 issues only 1 collectives of group '0'" in str(report)


def short() -> fx.GraphModule:
    g = Maker()
    begun = g.call(C10D.all_reduce.default, g.input("x"), "sum", "0")
    return g.done(g.call(C10D.wait_tensor.default, begun))


@pytest.mark.parametrize(
    ("what", "arguments", "shape"),
    [("reduce_op", ("max", "0"), (8,)), ("elements of input 0", ("sum", "0"), (9,))],
)
def test_ranks_that_disagree(what: str, arguments: tuple[str, str], shape: tuple[int]) -> None:
    def graph(arguments: tuple[str, str], shape: tuple[int]) -> fx.GraphModule:
        g = Maker()
        begun = g.call(C10D.all_reduce.default, g.input("x", *shape), *arguments)
        return g.done(g.call(C10D.wait_tensor.default, begun))

    report = check_graph([graph(("sum", "0"), (8,)), graph(arguments, shape)])
    assert report.kinds() == {"mismatch"}
    assert what in str(report)


def test_uneven_all_to_all() -> None:
    def graph(taken: list[int], given: list[int]) -> fx.GraphModule:
        g = Maker()
        x = g.input("x", sum(given))
        begun = g.call(C10D.all_to_all_single.default, x, taken, given, "0")
        return g.done(g.call(C10D.wait_tensor.default, begun))

    assert check_graph([graph([1, 2], [1, 3]), graph([3, 1], [2, 1])]).sound
    report = check_graph([graph([1, 2], [1, 3]), graph([4, 1], [2, 1])])
    assert report.kinds() == {"mismatch"}
    assert "3 rows are given where 4 are taken" in str(report)


def message(kind: str, peer: int, first: str = "") -> fx.GraphModule:
    g = Maker()
    x = g.input("x")
    held = [x]
    for each in (first, kind) if first else (kind,):
        op = C10D.isend if each == "send" else C10D.irecv
        target = g.call(AOT.clone.default, x)
        begun = g.call(op.default, target, peer, 0, "0")
        held.append(g.call(C10D.wait_tensor.default, begun))
    return g.done(*held)


@pytest.mark.skipif(not hasattr(C10D, "isend"), reason="from torch 2.12 on")
def test_messages() -> None:
    assert check_graph([message("send", 1), message("recv", 0)]).sound
    report = check_graph([message("send", 1), message("send", 0)])
    assert report.kinds() == {"mismatch"}
    assert "messages do not pair up: group '0'" in str(report)
    assert check_graph([message("recv", 1, "send"), message("send", 0, "recv")]).sound
    report = check_graph([message("recv", 1, "send"), message("recv", 0, "send")])
    assert "deadlock" in report.kinds()


def test_groups_of_some_ranks() -> None:
    def graph(group: str) -> fx.GraphModule:
        g = Maker()
        begun = g.call(C10D.all_gather_into_tensor.default, g.input("x"), 2, group)
        return g.done(g.call(C10D.wait_tensor.default, begun))

    graphs = [graph("left"), graph("left"), graph("right"), graph("right")]
    assert check_graph(graphs).sound
    assert check_graph(graphs, groups={"left": (0, 1), "right": (2, 3)}).sound
    with pytest.raises(TeamError, match="group 'left'"):
        check_graph(graphs, groups={"left": (0, 2)})
    with pytest.raises(TeamError, match="group 'left' has 2 ranks"):
        check_graph([graph("left"), graph("right"), graph("right"), graph("right")])


def test_groups_without_a_size() -> None:
    def graph(group: str) -> fx.GraphModule:
        g = Maker()
        begun = g.call(C10D.all_reduce.default, g.input("x"), "sum", group)
        return g.done(g.call(C10D.wait_tensor.default, begun))

    assert check_graph([graph("a"), graph("a"), graph("b"), graph("b")]).sound
    assert check_graph([graph("a"), graph("a"), graph("a"), graph("b")]).kinds() == {"mismatch"}


def test_swapping_collectives_on_one_rank(collectives: fx.GraphModule, seed: int) -> None:
    """Whichever two neighbours that hang on no common data one rank swaps, it is found."""
    rng = random.Random(seed)
    g = Maker()
    begun = [g.call(C10D.all_reduce.default, g.input(f"x{i}", 2 + i), "sum", "0") for i in range(5)]
    gm = g.done(*[g.call(C10D.wait_tensor.default, each) for each in begun])
    assert check_graph([gm, gm]).sound
    other = changed(gm)
    at = rng.randrange(4)
    nodes = [node for node in other.graph.nodes if node.name.startswith("all_reduce")]
    inputs = [node for node in other.graph.nodes if node.op == "placeholder"]
    for node in reversed(inputs):
        other.graph.find_nodes(op="placeholder")[0].prepend(node)
    nodes[at + 1].append(nodes[at])
    report = check_graph([gm, other])
    assert report.kinds() == {"mismatch"}
    assert f"collective {at + 1} of group '0'" in str(report)


def test_the_report_is_data(collectives: fx.GraphModule) -> None:
    report = check_graph([two("ab"), two("ba")])
    data = report.to_json()
    assert data["sound"] is False
    assert data["findings"][0]["kind"] == "mismatch"
    assert data["findings"][0]["ops"][0]["loc"].startswith("model.py:")
    with pytest.raises(SoundnessError, match="unsound: 1 fault"):
        report.raise_if_unsound()
    check_graph(collectives).raise_if_unsound()
