"""The strategy of a team of several ranks on each of several hosts."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from tests.passes.samples import DTYPES, KINDS, SHAPES, Sample
from tests.passes.spellings import sample as spelled
from tests.passes.spellings import spellings
from tests.passes.test_decompose import assert_overlaps
from tests.support.interpreter import run_ranks

from interlace.cost import SiteKey, SiteTime, default_machine
from interlace.cost.machine import Link
from interlace.ir import Get, Group, Program, Put, parse
from interlace.options import Options
from interlace.passes import lower
from interlace.passes.pipeline import run_pipeline
from interlace.passes.strategies.candidates import plain_program

HOSTS = {
    "2-hosts": ((0, 1), (2, 3)),
    "3-hosts": ((0, 1), (2, 3), (4, 5)),
    "of-three": ((0, 1, 2), (3, 4, 5)),
}


def on(program: Program, hosts: tuple[tuple[int, ...], ...]) -> Program:
    (team,) = program.teams
    return program.replace(teams=(dataclasses.replace(team, hosts=hosts),))


GRID = [
    pytest.param(hosts, shape, dtype, marks=[] if quick else pytest.mark.slow)
    for hosts in HOSTS
    for shape in SHAPES
    for dtype in DTYPES
    for quick in [hosts == "2-hosts" or (shape, dtype) == ("uneven", "f32")]
]


@pytest.mark.parametrize(("hosts", "shape", "dtype"), GRID)
@pytest.mark.parametrize("kind", KINDS)
def test_grid(kind: str, hosts: str, shape: str, dtype: str, seed: int) -> None:
    ranks = sum(map(len, HOSTS[hosts]))
    sample = KINDS[kind](ranks, shape, dtype, seed)
    sample = dataclasses.replace(sample, program=on(sample.program, HOSTS[hosts]))
    made = run_pipeline(sample.program, "find_sites,decompose{strategy=hierarchical}")
    assert made.sites[0].strategy == ("serial" if shape == "empty" else "hierarchical")
    assert_overlaps(made, sample, seed)


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("kind", KINDS)
def test_in_pieces(kind: str, hosts: str, seed: int) -> None:
    """Each of a rank's three rows travels by itself."""
    ranks = sum(map(len, HOSTS[hosts]))
    sample = KINDS[kind](ranks, "even", "f32", seed)
    sample = dataclasses.replace(sample, program=on(sample.program, HOSTS[hosts]))
    how = f"find_sites,decompose{{strategy=hierarchical,chunks={3 * ranks}}}"
    made = run_pipeline(sample.program, how)
    assert made.sites[0].chunks == 3 * ranks
    messages = 3 * (len(HOSTS[hosts]) - 1) * (2 if kind == "matmul_all_reduce" else 1)
    assert sum(isinstance(op, Group) for op in made.ops) == messages
    assert_overlaps(made, sample, seed)


@pytest.mark.parametrize("name", spellings(4))
def test_spellings_in_pieces(name: str, seed: int) -> None:
    """Of what is cut unevenly, padded or in stacks a rank's rows travel as one."""
    _, sample = spelled(name, 4, seed)
    sample = dataclasses.replace(sample, program=on(sample.program, HOSTS["2-hosts"]))
    made = run_pipeline(sample.program, "find_sites,decompose{strategy=hierarchical,chunks=12}")
    assert made.sites[0].strategy == "hierarchical"
    assert made.sites[0].chunks in (4, 12)
    assert_overlaps(made, sample, seed)


@pytest.mark.parametrize("before", [True, False], ids=["dispatch", "combine"])
@pytest.mark.parametrize("hosts", HOSTS)
def test_all_to_all(before: bool, hosts: str, seed: int) -> None:
    ranks = sum(map(len, HOSTS[hosts]))
    rows, g = 2 * ranks, torch.Generator().manual_seed(seed)
    moved, multiplied = ("x", "full") if before else ("y", "x")
    move = f"    out = empty(f32[{rows}, {4 if before else 6}])\n"
    move += f"    main: all_to_all({moved}, out, team=tp)\n"
    multiplied = "out" if before else "x"
    matmul = f'    main: call("aten.mm.default", {multiplied}, w, out=(y := f32[{rows}, 6]))\n'
    body = f"{move}{matmul}    return y\n" if before else f"{matmul}{move}    return out\n"
    head = f"def f(tp: Team[{ranks}], x: f32[{rows}, 4], w: f32[4, 6]):\n"
    xs = [torch.randint(-3, 4, (rows, 4), generator=g).float() for _ in range(ranks)]
    w = torch.randint(-3, 4, (4, 6), generator=g).float()
    wanted = [torch.cat([x.chunk(ranks)[me] for x in xs]) @ w for me in range(ranks)]
    program = on(parse(head + body), HOSTS[hosts])
    sample = Sample(program, [[x, w] for x in xs], [[y] for y in wanted])
    made = run_pipeline(program, "find_sites,decompose{strategy=hierarchical}")
    assert made.sites[0].strategy == "hierarchical"
    assert_overlaps(made, sample, seed)


GATHER = """
def f(tp: Team[4]{}, x: f32[4, 8], w: f32[8, 6]):
    full = empty(f32[16, 8])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.default", full, w, out=(y := f32[16, 6]))
    return y
"""


@pytest.mark.parametrize(
    ("hosts", "why"),
    [
        ("", "is not known to span hosts"),
        (".on([0, 1, 2], [3])", "have different numbers of its ranks"),
        (".on([0], [1], [2], [3])", "each host has one rank of team tp: shift does the same"),
        (".on([0, 2], [1, 3])", "do not go host by host"),
    ],
)
def test_who_has_no_two_levels_stays_serial(hosts: str, why: str) -> None:
    made = lower(parse(GATHER.format(hosts)), Options(strategy="hierarchical"))
    assert made.sites[0].strategy == "serial"
    assert re.search(f"hierarchical cannot serve this site: .*{why}", made.remarks[0].text)


def test_a_shard_crosses_to_each_other_host_once() -> None:
    """Flat, each of a host's two ranks gets both shards of the other host; so, one."""
    text = GATHER.format(".on([0, 1], [2, 3])")
    sent: dict[str, int] = {}
    for strategy in ("shift", "hierarchical"):
        made = lower(parse(text), Options(strategy=strategy))
        sent[strategy] = sum(
            made.team(op.ops[0].team).apart(
                made.where(rank).members[op.ops[0].team].index,
                made.where(rank).index(op.ops[0].peer),
            )
            for rank in range(4)
            for op in made.ops
            if isinstance(op, Group)
        )
        assert any(isinstance(op, Get | Put) for op in made.ops) == (strategy == "hierarchical")
    assert sent == {"shift": 8, "hierarchical": 4}


@pytest.mark.parametrize("pieces", [1, 2])
def test_sums_go_host_by_host(pieces: int, seed: int) -> None:
    """1e8 + 1 is 1e8 in fp32, so the order shows: the two ranks of a host first."""
    text = """
def f(tp: Team[4].on([0, 1], [2, 3]), x: f32[8, 1], w: f32[1, 1]):
    main: call("aten.mm.default", x, w, out=(y := f32[8, 1]))
    out = empty(f32[2, 1])
    main: reduce_scatter(y, out, reduce="sum", team=tp)
    return out
"""
    parts = [1e8, 1.0, -1e8, 5.0]
    inputs = [[torch.full((8, 1), part), torch.ones(1, 1)] for part in parts]
    made = lower(parse(text), Options(strategy="hierarchical", chunks=4 * pieces))
    first, second = (torch.tensor(parts).split(2)[i].sum() for i in (0, 1))
    for (out,) in run_ranks(made, inputs, seed=seed):
        assert isinstance(out, torch.Tensor)
        assert out.tolist() == [[(first + second).item()]] * 2


def test_what_was_measured_within_a_host_is_not_taken_for_hosts() -> None:
    key = SiteKey(kind="all_gather_matmul", dtype="f32", m=2048, k=1024, n=1024, world=4)
    took = {"serial": 0.012, "shift": 0.009, "ring": 0.01}
    machine = default_machine("cpu").replace(
        between=(("gloo", Link(latency_s=2e-4, bandwidth=5e7, shared=True)),),
        sites=tuple(
            SiteTime(site=key, strategy=name, seconds=seconds, predicted_s=seconds)
            for name, seconds in took.items()
        ),
    )
    program = plain_program(key)
    within, spread = (
        lower(each, Options(), machine).sites[0]
        for each in (program, on(program, ((0, 1), (2, 3))))
    )
    assert (within.strategy, spread.strategy) == ("shift", "hierarchical")
    assert spread.predicted_ms is not None
    assert spread.predicted_ms > 50
