"""GroupedLinear under torch's own DistributedDataParallel, on real processes.

The reference is a loop of Linears under DDP of its own. On two ranks the mean is exact in any
order, so that the bits must be equal.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tests.optim.reducing import Looped, batch, grads_alike, loss_of, mixture
from tests.support.pool import Pool
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from interlace.nn import GroupedLinear
from interlace.optim import GradAccumulator

MICRO, STEPS = 3, 3


def attach(model: nn.Module) -> list[GroupedLinear]:
    layers = [layer for layer in model.modules() if isinstance(layer, GroupedLinear)]
    for layer in layers:
        if layer.weight.requires_grad:
            layer.held = GradAccumulator(layer.weight)  # type: ignore[assignment]
    return layers


def train(seed: int, frozen: str, none: bool, as_view: bool, unused: bool) -> list[str]:
    """Steps of micro-batches and an optimizer; what differs from the loop's, at every step."""
    model = mixture(seed)
    looped = Looped(model)
    for name in frozen.split():
        for param in model.get_submodule(name).parameters():
            param.requires_grad_(False)
        for param in looped.get_submodule(name).parameters():
            param.requires_grad_(False)
    attach(model)
    more: Any = {"gradient_as_bucket_view": as_view, "find_unused_parameters": unused}
    pair = [DistributedDataParallel(each, **more) for each in (model, looped)]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.5) for each in pair]
    wrong: list[str] = []
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=none)
        for micro in range(MICRO):
            data = batch(seed, step * MICRO + micro)
            for each in pair:
                with ExitStack() as stack:
                    if micro < MICRO - 1:
                        stack.enter_context(each.no_sync())
                    loss_of(each, *data).backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        wrong += [f"step {step}: {each}" for each in grads_alike(model, looped, found)]
        for optimizer in optimizers:
            optimizer.step()
    return wrong


@pytest.mark.parametrize("frozen", ["", "down", "up inner"])
@pytest.mark.parametrize("none", [False, True])
def test_has_the_bits_of_a_loop_under_ddp(pool: Pool, frozen: str, none: bool, seed: int) -> None:
    assert pool(2).run(train, seed, frozen, none, True, False) == [[], []]


@pytest.mark.parametrize(("as_view", "unused"), [(False, False), (True, True), (False, True)])
def test_under_other_settings_of_ddp(pool: Pool, as_view: bool, unused: bool, seed: int) -> None:
    assert pool(2).run(train, seed, "", False, as_view, unused) == [[], []]


def in_place(seed: int) -> list[bool]:
    """Whether the weight's gradient was added in the bucket itself, in the later steps."""
    model = mixture(seed)
    attach(model)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    kept = []
    for step in range(4):
        parallel.zero_grad(set_to_none=False)
        before = model.down.weight.grad
        loss_of(parallel, *batch(seed, step)).backward()
        after = model.down.weight.grad
        assert after is not None
        assert after.any()
        kept.append(before is after)
    return kept


def test_the_bucket_is_the_buffer(pool: Pool, seed: int) -> None:
    """From the third step on: before, DDP makes `.grad` a view, then fills its buckets anew."""
    for kept in pool(2).run(in_place, seed):
        assert kept[2:] == [True, True]
