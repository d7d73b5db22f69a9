"""A vocabulary that is cut over the ranks of a group: who has which classes, and the exchange.

Ranks may have different numbers of classes, or none. Each call gathers the ranks' numbers on the
device, which hides behind the reading of the logits.

Note [Calls that agree]
    Which collectives a call makes, and of which sizes, depends on its arguments: on the rows, the
    chunk size, the terms of the loss, and whether `hidden` wants a gradient. So the first gather of
    a call, of the same size whatever the arguments, brings them along, and ranks whose arguments
    differ raise before the next one. A CPU compares them in each call. On CUDA the host would wait
    for the device: it does so until it has once compared these arguments (the number of rows
    apart), and not while a graph is captured. A rank that gives arguments as in a call before does
    not look, so it goes on where a peer raises, and waits for the time-out of the group.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from interlace.errors import AgreementError, InputError
from interlace.nn.cross_entropy.steps import Shards
from interlace.nn.groups import is_dtensor

Waiting = Callable[[], object]
"""Makes the current stream wait for a communication (on the CPU: the host)."""
FACTS: Mapping[str, int] = {
    **{"rows": 1 << 30, "chunk_size": 1 << 24, "dtype": 4},
    **dict.fromkeys(("reduction='none'", "overlap", "label_smoothing", "class weights"), 2),
    **dict.fromkeys(("z_loss", "requires_grad of hidden"), 2),
}
"""Arguments that ranks must give alike, each with a bound of its numbers: all fit into one."""
WITHOUT_ROWS = math.prod([*FACTS.values()][1:])
"""Remainder by which arguments are known, whatever the number of rows."""

_compared: weakref.WeakKeyDictionary[dist.ProcessGroup, set[int]] = weakref.WeakKeyDictionary()
"""Arguments that a rank has compared with its peers', by group."""


def may_look(device: torch.device, known: bool) -> bool:
    """True if the host looks at all ranks' arguments, which are `known` to have been alike once."""
    return device.type != "cuda" or not (known or torch.cuda.is_current_stream_capturing())


def done() -> None:
    """Nothing to wait for."""


def find_shards(
    group: dist.ProcessGroup | None, local: int, facts: Mapping[str, int], device: torch.device
) -> tuple[Shards, Waiting]:
    """The layout of the classes, and a wait that comes before its `sizes` are read, and raises
    AgreementError where ranks give other `facts`: Note [Calls that agree].
    """
    if group is None:
        return Shards.alone(local), done
    code = 0
    for name, bound in FACTS.items():
        code = code * bound + min(facts[name], bound - 1)
    own = torch.full((2,), local, dtype=torch.int64, device=device)
    own[1:].fill_(code)
    both = own.new_empty(group.size(), 2)
    sizes = own.new_empty(group.size())
    pending = [start_gather(both, own, group)]

    def ready() -> None:
        if pending:
            pending.pop()()
            sizes.copy_(both[:, 0])
            known, alike = _compared.setdefault(group, set()), code % WITHOUT_ROWS
            if may_look(device, alike in known):
                compare(both[:, 1].tolist(), dist.get_process_group_ranks(group))
                known.add(alike)

    return Shards(group.rank(), group.size(), 0, sizes), ready


def compare(codes: list[int], ranks: list[int]) -> None:
    """Raises AgreementError for the first argument that a rank gives otherwise than the first."""
    for rank, code in zip(ranks, codes, strict=True):
        one, other = codes[0], code
        differ: list[str] = []
        for name, bound in [*FACTS.items()][::-1]:
            (one, ours), (other, theirs) = divmod(one, bound), divmod(other, bound)
            if ours != theirs:
                differ.append(f"rank {ranks[0]} has {name}={ours}, and rank {rank} {name}={theirs}")
        if differ:
            raise AgreementError(
                f"ranks give a loss different arguments: {differ[-1]} (of an option that is on or "
                "off, 1 or 0). fix: give all ranks of the group the same arguments"
            )


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
