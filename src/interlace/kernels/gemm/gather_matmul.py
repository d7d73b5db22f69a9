"""All-gather + GEMM in one kernel, and the plain GEMM that it is measured against.

    kernel = GatherMatmul(rows=2048, inner=8192, columns=14336, size=4, rank=0,
                          dtype=torch.bfloat16, device=device)
    kernel.launch(stream, x, w, slots, y, None, gates, expected)    # y: [4 * 2048, 14336]

`gates` is the address of `size` words of 32 bits, one for each chunk (the own one is not read).
The kernel spins on the SMs it has: whatever raises the words must need none of this device.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from interlace.kernels.gemm.configs import Config, choose, short_tail, tiles
from interlace.kernels.gemm.gather_kernel import gather_kernel
from interlace.kernels.launch import RECENT, TYPES, Descriptors, Program, Source, block_type


def gather_source(
    config: Config,
    *,
    size: int,
    dtype: torch.dtype,
    transposed: bool = False,
    bias: bool = False,
    gated: bool = True,
    by_tma: bool = True,
    tail: bool = False,
) -> Source:
    """What is compiled; `by_tma` where tiles end with their chunk, so that TMA may store them."""
    if config.specialized:
        assert by_tma
        assert not tail
        return _specialized(config, size, dtype, transposed, bias, gated)
    element = TYPES[dtype]
    a = block_type(dtype, config.bm, config.bk)

    def weight(bn: int) -> str:
        return block_type(dtype, *((bn, config.bk) if transposed else (config.bk, bn)))

    types = {
        "x_desc": a,
        "slots_desc": a,
        "w_desc": weight(config.bn),
        "y_desc": block_type(dtype, config.bm, config.bn),
        "w_half_desc": weight(config.bn // 2),
        "y_half_desc": block_type(dtype, config.bm, config.bn // 2),
        "y": f"*{element}",
        "bias": f"*{element}",
        "gates": "*u32",
        "expected": "u32",
        **dict.fromkeys(("rows", "columns", "inner", "rank"), "i32"),
    }
    constants = {
        "SIZE": size,
        "BM": config.bm,
        "BN": config.bn,
        "BK": config.bk,
        "GROUP_M": config.group_m,
        "TRANSPOSED": transposed,
        "BIAS": bias,
        "GATED": gated and size > 1,
        "STORE_TMA": by_tma,
        "HALVES": config.halves,
        "FLATTEN": config.flatten,
        "TAIL": tail,
    }
    return Source(
        kernel=gather_kernel,
        types=types,
        constants=constants,
        num_warps=config.warps,
        num_stages=config.stages,
        divisible={"columns": 8, "inner": 8},
    )


def _specialized(
    config: Config, size: int, dtype: torch.dtype, transposed: bool, bias: bool, gated: bool
) -> Source:
    """The kernel of specialized_gather.py."""
    from interlace.kernels.gemm.specialized_gather import gather_kernel as kernel

    half, bn, bk = config.bm // 2, config.bn, config.bk
    a = block_type(dtype, half, bk, gluon=True)
    types = {
        "x_desc": a,
        "slots_desc": a,
        "w_desc": block_type(dtype, *((bn, bk) if transposed else (bk, bn)), gluon=True),
        "y_desc": block_type(dtype, half, bn, gluon=True),
        "bias": f"*{TYPES[dtype]}",
        "gates": "*u32",
        "expected": "u32",
        **dict.fromkeys(("rows", "columns", "inner", "rank"), "i32"),
    }
    constants = {
        "SIZE": size,
        "BM": config.bm,
        "BN": bn,
        "BK": bk,
        "GROUP_M": config.group_m,
        "STAGES": config.stages,
        "TRANSPOSED": transposed,
        "BIAS": bias,
        "GATED": gated and size > 1,
    }
    return Source(kernel=kernel, types=types, constants=constants, num_warps=config.warps)


class GatherMatmul:
    """y[c] = (x if c == rank else slots[c]) @ w, for each chunk c as it comes, own chunk first."""

    def __init__(
        self,
        *,
        rows: int,
        inner: int,
        columns: int,
        size: int,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        transposed: bool = False,
        bias: bool = False,
        gated: bool = True,
        tail: bool | None = None,
        config: Config | None = None,
    ) -> None:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        config = config or choose(rows=rows, columns=columns, parts=size, processors=processors)
        self.config = config
        total = tiles(config, rows, columns, size)
        source = gather_source(
            config,
            size=size,
            dtype=dtype,
            transposed=transposed,
            bias=bias,
            gated=gated,
            by_tma=size == 1 or rows % config.bm == 0,
            tail=config.halves and short_tail(total, processors) if tail is None else tail,
        )
        self._program = Program(source, device)
        self._grid = min(processors * config.blocks, total)
        weight = (columns, inner) if transposed else (inner, columns)
        result = (size * rows, columns)
        shapes = [(rows, inner), (size * rows, inner), weight, result, weight, result]
        if config.specialized:
            shapes = shapes[:4]
        self._specialized = config.specialized
        self._operands = [Descriptors(self._program, i, shape) for i, shape in enumerate(shapes)]
        self._bound = lru_cache(maxsize=RECENT)(self._bind)
        self._numbers = (rows, columns, inner, rank)

    def launch(
        self,
        stream: int,
        x: torch.Tensor,
        w: torch.Tensor,
        slots: torch.Tensor | None,
        y: torch.Tensor,
        bias: torch.Tensor | None,
        gates: int,
        expected: int,
    ) -> None:
        """Issues the GEMM on that stream (its handle); waits for nothing."""
        key = (
            x.data_ptr(),
            x.data_ptr() if slots is None else slots.data_ptr(),
            w.data_ptr(),
            y.data_ptr(),
            0 if bias is None else bias.data_ptr(),
        )
        args = (*self._bound(*key), gates or 0, expected & 0xFFFFFFFF, *self._numbers)
        self._program.launch(stream, self._grid, args)

    def _bind(self, x: int, slots: int, w: int, y: int, bias: int) -> tuple[Any, ...]:
        """The arguments up to the gates."""
        operands = (x, slots, w, y) if self._specialized else (x, slots, w, y, w, y)
        each = zip(self._operands, operands, strict=True)
        made = (arg for operand, at in each for arg in operand.make(at))
        return (*made, bias) if self._specialized else (*made, y, bias)
