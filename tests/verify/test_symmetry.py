"""A fold's verdict is that of all ranks: on random programs, the schedules that the passes make and
what is left of them without an op, at worlds of 2 to 8, on meshes, and for pipelines.

`check(..., fold=False)` visits every rank: the slow twin.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.step import StepSettings, step_of
from tests.fuzzing.draw import Draw
from tests.fuzzing.sets import mutilate
from tests.passes.samples import KINDS, STRATEGIES

from interlace.commands.files import on_mesh
from interlace.errors import InterlaceError, ProgramError, TeamError
from interlace.ir import Collective, Expect, Program, Team, View, Wait, parse, parse_set
from interlace.ir.validate import validate
from interlace.passes import run_pipeline
from interlace.verify import Report, check
from interlace.verify.graph import HappensBefore
from interlace.verify.regions import Regions
from interlace.verify.source import lower
from interlace.verify.turns import Turns

GOLDEN = Path(__file__).resolve().parents[1] / "golden"


def compared(programs: Sequence[Program]) -> Report:
    """The report, once it is seen that all ranks, visited, have the same verdict."""
    report, whole = check(programs), check(programs, fold=False)
    text = "\n".join(map(str, programs))
    assert report.sound == whole.sound, f"{text}\n{report}\n{whole}"
    assert report.kinds() == whole.kinds(), text
    assert (report.num_ranks, report.num_ops) == (whole.num_ranks, whole.num_ops)
    if report.symmetry is not None:
        assert report.sound
        assert not whole.findings, f"a fold left out\n{text}\n{whole}"
    return report


LAUNCHED = """
def f(tp: Team[8], x: i16[2, 3], y: out[i16[16, 3]]):
    main: copy(x, y[0])
    main: copy(x, y[1])
    main: copy(x, y[2])
    main: copy(x, y[3])
    main: copy(x, y[4])
    main: copy(x, y[5])
    main: copy(x, y[6])
    main: copy(x, y[7])
    main: record(e0)
    comm: wait(e0)
    comm: recv(x[0:0], peer=tp.rank - 1)
    side: wait(e0)
    side: send(y[2:4][0:0], peer=tp.rank + 1)
    b = alloc(i16[16, 3], symmetric=tp, stream="comm")
    comm: reduce_scatter(y, b[1], reduce="sum", team=tp)
    comm: notify(ready, to=tp.rank - 1)
    comm: expect(ready, tp.rank + 1)
    comm: put(x, b[1], peer=tp.rank + 1)
    comm: notify(there, to=tp.rank + 1)
    comm: expect(there, tp.rank - 1)
    comm: free(b)
"""


def test_a_fold_leaves_out_no_remark_on_launches() -> None:
    """Its sweep adds a node to the graph that launches are looked for in."""
    assert [found.kind for found in compared([parse(LAUNCHED)]).findings] == ["launch-order"]


def can_fold(programs: Sequence[Program]) -> bool:
    return Turns.of([lower(p, Regions(), number=k) for k, p in enumerate(programs)]) is not None


def beside(program: Program, copies: int, rng: random.Random) -> Program:
    """A random Program on a mesh of two axes, with a few collectives along the second."""
    (tp, *others), size = program.teams, len(program.world)
    moved = [
        replace(
            team,
            groups=tuple(
                tuple(copy * size + rank for rank in group)
                for copy in range(copies)
                for group in team.groups or ()
            ),
        )
        for team in others
    ]
    ops = list(program.ops)
    for _ in range(rng.randint(0, 2)):
        x = View("x")
        op = Collective(kind="all_reduce", src=x, dst=x, team="dp", reduce="sum", stream="main")
        ops.insert(rng.randint(0, len(ops)), op)
    return program.replace(teams=(Team("dp", copies), tp, *moved), ops=tuple(ops))


def by_another_team(program: Program, rng: random.Random) -> Program:
    """The Program with one place where it goes by the rank in another team."""
    parts = re.split(r"\b\w+(?=\.rank\b)", str(program))
    names = re.findall(r"\b\w+(?=\.rank\b)", str(program))
    if not names:
        return program
    names[rng.randrange(len(names))] = rng.choice(program.teams).name
    text = "".join(map("".join, zip(parts, [*names, ""], strict=True)))
    return validate(parse(text))


def random_programs(seed: int, wanted: int, most: int) -> Iterator[list[Program]]:
    """Random SPMD programs that can be folded: until as many were sound."""
    rng, sound = random.Random(seed), 0
    for _ in range(most):
        if sound == wanted:
            return
        try:
            program = Draw(rng, rng.choice((2, 3, 4, 5, 8))).program(rng.randint(2, 5))
            if rng.random() < 0.2:
                program = mutilate(program, rng)
            if rng.random() < 0.4:
                program = beside(program, rng.choice((2, 3, 4)), rng)
            if rng.random() < 0.3:
                program = by_another_team(program, rng)
            if not can_fold([program]):
                continue
            sound += check(program).symmetry is not None
        except InterlaceError:
            continue
        yield [program]


@pytest.mark.timeout(300)
def test_random_programs(seed: int) -> None:
    met = [compared(programs).symmetry is not None for programs in random_programs(seed, 8, 300)]
    assert 3 < sum(met) < len(met)


def mutants(program: Program, rng: random.Random, count: int) -> Iterator[Program]:
    """The Program without one of its ops."""
    places = [i for i, op in enumerate(program.ops) if not op.declares()]
    for i in rng.sample(places, min(count, len(places))):
        yield program.replace(ops=(*program.ops[:i], *program.ops[i + 1 :]))


@pytest.mark.parametrize("kind", KINDS)
def test_schedules_and_their_mutants(kind: str, seed: int) -> None:
    rng, unsound = random.Random(seed), 0
    for name in rng.sample([*STRATEGIES], 4):
        world = rng.randint(2, 8)
        pipeline = f"find_sites,decompose{{{STRATEGIES[name]}}},schedule,plan_memory,insert_sync"
        program = run_pipeline(KINDS[kind](world, "even", "f32", 0, 8).program, pipeline)
        assert compared([program]).num_visited == 1, f"{name}\n{program}"
        for mutant in mutants(program, rng, 3):
            unsound += not compared([mutant]).sound
    assert unsound


def goldens() -> list[Path]:
    return [path for path in sorted(GOLDEN.rglob("*.ilc")) if path.parent.name != "passes"]


def test_golden_files_on_other_worlds(seed: int) -> None:
    rng, met = random.Random(seed), 0
    for path in goldens():
        programs = list(parse_set(path.read_text(), file=path.name))
        axes = [team for team in programs[0].teams if team.groups is None]
        if len(programs) == 1 and len(axes) == 1:
            try:
                programs = on_mesh(programs, world=None, mesh={axes[0].name: rng.randint(2, 8)})
            except InterlaceError:
                pass  # its views do not fit
        try:
            met += compared(programs).symmetry is not None
            compared([*programs[:-1], *mutants(programs[-1], rng, 1)])
        except InterlaceError:
            continue
    assert met


AT_SOME_WORLDS = {
    "what is two behind is two ahead of four alone": (
        "main: copy(x, g[tp.rank])",
        "main: notify(there, to=tp.rank + 2)",
        "main: expect(there, tp.rank + 2)",
        "main: get(g[tp.rank + 2], peer=tp.rank + 2)",
        "main: barrier(team=tp)",
    ),
    "three behind is itself of three": (
        "main: copy(x, g[tp.rank])",
        "main: get(g[tp.rank + 3], y, peer=tp.rank + 3)",
        "main: barrier(team=tp)",
    ),
    "four rows on is the same row of two or four": (
        "main: barrier(team=tp)",
        "main: record(a)",
        "side: wait(a)",
        "main: put(x, g[tp.rank], peer=tp.rank + 1)",
        "side: put(x, g[tp.rank + 4], peer=tp.rank + 1)",
        "side: record(b)",
        "main: wait(b)",
        "main: barrier(team=tp)",
    ),
}


@pytest.mark.parametrize("lines", AT_SOME_WORLDS.values(), ids=AT_SOME_WORLDS)
def test_faults_that_come_with_some_worlds(lines: Sequence[str]) -> None:
    verdicts: set[bool] = set()
    for world in range(2, 9):
        body = "".join(f"    {line}\n" for line in lines)
        program = parse(
            f"def f(tp: Team[{world}], x: f32[2], y: f32[2]):\n"
            f"    g = alloc(f32[{2 * world}], symmetric=tp)\n{body}    main: free(g)\n"
        )
        verdicts.add(compared([program]).sound)
    assert verdicts == {True, False}


ALONG_TWO = """
def f(dp: Team[{dp}], tp: Team[4], x: f32[2], y: f32[2], z: f32[{dp}, 2], w: f32[8]):
    full = alloc(f32[8], symmetric=tp)
    main: copy(x, full[tp.rank])
    main: notify(ready, to=tp.others)
    main: expect(ready, tp.rank + 1)
    main: get(full[tp.rank + 1], y, peer=tp.rank + 1)
    main: record(a)
    dps: wait(a)
    dps: all_reduce(y, y, reduce="sum", team=dp)
    dps: all_gather(y, z, team=dp)
    dps: record(b)
    main: wait(b)
    main: copy(z[dp.rank].view(2), x)
    main: barrier(team=tp)
    main: free(full)
"""


def along_two(dp: int, leave_out: str = "") -> list[Program]:
    lines = ALONG_TWO.format(dp=dp).splitlines()
    text = "\n".join(line for line in lines if not leave_out or leave_out not in line)
    return [parse(text.replace("tp.others", "tp.rank - 1"))]


def test_one_rank_of_a_mesh_stands_for_all() -> None:
    report = compared(along_two(3))
    assert report.symmetry is not None
    assert (report.symmetry.visited, report.symmetry.folded) == ((0,), ("dp", "tp"))
    for line in ("wait(a)", "wait(b)", "record(b)", "notify", "expect", "free(full)"):
        assert not compared(along_two(3, line)).sound


def test_1024_ranks_are_no_more_nodes_than_8(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    real = HappensBefore.add
    monkeypatch.setattr(HappensBefore, "add", lambda graph: made.append(1) or real(graph))
    counts: list[int] = []
    for dp in (2, 256):
        made.clear()
        report = check(along_two(dp))
        assert (report.num_ranks, report.num_visited) == (4 * dp, 1)
        counts.append(len(made))
    ring = (
        "def f(tp: Team[{0}], x: f32[2], y: f32[2]):\n"
        "    main: group(send(x, peer=tp.rank + 1), recv(y, peer=tp.rank - 1))\n"
    )
    for ranks in (8, 1024):
        made.clear()
        assert check(parse(ring.format(ranks))).num_visited == 1
        counts.append(len(made))
    assert counts[0] == counts[1] > counts[2] == counts[3]


TOLD_APART = {
    "a root": "main: broadcast(x, x, root=1, team=tp)",
    "a number as a peer": "main: barrier(team=tp)\n    main: get(g[0], y, peer=0)",
    "an uneven table": "main: copy(x, g[0:2])\n    main: all_gather(g[0:r[tp.rank]], w, splits=r)",
    "a fixed row beside rows by rank": "main: copy(x, g[1])\n    main: copy(g[tp.rank], y)",
}


@pytest.mark.parametrize("line", TOLD_APART.values(), ids=TOLD_APART)
def test_ranks_that_are_told_apart_are_all_visited(line: str) -> None:
    table = "    r = table(tp, 2, 1, 1)\n" if "splits" in line else ""
    program = parse(
        f"def f(tp: Team[3], x: f32[2], y: f32[2], w: f32[4]):\n{table}"
        "    g = alloc(f32[6], symmetric=tp)\n    main: copy(x, g[0])\n"
        f"    main: copy(x, g[1])\n    main: copy(x, g[2])\n    main: barrier(team=tp)\n"
        f"    {line}\n    main: barrier(team=tp)\n    main: free(g)\n"
    )
    report = compared([program.replace(teams=(Team("tp", 3),))])
    assert (report.num_visited, report.symmetry) == (3, None)
    beside = compared([program.replace(teams=(Team("dp", 4), Team("tp", 3)))])
    assert beside.symmetry is not None or not report.sound
    if beside.symmetry is not None:
        assert (beside.symmetry.visited, beside.symmetry.folded) == ((0, 1, 2), ("dp",))


BY_ANOTHER_TEAM = {
    "a peer": """
        g = alloc(f32[2], symmetric=tp)
        main: put(x, g, peer=dp.rank, team=tp)
        main: barrier(team=tp)
        main: copy(g, y[0:2])
        main: free(g)
    """,
    "an entry of a table": """
        r = table(tp, 1, 2)
        g = alloc(f32[2])
        main: copy(x.chunk(dp.rank, 2), g.chunk(0, 2))
        main: copy(g[0:r[dp.rank]], y[0:r[dp.rank]])
        main: free(g)
    """,
    "the size of a buffer": """
        r = table(tp, 2, 4)
        g = alloc(f32[r[dp.rank]])
        main: copy(x, g.chunk(0, 1)[0:2])
        main: copy(g.chunk(0, 1), y[0:r[dp.rank]])
        main: free(g)
    """,
}


@pytest.mark.parametrize("body", BY_ANOTHER_TEAM.values(), ids=BY_ANOTHER_TEAM)
def test_what_the_rank_in_another_team_says(body: str) -> None:
    head = "def f(dp: Team[2], tp: Team[2], x: f32[2], y: f32[4]):\n"
    lines = "\n".join(f"    {line.strip()}" for line in body.strip().splitlines())
    assert not compared([parse(f"{head}{lines}\n")]).sound


def test_a_root_that_is_the_rank_in_another_team() -> None:
    """One turn of dp takes the root of tp elsewhere, so neither is folded."""
    text = (
        "def f(dp: Team[2], tp: Team[2], x: f32[2]):\n    main: broadcast(x, x, root={}, team=tp)\n"
    )
    report = compared([parse(text.format("dp.rank"))])
    assert (report.num_visited, report.symmetry) == (4, None)
    assert compared([parse(text.format("0"))]).num_visited == 2


@pytest.mark.parametrize(
    "line",
    [
        "main: put(x, g, peer=dp.rank, team=tp)",
        "main: get(g, x, peer=2, team=tp)",
        "main: get(g, x, peer=-1, team=tp)",
        "main: copy(x[0:r[dp.rank]], g[0:r[dp.rank]])",
    ],
)
def test_ranks_that_there_are_not(line: str) -> None:
    """The last of dp's three ranks has none in tp: an error, though the visited one has."""
    text = (
        "def f(dp: Team[3], tp: Team[2], x: f32[2]):\n    r = table(tp, 1, 1)\n"
        f"    g = alloc(f32[2], symmetric=tp)\n    main: copy(x, g)\n    {line}\n"
        "    main: free(g)\n"
    )
    for fold in (False, True):
        with pytest.raises((ProgramError, TeamError)):
            check(parse(text), fold=fold)


CHUNKS_OF_TWO_TEAMS = """
def first(tp: Team[2], pp: Team[[0, 2], [1, 3]], x: f32[2], y: out[f32[2]]):
    ranks(0, 1)
    g = alloc(f32[4])
    main: copy(x, g[pp.rank])
    main: copy(g[tp.rank], y)
    main: free(g)
    return ()

def second(tp: Team[2], pp: Team[[0, 2], [1, 3]], x: f32[2], y: out[f32[2]]):
    ranks(2, 3)
    g = alloc(f32[4])
    main: copy(x, g[pp.rank + 1])
    main: copy(g[tp.rank], y)
    main: free(g)
    return ()
"""


def test_chunks_by_a_team_that_no_turn_moves() -> None:
    """A stage's place in the pipeline says which half it writes: a fixed chunk in each Program."""
    assert not compared([*parse_set(CHUNKS_OF_TWO_TEAMS)]).sound
    alike = CHUNKS_OF_TWO_TEAMS.replace("copy(g[tp.rank]", "copy(g[pp.rank]")
    assert compared([*parse_set(alike.replace("pp.rank + 1", "pp.rank"))]).symmetry is not None


STAGES = """
def first(tp: Team[2], pp: Team[[0, 2], [1, 3]], x: f32[4]):
    ranks(0, 1)
    {0}
    return ()

def second(tp: Team[2], pp: Team[[0, 2], [1, 3]], x: f32[4]):
    ranks(2, 3)
    {1}
    return ()
"""


def stages(first: str, second: str) -> list[Program]:
    return [*parse_set(STAGES.format(*(body.replace("; ", "\n    ") for body in (first, second))))]


def test_roots_of_which_the_second_is_another() -> None:
    """Collectives that are alike but for the root are compared one by one."""
    twice = "main: broadcast(x, x, root={}, team=pp); main: broadcast(x, x, root={}, team=pp)"
    assert compared(stages(twice.format(0, 0), twice.format(0, 1))).kinds() == {"mismatch"}
    assert compared(stages(twice.format(0, 1), twice.format(0, 1))).symmetry is not None


def test_a_slot_that_one_stage_cuts_by_a_table() -> None:
    slot = "g = alloc(f32[4], symmetric=pp); main: copy(x{0}, g{0}); main: barrier(team=pp)"
    even, named = (f"{slot}; main: free(g)".format(f".chunk(tp.rank, {n})") for n in ("2", "r"))
    report = compared(stages(even, f"r = table(tp, 2, 2); {named}"))
    assert report.sound


def test_one_element_as_another_type() -> None:
    first = "main: copy(x.chunk(tp.rank, 2), g.chunk(tp.rank, 2))"
    cast = "main: copy(x.select(0, 0).cast(i32), g.select(0, 0).cast(i32))"
    body = f"g = alloc(f32[4]); {first}; {cast}; main: free(g)"
    assert compared(stages(body, body)).sound


def test_a_pipeline_is_visited_by_stage() -> None:
    text = (GOLDEN / "two_stages.ilc").read_text()
    report = compared([*parse_set(text)])
    assert report.symmetry is not None
    assert report.symmetry.visited == (0, 2)
    lines = text.splitlines()
    without = [*parse_set("\n".join(line for line in lines if "record(second)" not in line))]
    assert not compared(without).sound


def test_the_step_of_a_model(seed: int) -> None:
    settings = StepSettings(model="tiny", tp=2, pp=2, dp=3, microbatches=2, sequence=32)
    programs = step_of(settings)
    report = compared(programs)
    assert report.symmetry is not None
    assert (report.num_ranks, report.symmetry.visited) == (12, (0, 6))
    stage, rng = programs[1], random.Random(seed)
    i = rng.choice([i for i, op in enumerate(stage.ops) if isinstance(op, Wait | Expect)])
    compared([programs[0], stage.replace(ops=(*stage.ops[:i], *stage.ops[i + 1 :]))])


def test_the_report_says_what_was_visited() -> None:
    report = check(along_two(256))
    assert str(report).startswith("sound (1,024 ranks by symmetry of dp and tp: 1 visited, ")
    told = json.loads(json.dumps(report.to_json()))
    assert (told["num_ranks"], told["num_visited"]) == (1024, 1)
    assert told["symmetry"] == {"visited": [0], "folded": ["dp", "tp"]}
    whole = check(along_two(2), fold=False)
    assert str(whole).startswith("sound (8 ranks, ")
    assert (whole.to_json()["num_visited"], whole.to_json()["symmetry"]) == (8, None)
