"""Current scaling on CUDA, bit for bit rule.py: a kernel reads for the maximum, another casts.

    amax_kernel    the largest magnitude: of each of PARTS parts, or of each row, or column
    cast_kernel    scale, cast and transpose: one read, one write each of data and copy

A tensor is read in tiles of [BM, BK], tile t at (t // n, t % n) of the n to a row. No kernel waits
for another inside: `cast_kernel` joins the parts again in each of its programs, which costs less
than a third launch, or a word that must be zero before the first.

Note [bf16 as int16]
    bf16 is read as int16 and widened by a shift, which is exact in Triton's interpreter too.
"""

# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from interlace.float8.data import TAIL
from interlace.float8.recipe import Recipe
from interlace.kernels.launch import TYPES, KernelSource, kernel_of, on, stream_of

PARTS = 512
"""Programs of the maximum of a whole tensor, and numbers that they give: for any size."""
MOST = 16 * PARTS
"""Numbers that `cast_kernel` joins: the parts of some ranks."""
AMAX_TILE: Mapping[str, int] = {"BM": 16, "BK": 512}
LINE_TILE: Mapping[str, int] = {"BM": 32, "BK": 128}
"""Of the maxima of rows or columns."""
CAST_TILE: Mapping[str, int] = {"BM": 128, "BK": 128}
WARPS = 8
KINDS = {torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5"}
MAX = tl.constexpr(3.4028234663852886e38)
"""The largest number of fp32."""
TAIL_BYTES = tl.constexpr(TAIL)
TAIL_WORDS = tl.constexpr(TAIL // 4)


@triton.jit
def wide(raw, BF16: tl.constexpr):
    """fp32 of what was loaded; see Note [bf16 as int16]."""
    if BF16:
        return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return raw.to(tl.float32)


@triton.jit
def load_tile(x, tile, across, rows, columns, stride, BF16: tl.constexpr,
              BM: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """A tile in fp32, zeros outside; and the rows and columns that it has."""
    row = (tile // across) * BM + tl.arange(0, BM)
    column = (tile % across) * BK + tl.arange(0, BK)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    raw = tl.load(x + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0)
    return wide(raw, BF16), row, column


@triton.jit
def amax_kernel(
    x, found, rows, columns, stride,
    AXIS: tl.constexpr, BF16: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """AXIS: -1, the maximum of every so manieth tile; 1, of BM rows; 0, of BK columns."""
    program = tl.program_id(0)
    across = tl.cdiv(columns, BK)
    tiles = tl.cdiv(rows, BM) * across
    first, last, step = program, tiles, tl.num_programs(0)
    if AXIS == 1:
        first, last, step = program * across, (program + 1) * across, 1
    largest = tl.zeros((BM, BK), tl.float32)
    for tile in range(first, last, step):
        value, _, _ = load_tile(x, tile, across, rows, columns, stride, BF16, BM, BK)
        size = tl.abs(value)
        largest = tl.maximum(largest, tl.where(size == size, size, 0.0))  # drops NaN
    if AXIS == -1:
        tl.store(found + program, tl.max(tl.max(largest, 1), 0))
    elif AXIS == 1:
        line = program * BM + tl.arange(0, BM)
        tl.store(found + line, tl.max(largest, 1), mask=line < rows)
    else:
        line = program * BK + tl.arange(0, BK)
        tl.store(found + line, tl.max(largest, 0), mask=line < columns)


@triton.jit
def scale_for(amax, eps, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    amax = tl.where(amax < eps, eps, amax)
    usual = (amax > 0.0) & (amax < float("inf"))  # not NaN either
    scale = tl.minimum(tl.div_rn(LARGEST, tl.where(usual, amax, LARGEST)), MAX)
    if POWER_OF_TWO:
        scale = (scale.to(tl.int32, bitcast=True) >> 23 << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def cast_tile(value, scale, LARGEST: tl.constexpr, KIND: tl.constexpr):
    scaled = value * scale
    scaled = tl.maximum(scaled, -LARGEST, propagate_nan=tl.PropagateNan.ALL)
    scaled = tl.minimum(scaled, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return scaled.to(KIND)


@triton.jit
def store_tails(words, line, scale, width, mask, LINES: tl.constexpr):
    """1 / scale and zeros behind each line of a packed matrix, seen as int32."""
    one = tl.full((LINES,), 1.0, tl.float32)
    bits = tl.div_rn(one, tl.broadcast_to(scale, (LINES,))).to(tl.int32, bitcast=True)
    lane = tl.arange(0, TAIL_WORDS)
    tail = tl.where((lane == 0)[None, :], bits[:, None], 0)
    place = width // 4 - TAIL_WORDS + lane
    at = words + line.to(tl.int64)[:, None] * (width // 4) + place[None, :]
    tl.store(at, tail, mask=mask[:, None] & (lane < TAIL_WORDS)[None, :])


@triton.jit
def cast_kernel(
    x, amax, amax_t, data, data_t, words, words_t,
    rows, columns, stride, width, width_t, count, eps,
    BY_ROW: tl.constexpr, TRANSPOSE: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    LARGEST: tl.constexpr, BF16: tl.constexpr, COUNT: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """`amax` has `count` numbers, of which the largest counts; or one for each row, and `amax_t`
    for each column. `data` and `words` are the packed rows as FP8 and as int32, `width` bytes
    each; `data_t`, `words_t` and `width_t` those of the transpose.
    """
    program = tl.program_id(0)
    across = tl.cdiv(columns, BK)
    value, row, column = load_tile(x, program, across, rows, columns, stride, BF16, BM, BK)
    here, there = row < rows, column < columns
    if BY_ROW:
        scale = scale_for(tl.load(amax + row, mask=here, other=0.0), eps, LARGEST, POWER_OF_TWO)
        factor = scale[:, None]
    else:
        index = tl.arange(0, COUNT)
        parts = tl.load(amax + index, mask=index < count, other=0.0)
        strange = tl.max((parts != parts).to(tl.int32), 0)
        largest = tl.where(strange != 0, float("nan"), tl.max(parts, 0))
        scale = scale_for(largest, eps, LARGEST, POWER_OF_TWO)
        factor = scale
    store_tails(words, row, scale, width, here & (program % across == 0), BM)
    kind = data.dtype.element_ty
    cast = cast_tile(value, factor, LARGEST, kind)
    at = data + row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(at, cast, mask=here[:, None] & (column < width - TAIL_BYTES)[None, :])
    if TRANSPOSE:
        if BY_ROW:
            found = tl.load(amax_t + column, mask=there, other=0.0)
            scale = scale_for(found, eps, LARGEST, POWER_OF_TWO)
            cast = cast_tile(value, scale[None, :], LARGEST, kind)
        store_tails(words_t, column, scale, width_t, there & (program < across), BK)
        at_t = data_t + column.to(tl.int64)[:, None] * width_t + row[None, :]
        inside = there[:, None] & (row < width_t - TAIL_BYTES)[None, :]
        tl.store(at_t, tl.trans(cast), mask=inside)


def amax_source(dtype: torch.dtype, axis: int, whole: tuple[bool, ...]) -> KernelSource:
    """`whole`: which of x's address, columns and stride are multiples of 16."""
    return KernelSource(
        kernel=amax_kernel,
        types={"x": _element(dtype), "found": "*fp32", **_numbers("rows", "columns", "stride")},
        constants={"AXIS": axis, "BF16": dtype == torch.bfloat16, **_amax_tile(axis)},
        num_warps=WARPS,
        divisible=_divisible(whole),
    )


def cast_source(
    dtype: torch.dtype, kind: torch.dtype, by_row: bool, power_of_two: bool, transpose: bool,
    count: int, whole: tuple[bool, ...],
) -> KernelSource:  # fmt: skip
    """`count`: a power of two that is no less than the numbers of `amax`; `whole` as above."""
    return KernelSource(
        kernel=cast_kernel,
        types={
            "x": _element(dtype),
            **dict.fromkeys(("amax", "amax_t"), "*fp32"),
            **dict.fromkeys(("data", "data_t"), "*" + KINDS[kind]),
            **dict.fromkeys(("words", "words_t"), "*i32"),
            **_numbers("rows", "columns", "stride", "width", "width_t", "count"),
            "eps": "fp32",
        },
        constants={
            "BY_ROW": by_row,
            "TRANSPOSE": transpose,
            "POWER_OF_TWO": power_of_two,
            "LARGEST": torch.finfo(kind).max,
            "BF16": dtype == torch.bfloat16,
            "COUNT": count,
            **CAST_TILE,
        },
        num_warps=WARPS,
        divisible={**_divisible(whole), "width": 16, "width_t": 16, "amax": 4},
        options={"enable_fp_fusion": False},
    )


def amax_of(x: Tensor) -> Tensor:
    """The maxima of PARTS parts of a matrix."""
    if not x.numel():
        return torch.zeros(PARTS, dtype=torch.float32, device=x.device)
    return _amax(x, -1)


def quantize(
    x: Tensor, recipe: Recipe, amax: Tensor | None, packed: Tensor, across: Tensor | None
) -> None:
    """`quantize_twin` of a matrix that is not empty."""
    (rows, columns), device, by_row = x.shape, x.device, amax is None
    amax_t = None
    if amax is None:
        amax, amax_t = _amax(x, 1), None if across is None else _amax(x, 0)
    elif amax.numel() > MOST:
        amax = amax.amax()
    amax = amax.reshape(-1).contiguous()
    count = 1 if by_row else triton.next_power_of_2(amax.numel())
    tiles = -(-rows // CAST_TILE["BM"]) * -(-columns // CAST_TILE["BK"])
    with on(device):
        program = kernel_of(
            device, cast_source, x.dtype, packed.dtype, by_row, recipe.power_of_two,
            across is not None, count, _whole(x),
        )  # fmt: skip
        program.launch(
            stream_of(device), tiles,
            (_bits(x), amax, amax_t, packed, across, _words(packed), _words(across), rows, columns,
             x.stride(0), packed.shape[1], 0 if across is None else across.shape[1], amax.numel(),
             recipe.eps),
        )  # fmt: skip


def _amax(x: Tensor, axis: int) -> Tensor:
    rows, columns = x.shape
    tile = _amax_tile(axis)
    if axis == -1:
        count = programs = PARTS
    elif axis == 1:
        count, programs = rows, -(-rows // tile["BM"])
    else:
        count, programs = columns, -(-columns // tile["BK"])
    found = torch.empty(count, dtype=torch.float32, device=x.device)
    with on(x.device):
        program = kernel_of(x.device, amax_source, x.dtype, axis, _whole(x))
        args = _bits(x), found, rows, columns, x.stride(0)
        program.launch(stream_of(x.device), programs, args)
    return found


def _amax_tile(axis: int) -> Mapping[str, int]:
    return AMAX_TILE if axis == -1 else LINE_TILE


def _element(dtype: torch.dtype) -> str:
    return "*i16" if dtype == torch.bfloat16 else "*" + TYPES[dtype]


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def _words(packed: Tensor | None) -> Tensor | None:
    return None if packed is None else packed.view(torch.int32)


def _numbers(*names: str) -> dict[str, Any]:
    return {name: "i64" if name == "stride" else "i32" for name in names}


def _whole(x: Tensor) -> tuple[bool, ...]:
    return x.data_ptr() % 16 == 0, x.shape[1] % 16 == 0, x.stride(0) % 16 == 0


def _divisible(whole: tuple[bool, ...]) -> dict[str, int]:
    names = ("x", "columns", "stride")
    return {name: 16 if by16 else 1 for name, by16 in zip(names, whole, strict=True)}
