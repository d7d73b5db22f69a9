"""A matrix in FP8 with its scales, and the transposed copy that Hopper's GEMM needs.

x8 = quantize(x, E4M3, transpose=True)
x8.dequantize()         # [M, K]
x8.t().data             # [K, M]: the same numbers for a product over M
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from interlace.errors import InputError

ALIGNMENT = 16
"""FP8 GEMMs take this many elements of a row at a time."""


def padded(count: int) -> int:
    """`count`, rounded up to what a GEMM can add over."""
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, eq=False)
class Float8Data:
    """A quantised matrix: element (i, j) stands for `data[i, j] * scale_inv[i or 0, 0]`."""

    data: Tensor
    """float8 [M, K], contiguous."""
    scale_inv: Tensor
    """fp32, 1 / scale: [1, 1], or [M, 1] where each row has its scale."""
    transposed: Tensor | None = None
    """float8 [K, M rounded up to 16], zeros behind M; None if it was not asked for."""
    transposed_scale_inv: Tensor | None = None
    """`scale_inv` itself, or fp32 [K, 1] where each row has its scale."""

    def t(self) -> Float8Data:
        """The transpose, by its copy: an InputError if there is none."""
        if self.transposed is None or self.transposed_scale_inv is None:
            raise InputError("there is no transposed copy: quantize with transpose=True")
        return Float8Data(self.transposed, self.transposed_scale_inv, self.data, self.scale_inv)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers that it stands for [M, K], each rounded once to fp32, then to `dtype`."""
        return (self.data.float() * self.scale_inv).to(dtype)

    def split(self, rows: Sequence[int]) -> list[Float8Data]:
        """Views of as many rows each, with their part of the transposed copy.

        Raises InputError if `rows` do not add up to M, or where a transposed copy would be cut at
        a row that is no multiple of 16: its parts would be no operands of a GEMM.
        """
        count = self.data.shape[0]
        if sum(rows) != count or any(size < 0 for size in rows):
            raise InputError(f"rows {list(rows)} do not add up to the {count} that there are")
        parts, start = [], 0
        for size in rows:
            stop = start + size
            across = None
            if self.transposed is not None:
                if size and start % ALIGNMENT:
                    raise InputError(
                        f"rows {list(rows)} cut the transposed copy at {start}: cut at multiples "
                        f"of {ALIGNMENT}, or quantize each part"
                    )
                across = self.transposed[:, start : start + padded(size)]
            scales = self.scale_inv if self.scale_inv.numel() == 1 else self.scale_inv[start:stop]
            parts.append(
                Float8Data(self.data[start:stop], scales, across, self.transposed_scale_inv)
            )
            start = stop
        return parts
