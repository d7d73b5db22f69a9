"""Muon over the parameters of FSDP2: each matrix has one rank that makes its update orthogonal.

    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = ShardedLayerWise(Muon(muon_groups(model), lr=0.02), model)
    loss(model(x), y).backward()                  # FSDP2 gathers weights and reduces gradients
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()

Note [A step of shards]
    Momentum, weight decay and the subtraction from the weights are done on shards. What needs whole
    matrices are the Newton-Schulz steps, for which the owner of a matrix gets the shards of its
    update, and then sends back those of the result, both in bfloat16, which the steps compute in.
    So a step is a pipeline over buckets: while one bucket's matrices are made orthogonal, the
    shards of the next one go to their owners, and those of the one before come back. At most three
    buckets are on the way, in as many pairs of buffers (`SLOTS`). Each exchange is a Program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from interlace.comm.teams import group_of_mesh
from interlace.cost import Timeline
from interlace.errors import GradientError, InterlaceError, OptimizerError, UnsupportedError
from interlace.optim.adam.state import local
from interlace.optim.bucket_runs import BucketRuns
from interlace.optim.grad_reducer import unfrozen
from interlace.optim.layer_wise.ownership import ParameterCost
from interlace.optim.layer_wise.whole_parameters import named
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
from interlace.optim.shard_exchange import ShardExchange, exchanges_of
from interlace.optim.untraced import eager
from interlace.options import Options

SLOTS = 3
"""Buckets on the way at once: one goes to its owners, one is theirs, and one comes back."""
PLAIN: Mapping[str, Any] = {
    "split_sizes": None, "head_dim": None, "split_dim": 0,
    "batched": False, "symmetric": False, "gram_variant": False,
}  # fmt: skip
"""The options of Muon with which it is torch.optim.Muon."""
Groups = Mapping[Tensor, Mapping[str, Any]]


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

    def subtract(self, group: Mapping[str, Any]) -> None:
        """Subtracts this rank's part from the weights, each matrix inside by its learning rate."""
        dim, own, shape, at = group["split_dim"], local(self.param), self.param.shape, 0
        first = 0 if dim else self.first
        for size in cuts(shape[dim], group):
            begin, end = (min(max(x - first, 0), own.shape[dim]) for x in (at, at + size))
            target, made = (x.narrow(dim, begin, end - begin) for x in (own, self.shard))
            rows, columns = (shape[0], size) if dim else (size, shape[1])
            target.add_(made, alpha=-adjusted_lr(group, rows, columns))
            at += size


class ShardedLayerWise:
    """`interlace.optim.Muon` or `torch.optim.Muon` over a module of `fully_shard`.

    `optimizer`: each of its matrices is a DTensor that stands in `module` and is sharded by rows
    (`Shard(0)`) over one dimension of its mesh, and may be replicated over others (HSDP, in which
    each replica does the same). The state stays sharded, in the optimizer, which has the same
    `param_groups`. What needs no exchange it updates itself: groups with `use_muon=False`, and
    what shards have whole matrices of (experts, heads of `head_dim`). Every rank of the job makes
    its own together.

    Given the same gradients, weights have the bits of the optimizer on whole parameters in one
    process, with `batched=False` and whatever the overlap. `bucket_bytes` bounds a rank's shards of
    a bucket, in bfloat16, which has at least as many matrices as there are ranks.
    `exchange_under_backward=True`: momentum is averaged and shards go to owners as soon as all
    gradients of a bucket are reduced. For that gradients must be final then: they cannot be
    clipped, a step cannot be left out, and of micro-batches only the last may reduce
    (`set_requires_gradient_sync`). Every bucket then has buffers of its own.
    `options`: `time_out_s` bounds every wait for a peer; with `overlap=False` each exchange is
    waited for at once, with the same bits; `trace` keeps `timelines()`; `transport="peer"` copies
    from the memory of peers.

    Raises OptimizerError or UnsupportedError for parameters that cannot be served so. When a peer
    fails, the error names the bucket and its matrices; state and weights are then undefined.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        module: nn.Module,
        *,
        bucket_bytes: int = 64 << 20,
        exchange_under_backward: bool = False,
        options: Options | None = None,
    ) -> None:
        self.optimizer, self.module = optimizer, module
        self._options = options or Options()
        params = _sharded(optimizer, module)
        group, self._ranks, self._rank = _team(params)
        self._exchanges = exchanges_of(
            [_item(optimizer, name, p, self._ranks) for name, p in params.items()],
            self._ranks,
            bucket_bytes,
        )
        self._names = [*params]
        count = len(self._exchanges)
        slots = count if exchange_under_backward else min(SLOTS, count)
        buffers = self._buffers(slots, local(next(iter(params.values()))).device)
        self._buckets = [
            self._placed(exchange, *pair, [*params.values()])
            for exchange, pair in zip(self._exchanges, buffers, strict=True)
        ]
        programs = [
            *(partial(x.to_owners, f"to_owners_{i}") for i, x in enumerate(self._exchanges)),
            *(partial(x.to_shards, f"to_shards_{i}") for i, x in enumerate(self._exchanges)),
        ]
        runs = [(write, *buffers[i % count]) for i, write in enumerate(programs)]
        self._runs = BucketRuns(runs, group, self._options, apart=True)
        self._begin_step()
        self._handles: list[Any] = []
        for index, bucket in enumerate(self._buckets if exchange_under_backward else ()):
            for matrix in bucket:
                with unfrozen(matrix.param):
                    hook = partial(self._arrived, index)
                    self._handles.append(matrix.param.register_post_accumulate_grad_hook(hook))

    def _buffers(self, slots: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        """Of each bucket: for this rank's shards, and for all shards of what it owns."""
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

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's."""
        return self.optimizer.param_groups

    @eager
    @torch.no_grad()
    def step(self) -> None:
        """Updates all parameters. Collective. Hooks of the optimizer come before and after it."""
        optimizer, kept = self.optimizer, dict[Tensor, Tensor | None]()

        def begin(*_: object) -> None:  # once, after the hooks of others
            if not kept:
                self._check_final()
                if not self._begun:
                    self._send(self._groups())
                kept.update((m.param, m.param.grad) for bucket in self._buckets for m in bucket)
                for param in kept:  # the optimizer updates what needs no exchange
                    param.grad = None

        def end(*_: object) -> None:  # once, before the hooks of others
            _put_back(kept)
            if self._begun:
                self._finish(self._groups())

        begins = optimizer.register_step_pre_hook(begin)
        ends = optimizer.register_step_post_hook(end)
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(ends.id, last=False)
        try:
            optimizer.step()
        finally:
            _put_back(kept)
            begins.remove()
            ends.remove()

    def _finish(self, groups: Groups) -> None:
        """The rest of the pipeline; see Note [A step of shards]."""
        count = len(self._buckets)
        for at in range(1, count + 2):
            if self._begun <= at < count:
                self._send(groups)
            if at <= count and self._ready[at - 1]:
                self._orthogonalize(at - 1, groups)
            if at > 1 and self._ready[at - 2]:
                self._subtract(at - 2, groups)
        self._begin_step()

    @eager
    def zero_grad(self, set_to_none: bool = True) -> None:
        """The optimizer's."""
        self._check_whole()
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Groups and sharded states by Parameters' names: `get_optimizer_state_dict` of torch.

        `torch.distributed.checkpoint` saves and loads it as it is, on any number of ranks.
        """
        self._check_whole()
        return get_optimizer_state_dict(self.module, self.optimizer)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave. Collective."""
        self._check_whole()
        set_optimizer_state_dict(self.module, self.optimizer, state_dict)

    def about(self, index: int) -> str:
        """The matrices of a bucket by name."""
        return self._exchanges[index].about

    def explain(self) -> str:
        """Who owns what, what a step moves, and the Programs."""
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
        texts = [str(executor.program) for executor in self._runs.executors]
        return "\n".join([*lines, *texts])

    def timelines(self) -> list[Timeline]:
        """When each Program ran last, those to owners first; needs the option `trace`."""
        return [each.timeline() for each in self._runs.executors]

    def reset(self) -> None:
        """After a failure, on every rank together: nothing is in flight. Load weights and state."""
        self._begin_step()
        self._runs.reset()

    def close(self) -> None:
        """Takes hooks, thread and process group away."""
        for handle in self._handles:
            handle.remove()
        self._runs.close()

    def __enter__(self) -> ShardedLayerWise:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin_step(self) -> None:
        self._begun = 0
        """Buckets whose shards are sent, the first ones."""
        self._ready: list[list[ShardedMatrix]] = []
        """Of each, the matrices that have gradients."""
        self._used: list[tuple[ShardedMatrix, Tensor, int]] = []
        """Their gradients, and of which version."""
        self._left = [{matrix.param for matrix in bucket} for bucket in self._buckets]

    def _groups(self) -> Groups:
        whole = [{**PLAIN, **group} for group in self.param_groups]
        return {param: group for group in whole for param in group["params"]}

    @torch.no_grad()
    def _arrived(self, index: int, param: Tensor) -> None:
        """A gradient is reduced: sends the buckets that are complete."""
        if index < self._begun:
            raise GradientError(
                f"a gradient of bucket {index} ({self.about(index)}) came after its "
                "momentum was averaged: let only the last backward of a step reduce gradients "
                "(set_requires_gradient_sync), or leave exchange_under_backward out"
            )
        self._left[index].discard(param)
        while (
            self._options.overlap
            and self._begun < len(self._left)
            and not any(each.requires_grad for each in self._left[self._begun])
        ):
            self._send(self._groups())

    def _send(self, groups: Groups) -> None:
        """Averages momentum of the next bucket, and sends the shards of its updates."""
        index = self._begun
        ready = [matrix for matrix in self._buckets[index] if matrix.param.grad is not None]
        self._ready.append(ready)
        self._begun += 1
        for alike in _by_group(ready, groups):
            group, params = groups[alike[0].param], [matrix.param for matrix in alike]
            grads, updates = grads_and_moments(params, group, self.optimizer.state)
            average(grads, updates, group)
            updates = [*map(local, updates)]
            if group["nesterov"]:
                slopes = [*map(local, grads)]
                updates = torch._foreach_lerp(slopes, updates, group["momentum"])
            torch._foreach_copy_([matrix.shard for matrix in alike], [*updates])
        used = [(matrix, local(cast("Tensor", matrix.param.grad))) for matrix in ready]
        self._used += [(matrix, grad, grad._version) for matrix, grad in used]
        if ready:
            self._start(index)

    def _orthogonalize(self, index: int, groups: Groups) -> None:
        """Newton-Schulz of what this rank owns of a bucket, whose shards then go back."""
        self._wait(index)
        owned = [matrix for matrix in self._ready[index] if matrix.whole is not None]
        for alike in _by_group(owned, groups):
            group = groups[alike[0].param]
            copies = [self._whole(matrix) for matrix in alike]
            found: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
            for matrix, copy in zip(alike, copies, strict=True):
                for part in matrices(copy[: matrix.param.shape[0]], group):
                    found[part.shape].append(part)
            for parts in found.values():
                for few in batches(parts, group["batched"]):
                    made = orthogonal(parts[few], group)
                    torch._foreach_copy_(parts[few], [made] if made.ndim == 2 else [*made])
            for matrix, copy in zip(alike, copies, strict=True):
                assert matrix.whole is not None
                matrix.whole.copy_(copy.view(matrix.whole.shape))
        self._start(len(self._buckets) + index)

    def _whole(self, matrix: ShardedMatrix) -> Tensor:
        """A copy of a matrix that this rank owns, with the rows that pad the last shards."""
        assert matrix.whole is not None
        columns = matrix.param.shape[1]
        return matrix.whole.clone(memory_format=torch.contiguous_format).view(-1, columns)

    def _subtract(self, index: int, groups: Groups) -> None:
        """Updates the weights by what came back."""
        self._wait(len(self._buckets) + index)
        for alike in _by_group(self._ready[index], groups):
            group = groups[alike[0].param]
            decay([local(matrix.param) for matrix in alike], group)
            for matrix in alike:
                matrix.subtract(group)

    def _start(self, run: int) -> None:
        self._runs.start(run)
        if not self._options.overlap:
            self._wait(run)

    def _wait(self, run: int) -> None:
        try:
            self._runs.wait(run)
        except InterlaceError as error:
            index = run % len(self._buckets)
            what = "to their owners" if run < len(self._buckets) else "back to their shards"
            raise type(error)(
                f"bucket {index} ({self.about(index)}): updates did not come {what}: {error}"
            ) from error

    def _check_whole(self) -> None:
        """Raises OptimizerError where some momentum is averaged already, and other is not."""
        if self._begun:
            raise OptimizerError(
                "exchange_under_backward=True has averaged momentum already: call step() first"
            )

    def _check_final(self) -> None:
        """Raises GradientError where gradients were changed after they were used."""
        for matrix, grad, version in self._used:
            now = matrix.param.grad
            if now is None or local(now) is not grad or grad._version != version:
                raise GradientError(
                    f"the gradient of a matrix of shape {tuple(matrix.param.shape)} was changed "
                    "after its momentum was averaged: exchange_under_backward=True leaves no time "
                    "to clip or scale gradients. Leave it out"
                )


def _sharded(optimizer: Optimizer, module: nn.Module) -> dict[str, DTensor]:
    """The matrices that need an exchange by name, those first whose gradients come first."""
    if not isinstance(optimizer, Muon | torch.optim.Muon):
        raise OptimizerError(
            f"{type(optimizer).__name__} is neither interlace.optim.Muon nor torch.optim.Muon: one "
            "that treats each element by itself updates shards as they are, without this class"
        )
    groups = [{**PLAIN, **group} for group in optimizer.param_groups]
    wanted = {
        p: group
        for group in groups
        for p in group["params"]
        if group.get("use_muon", True) and p.numel()
    }
    names = {param: name for name, param in named(module).items() if param in wanted}
    if len(names) < len(wanted):
        raise OptimizerError(
            f"{len(wanted) - len(names)} of {len(wanted)} parameters of Muon are not in the "
            "module: make the optimizer after fully_shard, and give the module that holds them all"
        )
    found: dict[str, DTensor] = {}
    for param, name in reversed(names.items()):
        if not isinstance(param, DTensor):
            raise UnsupportedError(
                f"{name} is not sharded: apply fully_shard to all of the module, or give such "
                "matrices a LayerWise of their own"
            )
        if in_whole_matrices(param, wanted[param]):
            continue
        kinds = [type(placement) for placement in param.placements]
        one = kinds.count(Shard) == 1 and kinds.count(Replicate) == len(kinds) - 1
        if param.ndim > 2 or not one or not any(p.is_shard(0) for p in param.placements):
            raise UnsupportedError(
                f"{name} of shape {tuple(param.shape)} has the placements {param.placements}: only "
                "matrices that are sharded by rows over one dimension of the mesh, and replicated "
                "over the others, are exchanged. Give it a Muon of its own"
            )
        found[name] = param
    if not found:
        raise OptimizerError("no matrix is sharded by rows: the optimizer does all by itself")
    return found


def _team(params: Mapping[str, DTensor]) -> tuple[dist.ProcessGroup, int, int]:
    """The ranks that hold the shards, their number, and this one's."""
    meshes = {(p.device_mesh, p.placements): name for name, p in params.items()}
    if len(meshes) > 1:
        raise UnsupportedError(
            f"{' and '.join(meshes.values())} are sharded over different ranks: make a Muon and a "
            "ShardedLayerWise for each mesh"
        )
    ((mesh, placements),) = meshes
    dim = next(dim for dim, placement in enumerate(placements) if placement.is_shard())
    return group_of_mesh(mesh, dim), mesh.size(dim), mesh.get_local_rank(dim)


def _item(optimizer: Optimizer, name: str, param: DTensor, ranks: int) -> ParameterCost:
    """What the plan needs to know of a matrix: its elements are those of a padded shard."""
    rows, columns = param.shape
    if isinstance(optimizer, Muon):
        cost = optimizer.update_cost(param)
    else:
        cost = float(min(rows, columns) * rows * columns)
    return ParameterCost(name, -(-rows // ranks) * columns, "bf16", 2, cost)


def _put_back(grads: dict[Tensor, Tensor | None]) -> None:
    """Empties `grads` into `.grad`."""
    while grads:
        param, grad = grads.popitem()
        param.grad = grad


def _by_group(each: Sequence[ShardedMatrix], groups: Groups) -> list[list[ShardedMatrix]]:
    """Those of each group of the optimizer."""
    found: defaultdict[int, list[ShardedMatrix]] = defaultdict(list)
    for matrix in each:
        found[id(groups[matrix.param])].append(matrix)
    return [*found.values()]
