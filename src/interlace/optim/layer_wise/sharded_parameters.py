"""How Parameters lie: what a plan of updates begins with.

mesh = shard_mesh(params, mesh["dp"], None)       # mesh["tp"]; None where there is no DTensor
needs_whole(optimizer)(param)                     # whether shards cannot be updated by themselves
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from interlace.errors import OptimizerError, UnsupportedError
from interlace.optim.adam.state import local
from interlace.optim.adamw import Adam, AdamW
from interlace.optim.bucket_runs import NAMES
from interlace.optim.layer_wise.ownership import ParameterCost

ELEMENTWISE = (
    *(Adam, AdamW, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta),
    *(torch.optim.RMSprop, torch.optim.ASGD, torch.optim.Rprop),
)
"""Optimizers whose update of an element depends on that element alone."""


def shard_mesh(
    params: Mapping[str, nn.Parameter], data: DeviceMesh, given: DeviceMesh | None
) -> DeviceMesh | None:
    """The mesh of one dimension that DTensors lie on, or `given`; raises for others."""
    replicas, found = set(_ranks(data)), given
    for name, param in params.items():
        if not isinstance(param, DTensor):
            continue
        mesh = param.device_mesh
        if len(replicas & set(mesh.mesh.flatten().tolist())) > 1:
            raise UnsupportedError(
                f"{name} is a DTensor on ranks of the data-parallel mesh: its shards have homes "
                "already. Give such parameters a LayerWise of their own (over those ranks, if "
                "fully_shard made them), and this one those that all ranks of `mesh` have alike"
            )
        if mesh.ndim != 1:
            raise UnsupportedError(
                f"{name} is a DTensor on a mesh of {mesh.ndim} dimensions: LayerWise takes those "
                "on a mesh of one, such as mesh['tp']"
            )
        placement, part = param.placements[0], local(param)
        if not placement.is_replicate() and type(placement) is not Shard:
            raise UnsupportedError(f"{name} is laid out as {placement}: give Shard or Replicate")
        if not placement.is_replicate() and not part.is_contiguous():
            raise UnsupportedError(
                f"the shard of {name} has strides {part.stride()}: make the Parameter contiguous"
            )
        if found is not None and _ranks(found) != _ranks(mesh):
            raise OptimizerError(
                f"{name} is sharded over ranks {_ranks(mesh)}, and others over {_ranks(found)}: "
                "make a LayerWise for the Parameters of each mesh, and clip the gradients of all "
                "together by interlace.optim.clip_grad_norm_"
            )
        found = mesh
    if found is not None and (found.ndim != 1 or len(replicas & set(_ranks(found))) > 1):
        raise OptimizerError(
            f"shards over ranks {_ranks(found)}: give a mesh of one dimension whose ranks are of "
            "different data-parallel groups, such as mesh['ep']"
        )
    return found


def _ranks(mesh: DeviceMesh) -> list[int]:
    return mesh.mesh.flatten().tolist()


def is_sharded(param: Tensor) -> bool:
    """Whether this rank holds a shard alone."""
    return isinstance(param, DTensor) and not all(p.is_replicate() for p in param.placements)


def needs_whole(optimizer: Optimizer) -> Callable[[Tensor], bool]:
    """Which sharded parameters are updated whole: as the optimizer's `needs_whole(parameter)` says;
    without it, all unless it is one of `ELEMENTWISE`.
    """
    says: Any = getattr(optimizer, "needs_whole", None)
    whole = says or (lambda _: type(optimizer) not in ELEMENTWISE)
    return lambda param: is_sharded(param) and bool(whole(param))


def cost_of(
    name: str, param: Tensor, cost: Callable[[Tensor], float], *, homed: bool, shards: int
) -> ParameterCost:
    """What a plan needs to know: the place of the largest shard, the cost of what one rank does."""
    numel, times = param.numel(), 1
    if isinstance(param, DTensor) and isinstance(placement := param.placements[0], Shard):
        size = param.shape[placement.dim]
        numel, times = numel // max(size, 1) * -(-size // shards), 1 if homed else shards
    kind, each = NAMES[param.dtype], float(cost(param)) / times
    return ParameterCost(name, numel, kind, param.itemsize, each, homed)


def like(param: Tensor, part: Tensor) -> Tensor:
    """A tensor of which this rank has that part, laid out as a parameter is."""
    if not isinstance(param, DTensor):
        return part
    mesh, placements = param.device_mesh, param.placements
    shape, stride = param.shape, param.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)
