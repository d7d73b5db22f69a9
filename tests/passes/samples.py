"""Serial Programs as the frontend writes them, with inputs and what plain torch makes of them.

Every sample is a communication and the matmuls around it in one spelling: `Sample.text` for a team
of some size, `inputs(rank)`, and `expected` from the inputs of all ranks. The data are small
integers, exact in bf16 as well, so results compare bit for bit whatever the order of a sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from interlace.ir import Program, parse

Tensors = list[torch.Tensor]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
SHAPES = ("even", "uneven", "one-row", "empty")


def rows_of(shape: str, ranks: int, height: int = 3) -> tuple[int, ...]:
    """Rows of each rank's shard."""
    match shape:
        case "even":
            return (height,) * ranks
        case "uneven":
            return (*(height,) * (ranks - 1), height - 1)
        case "one-row":
            return (1, *(0,) * (ranks - 1))
        case _:
            return (0,) * ranks


def padded_rows(shape: str, ranks: int) -> tuple[int, ...]:
    """Rows of each rank as `torch.chunk` cuts a dimension."""
    total = {"even": 3 * ranks, "uneven": 3 * ranks - 1, "one-row": 1, "empty": 0}[shape]
    size = -(-total // ranks)
    return tuple(max(0, min(size, total - i * size)) for i in range(ranks))


@dataclass(frozen=True)
class Sample:
    """A serial Program, its inputs by rank, and the results by rank."""

    program: Program
    inputs: list[Tensors]
    expected: list[Tensors]


def integers(generator: torch.Generator, *sizes: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers, such that sums of a few products are exact in bf16."""
    return torch.randint(-1, 2, sizes, generator=generator).to(dtype)


def all_gather_matmul(ranks: int, shape: str, dtype: str, seed: int, n: int = 5) -> Sample:
    """x of each rank, gathered, times a weight."""
    g, kind = torch.Generator().manual_seed(seed), DTYPES[dtype]
    rows = rows_of(shape, ranks)
    even = len(set(rows)) == 1
    mine = rows[0] if even else "rows[tp.rank]"
    text = f"""
def f(tp: Team[{ranks}], x: {dtype}[{mine}, 8], w: {dtype}[8, {n}]):
    {"" if even else f"rows = table(tp, {', '.join(map(str, rows))})"}
    full = empty({dtype}[{sum(rows)}, 8])
    main: all_gather(x, full, team=tp{"" if even else ", splits=rows"})
    main: call("aten.mm.default", full, w, out=(y := {dtype}[{sum(rows)}, {n}]))
    return y
"""
    xs = [integers(g, height, 8, dtype=kind) for height in rows]
    ws = [integers(g, 8, n, dtype=kind) for _ in rows]
    return Sample(
        parse(text),
        [[x, w] for x, w in zip(xs, ws, strict=True)],
        [[torch.cat(xs) @ w] for w in ws],
    )


def matmul_reduce_scatter(ranks: int, shape: str, dtype: str, seed: int, n: int = 5) -> Sample:
    """x times a weight of each rank, summed, each rank its rows."""
    g, kind = torch.Generator().manual_seed(seed), DTYPES[dtype]
    rows = rows_of(shape, ranks)
    even = len(set(rows)) == 1
    mine = rows[0] if even else "rows[tp.rank]"
    text = f"""
def f(tp: Team[{ranks}], x: {dtype}[{sum(rows)}, 8], w: {dtype}[8, {n}]):
    {"" if even else f"rows = table(tp, {', '.join(map(str, rows))})"}
    main: call("aten.mm.default", x, w, out=(y := {dtype}[{sum(rows)}, {n}]))
    out = empty({dtype}[{mine}, {n}])
    main: reduce_scatter(y, out, reduce="sum", team=tp{"" if even else ", splits=rows"})
    return out
"""
    xs = [integers(g, sum(rows), 8, dtype=kind) for _ in rows]
    ws = [integers(g, 8, n, dtype=kind) for _ in rows]
    total = torch.stack([(x @ w).float() for x, w in zip(xs, ws, strict=True)]).sum(0).to(kind)
    return Sample(
        parse(text),
        [[x, w] for x, w in zip(xs, ws, strict=True)],
        [[part] for part in total.split(list(rows))],
    )


def matmul_all_reduce(ranks: int, shape: str, dtype: str, seed: int, n: int = 5) -> Sample:
    """x times a weight of each rank, summed."""
    g, kind = torch.Generator().manual_seed(seed), DTYPES[dtype]
    total = sum(rows_of(shape, ranks))
    text = f"""
def f(tp: Team[{ranks}], x: {dtype}[{total}, 8], w: {dtype}[8, {n}]):
    main: call("aten.mm.default", x, w, out=(y := {dtype}[{total}, {n}]))
    out = empty({dtype}[{total}, {n}])
    main: all_reduce(y, out, reduce="sum", team=tp)
    return out
"""
    xs = [integers(g, total, 8, dtype=kind) for _ in range(ranks)]
    ws = [integers(g, 8, n, dtype=kind) for _ in range(ranks)]
    summed = torch.stack([(x @ w).float() for x, w in zip(xs, ws, strict=True)]).sum(0).to(kind)
    inputs = [[x, w] for x, w in zip(xs, ws, strict=True)]
    return Sample(parse(text), inputs, [[summed] for _ in range(ranks)])


KINDS: dict[str, Callable[..., Sample]] = {
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
    "matmul_all_reduce": matmul_all_reduce,
}
STRATEGIES = {
    "serial": "strategy=serial",
    "pipeline": "strategy=pipeline,chunks=2",
    "ring": "strategy=ring",
    "peer-get": "strategy=peer,transport=get",
    "peer-put": "strategy=peer,transport=put",
    "fused": "strategy=fused",
    "fused-pieces": "strategy=fused,chunks=12",
    "exchange": "strategy=exchange",
    "copies": "strategy=copies",
}


def site_of(kind: str, strategy: str, ranks: int, shape: str, dtype: str, seed: int) -> Sample:
    """A sample that the strategy can serve, if it can serve one of that shape and type."""
    return KINDS[kind](ranks, shape, dtype, seed, 8 if strategy.startswith("fused") else 5)


def taken(strategy: str, shape: str, dtype: str) -> str:
    """What becomes of a site for which a strategy is asked."""
    if shape == "empty" or (shape == "one-row" and strategy == "pipeline"):
        return "serial"
    if strategy.startswith("fused") and (shape, dtype) != ("even", "bf16"):
        return "peer"
    return strategy.split("-")[0]
