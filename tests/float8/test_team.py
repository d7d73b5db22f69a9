"""Shards on real ranks: one scale for a team, or a scale each that travels with the bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.support.pool import Pool

from interlace.float8 import E4M3, Float8Data, Recipe, amax_of, matmul, quantize


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.flatten().view(torch.uint8).tolist())


def product(a: Float8Data, b: Float8Data) -> bytes:
    """Of a @ b.T; a NaN has the same bits whatever its sign."""
    y = matmul(a, b)
    return bits(y.masked_fill(y.isnan(), torch.nan))


def whole(seed: int, spoil: str) -> torch.Tensor:
    """32 rows: 20 of rank 0 and 12 of rank 1; or all of them rank 0's."""
    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(seed)).bfloat16()
    if spoil == "outlier":
        x[-1, -1] = 1e4
    if spoil == "zeros":
        x[20:] = 0
    if spoil == "inf":
        x[25, 3] = torch.inf
    if spoil == "nan":
        x[25, 3] = torch.nan
    return x


def gathered(made: Float8Data, sizes: list[int]) -> list[Float8Data]:
    """All ranks' shards; as bytes, since gloo refuses FP8, and padded, since it wants one size."""
    rows = torch.zeros(max(sizes), made.packed.shape[1], dtype=torch.uint8)
    rows[: len(made.packed)] = made.packed.view(torch.uint8)
    every = [torch.empty_like(rows) for _ in sizes]
    dist.all_gather(every, rows)
    pairs = zip(every, sizes, strict=True)
    return [Float8Data(part[:size].view(E4M3), made.columns) for part, size in pairs]


def quantized(seed: int, spoil: str, team: bool, sizes: list[int]) -> list[bytes]:
    """The shard; all shards, gathered, times a weight; and all shards."""
    rank = dist.get_rank()
    x = whole(seed, spoil).split(sizes)[rank]
    recipe = Recipe(scale="team" if team else "shard")
    amax = amax_of(x)
    if team:
        dist.all_reduce(amax, dist.ReduceOp.MAX)
    made = quantize(x, E4M3, recipe, amax=amax)
    parts = gathered(made, sizes)
    w = quantize(whole(seed + 1, "nothing")[:16], E4M3)
    y = b"".join(product(part, w) for part in parts)
    return [bits(made.packed), y, bits(torch.cat([part.packed for part in parts]))]


@pytest.mark.parametrize("sizes", [[20, 12], [32, 0]], ids=str)
@pytest.mark.parametrize("spoil", ["nothing", "outlier", "zeros", "inf", "nan"])
def test_one_scale_is_that_of_the_whole(
    pool: Pool, spoil: str, sizes: list[int], seed: int
) -> None:
    alone = quantize(whole(seed, spoil), E4M3, Recipe(scale="team"))
    results = pool(2).run(quantized, seed, spoil, True, sizes)
    w = quantize(whole(seed + 1, "nothing")[:16], E4M3)
    assert results[0][0] + results[1][0] == bits(alone.packed)
    for result in results:
        assert result[1:] == [product(alone, w), bits(alone.packed)]


@pytest.mark.parametrize("spoil", ["nothing", "outlier", "zeros", "inf", "nan"])
def test_a_scale_each_travels_with_the_bytes(pool: Pool, spoil: str, seed: int) -> None:
    shards = [quantize(part, E4M3) for part in whole(seed, spoil).split([20, 12])]
    results = pool(2).run(quantized, seed, spoil, False, [20, 12])
    assert [result[0] for result in results] == [bits(shard.packed) for shard in shards]
    w = quantize(whole(seed + 1, "nothing")[:16], E4M3)
    for result in results:
        assert result[1] == b"".join(product(shard, w) for shard in shards)
        assert result[2] == results[0][0] + results[1][0]
