"""Graphs that Inductor's passes have reordered and bucketed: sound, and unsound without a wait."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.utils
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.utils._runtime_estimation
from tests.external.graphs_support import fake_world, traced
from torch import fx
from torch._inductor import comms, config
from torch._inductor.fx_passes import bucketing, overlap_scheduling
from torch._inductor.fx_passes.post_grad import stable_topological_sort
from torch._inductor.virtualized import V

from interlace import check_graph

PASS = (
    "simple_overlap"  # on by default from torch 2.14 on
    if hasattr(comms, "simple_overlap")
    else "reorder_compute_and_comm_for_overlap"
)


class Scheduled(Exception):
    """Inductor has scheduled: nothing needs to be compiled."""


def mixed(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    world = dist.group.WORLD
    assert world is not None
    summed = funcol.all_reduce(x, "sum", world) + 1
    product = y @ y
    gathered = funcol.all_gather_tensor(w, 0, world)
    return summed + product @ product, gathered * 2


def layers(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    world = dist.group.WORLD
    assert world is not None
    for weight in weights:
        x = x @ funcol.all_gather_tensor(weight, 0, world)
    one = funcol.reduce_scatter_tensor(x, "sum", 0, world)
    two = funcol.reduce_scatter_tensor(x * 2, "sum", 0, world)
    return funcol.all_reduce(one, "sum", world) + funcol.all_reduce(two, "sum", world)


@contextlib.contextmanager
def scheduling(found: dict[str, Any]) -> Iterator[None]:
    """Notes what Inductor's scheduler made of the nodes, and stops there."""
    real = getattr(comms, PASS)

    def run(nodes: Any, *args: Any) -> Any:
        found["before"], found["gm"] = list(nodes), V.graph.module
        found["after"] = real(list(nodes), *args)
        raise Scheduled

    options: dict[str, Any] = {"force_disable_caches": True, "fx_graph_cache": False}
    if PASS != "simple_overlap":
        options["reorder_for_compute_comm_overlap"] = True
        options["reorder_for_compute_comm_overlap_passes"] = [
            "sink_waits",
            "raise_comms",
            "reorder_compute_for_overlap",
        ]
    with mock.patch.object(comms, PASS, run), config.patch(options):
        yield


def as_scheduled(gm: fx.GraphModule, nodes: Any) -> fx.GraphModule:
    """The post-grad graph with its nodes in the order of the scheduler's."""
    graph = gm.graph
    known = {node.name: node for node in graph.nodes}
    order: dict[fx.Node, None] = dict.fromkeys(graph.find_nodes(op="placeholder"))

    def put(node: fx.Node) -> None:
        for used in node.all_input_nodes:
            if used not in order:
                put(used)
        order[node] = None

    for scheduled in nodes:
        for each in scheduled.get_nodes():
            origins = [known[o.name] for o in each.node.get_origins() if o.name in known]
            for node in sorted(origins, key=lambda o: list(known).index(o.name)):
                if node not in order and node.op == "call_function":
                    put(node)
    output = graph.output_node()
    for node in order:
        if node.op != "placeholder":
            output.prepend(node)
    graph.lint()
    return gm


@pytest.mark.timeout(120)
def test_what_inductor_schedules_is_sound() -> None:
    found: dict[str, Any] = {}
    with fake_world(4), scheduling(found), pytest.raises(Exception, match="Scheduled"):
        torch.compile(mixed, fullgraph=True)(*(torch.ones(64, 64) for _ in range(3)))
    torch._dynamo.reset()
    assert [n.get_name() for n in found["before"]] != [n.get_name() for n in found["after"]]
    gm = as_scheduled(found["gm"], found["after"])
    names = [node.name for node in gm.graph.nodes]
    assert names.index("all_reduce") < names.index("mm") < names.index("wait_tensor")
    report = check_graph(gm)
    assert report.sound, str(report)
    wait = next(node for node in gm.graph.nodes if node.name == "wait_tensor")
    wait.replace_all_uses_with(wait.args[0])
    gm.graph.erase_node(wait)
    assert check_graph(gm).kinds() == {"unwaited"}


def bucketed(name: str, *modes: Any) -> Callable[[fx.GraphModule], Any]:
    return lambda gm: getattr(bucketing, name)(gm, lambda index: 1e6, *modes)


PASSES: dict[str, Callable[[fx.GraphModule], Any]] = {
    "all_gather": bucketed("bucket_all_gather"),
    "all_gather by custom ops": bucketed("bucket_all_gather", "custom_ops"),
    "reduce_scatter": bucketed("bucket_reduce_scatter"),
    "all_reduce": bucketed("bucket_all_reduce"),
}


def overlapped(gm: fx.GraphModule, **options: Any) -> fx.GraphModule:
    with contextlib.ExitStack() as stack:
        for name in ("get_gpu_dram_gbps", "get_device_tflops"):
            for module in (torch._inductor.utils, torch.utils._runtime_estimation):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, return_value=100.0))
        return overlap_scheduling.schedule_overlap_bucketing(
            gm,
            compute_estimator="analytical",
            custom_runtime_estimation=lambda node, size=None: 1.0,
            **options,
        )


@pytest.fixture(scope="module")
def traced_layers() -> Iterator[fx.GraphModule]:
    with fake_world(4):
        yield traced(layers, torch.ones(64, 64), *[torch.ones(16, 64)] * 3)[0]


@pytest.mark.parametrize("name", PASSES)
def test_buckets_are_sound(traced_layers: fx.GraphModule, name: str) -> None:
    gm = copy.deepcopy(traced_layers)
    PASSES[name](gm)
    stable_topological_sort(gm.graph)
    assert len(gm.graph.nodes) != len(traced_layers.graph.nodes)
    report = check_graph(gm)
    assert report.sound, str(report)
    assert check_graph(gm, order="any").sound


@pytest.mark.parametrize(
    "options",
    [{}, {"collective_bucketing": True}, {"insert_overlap_deps": True}],
    ids=["order", "buckets", "control_deps"],
)
def test_overlap_schedules_are_sound(
    traced_layers: fx.GraphModule, options: dict[str, Any]
) -> None:
    known = inspect.signature(overlap_scheduling.schedule_overlap_bucketing).parameters
    if "compute_estimator" not in known:
        pytest.skip("from torch 2.12 on, times may be given")
    assert set(options) <= set(known)
    gm = overlapped(copy.deepcopy(traced_layers), **options)
    report = check_graph(gm)
    assert report.sound, str(report)
