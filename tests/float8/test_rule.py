"""The rule of current scaling, against its text again in plain Python, bit for bit."""

from __future__ import annotations

import bisect
import math
import struct
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.float8 import E4M3, E5M2, Float8Data, Recipe, amax_of, quantize
from interlace.float8.data import TAIL
from interlace.float8.rule import cast_reference

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FLT_MAX = struct.unpack("<f", bytes.fromhex("ffff7f7f"))[0]
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
MANTISSA, BIAS = {E4M3: 3, E5M2: 2}, {E4M3: 7, E5M2: 15}
INF, NAN = math.inf, math.nan


def bits_of(x: float) -> int:
    """The bits of a number of fp32."""
    return struct.unpack("<I", struct.pack("<f", x))[0]


def fp32(x: Fraction | float) -> float:
    """A positive number rounded to fp32, to nearest even; inf behind the last."""
    if isinstance(x, float) and not math.isfinite(x):
        return x
    x = Fraction(x)
    if not x:
        return 0.0
    exponent = max(math.floor(math.log2(x)) - 1, -126)
    while x >= Fraction(2) ** (exponent + 1):
        exponent += 1
    step = Fraction(2) ** (exponent - 23)
    rounded = round(x / step) * step  # Python rounds fractions to nearest even
    return INF if rounded > Fraction(FLT_MAX) else float(rounded)


def value_of(byte: int, kind: torch.dtype) -> Fraction:
    """What a byte of 0 to 0x7E (0x7B for E5M2) stands for."""
    mantissa, bias = MANTISSA[kind], BIAS[kind]
    exponent, rest = byte >> mantissa, byte & (1 << mantissa) - 1
    if not exponent:
        return Fraction(rest) * Fraction(2) ** (1 - bias - mantissa)
    return Fraction((1 << mantissa) + rest) * Fraction(2) ** (exponent - bias - mantissa)


TABLE = {kind: [value_of(byte, kind) for byte in range(0x7F if kind is E4M3 else 0x7C)]
         for kind in (E4M3, E5M2)}  # fmt: skip


def byte_of(x: float, kind: torch.dtype) -> int:
    """A number of fp32 cast to FP8: nearest, at a tie the even byte; saturated; NaN is 0x7F."""
    if x != x:
        return 0x7F
    sign, table = bits_of(x) >> 31 << 7, TABLE[kind]
    if abs(x) >= LARGEST[kind]:
        return sign | len(table) - 1
    size = Fraction(abs(x))
    above = bisect.bisect_left(table, size)
    if table[above] == size:
        return sign | above
    low, high = size - table[above - 1], table[above] - size
    below = low < high or (low == high and above % 2 == 1)
    return sign | (above - 1 if below else above)


def scale_by_rule(values: list[float], kind: torch.dtype, recipe: Recipe) -> float:
    """Step by step as the page says it."""
    amax = max((abs(x) for x in values if x == x), default=0.0)
    eps = fp32(recipe.eps)
    amax = max(amax, eps)
    if amax == 0 or amax == INF:
        return 1.0
    scale = min(fp32(Fraction(LARGEST[kind]) / Fraction(amax)), FLT_MAX)
    if recipe.power_of_two:
        scale = struct.unpack("<f", struct.pack("<I", bits_of(scale) & 0xFF800000))[0]
    return scale


def product(x: float, scale: float) -> float:
    """In fp32."""
    if x != x or abs(x) == INF:
        return x * scale
    return math.copysign(fp32(Fraction(abs(x)) * Fraction(scale)), x)


def check(x: torch.Tensor, kind: torch.dtype, recipe: Recipe) -> Float8Data:
    """`quantize` gives the bits of the rule: of the data, of the copy, and of 1 / scale."""
    made = quantize(x, kind, recipe, transpose=True)
    rows = x.reshape(-1, x.shape[-1]).double().tolist()
    columns = [list(column) for column in zip(*rows, strict=True)]
    whole = [value for row in rows for value in row]
    assert made.transposed is not None
    for lines, packed in ((rows, made.packed), (columns, made.transposed)):
        scale = scale_by_rule(whole, kind, recipe)
        tail = [bits_of(fp32(1 / Fraction(scale))), *[0] * (TAIL // 4 - 1)]
        assert packed[:, -TAIL:].view(torch.int32).tolist() == [tail] * len(lines)
        wanted = [[byte_of(product(value, scale), kind) for value in line] for line in lines]
        padding = -len(lines[0]) % 16
        data = packed[:, :-TAIL].view(torch.uint8)
        assert data.tolist() == [[*line, *[0] * padding] for line in wanted]
    return made


RECIPES = [
    Recipe(),
    Recipe(scale="team"),
    Recipe(scale="team", eps=1e-3),
    Recipe(scale="team", power_of_two=True, eps=2.0),
]
CORNERS = {
    "zeros": [0.0, -0.0, 0.0],
    "inf": [1.0, INF, -3.0, -INF, 1e5],
    "some NaN": [NAN, 3.0, -NAN, -7.0, 0.1],
    "all NaN": [NAN, NAN],
    "NaN and inf": [NAN, INF, -2.0],
    "subnormal": [1e-40, -1e-40, 1e-45, 0.0],
    "least": [1e-45, 0.0],
    "scale overflows": [1.3e-36, -1e-37],
    "largest": [3.4028234663852886e38, 1.0, -1e30],
    "outlier": [1e4, 1e-3, -0.5, 2e-5],
    "ties": [448.0, 1.0625, 1.1875, -1.0625, 232.0, 248.0, 0.001953125, 0.0009765625, 464.0],
    "exact": [448.0, 449.0, 464.0, 61440.0, -0.0],
}


@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_corners(dtype: torch.dtype, recipe: Recipe, kind: torch.dtype) -> None:
    for values in CORNERS.values():
        check(torch.tensor([values]).to(dtype), kind, recipe)


def test_a_scale_of_an_infinite_maximum_saturates_the_rest() -> None:
    x = torch.tensor([[INF, -INF, 449.0, 464.0, 61440.0, -0.0, NAN]])
    for kind, largest in LARGEST.items():
        made = check(x, kind, Recipe(scale="team"))
        assert made.scale_inv.item() == 1.0
        values = made.data[0].float().tolist()
        assert values[:2] == [largest, -largest]
        assert math.copysign(1, values[5]) == -1
        assert math.isnan(values[6])
        assert values[4] == min(61440.0, largest)


@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=str)
def test_casts_saturate_in_every_torch(kind: torch.dtype) -> None:
    """449, 464 and 61440 are NaN or infinite in the casts of some."""
    values = [448.0, 449.0, 464.0, 464.1, 480.0, 1e4, 57344.0, 61440.0, 65536.0, FLT_MAX, INF]
    values += [-x for x in values] + [0.0, -0.0, NAN, -NAN]
    made = cast_reference(torch.tensor(values), torch.ones(1), kind).view(torch.uint8)
    assert made.tolist() == [byte_of(x, kind) for x in values]


def test_an_empty_tensor_has_scale_one() -> None:
    for shape in ((0, 16), (4, 0), (2, 0, 32), (0,)):
        made = quantize(torch.zeros(shape), E4M3, Recipe(scale="team"), transpose=True)
        rows, columns = torch.Size(shape[:-1]).numel(), shape[-1]
        assert made.data.shape == (rows, columns)
        assert made.transposed is not None
        assert made.transposed.shape == (columns, -(-rows // 16) * 16 + TAIL)
        assert (made.scale_inv == 1).all()
        assert (made.t().scale_inv == 1).all()
    made = quantize(torch.zeros(2, 0), E4M3, Recipe(scale="team", eps=2.0))
    assert made.scale_inv.unique().item() == fp32(2 / 448)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_do_not_matter(dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(4, 6, 40).to(dtype)
    for view in (x, x[..., :17], x[..., 1::2], x.transpose(0, 1), x.permute(2, 0, 1), x[0, 0]):
        for recipe in RECIPES:
            one = quantize(view, E4M3, recipe, transpose=True)
            other = quantize(view.contiguous(), E4M3, recipe, transpose=True)
            for name in ("packed", "transposed"):
                mine, theirs = getattr(one, name), getattr(other, name)
                assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))


def test_a_given_maximum_is_used() -> None:
    x = torch.tensor([[1.0, -2.0, 0.5]])
    assert amax_of(x).max().item() == 2.0
    made = quantize(x, E4M3, Recipe(scale="team"), amax=torch.tensor([1.0, 7.0, 3.0]))
    assert torch.equal(made.scale_inv, torch.full((1, 1), 1 / 64))
    assert made.dequantize().tolist() == [[1.0, -2.0, 0.5]]
    made = quantize(
        x, E4M3, Recipe(scale="team"), amax=torch.tensor(1.0)
    )  # too small: the rest saturates
    assert made.data.float().tolist() == [[448.0, -448.0, 224.0]]
    assert quantize(x, E4M3, Recipe(scale="team"), amax=torch.tensor(NAN)).scale_inv.item() == 1.0


def test_no_gradient_flows() -> None:
    x = torch.randn(4, 16, requires_grad=True)
    made = quantize(x, E4M3, transpose=True)
    assert not made.data.requires_grad
    assert not made.dequantize().requires_grad


finite = st.floats(-(2.0**126), 2.0**126, width=32)


@settings(max_examples=60, deadline=None, database=None)
@given(values=st.lists(finite, min_size=1, max_size=8), power=st.booleans())
def test_nothing_is_farther_off_than_half_a_step(values: list[float], power: bool) -> None:
    """The rule for any numbers; and what comes back is near, relative to itself or the maximum."""
    x = torch.tensor([values])
    made = check(x, E4M3, Recipe(scale="team", power_of_two=power))
    amax = max(map(abs, values))
    if amax < 2e-36:
        return  # the scale is the greatest number of fp32, and too small
    for value, back in zip(x.double()[0].tolist(), made.dequantize()[0].tolist(), strict=True):
        step = max(abs(value) / 16, amax * 2.0**-9 / 448 * (2 if power else 1))
        assert abs(value - back) <= step * (1 + 1e-6)
