"""Runs the FP8 kernels in Triton's interpreter, beside references; see test_interpreted.py.

The launches themselves are what is tested, with CPU tensors. Triton's interpreter does not round
to FP8 as a GPU does (it lets no carry out of the mantissa, and cuts small numbers off) and has no
assembly: here torch converts what the kernel has scaled. Its maximum takes NaN, which a GPU's
leaves out.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import random
import warnings
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import triton.language as tl
from tests.support.interpreting import run
from triton.runtime import interpreter

from interlace.float8 import E4M3, E5M2, Recipe, kernel, launch
from interlace.float8.data import width
from interlace.float8.quantization import quantize_reference, turn_reference
from interlace.float8.rule import amax_reference, scale_of
from interlace.kernels import launch as launcher

warnings.filterwarnings("ignore", category=RuntimeWarning)
fp_to_fp = interpreter.InterpreterBuilder.create_fp_to_fp
TORCH = {tl.float8e4nv: E4M3, tl.float8e5: E5M2}


def convert(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
    """fp32 to FP8, or back."""
    kind = dst_type.scalar
    if kind is tl.float32:
        bits = torch.from_numpy(src.data.copy()).view(TORCH[src.dtype.scalar])
        return interpreter.TensorHandle(bits.float().numpy(), kind)
    assert src.dtype.scalar is tl.float32
    return interpreter.TensorHandle(cast(src.data, TORCH[kind]).numpy(), kind)


def cast(numbers: Any, kind: torch.dtype) -> torch.Tensor:
    """As `cvt.rn.satfinite` does: saturated, and NaN of either sign is 0x7F."""
    x, most = torch.from_numpy(numbers.copy()), torch.finfo(kind).max
    return x.clamp(-most, most).to(kind).view(torch.uint8).masked_fill(x.isnan(), 0x7F)


def assembled(self: Any, asm: str, constraints: str, values: list[Any], *rest: Any) -> Any:
    """What the kernels say in assembly: four numbers to a word."""
    kind = E5M2 if "e5m2x2" in asm else E4M3
    word = 0
    for i, value in enumerate(values):
        word = word | cast(value.data, kind).long() << 8 * i
    found = torch.as_tensor(word).to(torch.int32).numpy()
    return SimpleNamespace(get_result=lambda i: interpreter.TensorHandle(found, tl.int32))


class Interpreted:
    """Stands in for a compiled kernel."""

    def __init__(self, source: Any, device: torch.device) -> None:
        self.source = source

    def launch(self, stream: int, grid: int, args: tuple[Any, ...]) -> None:
        args = tuple(
            [
                launch._kept[0][5:6] if i == 1 and isinstance(arg, int) else arg
                for i, arg in enumerate(args)
            ]
        )
        self.source.kernel[(grid,)](*args, **self.source.constants)


interpreter.InterpreterBuilder.create_fp_to_fp = convert
interpreter.InterpreterBuilder.create_inline_asm = assembled
interpreter.InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, numpy.fmax)
launcher.LoadedKernel = Interpreted  # type: ignore[misc]
launch.stream_of = lambda device: 0
kernel.gdc_wait = kernel.gdc_launch_dependents = lambda: None
launch.PARTS, launch.BLOCK = 8, 256

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


def blank(rows: int, columns: int, kind: torch.dtype) -> torch.Tensor:
    """Packed rows that are yet to be filled."""
    return torch.full((rows, width(columns)), 3.0).to(kind)


def same(mine: torch.Tensor | None, reference: torch.Tensor | None, what: object) -> None:
    if mine is None or reference is None:
        assert mine is reference
        return
    one, other = mine.view(torch.uint8), reference.view(torch.uint8)
    differ = (one != other).nonzero().tolist()
    shown = [(at, one[tuple(at)].item(), other[tuple(at)].item()) for at in differ[:5]]
    assert not differ, (one.shape, what, shown)


def check(draw: random.Random) -> None:
    x, kind = matrix(draw), draw.choice([E4M3, E5M2])
    forms = draw.choice(["rows", "across", "rows across"])
    eps = draw.choice([0.0, 0.0, 1e-12, 2.0])
    recipe = Recipe(power_of_two=draw.random() < 0.5, eps=eps, scale="team")
    parts = torch.empty(launch.PARTS)
    launch.amax_into(parts, x)
    assert torch.equal(parts.amax().reshape(1), amax_reference(x)), x
    amax = draw.choice([parts, parts, torch.tensor([3.0, 0.5, 2.0]), torch.tensor(torch.nan)])
    what = (x.shape, x.dtype, x.stride(), kind, recipe, forms, amax)
    shapes = {"rows": x.shape, "across": x.t().shape}
    mine, reference = (
        [
            blank(shape[0], shape[1], kind) if form in forms else None
            for form, shape in shapes.items()
        ]
        for _ in range(2)
    )
    launch.quantize(x, recipe, amax, mine[0], mine[1])
    quantize_reference(x, recipe, amax, reference[0], reference[1])
    for one, other in zip(mine, reference, strict=True):
        same(one, other, what)


def check_guess(draw: random.Random) -> None:
    """By a scale that is right, or not, or none: the same bits, and the right scale is left."""
    x, kind = matrix(draw), draw.choice([E4M3, E5M2])
    recipe, forms = Recipe(), draw.choice(["rows", "across", "rows across"])
    shapes = {"rows": x.shape, "across": x.t().shape}
    mine, reference = (
        [
            blank(shape[0], shape[1], kind) if form in forms else None
            for form, shape in shapes.items()
        ]
        for _ in range(2)
    )
    quantize_reference(x, recipe, amax_reference(x), reference[0], reference[1])
    scale = scale_of(amax_reference(x), torch.finfo(kind).max, recipe)
    guess = draw.choice([scale, scale * 2, torch.zeros(1), torch.full((1,), torch.nan)])
    near = launch._guesses(x.device) and launch._kept[0][5:6]
    near.copy_(guess)
    launch.quantize_near(x, recipe, 5, mine[0], mine[1])
    assert torch.equal(near, scale), (near, scale)
    for one, other in zip(mine, reference, strict=True):
        same(one, other, (x.shape, x.dtype, kind, forms, guess, scale))


def check_race() -> None:
    """A tile that read another guess than the first, which was right, is seen."""
    x, kind = torch.randn(300, 150).bfloat16(), E4M3
    reference, mine = blank(300, 150, kind), blank(300, 150, kind)
    quantize_reference(x, Recipe(), amax_reference(x), reference, None)
    right, tiles = scale_of(amax_reference(x), 448.0, Recipe()), 6
    parts = torch.cat([amax_reference(x).expand(tiles), right.expand(tiles)]).contiguous()
    parts[tiles + 4] = right.item() * 2
    source = launch.guess_source(x.dtype, kind, True, False, True, (False,) * 3)
    args = (x.view(torch.int16), torch.zeros(1), parts, mine, mine.view(torch.int32), None, 300,
            150, 150, width(150), 0, Recipe().eps)  # fmt: skip
    Interpreted(source, x.device).launch(0, 2, args)
    same(mine, reference, "race")


def check_turn(draw: random.Random) -> None:
    """Shards of scales far from each other, turned at once; or bytes alone."""
    kind, blocks = draw.choice([E4M3, E5M2]), draw.choice([1, 2, 3, 4])
    rows, columns = draw.choice([1, 5, 40, 128]), 16 * draw.choice([1, 3, 9])
    packed: list[torch.Tensor] = []
    for count in (columns, 32):
        shards = [blank(rows, count, kind) for _ in range(blocks)]
        for shard in shards:
            x = torch.randn(rows, count) * 10.0 ** draw.randint(-6, 4)
            quantize_reference(x, Recipe(), amax_reference(x), shard, None)
        packed.append(torch.cat(shards))
    by = packed[1] if draw.random() < 0.5 else None
    given = draw.choice([0, blocks])
    mine, reference = (blank(columns, len(packed[0]), kind) for _ in range(2))
    launch.turn(packed[0], by if given else None, given, mine)
    turn_reference(reference, packed[0], by if given else None, given)
    same(mine, reference, (kind, given, rows, columns, by is None))


if __name__ == "__main__":
    run(check, check_turn, check_guess, once=lambda _: check_race())
