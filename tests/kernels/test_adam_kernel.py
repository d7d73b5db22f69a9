"""The Adam kernels without a GPU: their bits in Triton's interpreter, and what their PTX says."""

from __future__ import annotations

import re

import pytest
import torch
from tests.support.resources import spills

pytest.importorskip("triton")

from interlace.optim.adam.arithmetic import AdamSpec
from interlace.optim.adam.kernel import adam_source, tile_of

pytestmark = pytest.mark.kernels

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

SPECS = {
    "fp32": AdamSpec(p=FP32, g=FP32, m=FP32, v=FP32),
    "fp32-bf16-moments": AdamSpec(p=FP32, g=FP32, m=BF16, v=BF16, stochastic=True),
    "bf16": AdamSpec(p=BF16, g=BF16, m=BF16, v=BF16, stochastic=True),
    "bf16-nearest": AdamSpec(p=BF16, g=BF16, m=BF16, v=BF16),
    "bf16-remainder": AdamSpec(p=BF16, g=BF16, m=BF16, v=BF16, master="remainder", stochastic=True),
    "bf16-remainder-fp32-moments": AdamSpec(p=BF16, g=BF16, m=FP32, v=FP32, master="remainder"),
    "bf16-master": AdamSpec(p=BF16, g=BF16, m=BF16, v=BF16, master="fp32", stochastic=True),
    "fp16-master": AdamSpec(p=FP16, g=FP16, m=FP32, v=BF16, master="fp32", stochastic=True),
    "bf16-fp32-gradient": AdamSpec(p=BF16, g=FP32, m=BF16, v=BF16, stochastic=True),
    "coupled": AdamSpec(p=BF16, g=BF16, m=BF16, v=FP32, coupled=True, stochastic=True),
}


def streams(spec: AdamSpec) -> tuple[list[int], list[int]]:
    """Bytes of an element of each tensor that is read, and of each that is written."""
    moments = [spec.m.itemsize, spec.v.itemsize]
    master = {None: [], "fp32": [4], "remainder": [2]}[spec.master]
    read = [spec.g.itemsize, *moments, *master]
    read += [] if spec.master == "fp32" else [spec.p.itemsize]
    return read, [*moments, *master, spec.p.itemsize]


@pytest.mark.parametrize("name", SPECS)
def test_accesses_are_wide_and_nothing_spills(name: str) -> None:
    """Every stream moves in as few and as wide instructions as its bytes allow."""
    spec = SPECS[name]
    compiled = adam_source(spec, aligned=True).compile()
    assert not spills(compiled)
    ptx = compiled.asm["ptx"]
    assert "st.shared" not in ptx, "elements change threads"
    each = tile_of(spec) // 128
    for what, sizes in zip(("ld", "st"), streams(spec), strict=True):
        words = re.findall(rf"{what}\.global\.v([24])\.b32", ptx)
        assert sum(map(int, words)) * 4 == sum(sizes) * each, (what, words)
        assert len(words) == sum(-(-size * each // 16) for size in sizes)


@pytest.mark.parametrize("name", SPECS)
def test_nothing_is_contracted_or_approximate(name: str) -> None:
    """The kernel rounds twice where the reference does: see the module's docstring."""
    for aligned in (False, True):
        ptx = adam_source(SPECS[name], aligned=aligned).compile().asm["ptx"]
        assert not re.search(r"\b(fma|mad)\.\w*\.?f(32|64)|\.ftz|\.approx|\.full", ptx)
    assert "div.rn.f32" in ptx
    assert "sqrt.rn.f32" in ptx


def test_what_is_not_aligned_is_not_read_wide() -> None:
    ptx = adam_source(SPECS["bf16"], aligned=False).compile().asm["ptx"]
    assert not re.search(r"(ld|st)\.global\.v", ptx)
