"""Programs for classes of sizes on real processes: each run is, bit for bit, that of the Program
made for that very size."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from tests.passes.samples import KINDS, STRATEGIES
from tests.passes.test_sizes import LOWER, serial
from tests.runtime.programs import world_group
from tests.support.pool import Pool

from interlace.errors import ExecutorError, InterlaceError
from interlace.ir import parse
from interlace.ir.program import exchanged_sizes
from interlace.ir.sizes import numbers
from interlace.options import Options
from interlace.passes import run_pipeline
from interlace.runtime import Executor
from interlace.runtime.values import whole


def run_sizes(
    kind: str, strategy: str, ranks: int, uneven: bool, sizes: list[int], seed: int
) -> list[str]:
    """On one rank: what is wrong, and how many Executors served the sizes."""
    pipeline, options = LOWER.format(STRATEGIES[strategy]), Options(timeout_s=20)
    groups = {"tp": world_group()}
    classes: list[Executor] = []
    wrong: list[str] = []
    g = torch.Generator().manual_seed(seed + dist.get_rank())
    for size in sizes:
        given = serial(kind, ranks, size, uneven)
        executor = next((e for e in classes if e.sizes.holds({"S": size})), None)
        if executor is None:
            program = run_pipeline(given, pipeline)
            executor = Executor(program, groups=groups, options=options).prepare()
            classes.append(executor)
        alone = run_pipeline(given.at({"S": size}), pipeline)
        twin = Executor(alone, groups=groups, options=options).prepare()
        shapes = [numbers(whole(b).sizes) for b in alone.instantiate(dist.get_rank()).params]
        for _ in range(2):  # the slots are used in turn
            inputs = [torch.randn(shape, generator=g) for shape in shapes]
            (found,), (expected,) = executor.run(inputs), twin.run(inputs)
            if not torch.equal(found, expected):
                wrong.append(f"S = {size}: {found} instead of {expected}")
        dist.barrier()
        twin.close()
    if kind == "all_gather_matmul" and len(sizes) > 100:
        assert len(classes) < len(sizes) / 2  # reductions of odd widths have more: rests modulo 64
    for executor in classes:
        executor.close()
    return wrong


@pytest.mark.parametrize(
    ("strategy", "count"),
    [
        ("drawn", 5),
        *(pytest.param(strategy, 200, marks=pytest.mark.slow) for strategy in STRATEGIES),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(600)
def test_a_run_is_that_of_the_program_for_its_size(
    pool: Pool, kind: str, strategy: str, count: int, seed: int
) -> None:
    rng = random.Random(seed)
    if strategy not in STRATEGIES:
        strategy = rng.choice([*STRATEGIES])
    ranks, uneven = rng.choice([2, 3, 4]), rng.random() < 0.5
    least = 1 if uneven else 0
    few = [least, 1, *(rng.randrange(2, 40) for _ in range(3))]
    sizes = [*few, *(rng.randrange(2, 300) for _ in range(count - 5))]
    facts = kind, strategy, ranks, uneven, sizes, seed
    for wrong in pool(ranks).run(run_sizes, *facts, timeout_s=580):
        assert not wrong, (strategy, ranks, uneven, sizes)


def run_wrong(size: int, other: int) -> list[str]:
    """What a rank is told where ranks run different sizes, and where a size is not of the class."""
    program = run_pipeline(
        serial("all_gather_matmul", 2, size, False), LOWER.format("strategy=peer")
    )
    options = Options(timeout_s=5)
    executor = Executor(program, groups={"tp": world_group()}, options=options).prepare()
    told: list[str] = []
    try:
        executor.run([torch.ones(4 * size, 8), torch.ones(8, 5)])
    except ExecutorError as error:
        told.append(str(error))
    try:
        mine = size if dist.get_rank() == 0 else other
        executor.run([torch.ones(mine, 8), torch.ones(8, 5)])
    except InterlaceError as error:
        told.append(str(error))
    executor.reset()
    (found,) = executor.run([torch.ones(size, 8), torch.ones(8, 5)])
    assert torch.equal(found, torch.full((2 * size, 5), 8.0))
    executor.close()
    return told


def test_other_sizes_are_errors_that_say_so(pool: Pool) -> None:
    told = pool(2).run(run_wrong, 16, 20)
    for outside, _ in told:
        assert "is for sizes where" in outside
        assert "S = 64" in outside
    assert any("S = 16" in differ and "S = 20" in differ for _, differ in told), told


UNEVEN = {
    "rows": """
def f(tp: Team[2], S: Size[6], T: Size[3], s: f32[S], t: f32[T], x: f32[rows[tp.rank], 4]):
    rows = table(tp, S, T)
    main: call("aten.mm.default", x.permute(1, 0), x, out=(a := f32[4, 4]))
    y = empty(f32[4, 4])
    main: all_reduce(a, y, team=tp, reduce="sum")
    return y
""",
    "exchange": """
def f(tp: Team[2], S: Size[6], T: Size[3], s: f32[S], t: f32[T], x: f32[S + T, 3]):
    rows = table(tp, S, T)
    mine = table(tp, 2 * S, 2 * T)
    y = empty(f32[mine[tp.rank], 3])
    main: all_to_all(x, y, team=tp, splits=rows)
    return y
""",
}
"""Tables of sizes: each rank has its own views."""


def run_uneven(name: str) -> tuple[str, str, list[str]]:
    """The class that was proved, the one that this rank runs, and what is wrong."""
    options = Options(timeout_s=10)
    groups, rank, wrong = {"tp": world_group()}, dist.get_rank(), list[str]()
    program = parse(UNEVEN[name])
    executor = Executor(program, groups=groups, options=options).prepare()
    assert executor.agreement is not None
    for sizes in ((6, 3), (5, 3), (7, 2), (6, 3)):
        values = dict(zip("ST", sizes, strict=True))
        twin = Executor(program.at(values), groups=groups, options=options).prepare()
        rows, width = (sizes[rank], 4) if name == "rows" else (sum(sizes), 3)
        g = torch.Generator().manual_seed(rank)
        inputs = [*map(torch.empty, sizes), torch.randn(rows, width, generator=g)]
        if not torch.equal(executor.run(inputs)[0], twin.run(inputs)[0]):
            wrong.append(str(values))
        dist.barrier()
        twin.close()
    proved = executor.agreement.report.sizes.bucket("ST")
    executor.close()
    return str(proved), str(executor.sizes), wrong


@pytest.mark.parametrize("name", UNEVEN)
def test_ranks_with_views_of_their_own_run_the_class_that_was_proved(pool: Pool, name: str) -> None:
    told = pool(2).run(run_uneven, name, timeout_s=60)
    assert len({told[0][0], *(own for _, own, _ in told)}) == 1
    assert [wrong for *_, wrong in told] == [[], []]


TOKENS = """
def f(tp: Team[2], S: Size[64], x: f32[S, 8]):
    main: call("aten.mul.Tensor", x, 2.0, out=(y := f32[S, 8]))
    main: call("aten.sum.dim_IntList", y, (0,), out=(mine := f32[8]))
    full = empty(f32[16])
    main: all_gather(mine, full, team=tp)
    return full
"""


def run_tokens() -> list[bool]:
    """On one rank: whether each run is right, where ranks hold different numbers of tokens."""
    program = run_pipeline(parse(TOKENS), LOWER.format("strategy=serial"))
    groups, right = {"tp": world_group()}, list[bool]()
    with Executor(program, groups=groups, options=Options(timeout_s=20)).prepare() as executor:
        for sizes in ((64, 64), (60, 60), (64, 35), (3, 1000)):
            g = torch.Generator().manual_seed(sum(sizes))
            parts = [torch.randn(size, 8, generator=g) for size in sizes]
            (full,) = executor.run([parts[dist.get_rank()]])
            right.append(torch.equal(full, torch.cat([(2 * part).sum(0) for part in parts])))
    return right


def test_sizes_that_no_exchange_depends_on_may_differ(pool: Pool) -> None:
    assert pool(2).run(run_tokens, timeout_s=60) == [[True] * 4] * 2


APART = """
def f(tp: Team[[0, 1, 2]], S: Size[16], x: f32[S], c: f32[4], y: out[f32[S]], d: out[f32[4]]):
    ranks({rank})
    main: {op}
    main: all_reduce(c, d, reduce="sum", team=tp)
"""
OPS = ("send(x, peer=1, team=tp)\n    main: copy(x, y)", "recv(y, peer=0, team=tp)", "copy(x, y)")


def run_apart() -> list[float]:
    """On one rank: results where two ranks alone exchange a size that all three know."""
    rank = dist.get_rank()
    program, results = parse(APART.format(rank=rank, op=OPS[rank])), list[float]()
    options = Options(timeout_s=20)
    with Executor(program, groups={"tp": world_group()}, options=options).prepare() as executor:
        for size in (16, 20, 16):
            y, d = torch.zeros(size), torch.zeros(4)
            executor.run([torch.full((size,), 1.0 + rank), torch.ones(4)], [y, d])
            results += [y[0].item(), d[0].item()]
    return results


def test_sizes_that_any_rank_exchanges_are_the_same_on_all(pool: Pool) -> None:
    assert pool(3).run(run_apart, timeout_s=60) == [[1.0, 3.0] * 3] * 2 + [[3.0, 3.0] * 3]


def test_a_place_in_a_peers_memory_is_exchanged() -> None:
    program = parse("""
def f(tp: Team[2], S: Size[10], T: Size[3], x: f32[S], z: f32[T], y: out[f32[4]]):
    s = alloc(f32[256], symmetric=tp)
    main: put(x[0:4], s[S:S + 4], peer=tp.rank + 1)
    main: notify(here, to=tp.others, value=1)
    main: expect(here, tp.others, value=1)
    main: copy(s[S:S + 4], y)
    main: free(s)
""")
    assert exchanged_sizes(program) == {"S"}
