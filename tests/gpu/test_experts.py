"""Layers of experts on GPUs: the bits of eager and of in order, and faster than serial if large."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.e2e.experts import DIM, EXPERTS, ROOM, Experts, Gated, Grouped, Layers, filled, step
from tests.gpu.cases import shared, transport
from tests.passes.experts import layer
from tests.runtime.programs import world_group
from tests.support.captured import capture
from tests.support.pool import Ranks
from torch.distributed.device_mesh import init_device_mesh

from interlace.frontend import backend
from interlace.ir import parse
from interlace.options import Options
from interlace.passes import lower
from interlace.runtime import Executor

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(200)]

STRATEGIES: dict[str, dict[str, Any]] = {
    "serial": {"strategy": "serial"},
    "ring": {"strategy": "ring"},
    "peer": {"strategy": "peer"},
    "exchange": {"strategy": "exchange"},
    "auto-regions": {"strategy": "auto", "regions": "auto"},
    "graph": {"strategy": "peer", "graph": True},
}


def compare(kind: type[Experts], dtype: str, seed: int, options: dict[str, Any]) -> list[str]:
    """On one rank: which tensors of three steps differ from eager, on small integers."""
    torch.compiler.reset()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    world, wanted_type = dist.get_world_size(), getattr(torch, dtype)
    group = init_device_mesh("cuda", (world,), mesh_dim_names=("ep",)).get_group("ep")
    module = filled(kind(group, wanted_type), seed, exact=True).to("cuda")
    torch.manual_seed(seed + dist.get_rank())
    given = {"timeout_s": 30.0, "regions": "eager", **transport(), **options}
    wrong: list[str] = []
    with capture() as captured:
        compiled = torch.compile(
            module, backend=backend, options=given, fullgraph=True, dynamic=False
        )
        for number in range(3):  # the slots are used in turn
            sizes = (2, world * EXPERTS, ROOM, DIM)
            x, grad = torch.randint(-1, 2, sizes, device="cuda").to(wanted_type)
            wanted, got = step(module, module, x, grad), step(compiled, module, x, grad)
            torch.cuda.synchronize()
            for i, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
                if not torch.equal(mine, theirs):
                    wrong.append(f"step {number}, tensor {i}")
        kinds = [site.kind for site in captured.programs[0].sites]
        taken = {site.strategy for program in captured.programs for site in program.sites}
    if kinds != ["all_to_all_matmul", "matmul_all_to_all"]:
        wrong.append(f"sites {kinds}")
    if options["strategy"] not in (*taken, "auto"):
        wrong.append(f"no site is overlapped by {options['strategy']}: {taken}")
    torch.compiler.reset()
    return wrong


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equals_eager_on_integers(gpus: Ranks, strategy: str, dtype: str, seed: int) -> None:
    for wrong in gpus.run(compare, Experts, dtype, seed, STRATEGIES[strategy], timeout_s=150):
        assert not wrong


@pytest.mark.parametrize("kind", [Gated, Grouped, Layers])
def test_other_spellings(gpus: Ranks, kind: type[Experts], seed: int) -> None:
    dtype = "float32" if kind is Gated else "bfloat16"
    for wrong in gpus.run(compare, kind, dtype, seed, STRATEGIES["peer"], timeout_s=150):
        assert not wrong


WIDE, INNER = 4096, 3584
"""From each rank to each of four experts a rank, and the sizes of an 8x7B model's, halved."""


def inputs_of(world: int, tokens: int, seed: int) -> list[torch.Tensor]:
    """Tokens and both weights of this rank, in bf16."""
    g = torch.Generator("cuda").manual_seed(seed + dist.get_rank())
    shapes = ((world * 4, tokens, WIDE), (4, WIDE, INNER), (4, INNER, WIDE))
    return [
        torch.randn(shape, generator=g, device="cuda", dtype=torch.bfloat16) / shape[-2] ** 0.5
        for shape in shapes
    ]


def prepared(world: int, tokens: int, protocol: str | None = None, **options: Any) -> Executor:
    """A layer of four experts a rank, bound."""
    chosen = Options(timeout_s=30.0, **transport(), **options)
    program = lower(parse(layer(world, 4, tokens, WIDE, INNER, "bf16")), chosen, protocol=protocol)
    groups = {"tp": world_group()}
    return Executor(program, groups=groups, device="cuda", options=chosen).prepare()


def compare_in_order(seed: int) -> list[str]:
    """On one rank: which strategies give other bits than their ops one after another."""
    world, wrong = dist.get_world_size(), []
    inputs = inputs_of(world, 100, seed)
    messages = () if shared() else ("ring",)
    for name in (*messages, "get", "put"):
        results: list[torch.Tensor] = []
        for in_order in (False, True):
            way = STRATEGIES["peer" if name in ("get", "put") else name]
            one = name if name in ("get", "put") else None
            executor = prepared(world, 100, one, in_order=in_order, **way)
            for _ in range(3):
                (result,) = executor.run(inputs)
            executor.synchronize()
            results.append(result.clone())
            torch.cuda.synchronize()
            dist.barrier()
            executor.close()
        if not torch.equal(*results):
            wrong.append(name)
    return wrong


def test_equals_in_order(gpus: Ranks, seed: int) -> None:
    for wrong in gpus.run(compare_in_order, seed, timeout_s=150):
        assert not wrong
