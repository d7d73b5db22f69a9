"""What passes over large Programs take on the host, and a fence: rows in `results/passes.csv`.

python -m benchmarks.passes                        # 10 rounds, rows beside the others
python -m benchmarks.passes --rounds 3 --out /tmp

Every round takes each pass once, in another order, and the processor's time. Nothing here runs a
Program. `--check` ends with 1 where the median of a pass is over its bar.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.stage_text import StageText

from interlace.comm.host.signals import fence
from interlace.cost import default_machine, simulate
from interlace.ir import Notify, Program, parse, validate
from interlace.options import Options
from interlace.passes import lower, run_pipeline
from interlace.passes.dependencies import dependencies
from interlace.verify import check
from interlace_bench.layers.models import MODELS
from interlace_bench.rows import append, facts

HEAD = ("pass", "ranks", "ops", "rounds", "least_ms", "median_ms", "most_ms")
BARS_MS = {
    "validate": 5000,
    "check": 100,
    "check, 8 times as many ops": 1500,
    "check, 1,024 ranks": 5000,
    "check, a Program for each rank": 500,
    "check, every rank": 1500,
    "check, a deadlock": 2000,
    "dependencies": 800,
    "find_sites,decompose": 10_000,
    "lower, 128 ranks": 10_000,
    "simulate": 1000,
    "1,000 fences": 50,
}
"""What each may take, at the default size."""


def chain(count: int) -> Program:
    """Gathers, matmuls and elementwise calls of four ranks, one after another: `count` ops."""
    lines = ["def chain(tp: Team[4], x: f32[4, 4], w: f32[4, 4]):"]
    last = "x"
    for i in range(count // 4):
        lines += [
            f"    g{i} = empty(f32[16, 4])",
            f"    main: all_gather({last}, g{i}, team=tp)",
            f'    main: call("aten.mm.default", g{i}, w, out=(m{i} := f32[16, 4]))',
            f'    main: call("aten.mul.Tensor", m{i}[tp.rank], 2, out=(t{i} := f32[4, 4]))',
        ]
        last = f"t{i}"
    return parse("\n".join([*lines, f"    return {last}"]))


def two_streams(count: int) -> Program:
    """Gathers on one stream, the matmuls that wait for them on another: `count` ops."""
    lines = ["def two_streams(tp: Team[4], x: f32[4, 4], w: f32[4, 4]):"]
    lines += ["    g = empty(f32[16, 4])", "    y = empty(f32[16, 4])"]
    for i in range(count // 4):
        lines += [
            "    comm: all_gather(x, g, team=tp)",
            f"    comm: record(e{i})",
            f"    main: wait(e{i})",
            '    main: call("aten.mm.out", g, w, out=y)',
        ]
    return parse("\n".join([*lines, "    return y"]))


def reductions(count: int) -> Program:
    """All-reduces of rows of one buffer, and before them a tenth of signals: `count` ops."""
    lines = ["def reductions(tp: Team[8], x: f32[8, 4]):"]
    lines += [f"    comm: notify(s{i}, to=tp.others)" for i in range(count // 10)]
    lines += [
        f"    comm: all_reduce(x[tp.rank + {i % 8}], x[tp.rank + {i % 8}], reduce='sum', team=tp)"
        for i in range(count - count // 10)
    ]
    return parse("\n".join([*lines, "    return x"]))


def layers(count: int, ranks: int = 8) -> Program:
    """Layers of gather and matmul by gets, then a reduce-scatter: 47 ops each on eight ranks."""
    rows = 64
    lines = [
        f"def layers(tp: Team[{ranks}], x: bf16[{rows}, 512], w: bf16[512, 512], "
        f"y: out[bf16[{rows}, 512]]):"
    ]
    last = "x"
    for i in range(count):
        following = "y" if i == count - 1 else f"o{i}"
        lines += [
            f'    g{i} = alloc(bf16[{rows * ranks}, 512], symmetric=tp, storage="slot")',
            f'    h{i} = alloc(bf16[{rows * ranks}, 512], storage="s{i % 2}")',
            *([] if following == "y" else [f"    {following} = alloc(bf16[{rows}, 512])"]),
            f"    main: copy({last}, g{i}[tp.rank])",
            f"    main: notify(ready{i}, to=tp.others)",
            f"    main: record(a{i})",
            f"    comm: wait(a{i})",
            f'    main: call("aten.mm.out", g{i}[tp.rank], w, out=h{i}[tp.rank])',
        ]
        for k in range(1, ranks):
            lines += [
                f"    comm: expect(ready{i}, tp.rank + {k})",
                f"    comm: get(g{i}[tp.rank + {k}], peer=tp.rank + {k})",
                f"    comm: record(e{k})",
                f"    main: wait(e{k})",
                f'    main: call("aten.mm.out", g{i}[tp.rank + {k}], w, out=h{i}[tp.rank + {k}])',
            ]
        lines += [
            f"    main: free(g{i})",
            f'    main: reduce_scatter(h{i}, {following}, team=tp, reduce="sum")',
            f"    main: free(h{i})",
            *([] if last == "x" else [f"    main: free({last})"]),
        ]
        last = following
    return parse("\n".join(lines) + "\n")


def lacking_a_notify(program: Program) -> Program:
    """The Program without one notify in its middle, so that all ranks wait for ever."""
    middle = len(program.ops) // 2
    at = next(i for i, op in enumerate(program.ops) if i > middle and isinstance(op, Notify))
    return program.replace(ops=(*program.ops[:at], *program.ops[at + 1 :]))


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """A pass over a Program: `run` is what is timed."""

    name: str
    ranks: int
    ops: int
    run: Callable[[], Any]


def works(size: int) -> list[Work]:
    """All passes, over Programs of about `size` ops: of all ranks, where each has its own."""
    deep = layers(max(2, size * 27 // 10_000))
    deeper = layers(max(2, size * 213 // 10_000))
    wide = layers(1, max(16, size * 1024 // 10_000))
    num_ranks = len(wide.world)
    ranks = [deep.instantiate(rank) for rank in range(8)]
    faulty = lacking_a_notify(deep)
    long, two, many = chain(size // 2), two_streams(size // 4), reductions(size)
    machine, whole = default_machine("cuda"), 8 * len(deep.ops)
    dims = MODELS["llama3-70b"]
    wide_dp = max(2, size * 16 // 10_000)
    layer = parse(StageText(dims, layers=1, tp=8, dp=wide_dp, sequence=8192).forward())
    return [
        Work("validate", 8, len(many.ops), lambda: validate(many)),
        Work("check", 8, whole, lambda: check(deep)),
        Work("check, 8 times as many ops", 8, 8 * len(deeper.ops), lambda: check(deeper)),
        Work("check, 1,024 ranks", num_ranks, num_ranks * len(wide.ops), lambda: check(wide)),
        Work("check, a Program for each rank", 8, whole, lambda: check(ranks)),
        Work("check, every rank", 8, whole, lambda: check(deep, fold=False)),
        Work("check, a deadlock", 8, whole - 8, lambda: check(faulty)),
        Work("dependencies", 4, len(long.ops), lambda: dependencies(long)),
        Work("find_sites,decompose", 4, len(long.ops), lambda: decomposed(long)),
        Work(
            "lower, 128 ranks",
            8 * wide_dp,
            len(layer.ops),
            lambda: lower(layer, Options(), machine),
        ),
        Work("simulate", 4, 4 * len(two.ops), lambda: simulate(two, machine)),
        Work("1,000 fences", 1, 0, fences),
    ]


def fences() -> None:
    """What stands between any two ranks' words of shared memory, on the host."""
    for _ in range(1000):
        fence()


def decomposed(program: Program) -> Program:
    """Its sites found and taken apart."""
    return run_pipeline(program, "find_sites,decompose{strategy=peer}")


def measure(size: int, rounds: int) -> list[dict[str, Any]]:
    """A row for each pass."""
    todo = works(size)
    taken: dict[str, list[float]] = {work.name: [] for work in todo}
    for _ in range(rounds):
        for work in random.sample(todo, len(todo)):
            begun = time.process_time()
            work.run()
            taken[work.name].append((time.process_time() - begun) * 1e3)
    where = facts("cpu")
    rows: list[dict[str, Any]] = []
    for work in todo:
        times = taken[work.name]
        figures = (min(times), statistics.median(times), max(times))
        cells = (work.name, work.ranks, work.ops, rounds, *figures)
        rows.append(dict(zip(HEAD, cells, strict=True)) | where)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and appends; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--size", type=int, default=10_000, help="ops of the largest Programs")
    parser.add_argument("--check", action="store_true", help="hold the medians against the bars")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args(arguments)
    if given.rounds < 1 or given.size < 100:
        parser.error("--rounds >= 1 and --size >= 100 are what can be measured")
    rows = measure(given.size, given.rounds)
    append(given.out / "passes.csv", rows)
    for row in rows:
        print(f"{row['pass']:32} {row['ops']:6} ops  {row['median_ms']:8.1f} ms")
    print(f"wrote {given.out / 'passes.csv'}")
    late = [row for row in rows if row["median_ms"] > BARS_MS[row["pass"]]]
    for row in late if given.check else ():
        print(f"over its bar: {row['pass']}, {row['median_ms']:.0f} ms of {BARS_MS[row['pass']]}")
    return int(given.check and bool(late))


if __name__ == "__main__":
    sys.exit(main())
