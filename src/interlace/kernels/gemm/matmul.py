"""The fused GEMMs as the runtime launches them, whether their kernel is Triton or Gluon.

    gather = GatherMatmul(rows=2048, inner=8192, columns=14336, size=4, rank=0,
                          dtype=torch.bfloat16, device=device)
    gather.launch(stream, x, w, slots, y, None, gates, expected)      # y: [4 * 2048, 14336]

`GatherMatmul` is all-gather + GEMM; with one rank it is a plain GEMM. `gates` is the address of
`size` words of 32 bits, one for each chunk (the own one is not read): a chunk's rows come in
`subs` ranges, and its word is expected - 1 once all but the last are there. The kernel spins on the
SMs it has: whatever raises the words must need none of this device.

`packed` are the FP8 types of x and w where both are packed rows (Note [Packed rows] in
float8/data.py), w the transpose of such; `inner` then counts the numbers of a row, and `dtype` is
that of y. Each chunk, and w, has the scale of its first row; sums stay in the tensor cores.

`ScatterMatmul` is GEMM + reduce-scatter: other ranks' rows first. `counters` is the address of
size * subs words. Each call adds `raised` to each of them, tile by tile: word c * subs + s is of
the rows `sub_rows(s)` of chunk c, which may be read from the stage (`own`, if c is the rank itself)
once that is reached. stage[rank] is neither read nor written. If `own_parts` > subs, the last range
of the own rows is made in halves: half of that goes to its word, and half to one more word behind
all. Of `own_parts` = 0 see scatter_kernel.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

import torch

from interlace.kernels.gemm import gather_kernel, scatter_kernel
from interlace.kernels.gemm.support import PACKED, TAIL, TileConfig, choose, short_tail, tiles
from interlace.kernels.launch import RECENT, TYPES, KernelSource, block_type, kernel_of, matrix

Packed = tuple[torch.dtype, torch.dtype]
Bound = tuple[Callable[..., KernelSource], Mapping[str, tuple[int, int]], Mapping[str, Any]]
LATE = 6
"""The k-step of a block's next tile at which it raises the counter of the last one."""


def gather_source(
    config: TileConfig,
    *,
    size: int,
    dtype: torch.dtype,
    transposed: bool = False,
    bias: bool = False,
    subs: int = 1,
    by_tma: bool = True,
    tail: bool = False,
    packed: Packed | None = None,
) -> KernelSource:
    """The kernel's source; `by_tma` where tiles end with their chunk, so that TMA stores them."""
    height, half = _height(config), config.bn // 2
    blocks = {
        **dict.fromkeys(("x", "slots"), (height, config.bk)),
        "w": _weight(config, config.bn, transposed),
        "y": (height, config.bn),
        "w_half": _weight(config, half, transposed),
        "y_half": (height, half),
    }
    constants = {"SIZE": size, "TRANSPOSED": transposed, "BIAS": bias, "GATED": size > 1}
    constants["PIECES"] = subs
    if config.specialized:
        assert by_tma
        assert not tail
        assert transposed or not packed
        from interlace.kernels.gemm.specialized import gather_kernel as kernel

        constants["TAIL"] = TAIL if packed else 0
        return _source(kernel, config, dtype, blocks, constants, packed)
    assert packed is None
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
    own_parts: int = 1,
    by_tma: bool = True,
) -> KernelSource:
    """The kernel's source; `by_tma` where tiles end with their chunk, so that TMA stores them."""
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
        "OWN_PARTS": own_parts,
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
    packed: Packed | None = None,
    **options: Any,
) -> KernelSource:
    """A kernel with tensor descriptors of these `blocks`, compiled as its config says."""
    gluon = config.specialized
    kinds: dict[str, torch.dtype] = {}
    if packed is not None:
        kinds = {"x": packed[0], "slots": packed[0], "w": packed[1]}
    own = {"STAGES": config.stages} if gluon else {"FLATTEN": True}
    shared = {"BM": config.bm, "BN": config.bn, "BK": config.bk, "GROUP_M": config.group_m}
    return KernelSource(
        kernel=kernel,
        types={
            **{
                f"{name}_desc": block_type(kinds.get(name, dtype), *at, gluon=gluon)
                for name, at in blocks.items()
            },
            **dict.fromkeys(("x", "slots", "w"), "*fp32"),
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

    MAY_HALVE: ClassVar[bool]

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
        own_parts: int = 1,
        config: TileConfig | None = None,
        packed: Packed | None = None,
    ) -> None:
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        config = config or (PACKED if packed else None)
        self.config = config = config or choose(
            rows=rows,
            columns=columns,
            parts=size,
            processors=self._processors,
            may_halve=self.MAY_HALVE,
        )
        self._rows, self._columns, self._inner = rows, columns, inner
        self._size, self._rank = size, rank
        self._tiles = tiles(config, rows, columns, size)
        self._grid = min(self._processors * config.blocks, self._tiles)
        self._weight = (columns, inner) if transposed else (inner, columns)
        self._pitch = inner + TAIL if packed else 0
        source, self._shapes, more = self._bind(subs, own_parts)
        whole = size == 1 or rows % config.bm == 0
        facts: dict[str, Any] = {"size": size, "dtype": dtype, "transposed": transposed}
        facts |= {"bias": bias, **({"packed": packed} if packed else {})}
        self._program = kernel_of(device, source, config, **facts, by_tma=whole, **more)
        self._operands = lru_cache(maxsize=RECENT)(self._make_operands)

    def _bind(self, subs: int, own_parts: int) -> Bound:
        """The kernel's source, the shapes of its matrices, and what else it is compiled for."""
        raise NotImplementedError

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
                pitch = self._pitch if operand in ("x", "slots", "w") else 0
                args += matrix(self._program, index, at[operand], self._shapes[operand], pitch)
        raise AssertionError("operands come first")

    def _issue(self, stream: int, matrices: Sequence[torch.Tensor | None], *numbers: int) -> None:
        operands = self._operands(*[0 if m is None else m.data_ptr() for m in matrices])
        self._program.launch(stream, self._grid, (*operands, *numbers))


class GatherMatmul(PersistentMatmul):
    """y[c] = (x if c == rank else slots[c]) @ w, for each chunk c as it comes, own chunk first."""

    MAY_HALVE = True

    def _bind(self, subs: int, own_parts: int) -> Bound:
        rows = self._size * self._rows
        shapes = {
            "x": (self._rows, self._inner),
            "slots": (rows, self._inner),
            "w": self._weight,
            "y": (rows, self._columns),
        }
        assert subs == 1 or self._rows % (subs * self.config.bm) == 0, "pieces are whole tiles"
        tail = self.config.halves and short_tail(self._tiles, self._processors)
        return gather_source, shapes, {"tail": tail, "subs": subs}

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
        numbers = (gates or 0, expected & 0xFFFFFFFF)
        sizes = (self._rows, self._columns, self._inner, self._rank)
        self._issue(stream, (x, x if slots is None else slots, w, y, bias), *numbers, *sizes)


class ScatterMatmul(PersistentMatmul):
    """x @ w, with each rank's rows apart; see the module for the rest."""

    MAY_HALVE = False

    def _bind(self, subs: int, own_parts: int) -> Bound:
        config, rows = self.config, self._size * self._rows
        m_tiles = -(-self._rows // config.bm)
        self.subs = max(s for s in range(1, subs + 1) if m_tiles % s == 0)
        self._sub = m_tiles // self.subs * config.bm
        halves = 2 if config.specialized else 1  # each half of such a tile raises its counter
        self.raised = self._tiles // self._size // self.subs * halves
        """The amount by which one call raises each counter."""
        shapes = {
            "x": (rows, self._inner),
            "w": self._weight,
            "stage": (rows, self._columns),
            "own": (self._rows, self._columns),
        }
        halved, slabs = own_parts > subs, own_parts == 0 and subs > 1
        if halved or slabs:
            ranges = 2 * subs if halved else subs
            assert self._rows % (ranges * config.bm) == 0, "ranges are whole tiles"
        own_parts = subs + 1 if halved else int(not slabs)  # the others are made alike
        more = {"rank": self._rank, "subs": self.subs, "own_parts": own_parts}
        return scatter_source, shapes, more

    def sub_rows(self, sub: int) -> range:
        """The rows of a chunk that the counter of that range is for."""
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
        sizes = (self._rows, self._columns, self._inner)
        self._issue(stream, (x, w, stage, own, bias), counters, *sizes)
