"""The fused GEMMs as the runtime launches them, whether their kernel is Triton or Gluon.

    gather = GatherMatmul(rows=2048, inner=8192, columns=14336, size=4, rank=0,
                          dtype=torch.bfloat16, device=device)
    gather.launch(stream, x, w, slots, y, None, gates, expected)      # y: [4 * 2048, 14336]
    scatter = ScatterMatmul(rows=1024, inner=3584, columns=4096, size=4, rank=0,
                            dtype=torch.bfloat16, device=device, subs=2)
    scatter.launch(stream, x, w, stage, own, None, counters)

`GatherMatmul` is all-gather + GEMM; with one rank it is a plain GEMM. `gates` is the address of
`size` words of 32 bits, one for each chunk (the own one is not read). The kernel spins on the SMs
it has: whatever raises the words must need none of this device.

`ScatterMatmul` is GEMM + reduce-scatter: other ranks' rows first. `counters` is the address of
size * subs words. Each call adds `raised` to each of them, tile by tile: word c * subs + s is of
the rows `sub_rows(s)` of chunk c, which may be read from the stage (`own`, if c is the rank itself)
once that is reached. stage[rank] is neither read nor written. `lead` says when the own ranges'
turns come, and where the rows of all lie; see scatter_kernel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch

from interlace.kernels.gemm import gather_kernel, scatter_kernel
from interlace.kernels.gemm.support import TileConfig, choose, short_tail, tiles
from interlace.kernels.launch import RECENT, TYPES, KernelSource, block_type, kernel_of, matrix

LATE = 6
"""The k-step of a block's next tile at which it raises the counter of the last one."""


def gather_source(
    config: TileConfig,
    *,
    size: int,
    dtype: torch.dtype,
    transposed: bool = False,
    bias: bool = False,
    by_tma: bool = True,
    tail: bool = False,
) -> KernelSource:
    """What is compiled; `by_tma` where tiles end with their chunk, so that TMA may store them."""
    height, half = _height(config), config.bn // 2
    blocks = {
        **dict.fromkeys(("x", "slots"), (height, config.bk)),
        "w": _weight(config, config.bn, transposed),
        "y": (height, config.bn),
        "w_half": _weight(config, half, transposed),
        "y_half": (height, half),
    }
    constants = {"SIZE": size, "TRANSPOSED": transposed, "BIAS": bias, "GATED": size > 1}
    if config.specialized:
        assert by_tma
        assert not tail
        from interlace.kernels.gemm.specialized import gather_kernel as kernel

        return _source(kernel, config, dtype, blocks, constants)
    constants |= {"STORE_TMA": by_tma, "HALVES": config.halves, "TAIL": tail}
    return _source(gather_kernel.gather_kernel, config, dtype, blocks, constants)


def scatter_source(
    config: TileConfig,
    *,
    size: int,
    rank: int,
    dtype: torch.dtype,
    transposed: bool = False,
    bias: bool = False,
    subs: int = 1,
    lead: int | None = None,
    by_tma: bool = True,
) -> KernelSource:
    """What is compiled; `by_tma` where tiles end with their chunk, so that TMA may store them."""
    height, halves = _height(config), config.halves and by_tma
    blocks = {
        "x": (height, config.bk),
        "w": _weight(config, config.bn, transposed),
        **dict.fromkeys(("stage", "own"), (height, config.bn // (2 if halves else 1))),
    }
    constants = {
        "SIZE": size,
        "RANK": rank,
        "SUBS": subs,
        "LEAD": subs if lead is None else lead,
        "TRANSPOSED": transposed,
        "BIAS": bias,
    }
    if config.specialized:
        assert by_tma
        from interlace.kernels.gemm.specialized import REGISTERS
        from interlace.kernels.gemm.specialized import scatter_kernel as kernel

        return _source(kernel, config, dtype, blocks, constants, maxnreg=REGISTERS)
    constants |= {"LATE": LATE, "STORE_TMA": by_tma, "HALVES": halves}
    return _source(scatter_kernel.scatter_kernel, config, dtype, blocks, constants)


def _height(config: TileConfig) -> int:
    """Rows of a block that is loaded or stored: each group of a Gluon kernel's warps has half."""
    return config.bm // 2 if config.specialized else config.bm


def _weight(config: TileConfig, columns: int, transposed: bool) -> tuple[int, int]:
    return (columns, config.bk) if transposed else (config.bk, columns)


def _source(
    kernel: Any,
    config: TileConfig,
    dtype: torch.dtype,
    blocks: Mapping[str, tuple[int, int]],
    constants: Mapping[str, Any],
    **options: Any,
) -> KernelSource:
    """A kernel with tensor descriptors of these `blocks`, compiled as its config says."""
    gluon = config.specialized
    own = {"STAGES": config.stages} if gluon else {"FLATTEN": True}
    shared = {"BM": config.bm, "BN": config.bn, "BK": config.bk, "GROUP_M": config.group_m}
    return KernelSource(
        kernel=kernel,
        types={
            **{f"{name}_desc": block_type(dtype, *at, gluon=gluon) for name, at in blocks.items()},
            **dict.fromkeys(("y", "stage", "own", "bias"), f"*{TYPES[dtype]}"),
            **dict.fromkeys(("gates", "counters"), "*u32"),
            **dict.fromkeys(("rows", "columns", "inner", "rank"), "i32"),
            "expected": "u32",
        },
        constants={**constants, **shared, **own},
        num_warps=config.warps,
        num_stages=1 if gluon else config.stages,
        divisible={} if gluon else {"columns": 8, "inner": 8},
        options=options,
    )


class PersistentMatmul:
    """One of the two kernels for one set of sizes: its program, its grid, its operands."""

    def __init__(
        self,
        source: Callable[..., KernelSource],
        config: TileConfig,
        device: torch.device,
        grid: int,
        shapes: Mapping[str, tuple[int, int]],
        **facts: Any,
    ) -> None:
        self._program = kernel_of(device, source, config, **facts)
        self._grid, self._shapes = grid, shapes
        self._operands = lru_cache(maxsize=RECENT)(self._make_operands)

    def _make_operands(self, *addresses: int) -> tuple[Any, ...]:
        """The arguments that the addresses of the matrices, and then of the bias, decide."""
        at = dict(zip((*self._shapes, "bias"), addresses, strict=True))
        args: list[Any] = []
        for index, name in enumerate(self._program.source.kernel.arg_names):
            operand = name.removesuffix("_desc").removesuffix("_half")
            if operand not in at:
                return tuple(args)
            if name == operand:
                args.append(at[operand])
            else:
                args += matrix(self._program, index, at[operand], self._shapes[operand])
        raise AssertionError("operands come first")


class GatherMatmul(PersistentMatmul):
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
        config: TileConfig | None = None,
    ) -> None:
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        config = config or choose(rows=rows, columns=columns, parts=size, processors=processors)
        self.config = config
        total = tiles(config, rows, columns, size)
        super().__init__(
            gather_source,
            config,
            device,
            min(processors * config.blocks, total),
            {
                "x": (rows, inner),
                "slots": (size * rows, inner),
                "w": (columns, inner) if transposed else (inner, columns),
                "y": (size * rows, columns),
            },
            size=size,
            dtype=dtype,
            transposed=transposed,
            bias=bias,
            by_tma=size == 1 or rows % config.bm == 0,
            tail=config.halves and short_tail(total, processors),
        )
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
        operands = self._operands(
            x.data_ptr(),
            x.data_ptr() if slots is None else slots.data_ptr(),
            w.data_ptr(),
            y.data_ptr(),
            0 if bias is None else bias.data_ptr(),
        )
        args = (*operands, gates or 0, expected & 0xFFFFFFFF, *self._numbers)
        self._program.launch(stream, self._grid, args)


class ScatterMatmul(PersistentMatmul):
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
        config: TileConfig | None = None,
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
        halves = 2 if config.specialized else 1  # each half of such a tile raises its counter
        self.raised = total // size // self.subs * halves
        """How far one call raises each counter."""
        super().__init__(
            scatter_source,
            config,
            device,
            min(processors * config.blocks, total),
            {
                "x": (size * rows, inner),
                "w": (columns, inner) if transposed else (inner, columns),
                "stage": (size * rows, columns),
                "own": (rows, columns),
            },
            size=size,
            rank=rank,
            dtype=dtype,
            transposed=transposed,
            bias=bias,
            subs=self.subs,
            lead=lead if self.subs == subs and (lead or self._sub * subs == rows) else None,
            by_tma=size == 1 or rows % config.bm == 0,
        )
        self._numbers = (rows, columns, inner)

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
        operands = self._operands(
            x.data_ptr(),
            w.data_ptr(),
            stage.data_ptr(),
            own.data_ptr(),
            0 if bias is None else bias.data_ptr(),
        )
        self._program.launch(stream, self._grid, (*operands, counters, *self._numbers))
