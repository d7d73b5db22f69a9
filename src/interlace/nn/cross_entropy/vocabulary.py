"""A vocabulary that is cut over the ranks of a group: who has which classes, and the exchange.

Ranks may have different numbers of classes, or none. Without `shard_sizes` each call gathers the
ranks' numbers on the device, which hides behind the reading of the logits: no rank relies on what
another might have forgotten, and the host never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm.teams import group_of_mesh
from interlace.errors import InputError, UnsupportedError
from interlace.nn.cross_entropy.steps import Shards
from interlace.nn.groups import is_dtensor

Waiting = Callable[[], object]
"""Makes the current stream wait for a communication (on the CPU: the host)."""


def done() -> None:
    """Nothing to wait for."""


def find_shards(
    group: dist.ProcessGroup | None,
    local: int,
    sizes: Sequence[int] | None,
    device: torch.device,
) -> tuple[Shards, Waiting]:
    """The layout of the classes, and a wait that comes before its `sizes` are read."""
    if group is None:
        if sizes is not None and list(sizes) != [local]:
            raise InputError(f"shard_sizes is {list(sizes)}: one rank has all {local} classes")
        return Shards.alone(local), done
    rank, world = group.rank(), group.size()
    if sizes is not None:
        if len(sizes) != world or sizes[rank] != local:
            raise InputError(
                f"shard_sizes is {list(sizes)}: rank {rank} of {world} has {local} classes"
            )
        return Shards(rank, world, sum(sizes[:rank]), sum(sizes)), done
    own = torch.full((1,), local, dtype=torch.int64, device=device)
    all_sizes = torch.empty(world, dtype=torch.int64, device=device)
    work = start_gather(all_sizes, own, group)
    return Shards(rank, world, 0, 0, all_sizes), work


def start_gather(into: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup) -> Waiting:
    """Starts to gather each rank's tensor along a new first dimension."""
    return group._allgather_base(into.view(-1), own.view(-1)).wait


def gather(packed: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Each rank's, along a new first dimension."""
    into = packed.new_empty(group.size(), *packed.shape)
    if packed.numel():
        start_gather(into, packed, group)()
    return into


def start_sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> Waiting:
    """Starts to add up a tensor over the ranks, in place."""
    return group.allreduce([tensor]).wait


def cut_of(tensor: Any, dim: int, what: str) -> tuple[torch.Tensor, Any, list[int] | None]:
    """A DTensor's local part, the group that dimension `dim` is cut over, and its sizes there."""
    from torch.distributed.tensor import Shard

    dim %= tensor.dim()
    mesh, cut = tensor.device_mesh, None
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if type(placement) is not Shard or placement.dim != dim or cut is not None:
            raise UnsupportedError(
                f"{what} is placed {tuple(tensor.placements)}: it can be replicated or, on one "
                f"axis of the mesh, be Shard({dim}) (its classes); for what is cut over other "
                "dimensions give the loss `to_local()`, and a `denominator` of all ranks"
            )
        cut = axis
    local = tensor.to_local()
    if cut is None:
        return local, None, None
    group = group_of_mesh(mesh, cut)
    world, total = mesh.size(cut), tensor.shape[dim]
    each = -(-total // world)
    sizes = [max(0, min(each, total - rank * each)) for rank in range(world)]
    if local.shape[dim] != sizes[mesh.get_local_rank(cut)]:
        raise UnsupportedError(
            f"{what} has {local.shape[dim]} classes here, where DTensor would have put "
            f"{sizes[mesh.get_local_rank(cut)]} of {total}; give `to_local()` and the group"
        )
    return local, group, sizes


def beside(vector: Any, cut: Any, dim: int, what: str) -> torch.Tensor | None:
    """This rank's part of one number for each class, beside a DTensor with classes along `dim`.

    The vector is a DTensor that is cut alike or replicated, or all classes' on every rank, and gets
    all of a gradient (collective, if it was not cut). One of another length is left as it is.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if vector is None or vector.shape != cut.shape[dim:][:1]:
        return vector
    mesh, whole = cut.device_mesh, [Replicate()] * cut.device_mesh.ndim
    if not is_dtensor(vector):
        vector = DTensor.from_local(vector, mesh, whole, run_check=False)
    placements = [p if p.is_replicate() else Shard(0) for p in cut.placements]
    if vector.device_mesh != mesh or list(vector.placements) not in (placements, whole):
        raise UnsupportedError(
            f"{what} is placed {tuple(vector.placements)} on {vector.device_mesh}: beside classes "
            f"that are placed {tuple(cut.placements)} on {mesh} it can be replicated or cut alike"
        )
    return vector.redistribute(placements=placements).to_local()


def full_of(tensor: Any, what: str) -> torch.Tensor:
    """A tensor that every rank has whole: a plain one, or a replicated DTensor's local part."""
    if not is_dtensor(tensor):
        return tensor
    if not all(placement.is_replicate() for placement in tensor.placements):
        raise UnsupportedError(
            f"{what} is placed {tuple(tensor.placements)}: every rank of the vocabulary needs it "
            "whole; redistribute it to Replicate()"
        )
    return tensor.to_local()
