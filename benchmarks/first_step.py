"""How long a first training step takes: compiling and all, beside `aot_eager`'s, and a bar.

python benchmarks/first_step.py                           # 2, 4 and 16 layers, 5 rounds
python benchmarks/first_step.py --layers 2 --rounds 3 --out /tmp
python benchmarks/first_step.py --stages --layers 1 8 24  # our own seconds, by stage

A round gives each backend fresh processes, two ranks on gloo, in another order. Each rank builds
the demo's model (tensor and sequence parallel), meets the others and times the first step: what
the backend imports, compiles forward and backward, proves and binds, and the run. The slowest
rank's clock counts, and of its processor's time the sum over the ranks: on a machine that others
use too, that is the figure to trust. `--check` ends with 1 where the ratio of least processor
times is over the bar.

With `--stages` a round is two processes, one after the other, with one folder of kept schedules: a
first that keeps what it compiles, and a second that finds it. The rows have our own part of both:
the processor seconds of one rank's thread by stage, as the log has them a graph, forward and
backward together, the mean of the ranks, and of the rounds the least.
"""

from __future__ import annotations

import argparse
import compileall
import importlib
import json
import logging
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import interlace
from interlace_bench.rows import append, facts

BAR = 1.3
"""How many times as long as `aot_eager`'s the first step may take."""
BACKENDS = ("aot_eager", "interlace", "interlace-kept")
LIMIT_S = 900
"""When a rank that hangs is ended."""
STAGES = ("load", "import", "cache", "agreement", "choice", "lowering", "proof", "binding")
"""Stages of a compilation; `load` is what it takes to import the backend beside torch."""
MODEL: dict[str, Any] = {"dim": 128, "heads": 4, "hidden": 256, "sequence": 128}


def rank_main(rank: int, world: int, layers: int, backend: str, store: str, kept: str) -> None:
    """Times this rank's first step, and prints it."""
    import torch
    import torch._dynamo
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh

    from interlace.demo.model import Transformer, parallelize
    from interlace.demo.plan import ModelConfig

    stages = clocked_stages() if backend == "interlace-stages" else {}
    torch.set_num_threads(1)
    shared = dist.FileStore(store, world)
    limit = timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=world, timeout=limit)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    config = ModelConfig(layers=layers, **MODEL)
    model = parallelize(Transformer(config), mesh)
    tokens = torch.randint(0, config.vocabulary, (1, config.sequence))
    dist.barrier()
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    options: dict[str, Any] | None = None
    if backend != "aot_eager":
        options = {"cache": "off" if backend == "interlace" else kept}
    compiled = torch.compile(model, backend=backend.partition("-")[0], options=options)
    F.cross_entropy(compiled(tokens).flatten(0, 1), tokens.flatten()).backward()
    told = {"s": time.perf_counter() - begun_s, "cpu_s": time.process_time() - begun_cpu_s}
    told |= stages
    dist.barrier()
    print(json.dumps(told), flush=True)
    torch.compiler.reset()
    dist.destroy_process_group()


def clocked_stages() -> dict[str, float]:
    """The seconds of each stage, which grow as the log tells of graphs; in those of the thread's
    processor, as other processes make the clock's useless."""
    importlib.import_module("torch._dynamo.backends.debugging")  # torch's own imports are not ours

    seconds: dict[str, float] = dict.fromkeys(STAGES, 0.0)
    begun = time.thread_time()
    from interlace.frontend import binding, compiled_graph
    from interlace.runtime.prepare import agreement

    seconds["load"] = time.thread_time() - begun
    timing: tuple[Any, ...] = binding, compiled_graph, agreement
    for module in timing:
        module.time = SimpleNamespace(perf_counter=time.thread_time)

    class Stages(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            for stage, taken in re.findall(r"(\w+) (\d+\.\d+)[,)]", record.getMessage()):
                seconds[stage] += float(taken)

    compiled_graph.log.addHandler(Stages())
    compiled_graph.log.setLevel(logging.INFO)
    return seconds


def first_steps(layers: int, backend: str, kept: str, world: int = 2) -> list[dict[str, float]]:
    """The seconds of each rank, in fresh processes; `kept` is the folder of kept schedules."""
    with tempfile.TemporaryDirectory(prefix="interlace-") as folder:
        given = [str(world), str(layers), backend, f"{folder}/store", kept]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", str(rank), *given],
                **{"stdout": subprocess.PIPE, "env": environment, "text": True},
            )
            for rank in range(world)
        ]
        try:
            return [json.loads(rank.communicate(timeout=LIMIT_S)[0]) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()


def first_step(layers: int, backend: str, kept: str, world: int = 2) -> tuple[float, float]:
    """The slowest rank's seconds and all ranks' processor seconds, in fresh processes."""
    told = first_steps(layers, backend, kept, world)
    return max(note["s"] for note in told), sum(note["cpu_s"] for note in told)


def measure(layers: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """A row for each number of layers and backend; ours have the ratios."""
    where = facts("cpu")
    rows: list[dict[str, Any]] = []
    compileall.compile_dir(Path(interlace.__file__).parent, quiet=2)  # as pip does, and did torch
    for count in layers:
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in BACKENDS}
        with tempfile.TemporaryDirectory(prefix="interlace-") as kept:
            first_step(count, "interlace-kept", kept)  # the earlier process
            for _ in range(rounds):
                for name in random.sample(BACKENDS, len(BACKENDS)):
                    taken[name].append(first_step(count, name, kept))
        found = {name: _figures(taken[name]) for name in BACKENDS}
        base = found["aot_eager"]
        for name in BACKENDS:
            ratios = {f"{key}_ratio": found[name][key] / base[key] for key in base}
            head = {"layers": count, "ranks": 2, "backend": name, "rounds": rounds}
            rows.append(head | found[name] | ratios | where)
    return rows


def measure_stages(layers: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Rows of our own seconds by stage, for a first and a second process."""
    where = facts("cpu")
    compileall.compile_dir(Path(interlace.__file__).parent, quiet=2)
    taken: dict[tuple[int, str], list[dict[str, float]]] = {}
    for count in [count for _ in range(rounds) for count in layers]:
        with tempfile.TemporaryDirectory(prefix="interlace-") as kept:
            for process in ("first", "second"):
                ranks = first_steps(count, "interlace-stages", kept)
                mean = {s: statistics.fmean(rank[s] for rank in ranks) for s in STAGES}
                later = sum(mean.values()) - mean["load"] - mean["import"]
                mean |= {"own": later + mean["load"] + mean["import"], "find_sites to bind": later}
                taken.setdefault((count, process), []).append(mean)
    least = {
        key: {f"{s}_s": min(mean[s] for mean in means) for s in means[0]}
        for key, means in taken.items()
    }
    rows: list[dict[str, Any]] = []
    for (count, process), seconds in least.items():
        of_first = seconds["own_s"] / least[count, "first"]["own_s"]
        of_least = (
            seconds["find_sites to bind_s"] / least[min(layers), process]["find_sites to bind_s"]
        )
        head = {"layers": count, "ranks": 2, "process": process, "rounds": rounds}
        rows.append(head | seconds | {"of_first": of_first, "of_fewest_layers": of_least} | where)
    return rows


def _figures(taken: list[tuple[float, float]]) -> dict[str, float]:
    clock, cpu = zip(*taken, strict=True)
    return {
        "least_s": min(clock),
        "median_s": statistics.median(clock),
        "least_cpu_s": min(cpu),
        "median_cpu_s": statistics.median(cpu),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and appends; 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stages", action="store_true", help="our own seconds, by stage")
    parser.add_argument("--check", action="store_true", help="hold the ratios against the bar")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args(arguments)
    if given.rounds < 1 or min(given.layers) < 1:
        parser.error("--rounds >= 1 and --layers >= 1 are what can be measured")
    if given.stages:
        rows = measure_stages(given.layers, given.rounds)
        append(given.out / "first_step_stages.csv", rows)
        for row in rows:
            print(
                f"{row['layers']:3} layers, {row['process']} process: {row['own_s']:.3f} s,",
                end=" ",
            )
            print(", ".join(f"{stage} {row[f'{stage}_s']:.3f}" for stage in STAGES), end=": ")
            print(f"{row['of_first']:.2f} of the first's; find_sites to bind", end=" ")
            print(f"{row['of_fewest_layers']:.1f} times that of {min(given.layers)}")
        return 0
    rows = measure(given.layers, given.rounds)
    append(given.out / "first_step.csv", rows)
    for row in rows:
        figures = f"{row['median_s']:6.1f} s, {row['median_cpu_s']:6.1f} s of processors"
        ratios = f"{row['median_s_ratio']:.2f}, {row['least_cpu_s_ratio']:.2f}"
        print(f"{row['layers']:3} layers  {row['backend']:14} {figures}  ({ratios} of aot_eager's)")
    print(f"wrote {given.out / 'first_step.csv'}")
    late = [row for row in rows if row["least_cpu_s_ratio"] > BAR]
    for row in late if given.check else ():
        print(f"over the bar: {row['layers']} layers, {row['least_cpu_s_ratio']:.2f} of {BAR}")
    return int(given.check and bool(late))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        me, size, depth, *others = sys.argv[2:]
        rank_main(int(me), int(size), int(depth), *others)
    else:
        sys.exit(main())
