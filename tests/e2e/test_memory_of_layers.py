"""The memory of whole layers, counted from their Programs: no slot and no temporary more for more
layers, and no more saved than Inductor saves."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from tests.frontend.models import Model, parallelise, world_mesh
from tests.support.pool import Pool
from torch._inductor.compile_fx import compile_fx

from interlace.cost.memory import ALIGNMENT, RunMemory, rank_memory
from interlace.frontend.explain import graphs_of

FEW, MANY = 2, 3


def inductor_saves(layers: int) -> int:
    """Bytes that Inductor's forward of so many layers allocates for what it gives: outputs, and
    saved tensors that are no inputs."""
    found: list[int] = []

    def inner(graph: torch.fx.GraphModule, _: Sequence[Any], **more: Any) -> Any:
        values = [(node.op, node.meta.get("val")) for node in graph.graph.nodes]
        given = {key(v) for op, v in values if op == "placeholder" and torch.is_tensor(v)}
        outputs = [node.meta["val"] for node in graph.graph.output_node().all_input_nodes]
        new = {key(v): v.untyped_storage().nbytes() for v in outputs if torch.is_tensor(v)}
        if not more.get("is_backward"):
            found.append(sum(size for k, size in new.items() if k not in given))
        return make_boxed_func(graph.forward)

    backend = functools.partial(compile_fx, inner_compile=inner)
    train(torch.compile(layers_of(layers), backend=backend))
    (saved,) = found
    return saved


def key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def layers_of(layers: int) -> Model:
    torch.compiler.reset()
    torch.manual_seed(0)
    return parallelise(Model(layers), world_mesh())


def train(step: Any) -> None:
    step(torch.randint(32, (2, 8))).float().square().mean().backward()


def counted(layers: int) -> dict[str, RunMemory]:
    """The memory of so many layers, forward and backward, on this rank."""
    step = torch.compile(layers_of(layers), backend="interlace", options={"strategy": "peer"})
    train(step)
    bound = [each for graph in graphs_of(step) for each in graph.bound]
    return {each.kind: rank_memory(each.program, dist.get_rank()) for each in bound}


def lasting(memory: RunMemory, kind: str) -> list[int]:
    """Bytes of the arena, or of each slot."""
    return [b.nbytes for b in memory.blocks if b.kind == kind and b.name in memory.parts]


def growth(few: RunMemory, many: RunMemory, kind: str) -> int:
    """Bytes of a kind that a run of more layers holds more, where it holds most of them."""
    return max(many.levels[kind]) - max(few.levels[kind])


def test_growth_of_layers(pool: Pool) -> None:
    """Slots and arenas stay as they are, and the rest grows by what Inductor saves and by the
    gradients."""
    few, many = (pool(2).run(counted, layers, timeout_s=200.0) for layers in (FEW, MANY))
    saved = [pool(2).run(inductor_saves, layers, timeout_s=200.0) for layers in (1, FEW)]
    for rank, one, other in zip(range(2), few, many, strict=True):
        for kind in ("forward", "backward"):
            assert lasting(one[kind], "slots") == lasting(other[kind], "slots"), kind
            (arena,), (larger,) = (lasting(each[kind], "temporaries") for each in (one, other))
            assert larger <= arena + ALIGNMENT, f"{kind}: more than a gap of first fit"
        inductor = (saved[1][rank] - saved[0][rank]) * (MANY - FEW) // (FEW - 1)
        before, after = one["forward"], other["forward"]
        assert growth(before, after, "outputs") <= inductor
        assert after.peak - before.peak <= inductor
        before, after = one["backward"], other["backward"]
        gradients = growth(before, after, "outputs")
        assert after.peak - before.peak <= growth(before, after, "inputs") + gradients
