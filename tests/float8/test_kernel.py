"""The FP8 kernels without a GPU: their bits in Triton's interpreter, and what their PTX says."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from tests.support.launched import Launched
from tests.support.resources import spills

pytest.importorskip("triton")

from interlace.float8 import E4M3, E5M2, Recipe, amax_of, launch, quantization, quantize
from interlace.kernels import launch as launcher

pytestmark = pytest.mark.kernels

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ALIGNED, ODD = (True,) * 3, (False,) * 3
NARROW = re.compile(r"st\.global\.(b32|(v\d\.)?b(8|16))|ld\.global\.(v\d\.)?b8")
INEXACT = re.compile(r"\b(fma|mad)\.\w*\.?f32|\.ftz|\.approx|\.full")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accesses_are_wide_and_nothing_spills(dtype: torch.dtype) -> None:
    """x is read and both results are written 8 or 16 bytes at a time; the hardware rounds."""
    source = launch.cast_source(dtype, E4M3, False, True, True, 512, ALIGNED)
    compiled = source.compile()
    assert not spills(compiled)
    ptx = compiled.asm["ptx"]
    each = 128 * 128 // (32 * launch.WARPS)
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) >= each * dtype.itemsize // 16
    assert not NARROW.search(ptx)
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    assert "div.rn.f32" in ptx
    assert "griddepcontrol.wait" in ptx
    assert not INEXACT.search(ptx)
    compiled = launch.amax_source(dtype, ALIGNED).compile()
    assert not spills(compiled)
    assert "ld.global.v4.b32" in compiled.asm["ptx"]
    assert not INEXACT.search(compiled.asm["ptx"])


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
def test_turning_is_wide_too(kind: torch.dtype, shift: bool) -> None:
    compiled = launch.turn_source(kind, shift, shift, True, 4, True).compile()
    assert not spills(compiled)
    ptx = compiled.asm["ptx"]
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) >= 4
    assert not NARROW.search(ptx)
    assert not INEXACT.search(ptx)


@pytest.mark.parametrize("mends", [False, True])
def test_guessing_is_wide_too(mends: bool) -> None:
    compiled = launch.guess_source(torch.bfloat16, E4M3, True, True, mends, ALIGNED).compile()
    assert not spills(compiled)
    ptx = compiled.asm["ptx"]
    assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) >= 8
    assert not INEXACT.search(ptx)
    first = re.search(r"(ld|st)\.global|griddepcontrol\.\w+", ptx)
    assert first is not None
    assert first.group() == f"griddepcontrol.{'wait' if mends else 'launch_dependents'}"


@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
def test_what_is_not_aligned_is_not_read_wide(kind: torch.dtype) -> None:
    for dtype in DTYPES:
        source = launch.cast_source(dtype, kind, True, True, True, 1, ODD)
        ptx = source.compile().asm["ptx"]
        assert not re.search(r"ld\.global\.v", ptx)
        assert not INEXACT.search(ptx)


def test_two_launches_for_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that reads for the maximum, one that casts and transposes; views are read in place."""
    grids: list[tuple[str, int]] = []

    class Noted(Launched):
        def launch(self, stream: int, grid: int, args: tuple[Any, ...], columns: int = 1) -> None:
            super().launch(stream, grid, args, columns)
            grids.append((self.source.kernel.__name__, grid))

    monkeypatch.setattr(launcher, "LoadedKernel", Noted)
    monkeypatch.setattr(launch, "stream_of", lambda device: 7)
    monkeypatch.setattr(quantization, "has_kernels", lambda device: True)
    launcher.kernel_of.cache_clear()
    for dtype in DTYPES:
        x = torch.ones(300, 520, dtype=dtype)
        for view in (x, x[:, 3:516], x[1:, :512], x.view(2, 150, 520)[:, :, :511]):
            grids.clear()
            made = quantize(view, E4M3, transpose=True)
            assert made.transposed is not None
            assert grids == [("amax_kernel", launch.PARTS), ("cast_kernel", 3 * 5 - (
                0 if view.shape[-1] > 512 else 3))]  # fmt: skip
    grids.clear()
    assert amax_of(torch.zeros(0, 16)).tolist() == [0.0] * launch.PARTS
    quantize(torch.zeros(0, 16), E4M3, transpose=True)
    assert not grids
    quantize(torch.ones(5, 16), E5M2, Recipe(eps=1.0), amax=torch.ones(3)[1:])
    assert grids == [("cast_kernel", 1)]
    launcher.kernel_of.cache_clear()
