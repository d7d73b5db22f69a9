"""Decode steps of one layer whose number of rows changes: each way in a fresh process.

python benchmarks/decode.py --ways inductor-graph interlace-graph --out results
python benchmarks/decode.py --device cpu --model small --ways inductor interlace

The layer is an 8B-sized Llama's under tensor parallelism, one token of each of 1 to 256 sequences
against their caches. Each way warms up with 16 rows and 1; then numbers of rows take turns. The
column `first_us` is the first step of a number of rows, `host_us` the caller's time of a later
one, `step_us` until it is done, `compiles` how often TorchDynamo compiled after the warm-up.

One GPU is enough: the ranks share it, and bytes move by the transport `peer`; then `step_us` holds
the time that a GPU takes to turn from rank to rank. NCCL does not serve ranks that share a GPU:
there Inductor's collectives do nothing, so its times have no communication.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from interlace_bench.rows import append, facts

TRUSTING = {"guard_filter_fn": "skip_guard_on_all_nn_modules_unsafe"}
"""TorchDynamo then takes the attributes of modules to be what they were, and has no guards on them;
by its name in `torch.compiler`."""
WAYS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "inductor": {},
    "inductor-graph": {"mode": "reduce-overhead"},
    "interlace": {"options": {}},
    "interlace-graph": {"options": {"graph": True}},
    "inductor-graph-trusting": {"options": {"triton.cudagraphs": True, **TRUSTING}},
    "interlace-graph-trusting": {"options": {"graph": True, **TRUSTING}},
    "interlace.compile": {"options": {}},
    "interlace.compile-graph": {"options": {"graph": True}},
}
LIMIT_S = 300
"""When a process that hangs is ended."""
WARM_ROWS, STEPS = (16, 1), 30


def rank_main(rank: int, way: str, given: argparse.Namespace) -> None:
    """Measures on this rank; rank 0 prints the figures."""
    import torch
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # knows "fake"
    from torch import nn
    from torch._dynamo.utils import counters
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import parallelize_module

    import interlace
    from interlace.demo.model import Attention, Block, block_plan
    from interlace.frontend import backend
    from interlace_bench.layers.inference import EIGHT_B, SMALL
    from interlace_bench.sites import DTYPES

    cuda, world = given.device == "cuda", given.world
    sizes = SMALL.dims if given.model == "small" else EIGHT_B
    cached, dtype = (64, "f32") if given.model == "small" else (given.cached, "bf16")
    device, how = torch.device(given.device), WAYS[way]
    shared = cuda and torch.cuda.device_count() < world
    store, limit = dist.FileStore(given.store, world), timedelta(seconds=LIMIT_S)
    of_gpus = "fake" if shared and "interlace" not in way else "nccl"
    kinds = f"cpu:gloo,cuda:{of_gpus}" if cuda else "gloo"
    dist.init_process_group(kinds, store=store, rank=rank, world_size=world, timeout=limit)
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    options = how.get("options", {}) if how else {}
    if "interlace" in way and (shared or not cuda):
        options["transport"] = "peer"
    if name := options.get("guard_filter_fn"):
        options["guard_filter_fn"] = getattr(torch.compiler, name)

    def meet() -> None:
        dist.all_reduce(torch.zeros(1))  # on gloo

    def done() -> None:
        if cuda:
            torch.cuda.synchronize()

    class Cached(Attention):
        """One new token of each sequence against those in a cache; each rank holds some heads."""

        keys: torch.Tensor
        values: torch.Tensor

        def __init__(self) -> None:
            super().__init__(sizes)
            shape = (256, sizes.heads // world, cached, self.head_dim)
            self.register_buffer("keys", torch.randn(shape), persistent=False)
            self.register_buffer("values", torch.randn(shape), persistent=False)

        def forward(self, x: torch.Tensor, table: torch.Tensor | None) -> torch.Tensor:
            rows = x.shape[0]
            q, k, v = (
                linear(x).view(rows, -1, 1, self.head_dim) for linear in (self.wq, self.wk, self.wv)
            )
            self.keys[:rows, :, -1:] = k
            self.values[:rows, :, -1:] = v
            y = nn.functional.scaled_dot_product_attention(q, self.keys[:rows], self.values[:rows])
            return self.wo(y.reshape(rows, -1))

    mesh = init_device_mesh(given.device, (world,), mesh_dim_names=("tp",))
    with device:
        torch.manual_seed(0)
        layer = Block(sizes)
        layer.attention = Cached()
    layer.to(DTYPES[dtype])
    parallelize_module(layer, mesh, block_plan(Replicate()), src_data_rank=None)
    layer.requires_grad_(False)
    if how is None:
        run: Any = layer
    elif way.startswith("interlace.compile"):
        run = interlace.compile(layer, mesh=mesh, options=how["options"])
    else:
        ours = {"backend": backend} if way.startswith("interlace") else {}
        run = torch.compile(layer, dynamic=True, **ours, **how)
    every = {n: torch.randn(n, sizes.dim, dtype=DTYPES[dtype], device=device) for n in given.rows}
    for n in WARM_ROWS:
        every.setdefault(n, torch.randn(n, sizes.dim, dtype=DTYPES[dtype], device=device))

    def step(n: int) -> tuple[float, float]:
        meet()
        done()
        began = time.perf_counter()
        run(every[n])
        host = time.perf_counter()
        done()
        return (host - began) * 1e6, (time.perf_counter() - began) * 1e6

    with torch.no_grad():
        for _ in range(4):
            for n in WARM_ROWS:
                step(n)
        before = counters["stats"]["unique_graphs"]
        first = {n: step(n)[1] for n in given.rows}
        taken: dict[int, list[tuple[float, float]]] = {n: [] for n in given.rows}
        for _ in range(STEPS):
            for n in given.rows:
                taken[n].append(step(n))
        compiles = counters["stats"]["unique_graphs"] - before
    if rank == 0:
        for n, times in taken.items():
            host, whole = (statistics.median(each) for each in zip(*times, strict=True))
            row = {"rows": n, "host_us": host, "step_us": whole, "first_us": first[n]}
            row |= {"compiles": compiles, "gpus": torch.cuda.device_count() if cuda else 0}
            print(json.dumps(row), flush=True)
    meet()
    torch.compiler.reset()
    interlace.release()
    dist.destroy_process_group()


def measured(way: str, given: argparse.Namespace) -> list[dict[str, Any]] | None:
    """The rows of one way, in processes of its own; None where one of these ends with an error,
    which stands on stderr."""
    with tempfile.TemporaryDirectory(prefix="interlace-") as folder:
        same = ["--model", given.model, "--device", given.device, "--cached", str(given.cached)]
        same += ["--world", str(given.world), "--store", f"{folder}/store", "--rows"]
        same += [*map(str, given.rows)]
        running = [
            subprocess.Popen(
                [sys.executable, __file__, *same, "--rank", str(rank), way],
                **{"stdout": subprocess.PIPE, "text": True},
            )
            for rank in range(given.world)
        ]
        try:
            told = [rank.communicate(timeout=LIMIT_S)[0] for rank in running]
        finally:
            for rank in running:
                rank.kill()
                rank.wait()
    if any(rank.returncode for rank in running):
        return None
    return [json.loads(line) for line in told[0].splitlines() if line.startswith("{")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and, with --out, appends; 1 if a way failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="llama3-8b", help="llama3-8b or small")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 7, 16, 32, 50, 128, 256])
    parser.add_argument("--cached", type=int, default=2048, help="tokens in each sequence's cache")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--commit", default="", help="where git cannot tell")
    parser.add_argument("--out", type=Path, help="folder of decode.csv")
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.rank is not None:
        rank_main(int(given.rank[0]), given.rank[1], given)
        return 0
    where, failed = facts(given.device, given.commit), 0
    for way in given.ways:
        found = measured(way, given)
        if found is None:
            print(f"{way}: failed, see above", flush=True)
            failed = 1
            continue
        keys = {"model": given.model, "cached": given.cached, "ranks": given.world, "way": way}
        if given.out:
            append(given.out / "decode.csv", [{**keys, **row, **where} for row in found])
        for row in found:
            times = ", ".join(f"{key[:-3]} {row[key]:.0f} us" for key in row if key[-3:] == "_us")
            print(f"{way} {row['rows']} rows: {times}; {row['compiles']} compiles", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
