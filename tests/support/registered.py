"""Programs on registered parameters, for a team of any size: memory of the caller's that peers read
by Get and write by Put where it lies.

Each function of `TEXTS` gives the text; ROWS rows of each rank. Those of `RUNS` run it on a rank:

    wrong = RUNS["update"](make, seed, 4, "cuda")      # make("update", flat): a prepared Executor
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from interlace.runtime import Executor

ROWS, K, N = 4, 8, 6


def gather_matmul(world: int) -> str:
    """y = concatenation of the shards, times w: every rank pulls from the others' own tensors."""
    lines = [
        f"def gather_matmul(tp: Team[{world}], x: f32[{ROWS}, {K}].registered(tp), "
        f"w: f32[{K}, {N}], y: out[f32[{world * ROWS}, {N}]]):",
        f"    full = alloc(f32[{world * ROWS}, {K}])",
        "    main: notify(begun, to=tp.others)",
        '    main: call("aten.mm.out", x, w, out=y[tp.rank])',
    ]
    for k in range(1, world):
        lines += [
            f"    comm: expect(begun, tp.rank + {k})",
            f"    comm: get(x, full[tp.rank + {k}], peer=tp.rank + {k})",
            f"    comm: notify(done, to=tp.rank + {k})",
            f"    comm: record(came{k})",
            f"    main: wait(came{k})",
            f'    main: call("aten.mm.out", full[tp.rank + {k}], w, out=y[tp.rank + {k}])',
        ]
    lines += [f"    comm: expect(done, tp.rank - {k})" for k in range(1, world)]
    return "\n".join(lines)


def gather_put(world: int) -> str:
    """y = the shards, which every rank pushes into the others' own outputs."""
    lines = [
        f"def gather_put(tp: Team[{world}], x: f32[{ROWS}, {K}], "
        f"y: out[f32[{world * ROWS}, {K}].registered(tp)]):",
        "    comm: notify(open, to=tp.others)",
        "    main: copy(x, y[tp.rank])",
    ]
    for k in range(1, world):
        lines += [
            f"    comm: expect(open, tp.rank + {k})",
            f"    comm: put(x, y[tp.rank], peer=tp.rank + {k})",
            f"    comm: notify(came, to=tp.rank + {k})",
        ]
    lines += [f"    main: expect(came, tp.rank - {k})" for k in range(1, world)]
    return "\n".join(lines)


def update(world: int) -> str:
    """An optimizer's step on a flat buffer of parameters: each rank adds to its own part, and
    pushes that into the buffers of the others. The buffer is an input that is written."""
    lines = [
        f"def update(tp: Team[{world}], flat: f32[{world * ROWS}, {K}].registered(tp), "
        f"step: f32[{ROWS}, {K}]):",
        "    comm: notify(open, to=tp.others)",
        '    main: call("aten.add_.Tensor", flat[tp.rank], step, out=flat[tp.rank], mutates=True)',
        "    main: record(added)",
        "    comm: wait(added)",
    ]
    for k in range(1, world):
        lines += [
            f"    comm: expect(open, tp.rank + {k})",
            f"    comm: put(flat[tp.rank], flat[tp.rank], peer=tp.rank + {k})",
            f"    comm: notify(came, to=tp.rank + {k})",
        ]
    lines += [f"    main: expect(came, tp.rank - {k})" for k in range(1, world)]
    return "\n".join([*lines, "    return flat"])


TEXTS = {"gather_matmul": gather_matmul, "gather_put": gather_put, "update": update}
REGISTERED = {"gather_matmul": "x", "gather_put": "y", "update": "flat"}
"""Which parameter of each."""


def drawn(rank: int, seed: int, *sizes: int, device: str | torch.device = "cpu") -> torch.Tensor:
    """Small whole numbers, so that every order of a sum gives the same bits."""
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    return torch.randint(-8, 8, sizes, generator=generator).float().to(device)


def whole(seed: int, device: str) -> torch.Tensor:
    """The shards of all ranks."""
    ranks = range(dist.get_world_size())
    return torch.cat([drawn(rank, seed, ROWS, K, device=device) for rank in ranks])


Make = Callable[[str, torch.Tensor], Executor]
Delay = Callable[[], object]
"""Something that keeps the device or the rank busy for a while, now and then."""


def read(make: Make, seed: int, runs: int, device: str, delay: Delay = int) -> list[str]:
    """Peers get the caller's own tensor, which is written right before a run and right after."""
    x, found, wanted = torch.empty(ROWS, K, device=device), [], []
    with make("gather_matmul", x) as executor:
        for run in range(runs):
            w = drawn(0, seed - run, K, N, device=device)
            wanted.append(whole(seed + run, device) @ w)
            delay()
            x.copy_(drawn(dist.get_rank(), seed + run, ROWS, K, device=device))
            (y,) = executor.run([x, w])
            x.fill_(torch.nan)  # peers are done with it
            found.append(y.clone())
        executor.synchronize()
    pairs = enumerate(zip(found, wanted, strict=True))
    return [f"run {run} differs" for run, (y, right) in pairs if not torch.equal(y, right)]


def write(make: Make, seed: int, runs: int, device: str, delay: Delay = int) -> list[str]:
    """Peers put into the caller's own output, which is what a run gives back."""
    y = torch.full((dist.get_world_size() * ROWS, K), 5.0, device=device)
    found, wrong = list[torch.Tensor](), list[str]()
    with make("gather_put", y) as executor:
        if not y.eq(5.0).all():
            wrong.append("prepare() left something in a registered output")
        for run in range(runs):
            x = drawn(dist.get_rank(), seed + run, ROWS, K, device=device)
            delay()
            y.fill_(torch.nan)
            (back,) = executor.run([x], [y] if run % 2 else None)
            if back.data_ptr() != y.data_ptr():
                wrong.append(f"run {run} gives another tensor than the registered one")
            found.append(y.clone())
        executor.synchronize()
    wanted = [whole(seed + run, device) for run in range(runs)]
    pairs = enumerate(zip(found, wanted, strict=True))
    return wrong + [f"run {run} differs" for run, (z, right) in pairs if not torch.equal(z, right)]


def add_up(make: Make, seed: int, runs: int, device: str, delay: Delay = int) -> list[str]:
    """A flat buffer of parameters in the midst of a larger tensor, written by all."""
    world, wrong = dist.get_world_size(), list[str]()
    arena = torch.full((3, world * ROWS, K), 7.0, device=device)
    flat = arena[1]
    flat.copy_(drawn(99, seed, world * ROWS, K, device=device))
    wanted = flat.clone()
    with make("update", flat) as executor:
        if not torch.equal(flat, wanted):
            wrong.append("prepare() left something in a registered input")
        for run in range(runs):
            delay()
            step = drawn(dist.get_rank(), seed + run, ROWS, K, device=device)
            (found,) = executor.run([flat, step])
            wanted += whole(seed + run, device)
            executor.synchronize()
            if not torch.equal(flat, wanted) or (device == "cpu" and found is not flat):
                wrong.append(f"run {run} differs")
    if not arena[0].eq(7).all() or not arena[2].eq(7).all():
        wrong.append("what lies around the parameter was written")
    return wrong


RUNS = {"gather_matmul": read, "gather_put": write, "update": add_up}
