"""All-to-alls whose counts are data: rows by the counts of a tensor, other ones in each run."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from tests.runtime.programs import executor_of
from tests.support.interpreter import run_ranks
from tests.support.pool import Pool

from interlace.errors import InterlaceError
from interlace.ir import Program, parse
from interlace.options import Backend
from interlace.verify import check

ROWS, ROOM, DIM = 8, 12, 3
BACKENDS: list[Backend] = ["gloo", "peer"]
Routes = list[list[int]]


def program(world: int, exchange: bool = True) -> Program:
    """Rows go to their ranks and back; the counts of what comes are exchanged, or given."""
    came = "main: all_to_all(sent, came)" if exchange else "main: copy(told, came)"
    counts = f"i64[{world}]"
    return parse(
        f"""
def there_and_back(tp: Team[{world}], x: f32[{ROWS}, {DIM}], sent: {counts}, told: {counts}):
    came = alloc({counts})
    rows = empty(f32[{ROOM}, {DIM}])
    twice = alloc(f32[{ROOM}, {DIM}])
    back = empty(f32[{ROWS}, {DIM}])
    {came}
    main: record(counted)
    comm: wait(counted)
    comm: all_to_all(x, rows, sent=sent, received=came)
    comm: record(there)
    main: wait(there)
    main: call("aten.mul.out", rows, 2.0, out=twice)
    main: record(done)
    comm: wait(done)
    comm: all_to_all(twice, back, sent=came, received=sent)
    comm: record(end)
    main: wait(end)
    return rows, back
"""
    )


def drawn(rng: random.Random, world: int) -> Routes:
    """Rows from each rank to each, at most `ROWS` of a rank and `ROOM` to it."""
    left, room = [ROWS] * world, [ROOM] * world
    found = [[0] * world for _ in range(world)]
    for _ in range(rng.randint(0, ROWS * world)):
        one, other = rng.randrange(world), rng.randrange(world)
        if left[one] and room[other]:
            found[one][other] += 1
            left[one], room[other] = left[one] - 1, room[other] - 1
    return found


def inputs(routes: Routes, rank: int, seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed + rank)
    x, told = torch.randn(ROWS, DIM), [row[rank] for row in routes]
    return [x, torch.tensor(routes[rank]), torch.tensor(told)]


def runs(backend: Backend, steps: list[Routes], seed: int) -> list[tuple[torch.Tensor, ...]]:
    rank, text = dist.get_rank(), program(dist.get_world_size())
    with executor_of(text, transport=backend, timeout_s=10.0).prepare() as executor:
        return [executor.run(inputs(routes, rank, seed + n)) for n, routes in enumerate(steps)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [2, 3])
def test_rows_go_by_counts(pool: Pool, world: int, backend: Backend, seed: int) -> None:
    rng, text = random.Random(seed), program(world)
    everything = [[ROWS if one == other else 0 for other in range(world)] for one in range(world)]
    steps = [[[0] * world] * world, everything, *(drawn(rng, world) for _ in range(8))]
    assert check([text]).kinds() == set()
    results = pool(world).run(runs, backend, steps, seed)
    for number, routes in enumerate(steps):
        given = [inputs(routes, rank, seed + number) for rank in range(world)]
        expected = run_ranks([text], given, in_order=True)
        for rank, wanted in enumerate(expected):
            assert all(map(torch.equal, results[rank][number], wanted))
        for rank in range(world):
            rows, back = results[rank][number]
            x, came = given[rank][0], sum(row[rank] for row in routes)
            assert torch.equal(rows[came:], torch.zeros(ROOM - came, DIM))
            assert torch.equal(back[: sum(routes[rank])], 2 * x[: sum(routes[rank])])


def wrong(backend: Backend, told: list[list[int]], sent: list[list[int]]) -> tuple[str, bool]:
    """What a run with counts that do not fit raises, and whether others run after a reset."""
    rank, world = dist.get_rank(), dist.get_world_size()
    executor = executor_of(program(world, exchange=False), transport=backend, timeout_s=5.0)
    with executor.prepare():
        x, counts = torch.ones(ROWS, DIM), [torch.tensor(sent[rank]), torch.tensor(told[rank])]
        try:
            executor.run([x, *counts])
            message = ""
        except InterlaceError as error:
            message = f"{type(error).__name__}: {error}"
        executor.reset()
        fits = torch.tensor([1] * world)
        return message, torch.equal(executor.run([x, fits, fits])[1][:world], 2 * x[:world])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("told", "sent", "words"),
    [
        ([[2, 2], [2, 2]], [[2, 3], [2, 2]], "expects [2, 2] rows, and its peers send [3, 2]"),
        ([[7, 6], [1, 2]], [[7, 1], [6, 2]], "receives [7, 6] rows, 13 in all"),
        ([[2, 2], [9, 2]], [[2, 9], [2, 2]], "sends [2, 9] rows, 11 in all"),
        ([[2, -1], [2, 2]], [[2, 2], [2, 2]], "receives [2, -1] rows"),
    ],
    ids=["unlike", "received", "sent", "negative"],
)
def test_counts_that_do_not_fit_are_an_error_on_all_ranks(
    pool: Pool, told: Routes, sent: Routes, words: str, backend: Backend
) -> None:
    results = pool(2).run(wrong, backend, told, sent)
    assert any(words in message for message, _ in results), results
    assert all(message and well for message, well in results), results


ONE = """
def there(tp: Team[2], x: f32[8, 3], sent: i64[2], told: i64[2]):
    rows = empty(f32[12, 3])
    main: all_to_all(x, rows, sent=sent, received=told)
    return rows
"""


def wrong_in_one(backend: Backend) -> str:
    """What an exchange alone says where rank 0 would send more rows than it has."""
    sent, told = [[2, 9], [2, 2]][dist.get_rank()], [[2, 2], [9, 2]][dist.get_rank()]
    with executor_of(parse(ONE), transport=backend, timeout_s=10.0).prepare() as executor:
        try:
            executor.run([torch.ones(8, 3), torch.tensor(sent), torch.tensor(told)])
            message = "no error"
        except InterlaceError as error:
            message = f"{type(error).__name__}: {error}"
        executor.reset()
    return message


@pytest.mark.parametrize("backend", BACKENDS)
def test_nobody_gets_rows_of_an_exchange_that_another_refuses(pool: Pool, backend: Backend) -> None:
    first, second = pool(2).run(wrong_in_one, backend)
    assert first.startswith("InputError: rank 0 of an all-to-all sends [2, 9] rows")
    assert second.startswith("PeerError: rank 0 of team tp stopped: rank 0 of an all-to-all sends")


PARTS = """
def parts(tp: Team[2], x: f32[8, 3], a: i64[4], came: i64[4]):
    rows = empty(f32[8, 3])
    more = empty(f32[8, 3])
    main: all_to_all(x, rows, sent=a[tp.rank], received=came[tp.rank])
    main: all_to_all(x, more, sent=a[0], received=came[0])
    return rows, more
"""


def by_parts() -> bool:
    """Returns True if both exchanges bring what their own counts say."""
    me = dist.get_rank()
    rows = [torch.arange(24.0).view(8, 3) + 100 * rank for rank in range(2)]
    counts = torch.ones(4, dtype=torch.int64)
    with executor_of(parse(PARTS), transport="gloo", timeout_s=10.0).prepare() as executor:
        results = executor.run([rows[me], counts, counts])
    wanted = torch.stack([rows[0][me], rows[1][me]])
    return all(torch.equal(each[:2], wanted) for each in results if isinstance(each, torch.Tensor))


def test_counts_that_are_the_same_on_one_rank_alone_are_told_anew(pool: Pool) -> None:
    assert pool(2).run(by_parts) == [True, True]
