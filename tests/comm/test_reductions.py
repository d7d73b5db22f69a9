"""Sums in rank order, of element types that torch promotes to no other."""

from __future__ import annotations

import pytest
import torch

from interlace.comm.collectives import reduce_into
from interlace.kernels import sum_slots

FLOAT8 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize("dtype", [*FLOAT8, torch.bfloat16], ids=str)
def test_narrow_floats_add_up_in_fp32(dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randn(3, 5, 8, generator=generator).to(dtype)
    wide = slots.float()
    total = wide[0] + wide[1] + wide[2]
    assert torch.equal(sum_slots(slots).float(), total.to(dtype).float())
    out = torch.empty_like(slots[0])
    for reduce, wanted in {
        "sum": total,
        "avg": total / 3,
        "prod": wide[0] * wide[1] * wide[2],
        "min": wide.amin(0),
        "max": wide.amax(0),
    }.items():
        reduce_into(out, list(slots), reduce)
        assert torch.equal(out.float(), wanted.to(dtype).float()), reduce
