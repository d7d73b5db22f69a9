"""How Parameters lie, and into which parts they can be cut: what a plan of updates begins with.

mesh = shard_mesh(params, mesh["dp"], None)       # mesh["tp"]; None where there is no DTensor
needs_whole(optimizer)(param)                     # whether shards cannot be updated by themselves
parts = parts_of(params, 8, rows_apart(optimizer), shard=0, shards=1, width=1, has_slices=None)

Note [Parts]
    A Parameter that is a stack of matrices (experts, heads), or whose elements are updated by
    themselves, can be cut along dimension 0 without a change of bits. Its parts are equal, so that
    each owner may have the next ones in order, and lie in a bucket of their own, by owner. Their
    number does not depend on the number of ranks: a checkpoint has the state of each part by its
    rows, and goes to other owners.

Note [Together]
    A matrix that is one can be cut into slices of its rows as well, if the optimizer can sum over
    the ranks that have them. These are a sub-group of ranks that follow one another, so that
    sub-groups have no rank in common; their order of sums is not that of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from interlace.optim.layer_wise.ownership import ALIGNMENT, ParameterCost

ELEMENTWISE = (
    *(Adam, AdamW, torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.NAdam),
    *(torch.optim.RAdam, torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta),
    *(torch.optim.RMSprop, torch.optim.ASGD, torch.optim.Rprop),
)
"""Optimizers whose update of an element depends on that element alone."""
LEAST = 4096
"""Elements that a part has at least."""


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
                "already. Give such parameters an optimizer of their own (a ShardedLayerWise for "
                "those of fully_shard), and LayerWise those that all ranks of `mesh` have alike"
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
    return isinstance(param, DTensor) and not param.placements[0].is_replicate()


def needs_whole(optimizer: Optimizer) -> Callable[[Tensor], bool]:
    """Which sharded parameters are updated whole: as the optimizer's `needs_whole(parameter)` says;
    without it, all unless it is one of `ELEMENTWISE`.
    """
    says: Any = getattr(optimizer, "needs_whole", None)
    whole = says or (lambda _: type(optimizer) not in ELEMENTWISE)
    return lambda param: is_sharded(param) and bool(whole(param))


def rows_apart(optimizer: Optimizer) -> Callable[[Tensor], int]:
    """In how many equal runs of rows a parameter can be cut that are updated by themselves: as the
    optimizer's `rows_apart(parameter)` says; without it, single rows of `ELEMENTWISE`, else none.
    """
    says: Any = getattr(optimizer, "rows_apart", None)
    whole, elementwise = needs_whole(optimizer), type(optimizer) in ELEMENTWISE
    rows = says or (lambda param: param.shape[0] if elementwise else 1)
    return lambda param: 1 if whole(param) else rows(param)


def cost_of(
    part: ParameterPart, cost: Callable[[Tensor], float], *, homed: bool, shards: int
) -> ParameterCost:
    """What a plan needs to know: the place of the largest shard, the cost of what one rank does."""
    param, times = part.param, 1
    numel = param.numel()
    if isinstance(param, DTensor) and isinstance(placement := param.placements[0], Shard):
        size = param.shape[placement.dim]
        numel, times = numel // max(size, 1) * -(-size // shards), 1 if homed else shards
    return ParameterCost(
        part.name,
        numel // part.count,
        NAMES[param.dtype],
        param.itemsize,
        float(cost(param)) / times / part.count,
        homed,
        part.count,
        part.together,
    )


def like(param: Tensor, part: Tensor) -> Tensor:
    """A tensor of which this rank has that part, laid out as a parameter is."""
    if not isinstance(param, DTensor):
        return part
    mesh, placements = param.device_mesh, param.placements
    shape, stride = param.shape, param.stride()
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """A Parameter, or some rows of what this rank has of it."""

    name: str
    param: nn.Parameter
    rows: tuple[int, int] | None = None
    count: int = 1
    """How many such parts there are."""
    together: bool = False
    """Whether they are updated in one computation of as many ranks."""

    def of(self, tensor: Tensor) -> Tensor:
        """This part of what is shaped as the Parameter here."""
        return tensor if self.rows is None else tensor[slice(*self.rows)]


def parts_of(
    params: Mapping[str, nn.Parameter],
    most: int,
    rows_apart: Callable[[Tensor], int],
    *,
    shard: int,
    shards: int,
    width: int,
    has_slices: Callable[[Tensor], bool] | None,
) -> list[ParameterPart]:
    """Parts of all Parameters, each cut into at most so many where `rows_apart` tells that equal
    runs of rows are updated by themselves. What is sharded otherwise than by rows is left whole.
    Those that have slices are cut into `width` of them, updated together.
    """
    found: list[ParameterPart] = []
    for name, param in params.items():
        here, first = local(param), 0
        units = rows_apart(param) if most > 1 and param.ndim > 1 else 1
        if isinstance(param, DTensor) and is_sharded(param):
            by_rows = param.placements[0].is_shard(0) and units % shards == 0
            units = units // shards if by_rows else 1
            first = shard * here.shape[0]
        count = next(n for n in range(min(most, units), 0, -1) if n == 1 or _fits(here, units, n))
        together = (
            count == 1 < width
            and has_slices is not None
            and has_slices(param)
            and _fits(here, here.shape[0], width)
        )
        if together:
            count = width
        if count == 1:
            found.append(ParameterPart(name, param))
            continue
        rows = here.shape[0] // count
        for start in range(0, here.shape[0], rows):
            at = f"{name}[{first + start}:{first + start + rows}]"
            found.append(ParameterPart(at, param, (start, start + rows), count, together))
    return found


def _fits(here: Tensor, units: int, count: int) -> bool:
    each = here.numel() // count
    whole = units % count == 0 and here.shape[0] % count == 0
    return whole and here.is_contiguous() and each >= LEAST and each % ALIGNMENT == 0
