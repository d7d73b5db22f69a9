"""GEMM + reduce-scatter: other ranks' rows first, and each tile says when it is made.

    kernel = ScatterMatmul(rows=1024, inner=3584, columns=4096, size=4, rank=0,
                           dtype=torch.bfloat16, device=device, subs=2)
    kernel.launch(stream, x, w, stage, own, None, counters)

`counters` is the address of size * subs words. Each call adds `raised` to each of them, tile by
tile: word c * subs + s is of the rows `sub_rows(s)` of chunk c, which may be read from the stage
(`own`, if c is the rank itself) once that is reached. stage[rank] is neither read nor written.
`lead` says when the own ranges' turns come, and where the rows of all lie; see scatter_kernel.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from interlace.kernels.gemm.configs import Config, choose, tiles
from interlace.kernels.gemm.scatter_kernel import scatter_kernel
from interlace.kernels.launch import RECENT, TYPES, Descriptors, Program, Source, block_type

LATE = 6
"""The k-step of a block's next tile at which it raises the counter of the last one."""


def scatter_source(
    config: Config,
    *,
    size: int,
    rank: int,
    dtype: torch.dtype,
    transposed: bool = False,
    bias: bool = False,
    subs: int = 1,
    lead: int | None = None,
    by_tma: bool = True,
) -> Source:
    """What is compiled; `by_tma` where tiles end with their chunk, so that TMA may store them."""
    lead = subs if lead is None else lead
    if config.specialized:
        assert by_tma
        return _specialized(config, size, rank, dtype, transposed, bias, subs, lead)
    element = TYPES[dtype]
    halves = config.halves and by_tma
    to = block_type(dtype, config.bm, config.bn // (2 if halves else 1))
    weight = (config.bn, config.bk) if transposed else (config.bk, config.bn)
    types = {
        "x_desc": block_type(dtype, config.bm, config.bk),
        "w_desc": block_type(dtype, *weight),
        "stage_desc": to,
        "own_desc": to,
        **dict.fromkeys(("stage", "own", "bias"), f"*{element}"),
        "counters": "*u32",
        **dict.fromkeys(("rows", "columns", "inner"), "i32"),
    }
    constants = {
        "SIZE": size,
        "RANK": rank,
        "SUBS": subs,
        "LEAD": lead,
        "BM": config.bm,
        "BN": config.bn,
        "BK": config.bk,
        "GROUP_M": config.group_m,
        "TRANSPOSED": transposed,
        "BIAS": bias,
        "LATE": LATE,
        "STORE_TMA": by_tma,
        "HALVES": halves,
        "FLATTEN": config.flatten,
    }
    return Source(
        kernel=scatter_kernel,
        types=types,
        constants=constants,
        num_warps=config.warps,
        num_stages=config.stages,
        divisible={"columns": 8, "inner": 8},
    )


def _specialized(
    config: Config,
    size: int,
    rank: int,
    dtype: torch.dtype,
    transposed: bool,
    bias: bool,
    subs: int,
    lead: int,
) -> Source:
    """The kernel of specialized_scatter.py."""
    from interlace.kernels.gemm.specialized_scatter import REGISTERS
    from interlace.kernels.gemm.specialized_scatter import scatter_kernel as kernel

    half, bn, bk = config.bm // 2, config.bn, config.bk
    to = block_type(dtype, half, bn, gluon=True)
    types = {
        "x_desc": block_type(dtype, half, bk, gluon=True),
        "w_desc": block_type(dtype, *((bn, bk) if transposed else (bk, bn)), gluon=True),
        "stage_desc": to,
        "own_desc": to,
        "bias": f"*{TYPES[dtype]}",
        "counters": "*u32",
        **dict.fromkeys(("rows", "columns", "inner"), "i32"),
    }
    constants = {
        "SIZE": size,
        "RANK": rank,
        "SUBS": subs,
        "LEAD": lead,
        "BM": config.bm,
        "BN": bn,
        "BK": bk,
        "GROUP_M": config.group_m,
        "STAGES": config.stages,
        "TRANSPOSED": transposed,
        "BIAS": bias,
    }
    return Source(
        kernel=kernel,
        types=types,
        constants=constants,
        num_warps=config.warps,
        options={"maxnreg": REGISTERS},
    )


class ScatterMatmul:
    """x @ w, with each rank's rows apart; see the module for the rest."""

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
        subs: int = 1,
        lead: int | None = None,
        config: Config | None = None,
    ) -> None:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        config = config or choose(
            rows=rows, columns=columns, parts=size, processors=processors, may_halve=False
        )
        self.config = config
        m_tiles = -(-rows // config.bm)
        self.subs = max(s for s in range(1, subs + 1) if m_tiles % s == 0)
        self._rows, self._sub = rows, m_tiles // self.subs * config.bm
        total = tiles(config, rows, columns, size)
        self._per_part = total // size
        self._raises = 2 if config.specialized else 1  # each half of such a tile does
        source = scatter_source(
            config,
            size=size,
            rank=rank,
            dtype=dtype,
            transposed=transposed,
            bias=bias,
            subs=self.subs,
            lead=lead if self.subs == subs and (lead or self._sub * subs == rows) else None,
            by_tma=size == 1 or rows % config.bm == 0,
        )
        self._program = Program(source, device)
        self._grid = min(processors * config.blocks, total)
        weight = (columns, inner) if transposed else (inner, columns)
        shapes = [(size * rows, inner), weight, (size * rows, columns), (rows, columns)]
        self._operands = [Descriptors(self._program, i, shape) for i, shape in enumerate(shapes)]
        self._bound = lru_cache(maxsize=RECENT)(self._bind)
        self._numbers = (rows, columns, inner)

    @property
    def raised(self) -> int:
        """How far one call raises each counter."""
        return self._per_part // self.subs * self._raises

    def sub_rows(self, sub: int) -> range:
        """The rows of a chunk that the counter of that range speaks of."""
        return range(sub * self._sub, min((sub + 1) * self._sub, self._rows))

    def launch(
        self,
        stream: int,
        x: torch.Tensor,
        w: torch.Tensor,
        stage: torch.Tensor,
        own: torch.Tensor,
        bias: torch.Tensor | None,
        counters: int,
    ) -> None:
        """Issues the GEMM on that stream (its handle); waits for nothing."""
        key = (
            x.data_ptr(),
            w.data_ptr(),
            stage.data_ptr(),
            own.data_ptr(),
            0 if bias is None else bias.data_ptr(),
        )
        args = (*self._bound(*key), counters, *self._numbers)
        self._program.launch(stream, self._grid, args)

    def _bind(self, *addresses: int) -> tuple[Any, ...]:
        """The arguments up to the counters."""
        *operands, bias = addresses
        each = zip(self._operands, operands, strict=True)
        made = (arg for operand, at in each for arg in operand.make(at))
        return (*made, bias) if self.config.specialized else (*made, *operands[2:], bias)
