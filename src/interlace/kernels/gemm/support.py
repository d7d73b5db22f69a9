"""What the fused GEMM kernels can serve, said before anything is compiled.

    why = refuse(rows=2048, inner=8192, columns=14336, dtype=torch.float32, device=device)
    if why is not None:                    # "elements are torch.float32: ..."
        ...                                # run the members one after another instead

    transposed = weight_layout(w)          # False: [K, N] row by row; True: [N, K], as in nn.Linear

Needs neither a GPU nor Triton to be imported.
"""

from __future__ import annotations

import importlib.util

import torch

ALIGNMENT = 16
"""Bytes that a TMA operand's address and row length are multiples of."""

LIMIT = 2**31
"""Row and column indices are 32-bit in the kernels."""


def refuse(
    *, rows: int, inner: int, columns: int, dtype: torch.dtype, device: torch.device, size: int = 1
) -> str | None:
    """Why no kernel serves this GEMM of `rows` rows a rank; None if one does."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"elements are {dtype}: the kernels multiply bfloat16 and float16"
    if min(rows, inner, columns, size) < 1:
        return f"an empty GEMM: {size} x {rows} rows, K {inner}, N {columns}"
    for name, extent in (("K", inner), ("N", columns)):
        if extent * dtype.itemsize % ALIGNMENT:
            return f"{name} is {extent}: TMA takes rows that are multiples of {ALIGNMENT} bytes"
    if max(size * rows, inner, columns) >= LIMIT:
        return "an extent of 2^31 or more"
    return refuse_device(device)


def refuse_device(device: torch.device) -> str | None:
    """Why no kernel runs on this device; None if they do."""
    if device.type != "cuda":
        return f"the device is {device}: the kernels run on NVIDIA GPUs"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        return f"the GPU has compute capability {major}.{minor}: the kernels are made for 9.0"
    return None


def weight_layout(w: torch.Tensor) -> bool | None:
    """Whether a weight [K, N] is stored as the transpose of [N, K] row by row; None: neither."""
    if w.dim() != 2:
        return None
    if w.stride() == (w.shape[1], 1):
        return False
    return True if w.stride() == (1, w.shape[0]) else None


def refuse_operand(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> str | None:
    """Why this tensor cannot be that operand; a weight is asked by `weight_layout` as well."""
    if tuple(tensor.shape) != shape:
        return f"{name} has shape {tuple(tensor.shape)}, not {shape}"
    if name == "w":
        if weight_layout(tensor) is None:
            return f"{name} has strides {tensor.stride()}: neither its rows nor columns are dense"
    elif not tensor.is_contiguous():
        return f"{name} has strides {tensor.stride()}: it is not contiguous"
    if tensor.data_ptr() % ALIGNMENT:
        return f"{name} starts at an address that is no multiple of {ALIGNMENT} bytes"
    return None
