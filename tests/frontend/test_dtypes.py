"""Operands of several dtypes: refused by module, argument and dtype, as eager refuses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.frontend.models import Function
from torch import nn

import interlace
from interlace.errors import UnsupportedError

HALF, FULL = torch.bfloat16, torch.float32


def dynamo(fn: Any) -> Any:
    """Through TorchDynamo."""
    torch.compiler.reset()
    return torch.compile(fn, backend="interlace")


def directly(fn: Any) -> Any:
    """Through interlace.compile."""
    return interlace.compile(fn if isinstance(fn, nn.Module) else Function(fn))


def refusal(fn: Any, compiled: Callable[[Any], Any], *args: torch.Tensor) -> str:
    """What is said of a call that eager refuses."""
    with pytest.raises(RuntimeError):
        fn(*args)
    with pytest.raises(UnsupportedError) as error:
        compiled(fn)(*args)
    return str(error.value)


@pytest.mark.parametrize("compiled", [dynamo, directly])
def test_a_module_is_named(compiled: Callable[[Any], Any]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).to(HALF))
    told = refusal(model, compiled, torch.ones(4, 8))
    assert " in 1" in told
    assert "x.to(weight.dtype)" in told
    assert "torch.autocast" in told


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (torch.matmul, [(4, 8), (8, 4)]),
        (torch.mv, [(4, 8), (8,)]),
        (lambda x, w: nn.functional.linear(x, w.t()), [(3, 8), (8, 4)]),
    ],
)
def test_dtypes_are_named(fn: Any, shapes: list[tuple[int, ...]]) -> None:
    first, second = shapes
    told = refusal(fn, directly, torch.ones(first), torch.ones(second, dtype=HALF))
    assert "torch.float32" in told
    assert "torch.bfloat16" in told


def test_autocast_casts() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).to(HALF))
    with torch.autocast("cpu", HALF):
        assert interlace.compile(model)(torch.ones(4, 8)).dtype is HALF
