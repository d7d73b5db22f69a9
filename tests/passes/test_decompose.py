"""Every strategy for every kind of site computes what the serial Program does, and is sound.

In order, and over random interleavings of the scheduled Program (two runs in a row, memory
poisoned), on integers, so that equality is exact whatever the order of a sum.
"""

from __future__ import annotations

import pytest
import torch
from tests.passes.samples import KINDS, SHAPES, STRATEGIES, Sample, site_of, taken
from tests.support.interpreter import run_ranks

from interlace.ir import Fused, Program, parse, validate
from interlace.passes import run_pipeline
from interlace.verify import check

AFTER = "schedule,plan_memory,insert_sync,fuse"


def assert_equal(
    program: Program | list[Program], sample: Sample, seed: int | None, runs: int = 1
) -> None:
    results = run_ranks(program, sample.inputs, seed=seed, in_order=seed is None, runs=runs)
    for rank, (found, expected) in enumerate(zip(results, sample.expected, strict=True)):
        for got, wanted in zip(found, expected, strict=True):
            assert torch.equal(got, wanted), f"rank {rank}: {got} instead of {wanted}"


def assert_overlaps(decomposed: Program, sample: Sample, seed: int) -> None:
    """The decomposed Program is well-formed, right in order and scheduled, and sound."""
    validate(decomposed)
    assert parse(str(decomposed)) == decomposed
    assert_equal(decomposed, sample, None)
    check(decomposed).raise_if_unsound()
    scheduled = run_pipeline(decomposed, AFTER)
    validate(scheduled)
    assert parse(str(scheduled)) == scheduled
    assert_equal(scheduled, sample, seed, runs=2)
    assert_equal(scheduled, sample, seed + 1)
    check(scheduled).raise_if_unsound()
    assert_equal(scheduled, sample, None)
    check(scheduled, in_order=True).raise_if_unsound()
    wanted = {site.id for site in decomposed.sites if site.strategy == "fused"}
    assert {op.site for op in scheduled.ops if isinstance(op, Fused)} == wanted


SIZES = [
    *((3, shape, "f32") for shape in SHAPES),
    *((ranks, "even", "bf16") for ranks in (2, 3)),
    (4, "uneven", "bf16"),
]


@pytest.mark.parametrize(("ranks", "shape", "dtype"), SIZES)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_grid(kind: str, strategy: str, ranks: int, shape: str, dtype: str, seed: int) -> None:
    sample = site_of(kind, strategy, ranks, shape, dtype, seed)
    decomposed = run_pipeline(sample.program, f"find_sites,decompose{{{STRATEGIES[strategy]}}}")
    (site,) = decomposed.sites
    assert site.kind == kind
    assert site.strategy == taken(kind, strategy, shape, dtype)
    if site.strategy == "serial" != strategy:
        assert any(why in site.reason for why in ("no rows", "single row", "not dealt evenly"))
        assert decomposed.remarks[0].site == site.id
    assert_overlaps(decomposed, sample, seed)
