"""Recipes, and what cannot be quantised: typed errors that say what is allowed."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from interlace import float8
from interlace.errors import InputError, OptionError, UnsupportedError
from interlace.float8 import E4M3, E5M2, Recipe, amax_of, quantize


def test_what_is_default() -> None:
    recipe = Recipe()
    assert (recipe.forward, recipe.gradient, recipe.scale) == (E4M3, E5M2, "shard")
    assert {recipe: 1}[Recipe()] == 1
    with pytest.raises(FrozenInstanceError):
        recipe.eps = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"gradient": torch.bfloat16}, "gradient is torch.bfloat16: take one of"),
        ({"scale": "world"}, "scale is 'world': take one of"),
        ({"power_of_two": 1}, "power_of_two is 1: take one of"),
        ({"eps": -1.0}, "eps is -1.0: take a finite number"),
        ({"eps": float("nan")}, "eps is nan"),
        ({"eps": 1e39}, r"eps is 1e\+39"),
        ({"eps": True}, "eps is True: take a number"),
        ({"eps": "0"}, "eps is '0': take a number"),
        ({"scaling": "row"}, "scaling is no option of Recipe any more. fix: leave it out"),
        ({"power_of_two": False}, "leave it out, or take scale='team'"),
        ({"keep_transposes": True}, "keep_transposes is no option .* fix: leave it out"),
    ],
)
def test_what_no_recipe_takes(options: dict[str, Any], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        Recipe(**options)
    with pytest.raises(OptionError, match=r"ROW_WISE is no recipe any more. fix: Recipe\(\)"):
        _ = float8.ROW_WISE


@pytest.mark.parametrize(
    ("x", "given", "told"),
    [
        (torch.zeros(2, 2, dtype=torch.float64), {}, "x is torch.float64: take one of"),
        (torch.zeros(2, 2, dtype=torch.int64), {}, "x is torch.int64"),
        (torch.zeros(2, 2).to(E4M3), {}, "x is torch.float8_e4m3fn"),
        (torch.zeros(()), {}, "x has no dimensions"),
        (torch.zeros(2, 2), {"kind": torch.float16}, "kind is torch.float16: take one of"),
        (torch.zeros(2, 2), {"amax": torch.ones(1).double()}, "amax is torch.float64"),
        (torch.zeros(2, 2), {"amax": torch.ones(0)}, r"amax is torch.float32 \(0,\)"),
    ],
)
def test_what_is_not_quantised(x: torch.Tensor, given: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        quantize(x, **{"kind": E4M3, **given})


def test_devices_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="x is on meta: FP8 is for CUDA and the CPU"):
        amax_of(torch.zeros(2, 2, device="meta"))

    class Ampere(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(UnsupportedError, match=r"capability \(8, 0\): FP8 needs \(8, 9\)"):
        quantize(torch.zeros(2, 2).as_subclass(Ampere), E4M3)
