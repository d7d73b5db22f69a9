"""Runs the FP8 kernels in Triton's interpreter, beside their twins; `python <this> <seed> <cases>`.

The launches themselves are what is tested, with CPU tensors. Triton's interpreter does not round
to FP8 as a GPU does (it lets no carry out of the mantissa, and cuts small numbers off): here torch
converts what the kernel has scaled and saturated.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import random
import sys

os.environ["TRITON_INTERPRET"] = "1"

import warnings
from typing import Any

import torch
import triton.language as tl
from triton.runtime import interpreter

from interlace.float8 import E4M3, E5M2, Recipe, kernel
from interlace.float8.data import width
from interlace.float8.quantization import quantize_twin
from interlace.float8.rule import amax_twin
from interlace.kernels import launch as launcher

warnings.filterwarnings("ignore", category=RuntimeWarning)
patch_tensor = interpreter._patch_lang_tensor
fp_to_fp = interpreter.InterpreterBuilder.create_fp_to_fp
TORCH = {tl.float8e4nv: E4M3, tl.float8e5: E5M2}


def patch_index(tensor: Any, scope: Any) -> None:
    """Lets loop bounds be tensors with NumPy 2.4, where an array of one element is no int."""
    patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def convert(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
    """fp32 to FP8 as torch does it, where nothing overflows."""
    kind = dst_type.scalar
    assert src.dtype.scalar is tl.float32
    bits = torch.from_numpy(src.data.copy()).to(TORCH[kind]).view(torch.uint8)
    nan = torch.from_numpy(src.data).isnan()  # of either sign, as PTX says
    return interpreter.TensorHandle(bits.masked_fill(nan, 0x7F).numpy(), kind)


class Interpreted:
    """Stands in for a compiled kernel."""

    def __init__(self, source: Any, device: torch.device) -> None:
        self.source = source

    def launch(self, stream: int, grid: int, args: tuple[Any, ...]) -> None:
        self.source.kernel[(grid,)](*args, **self.source.constants)


interpreter._patch_lang_tensor = patch_index
interpreter.InterpreterBuilder.create_fp_to_fp = convert
launcher.LoadedKernel = Interpreted  # type: ignore[misc]
kernel.stream_of = lambda device: 0
kernel.PARTS = 8

ODD = [0.0, -0.0, 1e-40, -3e-39, 449.0, 464.0, 61440.0, -1e4]
STRANGE = [torch.inf, -torch.inf, torch.nan, -torch.nan]


def matrix(draw: random.Random) -> torch.Tensor:
    """A matrix of some size and place, with or without what is hard to cast."""
    rows, columns = (draw.choice([1, 2, 16, 31, 128, 150]) for _ in range(2))
    dtype = draw.choice([torch.bfloat16, torch.float16, torch.float32])
    x = torch.randn(rows, columns + draw.choice([0, 3, 16])) * 10.0 ** draw.randint(-6, 4)
    x = x[:, :columns] if draw.random() < 0.7 else x[:, -columns:]
    for value in (*ODD, *(STRANGE if draw.random() < 0.4 else ())):
        if draw.random() < 0.5:
            x[draw.randrange(rows), draw.randrange(columns)] = value
    if draw.random() < 0.15:
        x[:] = draw.choice([0.0, torch.nan, 1e-40, 1e-44])
    if draw.random() < 0.2:
        x[draw.randrange(rows)] = draw.choice([0.0, 1e-42, torch.inf])
    return x.to(dtype)


Packed = tuple[torch.Tensor, torch.Tensor | None]


def blank(x: torch.Tensor, kind: torch.dtype, transpose: bool) -> Packed:
    """Packed rows, and those of the transpose, that are yet to be filled."""
    sizes = [x.shape, x.t().shape]
    rows, across = (torch.full((m, width(k)), 3.0).to(kind) for m, k in sizes)
    return rows, across if transpose else None


def same(mine: Packed, twin: Packed, what: object) -> None:
    for name, one, other in zip(("rows", "transpose"), mine, twin, strict=True):
        if one is None or other is None:
            continue
        one, other = one.view(torch.uint8), other.view(torch.uint8)
        differ = (one != other).nonzero().tolist()
        shown = [(at, one[tuple(at)].item(), other[tuple(at)].item()) for at in differ[:5]]
        assert not differ, (name, one.shape, what, shown)


def check(draw: random.Random) -> None:
    x, kind = matrix(draw), draw.choice([E4M3, E5M2])
    by_row, transpose = draw.random() < 0.4, draw.random() < 0.7
    recipe = Recipe(
        scaling="row" if by_row else "tensor",
        power_of_two=draw.random() < 0.5,
        eps=draw.choice([0.0, 0.0, 1e-12, 2.0]),
    )
    parts = kernel.amax_of(x)
    assert torch.equal(parts.amax().reshape(1), amax_twin(x)), x
    given = draw.choice([parts, parts, torch.tensor([3.0, 0.5, 2.0]), torch.tensor(torch.nan)])
    amax = None if by_row else given
    what = (x.shape, x.dtype, x.stride(), kind, recipe, transpose, amax)
    mine, twin = (blank(x, kind, transpose) for _ in range(2))
    kernel.quantize(x, recipe, amax, *mine)
    quantize_twin(x, recipe, amax, *twin)
    same(mine, twin, what)


if __name__ == "__main__":
    drawn = random.Random(int(sys.argv[1]))
    torch.manual_seed(int(sys.argv[1]))
    for _ in range(int(sys.argv[2])):
        check(drawn)
    print("all right")
