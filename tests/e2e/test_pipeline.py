"""A pipeline of two stages written by hand: a set of Programs across two meshes, checked and run.

The first mesh scatters the rows of a batch that its rank 0 holds, multiplies, and sends each
half-batch on while it computes the next; the second receives, multiplies and sums over its ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.runtime.programs import world_group
from tests.support.pool import Pool

from interlace.errors import TeamError
from interlace.ir import Program, parse, parse_set
from interlace.options import Options
from interlace.runtime import Executor
from interlace.verify import check

STAGES = """
def embed(low: Team[[0, 1], [2, 3]], pipe: Team[[0, 2], [1, 3]], x: f32[8, 3], w: f32[3, 4]):
    ranks(0, 1)
    mine = alloc(f32[4, 3])
    h = alloc(f32[4, 4])
    main: scatter(x, mine, root=0, team=low, backend="{0}")
    main: call("aten.mm.out", mine[0:2], w, out=h[0:2])
    main: record(first)
    comm: wait(first)
    comm: send(h[0:2], peer=1, team=pipe, backend="{0}")
    main: call("aten.mm.out", mine[2:4], w, out=h[2:4])
    main: record(second)
    comm: wait(second)
    comm: send(h[2:4], peer=1, team=pipe, backend="{0}")


def project(high: Team[[0, 1], [2, 3]], pipe: Team[[0, 2], [1, 3]], v: f32[4, 5]):
    ranks(2, 3)
    h = alloc(f32[4, 4])
    y = alloc(f32[4, 5])
    total = empty(f32[4, 5])
    comm: recv(h[0:2], peer=0, team=pipe, backend="{0}")
    comm: record(first)
    comm: recv(h[2:4], peer=0, team=pipe, backend="{0}")
    comm: record(second)
    main: wait(first)
    main: call("aten.mm.out", h[0:2], v, out=y[0:2])
    main: wait(second)
    main: call("aten.mm.out", h[2:4], v, out=y[2:4])
    main: all_reduce(y, total, reduce="sum", team=high, backend="{0}")
    return total
"""


def numbers(seed: int, *sizes: int) -> torch.Tensor:
    """Small integers: sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, sizes, generator=generator).float()


def stages(backend: str) -> tuple[Program, ...]:
    return parse_set(STAGES.format(backend))


def run_stage(backend: str, seed: int, runs: int) -> list[torch.Tensor]:
    """This rank's stage, some times over."""
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    program = stages(backend)[rank // 2]
    groups: dict[str, Any] = {
        ("low", "high")[rank // 2]: rows[rank // 2],
        "pipe": columns[rank % 2],
    }
    executor = Executor(program, groups=groups, options=Options(timeout_s=15.0))
    results: list[torch.Tensor] = []
    with executor.prepare():
        for run in range(runs):
            batch, weight = numbers(seed + run, 8, 3), numbers(seed, 3, 4)
            inputs = [batch, weight] if rank < 2 else [numbers(seed, 4, 5)]
            results += executor.run(inputs)
    return results


@pytest.mark.parametrize("backend", ["gloo", "peer"])
def test_two_stages_on_two_meshes(pool: Pool, backend: str, seed: int) -> None:
    assert check(stages(backend)).sound
    results = pool(4).run(run_stage, backend, seed, 3)
    assert results[:2] == [[], []]
    for run in range(3):
        batch = numbers(seed + run, 8, 3) @ numbers(seed, 3, 4) @ numbers(seed, 4, 5)
        wanted = batch[:4] + batch[4:]
        for rank in (2, 3):
            assert torch.equal(results[rank][run], wanted), f"rank {rank}, run {run}"


TWO_TEAMS = """
def f(a: Team[[0, 1]], b: Team[[0, 1]], x: f32[2, 3]):
    y = empty(f32[4, 3])
    main: all_gather(x, y, team=a)
    z = empty(f32[4, 3])
    main: all_gather(x, z, team=b)
    return y, z
"""


def one_group_for_two_teams() -> str:
    """The error of a Program whose teams were given one group."""
    groups = {"a": world_group(), "b": world_group()}
    with pytest.raises(TeamError) as error:
        Executor(parse(TWO_TEAMS), groups=groups, options=Options(timeout_s=20)).prepare()
    return str(error.value)


def test_teams_have_groups_of_their_own(pool: Pool) -> None:
    for message in pool(2).run(one_group_for_two_teams):
        assert "a and b" in message
        assert "new_group" in message
