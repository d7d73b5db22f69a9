"""`interlace.sum_slots` on the GPU, with the bits of the reference in kernels/__init__.py.

total = sum_slots_cuda(slots)                  # slots: [W, ...], any stride between them

Note [Sums that wait]
    The stream that computes may come to a sum with nothing to do before it. There the kernel waits
    itself for what the others put: right behind the one that computes it begins 1 us after it, what
    a stream awaits in between 5 to 10 us. It takes half of the processors, of each half of the
    registers, and no shared memory: what peers need to go on, such as a collective on another
    stream, has the rest, unless another Executor's sum waits on another stream of the caller.

    A scatter's own kernel does not add up its last rows, though that would save a launch: all its
    blocks would wait for peers, and these for tiles of blocks that another kernel keeps off their
    processors. With a collective of the caller's on another stream, ranks could wait for each other
    for ever.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from interlace.kernels.gemm.device import WAITING
from interlace.kernels.launch import TYPES, KernelSource, kernel_of, on, stream_of

WARPS = 4
REGISTERS = 32
"""Registers of a thread, at most: a block fits beside those of specialized.py, which leave 4096
registers and no shared memory to speak of. So rows are summed while others are still made."""
MANY = 8
"""More slots than these, or loads that are not wide, need more registers: such a sum waits for the
kernel's end."""


def block(dtype: torch.dtype) -> int:
    """Elements a block sums: 16 bytes a thread and load."""
    return WARPS * 32 * 16 // dtype.itemsize


@triton.jit
def sum_kernel(
    slots,
    out,
    stride,
    count,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.load(slots + at, mask=inside).to(tl.float32)
    for _ in tl.static_range(1, SIZE):  # pyright: ignore[reportGeneralTypeIssues]
        slots += stride
        total += tl.load(slots + at, mask=inside).to(tl.float32)
    total = total.to(out.dtype.element_ty)
    tl.store(out + at, total, mask=inside)


WAIT = tl.constexpr(WAITING.format(fence=""))
WAITING_WARPS = 32
"""Warps of a block that waits: few have to move as much as many do."""


@triton.jit
def awaited_sum_kernel(
    slots,
    out,
    stride,
    count,
    words,
    due,
    SIZE: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`sum_kernel`, once all `words` have reached `due`. The zeros that waiting gives keep loads
    behind it: Note [Waiting] in gemm/device.py."""
    first = tl.program_id(0)
    for i in tl.static_range(WORDS):  # pyright: ignore[reportGeneralTypeIssues]
        first += tl.inline_asm_elementwise(  # pyright: ignore[reportOperatorIssue]
            WAIT,  # pyright: ignore[reportArgumentType]
            "=r,l,r,~{memory}",
            [words[i], due],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    for number in range(first, tl.cdiv(count, BLOCK), tl.num_programs(0)):
        at = number * BLOCK + tl.arange(0, BLOCK)
        inside = at < count
        total = tl.load(slots + at, mask=inside).to(tl.float32)
        for i in tl.static_range(1, SIZE):  # pyright: ignore[reportGeneralTypeIssues]
            total += tl.load(slots + i * stride + at, mask=inside).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def few_registers(size: int, aligned: bool) -> bool:
    """Returns true where the kernel leaves most registers to others."""
    return aligned and size <= MANY


def sum_source(*, size: int, dtype: torch.dtype, aligned: bool, words: int = 0) -> KernelSource:
    """The source; `aligned`: addresses, stride and count are multiples of 16 bytes; `words`: those
    that the kernel waits for."""
    element = f"*{TYPES[dtype]}"
    elements = 16 // dtype.itemsize
    known = (16, elements) if aligned else (dtype.itemsize, 1)
    warps = WAITING_WARPS if words else WARPS
    constants = {"SIZE": size, "BLOCK": block(dtype) * warps // WARPS}
    types = {"slots": element, "out": element, "stride": "i64", "count": "i64"}
    slim = {"maxnreg": REGISTERS} if few_registers(size, aligned) else {}
    return KernelSource(
        kernel=awaited_sum_kernel if words else sum_kernel,
        types=types | {"words": ("*u32",) * words, "due": "u32"},
        constants=constants | ({"WORDS": words} if words else {}),
        num_warps=warps,
        divisible={
            **dict.fromkeys(("slots", "out"), known[0]),
            **dict.fromkeys(("stride", "count"), known[1]),
            "words": 4,
        },
        options=slim,
    )


class SumSlots:
    """The sum of `size` slots, pre-bound: fp32, in index order, rounded once."""

    def __init__(
        self,
        *,
        size: int,
        dtype: torch.dtype,
        device: torch.device,
        aligned: bool = True,
        words: int = 0,
    ) -> None:
        """`words`: for how many it waits. Note [Sums that wait]."""
        assert not words or few_registers(size, aligned)
        facts = {"size": size, "dtype": dtype, "aligned": aligned, "words": words}
        self._program = kernel_of(device, sum_source, **facts)
        self._block, self._most = block(dtype), 0
        if words:
            self._block *= WAITING_WARPS // WARPS
            self._most = torch.cuda.get_device_properties(device).multi_processor_count // 2

    def launch(
        self,
        stream: int,
        slots: int,
        stride: int,
        out: int,
        count: int,
        words: tuple[int, ...] = (),
        due: int = 0,
    ) -> None:
        """Sums `count` elements of the slots, `stride` elements apart, on that stream, once the
        `words` (addresses) have reached `due`."""
        grid = -(-count // self._block)
        if not words:
            self._program.launch(stream, grid, (slots, out, stride, count))
        else:
            awaited = words, due & 0xFFFFFFFF
            grid = min(grid, self._most)
            self._program.launch(stream, grid, (slots, out, stride, count, *awaited))


def serves(slots: torch.Tensor, out: torch.Tensor | None) -> bool:
    """Returns true for slots that are contiguous but for dim 0, of a floating type it knows."""
    if slots.dtype not in TYPES or not slots.shape[0] or slots.numel() == 0:
        return False
    fits = slots[0].is_contiguous()
    return fits and (out is None or (out.is_contiguous() and out.dtype == slots.dtype))


def sum_slots_cuda(slots: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The sum over dimension 0 of a tensor that `serves` approves of."""
    out = torch.empty_like(slots[0]) if out is None else out
    count, stride, device = out.numel(), slots.stride(0), slots.device
    source, target = slots.data_ptr(), out.data_ptr()
    aligned = not ((count | stride) * out.itemsize | source | target) % 16
    with on(device):
        kernel = SumSlots(size=slots.shape[0], dtype=out.dtype, device=device, aligned=aligned)
        kernel.launch(stream_of(device), source, stride, target, count)
    return out
