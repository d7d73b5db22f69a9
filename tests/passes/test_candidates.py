"""Candidates of a Program's sites, and tables of measured sites with what is predicted for them."""

from __future__ import annotations

import dataclasses

import pytest
from tests.passes.plain_sites import plain_program
from tests.passes.test_choose import SIZES, key_of

from interlace.cost import SiteKey, SiteTime, default_machine, run_issue_seconds
from interlace.cost.op_times import PACKED_CALLS
from interlace.ir import parse, validate
from interlace.options import Options
from interlace.passes import candidates, lower
from interlace_bench.measured_sites import with_sites

H200 = default_machine("cuda")


ROWS = [("f32", 8192), ("f32", 8191), ("f32", 2), ("f8e4m3", 8192), ("f8e5m2", 64)]


@pytest.mark.parametrize(
    ("kind", "dtype", "rows"),
    [
        (kind, *of)
        for kind in (*SIZES, "all_to_all_matmul", "matmul_all_to_all")
        for of in ROWS
        if of[1] % 4 == 0 or "all_to_all" not in kind  # whose parts are even
    ],
)
def test_a_key_makes_the_program_that_has_it(kind: str, dtype: str, rows: int) -> None:
    """Of FP8 it counts the numbers of packed rows, and has their type after a reduction too."""
    key = SiteKey(kind=kind, dtype=dtype, m=rows, k=48, n=80, world=4)
    program = plain_program(key)
    validate(program)
    assert key_of(program) == key


@pytest.mark.parametrize("kind", SIZES)
def test_float8_does_not_take_what_was_measured_in_bf16(kind: str) -> None:
    key = SiteKey(kind=kind, dtype="bf16", m=8192, k=4096, n=4096, world=4)
    machine = with_sites(H200, [SiteTime(site=key, strategy="serial", seconds=1.0)])
    for dtype, wanted in (("bf16", 1e3), ("f8e4m3", None)):
        program = plain_program(dataclasses.replace(key, dtype=dtype))
        (found,) = candidates(program, Options(), machine).values()
        assert found[0].measured_ms == wanted


def test_the_host_multiplies_packed_rows_block_by_block() -> None:
    """After a gather each rank's rows have a scale of their own."""
    key = SiteKey(kind="all_gather_matmul", dtype="f8e4m3", m=8192, k=4096, n=4096, world=4)
    gather, scatter = (
        run_issue_seconds(plain_program(dataclasses.replace(key, kind=kind)), H200)
        for kind in ("all_gather_matmul", "matmul_reduce_scatter")
    )
    call = dict(H200.issue)["call"]
    assert gather - scatter == pytest.approx(PACKED_CALLS * (4 - 1) * call)


@pytest.mark.parametrize("kind", SIZES)
def test_candidates_are_those_of_lowering(kind: str) -> None:
    program, options = parse(SIZES[kind]), Options()
    (site,) = lower(program, options, H200).sites
    (found,) = candidates(program, options, H200).values()
    assert set(candidates(program, options, H200)) == {site.id}
    assert found[0].label == "serial"
    assert site.serial_ms == found[0].predicted_ms
    assert site.predicted_ms in [e.predicted_ms for e in found]


def test_what_a_graph_saves_is_the_hosts_time() -> None:
    program = plain_program(
        SiteKey(kind="all_gather_matmul", dtype="bf16", m=64, k=64, n=64, world=4)
    )
    eager, graph = (
        {e.label: e.predicted_ms for e in candidates(program, Options(), machine)[1]}
        for machine in (H200, H200.replayed)
    )
    assert all(graph[label] <= eager[label] for label in eager)
    assert graph["peer/put"] < eager["peer/put"]


def test_later_times_replace_and_others_stay() -> None:
    key = key_of(parse(SIZES["all_gather_matmul"]))
    graph = dataclasses.replace(key, graph=True)
    first = with_sites(
        H200,
        [
            SiteTime(site=key, strategy="serial", seconds=1.0),
            SiteTime(site=key, strategy="serial", seconds=2.0),
            SiteTime(site=key, strategy="peer/put", seconds=3.0),
        ],
    )
    second = with_sites(first, [SiteTime(site=graph, strategy="serial", seconds=4.0)])
    found = {(t.site.graph, t.strategy): t for t in second.sites}
    assert {key: t.seconds for key, t in found.items()} == {
        (False, "serial"): 2.0,
        (False, "peer/put"): 3.0,
        (True, "serial"): 4.0,
    }
