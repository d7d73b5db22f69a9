"""Matmuls on the built-in GPU: close to what is known of it, from a few rows to many."""

from __future__ import annotations

import itertools

import pytest

from interlace.cost import default_machine
from interlace.cost.gemm import gemm_seconds
from interlace.cost.machine import GemmTime
from interlace.cost.op_times import op_cost
from interlace.ir import DType, parse

H200 = default_machine("cuda")


@pytest.mark.parametrize(
    ("shape", "low", "high"),
    [
        ((16, 4096, 4096), 7e-6, 16e-6),
        ((256, 4096, 4096), 8e-6, 25e-6),
        ((1024, 4096, 4096), 40e-6, 60e-6),
        ((8192, 8192, 14336), 2.3e-3, 2.7e-3),
        ((4096, 4096, 7168), 0.24e-3, 0.36e-3),
    ],
)
def test_seconds(shape: tuple[int, int, int], low: float, high: float) -> None:
    assert low < gemm_seconds(H200, DType.bf16, *shape) < high


def test_more_rows_take_no_less_time() -> None:
    times = [gemm_seconds(H200, DType.bf16, rows, 4096, 4096) for rows in range(1, 3000, 37)]
    for before, after in itertools.pairwise(times):
        assert after >= 0.999 * before


def test_cutting_a_matmul_costs_waves() -> None:
    whole, part = (gemm_seconds(H200, DType.bf16, m, 4096, 7168) for m in (4096, 1024))
    loss = 4 * (part + H200.launch_s) / (whole + H200.launch_s) - 1
    assert 0.10 <= loss <= 0.20, f"{loss:.2f}, measured 0.13 to 0.16"
    assert gemm_seconds(H200, DType.bf16, 0, 8, 8) == 0


def test_a_measured_one_counts_for_its_own_sizes_and_other_rows() -> None:
    """So that a site's whole matmul and its chunks are compared by one measure."""
    seconds = 2 * gemm_seconds(H200, DType.bf16, 4096, 4096, 4096)
    time = GemmTime(dtype="bf16", m=4096, k=4096, n=4096, seconds=seconds + H200.launch_s)
    machine = H200.replace(gemms=(time,))
    assert gemm_seconds(machine, DType.bf16, 4096, 4096, 4096) == pytest.approx(seconds)
    chunk = gemm_seconds(machine, DType.bf16, 1024, 4096, 4096)
    assert chunk == pytest.approx(2 * gemm_seconds(H200, DType.bf16, 1024, 4096, 4096))
    for other in ((4096, 4096, 5000), (4096, 4096, 4096, 2)):  # batches were not measured
        assert gemm_seconds(machine, DType.bf16, *other) == gemm_seconds(H200, DType.bf16, *other)


def test_equal_groups_take_what_a_batch_takes() -> None:
    text = """def f(x: bf16[4096, 512], w: bf16[4, 512, 768], ends: i32[4]):
    main: call("aten._grouped_mm.default", x, w, ends, out=(y := bf16[4096, 768]))
    main: call("aten.bmm.default", x.view(4, 1024, 512), w, out=(z := bf16[4, 1024, 768]))
    return y, z
"""
    program = parse(text)
    box = program.boxes(0)
    grouped, batched = (op_cost(op, box, H200, {}, program.where(0)).seconds for op in program.ops)
    assert grouped == pytest.approx(batched, rel=1e-3)
    assert grouped > H200.launch_s
