"""Launches the kernels of grouped linear layers with little host work.

A kernel is compiled once for what decides its code, as Triton itself would distinguish launches:
the types, and which numbers and addresses are multiples of 16. Everything is enqueued on the
current stream; nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from interlace.kernels.launch import (
    ELEMENTS,
    RECENT,
    KernelSource,
    LoadedKernel,
    block_type,
    divisible,
    kernel_of,
    matrix,
    on,
    stream_of,
)
from interlace.nn.grouped.kernel import ends_kernel, rows_kernel, sums_kernel, wgrad_kernel
from interlace.nn.grouped.products import ROWS, SUMS, TILE

STAGES = 3
"""Triton's own default."""
MOST_GROUPS = 4096
"""One block adds up the sizes of no more."""

Whole = tuple[bool, ...]
"""Which of some arguments are multiples of 16."""


def wgrad_source(out: torch.dtype, accumulate: bool, whole: Whole) -> KernelSource:
    """`whole`: tokens, rows, columns and the address of `out`."""
    return _source(
        wgrad_kernel,
        {**TILE, "ACCUMULATE": accumulate},
        divisible(("tokens", "rows", "columns", "out"), whole),
        num_warps=8,
        dy_desc=block_type(torch.bfloat16, TILE["BK"], TILE["BM"]),
        x_desc=block_type(torch.bfloat16, TILE["BK"], TILE["BN"]),
        out="*" + ELEMENTS[out],
    )


def rows_source(bias: bool, whole: Whole) -> KernelSource:
    """`whole`: groups, tokens, columns and the address of `bias`."""
    names = ("groups", "tokens", "columns", "bias")
    return _source(rows_kernel, {**ROWS, "BIAS": bias}, divisible(names, whole))


def sums_source(whole: Whole) -> KernelSource:
    """`whole`: tokens and columns."""
    return _source(sums_kernel, SUMS, divisible(("tokens", "columns"), whole))


def ends_source(sizes: torch.dtype, block: int) -> KernelSource:
    """The sizes may lie anywhere."""
    warps, kind = 1 if block <= 256 else 4, "*" + ELEMENTS[sizes]
    return _source(ends_kernel, {"BLOCK": block}, {"sizes": 1}, num_warps=warps, sizes=kind)


def _source(
    kernel: Any,
    constants: Mapping[str, Any],
    divisible: Mapping[str, int],
    num_warps: int = 4,
    **types: str,
) -> KernelSource:
    """A kernel whose arguments have these `types`, or those of most kernels."""
    tensors = dict.fromkeys(("dy", "x", "y", "bias", "out"), "*bf16")
    numbers = dict.fromkeys(("groups", "tokens", "rows", "columns"), "i32")
    return KernelSource(
        kernel=kernel,
        types={**tensors, "ends": "*i32", **numbers, "stride": "i64", **types},
        constants=constants,
        num_warps=num_warps,
        num_stages=STAGES,
        divisible=divisible,
    )


@lru_cache(maxsize=4 * RECENT)
def wgrad_operands(
    program: LoadedKernel, dy: int, x: int, tokens: int, rows: int, columns: int
) -> tuple[Any, ...]:
    """The arguments that stand for the matrices at these addresses; nothing else is in them."""
    left = matrix(program, 0, dy, (tokens, rows))
    right = matrix(program, 1, x, (tokens, columns))
    return (*left, *right, dy, x)


def weight_gradient(
    dy: torch.Tensor, x: torch.Tensor, ends: torch.Tensor, out: torch.Tensor, accumulate: bool
) -> None:
    """`out[g] (+)= dy[rows of g].T @ x[rows of g]`; dy and x dense, from multiples of 16 bytes."""
    num, rows, columns = out.shape
    tokens, device, address = dy.shape[0], dy.device, out.data_ptr()
    whole = tokens % 16 == 0, rows % 16 == 0, columns % 16 == 0, address % 16 == 0
    grid = num * -(-rows // TILE["BM"]) * -(-columns // TILE["BN"])
    with on(device):
        program = kernel_of(device, wgrad_source, out.dtype, accumulate, whole)
        operands = wgrad_operands(program, dy.data_ptr(), x.data_ptr(), tokens, rows, columns)
        numbers = ends.data_ptr(), address, tokens, rows, columns
        program.launch(stream_of(device), grid, (*operands, *numbers))


def finish_rows(y: torch.Tensor, bias: torch.Tensor | None, ends: torch.Tensor) -> None:
    """Adds each group's bias to its rows of y (dense), and clears the rows behind the last."""
    (tokens, columns), num, device = y.shape, ends.shape[0], y.device
    added = 0 if bias is None else bias.data_ptr()
    whole = num % 16 == 0, tokens % 16 == 0, columns % 16 == 0, added % 16 == 0
    with on(device):
        program = kernel_of(device, rows_source, bias is not None, whole)
        program.launch(
            stream_of(device), -(-tokens // ROWS["BK"]),
            (y.data_ptr(), added, ends.data_ptr(), num, tokens, columns),
            -(-columns // ROWS["BN"]),
        )  # fmt: skip


def row_sums(dy: torch.Tensor, ends: torch.Tensor, out: torch.Tensor) -> None:
    """`out[g] = dy[rows of g].sum(0)`, all dense, from multiples of 16 bytes."""
    (tokens, columns), num, device = dy.shape, ends.shape[0], dy.device
    with on(device):
        program = kernel_of(device, sums_source, (tokens % 16 == 0, columns % 16 == 0))
        numbers = dy.data_ptr(), ends.data_ptr(), out.data_ptr(), tokens, columns
        program.launch(stream_of(device), num * -(-columns // SUMS["BN"]), numbers)


def group_ends(sizes: torch.Tensor, tokens: int) -> torch.Tensor:
    """`sizes.cumsum(0, dtype=torch.int32).clamp_(0, tokens)`, of sizes on a GPU, in one launch."""
    num, device = sizes.shape[0], sizes.device
    if type(sizes) is not torch.Tensor or num > MOST_GROUPS:
        return sizes.cumsum(0, dtype=torch.int32).clamp_(0, tokens)
    ends = torch.empty(num, dtype=torch.int32, device=device)
    block = max(32, 1 << (num - 1).bit_length())
    with on(device):
        program = kernel_of(device, ends_source, sizes.dtype, block)
        numbers = sizes.data_ptr(), ends.data_ptr(), num, sizes.stride(0), tokens
        program.launch(stream_of(device), 1, numbers)
    return ends
