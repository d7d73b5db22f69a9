"""Data parallelism in which each rank updates whole parameters of its own, and gathers the rest.

    optimizer = LayerWise(torch.optim.Muon(model.parameters(), lr=0.02), model, mesh)
    for x, y in batches:
        loss(model(x), y).backward()         # gradients go to the owners, under the backward
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()                     # owners update; gathers run under the next forward
        optimizer.zero_grad()

Any torch optimizer will do, also one that needs whole matrices. A parameter's owner holds its
state, and nobody else does (as in ZeRO-1).

Note [A step]
    Buckets hold parameters that follow one another in the model. Each has two flat buffers with one
    layout (ownership.py), one of main gradients and one that the Parameters are views of, and two
    Programs: a reduce-scatter and what brings gradients to owners, and what brings weights to
    shards and an all-gather. Both run in place, so that nothing is allocated for them. The gathers
    of a step begin in the order in which the first forward needed the buckets, as rank 0 saw it;
    modules wait as they come to run (Note [What waits]), in whatever order. Updates go in that
    order too (Note [In order]).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from interlace.cost import Timeline
from interlace.errors import GradientError, OptimizerError, ReplicaError
from interlace.optim.bucket_runs import (
    NAMES,
    BucketExchange,
    BucketRuns,
    Write,
    all_reduced,
)
from interlace.optim.bucket_update import UpdatesInOrder
from interlace.optim.flat_weights import FlatWeights, shown
from interlace.optim.grad_reducer import Bucket, GradReducer, check_reduction, laid_out
from interlace.optim.ownership import ParameterCost, own
from interlace.optim.whole_parameters import (
    hash_of,
    parameters_of,
    uncompiled,
)
from interlace.options import Options


class LayerWise:
    """An optimizer whose parameters have owners, one rank of `mesh` each.

    `optimizer`: has updated nothing yet, or has state for all parameters; each of its parameters is
    a plain tensor and stands in `module`, which every rank has alike (a gather at the start makes
    weights equal). The Parameters become views of flat buffers, and frozen ones may be unfrozen
    later. `mesh`: one dimension, whose ranks all do the same. Every rank of the job makes its own
    together.

    Under `DistributedDataParallel` the gradients are reduced already: `.grad` is taken as it is.
    Else they are summed and reduced by a `GradReducer` (`main_grad_dtype`, and `op` "mean" or
    "sum"; `no_sync`), and `.grad` is None between steps; a Parameter that was not used has the
    gradient 0. `overlap_param_gather=False` has `step` wait for the gathers, with the same bits.
    `bucket_bytes` bounds the weights of a bucket of more than one parameter (the first ones have
    less). Owners are balanced by the optimizer's `update_cost(parameter)` where it has that, else
    by elements. `units`: classes of modules whose forward reads Parameters of modules inside that
    it does not call. With `check_replicas_every=N`, every N-th step begins with `check_replicas`
    (or ends with it, where updates run under the backward).
    `options`: `time_out_s` bounds every wait for a peer, `overlap=False` reduces in `step` only,
    `trace` keeps `timelines()`; with `transport="peer"` ranks read each other's memory, sums go in
    rank order, and nothing is sent (GPUs that ranks share need that).

    With `update_under_backward=True` the owners of a bucket update it as soon as its gradients are
    reduced, under the rest of the backward (on the thread or the stream of the reductions), with
    the learning rate of then; the first backward, and buckets whose gradients are not complete
    before, wait for `step`. Nothing can be clipped, or a step left out. The optimizer must update
    each parameter by itself, and find them in its `param_groups`, or those of optimizers that it
    holds in attributes and lists.

    Raises OptimizerError or UnsupportedError for parameters that cannot be served so. When a peer
    fails, the error names the bucket and the module that waited; the weights are then undefined.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        module: nn.Module,
        mesh: DeviceMesh,
        *,
        overlap_param_gather: bool = True,
        update_under_backward: bool = False,
        bucket_bytes: int = 64 << 20,
        main_grad_dtype: torch.dtype | None = torch.float32,
        op: str = "mean",
        units: Collection[type[nn.Module]] = (),
        check_replicas_every: int = 0,
        options: Options | None = None,
    ) -> None:
        if mesh.ndim != 1:
            raise OptimizerError(
                f"the mesh has {mesh.ndim} dimensions: give one of them, such as mesh['dp']"
            )
        check_reduction(op, bucket_bytes, main_grad_dtype)
        self.optimizer, self.module = optimizer, module
        self._rank = mesh.get_local_rank()
        self._params = parameters_of(optimizer, module)
        self._names = {param: name for name, param in self._params.items()}
        self._overlap, self._check_every = overlap_param_gather, check_replicas_every
        self._steps = 0
        cost: Any = getattr(optimizer, "update_cost", Tensor.numel)
        self._items = [
            ParameterCost(name, p.numel(), NAMES[p.dtype], p.itemsize, float(cost(p)))
            for name, p in self._params.items()
        ]
        self._plan = own(self._items, mesh.size(), bucket_bytes)
        owners = zip(self._params.values(), self._plan.owners, strict=True)
        self._owned = [param for param, owner in owners if owner == self._rank]
        reduces = not isinstance(uncompiled(module), DistributedDataParallel)
        weights = self._laid_out(None)
        grads = self._laid_out(main_grad_dtype) if reduces else []
        self._device = weights[0].flat.device
        self._order = list(range(len(weights)))
        self._shared = {
            "norms": torch.zeros(len(self._params), dtype=torch.float64, device=self._device),
            "order": torch.zeros(len(weights), dtype=torch.int64, device=self._device),
            "hashes": torch.zeros(2 * len(self._params), dtype=torch.int64, device=self._device),
        }
        chosen = options or Options()
        self._early = update_under_backward
        if self._early and not reduces:
            raise OptimizerError(
                "update_under_backward=True is for gradients that LayerWise reduces itself: give "
                "it the module without DistributedDataParallel"
            )
        self._updates = UpdatesInOrder(optimizer, weights, self._owned)
        then = self._updates.under_backward(grads) if self._early else {}
        programs = self._programs(weights, grads, op, chosen.transport == "peer")
        self._runs = BucketRuns(programs, mesh.get_group(), chosen, apart=True, then=then)
        self._reducer = GradReducer.over(grads[::-1], self._runs, chosen) if reduces else None
        if self._reducer is not None:
            self._reducer.attach(module)
        self._weights = FlatWeights(module, weights, self._runs, len(grads), self._names, units)
        for param in set(optimizer.state) - set(self._owned):
            del optimizer.state[param]
        self._weights.start(self._order, wait=True)

    def _laid_out(self, dtype: torch.dtype | None) -> list[Bucket]:
        params, buckets = [*self._params.values()], []
        for plan in self._plan.buckets:
            members = [params[number] for number in plan.items]
            kind = dtype or members[0].dtype
            buckets.append(laid_out(members, plan.starts, plan.numel, kind))
        return buckets

    def _programs(
        self, weights: Sequence[Bucket], grads: Sequence[Bucket], op: str, peer: bool
    ) -> list[tuple[Write, Tensor]]:
        """Reductions in the order of backward, gathers in that of the model, and `_shared`."""
        reductions: list[tuple[Write, Tensor]] = []
        gathers: list[tuple[Write, Tensor]] = []
        for i, plan in enumerate(self._plan.buckets):
            about = shown([self._items[number].name for number in plan.items])
            exchange, flat = BucketExchange(plan, about, peer), weights[i].flat
            gathers.append((partial(exchange.gathered, f"gather_bucket_{i}", flat), flat))
            if grads:
                flat = grads[i].flat
                write = partial(exchange.reduced, f"reduce_bucket_{i}", flat, op)
                reductions.insert(0, (write, flat))
        return [
            *reductions,
            *gathers,
            *(
                (partial(all_reduced, name, flat, "sum" if name == "norms" else "max"), flat)
                for name, flat in self._shared.items()
            ),
        ]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's."""
        return self.optimizer.param_groups

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for gathers, on the CPU: what was not hidden."""
        return self._weights.waited_s

    @torch.no_grad()
    def step(self) -> None:
        """Updates what this rank owns, and starts the gathers. Collective."""
        self._check_read()
        self.synchronize()
        self._weights.check_place()
        if any(p not in self._names for group in self.param_groups for p in group["params"]):
            raise OptimizerError(
                "the optimizer has parameters that it did not have when this LayerWise was made: "
                "close() it, and make another"
            )
        self._finish()
        due = self._check_every > 0 and self._steps % self._check_every == 0
        if due and not self._early:
            self.check_replicas()
        with self._grads():
            self._updates.step(self._order, self._updated)
        self._steps += 1
        self._learn()
        left = [index for index in self._order if index not in self._weights.pending]
        self._weights.start(left, wait=not self._overlap)
        if due and self._early:  # owners had updated before
            self.check_replicas()

    def zero_grad(self) -> None:
        """Begins a new step: gradients are 0, or None under DistributedDataParallel."""
        if self._reducer is None:
            self.optimizer.zero_grad()
            return
        if self._reducer.going and not self._early:  # this step is left out
            self._reducer.finish()
        self._reducer.zero()

    def synchronize(self) -> None:
        """Returns when no gather is in flight; on CUDA the current stream comes after them all.

        Call it before you read Parameters yourself between `step` and the next forward.
        """
        self._weights.synchronize()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backwards inside only add to the gradients: for all micro-batches but the last."""
        if self._reducer is None:
            raise GradientError("under DistributedDataParallel use its own no_sync()")
        return self._reducer.no_sync()

    def relearn(self) -> None:
        """Forgets the order of the first forward, and how often Parameters were ready.

        Call it on every rank, between steps, before one whose backwards differ (see GradReducer).
        """
        self._weights.needed = {}
        if self._reducer is not None:
            self._reducer.relearn()

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clips the gradients of all ranks together, as torch.nn.utils.clip_grad_norm_ does.

        Gives the norm of all gradients, a scalar of fp64, the same on every rank. Collective; once
        a step, after its last backward.
        """
        if self._early:
            raise OptimizerError(
                "update_under_backward=True has updated before all norms are known"
            )
        norms = self._shared["norms"].zero_()
        with self._grads():
            grads = {param: param.grad for param in self._owned if param.grad is not None}
            for number, param in enumerate(self._params.values()):
                if param in grads:
                    grad = grads[param]
                    kind = torch.promote_types(grad.dtype, torch.float32)
                    norms[number] = torch.linalg.vector_norm(grad, norm_type, dtype=kind)
            self._share("norms")
            total = torch.linalg.vector_norm(norms, norm_type)
            if error_if_nonfinite and not total.isfinite():
                raise GradientError(f"the norm of the gradients is {total.item()}")
            scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
            for grad in grads.values():
                grad.mul_(scale)
        return total

    def state_dict(self) -> dict[str, Any]:
        """The options of all groups, and the state of what this rank owns, by Parameters' names.

        `torch.distributed.checkpoint` saves and loads it as it is, on any number of ranks: each
        saves what it owns, and reads what it owns then. For that, an optimizer that has no state
        yet gets the state that a first step begins with.
        """
        self._check_whole()
        self.synchronize()
        begun = self._begin_state()
        names, state = self._names, self.optimizer.state
        found = {
            "state": {names[p]: dict(state[p]) for p in self._owned if state.get(p)},
            "param_groups": [
                {**group, "params": [names[param] for param in group["params"]]}
                for group in self.param_groups
            ],
        }
        for param in begun:
            state.pop(param, None)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave, then gathers all weights from their owners. Collective.

        OptimizerError for a state that was saved with other owners, which is to be loaded by
        torch.distributed.checkpoint.
        """
        self._check_whole()
        self.synchronize()
        given, names = state_dict["state"], self._names
        owned = [names[param] for param in self._owned if param.requires_grad]
        strange = [name for name in given if name not in {names[param] for param in self._owned}]
        lacking = [name for name in owned if name not in given] if given and self._reducer else []
        if strange or lacking:
            raise OptimizerError(
                f"rank {self._rank} owns other Parameters than those of this state, such as "
                f"{shown([*strange, *lacking])}: it was saved by another rank, or on another "
                "number of them. Save and load it with torch.distributed.checkpoint, which gives "
                "each rank what it owns"
            )
        groups = [[names[param] for param in group["params"]] for group in self.param_groups]
        saved = [sorted(group["params"]) for group in state_dict["param_groups"]]
        if saved != [sorted(group) for group in groups]:
            raise OptimizerError(
                "the state has other groups of Parameters than the optimizer: make it with the "
                "groups that it was saved with"
            )
        numbers = {name: i for i, name in enumerate(name for group in groups for name in group)}
        self.optimizer.load_state_dict(
            {
                "state": {numbers[name]: value for name, value in given.items()},
                "param_groups": [
                    {**group, "params": [numbers[name] for name in own]}
                    for group, own in zip(state_dict["param_groups"], groups, strict=True)
                ],
            }
        )
        self._weights.start(self._order, wait=True)

    @torch.no_grad()
    def check_replicas(self) -> None:
        """Raises ReplicaError unless every rank holds the same bits in all Parameters that the
        optimizer has. Collective; between a step and the next backward.
        """
        self.synchronize()
        hashes, half = self._shared["hashes"], len(self._params)
        own = torch.stack([hash_of(param) for param in self._params.values()])
        hashes[:half], hashes[half:] = own, ~own  # of which the greatest is that of the least
        self._share("hashes")
        wrong = (hashes[:half] != ~hashes[half:]).nonzero().flatten().tolist()
        if wrong:
            names = [*self._params]
            raise ReplicaError(
                f"before step {self._steps} ranks hold different weights in "
                f"{shown([names[number] for number in wrong])} (this is rank {self._rank}): did "
                "a rank write Parameters by itself, or read them while they were gathered?"
            )

    def explain(self) -> str:
        """Who owns what, each bucket, and the Programs of this rank."""
        plan, ranks = self._plan, len(self._plan.buckets[0].bounds) - 1
        costs, held = [0.0] * ranks, [0] * ranks
        for item, owner in zip(self._items, plan.owners, strict=True):
            costs[owner] += item.cost
            held[owner] += item.numel * item.itemsize
        used, laid = sum(i.numel for i in self._items), sum(b.numel for b in plan.buckets)
        lines = [
            f"{len(self._items)} parameters of {ranks} ranks in {len(plan.buckets)} buckets, "
            f"{100 * (laid / used - 1):.1f} % padding",
            *(f"rank {rank}: cost {costs[rank]:.4g}, {held[rank]} bytes" for rank in range(ranks)),
        ]
        for index, bucket in enumerate(plan.buckets):
            lines.append(f"bucket {index}: {bucket.numel} elements")
            for number, start in zip(bucket.items, bucket.starts, strict=True):
                item = self._items[number]
                lines.append(f"    {start}: {item.name}, of rank {plan.owners[number]}")
        texts = [str(executor.program) for executor in self._runs.executors]
        return "\n".join([*lines, *texts])

    def timelines(self) -> list[Timeline]:
        """When each Program ran last, reductions first, then gathers; needs the option `trace`."""
        return [each.timeline() for each in self._runs.executors[: -len(self._shared)]]

    def reset(self) -> None:
        """After a failure, on every rank together: gradients are 0, and nothing is in flight.

        The weights are undefined: load them.
        """
        self._weights.pending.clear()
        self._weights.needed = {}
        self._order, self._steps = list(range(len(self._order))), 0
        if self._reducer is not None:
            self._reducer.reset()
        else:
            self._runs.reset()

    def close(self) -> None:
        """Waits for what is in flight, and takes hooks, thread and process group away."""
        try:
            self.synchronize()
        finally:
            self._weights.close()
            if self._reducer is not None:
                self._reducer.close()
            self._runs.close()

    def __enter__(self) -> LayerWise:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # peers may not come any more
            self._weights.pending.clear()
        self.close()

    @contextlib.contextmanager
    def _grads(self) -> Iterator[None]:
        """Inside, what this rank owns and trains has its gradient, reduced, and nothing else."""
        if self._reducer is not None:
            self._finish()
            owned = () if self._early else [p for p in self._owned if p.requires_grad]
            with self._reducer.as_grads(owned):
                yield
            return
        others = set(self._params.values()) - set(self._owned)
        kept = {param: param.grad for param in others}
        for param in others:
            param.grad = None
        try:
            yield
        finally:
            for param, grad in kept.items():
                param.grad = grad

    def _updated(self, index: int) -> None:
        """Starts the gather of a bucket while others are updated, once the order is known."""
        if self._overlap and self._weights.needed is None:
            self._weights.start([index], wait=False)

    def _finish(self) -> None:
        """Ends the reductions of this step."""
        if self._reducer is not None and not self._reducer.finished:
            self._reducer.finish()

    def _check_whole(self) -> None:
        """Raises OptimizerError where some weights are updated already, and others are not."""
        if self._early and self._reducer is not None and self._reducer.going:
            raise OptimizerError(
                "update_under_backward=True has updated a part of the weights: call step() first"
            )

    def _check_read(self) -> None:
        """Raises GradientError for Parameters that were used while nothing waited for them."""
        if self._reducer is None:
            return
        for index in self._weights.pending:
            for param in filter(self._reducer.came, self._weights.buckets[index].params):
                raise GradientError(
                    f"{self._names[param]} was used while its gather was in flight: the module "
                    "that holds it was not called. Name the class of the module that reads it in "
                    "`units`, or call synchronize() first"
                )

    def _learn(self) -> None:
        """In the first step, or after `relearn`: the order of gathers, as rank 0 needed them."""
        if self._weights.needed is None:
            return
        order, needed = self._shared["order"].zero_(), self._weights.needed
        if self._rank == 0:
            rest = [index for index in self._order if index not in needed]
            order.copy_(torch.tensor([*needed, *rest]))
        self._weights.needed = None
        self._share("order")
        self._order = order.tolist()

    def _share(self, name: str) -> None:
        """Runs one of the Programs of `_shared`, which all ranks then have the result of."""
        index = len(self._runs.executors) - len(self._shared) + list(self._shared).index(name)
        self._runs.start(index)
        self._runs.wait(index)

    @torch.no_grad()
    def _begin_state(self) -> list[nn.Parameter]:
        """Makes state of what is owned, if there is none, by a step whose weights are put back;
        gives the Parameters that have such state now.
        """
        fresh = [param for param in self._owned if param.requires_grad]
        if any(self.optimizer.state.get(param) for param in fresh):
            return []
        weights, grads = [param.clone() for param in fresh], [param.grad for param in fresh]
        try:
            for param in fresh:
                param.grad = torch.zeros_like(param)
            self.optimizer.step()
        finally:
            for param, weight, grad in zip(fresh, weights, grads, strict=True):
                param.copy_(weight)
                param.grad = grad
        for param in fresh:
            if "step" in self.optimizer.state[param]:
                self.optimizer.state[param]["step"] *= 0
        return fresh
