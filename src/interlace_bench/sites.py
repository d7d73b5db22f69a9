"""The sites that are timed: AG+GEMM, GEMM+RS, GEMM+AR; Program, inputs, reference, limit.

    >>> case = SiteCase("ag_gemm", 8192, 8192, 14336)
    >>> print(case.program(4))
    def ag_gemm(tp: Team[4], x: bf16[2048, 8192], w: bf16[8192, 14336]):
    ...

M, K and N are those of the matmul that one rank does: M are all ranks' rows. Of dtype `f8e4m3` x
and w are packed rows (Note [Packed rows] in float8/data.py), with one scale on all ranks; w is
[N, K], as FP8's GEMM takes it, and results are bf16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

import interlace
from interlace.errors import OptionError
from interlace.float8 import E4M3, Float8Data, Recipe, amax_of, quantize
from interlace.float8.data import ALIGNMENT, width
from interlace.ir import Program
from interlace_bench.ranks import Ranks
from interlace_bench.shapes import FLOAT8, shapes_of

Pair = tuple[torch.Tensor, torch.Tensor]
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64}
RECIPE = Recipe(scale="team", power_of_two=True)
"""Recipe by which x and w are quantized."""


CACHE = 60 << 20
"""Bytes of the last cache of an H200: inputs come in turn until twice as many went by."""
MOST_SETS = 64


@dataclass(frozen=True, slots=True)
class SiteCase:
    """One row's work."""

    op: str
    m: int
    k: int
    n: int
    dtype: str = "bf16"

    def __str__(self) -> str:
        return f"{self.op} {self.m},{self.k},{self.n} {self.dtype}"

    def check(self, world: int) -> None:
        """Raises OptionError for what cannot be cut over that many ranks."""
        if self.float8 and (self.k % ALIGNMENT or self.n % ALIGNMENT):
            raise OptionError(f"{self}: FP8's GEMM takes K and N that are multiples of {ALIGNMENT}")
        if self.m % world:
            raise OptionError(f"{self}: M does not divide over {world} ranks")

    @property
    def float8(self) -> bool:
        """True if x and w are packed rows of FP8."""
        return self.dtype == FLOAT8

    @property
    def out_dtype(self) -> torch.dtype:
        """The element type of the result."""
        return torch.bfloat16 if self.float8 else DTYPES[self.dtype]

    def program(self, world: int) -> Program:
        """The serial Program."""
        m, n, t = self.m, self.n, self.dtype
        k, out = (width(self.k), "bf16") if self.float8 else (self.k, t)
        gathers, part = self.op == "ag_gemm", m // world
        with interlace.program(self.op, team=world) as p:
            x = p.input("x", t, (part if gathers else m, k))
            w = p.input("w", t, (n, k) if self.float8 else (k, n))
            if gathers:
                rows, x = x, p.empty("full", t, (m, k))
                p.all_gather(rows, x)
            if self.float8:
                y, size = p.empty("y", out, (m, n)), world if gathers else 1
                p.call("interlace.float8_mm.out", x, w.permute(1, 0), size, None, True, out=y)
            else:
                y = p.fresh("y", t, (m, n))
                p.call("aten.mm.default", x, w, out=y)
            result = y
            if self.op == "gemm_rs":
                result = p.empty("out", out, (part, n))
                p.reduce_scatter(y, result)
            elif self.op == "gemm_ar":
                result = p.empty("out", out, (m, n))
                p.all_reduce(y, result)
            p.returns(result)
        return p.program

    def row_bytes(self) -> int:
        """The bytes of a row that is sent."""
        if self.op == "ag_gemm":
            return width(self.k) if self.float8 else self.k * DTYPES[self.dtype].itemsize
        return self.n * self.out_dtype.itemsize

    def link_bytes(self, world: int) -> int:
        """The bytes that must go into (and out of) every rank."""
        moved = self.m // world * self.row_bytes() * (world - 1)
        return 2 * moved if self.op == "gemm_ar" else moved

    def num_sets(self, world: int) -> int:
        """Number of input sets, which take turns so that none is in the cache at its turn."""
        rows = self.m // world if self.op == "ag_gemm" else self.m
        size = 1 if self.float8 else DTYPES[self.dtype].itemsize
        nbytes = (rows * self.k + self.k * self.n) * size
        return min(MOST_SETS, 2 + 2 * CACHE // nbytes)


@dataclass(slots=True)
class Inputs:
    """Sets of inputs on this rank, what a whole matmul takes, and what the first sets must give.

    Eager candidates get another x and w each time. Those that replay a graph get another x (where
    it is copied in, that counts) and one w, which is a parameter.
    """

    sets: list[Pair]
    whole: list[Pair]
    """The same for the matmul alone: AG+GEMM's rows gathered."""
    checks: dict[str, list[tuple[Pair, Pair]]]
    """Some inputs by mode, each with the result and its largest permitted deviation."""

    def of(self, mode: str) -> list[Pair]:
        """The sets that a candidate of that mode gets."""
        return self.sets if mode == "eager" else [(x, self.sets[0][1]) for x, _ in self.sets]


def make_inputs(case: SiteCase, ranks: Ranks, seed: int = 0) -> Inputs:
    """Random inputs; all ranks call it, since references need all ranks' inputs."""
    generator = torch.Generator(ranks.device).manual_seed(1000 * seed + ranks.me)
    rows = case.m // ranks.size if case.op == "ag_gemm" else case.m

    def random(*sizes: int, scale: float = 1.0) -> torch.Tensor:
        made = torch.empty(sizes, dtype=case.out_dtype, device=ranks.device)
        made.normal_(generator=generator).mul_(scale)
        if not case.float8:
            return made
        amax = amax_of(made)
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=ranks.group)
        return quantize(made, E4M3, RECIPE, amax=amax).packed

    count = case.num_sets(ranks.size) if ranks.cuda else 2
    weight = (case.n, case.k) if case.float8 else (case.k, case.n)
    sets = [(random(rows, case.k), random(*weight, scale=case.k**-0.5)) for _ in range(count)]
    whole = [(gathered(case, x, ranks), w) for x, w in sets]
    known = {
        (i, j): reference(case, whole[i][0], whole[j][1], ranks)
        for i, j in ((0, 0), (1, 1), (1, 0) if ranks.cuda else (0, 0))
    }
    checks = {
        mode: [((sets[i][0], sets[j][1]), known[i, j]) for i, j in places if (i, j) in known]
        for mode, places in (("eager", ((0, 0), (1, 1))), ("graph", ((0, 0), (1, 0))))
    }
    return Inputs(sets, whole, checks)


def gathered(case: SiteCase, x: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """All rows that a rank multiplies."""
    if case.op != "ag_gemm":
        return x
    full = x.new_empty(case.m, x.shape[1])
    each = torch.uint8 if case.float8 else x.dtype  # not every backend knows FP8
    dist.all_gather_into_tensor(full.view(each), x.view(each))
    return full


def reference(
    case: SiteCase, x: torch.Tensor, w: torch.Tensor, ranks: Ranks
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in wide arithmetic, and what rounding may change of it, element by element.

    Products of 16-bit numbers are exact in fp32, so its sums tell them from wrong ones; wider ones
    are added in fp64. The allowance is half an ulp of the partial results and of their sum.
    """
    part = _product(case, x, w)
    sizes = part.abs()
    if case.op != "ag_gemm":
        dist.all_reduce(part)
        dist.all_reduce(sizes)
        if case.op == "gemm_rs":
            part, sizes = (t.chunk(ranks.size)[ranks.me].clone() for t in (part, sizes))
    return part, _allowed(part, sizes.add_(part.abs()), case)


def _product(case: SiteCase, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if case.float8:
        x, w = (Float8Data(packed, case.k).dequantize() for packed in (x, w))
        return x @ w.t()
    wide = torch.float32 if x.dtype.itemsize < 4 else torch.float64
    return x.to(wide) @ w.to(wide)


def _allowed(want: torch.Tensor, sizes: torch.Tensor, case: SiteCase) -> torch.Tensor:
    """Returns the deviation that rounding numbers of these sizes may cause; overwrites `sizes`."""
    unit = max(torch.finfo(case.out_dtype).eps / 2, 2.0**-20)
    inner = FAST if case.float8 else 2.0**-12
    return sizes.mul_(unit).add_(want.square().mean().sqrt().item() * inner)


FAST = 2.0**-5
"""Largest deviation of FP8's GEMM, relative to the results' root mean square: its fast sums keep
fewer bits than fp32."""


def whole_check(case: SiteCase, inputs: Inputs) -> tuple[Pair, Pair]:
    """Inputs of the matmul alone, with its result and what that may be off by."""
    x, w = inputs.whole[0]
    want = _product(case, x, w)
    return (x, w), (want, _allowed(want, want.abs(), case))


def deviation(found: torch.Tensor, expected: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The largest difference in units of what is allowed: up to 1 is right, NaN is wrong."""
    want, allowed = expected
    if found.shape != want.shape:
        return math.inf
    off = (found.to(want.dtype) - want).abs_().div_(allowed)
    return off.max().item() if off.numel() else 0.0


def cases_of(presets: str, shapes: str, dtypes: Sequence[str]) -> list[SiteCase]:
    """The cases of shapes, or without any those of presets; see `shapes_of`."""
    return [SiteCase(*shape) for shape in shapes_of(presets, shapes, dtypes)]
