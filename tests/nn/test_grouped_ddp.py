"""GroupedLinear under torch's own DistributedDataParallel, on real processes.

The reference is a loop of Linears under DDP of its own. On two ranks the mean is exact in any
order, so that the bits must be equal; on four, DDP's buckets decide the order of the sum, and
numbers are chosen so that no sum rounds.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.optim.reducing import Looped, batch, grads_alike, loss_of, mixture
from tests.support.pool import Pool
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

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


class Twice(nn.Module):
    """One layer used twice, one of two experts' layers that is not used at all, by checkpoints."""

    def __init__(self, kind: str, reentrant: bool) -> None:
        super().__init__()
        self.shared = GroupedLinear(4, 16, 16)
        self.unused = GroupedLinear(4, 16, 16)
        self.kind, self.reentrant = kind, reentrant

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        if self.kind == "checkpoint":
            made = checkpoint(self.shared, x, sizes, use_reentrant=self.reentrant)
            assert isinstance(made, torch.Tensor)
            return made
        return self.shared(x, sizes) + self.shared(x + 1, sizes)


def whole(model: nn.Module, draw: torch.Generator) -> None:
    """Whole numbers, whose sums are exact in any order."""
    for param in model.parameters():
        param.data.copy_(torch.randint(-2, 3, param.shape, generator=draw))


def exact(seed: int, kind: str, reentrant: bool) -> list[str]:
    """Gradients against those of all ranks' data in one process, exactly."""
    draw = torch.Generator().manual_seed(seed)
    model, reference = Twice(kind, reentrant), Twice(kind, False)
    whole(model, draw)
    reference.load_state_dict(model.state_dict())
    attach(model)
    unused = kind == "tied"  # with reentrant checkpoints DDP cannot look for them
    if not unused:
        model.unused.requires_grad_(False)
    parallel = DistributedDataParallel(
        model, gradient_as_bucket_view=True, find_unused_parameters=unused
    )
    world, wrong = dist.get_world_size(), []
    for step in range(3):
        parallel.zero_grad(set_to_none=False)
        reference.zero_grad()
        for micro in range(2):
            xs = torch.randint(-3, 4, (world, 12, 16), generator=draw).float()
            sizes = torch.tensor([[3, 0, 7, 2], [12, 0, 0, 0], [0, 4, 4, 4], [1, 2, 3, 6]])[:world]
            for x, size in zip(xs, sizes, strict=True):
                reference(x, size).sum().backward()
            with parallel.no_sync() if micro == 0 else nullcontext():
                x = xs[dist.get_rank()].clone().requires_grad_()
                parallel(x, sizes[dist.get_rank()]).sum().backward()
        for name in ("weight", "bias"):
            found = getattr(model.shared, name).grad
            wanted = getattr(reference.shared, name).grad / world
            if not torch.equal(found, wanted):
                wrong.append(f"step {step}, {name}: off by {(found - wanted).abs().max():g}")
        rest = model.unused.weight.grad
        if rest is not None and rest.any():
            wrong.append("an expert that nobody used has a gradient")
    return wrong


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    ("kind", "reentrant"), [("tied", False), ("checkpoint", False), ("checkpoint", True)]
)
def test_tied_unused_and_recomputed_layers(
    pool: Pool, kind: str, reentrant: bool, world: int, seed: int
) -> None:
    assert pool(world).run(exact, seed, kind, reentrant) == [[]] * world
