"""`interlace.sum_slots` on the GPU: the twin is in kernels/__init__.py, and the bits are the same.

total = sum_slots_cuda(slots)                  # slots: [W, ...], any stride between them
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from interlace.kernels.launch import TYPES, KernelSource, kernel_of, on, stream_of

WARPS = 4
REGISTERS = 32
"""Of a thread, at most: a block fits beside those of specialized.py, which leave 4096
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


def sum_source(*, size: int, dtype: torch.dtype, aligned: bool) -> KernelSource:
    """What is compiled; `aligned`: addresses, stride and count are multiples of 16 bytes."""
    element = f"*{TYPES[dtype]}"
    elements = 16 // dtype.itemsize
    known = (16, elements) if aligned else (dtype.itemsize, 1)
    return KernelSource(
        kernel=sum_kernel,
        types={"slots": element, "out": element, "stride": "i64", "count": "i64"},
        constants={"SIZE": size, "BLOCK": block(dtype)},
        num_warps=WARPS,
        divisible={
            **dict.fromkeys(("slots", "out"), known[0]),
            **dict.fromkeys(("stride", "count"), known[1]),
        },
        options={"maxnreg": REGISTERS} if aligned and size <= MANY else {},
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
    ) -> None:
        self._program = kernel_of(device, sum_source, size=size, dtype=dtype, aligned=aligned)
        self._block = block(dtype)

    def launch(self, stream: int, slots: int, stride: int, out: int, count: int) -> None:
        """Sums `count` elements of the slots, `stride` elements apart, on that stream."""
        grid = -(-count // self._block)
        self._program.launch(stream, grid, (slots, out, stride, count))


def serves(slots: torch.Tensor, out: torch.Tensor | None) -> bool:
    """Whether the kernel takes these: contiguous but for dim 0, of a floating type it knows."""
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
