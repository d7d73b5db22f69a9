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

Note [The grid]
    The ranks that meet are those of `mesh`; where tensor parallelism sharded matrices before
    `fully_shard` did, all that hold shards of one: a grid, whose lines are the dimensions of the
    mesh that shard. So a matrix has one owner in it, and each of its ranks has work of its own. A
    shard is a block of the matrix, cut by tensor parallelism first (its rows or its columns), then
    by `fully_shard`. What is sharded along some lines only is the same along the others: the owner
    gets it from each rank, takes one, and sends it back to all.

Note [Owners in each bucket]
    Ranks meet twice in each bucket, so work must be even in each, and not only in all of them: a
    bucket has at least as many matrices as there are ranks, and the owners of each are chosen with
    what they have to do in those before.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

import interlace
from interlace.errors import InterlaceError, OptimizerError, UnsupportedError
from interlace.ir import Program
from interlace.optim.adam.state import local
from interlace.optim.bucket_runs import BucketRuns, Write
from interlace.optim.layer_wise.bucket_update import give_back, step_between
from interlace.optim.layer_wise.flat_weights import shown
from interlace.optim.layer_wise.ownership import BucketPlan, ParameterCost, placed
from interlace.optim.layer_wise.update_plan import lies_over, lines_of
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
from interlace.torch_private.distributed import StridedShard

SLOTS = 3
"""Buckets on the way at once: one goes to its owners, one is theirs, and one comes back."""
PLAIN: Group = {
    "split_sizes": None, "head_dim": None,
    "batched": False, "symmetric": False, "gram_variant": False,
}  # fmt: skip
"""The options of Muon with which it is torch.optim.Muon."""
Groups = Mapping[Tensor, Group]
Block = tuple[tuple[int, int], ...]
"""Where a shard lies in its matrix: begin and end, of rows and of columns."""


@dataclass(frozen=True, slots=True)
class ShardGrid:
    """The ranks that hold shards of a matrix; see Note [The grid]."""

    lines: tuple[tuple[int, ...], ...]
    """Along each dimension, the ranks that differ from this one in it alone."""
    places: Mapping[int, tuple[int, ...]]
    """The place of each rank, in the order of the ranks of their group."""

    @classmethod
    def of(cls, matrices: Collection[DTensor]) -> ShardGrid:
        """The grid of the matrix that is sharded over most ranks."""
        widest = max(matrices, key=lambda param: math.prod(map(len, lines_of(param).values())))
        lines, mesh = lines_of(widest), widest.device_mesh
        here = mesh.get_coordinate()
        assert here is not None
        ranks = mesh.mesh[tuple(slice(None) if a in lines else here[a] for a in range(mesh.ndim))]
        places = {int(ranks[at]): at for at in product(*map(range, ranks.shape))}
        return cls(tuple(lines.values()), {rank: places[rank] for rank in sorted(places)})

    def blocks(self, name: str, param: DTensor) -> list[Block]:
        """The block of each rank; raises UnsupportedError where shards are no blocks of the grid.

        Of two placements that cut the same dimension the second cuts first, as `_StridedShard`
        says.
        """
        cuts: list[tuple[int, int]] = []
        for axis, line in lines_of(param).items():
            placement: Any = param.placements[axis]
            again = any(p.is_shard(placement.dim) for p in param.placements[axis + 1 :])
            plain = type(placement) is Shard and not again
            if line not in self.lines or not (plain or type(placement) is StridedShard):
                raise UnsupportedError(
                    f"{name} of shape {tuple(param.shape)} has the placements {param.placements} "
                    f"on ranks {line}, where others are sharded over {self.lines}: only matrices "
                    "that tensor parallelism and then fully_shard made blocks of are exchanged. "
                    "Give it a Muon of its own"
                )
            cuts.append((self.lines.index(line), placement.dim))
        found: list[Block] = []
        for place in self.places.values():
            bounds = [(0, size) for size in param.shape]
            for line, dim in reversed(cuts):
                begin, end = bounds[dim]
                chunk = -(-(end - begin) // len(self.lines[line]))
                begin = min(begin + chunk * place[line], end)
                bounds[dim] = begin, min(begin + chunk, end)
            found.append(tuple(bounds))
        return found


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
    """This rank's, bfloat16."""
    parts: Mapping[Block, list[Tensor]]
    """On the owner: all shards, by their block; elsewhere none."""

    def gathered(self) -> Tensor:
        """On the owner: the matrix."""
        whole = self.shard.new_empty(self.param.shape)
        foreach_copy_(
            [_at(whole, block) for block in self.parts], [each[0] for each in self.parts.values()]
        )
        return whole

    def spread(self, whole: Tensor) -> None:
        """On the owner: all shards become those of a matrix."""
        pairs = [(part, _at(whole, block)) for block in self.parts for part in self.parts[block]]
        foreach_copy_(*map(list, zip(*pairs, strict=True)))

    def subtract(self, group: Group) -> None:
        """Subtracts this rank's part from the weights, each matrix inside by its learning rate."""
        own, (rows, columns), at = local(self.param), self.param.shape, 0
        for size in cuts(rows, group):
            begin, end = (min(max(x - self.first, 0), len(own)) for x in (at, at + size))
            own[begin:end].add_(self.shard[begin:end], alpha=-adjusted_lr(group, size, columns))
            at += size


class ShardPipeline:
    """The updates of `interlace.optim.Muon` or `torch.optim.Muon` over a module of `fully_shard`.

    Each matrix is a DTensor that is sharded over the ranks of `mesh`, maybe over those of tensor
    parallelism too, and may be replicated over others (HSDP, in which each replica does the same).
    The state stays sharded, in the optimizer. What needs no exchange that updates itself: groups
    with `use_muon=False`, and what shards have whole matrices of (experts, heads of `head_dim`).
    """

    runs: BucketRuns
    """The runs of `programs`: to owners, and then to shards."""

    def __init__(
        self,
        optimizer: Optimizer,
        params: Mapping[str, nn.Parameter],
        mesh: DeviceMesh,
        bucket_bytes: int,
        overlap: bool,
    ) -> None:
        self._optimizer, self._overlap = optimizer, overlap
        sharded = _sharded(optimizer, params, mesh)
        grid = ShardGrid.of(sharded.values())
        self.ranks = [*grid.places]
        """All that exchange shards, in the order of their group."""
        self._ranks, self._rank = len(self.ranks), self.ranks.index(dist.get_rank())
        self._names = [*sharded]
        blocks = [grid.blocks(name, param) for name, param in sharded.items()]
        self._exchanges = exchanges_of(
            [
                _item(optimizer, name, param, max(map(numel_of, each)))
                for (name, param), each in zip(sharded.items(), blocks, strict=True)
            ],
            self._ranks,
            bucket_bytes,
        )
        buffers = self._buffers(local(next(iter(sharded.values()))).device)
        self._buckets = [
            self._placed(exchange, *pair, [*zip(sharded.values(), blocks, strict=True)])
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
        self,
        exchange: ShardExchange,
        shards: Tensor,
        owned: Tensor,
        matrices: Sequence[tuple[DTensor, Sequence[Block]]],
    ) -> list[ShardedMatrix]:
        plan, own = exchange.plan, exchange.parts[self._rank]
        low, high = plan.bounds[self._rank : self._rank + 2]
        held, placed = owned.view(self._ranks, own), list[ShardedMatrix]()
        for number, start in zip(plan.items, plan.starts, strict=True):
            param, blocks = matrices[number]
            parts: defaultdict[Block, list[Tensor]] = defaultdict(list)
            for block, of_rank in zip(blocks, held, strict=True) if low <= start < high else ():
                parts[block].append(_shaped(of_rank[start - low :], block))
            mine = blocks[self._rank]
            place = _shaped(shards[start:], mine)
            assert place.shape == local(param).shape
            placed.append(ShardedMatrix(param, mine[0][0], place, parts))
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
        for alike in _by_group([matrix for matrix in ready if matrix.parts], groups):
            group = groups[alike[0].param]
            copies = [matrix.gathered() for matrix in alike]
            found: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
            for copy in copies:
                for part in matrices(copy, group):
                    found[part.shape].append(part)
            for parts in found.values():
                for few in batches(parts, group["batched"]):
                    made = orthogonal(parts[few], group)
                    foreach_copy_(parts[few], [made] if made.ndim == 2 else [*made])
            for matrix, copy in zip(alike, copies, strict=True):
                matrix.spread(copy)
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


def numel_of(block: Block) -> int:
    """Elements of a block."""
    return math.prod(end - begin for begin, end in block)


def _shaped(flat: Tensor, block: Block) -> Tensor:
    """The first elements of a buffer as a block."""
    return flat[: numel_of(block)].view([end - begin for begin, end in block])


def _at(whole: Tensor, block: Block) -> Tensor:
    """A block of a matrix."""
    return whole[tuple(slice(*bounds) for bounds in block)]


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
        if param.ndim > 2:
            raise UnsupportedError(
                f"{name} of shape {tuple(param.shape)} has the placements {param.placements}: of "
                "stacks of matrices each shard must hold whole ones. Give it a Muon of its own"
            )
        if not lies_over(param, mesh):
            raise UnsupportedError(
                f"{name} is sharded over other ranks than {mesh.mesh.flatten().tolist()}: make a "
                "Muon and a LayerWise for the parameters of each mesh"
            )
        found[name] = param
    if not found:
        raise OptimizerError("no matrix is sharded: the optimizer does all by itself")
    return found


def _item(optimizer: Optimizer, name: str, param: DTensor, numel: int) -> ParameterCost:
    """Cost of a matrix, for the plan: its elements are those of a padded shard."""
    rows, columns = param.shape
    if isinstance(optimizer, Muon):
        cost = optimizer.update_cost(param)
    else:
        cost = float(min(rows, columns) * rows * columns)
    return ParameterCost(name, numel, "bf16", 2, cost)


def _by_group(each: Sequence[ShardedMatrix], groups: Groups) -> list[list[ShardedMatrix]]:
    """Matrices of each group of the optimizer."""
    found: defaultdict[int, list[ShardedMatrix]] = defaultdict(list)
    for matrix in each:
        found[id(groups[matrix.param])].append(matrix)
    return [*found.values()]
