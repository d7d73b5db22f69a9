"""Collectives of small tensors as one kernel over peer memory: push, raise a flag, wait, finish.

    memory = ...                         # staging, flags and words of every rank, all zero
    exchange = Exchange("all_reduce", torch.bfloat16, (4096,), rank, size, device, **memory)
    exchange.prepare().launch(stream, x, y)      # asynchronous, in the order of the stream

A library's collective of a few kilobytes is all latency. This is a single kernel without a barrier
before or after it. All ranks of a team call the same exchanges in the same order, one after
another (on one stream, or on streams that events order). `exchange_moves` says what goes where,
`exchange_kernel` how, `exchange_twin` what must come of it.

Note [Two copies of staging suffice]
    Call c (counted from 1) uses copy c % 2 of every rank's staging, whatever its kind and size. Let
    r push into o's copy in call c. In every call each rank waits for flags of all others: at least
    CTA 0 raises one at every peer and awaits one from every peer, even where a pair has nothing to
    say. r has ended call c - 1 (kernels of one order), so o had begun call c - 1, so o had ended
    call c - 2 with all its reads of that copy. Nobody reads that copy in call c - 1. So what r
    overwrites has been read. One copy would not do: o may still be reading in call c - 1.

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

import ctypes
import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from interlace.errors import BackendError, UnsupportedError
from interlace.kernels.exchange.moves import Moves, in_one_shot, moves_of

MAX_BLOCKS = 128
LINE = 32
FLAG_NBYTES = 2 * MAX_BLOCKS * LINE * 4
"""Bytes of flags that each rank gives: two steps of a word for every CTA and rank."""
WORDS_NBYTES = 128
"""Bytes of a rank's own words: calls so far, CTAs that have ended, stop."""
STOP_AT = 8
"""Where among them a 1 ends the call under way."""

MOST_STAGED = (1 << 30) - 256
"""Elements of one copy of the staging memory: the kernel's indices have 32 bits."""
MOST_BLOCKS = 128
"""CTAs of a call unless asked otherwise: enough to fill the links, few enough to start beside the
last wave of a GEMM."""
VECTOR_NBYTES = 16
WARPS = 8
ALIGNED = 16
"""Elements: where all counts and offsets are multiples, vectors need no mask of their own."""

_REDUCED = {
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
    """Bytes of staging that this collective needs on each rank; take the largest of all."""
    shots = in_one_shot(sum(parts) * dtype.itemsize, size)
    staged = moves_of(kind, parts, 0, size, one_shot=shots).staged
    return 2 * staged * dtype.itemsize


class Exchange:
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
        blocks: int | None = None,
        unroll: int | None = None,
    ) -> None:
        """`parts` has the elements of each rank's part, or the whole once, as in `moves_of`.

        `staging_ptrs` and `flag_ptrs` have every rank's address as mapped here, this rank's own
        too; `epoch_ptr` is the address of this rank's words. All zero before the first call. One
        set of them serves all exchanges of a team. `staging_nbytes` is the same on all ranks.
        """
        assert size >= 2, "a team of one exchanges nothing"
        if one_shot is None:
            one_shot = in_one_shot(sum(parts) * dtype.itemsize, size)
        unit = min(dtype.itemsize, 8)
        moves = moves_of(kind, parts, rank, size, root=root, merges=merges, one_shot=one_shot)
        self.op: str | None = None
        if moves.reduces:
            self.op = reduce or "sum"
            if dtype not in _REDUCED or (dtype == torch.bool and self.op not in ("min", "max")):
                raise UnsupportedError(
                    f"the exchange kernel does not reduce {dtype} by {self.op}: choose "
                    "transport='nccl' for it, or convert first"
                )
            self.element, self.accumulator = _REDUCED[dtype]
        else:
            scale = dtype.itemsize // unit
            if scale > 1:
                parts = [part * scale for part in parts]
                moves = moves_of(kind, parts, rank, size, root=root, merges=merges)
            self.element, self.accumulator = f"i{8 * unit}", "int8"
        self.kind, self.dtype, self.device, self.moves = kind, dtype, device, moves
        half = min(staging_nbytes // 2 // 256 * 256 // unit, MOST_STAGED)
        needed = 2 * moves.staged * unit
        if moves.staged > half:
            raise UnsupportedError(
                f"{kind} of {sum(parts)} elements of {dtype} needs {needed} bytes of staging, "
                f"at most {2 * MOST_STAGED * unit}, and has {staging_nbytes}: use another "
                "transport for a tensor of this size"
            )
        per_tile = WARPS * 32 * VECTOR_NBYTES // unit
        tiles = -(-moves.largest // per_tile)
        self.unroll = unroll or (2 if tiles > 2 * MOST_BLOCKS else 1)
        self.block = per_tile * self.unroll
        self.tiles = -(-moves.largest // self.block)
        self.blocks = min(blocks or MOST_BLOCKS, MAX_BLOCKS, max(self.tiles, 1))
        tables = (moves.send_at, moves.send_n, moves.take_at, moves.take_n)
        self._numbers = [*sum(tables, ()), moves.slot, half, self.tiles]
        self._pointers = [epoch_ptr, *staging_ptrs, *flag_ptrs]
        assert len(staging_ptrs) == len(flag_ptrs) == size
        self._aligned = all(number % ALIGNED == 0 for table in tables for number in table)
        self._any: _Launch | None = None
        self._fast: _Launch | None = None

    def prepare(self) -> Exchange:
        """Compiles and loads the kernel on the device that is current, so that no launch does."""
        self._any = self._bind(aligned=False)
        self._fast = self._bind(aligned=True) if self._aligned else self._any
        return self

    def launch(self, stream: int, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Issues one call on a stream, by its handle. `src` and `dst` are contiguous.

        In place is allowed: `dst` may be `src` itself where all is reduced, or this rank's part of
        the one where the other is a part.
        """
        self.launch_at(stream, src.data_ptr(), dst.data_ptr())

    def launch_at(self, stream: int, src: int, dst: int) -> None:
        """The same by addresses."""
        launch = self._any if (src | dst) % VECTOR_NBYTES else self._fast
        assert launch is not None, "prepare() comes first"
        launch(stream, src, dst)

    def signature(self, aligned: bool) -> tuple[dict[str, Any], dict[str, Any], dict[Any, Any]]:
        """What Triton compiles the kernel for: types, constants and what is divisible by 16."""
        import triton
        import triton.language as tl

        size, pointer = self.moves.size, f"*{self.element}"
        types: dict[str, Any] = {
            "src": pointer,
            "dst": pointer,
            "words": "*i32",
            "stages": (pointer,) * size,
            "flags": ("*i32",) * size,
            **dict.fromkeys(("send_at", "send_n", "take_at", "take_n"), ("i32",) * size),
            **dict.fromkeys(("slot", "half", "tiles"), "i32"),
        }
        constants = {
            "RANK": self.moves.rank,
            "SIZE": size,
            "LANES": triton.next_power_of_2(size),
            "OP": self.op,
            "ACC": getattr(tl, self.accumulator),
            "TWICE": self.moves.twice,
            "ALIKE": self.moves.alike,
            "BLOCK": self.block,
            "FIRST": 0,
            "LAST": 2,
        }
        even = {"words", "stages", "flags", "slot", "half"}
        if aligned:
            even |= {"src", "dst", "send_at", "send_n", "take_at", "take_n"}
        divisible: dict[Any, Any] = {}
        for index, (name, type_) in enumerate(types.items()):
            paths = [(index, i) for i in range(size)] if isinstance(type_, tuple) else [(index,)]
            divisible |= {path: [["tt.divisibility", 16]] for path in paths if name in even}
        types |= dict.fromkeys(constants, "constexpr")
        return types, constants, divisible

    def compile(self, target: Any, aligned: bool) -> Any:
        """The kernel for a target, by Triton; from its cache where it was compiled before."""
        try:
            import triton
            from triton.compiler import ASTSource

            from interlace.kernels.exchange.kernel import exchange_kernel
        except ImportError as error:
            raise BackendError(
                "the package triton is not there, which CUDA builds of torch bring along: install "
                "it with pip install triton"
            ) from error
        source = ASTSource(exchange_kernel, *self.signature(aligned))
        return triton.compile(source, target=target, options={"num_warps": WARPS, "num_stages": 1})

    def _bind(self, aligned: bool) -> _Launch:
        from triton.backends.compiler import GPUTarget

        major, minor = torch.cuda.get_device_capability(self.device)
        compiled = self.compile(GPUTarget("cuda", 10 * major + minor, 32), aligned)
        with torch.cuda.device(self.device):
            torch.cuda.current_stream().query()  # makes the device's context this thread's
            place = torch.cuda.current_device()
            function = _load(compiled.name, compiled.asm["cubin"], place)
        shared = compiled.metadata.shared
        return _Launch(function, self.blocks, shared, self._pointers, self._numbers)


@cache
def _load(name: str, cubin: bytes, device: int) -> Any:
    """The kernel's function on the device that is current; loaded once, whoever asks."""
    driver = _driver()
    module = _checked(driver.cuModuleLoadData(cubin))
    return _checked(driver.cuModuleGetFunction(module, name.encode()))


def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


def _checked(result: Any) -> Any:
    error, value = result
    if error:
        raise BackendError(f"an exchange kernel cannot be loaded: {error.name}")
    return value


class _Launch:
    """A loaded kernel with its arguments in place: a launch writes two addresses and calls once."""

    def __init__(
        self,
        function: Any,
        blocks: int,
        shared: int,
        pointers: Sequence[int],
        numbers: Sequence[int],
    ) -> None:
        values = [0, 0, *pointers, *numbers, 0, 0]  # Triton adds two scratch addresses, unused
        self._values = (ctypes.c_uint64 * len(values))(*values)
        start = ctypes.addressof(self._values)
        self._table = (ctypes.c_void_p * len(values))(*(start + 8 * i for i in range(len(values))))
        self._launch = _driver().cuLaunchKernel
        self._shape = (function, blocks, 1, 1, 32 * WARPS, 1, 1, shared)
        self._params = ctypes.addressof(self._table)

    def __call__(self, stream: int, src: int, dst: int) -> None:
        values = self._values
        values[0], values[1] = src, dst
        (error,) = self._launch(*self._shape, stream, self._params, 0)
        if error:
            raise BackendError(f"the launch of an exchange failed: {error.name}")


def late(flags: Sequence[int], calls: int, moves: Moves, blocks: int) -> list[int]:
    """The ranks that a stuck call waits for, from this rank's flags and its number of calls ended.

    A rank counts as late where any of its CTAs has not raised the flag of the first step.
    """
    call = calls + 1
    behind = {
        writer
        for writer in range(moves.size)
        for block in range(blocks)
        if writer != moves.rank and (int(flags[block * LINE + writer]) - call) & 0xFFFFFFFF > 1
    }
    return sorted(behind)
