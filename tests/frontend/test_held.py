"""Tensors that a function reaches without an argument, in interlace.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.support.pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import interlace
from interlace.errors import UnsupportedError

Maker = Callable[[Tensor], Callable[[Tensor], Any]]
TABLE: dict[str, Tensor] = {}
"""What a function reaches by a global name."""


def in_a_cell(w: Tensor) -> Callable[[Tensor], Any]:
    return lambda x: x @ w


def in_an_inner_function(w: Tensor) -> Callable[[Tensor], Any]:
    def inner(y: Tensor) -> Tensor:
        return y @ w

    def outer(x: Tensor) -> Tensor:
        return inner(x).relu()

    return lambda x: outer(x) * 2


def as_a_default(w: Tensor) -> Callable[[Tensor], Any]:
    def fn(x: Tensor, w: Tensor = w) -> Tensor:
        return x @ w

    return fn


def in_a_global(w: Tensor) -> Callable[[Tensor], Any]:
    TABLE["w"] = w

    def fn(x: Tensor) -> Tensor:
        def inner() -> Tensor:
            return x @ TABLE["w"]

        return inner()

    return fn


def in_a_tuple(w: Tensor) -> Callable[[Tensor], Any]:
    pair = (w, ["text", w.detach() * 2])
    return lambda x: x @ pair[0] + pair[1][1]  # pyright: ignore


def in_a_partial(w: Tensor) -> Callable[[Tensor], Any]:
    return functools.partial(lambda w, x, *, to: x @ w + to, w, to=w.detach() + 1)


class Scaled(nn.Module):
    """Holds a tensor that is neither a parameter nor a buffer."""

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scales: Any = {"w": w}

    def forward(self, x: Tensor) -> Tensor:
        """The product."""
        return self.linear(x) @ self.scales["w"]


def in_a_hook(w: Tensor) -> Callable[[Tensor], Any]:
    module = nn.Linear(4, 4)

    def hook(_: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out @ w

    module.register_forward_hook(hook)
    return nn.Sequential(module)


def in_a_method(w: Tensor) -> Callable[[Tensor], Any]:
    class Plain:
        """No module."""

        def __init__(self) -> None:
            self.w = w

        def apply(self, x: Tensor) -> Tensor:
            """The product."""
            return x @ self.w

    return Plain().apply


def beside_a_module(w: Tensor) -> Callable[[Tensor], Any]:
    module = nn.Linear(4, 4)

    def inner(x: Tensor) -> Tensor:
        return module(x) @ w

    return lambda x: inner(x)


MAKERS: list[Maker] = [
    *(in_a_cell, in_an_inner_function, as_a_default, in_a_global, in_a_tuple, in_a_partial),
    *(Scaled, in_a_hook, in_a_method, beside_a_module),
]


def gradient(y: Tensor, w: Tensor) -> Tensor:
    """That of `w`."""
    return torch.autograd.grad(y.square().sum(), w)[0]


@pytest.mark.parametrize("make", MAKERS)
def test_a_tensor_that_is_no_argument(make: Maker, seed: int) -> None:
    """It is taken as it is at each call, and has its gradient; afterwards it is where it was."""
    torch.manual_seed(seed)
    w, x = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    fn = make(w)
    compiled = interlace.compile(fn)
    for _ in range(3):
        want, got = fn(x), compiled(x)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(gradient(got, w), gradient(want, w))
        with torch.no_grad():
            w.mul_(0.5)
            torch.testing.assert_close(compiled(x), fn(x))


def test_another_tensor_in_its_place_is_seen() -> None:
    w, x = torch.eye(4), torch.randn(4, 4)

    def fn(x: Tensor) -> Tensor:
        return (lambda: x @ w)()

    compiled = interlace.compile(fn)
    for w in (torch.eye(4), torch.ones(4, 4), torch.ones(4, 2)):  # noqa: B007
        torch.testing.assert_close(compiled(x), fn(x))


@pytest.mark.parametrize("used", [True, False])
def test_a_tensor_that_is_written_counts_on(used: bool) -> None:
    """Also one that no argument meets."""
    seen = torch.zeros(())

    def fn(x: Tensor) -> Tensor:
        seen.add_(1)
        return x * seen if used else x * 2

    compiled = interlace.compile(fn)
    for count in (1.0, 2.0, 3.0):
        assert compiled(torch.ones(1)).item() == (count if used else 2.0)
        assert seen.item() == count


class Slot:
    """Holds a tensor where nobody looks."""

    __slots__ = ("w",)


def test_a_tensor_that_is_not_found_is_a_typed_error() -> None:
    slot = Slot()
    slot.w = torch.randn(4, 4)
    with pytest.raises(UnsupportedError, match="uses a tensor that is not among its arguments"):
        interlace.compile(lambda x: x @ slot.w, torch.randn(2, 4))


def sharded(seed: int) -> tuple[list[str], float, float]:
    """A weight that an inner function holds, as a DTensor: what is overlapped, and how far off."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(seed)
    w: Any = distribute_tensor(torch.randn(6, 8), mesh, [Shard(0)]).requires_grad_()
    x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])

    def project(x: Any) -> Any:
        return F.linear(x.redistribute(placements=[Replicate()]), w)

    def fn(x: Any) -> Any:
        return project(x).to_local()

    compiled = interlace.compile(fn)
    got, want = compiled(x), fn(x)
    kinds = [site.kind for site in compiled.program.sites]
    far = gradient(got, w).to_local() - gradient(want, w).to_local()  # pyright: ignore
    compiled.close()
    return kinds, float((got - want).abs().max()), float(far.abs().max())


def test_a_dtensor_that_an_inner_function_holds(pool: Pool, seed: int) -> None:
    for kinds, far, gradients_far in pool(2).run(sharded, seed):
        assert kinds == ["all_gather_matmul"]
        assert max(far, gradients_far) <= 1e-4
