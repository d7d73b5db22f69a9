"""Matrices in FP8 whose rows carry their scale, and the transposed copy that Hopper's GEMM needs.

    x8 = quantize(x, E4M3, transpose=True)
    x8.dequantize()         # [M, K]
    x8.t().data             # [K, M]: the same numbers for a product over M

Note [Packed rows]
    A packed matrix [M, K] is one FP8 tensor [M, width(K)]: a row holds its K numbers, zeros up to
    a multiple of 16, and TAIL bytes, of which the first four are 1 / scale in fp32 and the others
    zeros. Whatever moves rows (a gather, a copy of a chunk, a send) moves their scale in the same
    copy. TAIL is a line of a GPU's L2: where K is a multiple of 128, every row begins at one, and a
    GEMM is as fast as on dense rows (with 32 bytes it takes 2 to 3 % longer on an H200).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from interlace.errors import InputError

ALIGNMENT = 16
"""FP8 GEMMs take this many elements of a row at a time."""
TAIL = 128
"""Bytes behind the numbers of a row."""


def padded(count: int) -> int:
    """`count`, rounded up to what a GEMM can add over."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def width(columns: int) -> int:
    """Bytes of a packed row of `columns` numbers."""
    return padded(columns) + TAIL


def numbers(packed: Tensor) -> Tensor:
    """The FP8 numbers of packed rows, with the zeros behind them: a view [M, padded(K)]."""
    return packed[:, :-TAIL]


def scales(packed: Tensor) -> Tensor:
    """1 / scale of each packed row: a view [M, 1] of fp32."""
    column = packed.shape[1] // 4 - TAIL // 4
    return packed.view(torch.float32)[:, column : column + 1]


@dataclass(frozen=True, eq=False)
class Float8Data:
    """A quantised matrix [M, K]: element (i, j) stands for `data[i, j] * scale_inv[i, 0]`."""

    packed: Tensor
    """float8 [M, width(K)], see Note [Packed rows]; all rows have one scale."""
    columns: int
    """K."""
    transposed: Tensor | None = None
    """The transpose, packed: float8 [K, width(M)]; None if it was not asked for."""

    @property
    def data(self) -> Tensor:
        """The FP8 numbers: a view [M, K]."""
        return self.packed[:, : self.columns]

    @property
    def scale_inv(self) -> Tensor:
        """1 / scale of each row: a view [M, 1] of fp32."""
        return scales(self.packed)

    def t(self) -> Float8Data:
        """The transpose [K, M rounded up to 16], by its copy.

        Raises:
            InputError: it was quantised without `transpose=True`.
        """
        if self.transposed is None:
            raise InputError("there is no transposed copy: quantize with transpose=True")
        rows = padded(self.packed.shape[0])
        return Float8Data(self.transposed, rows, self.packed)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers that it stands for [M, K], rounded once to fp32, then to `dtype`."""
        return (self.data.float() * self.scale_inv).to(dtype)
