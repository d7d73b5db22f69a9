"""Which strategy a site gets: by predictions, and by what was measured."""

from __future__ import annotations

import dataclasses

import pytest
from tests.passes.plain_sites import plain_program
from tests.passes.samples import KINDS
from tests.passes.test_decompose import assert_overlaps

from interlace.cost import Machine, SiteKey, SiteTime, default_machine, run_issue_seconds
from interlace.cost.choose import Estimate
from interlace.cost.machine import Link
from interlace.cost.op_times import PACKED_CALLS
from interlace.errors import PassError
from interlace.ir import Program, parse, validate
from interlace.options import Options
from interlace.passes import candidates, lower, parse_pipeline, run_pipeline
from interlace.passes.find_sites import Analysis
from interlace.passes.strategies.choose import Chooser, site_key
from interlace.strategies import STRATEGIES
from interlace_bench.calibration.sites import with_sites

SIZES = {
    "all_gather_matmul": """def f(tp: Team[4], x: bf16[2048, 8192], w: bf16[8192, 14336]):
    full = empty(bf16[8192, 8192])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.default", full, w, out=(y := bf16[8192, 14336]))
    return y
""",
    "matmul_reduce_scatter": """def f(tp: Team[4], x: bf16[8192, 7168], w: bf16[7168, 8192]):
    main: call("aten.mm.default", x, w, out=(y := bf16[8192, 8192]))
    out = empty(bf16[2048, 8192])
    main: reduce_scatter(y, out, reduce="sum", team=tp)
    return out
""",
    "matmul_all_reduce": """def f(tp: Team[4], x: bf16[8192, 7168], w: bf16[7168, 8192]):
    main: call("aten.mm.default", x, w, out=(y := bf16[8192, 8192]))
    out = empty(bf16[8192, 8192])
    main: all_reduce(y, out, reduce="sum", team=tp)
    return out
""",
}


def decomposed(program: Program, machine: Machine, options: str = "") -> Program:
    return run_pipeline(program, parse_pipeline(f"find_sites,decompose{{{options}}}", machine))


def estimates(program: Program, machine: Machine) -> tuple[Estimate, ...]:
    """What is looked at for the one site of a Program, serial first."""
    marked = run_pipeline(program, "find_sites")
    analysis = Analysis.of(marked)
    (found,) = analysis.found
    assert found.site is not None
    return Chooser(machine, 0).candidates(analysis.values, found.site)


def labels(program: Program, machine: Machine) -> set[str]:
    """The names of the candidates."""
    return {estimate.label for estimate in estimates(program, machine)}


def latent(machine: Machine) -> Machine:
    """The same machine, on which every message takes a second to start."""
    links = tuple(
        (name, Link(latency_s=1.0, bandwidth=link.bandwidth)) for name, link in machine.links
    )
    return machine.replace(links=links)


@pytest.mark.parametrize("kind", SIZES)
def test_large_sites_are_overlapped_on_a_gpu(kind: str) -> None:
    (site,) = decomposed(parse(SIZES[kind]), default_machine("cuda")).sites
    assert site.strategy != "serial"
    assert site.serial_ms is not None
    assert site.predicted_ms is not None
    assert 0.5 * site.serial_ms < site.predicted_ms < 0.97 * site.serial_ms
    assert "predicted fastest" in site.reason


@pytest.mark.parametrize("kind", SIZES)
def test_serial_stays_where_more_messages_cost_more_than_they_hide(kind: str) -> None:
    program = parse(SIZES[kind])
    made = decomposed(program, latent(default_machine("cuda")))
    (site,) = made.sites
    assert site.strategy == "serial"
    assert site.serial_ms == site.predicted_ms
    assert "gain less than" in site.reason
    assert made.ops == run_pipeline(program, "find_sites").ops


@pytest.mark.parametrize("kind", KINDS)
def test_peer_copies_get_or_put_as_is_faster(kind: str) -> None:
    program, machine = parse(SIZES[kind]), default_machine("cuda")
    found = estimates(program, machine)
    took = {e.label: e.predicted_ms for e in found if e.label in ("peer/get", "peer/put")}
    assert len(took) == 2
    (site,) = lower(program, Options(strategy="peer"), machine).sites
    assert f"peer/{site.protocol}" == min(took, key=lambda label: took[label])
    for protocol in ("get", "put"):
        (site,) = lower(program, Options(strategy="peer"), machine, protocol=protocol).sites
        assert (site.strategy, site.protocol) == ("peer", protocol)
    cpu = default_machine("cpu")
    assert "peer/put" not in labels(program, cpu)
    assert lower(program, Options(strategy="peer"), cpu).sites[0].protocol == "get"


def test_candidates_are_those_that_the_machine_can_run() -> None:
    program = parse(SIZES["matmul_reduce_scatter"])
    slow = {"ring"}
    gpu = default_machine("cuda")
    found = labels(program, gpu)
    assert {"serial", "pipeline x2", "pipeline x4"} <= found
    assert not slow & found
    assert {name for name, _ in STRATEGIES} >= slow
    links = tuple((name, link) for name, link in gpu.links if name != "peer")
    far = labels(program, gpu.replace(links=links))
    assert slow <= far
    assert not {"peer/get", "peer/put", "exchange", "fused"} & far
    assert not {"exchange", "fused"} & labels(program, default_machine("cpu"))


PACKED = """
def f(tp: Team[2], x: f8e4m3[2048, 2176], w: f8e4m3[4096, 2176]):
    full = empty(f8e4m3[4096, 2176])
    main: all_gather(x, full, team=tp)
    t = empty(bf16[4096, 4096])
    main: call("interlace.float8_mm.out", full, w.permute(1, 0), 2, None, True, out=t)
    return t
"""


@pytest.mark.parametrize("packed", [False, True])
def test_kernels_are_counted_on_where_the_gpus_run_them(packed: bool) -> None:
    """An architecture may have none, and Triton compile none of packed rows."""
    plain, gpu = parse(SIZES["matmul_reduce_scatter"]), default_machine("cuda")
    poorer = gpu.replace(packed_kernels=False) if packed else gpu.replace(kernels=False)
    program, other = (parse(PACKED), plain) if packed else (plain, parse(PACKED))
    assert labels(program, gpu) - labels(program, poorer) == {"fused"}
    (site,) = decomposed(program, poorer, "strategy=fused").sites
    assert (site.strategy, site.protocol) == ("peer", "put")
    assert "the GPUs have no such kernel; peer copies instead" in site.reason
    assert "fused" in labels(other, poorer)


@pytest.mark.parametrize("kind", KINDS)
def test_a_slow_link_between_hosts_is_fed_in_finer_slices(kind: str) -> None:
    """Which are not tried where all ranks are on one host."""
    text = SIZES[kind].replace("Team[4]", "Team[4].on([0], [1], [2], [3])")
    link = Link(latency_s=2e-4, bandwidth=3e6, shared=True)
    machine = default_machine("cpu").replace(between=(("gloo", link),))
    assert "pipeline x8" in labels(parse(text), machine)
    assert "pipeline x8" not in labels(parse(SIZES[kind]), machine)
    (site,) = decomposed(parse(text), machine, "strategy=auto").sites
    assert (site.strategy, site.chunks) == ("pipeline", 8)


@pytest.mark.parametrize("dtype", ["bf16", "f64", "c64"])
def test_the_exchange_kernel_reduces_real_numbers(dtype: str) -> None:
    text = SIZES["matmul_reduce_scatter"].replace("bf16", dtype).replace("8192, 7168", "64, 7168")
    text = text.replace("8192, 8192", "64, 8192").replace("2048, 8192", "16, 8192")
    found = labels(parse(text), default_machine("cuda"))
    assert ("exchange" in found) == (dtype != "c64")


@pytest.mark.parametrize("shape", ["even", "uneven"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_choice_is_right(kind: str, shape: str, seed: int) -> None:
    sample = KINDS[kind](3, shape, "f32", seed)
    machine = default_machine("cuda").replace(
        links=tuple((n, Link(latency_s=0.0, bandwidth=1e6)) for n in ("nccl", "peer"))
    )
    machine = machine.replace(launch_s=0.0, issue_s=0.0, gemm_flops=(("other", 1e6),), event_s=0.0)
    machine = machine.replace(gemm_tile=(1, 1), gemm_tiles=(), units=1, issue=())
    whole = decomposed(sample.program, machine)
    assert whole.sites[0].strategy != "serial"
    assert_overlaps(whole, sample, seed)
    with pytest.raises(PassError, match="rank 1 alone: passes decide for all ranks"):
        decomposed(sample.program.instantiate(1), machine)


# what was measured


def table(program: Program, seconds: dict[str, float]) -> tuple[SiteTime, ...]:
    """Measured times of a Program's site."""
    key = key_of(program)
    return tuple(SiteTime(site=key, strategy=s, seconds=took) for s, took in seconds.items())


def key_of(program: Program) -> SiteKey:
    """The one site of a Program."""
    marked = run_pipeline(program, "find_sites")
    analysis = Analysis.of(marked)
    (found,) = analysis.found
    assert found.site is not None
    return site_key(analysis.values, found.site)


@pytest.mark.parametrize("kind", SIZES)
def test_measured_times_decide_where_there_are_any(kind: str) -> None:
    program, machine = parse(SIZES[kind]), default_machine("cuda")
    everything = {e.label: 5e-3 for e in estimates(program, machine)}
    sites = table(program, everything | {"serial": 3e-3, "pipeline x2": 2.9e-3})
    (site,) = decomposed(program, machine.replace(sites=sites)).sites
    assert (site.strategy, site.chunks) == ("pipeline", 2)
    assert (site.serial_ms, site.predicted_ms) == (3.0, 2.9)
    assert site.reason == "measured fastest (h200)"
    sites = table(program, everything | {"serial": 3e-3, "pipeline x2": 2.98e-3})
    (site,) = decomposed(program, machine.replace(sites=sites)).sites
    assert site.strategy == "serial"
    assert "pipeline x2, the fastest, was measured to gain less than 3%" in site.reason


def test_a_graph_has_times_of_its_own() -> None:
    program, machine = parse(SIZES["all_gather_matmul"]), default_machine("cuda")
    everything = {e.label: 5e-3 for e in estimates(program, machine)}
    sites = table(program, everything | {"serial": 1e-3})
    eager = machine.replace(sites=sites)
    assert decomposed(program, eager).sites[0].strategy == "serial"
    assert decomposed(program, eager.replayed).sites[0].strategy != "serial"
    captured = tuple(
        dataclasses.replace(t, site=dataclasses.replace(t.site, graph=True)) for t in sites
    )
    (site,) = decomposed(program, machine.replayed.replace(sites=captured)).sites
    assert site.strategy == "serial"


def test_sites_are_alike_only_where_their_matmuls_are() -> None:
    """A matmul with a scale is none for the kernels, which take mm and addmm as they are."""
    text = """def f(tp: Team[4], x: bf16[8192, 2048], w: bf16[2048, 8192], b: bf16[8192]):
    main: call("aten.addmm.default", b, x, w, out=(y := bf16[8192, 8192]))
    out = empty(bf16[2048, 8192])
    main: reduce_scatter(y, out, reduce="sum", team=tp)
    main: call("aten.addmm.default", b, x, w, alpha=0.5, out=(z := bf16[8192, 8192]))
    end = empty(bf16[2048, 8192])
    main: reduce_scatter(z, end, reduce="sum", team=tp)
    return out, end
"""
    one, other = decomposed(parse(text), default_machine("cuda")).sites
    assert one.strategy == "fused"
    assert other.strategy != "fused"


# candidates of a Program's sites, and tables of measured sites with what is predicted for them


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
