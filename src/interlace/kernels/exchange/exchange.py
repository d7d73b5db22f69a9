"""Collectives of small tensors as one kernel over peer memory: push, raise a flag, wait, finish.

    memory = ...                         # staging, flags and words of every rank, all zero
    exchange = PeerExchange("all_reduce", torch.bfloat16, (4096,), rank, size, device, **memory)
    exchange.prepare().launch(stream, x.data_ptr(), y.data_ptr())      # in the stream's order

A library's collective of a few kilobytes is all latency; this is a single kernel without a barrier
before or after it. All ranks of a team call the same exchanges in the same order, one after
another (on one stream, or on streams that events order).

Note [Two copies of staging suffice]
    Call c (counted from 1) uses copy c % 2 of every rank's staging. Let r push into o's copy in
    call c. In every call each rank waits for flags of all others: at least CTA 0 raises one at
    every peer and awaits one from every peer. r has ended call c - 1 (kernels of one order), so o
    had begun call c - 1, so o had ended call c - 2 with all its reads of that copy, and nobody
    reads that copy in call c - 1. One copy would not do: o may still be reading in call c - 1.

Note [Flags that a call does not use]
    The word (step, CTA, writer) has one place for all calls, and holds the number of the last call
    in which that writer's CTA raised it. Calls of other sizes use more CTAs or fewer; numbers only
    grow, so a word that some calls left alone is behind the number that a later call waits for. Nor
    can a word be ahead by more than one: the writer begins call c + 1 when it has seen all my flags
    of call c, and call c + 2 when it has seen those of c + 1, which I raise after c has ended. So a
    reader waits until the word is c or c + 1, and numbers may wrap around: an old word passes for a
    new one only after exactly 2^32 calls that all left it alone.

Note [A call that cannot end]
    A kernel that waits for a dead peer spins until someone writes 1 to the third of its words. It
    then ends with wrong results and wrong words; before the next call all ranks zero flags
    and words between two barriers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from interlace.errors import BackendError, UnsupportedError
from interlace.kernels.exchange.moves import MERGING, ONE_SHOT_NBYTES, in_one_shot, moves_of

if TYPE_CHECKING:
    from interlace.kernels.launch import KernelSource, LoadedKernel

MAX_BLOCKS = 128
"""CTAs of a call, at most: enough to fill the links, few enough to start beside the last wave of a
GEMM."""
LINE = 32
FLAG_NBYTES = 2 * MAX_BLOCKS * LINE * 4
"""Bytes of flags that each rank gives: two steps of a word for every CTA and rank."""
WORDS_NBYTES = 128
"""Bytes of a rank's own words: calls so far, CTAs that have ended, stop."""
STOP_AT = 8
"""Where among them a 1 ends the call under way."""

MOST_STAGED = (1 << 30) - 256
"""Elements of one copy of the staging memory: the kernel's indices have 32 bits."""
VECTOR_NBYTES = 16
WARPS = 8
ALIGNED = 16
"""Elements: where all counts and offsets are multiples, vectors need no mask of their own."""

REDUCED = {
    torch.bfloat16: ("bf16", "float32"),
    torch.float16: ("fp16", "float32"),
    torch.float32: ("fp32", "float32"),
    torch.float64: ("fp64", "float64"),
    torch.int64: ("i64", "int64"),
    torch.int32: ("i32", "int32"),
    torch.int16: ("i16", "int16"),
    torch.int8: ("i8", "int8"),
    torch.uint8: ("u8", "uint8"),
    torch.bool: ("u8", "uint8"),
}
"""Element types that can be reduced: their name, and the type that accumulates."""


def staging_nbytes(kind: str, dtype: torch.dtype, parts: Sequence[int], size: int) -> int:
    """Bytes of staging that this collective needs on each rank, and any of its kind with fewer
    elements; take the largest of all."""
    shots = in_one_shot(sum(parts) * dtype.itemsize, size)
    staged = moves_of(kind, parts, 0, size, one_shot=shots).staged
    if kind == "all_reduce" and not shots:  # smaller ones may stage more
        staged = max(staged, moves_of(kind, (ONE_SHOT_NBYTES // dtype.itemsize,), 0, size).staged)
    return 2 * staged * dtype.itemsize


class PeerExchange:
    """One collective of a team, bound to memory. Every rank makes it alike."""

    def __init__(
        self,
        kind: str,
        dtype: torch.dtype,
        parts: Sequence[int],
        rank: int,
        size: int,
        device: torch.device,
        staging_ptrs: Sequence[int],
        staging_nbytes: int,
        flag_ptrs: Sequence[int],
        epoch_ptr: int,
        *,
        reduce: str | None = "sum",
        root: int = 0,
        merges: bool = False,
        one_shot: bool | None = None,
        blocks: int = MAX_BLOCKS,
        seen_by: Callable[[int], int] | None = None,
    ) -> None:
        """`parts` has the elements of each rank's part, or the whole once, as in `moves_of`.

        `staging_ptrs` and `flag_ptrs` have every rank's address as mapped here, this rank's own
        too; `epoch_ptr` is the address of this rank's words. All zero before the first call. One
        set of them serves all exchanges of a team. `staging_nbytes` is the same on all ranks.
        `seen_by` tells as which rank another knows this one, if not as `rank`.
        """
        assert size >= 2, "a team of one exchanges nothing"
        if one_shot is None:
            one_shot = in_one_shot(sum(parts) * dtype.itemsize, size)
        unit = dtype.itemsize
        reduces = kind in MERGING
        if not reduces:  # elements are words of up to 8 bytes
            unit = min(unit, 8)
            parts = [part * (dtype.itemsize // unit) for part in parts]
        moves = moves_of(kind, parts, rank, size, root=root, merges=merges, one_shot=one_shot)
        self.op: str | None = None
        if reduces:
            self.op = reduce or "sum"
            if dtype not in REDUCED or (dtype == torch.bool and self.op not in ("min", "max")):
                raise UnsupportedError(
                    f"the exchange kernel does not reduce {dtype} by {self.op}: choose "
                    "transport='nccl' for it, or convert first"
                )
            self.element, self.accumulator = REDUCED[dtype]
        else:
            self.element, self.accumulator = f"i{8 * unit}", "int8"
        self.dtype, self.device, self.moves = dtype, device, moves
        self.half = min(staging_nbytes // 2 // 256 * 256 // unit, MOST_STAGED)
        """Elements of one of the two copies of staging."""
        needed = 2 * moves.staged * unit
        if moves.staged > self.half:
            raise UnsupportedError(
                f"{kind} of {sum(parts)} elements of {dtype} needs {needed} bytes of staging, "
                f"at most {2 * MOST_STAGED * unit}, and has {staging_nbytes}: use another "
                "transport for a tensor of this size"
            )
        per_tile = WARPS * 32 * VECTOR_NBYTES // unit
        unroll = 2 if moves.largest > 2 * MAX_BLOCKS * per_tile else 1
        self.block = per_tile * unroll
        self.tiles = -(-moves.largest // self.block)
        self.blocks = min(blocks, MAX_BLOCKS, max(self.tiles, 1))
        assert len(staging_ptrs) == len(flag_ptrs) == size
        away = [0 if seen_by is None else seen_by(peer) - rank for peer in range(size)]
        if any(away) and any(len({*counts}) > 1 for counts in moves.tables[1::2]):
            raise UnsupportedError(
                f"{kind} of {sum(parts)} elements is cut unevenly, and in a mirror team each rank "
                "does what all do. fix: take another transport, or run it on real ranks"
            )
        slot = moves.slot * unit
        stages = tuple([ptr + slot * by for ptr, by in zip(staging_ptrs, away, strict=True)])
        flags = tuple([ptr + 4 * by for ptr, by in zip(flag_ptrs, away, strict=True)])
        sizes = moves.slot, self.half, self.tiles
        self.arguments = (epoch_ptr, stages, flags, *moves.tables, *sizes)
        """The kernel's, after source and destination."""
        types = self.element, self.accumulator
        self._facts = (rank, size, *types, self.op, moves.twice, moves.alike, self.block)
        self._any: LoadedKernel | None = None
        self._fast: LoadedKernel | None = None

    def prepare(self) -> PeerExchange:
        """Compiles and loads the kernel on the device that is current, so that no launch does."""
        try:
            from interlace.kernels.launch import kernel_of
        except ImportError as error:
            raise BackendError(
                "the package triton is not installed, which CUDA builds of torch bring along: "
                "pip install triton"
            ) from error
        even = all(number % ALIGNED == 0 for table in self.moves.tables for number in table)
        self._any = kernel_of(self.device, exchange_source, *self._facts, False)
        self._fast = kernel_of(self.device, exchange_source, *self._facts, even)
        return self

    def launch(self, stream: int, src: int, dst: int) -> None:
        """Issues one call on a stream, by its handle; `src` and `dst` are addresses.

        In place is allowed: `dst` may be `src` itself where all is reduced, or this rank's part of
        the one where the other is a part.
        """
        program = self._any if (src | dst) % VECTOR_NBYTES else self._fast
        assert program is not None, "prepare() comes first"
        program.launch(stream, self.blocks, (src, dst, *self.arguments))

    def source(self, aligned: bool) -> KernelSource:
        """The source; `aligned`: addresses, counts and offsets are multiples of 16."""
        return exchange_source(*self._facts, aligned)


def exchange_source(
    rank: int,
    size: int,
    element: str,
    accumulator: str,
    op: str | None,
    twice: bool,
    alike: bool,
    block: int,
    aligned: bool,
) -> KernelSource:
    """The kernel of one rank for elements of a type, in tiles of `block`."""
    import triton
    import triton.language as tl

    from interlace.kernels.exchange.kernel import exchange_kernel
    from interlace.kernels.launch import KernelSource

    pointer, tables = f"*{element}", ("send_at", "send_n", "take_at", "take_n")
    odd = () if aligned else ("src", "dst")
    even = tables if aligned else ()
    return KernelSource(
        kernel=exchange_kernel,
        types={
            "src": pointer,
            "dst": pointer,
            "words": "*i32",
            "stages": (pointer,) * size,
            "flags": ("*i32",) * size,
            **dict.fromkeys(tables, ("i32",) * size),
            **dict.fromkeys(("slot", "half", "tiles"), "i32"),
        },
        constants={
            "RANK": rank,
            "SIZE": size,
            "LANES": triton.next_power_of_2(size),
            "OP": op,
            "ACC": getattr(tl, accumulator),
            "TWICE": twice,
            "ALIKE": alike,
            "BLOCK": block,
            "FIRST": 0,
            "LAST": 2,
        },
        num_warps=WARPS,
        divisible={**dict.fromkeys(odd, 1), **dict.fromkeys(("slot", "half", *even), 16)},
    )
