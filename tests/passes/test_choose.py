"""`auto` takes what is predicted to be fastest, never what is predicted slower than serial."""

from __future__ import annotations

import dataclasses

import pytest
from tests.passes.samples import KINDS
from tests.passes.test_decompose import assert_overlaps

from interlace.cost import Machine, SiteKey, SiteTime, default_machine
from interlace.cost.choose import Estimate
from interlace.cost.machine import Link
from interlace.errors import PassError
from interlace.ir import Program, parse
from interlace.options import Options
from interlace.passes import lower, parse_pipeline, run_pipeline
from interlace.passes.find_sites import Analysis
from interlace.passes.strategies.choose import Chooser, site_key
from interlace.strategies import STRATEGIES

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


def candidates(program: Program, machine: Machine) -> tuple[Estimate, ...]:
    """What is looked at for the one site of a Program, serial first."""
    marked = run_pipeline(program, "find_sites")
    analysis = Analysis.of(marked)
    (found,) = analysis.found
    assert found.site is not None
    return Chooser(machine, 0).candidates(analysis.values, found.site)


def labels(program: Program, machine: Machine) -> set[str]:
    """The names of the candidates."""
    return {estimate.label for estimate in candidates(program, machine)}


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
    found = candidates(program, machine)
    took = {e.label: e.predicted_ms for e in found if e.label in ("peer/get", "peer/put")}
    assert len(took) == 2
    (site,) = lower(program, Options(strategy="peer"), machine).sites
    assert f"peer/{site.protocol}" == min(took, key=lambda label: took[label])
    for transport in ("get", "put"):
        (site,) = lower(program, Options(strategy="peer"), machine, transport=transport).sites
        assert (site.strategy, site.protocol) == ("peer", transport)
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
    other = gpu.replace(kernels=False)  # of another architecture
    assert labels(program, gpu) - labels(program, other) == {"fused"}
    (site,) = decomposed(program, other, "strategy=fused").sites
    assert (site.strategy, site.protocol) == ("peer", "put")
    assert "the GPUs have no such kernel; peer copies instead" in site.reason


def test_kernels_of_packed_rows_are_counted_on_where_triton_compiles_them() -> None:
    packed = parse("""
def f(tp: Team[2], x: f8e4m3[2048, 2176], w: f8e4m3[4096, 2176]):
    full = empty(f8e4m3[4096, 2176])
    main: all_gather(x, full, team=tp)
    t = empty(bf16[4096, 4096])
    main: call("interlace.float8_mm.out", full, w.permute(1, 0), 2, None, True, out=t)
    return t
""")
    gpu = default_machine("cuda")
    other = gpu.replace(packed_kernels=False)
    assert labels(packed, gpu) - labels(packed, other) == {"fused"}
    (site,) = decomposed(packed, other, "strategy=fused").sites
    assert (site.strategy, site.protocol) == ("peer", "put")
    assert "the GPUs have no such kernel; peer copies instead" in site.reason
    assert "fused" in labels(parse(SIZES["all_gather_matmul"]), other)


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
    everything = {e.label: 5e-3 for e in candidates(program, machine)}
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
    everything = {e.label: 5e-3 for e in candidates(program, machine)}
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
