"""Mixture-of-experts layers over an expert-parallel axis: overlapped equals eager, bit for bit.

Nothing is summed across ranks and chunks cut only the rows of matmuls, so outputs and all
gradients are those of plain torch wherever matmuls of row chunks are (`has_avx512`), and on small
integers everywhere.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.e2e.experts import (
    DIM,
    EXPERTS,
    ROOM,
    Einsum,
    Experts,
    Gated,
    Grouped,
    Layers,
    filled,
    step,
)
from tests.support.captured import capture
from tests.support.pool import Pool
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh

from interlace.ir import Collective, Program
from interlace.launch import has_avx512

DISPATCH, COMBINE = "all_to_all_matmul", "matmul_all_to_all"
STRATEGIES: dict[str, dict[str, Any]] = {
    "peer": {"strategy": "peer"},
    "ring": {"strategy": "ring"},
    "auto": {"strategy": "auto"},
}


def group_of(axes: int) -> dist.ProcessGroup:
    """The expert-parallel axis of a mesh: all ranks, or half of them beside another axis."""
    torch.compiler.reset()
    world = dist.get_world_size()
    if axes == 1:
        return init_device_mesh("cpu", (world,), mesh_dim_names=("ep",)).get_group("ep")
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "ep"))
    return mesh.get_group("ep")


def compare(
    kind: type[Experts], axes: int, dtype: str, exact: bool, seed: int, options: dict[str, Any]
) -> dict[str, Any]:
    """On one rank: what differs between eager and compiled, and the sites of both passes."""
    group = group_of(axes)
    torch.manual_seed(seed + dist.get_rank())
    module: nn.Module = filled(kind(group, getattr(torch, dtype)), seed, exact)
    sizes = (group.size() * EXPERTS, ROOM, DIM)
    return against_eager(module, sizes, dtype, exact, options)


def against_eager(
    module: nn.Module, sizes: tuple[int, ...], dtype: str, exact: bool, options: dict[str, Any]
) -> dict[str, Any]:
    """Three steps of a module, eager and compiled."""
    found: dict[str, Any] = {"different": []}
    far = torch.zeros(())
    given = {"timeout_s": 30.0, **options}
    with capture() as captured:
        compiled = torch.compile(
            module, backend="interlace", options=given, fullgraph=True, dynamic=False
        )
        for number in range(3):  # the slots are used in turn
            draw = torch.randint(-1, 2, (2, *sizes)) if exact else torch.randn(2, *sizes)
            x, grad = draw.to(getattr(torch, dtype))
            wanted, got = step(module, module, x, grad), step(compiled, module, x, grad)
            for i, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
                far = far.maximum((mine - theirs).abs().max())  # NaN stays, unlike with max()
                if not torch.equal(mine, theirs):
                    found["different"].append(f"step {number}, tensor {i}")
        programs = captured.programs
    found["far"] = far.item()
    found["sites"] = [[(site.kind, site.strategy) for site in p.sites] for p in programs]
    found["whole"] = [left_whole(program) for program in programs]
    return found


def left_whole(program: Program) -> int:
    """The all-to-alls that stay as they are."""
    return sum(isinstance(op, Collective) and op.kind == "all_to_all" for op in program.ops)


def assert_overlapped(found: dict[str, Any], strategy: str) -> None:
    """Both all-to-alls of both passes are cut, except as `auto` chooses."""
    assert len(found["sites"]) == 2
    for sites, whole in zip(found["sites"], found["whole"], strict=True):
        assert [kind for kind, _ in sites] == [DISPATCH, COMBINE]
        if strategy != "auto":
            assert {name for _, name in sites} == {strategy.split("-")[0]}
            assert whole == 0


@pytest.mark.parametrize(
    "ranks", [pytest.param(2, marks=pytest.mark.slow), 4], ids=lambda n: f"{n}-ranks"
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_equals_eager(pool: Pool, strategy: str, ranks: int, seed: int) -> None:
    args = (Experts, 1, "float32", False, seed, STRATEGIES[strategy])
    for found in pool(ranks).run(compare, *args, timeout_s=100.0):
        assert_overlapped(found, strategy)
        assert found["far"] < 1e-5
        if has_avx512():
            assert not found["different"]


@pytest.mark.parametrize("kind", [Einsum, Grouped, Layers, Gated])
def test_other_spellings(pool: Pool, kind: type[Experts], seed: int) -> None:
    """On integers, which are exact in bf16 too (grouped matmuls take no other type on GPUs)."""
    dtype = "bfloat16" if kind in (Grouped, Layers) else "float32"
    args = (kind, 1, dtype, True, seed, STRATEGIES["peer"])
    for found in pool(2).run(compare, *args, timeout_s=100.0):
        assert_overlapped(found, "peer")
        assert not found["different"]


def test_one_axis_of_two(pool: Pool, seed: int) -> None:
    args = (Experts, 2, "float32", True, seed, STRATEGIES["peer"])
    for found in pool(4).run(compare, *args, timeout_s=100.0):
        assert_overlapped(found, "peer")
        assert not found["different"]


def compare_shown(code: str, seed: int) -> dict[str, Any]:
    """On one rank: the function that docs/how-to/moe.md shows, against eager."""
    group = group_of(1)

    class Shown(Experts):
        def forward(self, x: Tensor) -> Tensor:
            return experts(x, self.up, self.down, self.group)

    names: dict[str, Any] = {"torch": torch, "F": torch.nn.functional}
    names["all_to_all_single_autograd"] = all_to_all_single_autograd
    exec(code, names)
    experts = names["experts"]
    torch.manual_seed(seed + dist.get_rank())
    module, sizes = filled(Shown(group), seed, False), (group.size() * EXPERTS, ROOM, DIM)
    return against_eager(module, sizes, "float32", False, STRATEGIES["peer"])


def test_the_function_of_the_docs(pool: Pool, seed: int) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "moe.md"
    blocks = page.read_text().split("```python\n")[1:]
    (code,) = (block.split("```")[0] for block in blocks if block.startswith("def experts("))
    for found in pool(2).run(compare_shown, code, seed, timeout_s=100.0):
        assert_overlapped(found, "peer")
        assert found["far"] < 1e-5
        if has_avx512():
            assert not found["different"]
