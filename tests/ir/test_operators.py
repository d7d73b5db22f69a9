"""Pointwise operators over their own operands, in torch itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from interlace.ir.operators import POINTWISE, is_pointwise
from interlace.runtime.calling.calls import resolve

SHAPE = (37, 131)


def arguments(fn: Callable[..., Any], make: Callable[[], torch.Tensor]) -> list[Any]:
    """Something for each argument without a default."""
    schema: Any = getattr(fn, "_schema", None)
    given: list[Any] = []
    for argument in schema.arguments:
        kind = str(argument.type)
        if argument.kwarg_only or argument.is_out:
            continue
        if argument.name == "condition":
            given.append(make() > 0.5)
        elif kind == "Tensor":
            given.append(make())
        elif "number" in kind or kind == "float":
            given.append(0.75)
        elif argument.has_default_value():
            given.append(argument.default_value)
        else:
            given.append({"bool": False}[kind])
    return given


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "in a row": lambda x: x,
    "transposed": lambda x: x.t().contiguous().t(),
    "with gaps": lambda x: torch.zeros(SHAPE[0], 300, dtype=x.dtype)[:, 2 : 2 + 131].copy_(x),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", POINTWISE)
def test_every_one_may_write_over_an_operand(name: str, dtype: torch.dtype) -> None:
    plain, into = resolve(name), resolve(POINTWISE[name])
    names = [a.name for a in getattr(into, "_schema").arguments if a.is_out]  # noqa: B009
    assert len(names) == 1
    for layout in LAYOUTS.values():
        given = arguments(plain, lambda: layout(torch.rand(SHAPE).to(dtype)))  # noqa: B023
        wanted = plain(*given)
        for place, operand in enumerate(given):
            if isinstance(operand, torch.Tensor) and operand.dtype == dtype:
                mine = list(given)
                mine[place] = layout(operand.clone())
                into(*mine, **{names[0]: mine[place].view_as(operand)})
                assert torch.equal(mine[place], wanted), (name, place)


@pytest.mark.parametrize("fn", ["aten.mul_.Tensor", "aten.neg_.default", "aten.gelu.out"])
def test_a_name_is_known_in_any_of_its_forms(fn: str) -> None:
    assert is_pointwise(fn)


@pytest.mark.parametrize("fn", ["aten.mm.out", "aten.softmax.int", "region_0", "aten.add_", "abs"])
def test_others_are_not(fn: str) -> None:
    assert not is_pointwise(fn)
