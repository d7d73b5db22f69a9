"""LayerWise trains modules of fully_shard as Muon on whole parameters does."""

from __future__ import annotations

import copy
import itertools
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.optim import checkpoints, layerwise
from tests.optim.layerwise import DIM, HIDDEN, Blocks, batch, before_ops, differing, model, slowly
from tests.optim.test_ownership import LLAMAS, llama
from tests.support.pool import Died, Pool
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import Optimizer

import interlace.optim
from interlace.errors import InterlaceError, OptimizerError, OptionError, UnsupportedError
from interlace.ir import Collective
from interlace.optim import LayerWise, Muon
from interlace.optim.layer_wise import shard_pipeline
from interlace.optim.layer_wise.ownership import ParameterCost
from interlace.optim.layer_wise.shard_pipeline import exchanges_of
from interlace.options import Options

Weights = dict[str, torch.Tensor]
CUT: dict[str, dict[str, Any]] = {
    "up.weight": {"split_sizes": (HIDDEN - 16, 16), "adjust_lr_fn": "match_rms_adamw"},
    "down.weight": {"head_dim": 8, "nesterov": False},
}
"""Options of the matrices whose names end so."""


_meshes = itertools.count()
"""For names of dimensions: torch finds meshes of equal names in caches, whose groups are gone when
the pool's ranks have another default group."""


class Uneven(Blocks):
    """Rows that ranks do not divide, fewer rows than ranks, and a stack of matrices."""

    def __init__(self) -> None:
        super().__init__(2)
        self.odd, self.flat = nn.Linear(DIM, 7), nn.Linear(7, 3, bias=False)
        self.experts = nn.Parameter(torch.randn(3, DIM, 6) / DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x @ self.mixer)
        mixed = (x @ self.experts).sum(0)
        return torch.cat([self.head(x), mixed, self.flat(self.odd(x))], -1)


def sharded(seed: int, replicas: int = 1, device: str = "cpu", tp: int = 1) -> Any:
    """By tensor parallelism: rows, columns, rows that it does not divide, and nothing of others."""
    module, ranks = model(seed, Uneven).to(device), dist.get_world_size()
    shape, names = (replicas, ranks // replicas // tp, tp), ("replicas", "shards", "tp")
    replicated, dp, across = (f"{name}{next(_meshes)}" for name in names)
    whole = init_device_mesh(device, shape, mesh_dim_names=(replicated, dp, across))
    mesh = whole[replicated, dp] if replicas > 1 else whole[dp]
    if tp > 1:
        plan: dict[str, Any] = {
            "blocks.*.up": ColwiseParallel(),
            "blocks.*.down": RowwiseParallel(output_layouts=Replicate()),
            "odd": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(module, whole[across], plan)
    for block in module.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def muon(module: nn.Module, kind: str = "ours", **options: Any) -> Optimizer:
    """torch's, of all 2-D parameters, or ours, of all others too, some of which it cuts."""
    named = dict(module.named_parameters())
    if kind == "torch":
        return torch.optim.Muon([p for p in named.values() if p.dim() == 2], lr=0.02)
    groups = [
        {"params": [p for name, p in named.items() if name.endswith(end)], **cut}
        for end, cut in CUT.items()
    ]
    rest = [p for name, p in named.items() if not name.endswith(tuple(CUT))]
    groups += [
        {"params": [p for p in rest if p.dim() > 1]},
        {"params": [p for p in rest if p.dim() == 1], "use_muon": False},
    ]
    groups = [group for group in groups if group["params"]]
    facts: dict[str, Any] = {"batched": False, "symmetric": False, **options}
    return Muon(groups, lr=0.02, adamw={"lr": 0.01}, **facts)


def wrapped(optimizer: Optimizer, module: nn.Module, **facts: Any) -> LayerWise:
    options = Options(**{"timeout_s": 20, **facts.pop("options", {})})
    over: Any = getattr(next(module.parameters()), "device_mesh", None) or layerwise.mesh()
    over = over[over.mesh_dim_names[-1]] if over.ndim > 1 else over
    return LayerWise(optimizer, module, over, **{"bucket_bytes": 1, "options": options, **facts})


def train(
    optimizer: Any,
    module: nn.Module,
    seed: int,
    steps: range,
    clip: float | None = 1.0,
    alike: int = 1,
) -> None:
    device = next(module.parameters()).device
    for step in steps:
        module(batch(seed, step, alike).to(device)).square().mean().backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()


def full(values: dict[str, Any]) -> Weights:
    return {n: v.full_tensor() if isinstance(v, DTensor) else v.clone() for n, v in values.items()}


# -- bits -----------------------------------------------------------------------------------------


def both_ways(
    seed: int, steps: int, kind: str, facts: dict[str, Any], device: str = "cpu", tp: int = 1
) -> list[str]:
    """What differs between an overlapped run, whose ops are delayed, and a synchronous one."""
    made: list[Weights] = []
    facts = {"options": {}, **facts}
    for overlap in (True, False):
        module = sharded(seed, device=device, tp=tp)
        with slowly(seed if overlap else None):
            given = {**facts, "options": {**facts["options"], "overlap": overlap}}
            optimizing = wrapped(muon(module, kind, batched=True), module, **given)
        with optimizing:
            train(optimizing, module, seed, range(steps), None, tp)
        made.append(full(module.state_dict()))
    return differing(*made)


FACTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one bucket": {"bucket_bytes": 1 << 20},
    "peer": {"options": {"transport": "peer"}},
}


@pytest.mark.parametrize("facts", FACTS)
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_overlapped_is_synchronous_bit_for_bit(
    pool: Pool, world: int, facts: str, seed: int
) -> None:
    assert pool(world).run(both_ways, seed, 5, "ours", FACTS[facts]) == [[]] * world


@pytest.mark.parametrize("facts", ["plain", "peer"])
def test_overlapped_is_synchronous_under_tensor_parallelism(
    pool: Pool, facts: str, seed: int
) -> None:
    assert pool(4).run(both_ways, seed, 3, "ours", FACTS[facts], "cpu", 2) == [[]] * 4


def recorded(
    seed: int, steps: int, kind: str, replicas: int, tp: int
) -> tuple[list[Weights], Weights]:
    """The reduced gradients of each step, and the weights at the end."""
    module, seen = sharded(seed, replicas, tp=tp), []
    module.odd.weight.requires_grad_(False)
    optimizer = muon(module, kind)
    with slowly(seed):
        optimizing = wrapped(optimizer, module)
    with optimizing:
        for step in range(steps):
            if step == 2:
                module.blocks[0].up.weight.requires_grad_(False)
                module.odd.weight.requires_grad_(True)
            module(batch(seed, step, tp)).square().mean().backward()
            held = [p for group in optimizer.param_groups for p in group["params"]]
            used = full({str(i): p.grad for i, p in enumerate(held) if p.grad is not None})
            wanted = torch.nn.utils.get_total_norm(used.values())
            torch.testing.assert_close(optimizing.clip_grad_norm_(0.5).float(), wanted)
            grads = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
            seen.append(full(grads))
            optimizing.step()
            assert all(p.grad is grads.get(n) for n, p in module.named_parameters())
            optimizing.zero_grad()
        state = optimizer.state[module.odd.weight]["momentum_buffer"]
        assert state.to_local().shape == module.odd.weight.to_local().shape
    return seen, full(module.state_dict())


@pytest.mark.parametrize(
    ("kind", "replicas", "tp"),
    [
        ("torch", 1, 1),
        ("ours", 1, 1),
        ("ours", 2, 1),
        ("torch", 1, 2),
        ("ours", 1, 2),
        ("ours", 1, 4),
        ("ours", 2, 2),
    ],
)
def test_has_the_bits_of_one_process(
    pool: Pool, kind: str, replicas: int, tp: int, seed: int
) -> None:
    ranks = pool(4).run(recorded, seed, 5, kind, replicas, tp)
    module = model(seed, Uneven)
    alone, named = muon(module, kind), dict(module.named_parameters())
    for grads in ranks[0][0]:
        for name, param in named.items():
            param.grad = grads.get(name)
        alone.step()
    for _, found in ranks:
        assert differing(found, module.state_dict()) == []


def by_columns(seed: int) -> tuple[list[Weights], Weights]:
    """The same of shards of columns."""
    module: Any = fully_shard(
        model(seed), mesh=layerwise.mesh(), shard_placement_fn=lambda p: Shard(p.dim() - 1)
    )
    seen: list[Weights] = []
    with wrapped(muon(module), module) as optimizing:
        for step in range(3):
            module(batch(seed, step)).square().mean().backward()
            seen.append(full({n: p.grad for n, p in module.named_parameters()}))
            optimizing.step()
            optimizing.zero_grad()
    return seen, full(module.state_dict())


def test_shards_may_be_columns(pool: Pool, seed: int) -> None:
    module = model(seed)
    alone, named = muon(module), dict(module.named_parameters())
    ranks = pool(4).run(by_columns, seed)
    for grads in ranks[0][0]:
        for name, param in named.items():
            param.grad = grads[name]
        alone.step()
    for _, found in ranks:
        assert differing(found, module.state_dict()) == []


class Twice(torch.optim.Muon):
    """Torch calls the hooks of its step twice: here, and in the step inside."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def hooked(seed: int, kind: str) -> list[str]:
    """What hooks that scale gradients see and do, against the same by hand."""
    made: list[Weights] = []
    for by_hand in (True, False):
        module, seen = sharded(seed), []
        optimizer = muon(module, kind)
        if kind == "torch":
            optimizer = Twice(optimizer.param_groups)
        params = [p for group in optimizer.param_groups for p in group["params"]]

        def before(*_: Any, seen: Any = seen, params: Any = params) -> None:
            seen.append(all(p.grad is not None for p in params))
            if seen[-1]:
                torch._foreach_mul_([p.grad for p in params], 0.5)

        def after(*_: Any, seen: Any = seen, module: Any = module) -> None:
            seen.append({n: v.clone() for n, v in full(module.state_dict()).items()})

        if not by_hand:
            optimizer.register_step_pre_hook(before)
            optimizer.register_step_post_hook(after)
        with wrapped(optimizer, module) as optimizing:
            for step in range(3):
                module(batch(seed, step)).square().mean().backward()
                if by_hand:
                    torch._foreach_mul_([p.grad for p in params], 0.5)
                optimizing.step()
                made += [full(module.state_dict())] if by_hand else []
                optimizing.zero_grad()
    states = [each for each in seen if isinstance(each, dict)]
    times = len(states) // 3
    assert [s for s in seen if s is True or s is False][::times] == [True] * 3
    return [n for i, each in enumerate(states) for n in differing(each, made[i // times])]


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_hooks_see_gradients_and_updated_weights(pool: Pool, kind: str, seed: int) -> None:
    assert pool(2).run(hooked, seed, kind) == [[], []]


def few(seed: int) -> list[str]:
    """Fewer matrices than ranks."""
    made: list[Weights] = []
    for overlap in (True, False):
        module = fully_shard(model(seed, lambda: nn.Linear(DIM, 5)), mesh=layerwise.mesh())
        with wrapped(muon(module), module, options={"overlap": overlap}) as optimizing:
            train(optimizing, module, seed, range(3))
        made.append(full(module.state_dict()))
    return differing(*made)


def test_fewer_matrices_than_ranks(pool: Pool, seed: int) -> None:
    assert pool(4).run(few, seed) == [[]] * 4


# -- overlap --------------------------------------------------------------------------------------


def meets(seed: int) -> list[bool]:
    """Whether an exchange, held until the compute beside it is reached, is run under that."""
    module, reached, told = sharded(seed), threading.Event(), []
    steps = shard_pipeline.orthogonal

    def hold(rank: int, index: int, op: Any) -> None:
        exchange = optimizing._pipeline._exchanges[1]
        if op.loc.module == exchange.about and op.src.buffer == "shards":
            told.append(reached.wait(15))

    def reach(*given: Any) -> Any:
        reached.set()
        return steps(*given)

    with before_ops(hold), pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_pipeline, "orthogonal", reach)
        optimizing: Any = wrapped(muon(module), module)
        with optimizing:
            for step in range(2):
                reached.clear()
                module(batch(seed, step)).square().mean().backward()
                optimizing.step()
                optimizing.zero_grad()
    return told


def test_exchanges_run_under_compute(pool: Pool, seed: int) -> None:
    for told in pool(2).run(meets, seed):
        assert told == [True] * 2


@pytest.mark.parametrize(("name", "most_ranks"), [("8B", 128), ("70B", 64)])
def test_work_is_even_in_the_pipeline(name: str, most_ranks: int) -> None:
    """Ranks that wait for all others after each bucket but the last one take little longer."""
    whole = [item for item in llama(*LLAMAS[name]) if item.name.count(".") == 2]
    whole = [item for item in whole if item.cost > 3600.0 * item.numel]
    for ranks in (2, 4, 8, 16, 32, 64, 128):
        if ranks > most_ranks:
            break
        items = [ParameterCost(i.name, -(-i.numel // ranks), "bf16", 2, i.cost) for i in whole]
        now, ended = [0.0] * ranks, list[float]()
        for exchange in exchanges_of(items, ranks, 64 << 20):
            if len(ended) > 1:
                now = [max(each, ended[-2]) for each in now]
            for number, start in zip(exchange.plan.items, exchange.plan.starts, strict=True):
                owner = sum(bound <= start for bound in exchange.plan.bounds[1:])
                now[owner] += items[number].cost
            ended.append(max(now))
        assert max(now) * ranks <= 1.15 * sum(item.cost for item in items), ranks


# -- norms ----------------------------------------------------------------------------------------


class Embedded(nn.Module):
    """A tensor-parallel embedding and norm, and a matrix that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.matrix = nn.Embedding(16, 8), nn.Linear(8, 8, bias=False)
        self.alone = nn.Linear(8, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.alone(self.matrix(self.embedding(x)))


def beside_tensor_parallelism(seed: int, norm_type: float) -> list[float]:
    """The norm of LayerWise, that of whole gradients, and the latter once clipped to 0.5."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module: Any = model(seed, Embedded)
    rows = RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate())
    columns = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(module, mesh["tp"], {"embedding": rows, "alone": columns})
    fully_shard(module, mesh=mesh["dp"], ignored_params={module.alone.weight})
    rest = [module.embedding.weight, module.alone.weight]
    optimizer = Muon([{"params": [module.matrix.weight]}, {"params": rest, "use_muon": False}])

    def whole() -> float:
        grads = [full({"": p.grad})[""].flatten() for p in module.parameters()]
        return torch.linalg.vector_norm(torch.cat(grads), norm_type).item()

    with LayerWise(optimizer, module, mesh["dp"], options=Options(timeout_s=20)) as optimizing:
        torch.manual_seed(seed + mesh["dp"].get_local_rank())
        module(torch.randint(16, (32,))).square().sum().backward()
        dist.all_reduce(module.alone.weight.grad.to_local(), group=mesh.get_group("dp"))
        wanted = whole()
        return [optimizing.clip_grad_norm_(0.5, norm_type).item(), wanted, whole()]


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_norms_count_the_shards_of_tensor_parallelism(
    pool: Pool, norm_type: float, seed: int
) -> None:
    found = pool(4).run(beside_tensor_parallelism, seed, norm_type)
    assert len({norm for norm, _, _ in found}) == 1
    for norm, wanted, clipped in found:
        assert norm == pytest.approx(wanted, rel=1e-5)
        assert norm > 0.5
        assert clipped == pytest.approx(0.5, rel=1e-4)


# -- checkpoints ----------------------------------------------------------------------------------


def through_a_checkpoint(seed: int, folder: str, saves: bool, tp: int) -> checkpoints.Run:
    module = sharded(seed if saves else seed + 1, tp=tp)
    go = checkpoints.saved if saves else checkpoints.loaded
    optimizing = wrapped(muon(module), module)
    clip = 1.0 if tp == 1 else None  # torch clips no gradients of several meshes
    return go(optimizing, partial(train, optimizing, module, seed, clip=clip, alike=tp), folder)


@pytest.mark.parametrize(("world", "tp"), [(4, 1), (2, 1), (4, 2), (2, 2)])
def test_goes_on_from_a_checkpoint(
    pool: Pool, world: int, tp: int, seed: int, tmp_path: Path
) -> None:
    """On as many ranks bit for bit; on fewer, all that was loaded is."""
    before = pool(4).run(through_a_checkpoint, seed, str(tmp_path), True, tp)
    after = pool(world).run(through_a_checkpoint, seed, str(tmp_path), False, tp)
    checkpoints.check(before, after, same=world == 4)


def from_torch(seed: int) -> bool:
    """A state that torch saved of wrapped modules has the same names, and is loaded."""
    module = model(seed, Uneven)
    module.blocks[0] = checkpoint_wrapper(module.blocks[0])
    optimizer = muon(fully_shard(module, mesh=layerwise.mesh()), "torch")
    with wrapped(optimizer, module) as optimizing:
        train(optimizing, module, seed, range(1), None)
        state: Any = get_optimizer_state_dict(module, optimizer)
        optimizing.load_state_dict(state)
        return state["state"].keys() == optimizing.state_dict()["state"].keys()


def test_takes_torchs_state_of_wrapped_modules(pool: Pool, seed: int) -> None:
    assert pool(2).run(from_torch, seed) == [True] * 2


# -- errors ---------------------------------------------------------------------------------------


def wrongs(seed: int) -> list[str]:
    told: list[str] = []

    def expect(kind: type[InterlaceError], make: Any) -> None:
        with pytest.raises(kind) as caught:
            make()
        told.append(str(caught.value))

    module = sharded(seed)
    expect(OptimizerError, lambda: wrapped(torch.optim.SGD(module.parameters()), module))
    plain = model(seed)
    plain.mixer = module.mixer  # of fully_shard
    expect(UnsupportedError, lambda: wrapped(muon(plain), plain))
    names = f"dp{next(_meshes)}", f"tp{next(_meshes)}"
    two = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=names)
    for name, part, placements in (
        ("experts", (slice(None), slice(None), slice(3)), [Shard(0), Shard(2)]),
        ("mixer", slice(DIM // 2), [Shard(0), Shard(0)]),
    ):
        module = model(seed, Uneven)
        shard = DTensor.from_local(getattr(module, name)[part], two, placements)
        setattr(module, name, nn.Parameter(shard))
        held = Muon([getattr(module, name)])
        expect(UnsupportedError, partial(LayerWise, held, module, two[names[0]]))
    return told


def test_what_cannot_be_is_said(pool: Pool, seed: int) -> None:
    for kind, plain, stack, twice in pool(2).run(wrongs, seed):
        assert "SGD is neither interlace.optim.Muon nor torch.optim.Muon" in kind
        assert "head.weight is not sharded" in plain
        assert "experts of shape (3, 24, 6) has the placements" in stack
        assert "of stacks of matrices each shard must hold whole ones" in stack
        assert "mixer of shape (24, 24) has the placements (Shard(dim=0), Shard(dim=0))" in twice


def test_the_class_that_went_is_no_attribute() -> None:
    told = r"fix: LayerWise\(optimizer, module, mesh\)"
    with pytest.raises(OptionError, match=told):
        _ = interlace.optim.ShardedLayerWise
    with pytest.raises(OptionError, match=told):
        exec("from interlace.optim import ShardedLayerWise")


def zeroed(seed: int) -> list[bool]:
    """Gradients of fully_shard are 0 with `set_to_none=False`, else None."""
    module, found = sharded(seed), list[bool]()
    with wrapped(muon(module), module) as optimizing:
        module(batch(seed, 0)).square().mean().backward()
        optimizing.zero_grad(set_to_none=False)
        found.append(all(not full({"": p.grad})[""].any() for p in module.parameters()))
        optimizing.zero_grad()
        found.append(all(p.grad is None for p in module.parameters()))
    return found


def test_gradients_are_zeroed_or_none(pool: Pool, seed: int) -> None:
    assert pool(2).run(zeroed, seed) == [[True, True]] * 2


def killed(seed: int, victim: int) -> str:
    """What the others say when a rank dies in an exchange."""
    module, armed = sharded(seed), []

    def die(rank: int, index: int, op: Any) -> None:
        if armed and "mixer" in op.loc.module and isinstance(op, Collective):
            if dist.get_rank() == victim:
                os.kill(os.getpid(), signal.SIGKILL)

    with before_ops(die):
        optimizing = wrapped(muon(module), module, options={"timeout_s": 10})
    train(optimizing, module, seed, range(2))
    module(batch(seed, 2)).sum().backward()
    armed.append(True)
    begun = time.monotonic()
    with pytest.raises(InterlaceError) as caught:
        optimizing.step()
    assert time.monotonic() - begun < 20
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_killed_rank_is_an_error_elsewhere(pool: Pool, seed: int) -> None:
    victim = seed % 2
    results = pool(2).run(killed, seed, victim, may_die={victim})
    assert results[victim] == Died(-signal.SIGKILL)
    assert results[1 - victim].startswith(("PeerError: bucket", "CommTimeoutError: bucket"))
    assert "updates did not come" in results[1 - victim]


def stalled(seed: int) -> list[str]:
    """What differs after a rank was late, all reset, and loaded what they had before."""
    module, armed, made = sharded(seed), [], []

    def stall(rank: int, index: int, op: Any) -> None:
        if armed and "mixer" in op.loc.module and dist.get_rank() == 1:
            armed.clear()
            time.sleep(5)

    with before_ops(stall):
        optimizing = wrapped(muon(module), module, options={"timeout_s": 2})
    with optimizing:
        train(optimizing, module, seed, range(2))
        held = {n: p.clone() for n, p in module.state_dict().items()}
        state = copy.deepcopy(optimizing.state_dict())
        for stalls in (True, False):
            if stalls:
                armed.append(True)
                with pytest.raises(InterlaceError):
                    train(optimizing, module, seed, range(2, 3))
                dist.barrier()
                optimizing.reset()
                module.load_state_dict(held)
                optimizing.load_state_dict(copy.deepcopy(state))
                optimizing.zero_grad()
            train(optimizing, module, seed, range(2, 4))
            made.append(full(module.state_dict()))
            module.load_state_dict(held)
            optimizing.load_state_dict(copy.deepcopy(state))
    return differing(*made)


def test_goes_on_after_a_rank_that_stalled(pool: Pool, seed: int) -> None:
    assert pool(2).run(stalled, seed) == [[], []]
