"""Sites are found by meaning in every spelling; what is no site stays alone, with the reason."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from benchmarks.passes import chain
from tests.passes.refused import REFUSED
from tests.passes.samples import STRATEGIES
from tests.passes.spellings import as_sample, sample, spellings
from tests.passes.test_decompose import assert_overlaps
from tests.support.line_count import per_op

from interlace.ir import Call, Collective, parse
from interlace.passes import run_pipeline
from interlace.passes.find_sites import fits, in_blocks


@pytest.mark.parametrize("ranks", [2, 3], ids=lambda n: f"{n}-ranks")
@pytest.mark.parametrize("name", spellings(2))
def test_every_spelling_is_found_and_overlapped(name: str, ranks: int, seed: int) -> None:
    kind, made = sample(name, ranks, seed)
    found = run_pipeline(made.program, "find_sites")
    assert [site.kind for site in found.sites] == [kind]
    some = ("ring", "peer-put") if ranks == 2 else ("pipeline", "peer-get", "fused-pieces")
    for options in (STRATEGIES[strategy] for strategy in some):
        decomposed = run_pipeline(found, f"decompose{{{options}}}")
        taken = decomposed.sites[0].strategy  # what no kernel can do, copies do
        assert f"strategy={taken}" in options or (taken == "peer" and "fused" in options)
        assert_overlaps(decomposed, made, seed)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name: str) -> None:
    kind, reason, text = REFUSED[name]
    program = parse(f"def f(tp: Team[2], {text}\n")
    found = run_pipeline(program, "find_sites")
    (site,) = found.sites
    assert site.kind == kind
    assert reason in site.reason
    assert [type(op) for op in found.ops if op.site == site.id] == [Collective]
    decomposed = run_pipeline(found, "decompose{strategy=peer}")
    assert decomposed.sites[0].strategy == "serial"
    assert decomposed.ops == found.ops


def test_a_team_of_one_is_no_site() -> None:
    text = """def f(tp: Team[1], x: f32[3, 8], w: f32[8, 5]):
    full = empty(f32[3, 8])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.default", full, w, out=(y := f32[3, 5]))
    return y
"""
    (site,) = run_pipeline(parse(text), "find_sites").sites
    assert (site.kind, site.reason) == ("all_gather", "team tp has one rank")


LAYER = """def f(tp: Team[2], x: f32[3, 8], w: f32[8, 5], u: f32[5, 8], g: f32[6, 8]):
    full = empty(f32[6, 8])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.default", full, w, out=(h := f32[6, 5]))
    main: call("aten.relu.default", h, out=(a := f32[6, 5]))
    main: call("aten.mm.default", a, u, out=(y := f32[6, 8]))
    out = empty(f32[3, 8])
    main: reduce_scatter(y, out, reduce="sum", team=tp)
    main: call("aten.mm.default", full.permute(1, 0), g, out=(dw := f32[8, 8]))
    total = empty(f32[8, 8])
    main: all_reduce(dw, total, reduce="sum", team=tp)
    return out, total
"""


def test_each_collective_has_a_site_and_running_again_changes_nothing() -> None:
    found = run_pipeline(parse(LAYER), "find_sites")
    assert [site.kind for site in found.sites] == [
        "all_gather_matmul",
        "matmul_reduce_scatter",
        "all_reduce",
    ]
    assert run_pipeline(found, "find_sites") == found


def test_a_matmul_between_two_communications_belongs_to_the_first() -> None:
    text = LAYER.replace('"aten.mm.default", a, u', '"aten.mm.default", full, w2')
    text = text.replace("u: f32[5, 8]", "w2: f32[8, 8]")
    found = run_pipeline(parse(text), "find_sites")
    assert [site.kind for site in found.sites[:2]] == ["all_gather_matmul", "reduce_scatter"]
    assert "overlapped with another communication" in found.sites[1].reason


def test_sites_can_be_decomposed_one_after_another(seed: int) -> None:
    program = parse(LAYER)
    both = "decompose{strategy=ring,sites=[2]},decompose{strategy=peer,sites=[1]}"
    made = run_pipeline(program, f"find_sites,{both},find_sites")
    assert [site.strategy for site in made.sites] == ["peer", "ring", "serial"]
    assert_overlaps(made, as_sample(program, seed), seed)


def test_a_matmul_that_waits_for_another_takes_the_gathered_tensor_whole(seed: int) -> None:
    text = """def f(tp: Team[2], x: f32[3, 8], w: f32[8, 8]):
    full = empty(f32[6, 8])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.default", full, w, out=(y := f32[6, 8]))
    main: call("aten.mm.default", y.permute(1, 0), y, out=(u := f32[8, 8]))
    main: call("aten.mm.default", full, u, out=(z := f32[6, 8]))
    return z
"""
    found = run_pipeline(parse(text), "find_sites")
    assert [site.kind for site in found.sites] == ["all_gather_matmul"]
    assert [op.fn for op in found.ops if isinstance(op, Call) and op.site] == ["aten.mm.default"]
    made = run_pipeline(found, "decompose{strategy=peer}")
    assert_overlaps(made, as_sample(found, seed), seed)


def test_a_long_program_takes_no_more_for_each_op() -> None:
    def work(count: int) -> tuple[int, Callable[[], object]]:
        program = chain(count)
        found = run_pipeline(program, "find_sites")
        assert len(found.sites) == count // 4
        return len(program.ops), lambda: run_pipeline(program, "find_sites")

    assert per_op(work, 160) < 2500


# blocks: one fits exactly if there is an order in which all run without a break


@pytest.mark.parametrize("wide", [False, True], ids=["near", "wide"])
def test_a_block_fits_exactly_where_there_is_an_order(wide: bool, seed: int) -> None:
    rng = random.Random(seed)
    answers = {True: 0, False: 0}
    for _ in range(300):
        count = rng.randint(4, 40)
        reach = count if wide else 6
        before = [
            tuple(j for j in range(max(0, i - reach), i) if rng.random() < 1.5 / reach)
            for i in range(count)
        ]
        free = set(range(count))
        taken: dict[int, list[int]] = {}
        while len(free) > 3:
            first = rng.choice(sorted(free))
            near = sorted(i for i in free if abs(i - first) <= reach)
            block = sorted({first, *rng.sample(near, min(len(near), rng.randint(1, 3)))})
            possible = in_blocks(before, {**taken, block[-1]: block}) is not None
            assert fits(before, taken.values(), block) == possible, (before, taken, block)
            answers[possible] += 1
            if possible:
                taken[block[-1]] = block
                free -= {*block}
            elif rng.random() < 0.5:
                free.discard(first)
    assert min(answers.values()) > 100
