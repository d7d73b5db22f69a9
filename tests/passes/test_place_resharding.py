"""Gathers move to where fewer bytes travel, results stay the same, and what stays says why."""

from __future__ import annotations

import pytest
from tests.passes.spellings import as_sample
from tests.passes.test_decompose import assert_equal, assert_overlaps

from interlace.errors import PassError
from interlace.ir import Call, Collective, Program, parse
from interlace.ir.sizes import number
from interlace.passes import run_pipeline

CAST = """def f(tp: Team[2], x: f32[3, 8], w: bf16[8, 5]):
    full = empty(f32[6, 8])
    main: all_gather(x, full, team=tp)
    main: call("aten._to_copy.default", full, dtype=bf16, out=(n := bf16[6, 8]))
    main: call("aten.mm.default", n, w, out=(y := bf16[6, 5]))
    return y
"""
CAST_BEHIND_CAT = """def f(tp: Team[2], x: f32[2, 3, 8], w: bf16[8, 5]):
    full = empty(f32[4, 3, 8])
    main: all_gather(x, full, team=tp)
    main: call("aten.cat.default", (full.chunk(0, 2), full.chunk(1, 2)), 1, out=(c := f32[2, 6, 8]))
    main: call("aten._to_copy.default", c.view(12, 8), dtype=bf16, out=(n := bf16[12, 8]))
    main: call("aten.mm.default", n, w, out=(y := bf16[12, 5]))
    return y, n
"""
POINTWISE = CAST.replace('"aten._to_copy.default", full, dtype=bf16', '"aten.relu.default", full')
POINTWISE = POINTWISE.replace("bf16", "f32")
ROW_SUM = """def f(tp: Team[2], x: f32[3, 8]):
    full = empty(f32[6, 8])
    main: all_gather(x, full, team=tp)
    main: call("aten.sum.dim_IntList", full, (-1,), True, out=(s := f32[6, 1]))
    return s
"""
WIDENED = """def f(tp: Team[2], x: bf16[3, 8], w: f32[8, 5]):
    main: call("aten._to_copy.default", x, dtype=f32, out=(n := f32[3, 8]))
    full = empty(f32[6, 8])
    main: all_gather(n, full, team=tp)
    main: call("aten.mm.default", full, w, out=(y := f32[6, 5]))
    return y
"""
WIDENED_UNEVEN = """def f(tp: Team[2], x: bf16[rows[tp.rank], 4, 8], w: f32[8, 5]):
    rows = table(tp, 3, 2)
    flat = table(tp, 12, 8)
    main: call("aten._to_copy.default", x, dtype=f32, out=(n := f32[rows[tp.rank], 4, 8]))
    full = empty(f32[20, 8])
    main: all_gather(n.view(-1, 8), full, splits=flat, team=tp)
    main: call("aten.mm.default", full, w, out=(y := f32[20, 5]))
    return y
"""
TWO_TYPES = CAST.replace("return y", "return y, full")


def gathered_bytes(program: Program) -> int:
    box = program.boxes(0)
    ops = [op for op in program.ops if isinstance(op, Collective)]
    return sum(number(box(op.src).nbytes) for op in ops if op.src is not None)


@pytest.mark.parametrize(
    ("text", "factor"),
    [
        (CAST, 2),
        (CAST_BEHIND_CAT, 2),
        (POINTWISE, 1),
        (ROW_SUM, 8),
        (WIDENED, 2),
        (WIDENED_UNEVEN, 2),
    ],
    ids=["cast", "cast-behind-cat", "pointwise", "row-sum", "widened", "widened-uneven"],
)
def test_fewer_bytes_travel_and_the_result_is_the_same(text: str, factor: int, seed: int) -> None:
    serial = parse(text)
    sample = as_sample(serial, seed)
    found = run_pipeline(serial, "find_sites")
    placed = run_pipeline(found, "place_resharding")
    assert gathered_bytes(placed) * factor == gathered_bytes(serial)
    assert placed.ops != found.ops
    (remark,) = placed.remarks
    assert (remark.pass_name, remark.site) == ("place_resharding", 1)
    assert_overlaps(placed, sample, seed)


def test_a_gather_that_moved_is_a_site_and_is_overlapped(seed: int) -> None:
    sample = as_sample(parse(CAST), seed)
    made = run_pipeline(sample.program, "find_sites,place_resharding,decompose{strategy=ring}")
    (site,) = made.sites
    assert (site.kind, site.strategy) == ("all_gather_matmul", "ring")
    assert_overlaps(made, sample, seed)


def test_what_stays_says_why() -> None:
    found = run_pipeline(parse(TWO_TYPES), "find_sites")
    placed = run_pipeline(found, "place_resharding")
    assert placed.ops == found.ops
    (remark,) = placed.remarks
    assert "the gathered tensor is used otherwise too" in remark.text
    assert remark.site == 1
    with pytest.raises(PassError, match="choose from auto, before, after"):
        run_pipeline(found, "place_resharding{position=left}")


def order(program: Program) -> list[str]:
    return [op.kind if isinstance(op, Collective) else op.fn.split(".")[1]
            for op in program.ops if isinstance(op, Call | Collective)]  # fmt: skip


def test_positions_can_be_forced(seed: int) -> None:
    before, after = ["all_gather", "_to_copy", "mm"], ["_to_copy", "all_gather", "mm"]
    for text in (CAST, WIDENED):
        for position, expected in (("before", before), ("after", after)):
            placed = run_pipeline(parse(text), f"place_resharding{{position={position}}}")
            assert order(placed) == expected
            assert_equal(placed, as_sample(parse(text), seed), None)


def test_a_shard_that_others_use_stays_beside_its_gather(seed: int) -> None:
    text = WIDENED.replace("return y", "return y, n")
    sample = as_sample(parse(text), seed)
    placed = run_pipeline(sample.program, "place_resharding")
    assert order(placed) == ["_to_copy", "all_gather", "_to_copy", "mm"]
    assert_equal(placed, sample, None)


def test_an_operand_that_is_written_again_keeps_its_gather(seed: int) -> None:
    text = WIDENED.replace("    full = empty", "    main: copy(n, x)\n    full = empty")
    placed = run_pipeline(parse(text), "place_resharding")
    assert "written again" in placed.remarks[0].text
    assert order(placed) == order(parse(text))
