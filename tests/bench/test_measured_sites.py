"""Rows of `bench overlap` as measured sites."""

from __future__ import annotations

from typing import Any

import pytest

from interlace.cost import SiteKey
from interlace_bench.calibration.sites import site_times


def row(**changes: Any) -> dict[str, Any]:
    """A row as the benchmark writes it, all text."""
    given = {
        **{"op": "ag_gemm", "m": 4096, "k": 512, "n": 256, "dtype": "bf16", "world": 4},
        **{"strategy": "serial", "mode": "eager", "median_us": 250, "error": "", "gpu": "H200"},
    }
    return {key: str(value) for key, value in (given | changes).items()}


def test_our_strategies_are_taken() -> None:
    names = {
        **{"serial": "serial", "get": "peer/get", "put": "peer/put", "fused": "fused"},
        **{"exchange": "exchange", "pipeline": "pipeline x4"},
    }
    others = ["auto", "sequential", "async-tp", "jax", "gemm torch"]
    times = site_times([row(strategy=name) for name in (*names, *others)])
    assert [time.strategy for time in times] == list(names.values())
    assert [time.seconds for time in times] == pytest.approx([250e-6] * len(names))
    key = SiteKey(kind="all_gather_matmul", dtype="bf16", m=4096, k=512, n=256, world=4)
    assert {time.site for time in times} == {key}


def test_the_least_counts_where_it_is_known() -> None:
    rows = [row(least_us=240), row(least_us=""), row(least_us="nan")]
    assert [time.seconds for time in site_times(rows)] == pytest.approx([240e-6, 250e-6])


@pytest.mark.parametrize(
    ("op", "kind"),
    [("gemm_rs", "matmul_reduce_scatter"), ("gemm_ar", "matmul_all_reduce")],
)
def test_kinds_and_modes(op: str, kind: str) -> None:
    (time,) = site_times([row(op=op, mode="graph")])
    assert (time.site.kind, time.site.graph) == (kind, True)


def test_what_tells_nothing_is_left_out() -> None:
    failed = row(error="wrong: off by 3")
    assert site_times([failed, row(median_us=""), row(median_us="nan")]) == []
    assert site_times([]) == []
