"""Programs on registered parameters, for a team of any size: memory of the caller's that peers read
by Get and write by Put where it lies.

Each function gives the text. ROWS rows of each rank; `shard[r]` below is what rank r was given.
"""

from __future__ import annotations

import torch

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
