"""Grouped matmuls of equal groups become batches of matmuls, gradients too; others do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives
from tests.frontend.tracing import agrees, graphs, imported
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from interlace.frontend.importing.grouped import equal_groups
from interlace.frontend.partition import Partition
from interlace.ir import Call, Program, validate
from interlace.nn.grouped.linear import grouped_linear_ops

E, C, K, N = 3, 4, 16, 32
c10d: Any = torch.ops._c10d_functional


def there(x: Tensor) -> Tensor:
    """Something that a graph must have for equal groups to matter: an all-to-all of one rank."""
    return c10d.wait_tensor(c10d.all_to_all_single(x, [x.shape[0]], [x.shape[0]], "alone"))


def by_arange(x: Tensor, w: Tensor) -> Tensor:
    ends = torch.arange(1, E + 1, dtype=torch.int32, device=x.device) * C
    return torch._grouped_mm(x, w, ends)


def by_cumsum(x: Tensor, w: Tensor) -> Tensor:
    ends = torch.full((E,), C, device=x.device).cumsum(0).to(torch.int32)
    return torch._grouped_mm(x, w, ends)


def by_list(x: Tensor, w: Tensor) -> Tensor:
    ends = torch.tensor([C * (i + 1) for i in range(E)], dtype=torch.int32, device=x.device)
    return torch._grouped_mm(x, w, ends)


def stacked(x: Tensor, w: Tensor) -> Tensor:
    return torch._grouped_mm(x.view(E, C, K), w).view(E * C, N)


def transposed(x: Tensor, w: Tensor) -> Tensor:
    """Weights as torch's `Linear` keeps them."""
    ends = torch.arange(1, E + 1, dtype=torch.int32, device=x.device) * C
    return torch._grouped_mm(x, w.transpose(1, 2).contiguous().transpose(1, 2), ends)


def as_a_layer(x: Tensor, w: Tensor) -> Tensor:
    """What a compiler sees of a `GroupedLinear` on a GPU: rows behind the groups are masked."""
    sizes = torch.full((E,), C, dtype=torch.int32, device=x.device)
    return grouped_linear_ops(x, w.transpose(1, 2), None, sizes, torch.bfloat16)


EQUAL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "arange": by_arange,
    "cumsum": by_cumsum,
    "list": by_list,
    "stacked": stacked,
    "transposed": transposed,
    "layer": as_a_layer,
}


def operands(grad: bool = True) -> tuple[Tensor, Tensor]:
    """Small integers, so that every sum is exact in bf16."""
    g = torch.Generator().manual_seed(3)
    x = torch.randint(-2, 3, (E * C, K), generator=g).bfloat16()
    w = torch.randint(-2, 3, (E, K, N), generator=g).bfloat16()
    return x.requires_grad_(grad), w.requires_grad_(grad)


def traced(fn: Callable[..., Any], *args: Any) -> fx.GraphModule:
    """`fn` behind an all-to-all, as a graph of aten."""
    return make_fx(lambda x, *rest: fn(there(x), *rest), tracing_mode="fake")(*args)


def matmuls(gm: fx.GraphModule) -> list[str]:
    """Its matmuls, in order."""
    names = [str(node.target) for node in gm.graph.nodes]
    return [name for name in names if name.startswith(("aten.bmm", "aten._grouped_mm"))]


def without_all_to_all(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with its all-to-all, of one rank, left out, so that torch can run it."""
    for node in list(gm.graph.nodes):
        if str(node.target).startswith("_c10d_functional."):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    gm.recompile()
    return gm


@pytest.mark.parametrize("name", EQUAL)
def test_equal_groups_are_a_batch(name: str) -> None:
    x, w = operands(grad=False)
    gm = traced(EQUAL[name], x, w)
    assert matmuls(gm) == ["aten._grouped_mm.default"]
    (made,) = equal_groups(gm.graph)
    assert made.meta["val"].shape == ((E, C, N) if name == "stacked" else (E * C, N))
    gm.graph.lint()
    assert matmuls(gm) == ["aten.bmm.default"]
    assert torch.equal(without_all_to_all(gm)(x, w), EQUAL[name](x, w))


@pytest.mark.parametrize("name", EQUAL)
def test_gradients_too(name: str) -> None:
    """The joint graph has the gradients of rows (groups of rows) and of weights (over rows)."""

    def both(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = EQUAL[name](x, w)
        return y, *torch.autograd.grad(y, (x, w), g)

    x, w = operands(grad=False)
    g = torch.randint(-2, 3, (E * C, N)).bfloat16()
    gm = traced(both, x, w, g)
    assert len(equal_groups(gm.graph)) == 3
    gm.graph.lint()
    assert matmuls(gm) == ["aten.bmm.default"] * 3
    found, wanted = without_all_to_all(gm)(x, w, g), both(x, w, g)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.shape == theirs.shape
        assert torch.equal(mine, theirs)


def masks(gm: fx.GraphModule) -> int:
    """How many choices are left in a graph."""
    return sum(str(node.target) == "aten.where.self" for node in gm.graph.nodes)


def test_masks_of_rows_that_equal_groups_leave_over_are_dropped() -> None:
    x, w = operands(grad=False)
    gm = traced(as_a_layer, x, w)
    assert masks(gm) == 2
    equal_groups(gm.graph)
    assert masks(gm) == 0


def masked_by_data(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
    return by_arange(torch.where(mask, x, 0), w)


def masked_in_part(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
    return by_arange(torch.where(torch.arange(E * C).unsqueeze(1) < C, x, 0), w)


def masked_and_widened(x: Tensor, w: Tensor, mask: Tensor) -> Tensor:
    """The choice has more rows than what is chosen."""
    every = torch.arange(E * C).unsqueeze(1) < E * C
    return by_arange(torch.where(every, x[:1], 0), w)


@pytest.mark.parametrize("fn", [masked_by_data, masked_in_part, masked_and_widened])
def test_other_masks_stay(fn: Callable[..., Tensor]) -> None:
    x, w = operands(grad=False)
    mask = torch.ones(E * C, 1, dtype=torch.bool)
    gm = traced(fn, x, w, mask)
    assert len(equal_groups(gm.graph)) == 1
    assert masks(gm) == 1
    assert torch.equal(without_all_to_all(gm)(x, w, mask), fn(x, w, mask))


def given(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(x, w, ends)


def computed(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(x, w, (ends * 1).cumsum(0).to(torch.int32))


def unequal(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(x, w, torch.tensor([C, C + 1, E * C], dtype=torch.int32))


def rows_left_over(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(x, w, torch.arange(1, E + 1, dtype=torch.int32) * (C - 1))


def random(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(x, w, torch.randint(C, C + 1, (E,)).cumsum(0).to(torch.int32))


@pytest.mark.parametrize("fn", [given, computed, unequal, rows_left_over, random])
def test_other_groups_stay(fn: Callable[..., Tensor]) -> None:
    x, w = operands(grad=False)
    ends = torch.arange(1, E + 1, dtype=torch.int32) * C
    gm = traced(fn, x, w, ends)
    assert equal_groups(gm.graph) == []
    assert matmuls(gm) == ["aten._grouped_mm.default"]


def test_without_an_all_to_all_nothing_changes() -> None:
    x, w = operands(grad=False)
    gm = make_fx(by_arange, tracing_mode="fake")(x, w)
    assert equal_groups(gm.graph) == []


def calls(program: Program) -> list[str]:
    """The matmuls of a Program."""
    fns = [op.fn for op in program.ops if isinstance(op, Call)]
    return [fn for fn in fns if fn.startswith(("aten.bmm", "aten._grouped_mm"))]


def test_groups_that_are_data_are_imported_as_they_are() -> None:
    x, w = operands()
    ends = torch.tensor([2, 2, E * C], dtype=torch.int32)
    for graph in graphs(given, x, w, ends, partition=Partition()):
        made = imported(graph)
        validate(made.program)
        assert set(calls(made.program)) == {"aten._grouped_mm.default"}
        agrees(graph, made)
