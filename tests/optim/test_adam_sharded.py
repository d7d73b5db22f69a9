"""DTensor parameters, as FSDP2 makes them, on real ranks: sharded training is whole training."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from tests.support.pool import Pool
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_reduce
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from interlace.optim import AdamW
from interlace.optim.adam.plan import arrived, first_element
from interlace.optim.adam.state import local

BF16 = torch.bfloat16
SHAPES = [(8, 6), (5, 3), (1, 7), (12,)]
"""Even rows; uneven; one row, so that all ranks but the first have none; a vector."""
OPTIONS: list[dict[str, Any]] = [
    {},
    {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16, "master_weights": "remainder"},
    {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
    {"exp_avg_sq_dtype": BF16, "master_weights": "fp32"},
]


class Weights(nn.Module):
    """Parameters whose gradient is whatever is asked for."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        made = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
        self.weights = nn.ParameterList(map(nn.Parameter, made))

    def forward(self, wanted: list[Tensor]) -> Tensor:
        terms = [(w * g).sum() for w, g in zip(self.weights, wanted, strict=True)]
        return torch.stack(terms).sum()


def shard(model: Weights) -> Weights:
    """The same module, its parameters sharded by rows over all ranks."""
    fully_shard(model)
    return model


def train(model: nn.Module, optimizer: AdamW, dtype: torch.dtype, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        grads = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
        optimizer.zero_grad()
        model(grads).backward()
        optimizer.step()


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def same(one: Tensor, other: Tensor) -> bool:
    """Equal bits, gathered from all ranks: a remainder may look like a NaN."""
    word = {2: torch.int16, 4: torch.int32}[one.itemsize]
    return one.dtype == other.dtype and torch.equal(full(one).view(word), full(other).view(word))


def compare(seed: int, options: dict[str, Any], dtype: torch.dtype) -> list[int]:
    """Trains whole and sharded, and compares all bits; the sizes of this rank's first elements."""
    plain, sharded = Weights(seed, dtype), shard(Weights(seed, dtype))
    one = AdamW(plain.parameters(), lr=0.01, seed=seed, **options)
    other = AdamW(sharded.parameters(), lr=0.01, seed=seed, **options)
    for model, optimizer in ((plain, one), (sharded, other)):
        train(model, optimizer, dtype, range(4))
    for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
        assert isinstance(q, DTensor)
        assert torch.equal(p, full(q)), "stochastic rounding goes by the element's global number"
        mine, its = one.state[p], other.state[q]
        assert list(mine) == list(its)
        for name in mine:
            assert same(mine[name], its[name]), name
            if name != "step":
                assert its[name].placements == q.placements
                assert its[name].to_local().shape == q.to_local().shape
    return [first_element(q) for q in sharded.parameters()]


def exchange(seed: int, options: dict[str, Any], dtype: torch.dtype, folder: str) -> None:
    """Saves sharded with torch.distributed.checkpoint, loads sharded anew, and goes on."""
    model = shard(Weights(seed, dtype))
    optimizer = AdamW(model.parameters(), lr=0.01, seed=seed, **options)
    train(model, optimizer, dtype, range(3))
    state: dict[str, Any] = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    checkpoint.save(state, checkpoint_id=folder)
    for values in state["optimizer"]["state"].values():
        assert {n: t.dtype for n, t in values.items()}.items() >= {
            "exp_avg": options.get("exp_avg_dtype", torch.float32),
            "exp_avg_sq": options.get("exp_avg_sq_dtype", torch.float32),
        }.items()

    again = shard(Weights(seed, dtype))
    resumed = AdamW(again.parameters(), lr=0.5, **options)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        q.detach().copy_(p.detach())
    empty: dict[str, Any] = {"optimizer": get_optimizer_state_dict(again, resumed)}
    checkpoint.load(empty, checkpoint_id=folder)
    set_optimizer_state_dict(again, resumed, empty["optimizer"])
    assert resumed.param_groups[0]["seed"] == seed
    for net, opt in ((model, optimizer), (again, resumed)):
        train(net, opt, dtype, range(3, 6))
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(full(p), full(q))
        mine, its = optimizer.state[p], resumed.state[q]
        assert set(mine) == set(its)
        assert all(same(mine[n], its[n]) for n in mine)


def placements(seed: int) -> None:
    """Columns, replicas, a 2-D mesh, and a gradient that is still a sum over ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(seed)
    value, grad = torch.randn(6, 8).bfloat16(), torch.randn(6, 8).bfloat16()
    plain = value.clone().requires_grad_()
    plain.grad = grad.clone()
    # The options of a checkpoint-free step: stochastic rounding of a parameter without a master.
    whole = AdamW([plain], lr=0.01, stochastic_rounding=False)
    whole.step()
    for placement in (Shard(0), Shard(1), Replicate()):
        param = distribute_tensor(value, mesh, [placement]).requires_grad_()
        spread = grad / dist.get_world_size()  # exact: the world is a power of two
        param.grad = DTensor.from_local(spread, mesh, [Partial()])
        AdamW([param], lr=0.01, stochastic_rounding=False).step()
        assert torch.equal(full(param), plain), placement
    replica = distribute_tensor(value, mesh, [Replicate()]).requires_grad_()
    replica.grad = distribute_tensor(grad, mesh, [Replicate()])
    AdamW([replica], lr=0.01, seed=seed).step()
    seen = [torch.empty_like(value) for _ in range(mesh.size())]
    dist.all_gather(seen, local(replica).detach())
    assert all(torch.equal(seen[0], one) for one in seen), "replicas round alike"


def late(seed: int) -> list[int]:
    """Gradients that are sums over ranks yet, while one rank has to make its plan anew."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    param = distribute_tensor(torch.ones(6, 8), mesh, [Shard(0)]).requires_grad_()
    optimizer = AdamW([param], lr=0.01, seed=seed)
    calls: list[int] = []
    redistribute = DTensor.redistribute

    def counted(self: DTensor, *args: Any, **kwargs: Any) -> DTensor:
        calls[-1] += 1
        return redistribute(self, *args, **kwargs)

    DTensor.redistribute = counted  # type: ignore[method-assign]
    try:
        for _ in range(3):
            calls.append(0)
            param.grad = DTensor.from_local(torch.ones(6, 8), mesh, [Partial()])
            if dist.get_rank() == 0:
                optimizer.state[param].pop("exp_avg", None)  # on this rank alone a state moves
            optimizer.step()
    finally:
        DTensor.redistribute = redistribute  # type: ignore[method-assign]
    return calls


def functional(seed: int) -> None:
    """A gradient that a functional collective is yet to bring: its own address is 0."""
    param = torch.zeros(5, requires_grad=True)
    param.grad = all_reduce(torch.ones(5), "sum", list(range(dist.get_world_size())))
    assert type(param.grad) is AsyncCollectiveTensor
    (grad,) = arrived([param])
    assert grad is not None
    assert grad.data_ptr()
    assert torch.equal(grad, torch.full((5,), float(dist.get_world_size())))
    AdamW([param], lr=0.5, seed=seed).step()
    assert bool((param < 0).all())


def tensor_parallel(seed: int) -> None:
    """FSDP2 over tensor parallelism: columns sharded on one axis of the mesh, rows on the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(seed)
    value = torch.randn(8, 6)
    for placement in (Shard(1), Shard(0), Replicate()):
        model = nn.Linear(6, 8, bias=False)
        model.weight = nn.Parameter(distribute_tensor(value, mesh["tp"], [placement]))
        fully_shard(model, mesh=mesh["dp"])
        plain = value.clone().requires_grad_()
        options: dict[str, Any] = {
            "lr": 0.01,
            "exp_avg_sq_dtype": BF16,
            "stochastic_rounding": False,
        }
        one, other = AdamW([plain], **options), AdamW(model.parameters(), **options)
        rows = torch.arange(48.0).view(8, 6) - 20
        for _ in range(3):
            plain.grad = rows.clone()
            weight = model.weight
            assert isinstance(weight, DTensor)
            weight.grad = distribute_tensor(rows, weight.device_mesh, weight.placements)
            one.step()
            other.step()
        assert torch.equal(full(model.weight), plain), placement
        starts = [torch.zeros(1, dtype=torch.long) for _ in range(4)]
        dist.all_gather(starts, torch.tensor([first_element(model.weight)]))
        apart = len({int(start) for start in starts})
        assert apart == (2 if placement == Replicate() else 4), "each shard has its own elements"


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_sharded_is_whole_bit_for_bit(
    pool: Pool, options: dict[str, Any], world: int, seed: int
) -> None:
    """With shards that are uneven or empty. (Of powers of two the mean of equals is exact.)"""
    starts = pool(world).run(compare, seed, options, BF16)
    assert [first[0] for first in starts] == [6 * r * -(-8 // world) for r in range(world)]


@pytest.mark.parametrize("options", [OPTIONS[0], OPTIONS[1]], ids=str)
def test_distributed_checkpoint(pool: Pool, options: dict[str, Any], seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pool(2).run(exchange, seed, options, BF16, folder)


def test_placements(pool: Pool, seed: int) -> None:
    pool(2).run(placements, seed)


def test_gradients_are_placed_once_a_step(pool: Pool, seed: int) -> None:
    """Twice where a plan is made anew would be a collective that other ranks never join."""
    assert pool(2).run(late, seed) == [[1, 1, 1]] * 2


def test_gradients_of_functional_collectives(pool: Pool, seed: int) -> None:
    pool(2).run(functional, seed)


def test_under_tensor_parallelism(pool: Pool, seed: int) -> None:
    pool(4).run(tensor_parallel, seed)
