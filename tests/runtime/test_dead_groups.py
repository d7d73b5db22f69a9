"""Uses of a process group that was destroyed, on 2 real processes: a typed error, at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.pool import Pool
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import interlace
from interlace.errors import BackendError, TeamError
from interlace.ir import parse
from interlace.nn.functional import all_gather_linear, linear_reduce_scatter
from interlace.optim import AdamW, LayerWise
from interlace.options import Options
from interlace.runtime import Executor
from interlace.tensor_parallel import parallelize

OPTIONS = Options(timeout_s=20)
PLAN = {
    "0": ColwiseParallel(input_layouts=Shard(0)),
    "2": RowwiseParallel(output_layouts=Shard(0)),
}
SUM = """
def total(tp: Team[2], x: f32[4], y: out[f32[4]]):
    main: all_reduce(x, y, team=tp, reduce="sum")
"""


def dead(call: Callable[[], object]) -> None:
    """The call says that the group was destroyed."""
    with pytest.raises(TeamError, match="destroyed"):
        call()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def functional() -> None:
    """Layers of one's own, bound and not: forward, backward, other sizes; and the next group."""
    group: Any = dist.new_group([0, 1])
    x, w = torch.ones(2, 3, requires_grad=True), torch.ones(4, 3)
    given = {"group": group, "options": OPTIONS}
    y = all_gather_linear(x, w, **given)
    again = all_gather_linear(x, w, **given)
    again.sum().backward()  # binds that of y
    z = linear_reduce_scatter(x, w, **given)
    dist.barrier()
    dist.destroy_process_group(group)
    dead(lambda: y.sum().backward())
    dead(lambda: z.sum().backward())
    dead(lambda: all_gather_linear(x, w, **given))
    dead(lambda: all_gather_linear(torch.ones(6, 3), w, **given))
    following: Any = dist.new_group([0, 1])
    assert torch.equal(all_gather_linear(x, w, group=following), torch.full((4, 4), 3.0))


def executors() -> None:
    """Runs, resets and new Executors; what closes and explains needs no group."""
    group: Any = dist.new_group([0, 1])
    program = parse(SUM)
    executor = Executor(program, groups={"tp": group}, options=OPTIONS).prepare()
    executor.run([torch.ones(4)])
    unprepared = Executor(program, groups={"tp": group}, options=OPTIONS)
    dist.barrier()
    dist.destroy_process_group(group)
    dead(lambda: executor.run([torch.ones(4)]))
    dead(executor.reset)
    dead(unprepared.prepare)
    dead(lambda: Executor(program, groups={"tp": group}))
    executor.close()
    interlace.reset()


def compiled(by_torch: bool) -> None:
    """Compiled modules, and styles. The axis has a name of its own: DTensor goes on with the group
    of an equal mesh that it met before in this process."""
    group: Any = dist.new_group([0, 1])
    axis = "by_torch" if by_torch else "by_us"
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(axis,))
    sharded = parallelize_module(mlp(), mesh, PLAN)
    if by_torch:
        call: Any = torch.compile(sharded, backend="interlace", options={"timeout_s": 20})
    else:
        call = interlace.compile(sharded, options=OPTIONS)
    styled, x = mlp(), torch.ones(4, 16)
    parallelize(styled, mesh, PLAN, options=OPTIONS)
    outputs = [call(x), styled(x)]
    call(x).sum().backward()
    dist.barrier()
    dist.destroy_process_group(group)
    dead(lambda: call(x))
    dead(lambda: styled(x))
    for y in outputs:
        dead(lambda y=y: y.sum().backward())
    if not by_torch:
        dead(lambda: call.prepare(torch.ones(6, 16)))
        call.close()
    else:
        assert "all_gather_matmul" in interlace.explain(call)
        torch.compiler.reset()


def optimizers() -> None:
    """New ones: one that is there has a group of its own."""
    group: Any = dist.new_group([0, 1])
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    dist.barrier()
    dist.destroy_process_group(group)
    other = mlp()
    dead(lambda: LayerWise(AdamW(other.parameters()), other, mesh))


def nccl_on_cpu() -> None:
    """A transport that no tensor of the CPU can take, also where no op would need it."""
    x, w = torch.ones(2, 3), torch.ones(4, 3)
    for strategy in ("auto", "peer", "serial"):
        options = Options(transport="nccl", strategy=strategy, timeout_s=20)
        with pytest.raises(BackendError, match="'nccl' is not there for tensors of the CPU"):
            all_gather_linear(x, w, group=dist.group.WORLD, options=options)


def all_in_turn() -> None:
    """Each makes and destroys groups of its own."""
    functional()
    executors()
    optimizers()
    nccl_on_cpu()
    compiled(by_torch=False)


@pytest.mark.timeout(110)
def test_typed(pool: Pool) -> None:
    pool(2).run(all_in_turn, timeout_s=100, replace=True)


@pytest.mark.timeout(110)
def test_typed_of_modules_that_torch_compiles(pool: Pool) -> None:
    pool(2).run(compiled, True, timeout_s=100, replace=True)
