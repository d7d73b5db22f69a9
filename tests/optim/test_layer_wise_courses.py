"""LayerWise in unusual courses of a step: the bits of a synchronous run, or a typed error."""

from __future__ import annotations

import copy
import os
import signal
import time
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.optim import layerwise
from tests.optim.layerwise import (
    DIM,
    Blocks,
    batch,
    before_ops,
    differing,
    layer_wise,
    model,
    slowly,
    train,
    weights,
)
from tests.support.pool import Died, Pool
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from interlace.errors import (
    InterlaceError,
    OptimizerError,
    ReplicaError,
    UnsupportedError,
)
from interlace.ir import Collective, Notify
from interlace.optim import LayerWise
from interlace.options import Options, Transport

STEPS = 6


class Odd(Blocks):
    """Blocks that run as `course` says, and parameters that no module of their own reads."""

    def __init__(self, course: str) -> None:
        super().__init__()
        self.course, self.count = course, 0
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(DIM)) for _ in range(3)])
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.late = nn.Linear(DIM, DIM)
        self.late.requires_grad_(course != "unfrozen")
        if course == "twice":
            torch.nn.utils.spectral_norm(self.late)  # reads the weight in a hook before the forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        x = x @ self.mixer
        blocks = list(self.blocks)
        match self.course:
            case "skipped" if self.count % 3:
                blocks = blocks[:: self.count % 3]
            case "twice":
                blocks = [*blocks, blocks[0]]
            case "reversed":
                blocks = blocks[::-1]
            case _:
                pass
        for block, scale in zip(blocks, [*self.scales, 1.0], strict=False):
            match self.course:
                case "checkpointed" | "reentrant":
                    reentrant = self.course == "reentrant"
                    x = checkpoint(block, x * scale, use_reentrant=reentrant)
                case _:
                    x = block(x * scale)
        x = x + self.attention(x[None], x[None], x[None], need_weights=False)[0][0]
        return self.head(x + self.late(x))


def step(optimizing: LayerWise, module: Any, seed: int, number: int) -> None:
    if module.course == "unfrozen" and number == 3:
        module.late.requires_grad_(True)
    if module.course == "evaluated":
        module.eval()
        with torch.inference_mode() if number % 2 else torch.no_grad():
            module(batch(seed, 100 + number))
        module.train()
    x = batch(seed, number).requires_grad_(module.course == "reentrant")
    module(x).square().mean().backward()
    optimizing.step()
    optimizing.zero_grad()


def follow(seed: int, course: str) -> list[str]:
    """What differs between an overlapped and delayed run and a synchronous one by one bucket."""
    made = []
    for overlap in (True, False):
        module = model(seed, partial(Odd, course))
        before = weights(module)
        facts: Any = {"check_replicas_every": 1, "overlap_param_gather": overlap}
        if not overlap:
            facts["bucket_bytes"] = 1 << 20
        with slowly(seed if overlap else None):
            optimizing = layer_wise(module, **facts)
        with optimizing:
            for number in range(STEPS):
                step(optimizing, module, seed, number)
                if course == "unfrozen" and number == 2:
                    assert torch.equal(weights(module)["late.bias"], before["late.bias"])
            made.append(weights(module))
            assert not torch.equal(made[-1]["late.bias"], before["late.bias"])
    return differing(*made)


COURSES = ("skipped", "twice", "reversed", "checkpointed", "reentrant", "evaluated", "unfrozen")


@pytest.mark.parametrize("course", COURSES)
def test_has_the_bits_of_a_synchronous_run(pool: Pool, course: str, seed: int) -> None:
    assert pool(2).run(follow, seed, course) == [[], []]


def few(seed: int) -> list[str]:
    """Fewer parameters than ranks."""
    made = []
    for overlap in (True, False):
        module = model(seed, lambda: nn.Linear(DIM, 5))
        with layer_wise(module, overlap_param_gather=overlap, check_replicas_every=1) as optimizing:
            train(optimizing, module, seed, range(STEPS))
            made.append(weights(module))
    return differing(*made)


def test_fewer_parameters_than_ranks(pool: Pool, seed: int) -> None:
    assert pool(4).run(few, seed) == [[]] * 4


# -- checkpoints ----------------------------------------------------------------------------------


def others(seed: int) -> str:
    """A state of other owners."""
    module = model(seed)
    with layer_wise(module, "adamw") as optimizing:
        train(optimizing, module, seed, range(1))
        state = optimizing.state_dict()
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, state)
        with pytest.raises(OptimizerError) as caught:
            optimizing.load_state_dict(states[1 - dist.get_rank()])
        return str(caught.value)


def test_a_state_of_other_owners_is_refused(pool: Pool, seed: int) -> None:
    for rank, told in enumerate(pool(2).run(others, seed)):
        assert f"rank {rank} owns other Parameters than those of this state" in told
        assert "torch.distributed.checkpoint" in told


# -- errors ---------------------------------------------------------------------------------------


def wrongs(seed: int) -> list[str]:
    told: list[str] = []

    def expect(kind: type[InterlaceError], make: Any) -> None:
        with pytest.raises(kind) as caught:
            make()
        told.append(str(caught.value))

    module = model(seed)
    with layer_wise(module, check_replicas_every=2) as optimizing:
        train(optimizing, module, seed, range(2))
        optimizing.synchronize()
        if dist.get_rank() == 1:
            module.head.weight.data[0, 0] += 1
        expect(ReplicaError, optimizing.step)
        module.to(torch.float64)
        expect(OptimizerError, optimizing.step)
    wrapped = DistributedDataParallel(model(seed))
    expect(UnsupportedError, lambda: layer_wise(wrapped, "sgd"))
    sharded: Any = parallelize_module(nn.Linear(8, 8), layerwise.mesh(), ColwiseParallel())
    expect(OptimizerError, lambda: layer_wise(sharded, "sgd"))
    apart = [*model(seed).parameters(), *nn.Linear(2, 2).parameters()]
    expect(
        OptimizerError,
        lambda: LayerWise(torch.optim.SGD(apart), model(seed), layerwise.mesh()),
    )
    return told


def test_what_cannot_be_is_said(pool: Pool, seed: int) -> None:
    for replicas, replaced, wrapped, sharded, apart in pool(2).run(wrongs, seed):
        assert "fix: give LayerWise the module without it" in wrapped
        assert "ranks hold different weights in head.weight" in replicas
        assert "was replaced after its LayerWise was made" in replaced
        assert "SGD is neither interlace.optim.Muon nor torch.optim.Muon" in sharded
        assert "are not in the module" in apart


def killed(seed: int, victim: int, transport: Transport) -> str:
    """What the others say when a rank dies in a gather, and after how long."""
    module, armed = model(seed), []

    def die(rank: int, index: int, op: Any) -> None:
        of_last = "blocks.2" in op.loc.module and isinstance(op, Collective | Notify)
        if armed and of_last and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    with before_ops(die):
        optimizing = layer_wise(module, options=Options(timeout_s=10, transport=transport))
    train(optimizing, module, seed, range(2))
    module(batch(seed, 2)).sum().backward()
    optimizing.clip_grad_norm_(1.0)
    armed.append(True)
    begun = time.monotonic()
    optimizing.step()
    with pytest.raises(InterlaceError) as caught:
        module(batch(seed, 3))
    assert time.monotonic() - begun < 20
    return f"{type(caught.value).__name__}: {caught.value}"


def stalled(seed: int) -> list[str]:
    """A rank is late in a gather; what differs between ranks after a reset."""
    module, armed, told = model(seed), [], []

    def stall(rank: int, index: int, op: Any) -> None:
        if armed and "head.weight" in op.loc.module and dist.get_rank() == 1:
            armed.clear()
            time.sleep(3)

    with before_ops(stall):
        optimizing = layer_wise(module, options=Options(timeout_s=1))
    with optimizing:
        train(optimizing, module, seed, range(2))
        kept, state = weights(module), copy.deepcopy(optimizing.state_dict())
        armed.append(True)
        try:
            train(optimizing, module, seed, range(2, 3))
            module(batch(seed, 3))
        except InterlaceError as error:
            told.append(str(error))
        assert "head.weight" in told[0]
        dist.barrier()
        optimizing.reset()
        module.load_state_dict(kept)
        optimizing.load_state_dict(state)
        train(optimizing, module, seed, range(2, 4))
        optimizing.check_replicas()
    return differing(weights(module), kept)


def test_goes_on_after_a_rank_that_stalled(pool: Pool, seed: int) -> None:
    assert all(pool(2).run(stalled, seed))


@pytest.mark.parametrize("transport", ["auto", "peer"])
def test_a_killed_rank_is_an_error_elsewhere(pool: Pool, transport: Transport, seed: int) -> None:
    victim = seed % 2
    results = pool(2).run(killed, seed, victim, transport, may_die={victim})
    assert results[victim] == Died(-signal.SIGKILL)
    told = results[1 - victim]
    assert told.startswith(("PeerError: bucket", "CommTimeoutError: bucket"))
    assert "was not gathered, for which the forward of blocks." in told
