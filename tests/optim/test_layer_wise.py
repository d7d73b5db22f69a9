"""LayerWise trains on real processes as one process does, with gathers under the forward.

What goes wrong, and unusual courses of a step, are in test_layer_wise_courses.py.
"""

from __future__ import annotations

import gc
import re
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.optim import layerwise
from tests.optim.layerwise import (
    OPTIMIZERS,
    batch,
    before_ops,
    differing,
    layer_wise,
    model,
    slowly,
    train,
    weights,
)
from tests.support.pool import Pool
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from interlace.comm.host import registered
from interlace.errors import BackendError
from interlace.ir import Collective
from interlace.optim import LayerWise
from interlace.optim.bucket_runs import BucketRuns
from interlace.optim.layer_wise.optimizer import by_copies_if_possible
from interlace.options import Options, Transport

Grads = list[dict[str, torch.Tensor]]


def both_ways(
    seed: int, steps: int, optimizer: str, transport: Transport = "auto", device: str = "cpu"
) -> list[str]:
    """What differs between an overlapped run, whose ops are delayed, and a synchronous one."""
    made = []
    for overlap in (True, False):
        module = model(seed).to(device)
        options = Options(timeout_s=20, transport=transport)
        facts: Any = {"overlap_param_gather": overlap, "options": options}
        facts["check_replicas_every"] = 1
        with slowly(seed) if overlap else slowly(None):
            optimizing = layer_wise(module, optimizer, **facts)
        with optimizing:
            losses = train(optimizing, module, seed, range(steps))
        made.append((losses, {name: param.data for name, param in module.named_parameters()}))
    assert made[0][0][0] > made[0][0][-1]
    return differing(made[0][1], made[1][1]) + ["losses"] * (made[0][0] != made[1][0])


def test_overlapped_is_synchronous_bit_for_bit(pool: Pool, seed: int) -> None:
    assert pool(4).run(both_ways, seed, 6, "ours") == [[]] * 4


def test_nothing_is_sent_where_ranks_read_memory(pool: Pool, seed: int) -> None:
    assert pool(3).run(both_ways, seed, 4, "sgd", "peer") == [[]] * 3
    assert pool(2).run(sends, seed) == [False, False]


def sends(seed: int) -> bool:
    with layer_wise(model(seed), "sgd", options=Options(transport="peer")) as optimizing:
        return "send(" in optimizing.explain()


def unmapped(seed: int) -> tuple[list[bool], list[str]]:
    """Whether ranks copy weights where one cannot share memory, and where all can; and what of the
    weights differs then.
    """
    tell, made = registered.tell, []

    def refuse(team: Any, topic: str, note: Any, writes: Any, *facts: Any) -> Any:
        refused = BackendError("memory that no peer can map") if dist.get_rank() == 1 else facts[0]
        return tell(team, topic, note, writes, refused, *facts[1:])

    def as_on_gpus(make: Any, transport: str, device: torch.device) -> BucketRuns:
        return by_copies_if_possible(make, transport, torch.device("cuda"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("interlace.optim.layer_wise.optimizer.by_copies_if_possible", as_on_gpus)
        for told in (refuse, tell):
            patch.setattr(registered, "tell", told)
            module = model(seed)
            with slowly(seed), layer_wise(module, "ours", check_replicas_every=1) as optimizing:
                train(optimizing, module, seed, range(4))
                made.append(("get(" in optimizing.explain(), weights(module)))
    return [copied for copied, _ in made], differing(made[0][1], made[1][1])


def test_gathers_where_a_rank_cannot_share_memory(pool: Pool, seed: int) -> None:
    """All ranks fall back, and the weights have the same bits."""
    assert pool(3).run(unmapped, seed) == [([False, True], [])] * 3


def recorded(seed: int, steps: int, optimizer: str) -> tuple[Grads, dict[str, torch.Tensor]]:
    """The gradients that this rank's optimizer saw in each step, and the weights at the end."""
    module, seen = model(seed), []
    with layer_wise(module, optimizer) as optimizing:

        def see(inner: Optimizer, *_: Any) -> None:
            named = module.named_parameters()
            seen.append({n: p.grad.clone() for n, p in named if p.grad is not None})

        optimizing.optimizer.register_step_pre_hook(see)
        train(optimizing, module, seed, range(steps))
        owned = {n for n, p in module.named_parameters() if optimizing.optimizer.state.get(p)}
        assert owned == set(seen[0])  # and no state of what others own
        return seen, weights(module)


@pytest.mark.parametrize(
    "optimizer",
    ["muon", "ours", *(pytest.param(name, marks=pytest.mark.slow) for name in ("adamw", "sgd"))],
)
def test_has_the_bits_of_one_process(pool: Pool, optimizer: str, seed: int) -> None:
    """Given the gradients that the owners saw."""
    ranks = pool(4).run(recorded, seed, 6, optimizer)
    module = model(seed)
    alone = OPTIMIZERS[optimizer](module.parameters())
    for step in range(6):
        grads: dict[str, torch.Tensor] = {}
        for seen, _ in ranks:
            assert not grads.keys() & seen[step].keys()
            grads |= seen[step]
        for name, param in module.named_parameters():
            param.grad = grads[name]
        alone.step()
    for _, found in ranks:
        assert differing(found, weights(module)) == []


def meets(seed: int) -> list[bool]:
    """Whether the head's weights, on the way, wait until the next forward reaches a block."""
    module, armed, reached, told = model(seed), threading.Event(), threading.Event(), []

    def hold(rank: int, index: int, op: Any) -> None:
        if armed.is_set() and "head.weight" in op.loc.module and isinstance(op, Collective):
            told.append(reached.wait(15))

    with before_ops(hold):
        optimizing = layer_wise(module)
    with optimizing:
        module.blocks[0].register_forward_hook(lambda *_: reached.set())
        for step in range(4):
            module(batch(seed, step)).square().mean().backward()
            optimizing.clip_grad_norm_(1.0)
            reached.clear()
            armed.set()
            optimizing.step()
            optimizing.zero_grad()
            module(batch(seed, step))
            armed.clear()
    return told


def test_gathers_run_under_the_forward(pool: Pool, seed: int) -> None:
    for told in pool(2).run(meets, seed):
        assert told == [True] * 4


def micro_batches(seed: int, world: int) -> list[str]:
    """Gradients of micro-batches are added, and then reduced: as one batch of them all."""
    made = []
    for parts in (1, 3):
        module = model(seed)
        with layer_wise(module, "sgd", main_grad_dtype=torch.float64, op="sum") as optimizing:
            rows = batch(seed, 0).chunk(parts)
            for part in rows[:-1]:
                with optimizing.no_sync():
                    module(part).sum().backward()
            module(rows[-1]).sum().backward()
            norm = optimizing.clip_grad_norm_(1e9)
            optimizing.step()
            made.append({**weights(module), "norm": norm})
    return [n for n, w in made[0].items() if not torch.allclose(w, made[1][n], atol=1e-5)]


def test_micro_batches(pool: Pool, seed: int) -> None:
    assert pool(2).run(micro_batches, seed, 2) == [[], []]


def clipped(seed: int, norm_type: float) -> list[str]:
    """What differs from torch's own clipping of all gradients, under DDP, step by step: rounding
    that adds up would be magnified where a relu has its kink.
    """
    ours, theirs = model(seed), DistributedDataParallel(model(seed))
    alone, found = OPTIMIZERS["sgd"](theirs.parameters()), list[str]()
    with layer_wise(ours, "sgd") as optimizing:
        for step in range(3):
            for module in (ours, theirs):
                module(batch(seed, step)).square().sum().backward()
            norm = optimizing.clip_grad_norm_(0.5, norm_type)
            wanted = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5, norm_type)
            torch.testing.assert_close(norm.float(), wanted)
            for optimizer in (optimizing, alone):
                optimizer.step()
                optimizer.zero_grad()
            made, other = weights(ours), weights(theirs.module)
            found += [n for n, w in made.items() if not torch.allclose(w, other[n], atol=1e-6)]
            theirs.module.load_state_dict(made)
    return found


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clips_over_owners(pool: Pool, norm_type: float, seed: int) -> None:
    assert pool(4).run(clipped, seed, norm_type) == [[]] * 4


def large(seed: int, power: int) -> tuple[float, float]:
    """The norm before clipping, and the largest gradient after it."""
    module = model(seed)
    with layer_wise(module, "sgd") as optimizing:
        (module(batch(seed, 0)).sum() * 2.0**power).backward()
        norm = optimizing.clip_grad_norm_(2.0**-20).item() / 2.0**power
        largest = max(grad.abs().max().item() for grad in optimizing._reduced_grads().values())
        return norm, largest


def test_large_gradients_are_clipped_and_not_lost(pool: Pool, seed: int) -> None:
    """Of which squares are no numbers of fp32."""
    wanted, few = pool(2).run(large, seed, 0), pool(2).run(large, seed, 100)
    for (norm, largest), (same, left) in zip(wanted, few, strict=True):
        assert same == pytest.approx(norm, rel=1e-6)
        assert left == pytest.approx(largest, rel=1e-3)


def told_of(seed: int) -> str:
    with layer_wise(model(seed), options=Options(trace=True, timeout_s=20)) as optimizing:
        train(optimizing, optimizing.module, seed, range(2))
        optimizing.synchronize()
        assert all(timeline.spans for timeline in optimizing.timelines())
        return optimizing.explain()


def test_explains_who_owns_what(pool: Pool, seed: int) -> None:
    for told in pool(2).run(told_of, seed):
        assert "18 parameters of 2 ranks in 7 buckets" in told
        assert "blocks.0.up.weight, of rank" in told
        assert "all_gather(flat[" in told
        assert ".py" not in told, "which lines of ours wrote the Programs"
        assert 'reduce="avg", team=dp' in told


def costs(seed: int) -> float:
    module = model(seed)

    class Costly(torch.optim.SGD):
        def update_cost(self, param: torch.Tensor) -> float:
            return 1000.0 if param is module.head.weight else 1.0

    optimizing = LayerWise(Costly(module.parameters()), module, layerwise.mesh())
    with optimizing:
        told = re.findall(r"rank \d: cost (\d+),", optimizing.explain())
    return sum(float(cost) for cost in told)


def test_owners_are_chosen_by_the_optimizers_cost(pool: Pool, seed: int) -> None:
    assert pool(2).run(costs, seed) == [1017.0, 1017.0]


def dropped(seed: int) -> list[str]:
    """A model that is used after its optimizer is gone, with gathers in flight."""
    made = []
    for overlap in (True, False):
        module = model(seed)
        with slowly(seed if overlap else None):
            optimizing = layer_wise(module, overlap_param_gather=overlap)
        train(optimizing, module, seed, range(2))
        del optimizing
        gc.collect()
        made.append({**weights(module), "y": module(batch(seed, 3)).detach()})
    dist.barrier()
    return differing(*made)


def test_gathers_end_without_their_optimizer(pool: Pool, seed: int) -> None:
    assert pool(2).run(dropped, seed) == [[], []]
