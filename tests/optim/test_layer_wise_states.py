"""States and steps of LayerWise that are out of the ordinary: what is saved, left out, refused."""

from __future__ import annotations

import copy
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.optim.layerwise import (
    Blocks,
    batch,
    differing,
    layer_wise,
    mesh,
    model,
    slowly,
    train,
    weights,
)
from tests.optim.test_layer_wise_order import Counting
from tests.support.pool import Pool
from torch import nn

from interlace.errors import BackendError, OptimizerError, OptionError
from interlace.optim import AdamW, LayerWise
from interlace.optim.layer_wise.optimizer import REMOVED
from interlace.options import Options


def backward(module: nn.Module, seed: int, step: int = 0) -> None:
    module(batch(seed, step)).square().mean().backward()


def saved_early(seed: int) -> list[str]:
    """`state_dict()` before the first step leaves weights and training as they are."""
    ends: list[dict[str, torch.Tensor]] = []
    for early in (True, False):
        module = model(seed)
        before = copy.deepcopy(weights(module))
        optimizer = torch.optim.NAdam(module.parameters(), lr=0.01)
        with LayerWise(optimizer, module, mesh(), bucket_bytes=4096) as optimizing:
            if early:
                optimizer.param_groups[0]["eps"] = 0.0  # 0 / 0 in a step by gradients of 0
                optimizing.state_dict()
                optimizer.param_groups[0]["eps"] = 1e-8
                assert not differing(before, weights(module))
            train(optimizing, module, seed, range(3))
        ends.append(copy.deepcopy(weights(module)))
    return differing(*ends)


def counts_begun(seed: int) -> list[int]:
    """Steps that an optimizer counted before its first one, when its state was saved, and calls of
    its hooks."""
    module, calls = model(seed), list[int]()
    optimizer = Counting(module.parameters())
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    with LayerWise(optimizer, module, mesh()) as optimizing:
        saved = optimizing.state_dict()
        return [
            group["count"] for group in (*saved["param_groups"], *optimizer.param_groups)
        ] + calls


def other_order(seed: int) -> list[str]:
    """Groups list their Parameters in another order at resume: states go by name."""
    first, second = model(seed), model(seed)
    ends: list[dict[str, torch.Tensor]] = []
    params = list(second.parameters())
    optimizers = [
        torch.optim.SGD(given, lr=0.1, momentum=0.9) for given in (first.parameters(), params[::-1])
    ]
    with LayerWise(optimizers[0], first, mesh(), bucket_bytes=4096) as one:
        train(one, first, seed, range(2))
        state, loaded = copy.deepcopy(one.state_dict()), copy.deepcopy(first.state_dict())
        train(one, first, seed, range(2, 4))
        ends.append(copy.deepcopy(weights(first)))
    with LayerWise(optimizers[1], second, mesh(), bucket_bytes=4096) as two:
        second.load_state_dict(loaded)
        two.load_state_dict(state)
        train(two, second, seed, range(2, 4))
        ends.append(copy.deepcopy(weights(second)))
        group = {**state["param_groups"][0], "params": ["mixer"]}
        with pytest.raises(OptimizerError, match="other groups of Parameters"):
            two.load_state_dict({**state, "param_groups": [group]})
    return differing(*ends)


class Skips(Blocks):
    """Some ranks leave the first block out."""

    skips = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.mixer
        for block in self.blocks[int(self.skips) :]:
            x = block(x)
        return self.head(x)


def left_out(seed: int) -> list[str]:
    """A step that is not taken, and modules that one rank skips under the comparison of hashes."""
    module = model(seed, Skips)
    with layer_wise(module, "sgd", check_replicas_every=1) as optimizing:
        before = copy.deepcopy(weights(module))
        backward(module, seed)
        optimizing.zero_grad()
        assert not differing(before, weights(module))
        for step in range(3):
            module.skips = step > 0 and torch.distributed.get_rank() == 1
            backward(module, seed, step)
            optimizing.step()
            optimizing.zero_grad()
    return differing(before, weights(module))


def refused(seed: int) -> None:
    """Options that cannot be, and those of former releases."""
    wrongs: list[dict[str, Any]] = [{"op": "max"}, {"main_grad_dtype": torch.float16}]
    wrongs += [{"bucket_bytes": 0}]
    for option in REMOVED:
        with pytest.raises(OptionError, match=f"{option} is no option of LayerWise any more. fix"):
            layer_wise(model(seed), "sgd", **{option: 2})
    for wrong in wrongs:
        with pytest.raises(OptionError, match=f"{next(iter(wrong))}="):
            layer_wise(model(seed), "sgd", **wrong)


@pytest.mark.parametrize("course", [saved_early, other_order])
def test_states(pool: Pool, course: Any, seed: int) -> None:
    assert pool(2).run(course, seed) == [[], []]


def test_saving_early_counts_no_step(pool: Pool, seed: int) -> None:
    assert pool(2).run(counts_begun, seed) == [[0, 0]] * 2


def test_a_step_that_is_left_out(pool: Pool, seed: int) -> None:
    assert all(pool(2).run(left_out, seed))


def test_options_are_refused(pool: Pool, seed: int) -> None:
    pool(2).run(refused, seed)


def failed(seed: int) -> list[str]:
    """A LayerWise that is refused leaves the optimizer as it was, and nothing of its own."""
    module, held = model(seed, lambda: nn.Linear(128, 128).bfloat16()), {*threading.enumerate()}
    optimizer = AdamW(module.parameters())
    with pytest.raises(BackendError, match="nccl"):
        LayerWise(optimizer, module, mesh(), options=Options(transport="nccl"))
    assert optimizer.param_groups[0]["params"] == [*module.parameters()]
    with LayerWise(optimizer, module, mesh()) as optimizing:
        module(torch.ones(2, 128).bfloat16()).sum().backward()
        optimizing.step()
    return [each.name for each in {*threading.enumerate()} - held]


def ended(seed: int) -> list[str]:
    """Threads that `close()` leaves, those of its process group as well, though it is still held.

    Compared by their ids, as those of the first round may end while the second runs.
    """
    held, first = [], set[str]()
    for _ in range(2):  # the first also starts what torch keeps
        first = threads()
        module = model(seed)
        with slowly(seed):
            optimizing = layer_wise(module, bucket_bytes=1 << 10)
        with optimizing:
            train(optimizing, module, seed, range(2))
            backward(module, seed)  # whose step never comes
        held.append(optimizing)
    until = time.monotonic() + 10
    while (more := threads() - first) and time.monotonic() < until:  # they may end a bit later
        time.sleep(0.01)
    return [name for each in more if (name := thread_name(each)) is not None]


def threads() -> set[str]:
    return {*os.listdir("/proc/self/task")}


def thread_name(thread: str) -> str | None:
    """The name of a thread of this process, or None where it has ended."""
    try:
        return Path(f"/proc/self/task/{thread}/comm").read_text().strip()
    except FileNotFoundError:
        return None


@pytest.mark.parametrize("course", [failed, ended])
def test_nothing_is_left(pool: Pool, course: Any, seed: int) -> None:
    assert pool(2).run(course, seed) == [[], []]
