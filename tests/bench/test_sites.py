"""The sites that are timed: their Programs, what must move, and when a result counts as right."""

from __future__ import annotations

import pytest
import torch
from tests.support.pool import Pool

from interlace.errors import OptionError
from interlace.float8.data import TAIL
from interlace.verify import check
from interlace_bench.links import sizes_between
from interlace_bench.ranks import here
from interlace_bench.shapes import FLOAT8, OPS, PRESETS
from interlace_bench.sites import CACHE, SiteCase, cases_of, deviation, make_inputs

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["bf16", FLOAT8])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 4])
def test_programs_are_sound(op: str, world: int, dtype: str) -> None:
    case = SiteCase(op, 16, 32, 48, dtype)
    case.check(world)
    assert check(case.program(world)).sound


def test_the_bytes_that_must_move() -> None:
    assert SiteCase("ag_gemm", 8192, 4096, 100).link_bytes(4) == 3 * 2048 * 4096 * 2
    assert SiteCase("gemm_rs", 8192, 100, 4096).link_bytes(4) == 3 * 2048 * 4096 * 2
    assert SiteCase("gemm_ar", 8192, 100, 4096, "f32").link_bytes(2) == 2 * 4096 * 4096 * 4
    assert SiteCase("ag_gemm", 8192, 4096, 64, FLOAT8).link_bytes(4) == 3 * 2048 * (4096 + TAIL)
    assert SiteCase("gemm_rs", 8192, 64, 4096, FLOAT8).link_bytes(4) == 3 * 2048 * 4096 * 2


def test_inputs_take_turns_past_the_cache() -> None:
    for case in cases_of("bars", "", ["bf16"]):
        rows = case.m // 4 if case.op == "ag_gemm" else case.m
        nbytes = 2 * (rows * case.k + case.k * case.n)
        assert case.num_sets(4) >= 2
        assert case.num_sets(4) * nbytes > 2 * CACHE


def test_every_preset_fits_two_and_four_ranks() -> None:
    for name in PRESETS:
        for case in cases_of(name, "", ["bf16", "f32"]):
            for world in (2, 4):
                case.check(world)


def test_shapes_are_read_from_text() -> None:
    cases = cases_of("", "ag_gemm:64,32,16  gemm_ar:8,4,2", ["bf16", "f32"])
    assert cases[1] == SiteCase("ag_gemm", 64, 32, 16, "f32")
    assert len(cases) == 4
    for wrong in ("64,32,16", "ag_gemm:64,32", "ag_gemm:a,b,c"):
        with pytest.raises(OptionError, match="ag_gemm:M,K,N"):
            cases_of("", wrong, ["bf16"])
    with pytest.raises(OptionError, match="does not divide over 4 ranks"):
        SiteCase("ag_gemm", 6, 4, 4).check(4)
    with pytest.raises(OptionError, match="no site"):
        cases_of("", "gemm:8,4,4", ["bf16"])
    with pytest.raises(OptionError, match="multiples of 16"):
        SiteCase("ag_gemm", 8, 16, 8, FLOAT8).check(4)


def test_sizes_grow_to_the_last() -> None:
    assert sizes_between(1024, 1 << 20) == [1 << power for power in (10, 12, 14, 16, 18, 20)]
    assert sizes_between(1000, 5000) == [1000, 4000, 5000]
    assert sizes_between(8, 8) == [8]


def deviations(op: str, dtype: str, seed: int) -> dict[str, float]:
    """How far off some results are, on one rank."""
    ranks = here(CPU)
    case = SiteCase(op, 64, 32, 48, dtype)
    inputs = make_inputs(case, ranks, seed)
    (_, (want, allowed)), *_ = inputs.checks["eager"]
    right = want.to(case.out_dtype)
    broken, hollow = right.clone(), right.clone()
    broken[-1, -1] += 0.25 * right.abs().max() + 1
    hollow[0, 0] = torch.nan
    assert (allowed > 0).all()
    assert inputs.of("graph")[1][1] is inputs.sets[0][1]
    return {
        "right": deviation(right, (want, allowed)),
        "broken": deviation(broken, (want, allowed)),
        "nan": deviation(hollow, (want, allowed)),
        "cut": deviation(right[1:], (want, allowed)),
    }


@pytest.mark.parametrize("dtype", ["bf16", "f32", FLOAT8])
@pytest.mark.parametrize("op", OPS)
def test_what_is_wrong_deviates(pool: Pool, op: str, dtype: str, seed: int) -> None:
    for found in pool(2).run(deviations, op, dtype, seed):
        assert found["right"] <= 1
        assert found["broken"] > 1
        assert not found["nan"] <= 1
        assert not found["cut"] <= 1
