"""LayerWise over parts of Parameters: experts and heads with owners of their own, the same bits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.optim import layerwise
from tests.optim.layerwise import DIM, differing, model, slowly, train, weights
from tests.optim.test_layer_wise_sharded import grid, merged, state_of
from tests.support.pool import Pool
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from interlace.errors import OptimizerError, UnsupportedError
from interlace.optim import LayerWise, Muon, muon_groups
from interlace.options import Options

HEADS, EXPERTS = 64, 6


class Mixture(nn.Module):
    """Experts in one stack, heads in one matrix, a table, and a matrix that is one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, DIM)
        self.query = nn.Linear(DIM, 8 * HEADS, bias=False)
        self.back = nn.Linear(8 * HEADS, DIM)
        self.experts = nn.Parameter(torch.randn(EXPERTS, DIM, 256) / DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.embedding(torch.arange(len(x)))
        x = x + self.back(torch.relu(self.query(x)))
        mine = self.experts.to_local() if isinstance(self.experts, DTensor) else self.experts
        return (x @ mine).square().mean((0, 2))


def muon(module: nn.Module) -> Muon:
    options = {"query.weight": {"head_dim": HEADS}}
    return Muon(muon_groups(module, options), lr=0.02, adamw={"lr": 0.01}, batched=False)


def optimized(module: Any, parts: int = 6, **options: Any) -> LayerWise:
    facts: Any = {"bucket_bytes": layerwise.SMALL, "options": Options(time_out_s=20), **options}
    return LayerWise(muon(module), module, layerwise.mesh(), split_parts=parts, **facts)


def both_ways(seed: int, early: bool) -> list[str]:
    """What differs between parts that are overlapped and delayed, and whole Parameters."""
    made = []
    for parts in (6, 1):
        module = model(seed, Mixture)
        facts: Any = {"overlap_param_gather": parts > 1, "check_replicas_every": 1}
        facts["update_under_backward"] = early and parts > 1
        with slowly(seed if parts > 1 else None):
            optimizing = optimized(module, parts, **facts)
        with optimizing:
            losses = train(optimizing, module, seed, range(5), None)
        made.append((losses, weights(module)))
    return differing(made[0][1], made[1][1]) + ["losses"] * (made[0][0] != made[1][0])


@pytest.mark.parametrize(("world", "early"), [(4, False), (2, True)])
def test_parts_have_the_bits_of_the_whole(pool: Pool, world: int, early: bool, seed: int) -> None:
    assert pool(world).run(both_ways, seed, early) == [[]] * world


def told_of(seed: int) -> tuple[str, list[str]]:
    module = model(seed, Mixture)
    params = [*module.parameters()]
    with optimized(module) as optimizing:
        told = optimizing.explain()
        train(optimizing, module, seed, range(2))  # which clips
        held = [*optimizing.state_dict()["state"]]
    groups = [param for group in optimizing.param_groups for param in group["params"]]
    assert {*groups} == {*params}
    with pytest.raises(UnsupportedError, match="split_parts"):
        optimized(DistributedDataParallel(module))
    return told, held


def test_owners_share_stacks_evenly(pool: Pool, seed: int) -> None:
    ranks = pool(4).run(told_of, seed)
    told, _ = ranks[0]
    costs = [float(cost) for cost in re.findall(r"rank \d: cost ([\d.e+]+),", told)]
    assert max(costs) < 1.3 * sum(costs) / 4
    owners = re.findall(r"experts\[(\d):\d\], of rank (\d)", told)
    assert [int(part) for part, _ in owners] == [*range(EXPERTS)]
    assert [int(owner) for _, owner in owners] == sorted(int(owner) for _, owner in owners)
    assert len({owner for _, owner in owners}) > 2
    assert "query.weight[0:256], of rank" in told
    assert "back.weight, of rank" in told
    held = [name for _, names in ranks for name in names]
    assert len(held) == len({*held})


def saved(seed: int, folder: str) -> Any:
    module = model(seed, Mixture)
    with optimized(module) as optimizing:
        train(optimizing, module, seed, range(3))
        dcp.save({"model": module.state_dict(), "optim": optimizing}, checkpoint_id=folder)
        return state_of(optimizing), weights(module), None


def loaded(seed: int, folder: str) -> Any:
    module = model(seed + 1, Mixture)
    with optimized(module) as optimizing:
        dcp.load({"model": module.state_dict(), "optim": optimizing}, checkpoint_id=folder)
        return state_of(optimizing), weights(module), None


def test_checkpoints_go_to_other_owners(pool: Pool, seed: int, tmp_path: Path) -> None:
    before = pool(4).run(saved, seed, str(tmp_path))
    after = pool(2).run(loaded, seed, str(tmp_path))
    wanted, found = merged(before), merged(after)
    assert wanted.keys() == found.keys()
    for name, values in wanted.items():
        assert differing(found[name], values) == [], name
    assert differing(after[0][1], before[0][1]) == []


def sharded(seed: int) -> list[str]:
    """What differs from whole experts, if they are sharded and cut into parts, after a first step
    of the optimizer itself.
    """
    mesh = grid(2)
    module: Any
    module, alone = model(seed, Mixture), model(seed, Mixture)
    part = distribute_tensor(module.experts.detach(), mesh.tp, [Shard(0)])
    made: Any = nn.Parameter(part)
    module.experts = made
    optimizers = [Muon([each.experts], lr=0.02, batched=False) for each in (module, alone)]
    draw = torch.Generator().manual_seed(seed)
    for step in range(3):
        alone.experts.grad = torch.randn(alone.experts.shape, generator=draw)
        module.experts.grad = distribute_tensor(alone.experts.grad, mesh.tp, [Shard(0)])
        if step == 0:
            optimizers[0].step()
            module.experts.grad = None
            optimizing = LayerWise(
                optimizers[0], module, mesh.dp, split_parts=3, bucket_bytes=layerwise.SMALL
            )
        else:
            given = module.experts.grad.to_local()
            module.experts.grad = None
            (module.experts.to_local() * given).sum().backward()
            optimizing.step()
            optimizing.zero_grad()
            optimizing.synchronize()
        optimizers[1].step()
    names = [*optimizing.state_dict()["state"]]
    found = {"experts": module.experts.detach().full_tensor()}
    optimizing.close()
    first = 3 * mesh.tp.get_local_rank()
    allowed = {f"experts[{first + i}:{first + i + 1}]" for i in range(3)}
    return [*differing(found, {"experts": alone.experts.detach()}), *({*names} - allowed)]


def test_parts_of_shards(pool: Pool, seed: int) -> None:
    assert pool(4).run(sharded, seed) == [[]] * 4


# -- slices of one matrix -------------------------------------------------------------------------


class Tall(nn.Module):
    """A tall matrix, a square one and a wide one."""

    def __init__(self) -> None:
        super().__init__()
        self.square, self.up = nn.Linear(512, 512, bias=False), nn.Linear(DIM, 512)
        self.down = nn.Linear(512, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.square(torch.relu(self.up(x)))))
        draw = torch.Generator().manual_seed(int(x.abs().sum() * 1000))
        noise = (torch.randn(p.shape, generator=draw) * p for p in self.parameters())
        return y + sum(each.sum() for each in noise) / 100  # gradients of full rank


def tall(seed: int, width: int, **options: Any) -> tuple[Any, LayerWise]:
    module = model(seed, Tall)
    adamw, gram = {"lr": 0.01}, options.pop("gram_variant", False)
    optimizer = Muon(muon_groups(module), lr=0.02, adamw=adamw, batched=False, gram_variant=gram)
    facts: Any = {"bucket_bytes": layerwise.SMALL, "options": Options(time_out_s=20), **options}
    facts |= {"split_matrices": width, "check_replicas_every": 1}
    return module, LayerWise(optimizer, module, layerwise.mesh(), **facts)


def sliced(seed: int, gram_variant: bool) -> tuple[list[str], dict[str, float], str]:
    """What differs between overlapped and synchronous slices, and how far they are from whole
    matrices, as a part of the way from the first weights; what is explained.
    """
    made, told = [], ""
    for overlap, width in ((True, 2), (False, 2), (True, 1)):
        with slowly(seed if overlap else None):
            facts = {"overlap_param_gather": overlap, "gram_variant": gram_variant}
            module, optimizing = tall(seed, width, **facts)
        first = weights(module)
        with optimizing:
            train(optimizing, module, seed, range(3), None)
            told = told or optimizing.explain()
            shapes = {tuple(p.shape) for g in optimizing.param_groups for p in g["params"]}
            assert ((256, 512) in shapes) == (width == 2)
        made.append(weights(module))
    way = {
        name: (value - made[2][name]).norm().item() / (value - first[name]).norm().item()
        for name, value in made[0].items()
    }
    return differing(made[0], made[1]), way, told


@pytest.mark.parametrize("gram_variant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_slices_are_updated_together(pool: Pool, gram_variant: bool, seed: int) -> None:
    for differing_ways, way, told in pool(4).run(sliced, seed, gram_variant):
        assert differing_ways == []
        assert max(way.values()) < 0.05, way
        one, other = map(int, re.findall(r"square.weight\[\d+:\d+\], of rank (\d)", told))
        assert (one % 2, other) == (0, one + 1)
        assert "down.weight, of rank" in told
        assert "def sum_512_512(slices: Team[2]" in told


def hooked_alone(seed: int) -> list[str]:
    """What differs if one rank's optimizer has a hook."""
    made = []
    for hooked in (True, False):
        module, optimizing = tall(seed, 2)
        if hooked and dist.get_rank() == 0:
            optimizing.optimizer.register_step_post_hook(lambda *_: None)
        with optimizing:
            train(optimizing, module, seed, range(2), None)
        made.append(weights(module))
    return differing(*made)


def test_slices_stay_in_order_where_one_rank_has_a_hook(pool: Pool, seed: int) -> None:
    assert pool(2).run(hooked_alone, seed) == [[], []]


def slices_saved(seed: int, folder: str) -> Any:
    module, optimizing = tall(seed, 2)
    with optimizing:
        train(optimizing, module, seed, range(2), None)
        dcp.save({"model": module.state_dict(), "optim": optimizing}, checkpoint_id=folder)
        return state_of(optimizing), weights(module), None


def slices_loaded(seed: int, folder: str) -> Any:
    module, optimizing = tall(seed + 1, 2)
    with optimizing:
        dcp.load({"model": module.state_dict(), "optim": optimizing}, checkpoint_id=folder)
        return state_of(optimizing), weights(module), None


def refused(seed: int) -> str:
    with pytest.raises(OptimizerError) as caught:
        tall(seed, 3)
    return str(caught.value)


def test_checkpoints_of_slices(pool: Pool, seed: int, tmp_path: Path) -> None:
    before = pool(4).run(slices_saved, seed, str(tmp_path))
    for told in pool(4).run(refused, seed):
        assert "split_matrices=3 is for interlace.optim.Muon" in told
    after = pool(2).run(slices_loaded, seed, str(tmp_path))
    wanted, found = merged(before), merged(after)
    assert wanted.keys() == found.keys()
    for name, values in wanted.items():
        assert differing(found[name], values) == [], name
    assert differing(after[0][1], before[0][1]) == []
