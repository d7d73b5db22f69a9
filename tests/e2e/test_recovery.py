"""After a failure `interlace.reset()`, called by every rank, mends what was compiled before."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.runtime.programs import world_group
from tests.support.captured import capture
from tests.support.pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import interlace
from interlace.errors import InterlaceError, TeamError
from interlace.ir import parse
from interlace.options import Options
from interlace.runtime import Executor

TWO_TEAMS = """
def f(a: Team[[0, 1]], b: Team[[0, 1]], x: f32[2, 3]):
    y = empty(f32[4, 3])
    main: all_gather(x, y, team=a)
    z = empty(f32[4, 3])
    main: all_gather(x, z, team=b)
    return y, z
"""


def fail_and_recover() -> tuple[str, bool, bool]:
    """One rank fails in a compiled model; (the error heard, still refused, right after reset)."""
    torch.compiler.reset()
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    plan = {
        "0": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(output_layouts=Shard(0)),
    }
    parallelize_module(mlp, mesh, plan)
    options = {"strategy": "peer", "timeout_s": 20.0}
    compiled = torch.compile(mlp, backend="interlace", options=options)
    x = torch.randn(4, 8)
    with capture() as captured, torch.no_grad():
        expected = compiled(x).clone()
    (bound,) = captured.bound

    def heard() -> str:
        try:
            with torch.no_grad():
                compiled(x)
        except InterlaceError as error:
            return str(error)
        return ""

    broken = {"once": rank == 1}

    def fault(*_: object) -> None:
        if broken.pop("once", False):
            raise RuntimeError("planted")

    bound.executor.before_op = fault
    interlace.reset(20.0)  # the next run binds it
    dist.barrier()  # or a slow rank hears of it in the run that must still go well
    first = heard() or heard()  # the others may hear of it one run later
    refused = bool(heard())
    interlace.reset(20.0)
    with torch.no_grad():
        again: Tensor = compiled(x)
    return first, refused, torch.equal(again, expected)


def test_reset_mends_compiled_models(pool: Pool) -> None:
    for rank, (heard, refused, right) in enumerate(pool(2).run(fail_and_recover, replace=True)):
        assert "planted" in heard, f"rank {rank}: {heard}"
        assert refused
        assert right


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
