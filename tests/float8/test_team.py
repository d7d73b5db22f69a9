"""Shards on real ranks: one scale for a team, or a scale each that travels with the bytes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.support.pool import Pool

from interlace.errors import InputError
from interlace.float8 import E4M3, ROW_WISE, Float8Data, Recipe, amax_of, matmul, quantize

Bits = tuple[bytes, bytes]


def bits(made: Float8Data) -> Bits:
    data, scale_inv = (bytes(t.flatten().view(torch.uint8).tolist())
                       for t in (made.data, made.scale_inv))  # fmt: skip
    return data, scale_inv


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
    rows = torch.zeros(max(sizes), 48, dtype=torch.uint8)
    rows[: len(made.data)] = made.data.view(torch.uint8)
    every = [torch.empty_like(rows) for _ in sizes]
    scales = [torch.empty_like(made.scale_inv) for _ in sizes]
    dist.all_gather(every, rows)
    dist.all_gather(scales, made.scale_inv)
    return [
        Float8Data(part[:size].view(E4M3), scale)
        for part, size, scale in zip(every, sizes, scales, strict=True)
    ]


def quantized(seed: int, spoil: str, team: bool, sizes: list[int]) -> list[Bits]:
    """The shard; all shards, gathered, times a weight; and all shards."""
    rank, group = dist.get_rank(), dist.group.WORLD
    x = whole(seed, spoil).split(sizes)[rank]
    recipe = Recipe(scale="team" if team else "shard")
    made = quantize(x, E4M3, recipe, group=group)
    if team:  # the same, the reduction apart
        amax = amax_of(x)
        dist.all_reduce(amax, dist.ReduceOp.MAX)
        assert bits(quantize(x, E4M3, recipe, amax=amax)) == bits(made)
        with pytest.raises(InputError, match="amax and group"):
            quantize(x, E4M3, recipe, amax=amax, group=group)
    else:
        assert bits(made) == bits(quantize(x, E4M3))
    assert bits(quantize(x, E4M3, ROW_WISE, group=group)) == bits(quantize(x, E4M3, ROW_WISE))
    parts = gathered(made, sizes)
    w = quantize(whole(seed + 1, "nothing")[:16], E4M3)
    y = torch.cat([matmul(part, w) for part in parts])
    full = Float8Data(torch.cat([part.data for part in parts]), parts[0].scale_inv)
    return [bits(made), bits(Float8Data(y, w.scale_inv)), bits(full)]


@pytest.mark.parametrize("sizes", [[20, 12], [32, 0]], ids=str)
@pytest.mark.parametrize("spoil", ["nothing", "outlier", "zeros", "inf", "nan"])
def test_one_scale_is_that_of_the_whole(
    pool: Pool, spoil: str, sizes: list[int], seed: int
) -> None:
    x = whole(seed, spoil)
    alone = quantize(x, E4M3)
    results = pool(2).run(quantized, seed, spoil, True, sizes)
    assert results[0][0][0] + results[1][0][0] == bits(alone)[0]
    assert results[0][0][1] == results[1][0][1] == bits(alone)[1]
    w = quantize(whole(seed + 1, "nothing")[:16], E4M3)
    for result in results:
        assert result[2] == bits(alone)
        assert result[1] == bits(Float8Data(matmul(alone, w), w.scale_inv))


@pytest.mark.parametrize("spoil", ["nothing", "outlier", "zeros", "inf", "nan"])
def test_a_scale_each_travels_with_the_bytes(pool: Pool, spoil: str, seed: int) -> None:
    shards = [quantize(part, E4M3) for part in whole(seed, spoil).split([20, 12])]
    results = pool(2).run(quantized, seed, spoil, False, [20, 12])
    assert [result[0] for result in results] == [bits(shard) for shard in shards]
    both = b"".join(bits(shard)[0] for shard in shards)
    w = quantize(whole(seed + 1, "nothing")[:16], E4M3)
    y = torch.cat([matmul(shard, w) for shard in shards])
    for result in results:
        assert result[2] == (both, bits(shards[0])[1])
        assert result[1] == bits(Float8Data(y, w.scale_inv))
