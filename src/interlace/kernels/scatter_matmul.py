"""GEMM + reduce-scatter in one kernel: other ranks' rows first, each tile says when it is made.

    kernel = ScatterMatmul(rows=1024, inner=3584, columns=4096, size=4, rank=0,
                           dtype=torch.bfloat16, device=device, subs=2)
    kernel.launch(stream, x, w, stage, slots, y, None, gates, expected, counters)

`counters` is the address of size * subs words. Each call adds `tiles_per_part(s)` to word
c * subs + s, tile by tile, for every chunk c but the own one; a copy of the rows `sub_rows(s)` of
stage[c] may start once the sum is reached. The gate of rank r at `expected + s` says that range s of
r's part of the own rows is in slots[r]; slots[rank] is neither read nor written, and stage[rank] is
where the own part lies. Launches of one kernel must not run at the same time.
"""

from __future__ import annotations

from typing import Any

import torch

from interlace.kernels.configs import Config, choose, tiles
from interlace.kernels.launch import TYPES, Descriptors, Program, Recent, Source, block_type
from interlace.kernels.scatter_kernel import scatter_kernel

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
    gated: bool = True,
    by_tma: bool = True,
    under: bool = False,
) -> Source:
    """What is compiled; `by_tma` where tiles end with their chunk, so that TMA may store them."""
    element = TYPES[dtype]
    threads = 32 * config.warps
    halves = config.halves and by_tma
    weight = (config.bn, config.bk) if transposed else (config.bk, config.bn)
    types = {
        "x_desc": block_type(dtype, config.bm, config.bk),
        "w_desc": block_type(dtype, *weight),
        "stage_desc": block_type(dtype, config.bm, config.bn // (2 if halves else 1)),
        **dict.fromkeys(("stage", "slots", "y", "bias"), f"*{element}"),
        "gates": "*u32",
        "expected": "u32",
        "counters": "*u32",
        "shares": "*i32",
        "slot_stride": "i64",
        **dict.fromkeys(("rows", "columns", "inner"), "i32"),
    }
    constants = {
        "SIZE": size,
        "RANK": rank,
        "SUBS": subs,
        "BM": config.bm,
        "BN": config.bn,
        "BK": config.bk,
        "GROUP_M": config.group_m,
        "TRANSPOSED": transposed,
        "BIAS": bias,
        "GATED": gated and size > 1,
        "LATE": LATE,
        "UNDER": under,
        "STEP": min(config.bm, 16 * threads // config.bn),
        "LAST_STEP": min(config.bm, 64 * threads // config.bn),
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
        divisible={"columns": 8, "inner": 8, "slot_stride": 8},
    )


class ScatterMatmul:
    """y = the sum over the ranks, in order, of their x[rank] @ w; see the module for the rest."""

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
        gated: bool = True,
        under: bool | None = None,
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
        self._raised = m_tiles // self.subs * -(-columns // config.bn)
        total = tiles(config, rows, columns, size)
        source = scatter_source(
            config,
            size=size,
            rank=rank,
            dtype=dtype,
            transposed=transposed,
            bias=bias,
            subs=self.subs,
            gated=gated,
            by_tma=rows % config.bm == 0,
            under=config.blocks > 1 if under is None else under,
        )
        self._program = Program(source, device)
        self._grid = min(processors * config.blocks, total)
        self._shares = torch.zeros(1 + 2 * self._grid, dtype=torch.int32, device=device)
        weight = (columns, inner) if transposed else (inner, columns)
        shapes = [(size * rows, inner), weight, (size * rows, columns)]
        self._operands = [Descriptors(self._program, i, shape) for i, shape in enumerate(shapes)]
        self._bound = Recent(self._bind)
        self._numbers = (rows * columns, rows, columns, inner)

    def tiles_per_part(self, sub: int = 0) -> int:
        """How far one call raises the counter of that range of each other chunk."""
        assert 0 <= sub < self.subs
        return self._raised

    def sub_rows(self, sub: int) -> range:
        """The rows of a chunk that the counter of that range speaks of."""
        return range(sub * self._sub, min((sub + 1) * self._sub, self._rows))

    def launch(
        self,
        stream: int,
        x: torch.Tensor,
        w: torch.Tensor,
        stage: torch.Tensor,
        slots: torch.Tensor,
        y: torch.Tensor,
        bias: torch.Tensor | None,
        gates: int,
        expected: int,
        counters: int,
    ) -> None:
        """Issues the GEMM on that stream (its handle); waits for nothing."""
        key = (
            x.data_ptr(),
            w.data_ptr(),
            stage.data_ptr(),
            slots.data_ptr(),
            y.data_ptr(),
            0 if bias is None else bias.data_ptr(),
        )
        args = (
            *self._bound.find(key),
            gates or 0,
            expected & 0xFFFFFFFF,
            counters,
            self._shares.data_ptr(),
            *self._numbers,
        )
        self._program.launch(stream, self._grid, args)

    def _bind(self, addresses: tuple[int, ...]) -> tuple[Any, ...]:
        """The arguments up to the gates."""
        x, w, stage, slots, y, bias = addresses
        each = zip(self._operands, (x, w, stage), strict=True)
        return (
            *(arg for operand, at in each for arg in operand.make(at)),
            *(stage, slots, y, bias),
        )
