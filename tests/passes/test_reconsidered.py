"""`auto` looks at a site once more in the whole schedule."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

import pytest
from tests.passes.spellings import as_sample
from tests.passes.test_decompose import assert_overlaps

from interlace.ir import Collective, Program, Site, parse
from interlace.options import Options
from interlace.passes import lower, lowering, run_pipeline
from interlace.passes.find_sites import Analysis
from interlace.passes.strategies import reconsider
from interlace.runtime.machine import default_machine
from interlace.verify import check

OTHER = """
    z = empty(bf16[4096, 4096])
    main: call("aten.mm.out", a, b, out=z)
    return y, z
"""
GATHER = """
def layer(
    tp: Team[4], x: bf16[2048, 4096], w: bf16[4096, 1024], a: bf16[4096, 8192], b: bf16[8192, 4096]
):
    full = alloc(bf16[8192, 4096])
    y = empty(bf16[8192, 1024])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.out", full, w, out=y)
"""


@pytest.mark.parametrize("other", [False, True])
def test_what_lies_under_other_computation_stays_whole(
    other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other matmul hides the gather, whose own matmul is faster in one piece; copies leave the
    other its SMs, unless something else is to move the bytes."""
    serial = parse(GATHER + (OTHER if other else "    return y\n"))
    machine, options = default_machine("h200"), Options(regions="inductor")
    program = lower(serial, options, machine)
    assert check(program).sound
    (site,) = program.sites
    assert (site.strategy == "copies") is other
    assert ("the whole schedule" in site.reason) is other
    by_nccl = dataclasses.replace(options, transport="nccl")
    assert lower(serial, by_nccl, machine).sites[0].strategy != "copies"
    monkeypatch.setattr(reconsider, "MOST_OPS", 0)
    (alone,) = lower(serial, by_nccl, machine).sites
    assert alone.strategy not in ("serial", "copies")
    assert alone.serial_ms == site.serial_ms


PLAIN = """
def sums(tp: Team[4], x: bf16[2048, 4096], a: bf16[16384, 8192], b: bf16[8192, 4096]):
    y = empty(bf16[{rows}, 4096])
    z = empty(bf16[16384, 4096])
    main: {op}
    main: call("aten.mm.out", a, b, out=z)
    return y, z
"""
OPS = {
    "all_gather": (2048, 8192, "all_gather(x, y, team=tp)"),
    "reduce_scatter": (8192, 2048, 'reduce_scatter(x, y, reduce="sum", team=tp)'),
    "all_reduce": (8192, 8192, 'all_reduce(x, y, reduce="sum", team=tp)'),
}


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_a_collective_without_matmuls_goes_by_copies_beside_one(
    kind: str, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if long:
        monkeypatch.setattr(reconsider, "MOST_OPS", 0)
    given, rows, op = OPS[kind]
    serial = parse(PLAIN.format(rows=rows, op=op).replace("x: bf16[2048", f"x: bf16[{given}"))
    made = lower(serial, Options(regions="inductor"), default_machine("h200"))
    (site,) = made.sites
    assert (site.kind, site.strategy) == (kind, "copies")
    assert not any(isinstance(op, Collective) for op in made.ops)
    assert check(made).sound
    kept = parse(PLAIN.format(rows=rows, op=op[:-1] + ', backend="nccl")'))
    (named,) = lower(kept, Options(regions="inductor"), default_machine("h200")).sites
    assert named.strategy == "serial", "it names what moves it"


def test_long_programs_try_serial_sites_together_and_cut_ones_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two trials, however many sites there are."""
    tried: list[list[int]] = []
    written = reconsider.written

    def counted(analysis: Analysis, sites: Mapping[int, Site], gpu: bool) -> Program:
        tried.append([number for number, site in sites.items() if site.strategy == "copies"])
        return written(analysis, sites, gpu)

    other = "    main: all_gather(v, f, team=tp)\n    main: all_gather(v, g, team=tp)\n"
    text = GATHER.replace("a: bf16", "v: bf16[2048, 4096], a: bf16") + other
    text = text.replace(
        "    y =", "    f = alloc(bf16[8192, 4096])\n    g = alloc(bf16[8192, 4096])\n    y ="
    )
    serial = parse(text + OTHER)
    monkeypatch.setattr(reconsider, "MOST_OPS", 0)
    monkeypatch.setattr(reconsider, "written", counted)
    machine = default_machine("h200").replayed  # eagerly the kernel is as fast, with less to issue
    sites = lower(serial, Options(regions="inductor"), machine).sites
    assert [site.strategy for site in sites][1:] == ["copies", "copies"]
    assert tried == [[], [2, 3], [1, 2, 3]]


@pytest.mark.parametrize("kind", [*OPS, "uneven"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_copies_give_what_the_collective_gives(kind: str, ranks: int, seed: int) -> None:
    """Of collectives without matmuls, by the reference interpreter in drawn orders."""
    n, each = 2 * ranks, random.Random(seed).choices(range(4), k=ranks)
    table = f"rows = table(tp, {', '.join(map(str, each))})"
    given, made, op, *more = {
        "all_gather": ("2, 1, 3", f"{ranks}, 2, 1, 3", "all_gather(x, y, team=tp)"),
        "reduce_scatter": (
            f"{n}, 1, 3",
            "1, 2, 1, 3",
            f'reduce_scatter(x.view({ranks}, 2, 1, 3), y, reduce="sum", team=tp)',
        ),
        "all_reduce": ("5, 3", "5, 3", 'all_reduce(x, y, reduce="sum", team=tp)'),
        "uneven": (
            "rows[tp.rank], 2, 3",
            f"{sum(each)}, 2, 3",
            "all_gather(x, y, team=tp, splits=rows)",
            table,
        ),
    }[kind]
    head = f"def plain(tp: Team[{ranks}], x: f32[{given}]):"
    text = "\n    ".join([head, *more, f"y = empty(f32[{made}])", f"main: {op}", "return y"])
    sample = as_sample(parse(text), seed)
    options = "find_sites,decompose{strategy=copies},schedule,plan_memory,insert_sync"
    made = run_pipeline(sample.program, options)
    assert made.sites[0].strategy == ("copies" if kind != "uneven" or sum(each) else "serial")
    check(made).raise_if_unsound()
    assert_overlaps(made, sample, seed)


TWICE = """
def twice(tp: Team[2], x: f32[2, 3], w: f32[2, 3]):
    y = alloc(f32[4, 3])
    main: all_gather(x, y, team=tp)
    main: call("aten.neg.default", y, out=(m := f32[4, 3]))
    main: all_gather(w, y, team=tp)
    main: call("aten.neg.default", y, out=(n := f32[4, 3]))
    return m, n
"""
BEFORE = """
def before(tp: Team[2], x: f32[2, 3], w: f32[4, 3]):
    y = alloc(f32[4, 3])
    main: call("aten.neg.out", w, out=y)
    main: call("aten.neg.default", y, out=(m := f32[4, 3]))
    main: all_gather(x, y, team=tp)
    main: call("aten.neg.default", y, out=(n := f32[4, 3]))
    return m, n
"""
WITHIN = """
def within(tp: Team[2], x: f32[4, 3]):
    y = alloc(f32[4, 3])
    main: call("aten.neg.out", x, out=y)
    main: all_reduce(y, y, reduce="sum", team=tp)
    main: call("aten.neg.default", y, out=(n := f32[4, 3]))
    main: free(y)
    return n
"""
VECTOR = """
def vector(tp: Team[2], x: f32[7], w: f32[8]):
    y = empty(f32[7])
    z = alloc(f32[8])
    main: all_reduce(x, y, reduce="sum", team=tp)
    main: all_reduce(w, z, reduce="sum", team=tp)
    main: call("aten.neg.default", z, out=(n := f32[8]))
    return y, n
"""


@pytest.mark.parametrize("text", [TWICE, BEFORE, WITHIN, VECTOR])
def test_copies_into_buffers_with_other_writers_and_of_vectors(text: str, seed: int) -> None:
    sample = as_sample(parse(text), seed)
    for options in (Options(strategy="copies"), Options(strategy="copies", regions="inductor")):
        made = lower(sample.program, options)
        assert {site.strategy for site in made.sites} == {"copies"}
        check(made).raise_if_unsound()
        assert_overlaps(made, sample, seed)


def test_copies_of_what_is_refused_change_nothing() -> None:
    """What names its backend stays as `decompose` left it, and so does a site that was overlapped
    before."""
    named = GATHER.replace("team=tp)", 'team=tp, backend="nccl")') + "    return y\n"
    machine, options = default_machine("h200"), Options(regions="inductor")
    (site,) = lower(parse(named), options, machine).sites
    assert "the whole schedule" not in site.reason
    done = lower(parse(GATHER + OTHER), dataclasses.replace(options, strategy="peer"), machine)
    (again,) = lower(done, options, machine).sites
    assert (again.strategy, again.reason) == ("peer", "requested")


def test_named_sizes_are_left_as_decompose_chose() -> None:
    """Also where the passes have made numbers of all of them."""
    text = (GATHER + OTHER).replace("tp: Team[4],", "tp: Team[4], S: Size[2048],")
    options, machine = Options(regions="inductor"), default_machine("h200")
    (sized,) = run_pipeline(parse(text), lowering(options, machine)).sites
    (fixed,) = run_pipeline(parse(GATHER + OTHER), lowering(options, machine)).sites
    assert fixed.strategy == "copies"
    assert (sized.strategy, sized.reason) == ("fused", "predicted fastest (h200)")
