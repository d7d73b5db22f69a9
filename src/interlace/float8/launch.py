"""Launches the kernels of current scaling: what each is compiled for, and its arguments.

amax_into(found, x)
quantize(x, recipe, found, packed, across)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import triton
from torch import Tensor

from interlace.float8.kernel import (
    amax_kernel,
    cast_kernel,
    guess_kernel,
    mend_kernel,
    turn_kernel,
)
from interlace.float8.recipe import Recipe
from interlace.kernels.launch import ELEMENTS, KernelSource, divisible, kernel_of, on, stream_of

PARTS = 512
"""Programs of the maximum of a whole tensor, and numbers that they give: for any size."""
MOST = 16 * PARTS
"""Numbers that `cast_kernel` joins: the parts of some ranks."""
BLOCK = 8192
JOINED, MENDERS = 2048, 132
"""Maxima that `mend_kernel` reads at a time, and programs of it."""
SLOTS = 1 << 16
"""Scales that are kept as guesses, on each device."""
_kept: list[Tensor] = []
CAST_TILE: Mapping[str, int] = {"BM": 128, "BK": 128}
WARPS = 8
READ_WARPS = 16


def amax_source(dtype: torch.dtype, whole: tuple[bool, ...]) -> KernelSource:
    """`whole`: which of x's address, columns and stride are multiples of 16."""
    return _source(amax_kernel, dtype, None, {"BLOCK": BLOCK}, _divisible(whole), READ_WARPS)


def cast_source(
    dtype: torch.dtype, kind: torch.dtype, power_of_two: bool, rows: bool, across: bool, count: int,
    whole: tuple[bool, ...],
) -> KernelSource:  # fmt: skip
    """`rows`, `across`: which are made. `count`: a power of two that is no less than the numbers of
    `amax`; `whole` as above.
    """
    constants = {
        "ROWS": rows,
        "ACROSS": across,
        "POWER_OF_TWO": power_of_two,
        "LARGEST": torch.finfo(kind).max,
        "COUNT": count,
        **CAST_TILE,
    }
    by = {**_divisible(whole), "width": 16, "width_t": 16, "amax": 4}
    return _source(cast_kernel, dtype, kind, constants, by, enable_fp_fusion=False, launch_pdl=True)


def guess_source(
    dtype: torch.dtype, kind: torch.dtype, rows: bool, across: bool, mends: bool,
    whole: tuple[bool, ...],
) -> KernelSource:  # fmt: skip
    """The source of `guess_kernel`, or of `mend_kernel`."""
    constants = {"ROWS": rows, "ACROSS": across, "LARGEST": torch.finfo(kind).max, **CAST_TILE}
    by = {**_divisible(whole), "width": 16, "width_t": 16, "near": 4}
    options = {"enable_fp_fusion": False}
    if mends:
        constants["COUNT"] = JOINED
        options["launch_pdl"] = True
    return _source(mend_kernel if mends else guess_kernel, dtype, kind, constants, by, **options)


def turn_source(
    kind: torch.dtype, shift: bool, by: bool, alike: bool, count: int, whole: bool
) -> KernelSource:
    """`count`: a power of two that is no less than the blocks; `whole`: columns come by 16."""
    constants = {"SHIFT": shift, "BY": by, "ALIKE": alike, "COUNT": count, **CAST_TILE}
    widths = dict.fromkeys(("width", "width_by", "width_t"), 16)
    places = {"columns": 16 if whole else 1, **widths}
    return _source(turn_kernel, None, kind, constants, places, enable_fp_fusion=False)


def _source(
    kernel: Any,
    dtype: torch.dtype | None,
    kind: torch.dtype | None,
    constants: Mapping[str, Any],
    divisible: Mapping[str, int],
    num_warps: int = WARPS,
    **options: bool,
) -> KernelSource:
    """A kernel that reads x of `dtype`, and reads or writes FP8 of that `kind`."""
    types: dict[str, str] = {
        **dict.fromkeys(("found", "amax", "near", "parts"), "*fp32"),
        **dict.fromkeys(("words", "words_t", "by"), "*i32"),
        **dict.fromkeys(("rows", "columns", "count", "blocks"), "i32"),
        **dict.fromkeys(("width", "width_t", "width_by"), "i32"),
        **{"stride": "i64", "eps": "fp32"},
    }
    known: dict[str, bool] = {}
    if dtype is not None:
        bf16 = dtype == torch.bfloat16
        types["x"], known["BF16"] = "*i16" if bf16 else "*" + ELEMENTS[dtype], bf16
    if kind is not None:
        types["data"], known["E5M2"] = "*" + ELEMENTS[kind], kind == torch.float8_e5m2
    return KernelSource(
        kernel=kernel,
        types=types,
        constants={**known, **constants},
        num_warps=num_warps,
        divisible=divisible,
        options=options,
    )


def amax_into(found: Tensor, x: Tensor) -> None:
    """The maxima of PARTS parts of a matrix that is not empty."""
    rows, columns = x.shape
    if x.is_contiguous() and x.numel() < 2**31 - BLOCK:
        rows, columns = 1, x.numel()
    with on(x.device):
        program = kernel_of(x.device, amax_source, x.dtype, _whole(x, columns))
        args = _bits(x), found, rows, columns, x.stride(0)
        program.launch(stream_of(x.device), PARTS, args)


def quantize(
    x: Tensor, recipe: Recipe, amax: Tensor, packed: Tensor | None, across: Tensor | None
) -> None:
    """`quantize_reference` of a matrix that is not empty."""
    (rows, columns), device = x.shape, x.device
    either = across if packed is None else packed
    assert either is not None
    if amax.numel() > MOST:
        amax = amax.amax()
    amax = amax.reshape(-1).contiguous()
    numbers = amax.numel()
    tiles = -(-rows // CAST_TILE["BM"]) * -(-columns // CAST_TILE["BK"])
    with on(device):
        program = kernel_of(
            device, cast_source, x.dtype, either.dtype, recipe.power_of_two,
            packed is not None, across is not None, triton.next_power_of_2(numbers),
            _whole(x, columns),
        )  # fmt: skip
        program.launch(
            stream_of(device), tiles,
            (_bits(x), amax, packed, _words(packed), _words(across), rows, columns,
             x.stride(0), _width(packed), _width(across), numbers, recipe.eps),
        )  # fmt: skip


def quantize_near(
    x: Tensor, recipe: Recipe, slot: int, packed: Tensor | None, across: Tensor | None
) -> None:
    """`quantize` by a matrix's own maximum, with the guess that lies in one of SLOTS.

    See Note [Scales are guessed].
    """
    (rows, columns), device = x.shape, x.device
    either = across if packed is None else packed
    assert either is not None
    tiles = -(-rows // CAST_TILE["BM"]) * -(-columns // CAST_TILE["BK"])
    parts = torch.empty(2 * tiles, dtype=torch.float32, device=device)
    args = (_bits(x), _guesses(device) + 4 * slot, parts, packed, _words(packed), _words(across),
            rows, columns, x.stride(0), _width(packed), _width(across), recipe.eps)  # fmt: skip
    facts = x.dtype, either.dtype, packed is not None, across is not None
    whole, stream = _whole(x, columns), stream_of(device)
    with on(device):
        for mends, grid in ((False, tiles), (True, min(tiles, MENDERS))):
            kernel_of(device, guess_source, *facts, mends, whole).launch(stream, grid, args)


@functools.cache
def _guesses(device: torch.device) -> int:
    """The address of SLOTS scales, zeros at first, that stay."""
    _kept.append(torch.zeros(SLOTS, dtype=torch.float32, device=device))
    return _kept[-1].data_ptr()


def turn(packed: Tensor, by: Tensor | None, blocks: int, across: Tensor) -> None:
    """`turn_reference` of a matrix that is not empty."""
    rows, columns = len(packed), len(across)
    tiles = -(-rows // CAST_TILE["BM"]) * -(-columns // CAST_TILE["BK"])
    with on(packed.device):
        program = kernel_of(
            packed.device, turn_source, packed.dtype, blocks > 0, by is not None,
            blocks > 0 and rows // blocks % CAST_TILE["BM"] == 0,
            triton.next_power_of_2(max(1, blocks)), columns % 16 == 0,
        )  # fmt: skip
        program.launch(
            stream_of(packed.device), tiles,
            (packed, _words(packed), _words(by), _words(across), rows, columns,
             _width(packed), _width(by), _width(across), blocks),
        )  # fmt: skip


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def _words(packed: Tensor | None) -> Tensor | None:
    return None if packed is None else packed.view(torch.int32)


def _width(packed: Tensor | None) -> int:
    return 0 if packed is None else packed.shape[1]


def _whole(x: Tensor, columns: int) -> tuple[bool, ...]:
    return x.data_ptr() % 16 == 0, columns % 16 == 0, x.stride(0) % 16 == 0


def _divisible(whole: tuple[bool, ...]) -> dict[str, int]:
    return divisible(("x", "columns", "stride"), whole)
