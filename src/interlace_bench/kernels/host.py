"""Host time of a call: ours against the torch calls that do the same.

    cases = host_cases()

Tensors are so small that the host is what takes the time; each figure is the median of up to 1,000
calls, a hundred of each variant in turn (of fewer where a call takes long). For an Executor, a run
of a Program of 1, 8 or 32 calls on one stream is compared with the same calls of torch, one by
one, with the same operators and outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import interlace
from interlace.ir import Program
from interlace.nn import functional
from interlace.runtime import Executor
from interlace_bench.kernels.case import OURS, KernelCase, checked
from interlace_bench.race import Run, Variant
from interlace_bench.ranks import Ranks

COUNTS = (1, 8, 32)
WIDTH = 64
LAYERS = ("all_gather_linear", "linear_reduce_scatter")
LAYER = {False: (64, 64, 64), True: (1024, 4096, 2048)}
"""Rows of a rank, columns of the input and of the output; on CUDA, whose host goes on meanwhile, of
a size that is overlapped."""


def host_cases() -> list[KernelCase]:
    """The cases of `Executor.run()` on one device."""
    return [
        _case(f"Executor.run, {n} calls", partial(executor_variants, n)) for n in reversed(COUNTS)
    ]


def _case(
    shape: str, build: Callable[[torch.device], list[Variant]], dtype: str = "f32"
) -> KernelCase:
    of: Any = partial(KernelCase, op="host", does="host", host=True)
    return of(shape=shape, dtype=dtype, build=build)


# -- Executors -----------------------------------------------------------------------------------


def program(calls: int, team: int = 1) -> Program:
    """A chain of so many matmuls and additions on one stream; of one rank, or a team's."""
    kind: Any = "f32", (WIDTH, WIDTH)
    with interlace.program("chain", team=team if team > 1 else None) as p:
        x, w, y = p.input("x", *kind), p.input("w", *kind), p.output("y", *kind)
        spare = [p.alloc(name, *kind) for name in "ab"[: calls - 1]]
        for number in range(calls):
            out = y if number == calls - 1 else spare[number % 2]
            p.call("aten.add.out" if number % 2 else "aten.mm.out", x, w, out=out)
            x = out
    return p.program


def chain(calls: int, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """The same in torch: between, results go to tensors that are there, at last to a new one."""
    a, b = (torch.empty(WIDTH, WIDTH, device=device) for _ in range(2))
    steps = [(torch.add if n % 2 else torch.mm, (a, b)[n % 2]) for n in range(calls - 1)]
    last = torch.mm if calls % 2 else torch.add

    @torch.no_grad()
    def run(x: Tensor, w: Tensor) -> Tensor:
        for operator, target in steps:
            x = operator(x, w, out=target)
        return last(x, w)

    return run


def executor_variants(
    calls: int, device: torch.device, groups: Mapping[str, Any] | None = None, team: int = 1
) -> list[Variant]:
    """A run of a Program of so many calls, beside the same calls."""
    x = torch.randn(WIDTH, WIDTH, device=device)
    w = torch.randn(WIDTH, WIDTH, device=device) / WIDTH
    plain = chain(calls, device)
    wanted = plain(x, w)

    def off(found: Tensor) -> float:
        return 0.0 if torch.equal(found, wanted) else math.inf

    def ours() -> Run:
        executor = Executor(program(calls, team), groups=groups, device=device).prepare()
        return lambda x, w: executor.run([x, w])[0]

    return checked({OURS: ours, "torch": lambda: plain}, off, [(x, w)])


def team_cases(ranks: Ranks) -> list[KernelCase]:
    """A run of a Program of a team, which talks to nobody in it: what being in a team costs,
    entering a run and telling the others where one is. And calls of layers."""
    team, groups = f"a team of {ranks.size}", {"tp": ranks.group}
    dtype, sizes = "bf16" if ranks.cuda else "f32", "x".join(map(str, LAYER[ranks.cuda]))
    cases = [
        _case(
            f"Executor.run, {calls} calls, {team}",
            partial(executor_variants, calls, groups=groups, team=ranks.size),
        )
        for calls in reversed(COUNTS)
    ]
    return cases + [
        _case(f"{kind} {sizes}, {team}", partial(layer_variants, kind, ranks), dtype)
        for kind in LAYERS
    ]


def layer_variants(kind: str, ranks: Ranks, device: torch.device) -> list[Variant]:
    """A call of a tensor-parallel layer, beside `F.linear` and one collective; on CUDA ours is with
    CUDA graphs: at sizes where the host counts, a user asks for them.
    """
    rows, inner, outer = LAYER[ranks.cuda]
    dtype = torch.bfloat16 if ranks.cuda else torch.float32
    shape = (rows if kind == LAYERS[0] else rows * ranks.size, inner)
    x, w = (torch.randn(size, device=device).to(dtype) for size in (shape, (outer, inner)))

    def plain(x: Tensor, w: Tensor) -> Tensor:
        if kind == LAYERS[0]:
            full = x.new_empty(rows * ranks.size, inner)
            dist.all_gather_into_tensor(full, x, group=ranks.group)
            return F.linear(full, w)
        out = x.new_empty(rows, outer)
        dist.reduce_scatter_tensor(out, F.linear(x, w), group=ranks.group)
        return out

    def off(found: Tensor) -> float:
        wanted = plain(x, w)
        far = (found - wanted).abs().max() / wanted.abs().max()
        return float(far) / (16 * torch.finfo(dtype).eps)

    call, options = getattr(functional, kind), {"graph": True} if ranks.cuda else {}
    ours = partial(call, group=ranks.group, options=options)
    makers: dict[str, Callable[[], Run]] = {OURS: lambda: ours, "torch": lambda: plain}
    return checked(makers, off, [(x, w)])
