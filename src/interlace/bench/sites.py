"""The sites that are timed: AG+GEMM, GEMM+RS, GEMM+AR; Program, inputs, reference, limit.

    >>> case = SiteCase("ag_gemm", 8192, 8192, 14336)
    >>> print(case.program(4))
    def ag_gemm(tp: Team[4], x: bf16[2048, 8192], w: bf16[8192, 14336]):
    ...

M, K and N are those of the matmul that one rank does: M are all ranks' rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from interlace.bench.ranks import Ranks
from interlace.errors import OptionError
from interlace.ir import Program, parse

OPS = ("ag_gemm", "gemm_rs", "gemm_ar")
Pair = tuple[torch.Tensor, torch.Tensor]
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f64": torch.float64}


def check_dtypes(*names: str) -> None:
    """Raises OptionError for what is no element type of a benchmark."""
    for name in names:
        if name not in DTYPES:
            raise OptionError(f"{name!r} is no element type: choose from {', '.join(DTYPES)}")


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
        if self.op not in OPS:
            raise OptionError(f"{self.op!r} is no site: choose from {', '.join(OPS)}")
        check_dtypes(self.dtype)
        if min(self.m, self.k, self.n) < 1 or self.m % world:
            raise OptionError(f"{self}: M does not divide over {world} ranks")

    def program(self, world: int) -> Program:
        """The serial Program."""
        m, k, n, t = self.m, self.k, self.n, self.dtype
        part = m // world
        match self.op:
            case "ag_gemm":
                return parse(f"""
def ag_gemm(tp: Team[{world}], x: {t}[{part}, {k}], w: {t}[{k}, {n}]):
    full = empty({t}[{m}, {k}])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.default", full, w, out=(y := {t}[{m}, {n}]))
    return y
""")
            case "gemm_rs":
                return parse(f"""
def gemm_rs(tp: Team[{world}], x: {t}[{m}, {k}], w: {t}[{k}, {n}]):
    main: call("aten.mm.default", x, w, out=(y := {t}[{m}, {n}]))
    out = empty({t}[{part}, {n}])
    main: reduce_scatter(y, out, reduce="sum", team=tp)
    return out
""")
            case _:
                return parse(f"""
def gemm_ar(tp: Team[{world}], x: {t}[{m}, {k}], w: {t}[{k}, {n}]):
    main: call("aten.mm.default", x, w, out=(y := {t}[{m}, {n}]))
    out = empty({t}[{m}, {n}])
    main: all_reduce(y, out, reduce="sum", team=tp)
    return out
""")

    def link_bytes(self, world: int) -> int:
        """The bytes that must go into (and out of) every rank."""
        size = DTYPES[self.dtype].itemsize
        moved = self.m // world * (self.k if self.op == "ag_gemm" else self.n) * size * (world - 1)
        return 2 * moved if self.op == "gemm_ar" else moved

    def num_sets(self, world: int) -> int:
        """How many sets of inputs take turns, so that none is in the cache when its turn comes."""
        rows = self.m // world if self.op == "ag_gemm" else self.m
        nbytes = (rows * self.k + self.k * self.n) * DTYPES[self.dtype].itemsize
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
    """By mode, some inputs with the result and what it may be off by."""

    def of(self, mode: str) -> list[Pair]:
        """The sets that a candidate of that mode gets."""
        return self.sets if mode == "eager" else [(x, self.sets[0][1]) for x, _ in self.sets]


def make_inputs(case: SiteCase, ranks: Ranks, seed: int = 0) -> Inputs:
    """Random inputs; all ranks call it, since references need all ranks' inputs."""
    generator = torch.Generator(ranks.device).manual_seed(1000 * seed + ranks.me)
    dtype = DTYPES[case.dtype]
    rows = case.m // ranks.size if case.op == "ag_gemm" else case.m

    def random(*sizes: int, scale: float = 1.0) -> torch.Tensor:
        made = torch.empty(sizes, dtype=dtype, device=ranks.device)
        return made.normal_(generator=generator).mul_(scale)

    count = case.num_sets(ranks.size) if ranks.cuda else 2
    sets = [
        (random(rows, case.k), random(case.k, case.n, scale=case.k**-0.5)) for _ in range(count)
    ]
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
    full = x.new_empty(case.m, case.k)
    dist.all_gather_into_tensor(full, x)
    return full


def reference(
    case: SiteCase, x: torch.Tensor, w: torch.Tensor, ranks: Ranks
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result in wide arithmetic, and what rounding may change of it, element by element.

    Products of 16-bit numbers are exact in fp32, so its sums tell them from wrong ones; wider ones
    are added in fp64. The allowance is half an ulp of the partial results and of their sum.
    """
    part = _product(x, w)
    sizes = part.abs()
    if case.op != "ag_gemm":
        dist.all_reduce(part)
        dist.all_reduce(sizes)
        if case.op == "gemm_rs":
            part, sizes = (t.chunk(ranks.size)[ranks.me].clone() for t in (part, sizes))
    return part, _allowed(part, sizes.add_(part.abs()), x.dtype)


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = torch.float32 if x.dtype.itemsize < 4 else torch.float64
    return x.to(wide) @ w.to(wide)


def _allowed(want: torch.Tensor, sizes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What rounding numbers of these sizes may change, in place of the sizes."""
    unit = max(torch.finfo(dtype).eps / 2, 2.0**-20)
    return sizes.mul_(unit).add_(want.square().mean().sqrt().item() * 2.0**-12)


def whole_check(inputs: Inputs) -> tuple[Pair, Pair]:
    """Inputs of the matmul alone, with its result and what that may be off by."""
    x, w = inputs.whole[0]
    want = _product(x, w)
    return (x, w), (want, _allowed(want, want.abs(), x.dtype))


def deviation(found: torch.Tensor, expected: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The largest difference in units of what is allowed: up to 1 is right, NaN is wrong."""
    want, allowed = expected
    if found.shape != want.shape:
        return math.inf
    off = (found.to(want.dtype) - want).abs_().div_(allowed)
    return off.max().item() if off.numel() else 0.0


def _cases(op: str, *shapes: tuple[int, int, int]) -> list[tuple[str, int, int, int]]:
    return [(op, *shape) for shape in shapes]


SMALL_ROWS = (64, 128, 256, 512, 1024)

PRESETS: dict[str, list[tuple[str, int, int, int]]] = {
    "bars": [
        *_cases("ag_gemm", (8192, 8192, 14336), (8192, 8192, 2560), (4096, 4096, 7168)),
        *_cases("ag_gemm", (2048, 4096, 7168), (16384, 8192, 14336)),
        *_cases("gemm_rs", (8192, 7168, 8192), (8192, 2048, 8192), (4096, 3584, 4096)),
        *_cases("gemm_rs", (16384, 7168, 8192)),
        *_cases("gemm_ar", (4096, 3584, 4096), (1024, 3584, 4096), (256, 3584, 4096)),
        *_cases("ag_gemm", *((rows, 4096, 4096) for rows in SMALL_ROWS)),
        *_cases("gemm_rs", *((rows, 4096, 4096) for rows in SMALL_ROWS)),
    ],
    "others": [
        *_cases("ag_gemm", (8192, 5120, 6912), (6144, 6144, 4096), (3072, 2048, 8192)),
        *_cases("ag_gemm", (1536, 8192, 3584), (32768, 4096, 3584), (384, 2048, 5632)),
        *_cases("gemm_rs", (8192, 3456, 5120), (6144, 4096, 6144), (3072, 5632, 2048)),
        *_cases("gemm_rs", (1536, 3584, 8192), (32768, 3584, 4096), (384, 5632, 2048)),
        *_cases("gemm_ar", (2048, 2048, 8192), (512, 5632, 2048), (8192, 3584, 4096)),
    ],
    "tiny": [
        *_cases("ag_gemm", (64, 32, 48)),
        *_cases("gemm_rs", (64, 48, 32)),
        *_cases("gemm_ar", (64, 48, 32)),
    ],
    "cpu": [
        *_cases("ag_gemm", (256, 256, 512), (1024, 256, 768), (2048, 512, 2048)),
        *_cases("gemm_rs", (256, 512, 256), (1024, 768, 256), (2048, 2048, 512)),
        *_cases("gemm_ar", (256, 256, 256), (1024, 512, 512)),
    ],
}
"""`bars`: the shapes that the bars name; `others`: so that nothing is tuned to those; `tiny`: to
see that all works; `cpu`: to calibrate a CPU by, where the others take too long or tell too little.
"""


def cases_of(presets: str, shapes: str, dtypes: Sequence[str]) -> list[SiteCase]:
    """The cases of `shapes`, such as `ag_gemm:8192,8192,14336 gemm_rs:4096,3584,4096`, or without
    any those of `presets`, with commas."""
    if shapes:
        return [case for text in shapes.split() for case in _parsed(text, dtypes)]
    names = [name.strip() for name in presets.split(",") if name.strip()]
    for name in names:
        if name not in PRESETS:
            raise OptionError(f"--preset {name}: choose from {', '.join(PRESETS)}")
    every = [(shape, dtype) for name in names for dtype in dtypes for shape in PRESETS[name]]
    return [SiteCase(*shape, dtype) for shape, dtype in every]


def _parsed(text: str, dtypes: Sequence[str]) -> list[SiteCase]:
    op, _, sizes = text.partition(":")
    try:
        m, k, n = map(int, sizes.split(","))
    except ValueError:
        raise OptionError(
            f"--shapes {text}: write them as ag_gemm:M,K,N, with spaces between"
        ) from None
    return [SiteCase(op, m, k, n, dtype) for dtype in dtypes]
