"""What the host spends on a call: ours against the torch calls that do the same.

    cases = host_cases(torch.device("cpu"))

Tensors are so small that the host is what takes the time; each figure is the median of 1,000 calls,
a hundred of each way in turn (of fewer where a call takes milliseconds). Of an Executor it is a run
of a Program of 1, 8 or 32 calls on one stream against the same calls of torch, one after another,
with the same operators and outputs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interlace.bench.kernels.case import OURS, BuiltCase, KernelCase, time_case
from interlace.bench.kernels.grouped import grouped_layer, torch_layer
from interlace.bench.ranks import Ranks
from interlace.bench.rows import Row, facts
from interlace.bench.ways import Opened, Way
from interlace.ir import Program, parse
from interlace.launch import Report, Tell
from interlace.nn.functional import cross_entropy, linear_cross_entropy
from interlace.optim import AdamW
from interlace.runtime import Executor

COUNTS = (1, 8, 32)
WIDTH = 64
NUM_PARAMS, PARAM = 300, 1024


def host_cases(device: torch.device) -> list[KernelCase]:
    """The cases: `Executor.run()` first."""
    work: dict[str, Callable[[torch.device], BuiltCase]] = {
        **{f"Executor.run, {n} calls": functools.partial(_executor, n) for n in reversed(COUNTS)},
        "cross_entropy 64x512": _cross_entropy,
        "linear_cross_entropy 64x64x512": _linear_cross_entropy,
        f"AdamW.step, {NUM_PARAMS} parameters": _adam,
    }
    cases = [_case(shape, build) for shape, build in work.items()]
    grouped = "bf16" if device.type == "cuda" else "f32"
    return [*cases, _case("GroupedLinear 4x64x64x64", _grouped, grouped)]


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
    """On every rank of a team: a run of a Program of that team, which talks to nobody in it.

    So it tells what being in a team costs: entering a run, and telling the others where one is.
    """
    rows: list[Row] = []
    common = facts(ranks.device.type, commit)
    for calls in reversed(COUNTS):
        ways, sets = executor_ways(calls, ranks.device, {"tp": ranks.group}, ranks.size)
        work = BuiltCase(ways=ways, sets=sets, calls=calls, host=True)
        shape = f"Executor.run, {calls} calls, a team of {ranks.size}"
        case = _case(shape, lambda device, work=work: work)
        rows += [{**row, **common} for row in time_case(case, ranks, math.inf)]
    return {"rows": rows}


def _executor(calls: int, device: torch.device) -> BuiltCase:
    ways, sets = executor_ways(calls, device)
    return BuiltCase(ways=ways, sets=sets, calls=calls, host=True)


# -- losses, optimizer, layer --------------------------------------------------------------------


def _cross_entropy(device: torch.device) -> BuiltCase:
    x = torch.randn(64, 512, device=device, requires_grad=True)
    y = torch.randint(512, (64,), device=device)
    return _losses({OURS: cross_entropy, "torch": F.cross_entropy}, (x, y), (x,))


def _linear_cross_entropy(device: torch.device) -> BuiltCase:
    h = torch.randn(64, 64, device=device, requires_grad=True)
    w = torch.randn(512, 64, device=device, requires_grad=True)
    y = torch.randint(512, (64,), device=device)

    def unfused(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w), y)

    return _losses({OURS: linear_cross_entropy, "torch": unfused}, (h, w, y), (h, w))


def _losses(
    ways: Mapping[str, Callable[..., Tensor]], given: tuple[Tensor, ...], wanted: Sequence[Tensor]
) -> BuiltCase:
    truth = ways["torch"](*given).detach()

    def opened(loss: Callable[..., Tensor]) -> Opened:
        def run(*given: Tensor) -> Tensor:
            made = loss(*given)
            torch.autograd.grad(made, wanted)
            return made

        def off() -> float:
            return abs(float(run(*given).detach()) - float(truth)) / (1e-5 * abs(float(truth)))

        return Opened(run, off)

    made = [Way(name, functools.partial(opened, loss)) for name, loss in ways.items()]
    return BuiltCase(ways=made, sets=[given], host=True)


def _adam(device: torch.device) -> BuiltCase:
    def opened(make: Callable[..., Any]) -> Opened:
        params = [nn.Parameter(torch.ones(PARAM, device=device)) for _ in range(NUM_PARAMS)]
        for param in params:
            param.grad = torch.full_like(param, 0.5)
        optimizer = make(params, lr=1e-3, weight_decay=0.0)

        def off() -> float:  # the first step is lr against the gradient's sign
            optimizer.step()
            return abs(float(params[-1].detach().mean()) - 0.999) / 1e-5

        return Opened(lambda: optimizer.step(), off)

    ways = (
        Way(OURS, lambda: opened(AdamW)),
        Way("torch", lambda: opened(functools.partial(torch.optim.AdamW, fused=True))),
        Way("torch foreach", lambda: opened(functools.partial(torch.optim.AdamW, foreach=True))),
    )
    return BuiltCase(ways=ways, host=True)


def _grouped(device: torch.device) -> BuiltCase:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(64, 64, device=device, dtype=dtype, requires_grad=True)
    weight = torch.randn(4, 64, 64, device=device, dtype=dtype)
    main = torch.zeros(4, 64, 64, device=device)
    sizes = torch.full((4,), 16, device=device, dtype=torch.int32)
    dy = torch.randn(64, 64, device=device, dtype=dtype)
    truth = torch.cat([part @ w.t() for part, w in zip(x.detach().split(16), weight, strict=True)])

    def opened(make: Callable[..., Any]) -> Opened:
        layer, add = make(weight, main, sizes)

        def run(x: Tensor) -> Tensor:
            y = layer(x)
            y.backward(dy)
            add()
            x.grad = None
            return y

        def off() -> float:
            far = (run(x).detach() - truth).abs().max() / truth.abs().max()
            return float(far) / (4 * torch.finfo(dtype).eps)

        return Opened(run, off)

    ways = (Way(OURS, lambda: opened(grouped_layer)), Way("torch", lambda: opened(torch_layer)))
    return BuiltCase(ways=ways, sets=[(x,)], host=True)
