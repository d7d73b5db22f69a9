"""All-to-alls around the matmuls of experts: found, overlapped by each strategy, right, sound."""

from __future__ import annotations

import pytest
import torch
from tests.passes.experts import COMBINE, DISPATCH, REFUSED, layer, spellings
from tests.passes.samples import Sample, integers
from tests.passes.spellings import as_sample
from tests.passes.test_decompose import AFTER, assert_overlaps

from interlace.cost import default_machine, simulate
from interlace.ir import Call, Collective, Program, parse
from interlace.passes import parse_pipeline, run_pipeline

STRATEGIES = {
    "ring": "strategy=ring",
    "peer-get": "strategy=peer",
    "peer-put": "strategy=peer,protocol=put",
    "exchange": "strategy=exchange",
}
H200 = default_machine("cuda")


def decomposed(program: Program, options: str) -> Program:
    return run_pipeline(program, f"find_sites,decompose{{{options}}}")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [2, 3], ids=lambda n: f"{n}-ranks")
@pytest.mark.parametrize("name", spellings(2))
def test_every_spelling_is_found_and_overlapped(
    name: str, ranks: int, strategy: str, seed: int
) -> None:
    kinds, text = spellings(ranks)[name]
    sample = as_sample(parse(text), seed)
    made = decomposed(sample.program, STRATEGIES[strategy])
    assert tuple(site.kind for site in made.sites) == kinds
    for site in made.sites:
        wanted = strategy.split("-")[0] if site.kind in (DISPATCH, COMBINE) else "serial"
        assert site.strategy == wanted
    if strategy != "exchange":
        left = [op for op in made.ops if isinstance(op, Collective)]
        assert len(left) == kinds.count("all_to_all")
    assert_overlaps(made, sample, seed)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("ranks", [2, 3, 4], ids=lambda n: f"{n}-ranks")
def test_a_layer_is_what_torch_makes_of_all_tokens(ranks: int, strategy: str, seed: int) -> None:
    """Independent of the serial Program: every expert applied to the tokens that all sent it."""
    e, c, k, n = 2, 3, 8, 5
    g = torch.Generator().manual_seed(seed)
    xs = [integers(g, ranks * e, c, k, dtype=torch.float32) for _ in range(ranks)]
    ws = [integers(g, e, k, n, dtype=torch.float32) for _ in range(ranks)]
    us = [integers(g, e, n, k, dtype=torch.float32) for _ in range(ranks)]
    expected: list[list[torch.Tensor]] = []
    for x in xs:
        rows = [(x[i] @ ws[i // e][i % e]).relu() @ us[i // e][i % e] for i in range(ranks * e)]
        expected.append([torch.stack(rows)])
    program = parse(layer(ranks, e, c, k, n))
    inputs = [list(given) for given in zip(xs, ws, us, strict=True)]
    sample = Sample(program, inputs, expected)
    assert_overlaps(decomposed(program, STRATEGIES[strategy]), sample, seed)


TWO_AXES = """def f(tp: Team[2], ep: Team[2], x: f32[6, 8], w1: f32[8, 8], w2: f32[2, 8, 4],
      w3: f32[2, 4, 8], w4: f32[8, 5]):
    full = empty(f32[12, 8])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.default", full, w1, out=(a := f32[12, 8]))
    r = empty(f32[4, 3, 8])
    main: all_to_all(a.view(4, 3, 8), r, team=ep)
    main: call("aten.clone.default", r.view(2, 2, 3, 8).permute(1, 0, 2, 3),
               memory_format="@contiguous_format", out=(t := f32[2, 2, 3, 8]))
    main: call("aten.bmm.default", t.view(2, 6, 8), w2, out=(h := f32[2, 6, 4]))
    main: call("aten.bmm.default", h, w3, out=(y := f32[2, 6, 8]))
    main: call("aten.clone.default", y.view(2, 2, 3, 8).permute(1, 0, 2, 3),
               memory_format="@contiguous_format", out=(s := f32[2, 2, 3, 8]))
    back = empty(f32[4, 3, 8])
    main: all_to_all(s.view(4, 3, 8), back, team=ep)
    main: call("aten.remainder.Scalar", back.view(12, 8), 3, out=(c := f32[12, 8]))
    main: call("aten.mm.default", c, w4, out=(d := f32[12, 5]))
    out = empty(f32[6, 5])
    main: reduce_scatter(d, out, reduce="sum", team=tp)
    return out
"""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_experts_beside_tensor_parallelism(strategy: str, seed: int) -> None:
    """Experts on one axis of a mesh, gathers and scatters on the other."""
    sample = as_sample(parse(TWO_AXES), seed)
    made = decomposed(sample.program, STRATEGIES[strategy])
    kinds = ["all_gather_matmul", DISPATCH, COMBINE, "matmul_reduce_scatter"]
    assert [site.kind for site in made.sites] == kinds
    assert {site.strategy for site in made.sites} == {strategy.split("-")[0]}
    assert_overlaps(made, sample, seed)


@pytest.mark.parametrize(("strategy", "taken"), [("pipeline", "serial"), ("fused", "peer")])
def test_what_cannot_serve_says_why(strategy: str, taken: str) -> None:
    made = decomposed(parse(layer(2, 2, 3, 8, 5)), f"strategy={strategy}")
    for site in made.sites:
        assert site.strategy == taken
        assert site.reason.startswith(f"{strategy} cannot serve this site: ")
        assert "all-to-all" in site.reason
    assert [remark.site for remark in made.remarks] == [1, 2]


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name: str) -> None:
    reason, text = REFUSED[name]
    found = run_pipeline(parse(f"def f(tp: Team[2], {text}\n"), "find_sites")
    (site,) = found.sites
    assert site.kind == "all_to_all"
    assert reason in site.reason
    made = run_pipeline(found, "decompose{strategy=peer}")
    assert made.sites[0].strategy == "serial"
    assert made.ops == found.ops


LARGE = layer(4, 4, 1024, 4096, 3584, "bf16")


def test_large_layers_are_overlapped_on_a_gpu() -> None:
    """4,096 tokens an expert, hidden 4096 and 3584: `auto` hides communication, and gains by it."""
    made = run_pipeline(parse(LARGE), parse_pipeline("find_sites,decompose", H200))
    for site in made.sites:
        assert site.strategy == "peer"
        assert site.serial_ms is not None
        assert site.predicted_ms is not None
        assert site.predicted_ms < 0.9 * site.serial_ms
    serial = run_pipeline(parse(LARGE), "find_sites,decompose{strategy=serial},insert_sync")
    whole = simulate(run_pipeline(made, AFTER), H200).makespan_s
    assert whole < 0.9 * simulate(serial, H200).makespan_s


def test_a_few_tokens_are_not_cut() -> None:
    """Two tokens an expert: each chunk would read all weights again."""
    few = layer(4, 4, 2, 4096, 3584, "bf16")
    made = run_pipeline(parse(few), parse_pipeline("find_sites,decompose", H200))
    for site in made.sites:
        assert site.strategy in ("serial", "exchange")
    assert sum(isinstance(op, Call) and "bmm" in op.fn for op in made.ops) == 2
