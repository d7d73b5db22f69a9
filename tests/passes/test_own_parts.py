"""On GPUs a rank's own shard is shown by a copy on the stream that computes, before the matmuls."""

from __future__ import annotations

from typing import Literal

import pytest

from interlace.cost import default_machine
from interlace.ir import Call, Copy
from interlace.options import Options
from interlace.passes import lower
from interlace.verify import check
from interlace_bench.sites import OPS, SiteCase


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 4])
def test_gets_follow_a_copy_that_waits_for_no_matmul(
    op: str, world: int, device: Literal["cpu", "cuda"]
) -> None:
    serial = SiteCase(op, 64, 32, 48).program(world)
    options = Options(strategy="peer")
    program = lower(serial, options, default_machine(device), transport="get")
    assert [site.strategy for site in program.sites] == ["peer"]
    assert check(program).sound
    shown = [i for i, each in enumerate(program.ops) if isinstance(each, Copy)]
    if op != "ag_gemm":
        return
    (place,) = shown
    assert program.ops[place].stream == ("main" if device == "cuda" else "comm")
    if device == "cuda":
        assert not any(isinstance(each, Call) for each in program.ops[:place])
