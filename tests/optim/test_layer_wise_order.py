"""A step of LayerWise updates and gathers in order, which some optimizers must not see."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.optim.layerwise import SMALL, before_ops, differing, mesh, model, train, weights
from tests.support.pool import Pool

from interlace.ir import Collective
from interlace.optim import LayerWise


class Counting(torch.optim.Optimizer):
    """SGD whose rate goes down with a count of steps that its group has."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] / group["count"])


def counts(seed: int) -> list[Any]:
    """What differs from SGD by those rates, and the count after 4 steps."""
    found, wanted = model(seed), model(seed)
    with (
        LayerWise(Counting(found.parameters()), found, mesh(), bucket_bytes=SMALL) as ours,
        LayerWise(torch.optim.SGD(wanted.parameters()), wanted, mesh(), bucket_bytes=SMALL) as sgd,
    ):
        train(ours, found, seed, range(4), clip=None)
        for step in range(4):
            sgd.param_groups[0]["lr"] = 0.1 / (step + 1)
            train(sgd, wanted, seed, range(step, step + 1), clip=None)
        return [differing(weights(found), weights(wanted)), ours.param_groups[0]["count"]]


def test_an_optimizer_that_counts_steps_makes_one_step(pool: Pool, seed: int) -> None:
    assert pool(2).run(counts, seed) == [[[], 4]] * 2


class Scaled(torch.optim.SGD):
    """SGD times a factor that is an attribute."""

    factor = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad, alpha=-group["lr"] * self.factor)


def scaled(seed: int) -> list[str]:
    """What a step changes whose factor is set to 0."""
    module = model(seed)
    optimizer = Scaled(module.parameters(), lr=0.1)
    with LayerWise(optimizer, module, mesh(), bucket_bytes=SMALL) as optimizing:
        train(optimizing, module, seed, range(1))
        before = weights(module)
        optimizer.factor = 0.0
        train(optimizing, module, seed, range(1, 2))
        return differing(weights(module), before)


def test_attributes_of_the_optimizer_may_be_set_later(pool: Pool, seed: int) -> None:
    assert pool(2).run(scaled, seed) == [[], []]


def has_grads(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def hooked(seed: int) -> list[Any]:
    """Hooks of the optimizer run once a step, before and after all updates, and see gradients;
    and what differs."""
    ends, told = [], []
    for overlap in (True, False):
        module = model(seed)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for hook in (optimizer.register_step_pre_hook, optimizer.register_step_post_hook):
            hook(lambda each, *_: told.append((bool(each.state), has_grads(each))))
        with LayerWise(
            optimizer, module, mesh(), bucket_bytes=SMALL, overlap_param_gather=overlap
        ) as optimizing:
            train(optimizing, module, seed, range(2))
        ends.append(weights(module))
    return [differing(*ends), told]


def test_hooks_of_the_optimizer_run_once_a_step(pool: Pool, seed: int) -> None:
    seen = [(state, True) for state in (False, True, True, True)]
    assert pool(2).run(hooked, seed) == [[[], seen * 2]] * 2


def under_updates(seed: int) -> list[bool]:
    """Whether the first gather begins while an update of the last bucket waits for that."""
    module, begun, told = model(seed), threading.Event(), []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    inner = torch.optim.SGD.step

    def begin(rank: int, index: int, op: Any) -> None:
        if "mixer" in op.loc.module and isinstance(op, Collective) and op.kind == "all_gather":
            begun.set()

    def step(self: Any, closure: Any = None) -> None:
        params = {p for group in self.param_groups for p in group["params"]}
        if not {module.head.weight, module.head.bias}.isdisjoint(params) and len(params) < 18:
            told.append(begun.wait(15))
        inner(self, closure)

    with before_ops(begin):
        optimizing = LayerWise(optimizer, module, mesh(), bucket_bytes=SMALL)
    with optimizing, pytest.MonkeyPatch.context() as patch:
        train(optimizing, module, seed, range(1))  # which finds the order
        patch.setattr(torch.optim.SGD, "step", step)
        for number in range(1, 4):
            begun.clear()
            train(optimizing, module, seed, range(number, number + 1))
    return told


def test_the_first_gather_runs_under_updates(pool: Pool, seed: int) -> None:
    told = pool(2).run(under_updates, seed)
    assert [True] * 3 in told
    assert all(each in ([True] * 3, []) for each in told)
