"""A vocabulary that is cut over the ranks of a group: who has which classes, and the exchange.

Ranks may have different numbers of classes, or none. Without `shard_sizes` each call gathers the
ranks' numbers on the device, which hides behind the reading of the logits: no rank relies on what
another might have forgotten, and the host never waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from interlace.errors import InputError
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


def refuse_dtensors(**tensors: object) -> None:
    """Raises InputError for a DTensor among the arguments of these names."""
    for name, tensor in tensors.items():
        if is_dtensor(tensor):
            raise InputError(
                f"`{name}` is a DTensor: a loss takes what this rank holds. fix: give "
                f"{name}.to_local(), and as `group` the mesh that the classes are cut over"
            )
