"""Strategies as data: the order in which they sum, what they cannot serve, the ways to compute."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from tests.passes.samples import KINDS, STRATEGIES
from tests.passes.spellings import as_sample
from tests.passes.test_decompose import assert_overlaps
from tests.support.interpreter import run_ranks

from interlace.cost import Machine, default_machine
from interlace.ir import Call, Copy, parse
from interlace.options import Options
from interlace.passes import candidates, lower, parse_pipeline, run_pipeline
from interlace.strategies import STRATEGIES as ROWS
from interlace.strategies import Offset, Path, Strategy, rows_of
from interlace.verify import check
from interlace_bench.shapes import OPS
from interlace_bench.sites import SiteCase

WORLD = 4
SUMMED = f"""def f(tp: Team[{WORLD}], x: f32[{WORLD}, 1], w: f32[1, 1]):
    main: call("aten.mm.default", x, w, out=(y := f32[{WORLD}, 1]))
    out = empty(f32[1, 1])
    main: reduce_scatter(y, out, reduce="sum", team=tp)
    return out
"""
PARTS = [1e8, 1.0, -1e8, 3.0]
"""What the ranks add: in fp32 each order of them gives another sum."""


def total(order: list[int]) -> float:
    found = torch.zeros(())
    for rank in order:
        found = found + PARTS[rank]
    return found.item()


@pytest.mark.parametrize("name", ["ring", "peer-get", "peer-put"])
def test_partial_results_are_summed_in_the_order_that_the_strategy_states(
    name: str, seed: int
) -> None:
    inputs = [[torch.full((WORLD, 1), part), torch.ones(1, 1)] for part in PARTS]
    pipeline = f"find_sites,decompose{{{STRATEGIES[name]}}},schedule,insert_sync"
    results = run_ranks(run_pipeline(parse(SUMMED), pipeline), inputs, seed=seed)
    row, *_ = rows_of(name.split("-")[0], name.split("-")[-1])
    for owner, (out,) in enumerate(results):
        if row.accumulates:
            assert row.reduces.startswith("rows of rank c: c+1, c+2, ..., c")
            order = [(owner + 1 + k) % WORLD for k in range(WORLD)]
        else:
            assert row.reduces.startswith("in the order of the ranks")
            order = list(range(WORLD))
        assert isinstance(out, torch.Tensor)
        assert out.item() == total(order)
    assert len({total([(c + 1 + k) % WORLD for k in range(WORLD)]) for c in range(WORLD)}) > 1


@pytest.mark.parametrize("primitive", ["messages", "get", "put"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_the_table_is_all_that_a_strategy_takes(
    kind: str, primitive: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """One that goes through the ranks backwards: it is written, proved, run and predicted."""
    back, forth = Offset(0, -1), Offset(0, 1)
    gather = Path(chunk=back, to=forth, source=back)
    scatter = Path(chunk=back, to=back, source=forth)
    if primitive == "messages":
        gather = scatter = Path(forth, to=Offset(-1), source=Offset(1), sent=Offset(-1, 1))
    row = Strategy(
        "backwards",
        "ranks",
        primitive,
        "in the order of the ranks",
        gather,
        scatter,
        accumulates=primitive == "messages",
    )
    monkeypatch.setitem(ROWS, ("backwards", None), row)
    sample = KINDS[kind](4, "uneven", "f32", seed)
    lower = "find_sites,decompose{strategy=backwards},schedule,plan_memory,insert_sync"
    made = run_pipeline(sample.program, lower)
    assert made.sites[0].strategy == "backwards"
    check(made).raise_if_unsound()
    assert_overlaps(made, sample, seed)
    assert Options.from_dict({"strategy": "backwards"}).strategy == "backwards", "a row is enough"
    (found,) = candidates(sample.program, Options(), default_machine("cpu")).values()
    assert "backwards" in [estimate.label for estimate in found]


def test_a_maximum_is_no_sum() -> None:
    text = SUMMED.replace('reduce="sum"', 'reduce="max"')
    for name, options in STRATEGIES.items():
        made = run_pipeline(parse(text), f"find_sites,decompose{{{options}}}")
        alone = name != "exchange"
        assert (made.sites[0].strategy == "serial") == alone
        if name in ("ring", "peer-get", "peer-put"):
            assert "the collective takes the max" in made.remarks[0].text


def test_what_cannot_be_fused_is_copied_and_says_so(seed: int) -> None:
    program = KINDS["all_gather_matmul"](2, "even", "f32", seed).program
    made = run_pipeline(program, "find_sites,decompose{strategy=fused}")
    (site,) = made.sites
    assert (site.strategy, site.protocol) == ("peer", "put")
    text = "fused cannot serve this site: its element type is f32, and the kernel takes bf16 or f16"
    assert made.remarks[0].text == site.reason == f"{text}; peer copies instead"


@pytest.mark.parametrize("machine", [None, default_machine("cuda")], ids=["no-machine", "machine"])
def test_what_was_asked_for_is_predicted_where_there_is_a_machine(
    machine: Machine | None, seed: int
) -> None:
    program = KINDS["matmul_all_reduce"](2, "even", "f32", seed).program
    made = run_pipeline(program, parse_pipeline("find_sites,decompose{strategy=ring}", machine))
    (site,) = made.sites
    assert (site.strategy, site.reason, site.chunks) == ("ring", "requested", 2)
    assert (site.serial_ms is not None) == (machine is not None)
    assert (site.predicted_ms is not None) == (machine is not None)


@pytest.mark.parametrize("rows", [2, 130], ids=["packed", "a-matmul-each"])
@pytest.mark.parametrize("strategy", ["pipeline", "ring", "peer-put"])
def test_stacks_are_packed_where_they_are_small(rows: int, strategy: str, seed: int) -> None:
    text = f"""def f(tp: Team[2], x: f32[2, {rows}, 4], w: f32[4, 3], u: f32[3, 2]):
    full = empty(f32[4, {rows}, 4])
    main: all_gather(x, full, team=tp)
    main: call("aten.cat.default", (full.chunk(0, 2), full.chunk(1, 2)), 1,
               out=(c := f32[2, {2 * rows}, 4]))
    main: call("aten.mm.default", c.view({4 * rows}, 4), w, out=(y := f32[{4 * rows}, 3]))
    main: call("aten.relu.default", y, out=(r := f32[{4 * rows}, 3]))
    main: call("aten.mm.default", r, u, out=(z := f32[{4 * rows}, 2]))
    main: call("aten.cat.default", (z.view(2, {2 * rows}, 2)[:, 0:{rows}],
               z.view(2, {2 * rows}, 2)[:, {rows}:{2 * rows}]), out=(s := f32[4, {rows}, 2]))
    out = empty(f32[2, {rows}, 2])
    main: reduce_scatter(s, out, reduce="sum", team=tp)
    return out
"""
    sample = as_sample(parse(text), seed)
    made = run_pipeline(sample.program, f"find_sites,decompose{{{STRATEGIES[strategy]}}}")
    assert [site.kind for site in made.sites] == ["all_gather_matmul", "matmul_reduce_scatter"]
    packed = {op.outs[0].buffer for op in made.ops if isinstance(op, Call) and op.outs}
    if strategy != "pipeline":
        assert ("y_rows" in packed) == (rows == 2)
    assert_overlaps(made, sample, seed)


# on GPUs a rank's own shard is shown by a copy on the stream that computes, before the matmuls


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("world", [2, 4])
def test_gets_follow_a_copy_that_waits_for_no_matmul(
    op: str, world: int, device: Literal["cpu", "cuda"]
) -> None:
    serial = SiteCase(op, 64, 32, 48).program(world)
    options = Options(strategy="peer")
    program = lower(serial, options, default_machine(device), protocol="get")
    assert [site.strategy for site in program.sites] == ["peer"]
    assert check(program).sound
    shown = [i for i, each in enumerate(program.ops) if isinstance(each, Copy)]
    if op != "ag_gemm":
        return
    (place,) = shown
    assert program.ops[place].stream == ("main" if device == "cuda" else "comm")
    if device == "cuda":
        assert not any(isinstance(each, Call) for each in program.ops[:place])
