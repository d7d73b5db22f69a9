"""Who updates what: balanced over Llama's shapes, in buckets that are gathered almost unpadded."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from interlace.optim.layer_wise.optimizer import runs_of
from interlace.optim.layer_wise.ownership import (
    ALIGNMENT,
    MOST_BYTES,
    BucketPlan,
    Ownership,
    ParameterCost,
    own,
)

LLAMAS = {"8B": (32, 4096, 14336), "70B": (80, 8192, 28672)}
VOCABULARY, KEYS = 128_256, 1024
RANKS = (8, 16, 32, 64, 128)


def llama(layers: int, dim: int, hidden: int) -> list[ParameterCost]:
    """A model's parameters with the cost of Muon for the matrices inside, of AdamW for the rest."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("embed", (VOCABULARY, dim))]
    for layer in range(layers):
        square = [(dim, dim), (KEYS, dim), (KEYS, dim), (dim, dim)]
        mlp = [(hidden, dim), (hidden, dim), (dim, hidden)]
        shapes += [(f"layers.{layer}.{i}", s) for i, s in enumerate([*square, *mlp, (dim,)])]
    shapes += [("norm", (dim,)), ("head", (VOCABULARY, dim))]
    return [item(name, shape, name.startswith("layers")) for name, shape in shapes]


def item(name: str, shape: tuple[int, ...], matrix: bool) -> ParameterCost:
    """Newton-Schulz by its products, 5 times; AdamW by its bytes, of 150 operations each."""
    numel, least = math.prod(shape), min(shape)
    muon = 5 * (4 * numel * least + 2 * least**3)
    return ParameterCost(
        name, numel, "bf16", 2, muon if matrix and len(shape) == 2 else 3600.0 * numel
    )


def per_rank(
    items: list[ParameterCost], plan: Ownership, ranks: int
) -> tuple[list[float], list[int]]:
    cost, nbytes = [0.0] * ranks, [0] * ranks
    for each, owner in zip(items, plan.owners, strict=True):
        cost[owner] += each.cost
        nbytes[owner] += each.padded * each.itemsize
    return cost, nbytes


@pytest.mark.parametrize("name", LLAMAS)
def test_cost_is_balanced_and_padding_small(name: str) -> None:
    items = llama(*LLAMAS[name])
    used = sum(each.numel for each in items)
    largest = max(each.padded * each.itemsize for each in items)
    for ranks in RANKS:
        plan = own(items, ranks, 64 << 20)
        cost, nbytes = per_rank(items, plan, ranks)
        assert max(cost) * ranks <= 1.15 * sum(cost), ranks
        most = max(MOST_BYTES[0] * sum(nbytes) / ranks, MOST_BYTES[1] * largest)
        assert max(nbytes) <= most, ranks
        assert sum(bucket.numel for bucket in plan.buckets) <= 1.05 * used


def drawn(draw: random.Random) -> list[ParameterCost]:
    kinds = [("f32", 4), ("bf16", 2)]
    return [
        ParameterCost(f"p{i}", draw.randint(1, 3000), *draw.choice(kinds), cost=draw.random())
        for i in range(draw.randint(1, 30))
    ]


def check_layout(
    items: list[ParameterCost], bucket: BucketPlan, plan: Ownership, ranks: int
) -> None:
    """Places do not overlap, each lies in its owner's region, and messages bring what is wanted."""
    assert bucket.numel % (ranks * ALIGNMENT) == 0
    at: list[int | None] = [None] * bucket.numel
    for number, start in zip(bucket.items, bucket.starts, strict=True):
        owner = plan.owners[number]
        assert start % ALIGNMENT == 0
        assert bucket.bounds[owner] <= start
        assert start + items[number].numel <= bucket.bounds[owner + 1]
        for place in range(start, start + items[number].numel):
            assert at[place] is None
            at[place] = owner
    shard = bucket.numel // ranks
    sent = {p: m for m in bucket.messages() for p in range(m.start, m.stop)}
    for place, owner in enumerate(at):
        if owner is not None and owner != place // shard:
            assert (sent[place].owner, sent[place].holder) == (owner, place // shard)
        elif owner is not None:
            assert place not in sent


def test_every_parameter_has_one_place(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        items, ranks = drawn(draw), draw.randint(1, 9)
        limit = draw.choice([1, 4000, 1 << 20])
        plan = own(items, ranks, limit)
        placed = [number for bucket in plan.buckets for number in bucket.items]
        assert sorted(placed) == list(range(len(items)))
        firsts = [min(bucket.items) for bucket in plan.buckets]
        assert firsts == sorted(firsts)
        for bucket in plan.buckets:
            of = [items[number] for number in bucket.items]
            assert len({each.dtype for each in of}) == 1
            assert len(of) == 1 or sum(each.padded * each.itemsize for each in of) <= limit
            check_layout(items, bucket, plan, ranks)


def test_all_ranks_plan_alike(seed: int) -> None:
    """Where costs are equal, too."""
    items = [ParameterCost(f"p{i}", 128, "f32", 4, 1.0) for i in range(9)]
    assert own(items, 4, 2000) == own(list(items), 4, 2000)
    cost, _ = per_rank(items, own(items, 4, 2000), 4)
    assert sorted(cost) == [2.0, 2.0, 2.0, 3.0]


def test_a_large_bucket_is_gathered_in_place_and_the_others_share_one_slot() -> None:
    """An embedding among small parameters; ranks that read each other's memory copy it too."""
    sizes = {"embed": 4096, **{f"p{i}": 64 << i for i in range(4)}}
    ownership = own([ParameterCost(n, size, "f32", 4, size) for n, size in sizes.items()], 2, 2048)
    flats = [torch.zeros(bucket.numel) for bucket in ownership.buckets]
    plan: Any = Mock(ownership=ownership, names=[*sizes])
    weights: Any = [Mock(flat=flat) for flat in flats]
    for transport, alone in (("auto", "all_gather("), ("peer", "get(")):
        runs = runs_of(plan, weights, [], "sum", transport, 4 * 2048, {})
        large, *rest = [str(write(2, 0)) + str(write(2, 1)) for write, _ in runs]
        assert alone in large
        assert all("get(" in text and "all_gather(" not in text for text in rest)
        slots = {re.findall(r"regions = alloc\((\S+), symmetric=dp", text)[0] for text in rest}
        assert len(slots) == 1
    for write, _ in runs_of(plan, weights, [], "sum", "nccl", 0, {}):
        assert "all_gather(" in str(write(2, 0))


def test_the_first_buckets_are_small() -> None:
    """The first is a 16th, and none is larger than all before it."""
    items = [ParameterCost(f"p{i}", 64, "f32", 4, 1.0) for i in range(500)]
    sizes = [bucket.numel // 64 for bucket in own(items, 1, 64 * 256).buckets]
    assert sizes[:6] == [4, 4, 8, 16, 32, 64]
    assert set(sizes[6:-1]) == {64}


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_homes_are_balanced(shards: int) -> None:
    """Matrices are updated by one of the ranks that hold shards, the rest by each its shard."""
    items = [
        dataclasses.replace(
            each,
            numel=each.numel // shards,
            cost=each.cost / (1 if "layers" in each.name else shards),
            homed="layers" in each.name and each.numel > 1 << 14,
        )
        for each in llama(*LLAMAS["8B"])
    ]
    for ranks in (2, 8):
        plan = own(items, ranks, 64 << 20, shards)
        cost = [[0.0] * shards for _ in range(ranks)]
        for each, owner, home in zip(items, plan.owners, plan.homes, strict=True):
            assert (home is not None) == each.homed
            for shard in range(shards) if home is None else [home]:
                cost[owner][shard] += each.cost
        every = [one for row in cost for one in row]
        assert max(every) * len(every) <= 1.15 * sum(every), ranks
