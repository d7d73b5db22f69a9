"""Ways of using the compiler beside training: what is refused, saved and explained.

Everything runs on real processes and is compared with the same function run eagerly.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from tests.frontend.models import Function
from tests.support.pool import Pool
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import interlace
from interlace.demo.model import Transformer, parallelize
from interlace.demo.plan import ModelConfig
from interlace.errors import UnsupportedError
from interlace.frontend import capture
from interlace.frontend.explain import explain_bound
from interlace.ir import Collective, Program, View


def mesh_of() -> DeviceMesh:
    """All ranks of the pool as one axis; what was compiled before is forgotten."""
    torch.compiler.reset()
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def whole(value: Any) -> Tensor:
    """A DTensor's shard, or the tensor itself; detached."""
    return (value.to_local() if isinstance(value, DTensor) else value).detach().clone()


def feed_forward(x: Any, up: Any, down: Any) -> Any:
    """Gather, two matmuls, scatter."""
    y: Any = F.relu(F.linear(x.redistribute(placements=[Replicate()]), up))
    y = F.linear(y, down)
    return y.redistribute(placements=[Shard(0)])


def arguments(mesh: DeviceMesh, rows: int = 8) -> list[Any]:
    """Small integers: rows sharded, the weights by columns and rows."""
    generator = torch.Generator().manual_seed(rows)
    sizes = {(rows, 8): Shard(0), (6, 8): Shard(0), (8, 6): Shard(1)}
    return [
        distribute_tensor(torch.randint(-2, 3, size, generator=generator).float(), mesh, [place])
        .requires_grad_()
        for size, place in sizes.items()
    ]  # fmt: skip


# -- what is refused -------------------------------------------------------------------------------


def refused(how: str) -> str:
    """A reduction that no collective of the design has, inside a compiled function."""
    torch.compiler.reset()
    world: Any = dist.group.WORLD
    fn = lambda x: funcol.all_reduce(x * 2, "bxor", world) + 1  # noqa: E731
    x = torch.ones(3, dtype=torch.int64)
    try:
        if how == "interlace.compile":
            interlace.compile(Function(fn), x)
        else:
            torch.compile(fn, backend="interlace")(x)
    except UnsupportedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["torch.compile", "interlace.compile"])
def test_a_reduction_that_cannot_be_lowered_is_a_typed_error(pool: Pool, how: str) -> None:
    for text in pool(2).run(refused, how):
        assert "reduction 'bxor'" in text
        if how == "torch.compile":  # TorchDynamo knows the line
            assert "test_modes.py" in text, "where it is"
        assert "Use one of" in text, "how to mend it"


def graph_on_cpu() -> str:
    """What asking for a CUDA graph on the CPU gives."""
    mesh = mesh_of()
    try:
        interlace.compile(Function(feed_forward), *arguments(mesh), options={"graph": True})
    except UnsupportedError as error:
        return str(error)
    return ""


def test_a_graph_on_the_cpu_is_refused(pool: Pool) -> None:
    for text in pool(2).run(graph_on_cpu):
        assert "graph=True captures CUDA graphs" in text


def test_static_outputs_without_a_graph_are_refused() -> None:
    with pytest.raises(interlace.errors.OptionError, match="graph=True"):
        interlace.Options(static_outputs=True)


# -- what is saved between forward and backward ---------------------------------------------------


def regather(choice: bool | str) -> dict[str, Any]:
    """Gradients, the sizes that forward leaves for backward, and backward's communications."""
    mesh = mesh_of()
    args = arguments(mesh, rows=16)
    options = {"regather": choice, "strategy": "peer", "timeout_s": 20.0}
    call = interlace.compile(Function(feed_forward), *args, options=options)
    y = call(*args)
    (y.to_local() ** 2).sum().backward()
    grads = [whole(arg.grad) for arg in args]
    forward, backward = call.bound
    boxes = forward.serial.boxes(dist.get_rank())
    returned = [view for view in forward.serial.returned() if isinstance(view, View)]
    left = [tuple(boxes(view).sizes) for view in returned]
    streams = {
        op.stream for op in backward.program.ops if "all_gather" in _kind(backward.program, op.site)
    }
    found = {
        "grads": [grad.tolist() for grad in grads],
        "saved": sorted(left[1:]),
        "gathers": sum(
            isinstance(op, Collective) and op.kind == "all_gather" for op in backward.serial.ops
        ),
        "streams": len(streams),
    }
    call.close()
    return found


def _kind(program: Program, site: int | None) -> str:
    return "" if site is None else program.site(site).kind


def test_backward_gathers_again_instead_of_saving(pool: Pool) -> None:
    keep, again = pool(2).run(regather, False), pool(2).run(regather, True)
    for kept, regathered in zip(keep, again, strict=True):
        assert kept["grads"] == regathered["grads"]
        assert (16, 8) in kept["saved"]
        assert (16, 8) not in regathered["saved"], "the gathered activation is saved"
        assert regathered["gathers"] == kept["gathers"] + 1
        assert regathered["streams"] > 1, "the gather of backward is not overlapped"


# -- every collective ----------------------------------------------------------------------------


def collectives_of_the_demo() -> list[tuple[int, int, list[tuple[str, str, str]], str]]:
    """For each graph: collectives, those without a site, (kind, strategy, reason), explain."""
    mesh = mesh_of()
    torch.manual_seed(0)
    config = ModelConfig(layers=2, dim=64, heads=4, hidden=128, sequence=64, batch=2)
    model = parallelize(Transformer(config), mesh)
    tokens = torch.randint(config.vocabulary, (config.batch, config.sequence))
    with capture() as captured:
        options: Any = {"timeout_s": 20.0, "strategy": "peer"}
        call = torch.compile(
            model, backend="interlace", options=options, fullgraph=True, dynamic=False
        )
        logits = call(tokens)
        logits.square().mean().backward()
        found: list[tuple[int, int, list[tuple[str, str, str]], str]] = []
        for bound in captured.bound:
            count = sum(isinstance(op, Collective) for op in bound.serial.ops)
            lost = sum(isinstance(op, Collective) and op.site is None for op in bound.program.ops)
            sites = [(site.kind, site.strategy, site.reason) for site in bound.program.sites]
            found.append((count, lost, sites, explain_bound([bound])))
    return found


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(4, marks=pytest.mark.slow)], ids=["2-ranks", "4-ranks"]
)
def test_every_collective_of_the_demo_is_explained(pool: Pool, ranks: int) -> None:
    for graphs in pool(ranks).run(collectives_of_the_demo, timeout_s=100):
        assert len(graphs) == 2
        for count, lost, sites, text in graphs:
            assert lost == 0
            assert count == len(sites) >= 10, "a collective of the graph has no site"
            listed = [line for line in text.splitlines() if line.split()[0].isdigit()]
            assert len(listed) == count
            for kind, strategy, reason in sites:
                assert reason, f"{kind} has no reason"
                assert strategy == "peer" or kind in ("all_gather", "reduce_scatter", "all_reduce")
        kinds = [kind for graph in graphs for kind, _, _ in graph[2]]
        assert kinds.count("all_gather_matmul") >= 2 * 4 + 1
        assert kinds.count("matmul_reduce_scatter") >= 2 * 4 + 1
