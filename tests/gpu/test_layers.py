"""Layers over ranks with CUDA graphs: the bits that they have without.

python -m pytest tests/gpu/test_layers.py -q --ranks 2
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gpu.cases import on_a_gpu, transport
from tests.support.pool import Ranks
from torch import Tensor

from interlace.float8 import Recipe
from interlace.nn.functional import all_gather_linear, linear_reduce_scatter

pytestmark = on_a_gpu(300)
STEPS, MICRO_BATCHES = 3, 2


def trained(seed: int, recipe: Recipe | None, rows: int, **options: Any) -> list[Tensor]:
    """Outputs and gradients of some steps. All of them are kept, so tensors lie at many places."""
    torch.manual_seed(seed + dist.get_rank())
    ups = [torch.randn(384, 512, device="cuda").bfloat16().requires_grad_() for _ in range(2)]
    down = torch.randn(512, 384, device="cuda").bfloat16().requires_grad_()
    facts: Any = {"group": dist.group.WORLD, "recipe": recipe}
    facts["options"] = {"timeout_s": 60.0, **options, **transport()}
    found: list[Tensor] = []
    for _ in range(STEPS):
        for _ in range(MICRO_BATCHES):
            x = torch.randn(rows, 512, device="cuda").bfloat16().requires_grad_()
            a, b = all_gather_linear(x, ups, **facts)
            y = linear_reduce_scatter(torch.relu(a) * b / 512, down, **facts)
            y.float().square().sum().backward()
            with torch.no_grad():
                found += [y.detach(), *all_gather_linear(x, ups, **facts), x.grad]  # type: ignore
        for weight in (*ups, down):
            assert weight.grad is not None
            found.append(weight.grad)
            weight.grad = None
    return found


def graphs(strategy: str, seed: int) -> list[str]:
    """What has other bits with graphs."""
    wrong: list[str] = []
    for name, recipe in (("bf16", None), ("float8", Recipe())):
        for rows in (64, 256, 64):
            facts: Any = {"strategy": strategy}
            plain = trained(seed, recipe, rows, **facts)
            captured = trained(seed, recipe, rows, graph=True, **facts)
            equal = map(torch.equal, plain, captured)
            wrong += [
                f"{name}, {rows} rows: result {i}" for i, same in enumerate(equal) if not same
            ]
    return wrong


@pytest.mark.parametrize("strategy", ["auto", "peer"])
def test_with_graphs(gpus: Ranks, strategy: str, seed: int) -> None:
    assert gpus.run(graphs, strategy, seed, timeout_s=200) == [[]] * gpus.world
