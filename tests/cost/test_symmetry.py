"""Predictions by symmetry: fewer ranks are simulated, and each takes as long as before."""

from __future__ import annotations

from dataclasses import astuple

import pytest
from benchmarks.stage_text import StageText
from tests.cost.test_between_hosts import APART
from tests.passes.samples import KINDS, STRATEGIES

from interlace.commands.files import scaled
from interlace.cost import Machine, default_machine, predict, run_after_run, simulate
from interlace.cost.graph import build
from interlace.cost.machine import Link
from interlace.cost.symmetry import SimulatedRanks
from interlace.ir import Program, parse, parse_set
from interlace.options import Options
from interlace.passes import lower, run_pipeline
from interlace.strategies import StrategyName
from interlace_bench.layers.models import MODELS

SHARED = APART.replace(between=(("gloo", Link(latency_s=0.5, bandwidth=8.0, shared=True)),))
STEP = """
def step(dp: Team[{dp}], pp: Team[2], tp: Team[2], x: f32[4], y: f32[4], w: f32[8, 8], g: f32[64]):
    main: group(send(x, peer=pp.rank + 1), recv(y, peer=pp.rank - 1))
    full = empty(f32[8])
    main: all_gather(y, full, team=tp)
    main: call("aten.mm.default", w, w, out=(h := f32[8, 8]))
    main: record(made)
    grads: wait(made)
    grads: all_reduce(g, g, reduce="sum", team=dp)
    main: call("aten.mm.default", h, w, out=(z := f32[8, 8]))
    main: all_to_all(w, h, team=tp)
    return z
"""
STAGES = """
def first(dp: Team{dp[0]}, pp: Team{pp}, tp: Team{tp[0]}, x: f32[8], g: f32[64]):
    ranks({first})
    main: all_reduce(x, x, reduce="sum", team=tp)
    main: send(x, peer=1, team=pp)
    main: send(x, peer=1, team=pp)
    main: all_reduce(g, g, reduce="sum", team=dp)
def last(dp: Team{dp[1]}, pp: Team{pp}, {last_tp}x: f32[8], y: f32[8], g: f32[64]):
    ranks({last})
    main: recv(x, peer=0, team=pp)
    main: copy(x, y)
    main: recv(x, peer=0, team=pp)
    main: copy(x, y)
    main: all_reduce(g, g, reduce="sum", team=dp)
"""


def stages(world: int, last_has_team: bool = True) -> list[Program]:
    """Two stages of two ranks each, on hosts of two ranks; data parallelism up to `world` ranks."""
    copies = range(0, world, 4)
    tp = [[[n + 2 * stage, n + 2 * stage + 1] for n in copies] for stage in (0, 1)]
    text = STAGES.format(
        dp=[[[n + 2 * stage + k for n in copies] for k in (0, 1)] for stage in (0, 1)],
        pp=[[n + k, n + k + 2] for n in copies for k in (0, 1)],
        tp=tp,
        last_tp=f"tp: Team{tp[1]}, " if last_has_team else "",
        first=", ".join(str(rank) for pair in tp[0] for rank in pair),
        last=", ".join(str(rank) for pair in tp[1] for rank in pair),
    )
    return scaled([*parse_set(text)], None, 2)


def like_all(programs: list[Program], machine: Machine) -> tuple[set[int], frozenset[str]]:
    """Sees that the ranks that are simulated take as long as among all; which they are."""
    found, whole = predict(programs, machine), simulate(programs, machine)
    for rank in found.ranks:
        expected = astuple(whole.figures(rank))
        assert astuple(found.timeline.figures(rank)) == pytest.approx(expected, rel=1e-9)
    assert found.timeline.makespan_s == pytest.approx(whole.makespan_s, rel=1e-9)
    assert found.world == sum(len(program.world) for program in programs)
    return {*found.ranks}, SimulatedRanks.of(programs, fold=True).folded


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_stands_for_all_of_a_site(kind: str, name: str) -> None:
    pipeline = f"find_sites,decompose{{{STRATEGIES[name]}}},schedule,plan_memory,insert_sync"
    program = run_pipeline(KINDS[kind](4, "even", "f32", 0).program, pipeline)
    for device in ("cpu", "cuda"):
        machine = default_machine(device)
        ranks, folded = like_all([program], machine)
        assert (ranks, folded) == ({0}, {"tp"})
        (one, host), (all_of_them, same) = (
            run_after_run(program, machine, fold) for fold in (True, False)
        )
        assert one.makespan_s == pytest.approx(all_of_them.makespan_s, rel=1e-9)
        assert host == same


BESIDE = {
    "a matmul": 'call("aten.mm.default", w, w, out=(z := f32[512, 512]))',
    "a collective": 'all_reduce(w, w, reduce="sum", team=tp)',
    "another team's collective": 'all_reduce(w, w, reduce="sum", team=dp)',
    "a put": "put(w, far[tp.rank], peer=tp.rank + 1)",
    "a get": "get(far[tp.rank], peer=tp.rank + 1)",
    "a message": "group(send(w, peer=tp.rank + 1), recv(v, peer=tp.rank - 1))",
}


@pytest.mark.parametrize("team", ["Team[1]", "Team[2]", "Team[4]", "Team[2].on([0], [1])"])
@pytest.mark.parametrize("beside", [*BESIDE, "a put and a get"])
def test_messages_share_with_what_goes_beside_them(beside: str, team: str) -> None:
    """Each rank sends one and receives one, which take two lanes; to itself it is one."""
    others = [BESIDE[part] for part in BESIDE if part in beside.split(" and ")]
    lines = "".join(f"    s{i}: {line}\n" for i, line in enumerate(others))
    program = parse(f"""def p(dp: Team[2], tp: {team},
      x: f32[512, 512], y: f32[512, 512], w: f32[512, 512], v: f32[512, 512]):
    far = alloc(f32[2048, 512], symmetric=tp)
    comm: group(send(x, peer=tp.rank + 1), recv(y, peer=tp.rank - 1))
{lines}    return ()
""")
    for machine in (default_machine("cpu"), default_machine("cuda"), APART, SHARED):
        assert len(like_all([program], machine)[0]) == 1


@pytest.mark.parametrize("strategy", ["auto", "ring", "peer", "fused"])
def test_one_rank_stands_for_all_of_a_layer(strategy: StrategyName) -> None:
    text = StageText(MODELS["llama3-8b"], layers=1, tp=4, dp=2, sequence=8192).forward()
    machine = default_machine("cuda")
    program = lower(parse(text), Options(strategy=strategy), machine)
    assert len(program.ops) > 60
    assert like_all([program], machine) == ({0}, {"dp", "tp"})


def test_stages_that_share_a_team_are_not_folded_by_it() -> None:
    """Also where the team's first rank is among those of the one Program that is asked about."""
    program = parse("""def p(pp: Team[[0, 2], [1, 3]], x: f32[4]):
    ranks(0, 1)
    main: all_reduce(x, x, reduce="sum", team=pp)
""")
    assert SimulatedRanks.of([program], fold=True).folded == frozenset()
    sites = KINDS["all_gather_matmul"](4, "even", "f32", 0).program
    for rank in range(4):
        assert SimulatedRanks.of([sites.instantiate(rank)], fold=True).folded == frozenset()


@pytest.mark.parametrize("machine", [APART, SHARED], ids=["own interfaces", "shared interfaces"])
@pytest.mark.parametrize("per_host", [1, 2, 4, 8, 16])
def test_one_rank_stands_for_all_of_a_mesh_on_hosts(per_host: int, machine: Machine) -> None:
    programs = scaled([parse(STEP.format(dp=1))], 16, per_host)
    assert like_all(programs, machine) == ({0}, {"dp", "pp", "tp"})


def test_a_prediction_for_1024_ranks_simulates_as_few_as_one_for_8() -> None:
    counts: list[int] = []
    for world in (8, 1024):
        programs = scaled([parse(STEP.format(dp=2))], world, 4)
        symmetry = SimulatedRanks.of(programs, fold=True)
        assert symmetry.ranks == {0: world}
        counts.append(len(build(programs, default_machine("cuda"), symmetry).tasks))
    assert counts[0] == counts[1] < 20
    assert predict(programs, default_machine("cuda")).world == 1024


@pytest.mark.parametrize("machine", [APART, SHARED], ids=["own interfaces", "shared interfaces"])
@pytest.mark.parametrize("world", [4, 12])
def test_one_rank_stands_for_each_stage_of_a_pipeline(world: int, machine: Machine) -> None:
    assert like_all(stages(world), machine) == ({0, 2}, {"dp", "tp"})
    found = like_all(stages(world, last_has_team=False), machine)
    assert found == ({0, 1, 2, 3}, {"dp"}), "what makes 2 and 3 alike?"


TOLD_APART = {
    "a number as peer": ("group(send(x, peer=1, team=tp), recv(y, peer=0, team=tp))", ""),
    "an uneven table": ("all_gather(x[0:rows[tp.rank]], z, team=tp, splits=rows)", ""),
    "some of its messages stay inside a host": (
        "group(send(x, peer=tp.rank + 1), recv(y, peer=tp.rank - 1))",
        ".on([0, 1], [2, 3])",
    ),
}


@pytest.mark.parametrize("line", TOLD_APART.values(), ids=TOLD_APART)
def test_ranks_that_the_text_tells_apart_are_all_simulated(line: tuple[str, str]) -> None:
    op, hosts = line
    program = parse(
        f"def p(dp: Team[2], tp: Team[4]{hosts}, x: f32[4], y: f32[4], z: f32[10]):\n"
        f"    rows = table(tp, 4, 3, 2, 1)\n    main: {op}\n"
    )
    if "peer=1" in op:  # ranks 2 and 3 have no part in it, nor does the text say so
        assert SimulatedRanks.of([program], fold=True).ranks == {0: 2, 1: 2, 2: 2, 3: 2}
    else:
        assert like_all([program], APART) == ({0, 1, 2, 3}, {"dp"})


def test_many_teams_of_which_none_can_be_folded() -> None:
    """What is among all ranks tells them apart, and each of twenty teams would take some away."""
    teams = ", ".join(f"t{i}: Team[[0, 1], [2, 3]]" for i in range(20))
    program = parse(
        f"def p(tp: Team[4], {teams}, x: f32[4]):\n    main: send(x, peer=1, team=tp)\n"
    )
    assert SimulatedRanks.of([program], fold=True).ranks == dict.fromkeys(range(4), 1)
