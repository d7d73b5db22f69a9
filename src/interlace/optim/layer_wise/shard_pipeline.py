"""Muon over the parameters of FSDP2: each matrix has one rank that makes its update orthogonal.

    pipeline = ShardPipeline(optimizer, params, mesh, bucket_bytes=1 << 26, overlap=True)
    pipeline.runs = BucketRuns(pipeline.programs, group, options)
    pipeline.step()

Note [A step of shards]
    Momentum, weight decay and the subtraction from the weights are done on shards. What needs whole
    matrices are the Newton-Schulz steps, for which the owner of a matrix gets the shards of its
    update, and then sends back those of the result, both in bfloat16, which the steps compute in.
    So a step is a pipeline over buckets: while one bucket's matrices are made orthogonal, the
    shards of the next one go to their owners, and those of the one before come back. At most three
    buckets are on the way, in as many pairs of buffers (`SLOTS`). Each exchange is a Program.

Note [Parts]
    A bucket holds matrices that follow one another. A rank's shards of them lie in one buffer, by
    owner: part s of that buffer goes to rank s. All shards of a matrix are as long, those that have
    fewer rows (the last ones) are padded, as FSDP2 does in its own collectives; so a part is as
    long on every rank, and the exchange is one all-to-all whose parts a table gives, each way.

Note [Owners in each bucket]
    Ranks meet twice in each bucket, so work must be even in each, and not only in all of them: a
    bucket has at least as many matrices as there are ranks, and the owners of each are chosen with
    what they have to do in those before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

import interlace
from interlace.errors import InterlaceError, OptimizerError, UnsupportedError
from interlace.ir import Program
from interlace.optim.adam.state import local
from interlace.optim.bucket_runs import BucketRuns, Write
from interlace.optim.layer_wise.bucket_update import give_back, step_between
from interlace.optim.layer_wise.flat_weights import shown
from interlace.optim.layer_wise.ownership import BucketPlan, ParameterCost, placed
from interlace.optim.layer_wise.update_plan import lies_over
from interlace.optim.loading import Group
from interlace.optim.muon.optimizer import Muon
from interlace.optim.muon.update import (
    adjusted_lr,
    average,
    batches,
    cuts,
    decay,
    grads_and_moments,
    in_whole_matrices,
    matrices,
    orthogonal,
)
from interlace.torch_private import foreach_copy_, foreach_lerp

SLOTS = 3
"""Buckets on the way at once: one goes to its owners, one is theirs, and one comes back."""
PLAIN: Group = {
    "split_sizes": None, "head_dim": None,
    "batched": False, "symmetric": False, "gram_variant": False,
}  # fmt: skip
"""The options of Muon with which it is torch.optim.Muon."""
Groups = Mapping[Tensor, Group]


@dataclass(frozen=True, slots=True)
class ShardExchange:
    """Exchange of one bucket's shards: to the owners of whole matrices, and back."""

    plan: BucketPlan
    """Plan of the buffer of this rank's shards; `items` are numbers of matrices."""
    about: str
    """The matrices, for messages."""

    @property
    def parts(self) -> tuple[int, ...]:
        """Elements that each rank sends to the owner s, and has from it."""
        return tuple(stop - start for start, stop in pairwise(self.plan.bounds))

    def program(self, name: str, to_owners: bool, ranks: int, rank: int) -> Program:
        """Shards of all matrices to all shards of the own ones, or back."""
        parts = self.parts
        with interlace.program(name, mesh={"dp": ranks}, lines=False) as p:
            table = p.table("parts", parts)
            own = p.table("own", [ranks * part for part in parts])
            shards = p.input("shards", "bf16", (sum(parts),))
            owned = p.input("owned", "bf16", (own[p.dp.rank],))
            ends = (shards, owned) if to_owners else (owned, shards)
            with p.stream("comm"), p.module(self.about):
                p.all_to_all(*ends, splits=table)
        return p.program


def exchanges_of(
    matrices: Sequence[ParameterCost], ranks: int, bucket_bytes: int
) -> list[ShardExchange]:
    """Buckets of the matrices in their order, whose numbers of elements are those of a shard.

    A bucket has as many matrices as there are ranks, and more while a rank's shards of it are at
    most `bucket_bytes`; what is left for the last, if it is less, is in the one before.
    """
    owners, loads = [0] * len(matrices), [0.0] * ranks
    exchanges: list[ShardExchange] = []
    for bucket in _filled(matrices, ranks, bucket_bytes):
        for number in sorted(bucket, key=lambda number: (-matrices[number].cost, number)):
            owners[number] = loads.index(min(loads))
            loads[owners[number]] += matrices[number].cost
        names = [matrices[number].name for number in bucket]
        exchanges.append(ShardExchange(placed(matrices, bucket, owners, ranks), shown(names)))
    return exchanges


def _filled(matrices: Sequence[ParameterCost], ranks: int, bucket_bytes: int) -> list[list[int]]:
    filled: list[list[int]] = [[]]
    size = 0
    for number, matrix in enumerate(matrices):
        nbytes = matrix.padded * matrix.itemsize
        if len(filled[-1]) >= ranks and size + nbytes > bucket_bytes:
            filled.append([])
            size = 0
        filled[-1].append(number)
        size += nbytes
    if len(filled) > 1 and len(filled[-1]) < ranks:  # too few for all ranks
        last = filled.pop()
        filled[-1].extend(last)
    return filled


@dataclass(frozen=True, slots=True, eq=False)
class ShardedMatrix:
    """A matrix, this rank's part of its update, and all parts on its owner."""

    param: DTensor
    first: int
    """The first row of this rank's shard."""
    shard: Tensor
    """[rows of the shard, columns], bfloat16."""
    whole: Tensor | None
    """On the owner: [ranks, elements of a padded shard], bfloat16."""

    def subtract(self, group: Group) -> None:
        """Subtracts this rank's part from the weights, each matrix inside by its learning rate."""
        own, (rows, columns), at = local(self.param), self.param.shape, 0
        for size in cuts(rows, group):
            begin, end = (min(max(x - self.first, 0), len(own)) for x in (at, at + size))
            own[begin:end].add_(self.shard[begin:end], alpha=-adjusted_lr(group, size, columns))
            at += size


class ShardPipeline:
    """The updates of `interlace.optim.Muon` or `torch.optim.Muon` over a module of `fully_shard`.

    Each matrix is a DTensor that is sharded by rows (`Shard(0)`) over the ranks of `mesh`, and may
    be replicated over others (HSDP, in which each replica does the same). The state stays sharded,
    in the optimizer. What needs no exchange that updates itself: groups with `use_muon=False`, and
    what shards have whole matrices of (experts, heads of `head_dim`).
    """

    runs: BucketRuns
    """The runs of `programs`, the first ones: to owners, and then to shards."""

    def __init__(
        self,
        optimizer: Optimizer,
        params: Mapping[str, nn.Parameter],
        mesh: DeviceMesh,
        bucket_bytes: int,
        overlap: bool,
    ) -> None:
        self._optimizer, self._overlap = optimizer, overlap
        self._ranks, self._rank = mesh.size(), mesh.get_local_rank()
        sharded = _sharded(optimizer, params, mesh)
        self._names = [*sharded]
        self._exchanges = exchanges_of(
            [_item(optimizer, name, p, self._ranks) for name, p in sharded.items()],
            self._ranks,
            bucket_bytes,
        )
        buffers = self._buffers(local(next(iter(sharded.values()))).device)
        self._buckets = [
            self._placed(exchange, *pair, [*sharded.values()])
            for exchange, pair in zip(self._exchanges, buffers, strict=True)
        ]
        self.programs: list[tuple[Write, Tensor, Tensor]] = [
            (partial(exchange.program, f"{name}_{i}", name == "to_owners"), *pair)
            for name in ("to_owners", "to_shards")
            for i, (exchange, pair) in enumerate(zip(self._exchanges, buffers, strict=True))
        ]

    def _buffers(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Buffers of each bucket: for this rank's shards, and for all shards of what it owns."""
        slots = min(SLOTS, len(self._exchanges))
        shards = [sum(exchange.parts) for exchange in self._exchanges]
        owned = [self._ranks * exchange.parts[self._rank] for exchange in self._exchanges]
        pairs: list[list[Tensor]] = []
        for sizes in (shards, owned):
            most = [max(sizes[slot::slots]) for slot in range(slots)]
            made = [torch.zeros(size, dtype=torch.bfloat16, device=device) for size in most]
            pairs.append([made[i % slots][:size] for i, size in enumerate(sizes)])
        return [*zip(*pairs, strict=True)]

    def _placed(
        self, exchange: ShardExchange, shards: Tensor, owned: Tensor, params: Sequence[DTensor]
    ) -> list[ShardedMatrix]:
        plan, own = exchange.plan, exchange.parts[self._rank]
        low, high = plan.bounds[self._rank : self._rank + 2]
        placed: list[ShardedMatrix] = []
        for number, start in zip(plan.items, plan.starts, strict=True):
            param, shard = params[number], local(params[number])
            padded, whole = -(-param.shape[0] // self._ranks), None
            if low <= start < high:
                size = padded * param.shape[1]
                whole = owned.view(self._ranks, own)[:, start - low : start - low + size]
            place = shards[start : start + shard.numel()].view(shard.shape)
            placed.append(ShardedMatrix(param, padded * self._rank, place, whole))
        return placed

    def step(self, _: object = None) -> None:
        """Updates all parameters. Collective. Hooks of the optimizer come before and after it."""
        grads: dict[nn.Parameter, Tensor] = {}
        ready: list[list[ShardedMatrix]] = []

        def begin() -> None:
            ready.extend([m for m in b if m.param.grad is not None] for b in self._buckets)
            self._send(0, ready[0], self._groups())
            for matrix in (matrix for bucket in ready for matrix in bucket):
                param: Any = matrix.param
                grads[param], param.grad = param.grad, None  # the optimizer updates the others

        def end() -> None:
            give_back(grads)
            self._finish(ready, self._groups())

        try:
            step_between(self._optimizer, begin, end)
        finally:
            give_back(grads)

    def _finish(self, ready: Sequence[Sequence[ShardedMatrix]], groups: Groups) -> None:
        """The rest of the pipeline; see Note [A step of shards]."""
        count = len(ready)
        for at in range(1, count + 2):
            if at < count:
                self._send(at, ready[at], groups)
            if at <= count and ready[at - 1]:
                self._orthogonalize(at - 1, ready[at - 1], groups)
            if at > 1 and ready[at - 2]:
                self._subtract(at - 2, ready[at - 2], groups)

    def explain(self) -> list[str]:
        """Lines: who owns what, and what a step moves."""
        moved = sum(sum(each.parts) - each.parts[self._rank] for each in self._exchanges)
        held = sum(each.parts[self._rank] for each in self._exchanges) * (self._ranks - 1)
        lines = [
            f"{len(self._names)} sharded matrices of {self._ranks} ranks in "
            f"{len(self._exchanges)} buckets; in a step this rank sends {2 * moved} bytes to "
            f"owners and {2 * held} back to shards"
        ]
        for index, exchange in enumerate(self._exchanges):
            plan = exchange.plan
            lines.append(f"bucket {index}: {plan.bounds[-1]} elements a rank")
            for number, start in zip(plan.items, plan.starts, strict=True):
                owner = sum(bound <= start for bound in plan.bounds[1:])
                lines.append(f"    {start}: {self._names[number]}, of rank {owner}")
        return lines

    def _groups(self) -> Groups:
        whole = [{**PLAIN, **group} for group in self._optimizer.param_groups]
        return {param: group for group in whole for param in group["params"]}

    def _send(self, index: int, ready: Sequence[ShardedMatrix], groups: Groups) -> None:
        """Averages momentum of a bucket, and sends the shards of its updates."""
        for alike in _by_group(ready, groups):
            group, params = groups[alike[0].param], [matrix.param for matrix in alike]
            grads, updates = grads_and_moments(params, group, self._optimizer.state)
            average(grads, updates, group)
            updates = [*map(local, updates)]
            if group["nesterov"]:
                slopes = [*map(local, grads)]
                updates = foreach_lerp(slopes, updates, group["momentum"])
            foreach_copy_([matrix.shard for matrix in alike], [*updates])
        if ready:
            self._start(index)

    def _orthogonalize(self, index: int, ready: Sequence[ShardedMatrix], groups: Groups) -> None:
        """Newton-Schulz of what this rank owns of a bucket, whose shards then go back."""
        self._wait(index)
        for alike in _by_group([matrix for matrix in ready if matrix.whole is not None], groups):
            group = groups[alike[0].param]
            copies = [_whole(matrix) for matrix in alike]
            found: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
            for matrix, copy in zip(alike, copies, strict=True):
                for part in matrices(copy[: matrix.param.shape[0]], group):
                    found[part.shape].append(part)
            for parts in found.values():
                for few in batches(parts, group["batched"]):
                    made = orthogonal(parts[few], group)
                    foreach_copy_(parts[few], [made] if made.ndim == 2 else [*made])
            for matrix, copy in zip(alike, copies, strict=True):
                assert matrix.whole is not None
                matrix.whole.copy_(copy.view(matrix.whole.shape))
        self._start(len(self._buckets) + index)

    def _subtract(self, index: int, ready: Sequence[ShardedMatrix], groups: Groups) -> None:
        """Updates the weights by what came back."""
        self._wait(len(self._buckets) + index)
        for alike in _by_group(ready, groups):
            group = groups[alike[0].param]
            decay([local(matrix.param) for matrix in alike], group)
            for matrix in alike:
                matrix.subtract(group)

    def _start(self, run: int) -> None:
        self.runs.start(run)
        if not self._overlap:
            self._wait(run)

    def _wait(self, run: int) -> None:
        try:
            self.runs.wait(run)
        except InterlaceError as error:
            index = run % len(self._buckets)
            what = "to their owners" if run < len(self._buckets) else "back to their shards"
            raise type(error)(
                f"bucket {index} ({self._exchanges[index].about}): updates did not come {what}: "
                f"{error}"
            ) from error


def _whole(matrix: ShardedMatrix) -> Tensor:
    """A copy of a matrix that this rank owns, with the rows that pad the last shards."""
    assert matrix.whole is not None
    columns = matrix.param.shape[1]
    return matrix.whole.clone(memory_format=torch.contiguous_format).view(-1, columns)


def _sharded(
    optimizer: Optimizer, params: Mapping[str, nn.Parameter], mesh: DeviceMesh
) -> dict[str, DTensor]:
    """The matrices that need an exchange by name, those first whose gradients come first."""
    if not isinstance(optimizer, Muon | torch.optim.Muon):
        raise OptimizerError(
            f"{type(optimizer).__name__} is neither interlace.optim.Muon nor torch.optim.Muon: one "
            "that treats each element by itself updates shards as they are, without LayerWise"
        )
    groups = [{**PLAIN, **group} for group in optimizer.param_groups]
    group_of = {param: group for group in groups for param in group["params"]}
    found: dict[str, DTensor] = {}
    for name, param in reversed([*params.items()]):
        group = group_of[param]
        if not group.get("use_muon", True) or not param.numel():
            continue
        if not isinstance(param, DTensor):
            raise UnsupportedError(
                f"{name} is not sharded: apply fully_shard to all of the module, or give such "
                "matrices a LayerWise of their own"
            )
        if in_whole_matrices(param, group):
            continue
        kinds = [type(placement) for placement in param.placements]
        one = kinds.count(Shard) == 1 and kinds.count(Replicate) == len(kinds) - 1
        if param.ndim > 2 or not one or not any(p.is_shard(0) for p in param.placements):
            raise UnsupportedError(
                f"{name} of shape {tuple(param.shape)} has the placements {param.placements}: only "
                "matrices that are sharded by rows over one dimension of the mesh, and replicated "
                "over the others, are exchanged. Give it a Muon of its own"
            )
        if not lies_over(param, mesh):
            raise UnsupportedError(
                f"{name} is sharded over other ranks than {mesh.mesh.flatten().tolist()}: make a "
                "Muon and a LayerWise for the parameters of each mesh"
            )
        found[name] = param
    if not found:
        raise OptimizerError("no matrix is sharded by rows: the optimizer does all by itself")
    return found


def _item(optimizer: Optimizer, name: str, param: DTensor, ranks: int) -> ParameterCost:
    """Cost of a matrix, for the plan: its elements are those of a padded shard."""
    rows, columns = param.shape
    if isinstance(optimizer, Muon):
        cost = optimizer.update_cost(param)
    else:
        cost = float(min(rows, columns) * rows * columns)
    return ParameterCost(name, -(-rows // ranks) * columns, "bf16", 2, cost)


def _by_group(each: Sequence[ShardedMatrix], groups: Groups) -> list[list[ShardedMatrix]]:
    """Matrices of each group of the optimizer."""
    found: defaultdict[int, list[ShardedMatrix]] = defaultdict(list)
    for matrix in each:
        found[id(groups[matrix.param])].append(matrix)
    return [*found.values()]
