"""Programs for classes of sizes: sound, and at every size what the passes make for that size."""

from __future__ import annotations

import dataclasses
import random

import pytest
from tests.passes.samples import KINDS, STRATEGIES

from interlace.ir import Alloc, Program, parse
from interlace.ir.sizes import MOST
from interlace.passes import run_pipeline
from interlace.verify import check

LOWER = "find_sites,decompose{{{}}},schedule,plan_memory,insert_sync,fuse"
TEXTS = {
    "all_gather_matmul": """
def f(tp: Team[{ranks}], S: Size[{value}], x: f32[{mine}, 8], w: f32[8, 5]):
    {table}
    full = empty(f32[{total}, 8])
    main: all_gather(x, full, team=tp{splits})
    main: call("aten.mm.default", full, w, out=(y := f32[{total}, 5]))
    return y
""",
    "matmul_reduce_scatter": """
def f(tp: Team[{ranks}], S: Size[{value}], x: f32[{total}, 8], w: f32[8, 5]):
    {table}
    main: call("aten.mm.default", x, w, out=(y := f32[{total}, 5]))
    out = empty(f32[{mine}, 5])
    main: reduce_scatter(y, out, reduce="sum", team=tp{splits})
    return out
""",
    "matmul_all_reduce": """
def f(tp: Team[{ranks}], S: Size[{value}], x: f32[{total}, 8], w: f32[8, 5]):
    main: call("aten.mm.default", x, w, out=(y := f32[{total}, 5]))
    out = empty(f32[{total}, 5])
    main: all_reduce(y, out, reduce="sum", team=tp)
    return out
""",
}


def serial(kind: str, ranks: int, value: int, uneven: bool) -> Program:
    """The site with `S` rows on each rank, or (uneven) one less on the last."""
    rows = [*["S"] * (ranks - 1), "S - 1" if uneven else "S"]
    return parse(
        TEXTS[kind].format(
            ranks=ranks,
            value=value,
            mine="rows[tp.rank]" if uneven else "S",
            total=f"{ranks} * S - {int(uneven)}",
            table=f"rows = table(tp, {', '.join(rows)})" if uneven else "",
            splits=", splits=rows" if uneven else "",
        )
    )


def bare(program: Program) -> Program:
    """Without what is predicted, said in numbers, and laid out for the largest sizes of a class."""
    ops = [
        dataclasses.replace(op, buffer=dataclasses.replace(op.buffer, offset=0))
        if isinstance(op, Alloc)
        else op
        for op in program.ops
    ]
    sites = [dataclasses.replace(s, serial_ms=None, predicted_ms=None) for s in program.sites]
    return program.replace(ops=tuple(ops), sites=tuple(sites), remarks=())


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_class_is_at_each_size_what_that_size_is_lowered_to(
    kind: str, strategy: str, uneven: bool, seed: int
) -> None:
    rng = random.Random(seed)
    pipeline = LOWER.format(STRATEGIES[strategy])
    compared = 0
    for value in (1, rng.randrange(2, 40), rng.randrange(40, 2000)):
        ranks = rng.choice([2, 3, 4])
        given = serial(kind, ranks, value, uneven)
        lowered = run_pipeline(given, pipeline)
        report = check(lowered)
        assert report.sound
        assert report.sizes.holds({"S": value})
        near = [value, *(value + n for n in range(-12, 100)), *(value * n for n in range(2, 40))]
        members = [size for size in near if size >= 0 and report.sizes.holds({"S": size})]
        for size in rng.sample(members, min(len(members), 4)):
            concrete = lowered.at({"S": size})
            expected = run_pipeline(given.at({"S": size}), pipeline)
            assert str(bare(concrete)) == str(bare(expected)), f"{ranks} ranks, S = {size}"
            assert check(concrete).sound
            compared += 1
    assert compared >= 3


CACHE = """
def f(tp: Team[2], S: Size[20], C: Size[384], x: f32[S, 128], cache: f32[C, 64],
    wq: f32[128, 64], wo: f32[64, 128],
):
    main: call("aten.mm.default", x, wq, out=(q := f32[S, 64]))
    main: call("aten.mm.default", q, cache.permute(1, 0), out=(p := f32[S, C]))
    main: call("aten.mm.default", p, cache, out=(v := f32[S, 64]))
    main: call("aten.mm.default", v, wo, out=(y := f32[S, 128]))
    out = empty(f32[S, 128])
    main: all_reduce(y, out, reduce="sum", team=tp)
    return out
"""


def test_a_prompt_over_a_cache_has_a_class_of_a_bucket() -> None:
    """No remainder of a size that memory is rounded by, no fact about two sizes, and no bound of
    the length of a cache, which no other rank need know."""
    lowered = run_pipeline(parse(CACHE), LOWER.format("strategy=serial"))
    report = check(lowered)
    assert not report.single
    assert not report.sizes.facts
    (tokens, cached) = report.sizes.sizes
    assert (tokens.low, tokens.high, tokens.modulus) == (16, 31, 1)
    assert cached.high == MOST
    kinds = {buffer.name: buffer.kind for buffer in lowered.buffers().values()}
    assert (kinds["q"], kinds["p"]) == ("local", "fresh")
