"""Sharded matrices that one rank updates whole: brought to their homes, and given back.

    homes = homes_of(plan, weights, grads, shared, options, made)   # None without a mesh of shards
    homes.enter(optimizer)             # groups have whole matrices; leave(optimizer) undoes that
    homes.run("gradients_to_homes", 0) # bucket 0, after its reduction: shards become whole matrices
    homes.bring_all_weights()          # before the update
    optimizer.step()                   # updates homes.whole[param] instead of a DTensor
    homes.run("weights_to_shards", 0)  # before the bucket is gathered: the shards are updated

Note [Homes]
    The ranks of a tensor-parallel group hold the shards of a matrix, and the owner of data
    parallelism is one such group. In it the matrix has a home: the rank that has the whole matrix,
    its whole gradient and its state. So an update has the bits of an unsharded one, and the ranks
    of a group update different matrices. Weights come home in each step, for they may have been
    written from outside, and what a home keeps of them is as old as its last update.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

import interlace
from interlace.ir import Program
from interlace.ir.build import Handle
from interlace.optim.bucket_runs import (
    NAMES,
    Move,
    Write,
    all_reduced,
    beside,
    prepared,
    write_moves,
)
from interlace.optim.grad_reducer import Bucket
from interlace.optim.layer_wise.flat_weights import shown
from interlace.optim.layer_wise.ownership import ALIGNMENT
from interlace.optim.layer_wise.update_plan import UpdatePlan
from interlace.options import Options
from interlace.runtime import Executor


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Shard of a matrix that one rank holds: `begin` to `end` of its sharded dimension."""

    home: int
    rank: int
    start: int
    """Where it begins in the flat buffer,"""
    at: int
    """and where the matrix begins among the whole ones at its home."""
    folded: tuple[int, int, int]
    """The matrix's shape, the dimensions before and after the sharded one as one each."""
    begin: int
    end: int

    @property
    def numel(self) -> int:
        outer, _, inner = self.folded
        return outer * (self.end - self.begin) * inner

    @property
    def is_region(self) -> bool:
        """True if its place in the whole matrix is one region."""
        return self.folded[0] == 1

    def in_flat(self, flat: Handle) -> Handle:
        """Its place in the flat buffer."""
        return flat[self.start : self.start + self.numel]

    def in_whole(self, whole: Handle) -> Handle:
        """Its place in the whole matrix, of 3 dimensions."""
        matrix = whole[self.at : self.at + math.prod(self.folded)].view(*self.folded)
        return matrix[:, self.begin : self.end]

    def region(self, whole: Handle) -> Handle:
        """The same as a region, where it is one."""
        inner = self.folded[2]
        return whole[self.at + self.begin * inner : self.at + self.end * inner]

    def of_shape(self, place: Handle) -> Handle:
        """A place of as many elements, of 3 dimensions."""
        outer, _, inner = self.folded
        return place.view(outer, self.end - self.begin, inner)


def shards_of(param: DTensor, home: int, start: int, at: int) -> Iterator[ShardPlace]:
    """The shards of a matrix that are not empty, as torch.chunk cuts."""
    dim, shape = cast("Shard", param.placements[0]).dim, param.shape
    size, chunk = shape[dim], -(-shape[dim] // param.device_mesh.size())
    folded = math.prod(shape[:dim]), size, math.prod(shape[dim + 1 :])
    for rank, begin in enumerate(range(0, size, chunk)):
        yield ShardPlace(home, rank, start, at, folded, begin, min(size, begin + chunk))


@dataclass(frozen=True, slots=True)
class HomeExchange:
    """Exchange of one bucket's shards: to whole matrices at their homes, and back."""

    shards: tuple[ShardPlace, ...]
    about: str
    """The parameters, for messages."""
    peer: bool
    """True if ranks get what moves from each other's slots, and nothing is sent."""

    def program(
        self, name: str, flat: Tensor, whole: Tensor, to_homes: bool, ranks: int, rank: int
    ) -> Program:
        """Shards to homes, or whole matrices to shards."""
        kind = NAMES[flat.dtype]
        with interlace.program(name, mesh={"tp": ranks}, lines=False) as p:
            parts = p.input("flat", kind, (flat.numel(),))
            matrices = p.input("whole", kind, (whole.numel(),))
            size = sum(shard.numel for shard in self.shards if self._is_staged(shard, rank))
            staged = p.alloc("staged", kind, (size,)) if size else None
            own: list[tuple[Handle, Handle]] = []
            spread: list[tuple[Handle, Handle]] = []
            """Copies on this rank, each to its place in the whole matrix: own shards, and staging
            memory of shards that are no region there."""
            moves: list[Move] = []
            at = 0
            for number, shard in enumerate(self.shards):
                home, part, place = shard.home, shard.in_flat(parts), None
                if shard.rank == home == rank:
                    own.append((shard.of_shape(part), shard.in_whole(matrices)))
                if staged is not None and self._is_staged(shard, rank):
                    place = staged[at : at + shard.numel]
                    at += shard.numel
                    spread.append((shard.of_shape(place), shard.in_whole(matrices)))
                elif home == rank:  # who has no home here needs no place in it
                    place = shard.region(matrices)
                if home != shard.rank:
                    ends = (shard.rank, home) if to_homes else (home, shard.rank)
                    places = (part, place) if to_homes else (place, part)
                    moves.append(Move(*ends, *places, number, shard.numel))
            with p.stream("comm"), p.module(self.about):
                for source, target in own if to_homes else [*own, *spread]:
                    p.copy(*((source, target) if to_homes else (target, source)))
                write_moves(p, moves, rank, "tp", kind if self.peer else "")
                for source, target in spread if to_homes else ():
                    p.copy(source, target)
        return p.program.instantiate(rank)

    @staticmethod
    def _is_staged(shard: ShardPlace, rank: int) -> bool:
        """True for a shard of another rank whose place in its whole matrix here is no region."""
        return shard.home == rank != shard.rank and not shard.is_region


def homes_of(
    plan: UpdatePlan,
    weights: Sequence[Bucket],
    grads: Sequence[Bucket],
    shared: Mapping[str, Tensor],
    options: Options,
    made: contextlib.ExitStack,
) -> TensorHomes | None:
    """The homes of a plan that has a mesh of shards, until `made` is closed.

    Every rank of the job asks, also those whose plan has none.
    """
    ranks = [] if plan.mesh is None else dist.get_process_group_ranks(plan.mesh.get_group())
    group = made.enter_context(beside(ranks, plan.params[0].device))
    if group is None:
        return None
    return TensorHomes(plan, weights, grads, group, shared, options, made)


class TensorHomes:
    """The whole matrices that have their home on this rank, and the Programs that move them."""

    def __init__(
        self,
        plan: UpdatePlan,
        weights: Sequence[Bucket],
        grads: Sequence[Bucket],
        group: dist.ProcessGroup,
        shared: Mapping[str, Tensor],
        options: Options,
        made: contextlib.ExitStack,
    ) -> None:
        self.whole: dict[nn.Parameter, nn.Parameter] = {}
        """Stand-in for each DTensor that an optimizer updates: of its whole shape, without memory
        but at its home."""
        self.grads: dict[nn.Parameter, Tensor] = {}
        """The whole gradients of those DTensors that have their home here."""
        self.rank, self.size, self._plan = plan.shard, plan.shards, plan
        self._runs: dict[tuple[str, int | str], tuple[Executor, list[Tensor]]] = {}

        def prepare(key: tuple[str, int | str], write: Write, *tensors: Tensor) -> None:
            executor = prepared(write, group, tensors, options, made)
            self._runs[key] = executor, [*tensors]

        for param, home in zip(plan.params, plan.ownership.homes, strict=True):
            if home is not None:
                meta = torch.empty(param.shape, dtype=param.dtype, device="meta")
                self.whole[param] = nn.Parameter(meta, param.requires_grad)
        owners, homes = plan.ownership.owners, plan.ownership.homes
        for index, bucket in enumerate(plan.ownership.buckets):
            here = [
                (number, start, home)
                for number, start in zip(bucket.items, bucket.starts, strict=True)
                if (home := homes[number]) is not None and owners[number] == plan.rank
            ]
            if not here:
                continue
            ends, ats = [0] * self.size, list[int]()
            for number, _, home in here:
                ats.append(ends[home])
                ends[home] += -(-plan.params[number].numel() // ALIGNMENT) * ALIGNMENT
            flats = [weights[index].flat, grads[index].flat]
            size = max(ends[self.rank], 1)
            wholes = [torch.zeros(size, dtype=f.dtype, device=f.device) for f in flats]
            shards: list[ShardPlace] = []
            for (number, start, home), at in zip(here, ats, strict=True):
                param = plan.params[number]
                shards += shards_of(cast("DTensor", param), home, start, at)
                if home == self.rank:
                    place = slice(at, at + param.numel())
                    weight, grad = (each[place].view(param.shape) for each in wholes)
                    self.whole[param] = nn.Parameter(weight, param.requires_grad)
                    self.grads[param] = grad
            about = shown([plan.names[number] for number, *_ in here])
            exchange = HomeExchange(tuple(shards), about, options.transport == "peer")
            for what, kind in (
                ("gradients_to_homes", 1), ("weights_to_homes", 0), ("weights_to_shards", 0)
            ):  # fmt: skip
                both, to_homes = (flats[kind], wholes[kind]), what.endswith("homes")
                write = partial(exchange.program, f"{what}_{index}", *both, to_homes)
                prepare((what, index), write, *both)
        for name, flat in shared.items():
            op = "sum" if name == "norms" else "max"
            prepare(("share", name), partial(all_reduced, name, flat, op, team="tp"), flat)

    def enter(self, optimizer: Optimizer) -> None:
        """Puts whole matrices in the places of DTensors in all groups, with what states there are.

        The states of DTensors go one by one, so that not all are held twice.
        """
        owners = zip(self._plan.params, self._plan.ownership.owners, strict=True)
        for number, (param, owner) in enumerate(owners):
            if param not in self.whole:
                continue
            state = optimizer.state.pop(param, {})
            moved = {n: _whole(v) for n, v in state.items()} if owner == self._plan.rank else {}
            if moved and self._plan.is_mine(number):
                optimizer.state[self.whole[param]] = moved
        _replace(optimizer, self.whole)

    def leave(self, optimizer: Optimizer) -> None:
        """Puts the DTensors back, without states."""
        for matrix in self.whole.values():
            optimizer.state.pop(matrix, None)
        _replace(optimizer, {matrix: param for param, matrix in self.whole.items()})

    @property
    def executors(self) -> list[Executor]:
        """In the order of the buckets."""
        return [executor for executor, _ in self._runs.values()]

    def bring_all_weights(self) -> None:
        """Weights of all buckets to homes, while nothing else moves."""
        for what, index in self._runs:
            if what == "weights_to_homes":
                self.run(what, index)

    def run(self, what: str, index: int | str) -> None:
        """Moves what belongs to a bucket, gradients or weights, to homes or back to shards; or
        reduces one of `shared` ("share"). Collective.
        """
        if (what, index) in self._runs:
            executor, tensors = self._runs[what, index]
            executor.run(tensors)

    def reset(self) -> None:
        """After a failure, every rank."""
        self.executors[0].reset()  # which resets the team of all


def _replace(optimizer: Optimizer, by: Mapping[nn.Parameter, nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        group["params"][:] = [by.get(param, param) for param in group["params"]]


def _whole(value: object) -> object:
    """A value of a DTensor's state, of the whole. Collective, if it is a DTensor."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    return value.clone() if isinstance(value, Tensor) else value
