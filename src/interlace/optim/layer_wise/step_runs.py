"""The runs of a LayerWise step: what they are of, and what precedes and follows each.

    runs = runs_of(plan, weights, grads, op, "auto", False, shared)
    before, then = calls_around(weights, grads, shared, homes)
    runs = BucketRuns(runs, group, options, apart=True, before=before, then=then)

First come the reductions in the order of backward, then the gathers in that of the model, and then
the all-reduces of `shared`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from interlace.errors import BackendError
from interlace.optim.bucket_runs import BucketExchange, BucketRuns, Write, all_reduced
from interlace.optim.grad_reducer import Bucket, laid_out
from interlace.optim.layer_wise.flat_weights import shown
from interlace.optim.layer_wise.tensor_homes import TensorHomes
from interlace.optim.layer_wise.update_plan import UpdatePlan

log = logging.getLogger(__name__)
Calls = dict[int, Callable[[], None]]
"""By the number of a run."""


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
    copies: bool,
    shared: Mapping[str, Tensor],
) -> list[tuple[Write, Tensor]]:
    """The Programs with their buffers; `grads` is empty where gradients come reduced. `copies`:
    weights are copied from their owners' memory.
    """
    peer = transport == "peer"
    reductions: list[tuple[Write, Tensor]] = []
    gathers: list[tuple[Write, Tensor]] = []
    for i, bucket in enumerate(plan.ownership.buckets):
        about = shown([plan.names[number] for number in bucket.items])
        exchange, flat = BucketExchange(bucket, about, peer, copies), weights[i].flat
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
    """The runs with weights copied from their owners' memory (`make(True)`) where the transport is
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
    """What precedes runs, and what follows them: moves to homes and back."""
    if homes is None:
        return {}, {}
    count = len(grads)
    before: Calls = {count + i: partial(homes.give_back, i) for i in range(count)}
    then: Calls = {count - 1 - i: partial(homes.bring_grads, i) for i in range(count)}
    for number, name in enumerate(shared):
        then[count + len(weights) + number] = partial(homes.share, name)
    return before, then
