"""Data parallelism in which each rank updates whole parameters of its own, and gathers the rest.

Any torch optimizer will do, also one that needs whole matrices. A parameter's owner holds its
state, and nobody else does (as in ZeRO-1). What is sharded by tensor parallelism has as owner a
group of ranks. What `fully_shard` has sharded over the data-parallel ranks stays so, with its
state: of a matrix the owner makes the update orthogonal (shard_pipeline.py).

Note [A step]
    Buckets hold parameters that follow one another in the model. Each has two flat buffers with one
    layout (ownership.py), one of main gradients and one that the Parameters are views of, and two
    Programs: a reduce-scatter and what brings gradients to owners, and what brings weights to
    shards and an all-gather. Both run in place, so that nothing is allocated for them. The gathers
    of a step begin in the order of the model, and updates go in that order too (Note [In order]);
    modules wait as they come to run (Note [What waits]), in whatever order. Where matrices have
    homes, what brings them there and back follows the reductions and precedes the gathers
    (tensor_homes.py).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from interlace.comm.teams import group_of_mesh
from interlace.cost import Timeline
from interlace.errors import (
    BackendError,
    GradientError,
    OptimizerError,
    OptionError,
    ReplicaError,
    UnsupportedError,
    refuse_removed,
)
from interlace.optim.adam.state import local
from interlace.optim.bucket_runs import BucketExchange, BucketRuns, Write, all_reduced, beside
from interlace.optim.grad_reducer import Bucket, GradReducer, check_reduction, laid_out, lent
from interlace.optim.layer_wise.bucket_update import UpdatesInOrder
from interlace.optim.layer_wise.flat_weights import FlatWeights, shown
from interlace.optim.layer_wise.owned_state import load, saved
from interlace.optim.layer_wise.shard_pipeline import ShardPipeline
from interlace.optim.layer_wise.tensor_homes import TensorHomes, homes_of
from interlace.optim.layer_wise.update_plan import (
    UpdatePlan,
    hash_of,
    is_sharded,
    lies_over,
    like,
    other_shards,
    parameters_of,
    planned,
    uncompiled,
)
from interlace.optim.loading import ParamGroup, State
from interlace.optim.untraced import eager
from interlace.options import Options
from interlace.runtime import Executor

log = logging.getLogger(__name__)
Calls = dict[int, Callable[[], None]]
"""Functions by the number of a run."""
REMOVED = {
    "shards": "make Parameters that differ from rank to rank DTensors, by DTensor.from_local",
    "split_parts": "owners have whole Parameters: make experts Parameters of their own, or shard "
    "them over tensor or expert parallelism",
    "update_under_backward": "step() updates, and gathers run under that and the next forward, "
    "which is faster where copy engines gather",
    "exchange_under_backward": "step() exchanges the shards of fully_shard, under the updates",
    "split_matrices": "owners have whole matrices: shard large ones by tensor parallelism, where "
    "each has one home among the ranks of its owner",
}
"""Options of former releases, and what serves instead."""


LARGE = 4
"""`bucket_bytes` that a slot of weights may have."""


class LayerWise:
    """Gives each parameter an owner, one rank of `mesh`, which alone updates it.

    Gradients are summed in place, reduced to the owners under the backward, and `.grad` is None
    between steps; a Parameter that was not used has the gradient 0. Owners update, and gathers of
    the weights run under that and the next forward. Every rank of the job makes its own together.
    The Parameters become views of flat buffers; frozen ones may be unfrozen later. The how-to
    (docs/how-to/layer-wise.md) says what moves, and by what.

    Parameters may be DTensors on one other mesh of one dimension (tensor or expert parallelism).
    Those that the optimizer updates whole (its `needs_whole(parameter)`; without that, all but
    those of elementwise optimizers) have a home among the ranks of their owner, and in
    `param_groups` a Parameter of the whole shape stands in their place, until `close()`.

    Or Parameters are those of `fully_shard`, sharded over the ranks of `mesh`, maybe by tensor
    parallelism before, and maybe replicated over others (HSDP); gradients are then reduced already.
    `optimizer` is then `interlace.optim.Muon` or `torch.optim.Muon`. With `batched=False`, weights
    have the bits of the optimizer on whole parameters in one process, given the same gradients.

    Args:
        optimizer: updates each parameter by itself. It has updated nothing yet, or has state for
            all parameters; one that holds other optimizers updates all at once.
        module: holds all these parameters. Every rank of `mesh` has it alike; a gather at the start
            makes weights equal.
        mesh: one dimension, whose ranks all do the same.
        overlap_param_gather: False has `step` wait for the gathers (under `fully_shard`, for each
            exchange), with the same bits.
        bucket_bytes: bounds the weights of a bucket of more than one parameter; under `fully_shard`
            a rank's shards of one, in bfloat16.
        main_grad_dtype: of the summed gradients; None: that of each Parameter.
        op: "mean" or "sum", over the ranks.
        check_replicas_every: with N, every N-th step begins with `check_replicas`.
        options: `timeout_s` bounds every wait for a peer, `overlap=False` reduces in `step` only,
            `trace` keeps `timelines()`. On GPUs `transport="nccl"` has NCCL move weights too, which
            copy engines move by default; with "peer" ranks read each other's slots for gradients
            as well, and sums go in rank order (GPUs that ranks share need that).

    Raises:
        OptimizerError, UnsupportedError: parameters, the optimizer or the mesh cannot be served.
        OptionError: an argument of a former release.
        PeerError, CommTimeoutError: from a later call, a peer failed or is late. The message names
            the bucket and the module that waited; the weights are undefined.

    Examples:
        >>> muon = torch.optim.Muon(layer.parameters(), lr=0.02)
        >>> with LayerWise(muon, layer, mesh) as optimizer:
        ...     layer(x).square().mean().backward()  # gradients go to the owners
        ...     norm = optimizer.clip_grad_norm_(1.0)
        ...     optimizer.step()  # owners update; gathers run under the next forward
        ...     optimizer.zero_grad()
    """

    def __init__(
        self,
        optimizer: Optimizer,
        module: nn.Module,
        mesh: DeviceMesh,
        *,
        overlap_param_gather: bool = True,
        bucket_bytes: int = 64 << 20,
        main_grad_dtype: torch.dtype | None = torch.float32,
        op: Literal["mean", "sum"] = "mean",
        check_replicas_every: int = 0,
        options: Options | None = None,
        **removed: object,
    ) -> None:
        refuse_removed("LayerWise", removed, REMOVED)
        if mesh.ndim != 1:
            raise OptimizerError(
                f"the mesh has {mesh.ndim} dimensions: give one of them, such as mesh['dp']"
            )
        group = group_of_mesh(mesh)
        check_reduction(op, bucket_bytes, main_grad_dtype)
        self.optimizer, self.module = optimizer, module
        chosen = options or Options()
        params = parameters_of(optimizer, module)
        self._overlap, self._check_every = overlap_param_gather, check_replicas_every
        self._steps = 0
        if isinstance(uncompiled(module), DistributedDataParallel):
            raise UnsupportedError(
                "the module is wrapped in DistributedDataParallel, whose sums all ranks have. fix: "
                "give LayerWise the module without it: it reduces gradients to their owners"
            )
        plan = planned(optimizer, params, mesh, bucket_bytes)
        self._plan, self._pipeline = plan, None
        self._other_shards = other_shards(plan.params, mesh) if plan.in_place else {}
        self._apart = [
            is_sharded(param) and (not plan.in_place or lies_over(param, mesh))
            for param in plan.params
        ]
        """True for each Parameter of which the ranks of `norms` hold different parts."""
        if plan.in_place:
            overlap = chosen.overlap and overlap_param_gather
            self._pipeline = ShardPipeline(optimizer, params, mesh, bucket_bytes, overlap)
        weights, grads = buckets_of(plan, None), buckets_of(plan, main_grad_dtype)
        places, device = len(params) * plan.shards, plan.params[0].device
        self._shared = {
            "norms": torch.zeros(places, dtype=torch.float64, device=device),
            "hashes": torch.zeros(2 * places, dtype=torch.int64, device=device),
        }
        with contextlib.ExitStack() as made:  # undone here if something fails, else by close()
            self._homes = homes_of(plan, weights, grads, self._shared, chosen, made)
            if self._homes is not None:
                made.callback(self._homes.leave, optimizer)
                self._homes.enter(optimizer)
            self._take_parts(grads)
            self._updates = self._pipeline or UpdatesInOrder(optimizer, weights, self._owned)
            before, then = calls_around(weights, grads, [*self._shared], self._homes)

            def runs_by(copies: bool) -> BucketRuns:
                most = LARGE * bucket_bytes if copies else 0
                runs = runs_of(plan, weights, grads, op, chosen.transport, most, self._shared)
                return BucketRuns(runs, group, chosen, before=before, then=then)

            self._runs = by_copies_if_possible(runs_by, chosen.transport, device)
            made.callback(self._runs.close)
            ranks = self._pipeline.ranks if self._pipeline is not None else []
            own = device.type == "cuda" and ranks == sorted(dist.get_process_group_ranks(group))
            apart = made.enter_context(beside([] if own else ranks, device))  # all ranks of the job
            if self._pipeline is not None:
                exchanges = self._pipeline.programs
                self._pipeline.runs = BucketRuns(exchanges, apart or group, chosen, apart=True)
                made.callback(self._pipeline.runs.close)
            self._reducer = None
            if grads:
                self._reducer = GradReducer(grads[::-1], self._runs, chosen)
                made.callback(self._reducer.close)
            self._weights = FlatWeights(module, weights, self._runs, len(grads), self._names)
            made.callback(self._weights.close)
            for param in set(optimizer.state) - set(self._owned):
                del optimizer.state[param]
            self._gather_loaded()
            self._made = made.pop_all()

    def _take_parts(self, grads: Sequence[Bucket]) -> None:
        """Notes what the optimizer updates, and by which gradients if LayerWise reduces them."""
        plan, homes = self._plan, self._homes
        whole, homed = ({}, {}) if homes is None else (homes.whole, homes.grads)
        self._acting = [whole.get(param, param) for param in plan.params]
        """Tensor that is updated for each Parameter: without memory if that is elsewhere."""
        self._names = {
            **dict(zip(plan.params, plan.names, strict=True)),
            **dict(zip(self._acting, plan.names, strict=True)),
        }
        pairs = enumerate(zip(self._acting, plan.params, strict=True))
        self._owned = {acting: param for number, (acting, param) in pairs if plan.is_mine(number)}
        """Tensors that this rank updates, each with its Parameter."""
        main = {p: v for each in grads for p, v in zip(each.params, each.views, strict=True)}
        main |= homed
        self._main_grads = {a: like(a, main[p]) for a, p in self._owned.items() if p in main}

    def _gather_loaded(self) -> None:
        """Gathers weights that were written from outside; a step on the way is left out."""
        self._finish_going()
        if self._homes is not None:
            self._homes.bring_all_weights()
        self._weights.start_rest(wait=True)

    @property
    def param_groups(self) -> list[ParamGroup]:
        """The optimizer's."""
        return self.optimizer.param_groups

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for gathers, on the CPU: what was not hidden."""
        return self._weights.waited_s

    @eager
    @torch.no_grad()
    def step(self) -> None:
        """Updates what this rank owns, and starts the gathers. Collective.

        Raises:
            OptimizerError: the optimizer got parameters since this was made.
            ReplicaError: as `check_replicas`, with `check_replicas_every`.
        """
        self.synchronize()
        self._weights.check_place()
        if any(p not in self._names for group in self.param_groups for p in group["params"]):
            raise OptimizerError(
                "the optimizer has parameters that it did not have when this LayerWise was made: "
                "close() it, and make another"
            )
        self._finish()
        if self._check_every > 0 and self._steps % self._check_every == 0:
            self.check_replicas()
        if self._homes is not None:
            self._homes.bring_all_weights()
        grads = self._main_grads.items()
        with lent({p: g for p, g in grads if self._owned[p].requires_grad}):
            self._updates.step(self._updated)
        self._steps += 1
        self._weights.start_rest(wait=not self._overlap)

    @eager
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Sets gradients to 0; under `fully_shard`, to None, unless `set_to_none` is False."""
        if self._reducer is None:
            self.optimizer.zero_grad(set_to_none)
            return
        self._finish_going()  # this step is left out
        self._reducer.zero()

    @eager
    def synchronize(self) -> None:
        """Returns when no gather is in flight; on CUDA the current stream comes after them all.

        Call it before you read Parameters yourself between `step` and the next forward.
        """
        self._weights.synchronize()

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A context whose backwards only add to the gradients: for all micro-batches but the last.

        Raises:
            GradientError: `fully_shard` reduces these gradients.
        """
        if self._reducer is None:
            raise GradientError(
                "LayerWise does not reduce these gradients: use set_requires_gradient_sync() of "
                "fully_shard"
            )
        return self._reducer.no_sync()

    def relearn(self) -> NoReturn:
        """A method of a former release."""
        raise OptionError(
            "LayerWise learns no number of backwards any more. fix: leave relearn() out, and run "
            "all backwards of a step but the last in no_sync()"
        )

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """The norm of all ranks' gradients, which it clips together to `max_norm`.

        `norm_type` and `error_if_nonfinite` are as of the function `clip_grad_norm_`.
        """
        return clip_grad_norm_([self], max_norm, norm_type, error_if_nonfinite)

    @eager
    @torch.no_grad()
    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of order `norm_type` of the gradients of all ranks. Collective."""
        norms, grads = self._shared["norms"].zero_(), self._reduced_grads()
        shard, shards = self._plan.shard, self._plan.shards
        own = norms.new_zeros(len(self._acting))
        for number, acting in enumerate(self._acting):
            if (grad := grads.get(acting)) is not None:
                own[number] = torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64)
        for group, numbers in self._other_shards.items():
            places = [*numbers]
            parts = norms.new_empty(group.size() * len(places))
            dist.all_gather_into_tensor(parts, own[places], group)
            parts = parts.view(group.size(), len(places))
            own[places] = torch.linalg.vector_norm(parts, norm_type, dim=0)
        for number, apart in enumerate(self._apart):
            if shard == 0 or apart:
                norms[number * shards + shard] = own[number]
        self._share("norms")
        return torch.linalg.vector_norm(norms, norm_type)

    @eager
    @torch.no_grad()
    def scale_grads(self, scale: Tensor) -> None:
        """Multiplies the gradients of all ranks by `scale`, one number. Collective."""
        for grad in self._reduced_grads().values():
            grad.mul_(scale)

    def _reduced_grads(self) -> dict[nn.Parameter, Tensor]:
        """This rank's part of the gradients by which it updates."""
        self._finish()
        if self._reducer is not None:
            grads = self._main_grads.items()
            return {p: local(g) for p, g in grads if self._owned[p].requires_grad}
        return {param: local(param.grad) for param in self._owned if param.grad is not None}

    def state_dict(self) -> State:
        """The options of all groups, and the state of what this rank owns, by Parameters' names.

        `torch.distributed.checkpoint` saves and loads it as it is, on any number of ranks: each
        saves what it owns, and reads what it owns then. For that, an optimizer that has no state
        yet gets the state that a first step begins with.
        """
        self.synchronize()
        return saved(self.optimizer, self._owned, self._names)

    def load_state_dict(self, state_dict: State) -> None:
        """Loads the `state_dict` of before, then gathers all weights from their owners. Collective.

        Raises:
            OptimizerError: the state was saved with other owners: load it by
                torch.distributed.checkpoint.
        """
        self.synchronize()
        complete = self._reducer is not None
        load(
            self.optimizer, self._owned, self._names, state_dict, self._plan.rank, complete=complete
        )
        self._gather_loaded()

    @eager
    @torch.no_grad()
    def check_replicas(self) -> None:
        """Compares all Parameters of the optimizer with those of the other ranks, bit by bit.

        Shards are compared with those of their own place. Collective; between a step and the next
        backward.

        Raises:
            ReplicaError: ranks hold different weights; the message names them.
        """
        self.synchronize()
        names, shard, shards = self._plan.names, self._plan.shard, self._plan.shards
        hashes = self._shared["hashes"].view(2, len(names), shards)
        hashes.fill_(torch.iinfo(torch.int64).min)
        for number, param in enumerate(self._plan.params):
            own, held = hash_of(param), [shard] if is_sharded(param) else range(shards)
            for place in held:  # a hash, and what has its least for its greatest
                hashes[0, number, place], hashes[1, number, place] = own, ~own
        self._share("hashes")
        wrong = (hashes[0] != ~hashes[1]).any(1).nonzero().flatten().tolist()
        if wrong:
            raise ReplicaError(
                f"before step {self._steps} ranks hold different weights in "
                f"{shown([names[number] for number in wrong])} (this is rank {self._plan.rank}): "
                "did a rank write Parameters by itself, or read them while they were gathered?"
            )

    def explain(self) -> str:
        """Returns a text: who owns what, each bucket, and the Programs of this rank."""
        executors = [*self._executors(), *(self._homes.executors if self._homes else ())]
        lines = (self._pipeline or self._plan).explain()
        return "\n".join([*lines, *(str(each.program) for each in executors)])

    def timelines(self) -> list[Timeline]:
        """The measured timeline of each Program's last run, reductions first, then gathers.

        Raises:
            ExecutorError: it was made without the option `trace`.
        """
        return [each.timeline() for each in self._executors()[: -len(self._shared)]]

    def _executors(self) -> list[Executor]:
        """Executors of exchanges, or of reductions and gathers, and then those of `_shared`."""
        pipeline = self._pipeline.runs.executors if self._pipeline else []
        return [*pipeline, *self._runs.executors]

    def reset(self) -> None:
        """After a failure, on every rank together: gradients are 0, and nothing is in flight.

        The weights are undefined: load them.
        """
        self._weights.drop()
        self._steps = 0
        if self._reducer is not None:
            self._reducer.reset()
        else:
            self._runs.reset()
        if self._pipeline is not None:
            self._pipeline.runs.reset()
        if self._homes is not None:
            self._homes.reset()

    def close(self) -> None:
        """Waits for what is in flight, and takes hooks, thread and process group away."""
        self.__exit__(None)

    def __enter__(self) -> LayerWise:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._made:
            if kind is None:
                self._finish_going()
                self.synchronize()
            else:  # peers may not come any more
                self._weights.drop()

    def _updated(self, index: int) -> None:
        """Starts the gather of a bucket while others are updated, once the order is known."""
        if self._overlap:
            self._weights.start([index], wait=False)

    def _finish(self) -> None:
        """Ends the reductions of this step."""
        if self._reducer is not None:
            self._reducer.finish()

    def _finish_going(self) -> None:
        """The same, if any began."""
        if self._reducer is not None and self._reducer.going:
            self._reducer.finish()

    def _share(self, name: str) -> None:
        """Runs one of the Programs of `_shared`, which all ranks then have the result of."""
        index = len(self._runs.executors) - len(self._shared) + list(self._shared).index(name)
        self._runs.start(index)
        self._runs.wait(index)


@eager
@torch.no_grad()
def clip_grad_norm_(
    optimizers: Sequence[LayerWise],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clips the gradients of several optimizers together, as torch.nn.utils.clip_grad_norm_ does.

    Collective; once a step, after its last backward.

    Args:
        optimizers: such as one for each kind of Parameters of a model.
        max_norm: the largest norm that is left.
        norm_type: the order of the norm.
        error_if_nonfinite: raises where the norm is infinite or NaN; the host waits for it.

    Returns:
        The norm of all gradients before, a scalar of fp64, the same on every rank.

    Raises:
        GradientError: the norm is not finite, with `error_if_nonfinite`.
    """
    norms = [optimizer.grad_norm(norm_type) for optimizer in optimizers]
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise GradientError(f"the norm of the gradients is {total.item()}")
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for optimizer in optimizers:
        optimizer.scale_grads(scale)
    return total


# -- the runs of a step ---------------------------------------------------------------------------


def buckets_of(plan: UpdatePlan, dtype: torch.dtype | None) -> list[Bucket]:
    """Buffers for all buckets, of that type or of the parameters' own."""
    buckets: list[Bucket] = []
    for bucket in plan.ownership.buckets:
        params = [plan.params[number] for number in bucket.items]
        buckets.append(laid_out(params, bucket.starts, bucket.numel, dtype or params[0].dtype))
    return buckets


def runs_of(
    plan: UpdatePlan,
    weights: Sequence[Bucket],
    grads: Sequence[Bucket],
    op: str,
    transport: str,
    most: int,
    shared: Mapping[str, Tensor],
) -> list[tuple[Write, Tensor]]:
    """The Programs with their buffers; `grads` is empty where gradients come reduced. Weights of a
    bucket of which no owner has more than `most` bytes are copied from slots of their owners, all
    others too where `transport` has no all-gather in place ("peer").
    """
    peer = transport == "peer"
    nbytes = [
        b.largest * w.flat.itemsize for b, w in zip(plan.ownership.buckets, weights, strict=True)
    ]
    slot_bytes = max((size for size in nbytes if peer or size <= most), default=0)
    reductions: list[tuple[Write, Tensor]] = []
    gathers: list[tuple[Write, Tensor]] = []
    for i, bucket in enumerate(plan.ownership.buckets):
        about = shown([plan.names[number] for number in bucket.items])
        copies = peer or nbytes[i] <= most
        exchange = BucketExchange(bucket, about, peer, copies, slot_bytes)
        flat = weights[i].flat
        gathers.append((partial(exchange.gathered, f"gather_bucket_{i}", flat), flat))
        if grads:
            flat = grads[i].flat
            write = partial(exchange.reduced, f"reduce_bucket_{i}", flat, op)
            reductions.insert(0, (write, flat))
    reduces = {name: "sum" if name == "norms" else "max" for name in shared}
    return [
        *reductions,
        *gathers,
        *((partial(all_reduced, name, flat, reduces[name]), flat) for name, flat in shared.items()),
    ]


def by_copies_if_possible(
    make: Callable[[bool], BucketRuns], transport: str, device: torch.device
) -> BucketRuns:
    """The runs with weights copied from slots of their owners (`make(True)`) where the transport is
    "peer", or it is "auto" on GPUs whose memory all ranks can map; else by all-gathers.
    """
    if transport == "peer":
        return make(True)
    if transport == "auto" and device.type == "cuda":
        try:
            return make(True)
        except BackendError as error:  # on every rank: one of them cannot share its memory
            log.info("LayerWise gathers weights by NCCL, not by copies: %s", error)
    return make(False)


def calls_around(
    weights: Sequence[Bucket],
    grads: Sequence[Bucket],
    shared: Sequence[str],
    homes: TensorHomes | None,
) -> tuple[Calls, Calls]:
    """Calls that precede runs, and calls that follow them: moves to homes and back."""
    if homes is None:
        return {}, {}
    count = len(grads)
    before: Calls = {count + i: partial(homes.run, "weights_to_shards", i) for i in range(count)}
    then: Calls = {count - 1 - i: partial(homes.run, "gradients_to_homes", i) for i in range(count)}
    for number, name in enumerate(shared):
        then[count + len(weights) + number] = partial(homes.run, "share", name)
    return before, then
