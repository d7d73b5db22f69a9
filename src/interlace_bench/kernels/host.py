"""Host time of a call: ours against the torch calls that do the same.

    cases = host_cases(torch.device("cpu"))

Tensors are so small that the host is what takes the time; each figure is the median of 1,000 calls,
a hundred of each way in turn (of fewer where a call takes milliseconds). For an Executor, a
run of a Program of 1, 8 or 32 calls on one stream is compared with the same calls of torch, one by
one, with the same operators and outputs; the others are cases of the other ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from interlace.ir import Program, parse
from interlace.launch import Report, Tell
from interlace.nn import functional
from interlace.runtime import Executor
from interlace_bench.kernels.adam import FORMATS, adam_case
from interlace_bench.kernels.case import OURS, BuiltCase, KernelCase, time_case
from interlace_bench.kernels.grouped import grouped_case
from interlace_bench.kernels.losses import BOTH, cross_entropy_case, linear_case
from interlace_bench.race.ways import Opened, Way
from interlace_bench.ranks import Ranks
from interlace_bench.rows import Row, facts

COUNTS = (1, 8, 32)
WIDTH = 64
NUM_PARAMS, PARAM = 300, 1024
LAYERS = ("all_gather_linear", "linear_reduce_scatter")
LAYER = {False: (64, 64, 64), True: (1024, 4096, 2048)}
"""Rows of a rank, columns of the input and of the output; on CUDA, whose host goes on meanwhile, of
a size that is overlapped."""
LOSS = (64, 512, "f32", 0.0, 0.0, BOTH)


def host_cases(device: torch.device) -> list[KernelCase]:
    """The cases: `Executor.run()` first."""
    shapes: list[tuple[int, ...]] = [(PARAM,)] * NUM_PARAMS
    dtype = "bf16" if device.type == "cuda" else "f32"
    small: list[tuple[str, str, Callable[[torch.device], BuiltCase]]] = [
        ("cross_entropy 64x512", "f32", partial(cross_entropy_case, *LOSS)),
        ("linear_cross_entropy 64x64x512", "f32", partial(linear_case, 64, 64, 512, "f32")),
        (f"AdamW.step, {NUM_PARAMS} parameters", "f32", partial(adam_case, FORMATS[0], shapes)),
        ("GroupedLinear 4x64x64x64", dtype, partial(grouped_case, 4, 64, 64, 64, "even", dtype)),
    ]
    return [
        *(_case(f"Executor.run, {n} calls", partial(_executor, n)) for n in reversed(COUNTS)),
        *(_case(shape, partial(_host, build), dtype) for shape, dtype, build in small),
    ]


def _host(build: Callable[[torch.device], BuiltCase], device: torch.device) -> BuiltCase:
    """The case of another op, of which the host's time counts: ours against torch alone."""
    case = build(device)
    ways = [way for way in case.ways if way.name in (OURS, "torch", "torch foreach")]
    return replace(case, ways=ways, nbytes=0, flops=0, host=True)


def _case(shape: str, build: Callable[[torch.device], BuiltCase], dtype: str = "f32") -> KernelCase:
    return KernelCase(op="host", shape=shape, dtype=dtype, does="host", build=build)


# -- Executors -----------------------------------------------------------------------------------


def program(calls: int, team: int = 1) -> Program:
    """A chain of so many matmuls and additions on one stream; of one rank, or a team's."""
    ranks = f"tp: Team[{team}], " if team > 1 else ""
    kind = f"f32[{WIDTH}, {WIDTH}]"
    lines = [f"def chain({ranks}x: {kind}, w: {kind}, y: out[{kind}]):"]
    lines += [f"    {name} = alloc({kind})" for name in "ab"[: calls - 1]]
    source = "x"
    for number in range(calls):
        target = "y" if number == calls - 1 else "ab"[number % 2]
        operator = "aten.add.out" if number % 2 else "aten.mm.out"
        lines.append(f'    main: call("{operator}", {source}, w, out={target})')
        source = target
    return parse("\n".join(lines) + "\n")


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


def executor_ways(
    calls: int, device: torch.device, groups: Mapping[str, Any] | None = None, team: int = 1
) -> tuple[tuple[Way, ...], list[tuple[Tensor, ...]]]:
    """The ways, and their inputs."""
    x = torch.randn(WIDTH, WIDTH, device=device)
    w = torch.randn(WIDTH, WIDTH, device=device) / WIDTH
    plain = chain(calls, device)

    def same(run: Callable[..., Tensor]) -> Opened:
        def off() -> float:
            return 0.0 if torch.equal(run(x, w), plain(x, w)) else math.inf

        return Opened(run, off)

    def ours() -> Opened:
        executor = Executor(program(calls, team), groups=groups, device=device).prepare()
        return same(lambda x, w: executor.run([x, w])[0])

    return (Way(OURS, ours), Way("torch", lambda: same(plain))), [(x, w)]


def team_work(commit: str, ranks: Ranks, tell: Tell) -> Report:
    """On every rank of a team: a run of a Program of that team, which talks to nobody in it: what
    being in a team costs, entering a run and telling the others where one is. And calls of layers.
    """
    rows: list[Row] = []
    common = facts(ranks.device.type, commit)
    for calls in reversed(COUNTS):
        ways, sets = executor_ways(calls, ranks.device, {"tp": ranks.group}, ranks.size)
        work = BuiltCase(ways=ways, sets=sets, calls=calls, host=True)
        shape = f"Executor.run, {calls} calls, a team of {ranks.size}"
        case = _case(shape, lambda device, work=work: work)
        rows += [{**row, **common} for row in time_case(case, ranks, math.inf)]
    for kind in LAYERS:
        work = layer_case(kind, ranks)
        shape = f"{kind} {'x'.join(map(str, LAYER[ranks.cuda]))}, a team of {ranks.size}"
        case = _case(shape, lambda device, work=work: work, "bf16" if ranks.cuda else "f32")
        rows += [{**row, **common} for row in time_case(case, ranks, math.inf)]
    return {"rows": rows}


def layer_case(kind: str, ranks: Ranks) -> BuiltCase:
    """A call of a tensor-parallel layer, beside `F.linear` and one collective; on CUDA ours is with
    CUDA graphs: at sizes where the host counts, a user asks for them.
    """
    rows, inner, outer = LAYER[ranks.cuda]
    dtype = torch.bfloat16 if ranks.cuda else torch.float32
    shape = (rows if kind == LAYERS[0] else rows * ranks.size, inner)
    x, w = (torch.randn(size, device=ranks.device).to(dtype) for size in (shape, (outer, inner)))

    def plain(x: Tensor, w: Tensor) -> Tensor:
        if kind == LAYERS[0]:
            full = x.new_empty(rows * ranks.size, inner)
            dist.all_gather_into_tensor(full, x, group=ranks.group)
            return F.linear(full, w)
        out = x.new_empty(rows, outer)
        dist.reduce_scatter_tensor(out, F.linear(x, w), group=ranks.group)
        return out

    def ours(graph: bool, **options: Any) -> Callable[[Tensor, Tensor], Tensor]:
        call = getattr(functional, kind)
        facts = {"group": ranks.group, "options": {**options, **({"graph": True} if graph else {})}}
        return lambda x, w: call(x, w, **facts)

    def trained(run: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        """With gradients wanted of x and w, which no other way asks for."""
        leaves = x.detach().requires_grad_(), w.detach().requires_grad_()
        return lambda *_: run(*leaves).detach()

    def opened(run: Callable[[Tensor, Tensor], Tensor]) -> Opened:
        def off() -> float:
            wanted = plain(x, w)
            far = (run(x, w) - wanted).abs().max() / wanted.abs().max()
            return float(far) / (16 * torch.finfo(dtype).eps)

        return Opened(run, off)

    made = {OURS: ours(ranks.cuda), "torch": plain, f"{OURS}, gradients": trained(ours(ranks.cuda))}
    if ranks.cuda:
        made[f"{OURS}, no graph"] = ours(False)
        made |= {f"{OURS} {name}": ours(False, strategy=name) for name in ("pipeline", "peer")}
    ways = [Way(name, lambda run=run: opened(run)) for name, run in made.items()]
    return BuiltCase(ways=ways, sets=[(x, w)], host=True)


def _executor(calls: int, device: torch.device) -> BuiltCase:
    ways, sets = executor_ways(calls, device)
    return BuiltCase(ways=ways, sets=sets, calls=calls, host=True)
