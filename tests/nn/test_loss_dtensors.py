"""What the losses take beside a DTensor: a number for each class, cut, replicated or whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.pool import Pool
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

from interlace.errors import InputError, UnsupportedError
from interlace.nn.functional import cross_entropy, linear_cross_entropy

ROWS, INNER = 6, 4


def whole_of(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def drawn(seed: int, classes: int) -> tuple[torch.Tensor, ...]:
    """Hidden rows, weight, bias, class weights and targets, the same on all ranks."""
    torch.manual_seed(seed)
    hidden, weight = torch.randn(ROWS, INNER), torch.randn(classes, INNER)
    y = torch.randint(0, classes, (ROWS,))
    return hidden, weight, torch.randn(classes), torch.rand(classes) + 0.1, y


def given(tensor: torch.Tensor, mesh: Any, how: str) -> torch.Tensor:
    """The same numbers on every rank: plain, replicated, or cut."""
    if how == "plain":
        return tensor.clone()
    return distribute_tensor(tensor, mesh, [Shard(0) if how == "cut" else Replicate()])


def linear(seed: int, classes: int) -> None:
    mesh: Any = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    hidden, weight, bias, class_weight, y = drawn(seed, classes)
    three = torch.tensor(3.0)
    for reduction in ("mean", "none"):
        for of_weight in ("cut", "replicated"):
            for how in ("plain", "replicated", "cut"):
                for denominator in (None, given(three, mesh, "replicated")):
                    if reduction == "none" and denominator is not None:
                        continue
                    wanted = [t.clone().requires_grad_() for t in (hidden, weight, bias)]
                    loss = functional.cross_entropy(
                        functional.linear(*wanted), y, class_weight, reduction="none"
                    )
                    if reduction == "mean":
                        by = class_weight[y].sum() if denominator is None else three
                        loss = loss.sum() / by
                    loss.sum().backward()
                    x = hidden.clone().requires_grad_()
                    head = given(weight, mesh, of_weight).requires_grad_()
                    own = given(bias, mesh, how).requires_grad_()
                    if (of_weight, how) == ("replicated", "cut"):
                        with pytest.raises(UnsupportedError, match="cut alike"):
                            linear_cross_entropy(x, head, y, own)
                        continue
                    found = linear_cross_entropy(
                        x, head, y, own, class_weight=given(class_weight, mesh, how),
                        reduction=reduction, denominator=denominator,
                    )  # fmt: skip
                    found.sum().backward()
                    torch.testing.assert_close(found, loss)
                    for mine, other in zip((x, head, own), wanted, strict=True):
                        torch.testing.assert_close(whole_of(mine.grad), other.grad)


def rowwise(seed: int, classes: int) -> None:
    mesh: Any = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    hidden, weight, _, class_weight, y = drawn(seed, classes)
    full = hidden @ weight.t()
    wanted = functional.cross_entropy(full, y, class_weight)
    logits = distribute_tensor(full, mesh, [Shard(1)])
    for how in ("plain", "replicated", "cut"):
        found = cross_entropy(logits, y, given(class_weight, mesh, how))
        torch.testing.assert_close(whole_of(found), wanted)
    by = given(torch.tensor(5.0), mesh, "replicated")
    found = cross_entropy(logits, y, denominator=by)
    torch.testing.assert_close(whole_of(found), functional.cross_entropy(full, y) * ROWS / 5.0)
    with pytest.raises(InputError, match="classes here"):
        cross_entropy(logits, y, class_weight[:-1])


@pytest.mark.parametrize(("world", "classes"), [(2, 11), (3, 4)])
def test_beside_a_linear_weight(pool: Pool, world: int, classes: int, seed: int) -> None:
    """A bias on all ranks gets its whole gradient, and a rank may have no class (4 over 3)."""
    pool(world).run(linear, seed, classes)


@pytest.mark.parametrize(("world", "classes"), [(2, 11), (3, 4)])
def test_beside_logits(pool: Pool, world: int, classes: int, seed: int) -> None:
    pool(world).run(rowwise, seed, classes)


def meshes() -> None:
    world = dist.get_world_size()
    mesh = dist.init_device_mesh("cpu", (1, world), mesh_dim_names=("rows", "classes"))
    x, y = torch.randn(2, 3), torch.tensor([0, 1])
    with pytest.raises(InputError, match="mesh of 2 dimensions"):
        cross_entropy(x, y, group=mesh)
    with pytest.raises(InputError, match="mesh of 2 dimensions"):
        linear_cross_entropy(x, torch.randn(3, 3), y, group=mesh)
    assert cross_entropy(x, y, group=mesh["classes"]).isfinite()


def test_a_mesh_of_two_dimensions_is_no_group(pool: Pool) -> None:
    pool(2).run(meshes)
