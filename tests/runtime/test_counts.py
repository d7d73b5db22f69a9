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
BACKENDS = ["gloo", "peer"]
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
