"""`auto` takes what is predicted to be fastest, never what is predicted slower than serial."""

from __future__ import annotations

import pytest
from tests.passes.samples import KINDS
from tests.passes.test_decompose import AFTER, assert_equal, assert_overlaps

from interlace.cost import Link, Machine, default_machine
from interlace.ir import Program, parse
from interlace.passes import parse_pipeline, run_pipeline

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


@pytest.mark.parametrize("protocol", ["get", "put"])
def test_peer_copies_use_the_protocol_asked_for(protocol: str) -> None:
    made = decomposed(
        parse(SIZES["all_gather_matmul"]), default_machine("cuda"), f"protocol={protocol}"
    )
    assert (made.sites[0].strategy, made.sites[0].protocol) == ("peer", protocol)


@pytest.mark.parametrize("shape", ["even", "uneven"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_choice_is_right_and_the_same_for_each_ranks_own_program(
    kind: str, shape: str, seed: int
) -> None:
    sample = KINDS[kind](3, shape, "f32", seed)
    machine = default_machine("cuda").replace(
        links=tuple((n, Link(latency_s=0.0, bandwidth=1e6)) for n in ("nccl", "peer"))
    )
    machine = machine.replace(launch_s=0.0, issue_s=0.0, gemm_flops=(("other", 1e6),), event_s=0.0)
    machine = machine.replace(gemm_tile=(1, 1), units=1)
    whole = decomposed(sample.program, machine)
    alone = [decomposed(sample.program.instantiate(rank), machine) for rank in range(3)]
    assert whole.sites[0].strategy != "serial"
    for program in alone:
        chosen = [(site.strategy, site.protocol, site.chunks) for site in program.sites]
        assert chosen == [(s.strategy, s.protocol, s.chunks) for s in whole.sites]
    assert_overlaps(whole, sample, seed)
    assert_equal(alone, sample, None)
    assert_equal([run_pipeline(program, AFTER) for program in alone], sample, seed)


def test_two_dimensional_meshes_are_predicted_on_the_sites_team() -> None:
    text = SIZES["all_gather_matmul"].replace("tp: Team[4]", "dp: Team[2], tp: Team[4]")
    one = decomposed(parse(SIZES["all_gather_matmul"]), default_machine("cuda"))
    two = decomposed(parse(text), default_machine("cuda"))
    assert two.sites == one.sites
