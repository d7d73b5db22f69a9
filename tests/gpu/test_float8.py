"""FP8 on a GPU: the kernels' bits, products by `_scaled_mm`, and layers over ranks.

python -m pytest tests/gpu/test_float8.py -q --ranks 2
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.gpu.cases import on_a_gpu, transport
from tests.support.pool import Ranks
from torch import Tensor

from interlace.float8 import E4M3, E5M2, Recipe, amax_of, linear, quantize, wgrad
from interlace.float8.data import numbers, scales, width
from interlace.float8.linear import pack
from interlace.float8.products import multiply_into
from interlace.float8.quantization import quantize_reference, turn_into, turn_reference
from interlace.nn.functional import all_gather_linear, linear_all_reduce, linear_reduce_scatter

pytestmark = on_a_gpu(300)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ODD = [0.0, -0.0, 1e-40, -3e-39, 449.0, 464.0, 61440.0, -1e4, torch.inf, -torch.inf, torch.nan]


def drawn(draw: random.Random) -> Tensor:
    """A matrix of some size, type and place, with or without what is hard to cast."""
    rows, columns = (draw.choice([1, 16, 31, 128, 150, 1024, 4097]) for _ in range(2))
    x = torch.randn(rows, columns + draw.choice([0, 3, 16]), device="cuda")
    x = (x * 10.0 ** draw.randint(-6, 4))[:, :columns]
    for value in ODD if draw.random() < 0.5 else ODD[:4]:
        if draw.random() < 0.5:
            x[draw.randrange(rows), draw.randrange(columns)] = value
    if draw.random() < 0.1:
        x[:] = draw.choice([0.0, torch.nan, 1e-44])
    return x.to(draw.choice(DTYPES))


@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
def test_kernels_have_the_bits_of_the_reference(kind: torch.dtype, seed: int) -> None:
    """Rounding to FP8 too, which Triton's interpreter does not show."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(60):
        x, eps = drawn(draw), draw.choice([0.0, 0.0, 1e-12, 2.0])
        recipe = Recipe(power_of_two=draw.random() < 0.5, eps=eps, scale="team")
        made = quantize(x, kind, recipe, transpose=True)
        rows, across = (
            torch.empty(m, width(k), dtype=kind, device="cuda") for m, k in (x.shape, x.t().shape)
        )
        quantize_reference(x, recipe, amax_of(x), rows, across)
        assert made.transposed is not None
        for one, other in ((made.packed, rows), (made.transposed, across)):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), (x, recipe)


@pytest.mark.parametrize("form", ["rows", "across", "pair"])
def test_a_guessed_scale_changes_no_bit(form: str, seed: int) -> None:
    """One place, where maxima stay and leap, and other matrices come in between."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(60):
        x, kind = drawn(draw), draw.choice([E4M3, E5M2])
        if draw.random() < 0.5:
            x = torch.randn(draw.choice([17, 1024]), 512, device="cuda").bfloat16()
        made = pack(x, kind, Recipe(), form, place=(1, "x"))
        rows, across = (
            torch.empty(m, width(k), dtype=kind, device="cuda") for m, k in (x.shape, x.t().shape)
        )
        quantize_reference(x, Recipe(), amax_of(x), rows, across)
        wanted = {"rows": (rows,), "across": (across,), "pair": (rows, across)}[form]
        for one, other in zip(made if form == "pair" else (made,), wanted, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), (x, kind)


@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
def test_turning_has_the_bits_of_the_reference(kind: torch.dtype, seed: int) -> None:
    """Shards of scales far from each other; or bytes alone."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(30):
        blocks, rows, columns = (
            draw.randint(1, 5),
            draw.choice([1, 37, 256, 300]),
            16 * draw.randint(1, 40),
        )
        packed, by = (
            torch.cat([quantize(drawn_shard(draw, rows, k), kind).packed for _ in range(blocks)])
            for k in (columns, 32)
        )
        given = draw.choice([0, blocks])
        other = by if given and draw.random() < 0.5 else None
        mine, twin = (packed.new_empty(columns, width(len(packed))) for _ in range(2))
        turn_into(mine, packed, other, given)
        turn_reference(twin, packed, other, given)
        assert torch.equal(mine.view(torch.uint8), twin.view(torch.uint8)), (blocks, rows, columns)


def drawn_shard(draw: random.Random, rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device="cuda") * 10.0 ** draw.randint(-6, 4)


def unpacked(packed: Tensor) -> Tensor:
    return numbers(packed).double() * scales(packed).double()


def near(found: Tensor, wanted: Tensor, size: Tensor, terms: int) -> bool:
    """Within fp32 sums, of which Hopper's tensor cores keep fewer bits, and one rounding."""
    room = size * terms**0.5 * 2.0**-13 + wanted.abs() * torch.finfo(found.dtype).eps + 1e-6
    return bool(((found.double() - wanted).abs() <= room).all())


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_products(out_dtype: torch.dtype, seed: int) -> None:
    """Blocks of one scale each, and the weight gradient over blocks."""
    torch.manual_seed(seed)
    for blocks, rows, k, n in ((1, 37, 64, 48), (3, 128, 256, 512), (4, 5, 32, 16), (2, 0, 32, 16)):
        xs = [torch.randn(rows, k, device="cuda").bfloat16() * 10.0**i for i in range(blocks)]
        x = torch.cat([quantize(part, E4M3).packed for part in xs])
        w = quantize(torch.randn(n, k, device="cuda"), E4M3).packed
        dys = [torch.randn(rows, n, device="cuda").bfloat16() for _ in range(blocks)]
        for bias in (None, torch.randn(n, device="cuda").to(out_dtype)):
            out = torch.empty(len(x), n, dtype=out_dtype, device="cuda")
            multiply_into(out, x, w, blocks, bias, False)
            wanted, size = unpacked(x) @ unpacked(w).t(), unpacked(x).abs() @ unpacked(w).abs().t()
            wanted = wanted if bias is None else wanted + bias.double()
            assert near(out, wanted, size, k), (blocks, rows, bias is None)
        left, right = (
            [quantize(part, kind) for part in parts] for parts, kind in ((dys, E5M2), (xs, E4M3))
        )
        found = wgrad(left, right, out_dtype)
        whole = [unpacked(torch.cat([one.packed for one in ones])) for ones in (left, right)]
        wanted, size = whole[0].t() @ whole[1], whole[0].abs().t() @ whole[1].abs()
        assert near(found, wanted, size, len(x)), (blocks, rows)


def test_a_layer_compiled_is_the_layer(seed: int) -> None:
    torch.manual_seed(seed)
    x, w = (torch.randn(n, 512, device="cuda").bfloat16() for n in (300, 256))
    found: list[list[Tensor]] = []
    for call in (linear, torch.compile(linear, fullgraph=True)):
        given = [t.clone().requires_grad_() for t in (x, w)]
        y = call(given[0], given[1], None, Recipe())
        y.float().square().mean().backward()
        found.append([y.detach(), *(t.grad for t in given if t.grad is not None)])
    assert all(map(torch.equal, *found))


def layers(strategy: str, seed: int) -> list[str]:
    """Layers over the ranks whose overlapped results are not those of the serial twin."""
    wrong: list[str] = []
    group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    for name, recipe in (("shard", Recipe()), ("team", Recipe(scale="team"))):
        for rows in (256, 48):
            torch.manual_seed(seed + rank)
            x = torch.randn(rows, 512, device="cuda").bfloat16()
            ups = [torch.randn(384, 512, device="cuda").bfloat16() for _ in range(2)]
            down = torch.randn(512, 384, device="cuda").bfloat16()
            results: list[list[Tensor]] = []
            for overlap in (True, False):
                given = [t.clone().requires_grad_() for t in (x, *ups, down)]
                facts: Any = {"group": group, "recipe": recipe}
                options = {"strategy": strategy, "overlap": overlap, "timeout_s": 60.0}
                facts["options"] = options | transport()
                a, b = all_gather_linear(given[0], given[1:3], **facts)
                y = linear_reduce_scatter(torch.relu(a) * b / 512, given[3], **facts)
                z = linear_all_reduce(torch.relu(a) * b / 512, given[3], **facts)
                (y.float().square().sum() + z.float().square().sum() / ranks).backward()
                results.append([y.detach(), z.detach(), *(t.grad for t in given)])  # type: ignore
            for i, (one, other) in enumerate(zip(*results, strict=True)):
                scale = other.float().abs().max() * 2.0**-6
                if not ((one.float() - other.float()).abs() <= scale).all():
                    wrong.append(f"{name}, {rows} rows: result {i}")
            if not torch.equal(results[0][0], results[1][0]) and ranks == 2 and strategy == "peer":
                wrong.append(f"{name}, {rows} rows: the output has other bits")
    return wrong


@pytest.mark.parametrize("strategy", ["auto", "peer", "fused"])
def test_layers_over_ranks(gpus: Ranks, strategy: str, seed: int) -> None:
    assert gpus.run(layers, strategy, seed, timeout_s=200) == [[]] * gpus.world
