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
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interlace.bench.facts import facts
from interlace.bench.kernels.case import OURS, Case, Opened, Way, Work, time_case
from interlace.bench.kernels.grouped import grouped_layer, torch_layer
from interlace.bench.ranks import Ranks
from interlace.bench.rows import Row
from interlace.bench.timing import Run, Timed, describe
from interlace.ir import Program, parse
from interlace.nn.functional import cross_entropy, linear_cross_entropy
from interlace.optim import AdamW
from interlace.runtime import Executor

CALLS = 1000
BLOCK = 100
"""Calls of one way before it is another's turn,"""
BATCH = 20
"""and those between which the host waits for the device, so that it never waits in a call."""
COUNTS = (1, 8, 32)
WIDTH = 64
NUM_PARAMS, PARAM = 300, 1024


def host_cases(device: torch.device) -> list[Case]:
    """The cases: `Executor.run()` first."""
    work: dict[str, Callable[[torch.device], Work]] = {
        **{f"Executor.run, {n} calls": functools.partial(_executor, n) for n in reversed(COUNTS)},
        "cross_entropy 64x512": _cross_entropy,
        "linear_cross_entropy 64x64x512": _linear_cross_entropy,
        f"AdamW.step, {NUM_PARAMS} parameters": _adam,
        "GroupedLinear 4x64x64x64": _grouped,
    }
    dtype = {"GroupedLinear 4x64x64x64": "bf16" if device.type == "cuda" else "f32"}
    return [
        Case(op="host", shape=text, dtype=dtype.get(text, "f32"), does="host", build=build)
        for text, build in work.items()
    ]


def time_host(
    ranks: Ranks, runs: Mapping[str, Run], sets: Sequence[Sequence[Any]], seconds: float
) -> dict[str, Timed]:
    """The time of each of 1,000 calls, by way, or of fewer that take so long.

    A way that raises has the reason instead. torch computes with one thread meanwhile: others would
    have to be woken for each call.
    """
    found = {name: Timed() for name in runs}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        until = time.monotonic() + seconds
        number, blocks = 0, dict.fromkeys(runs, BATCH)
        while number < CALLS // BLOCK + 1 and (number < 2 or time.monotonic() < until):
            for name in random.Random(number).sample(list(runs), len(runs)):
                _turn(ranks, runs[name], sets, blocks[name], found[name])
            if not number:  # the first turn warms up, and tells how many calls a block may have
                for name, timed in found.items():
                    if timed.problem is not None:
                        continue
                    share = seconds / len(runs) / 2 / (CALLS / BLOCK)
                    blocks[name] = int(max(4, min(BLOCK, share / max(timed.least, 1e-6))))
                    timed.rounds.clear()
            number += 1
    finally:
        torch.set_num_threads(threads)
    for timed in found.values():
        timed.host = timed.rounds
    return found


def _turn(ranks: Ranks, run: Run, sets: Sequence[Sequence[Any]], calls: int, timed: Timed) -> None:
    """So many calls of a way, one after another."""
    if timed.problem is not None:
        return
    clock, spent = time.perf_counter, timed.rounds
    try:
        for number in range(calls):
            if number % BATCH == 0:
                ranks.align()
            given = sets[number % len(sets)]
            before = clock()
            run(*given)
            spent.append(clock() - before)
        ranks.align()
    except Exception as error:
        timed.problem = describe(error, ranks)


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


def team_work(commit: str, ranks: Ranks) -> list[Row]:
    """On every rank of a team: a run of a Program of that team, which talks to nobody in it.

    So it tells what being in a team costs: entering a run, and telling the others where one is.
    """
    rows: list[Row] = []
    common = facts(ranks.device.type) | ({"commit": commit} if commit else {})
    for calls in reversed(COUNTS):
        ways, sets = executor_ways(calls, ranks.device, {"tp": ranks.group}, ranks.size)
        work = Work(ways=ways, sets=sets, calls=calls, host=True)
        case = Case(
            **{"op": "host", "shape": f"Executor.run, {calls} calls, a team of {ranks.size}"},
            **{"dtype": "f32", "does": "host", "build": lambda device, work=work: work},
        )
        rows += [{**row, **common} for row in time_case(case, ranks, math.inf)]
    return rows


def _executor(calls: int, device: torch.device) -> Work:
    ways, sets = executor_ways(calls, device)
    return Work(ways=ways, sets=sets, calls=calls, host=True)


# -- losses, optimizer, layer --------------------------------------------------------------------


def _cross_entropy(device: torch.device) -> Work:
    x = torch.randn(64, 512, device=device, requires_grad=True)
    y = torch.randint(512, (64,), device=device)
    return _losses({OURS: cross_entropy, "torch": F.cross_entropy}, (x, y), (x,))


def _linear_cross_entropy(device: torch.device) -> Work:
    h = torch.randn(64, 64, device=device, requires_grad=True)
    w = torch.randn(512, 64, device=device, requires_grad=True)
    y = torch.randint(512, (64,), device=device)

    def unfused(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w), y)

    return _losses({OURS: linear_cross_entropy, "torch": unfused}, (h, w, y), (h, w))


def _losses(
    ways: Mapping[str, Callable[..., Tensor]], given: tuple[Tensor, ...], wanted: Sequence[Tensor]
) -> Work:
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
    return Work(ways=made, sets=[given], host=True)


def _adam(device: torch.device) -> Work:
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
    return Work(ways=ways, host=True)


def _grouped(device: torch.device) -> Work:
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
    return Work(ways=ways, sets=[(x,)], host=True)
