"""Memory of N layers, forward and backward: each way and number of layers in a fresh process.

python benchmarks/memory_of_layers.py --layers 1 4 8 --ways inductor interlace --out results
python benchmarks/memory_of_layers.py --model llama3-70b --layers 1 --ways inductor fp8
python benchmarks/memory_of_layers.py --device cpu --model tiny --layers 1 2 --ways interlace

One GPU is enough: the ranks share it, and bytes move by the transport `peer`. Inductor runs alone
beside a fake process group of as many ranks, so its times have no communication; so does `floor`,
which computes nothing: its `host_ms` are torch's own under any backend. Bytes are those
over the weights: `torch_peak_bytes` of torch's allocator in a step, `rest_bytes` between steps,
`device_bytes` all that a rank took of the device, with slots and graphs. Growth is what a layer
adds to the row with the fewest layers.
"""

from __future__ import annotations

import argparse
import functools
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

WAYS: dict[str, dict[str, Any]] = {
    "inductor": {},
    "inductor-graph": {"mode": "reduce-overhead"},
    "interlace": {"backend": "interlace", "options": {}},
    "interlace-graph": {"backend": "interlace", "options": {"graph": True}},
    "fp8": {"backend": "interlace", "options": {}},
    "floor": {},
}
ALONE = ("inductor", "inductor-graph", "floor")
"""One process beside a fake group."""
LIMIT_S = 600
"""When a process that hangs is ended."""
WARM, STEPS = 5, 9


def allocating(graph: Any, inputs: Sequence[Any]) -> Any:
    """A compiler of AOTAutograd's graphs: its functions allocate what a graph gives, no more."""
    import torch
    from functorch.compile import make_boxed_func

    (given,) = graph.graph.output_node().args
    taken = {node: place for place, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    values = [getattr(node, "meta", {}).get("val") for node in given]
    layouts = [
        (value.shape, value.stride(), value.dtype) if torch.is_tensor(value) else None
        for value in values
    ]
    device = next(value.device for value in values if torch.is_tensor(value))

    def run(*args: Any) -> list[Any]:
        return [
            torch.empty_strided(*layout[:2], dtype=layout[2], device=device)
            if layout
            else args[taken[node]]
            if node in taken
            else None
            for node, layout in zip(given, layouts, strict=True)
        ]

    return make_boxed_func(run)


def rank_main(rank: int, way: str, form: str, given: argparse.Namespace) -> None:
    """Measures on this rank; rank 0 prints the figures."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    import interlace
    from interlace.float8 import Recipe
    from interlace.frontend import backend
    from interlace_bench.layers import models

    cuda, alone, world = given.device == "cuda", way in ALONE, given.world
    device, options = torch.device(given.device), dict(WAYS[way].get("options", {}))
    if alone:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    else:
        kinds = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        store = dist.FileStore(given.store, world)
        limit = timedelta(seconds=LIMIT_S)
        dist.init_process_group(kinds, store=store, rank=rank, world_size=world, timeout=limit)
        if not cuda or torch.cuda.device_count() < world:
            options["transport"] = "peer"
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())

    def meet() -> None:
        if not alone:
            dist.all_reduce(torch.zeros(1))  # on gloo

    def used() -> int:
        if not cuda:
            return 0
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return total - free

    mesh = init_device_mesh(given.device, (world,), mesh_dim_names=("tp",))
    dims, dtype = models.MODELS[given.model], torch.bfloat16
    # Each rank draws its own shards: on a shared GPU there is no NCCL to send them.
    draw = functools.partial(models.parallelize_module, src_data_rank=None)
    models.parallelize_module = draw  # pyright: ignore
    meet()
    before = used()
    with device:
        layers = models.parallelized(dims, given.layers[0], given.sequence, dtype, mesh)
        x = torch.randn(1, given.sequence // world, dims.dim, dtype=dtype)
    model, parameters = models.in_form(layers, form), list(layers.parameters())
    if way == "fp8":
        shards = models.shards_of(layers)
        maps = models.Overlapped(mesh.get_group(), options, Recipe())
        model = models.in_form(models.on_shards(shards, layers, dims, world, maps), form)
        parameters = list(shards.values())
    how = {**WAYS[way], **({"backend": backend, "options": options} if not alone else {})}
    if way == "floor":
        from torch._dynamo.backends.common import aot_autograd

        how = {"backend": aot_autograd(fw_compiler=allocating)}
    compiled: Any = functools.partial(torch.compile, dynamic=False, **how)
    run = model.mapped(compiled) if form.startswith("blocks") else compiled(model)

    def step() -> None:
        y = run(x)
        y = y.to_local() if isinstance(y, DTensor) else y
        y.float().square().mean().backward()
        for parameter in parameters:
            parameter.grad = None

    began = time.perf_counter()
    step()
    used()
    first_s = time.perf_counter() - began
    for _ in range(WARM):
        step()
    used()
    figures = dict.fromkeys(("torch_peak_bytes", "rest_bytes", "device_bytes"), 0)
    if cuda:
        torch.cuda.empty_cache()
        figures["rest_bytes"] = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    host: list[float] = []
    whole: list[float] = []
    for _ in range(STEPS):
        meet()
        used()
        began = time.perf_counter()
        step()
        host.append(time.perf_counter() - began)
        used()
        whole.append(time.perf_counter() - began)
    weights = sum((p.to_local() if isinstance(p, DTensor) else p).nbytes for p in parameters)
    sharing = -(-world // torch.cuda.device_count()) if cuda and not alone else 1
    if cuda:
        figures["torch_peak_bytes"] = torch.cuda.max_memory_allocated() - weights
        figures["rest_bytes"] -= weights
        figures["device_bytes"] = (used() - before) // sharing - weights
    times = {"step_ms": statistics.median(whole) * 1e3, "host_ms": statistics.median(host) * 1e3}
    if rank == 0:
        told = {"weights_bytes": weights, **figures, **times, "first_s": first_s}
        print(json.dumps(told), flush=True)
    meet()
    torch.compiler.reset()
    interlace.release()
    dist.destroy_process_group()


def measured(way: str, form: str, layers: int, given: argparse.Namespace) -> dict[str, Any] | None:
    """The figures of one way, form and number of layers, in processes of its own; None where one of
    these ends with an error, which stands on stderr."""
    ranks = 1 if way in ALONE else given.world
    with tempfile.TemporaryDirectory(prefix="interlace-") as folder:
        same = ["--model", given.model, "--sequence", str(given.sequence), "--device", given.device]
        same += ["--world", str(given.world), "--layers", str(layers), "--store", f"{folder}/store"]
        running = [
            subprocess.Popen(
                [sys.executable, __file__, *same, "--rank", str(rank), way, form],
                **{"stdout": subprocess.PIPE, "text": True},
            )
            for rank in range(ranks)
        ]
        try:
            told = [rank.communicate(timeout=LIMIT_S)[0] for rank in running]
        finally:
            for rank in running:
                rank.kill()
                rank.wait()
    failed = any(rank.returncode for rank in running)
    return None if failed else json.loads(told[0].splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and, with --out, appends; 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="llama3-8b", help="llama3-8b, llama3-70b, small or tiny")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=["inductor", "interlace"])
    parser.add_argument("--forms", nargs="+", default=["whole"], help="whole, blocks, +checkpoint")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens over all ranks")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--commit", default="", help="where git cannot tell")
    parser.add_argument("--out", type=Path, help="folder of memory_of_layers.csv")
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.rank is not None:
        rank, way, form = given.rank
        rank_main(int(rank), way, form, given)
        return 0
    where, failed = facts(given.device, given.commit), 0
    for form in given.forms:
        for way in given.ways:
            least: dict[str, Any] = {}
            for layers in given.layers:
                found = measured(way, form, layers, given)
                if found is None:
                    print(f"{form} {way} {layers}: failed, see above", flush=True)
                    failed = 1
                    continue
                least = least or {"layers": layers, **found}
                more = layers - least["layers"]
                grown = {
                    key.replace("bytes", "growth"): (found[key] - least[key]) / more
                    for key in ("torch_peak_bytes", "device_bytes")
                    if more
                }
                case = {"form": form, "way": way, "layers": layers}
                keys = {"model": given.model, "sequence": given.sequence, "ranks": given.world}
                if given.out:
                    row = {**keys, **case, **found, **grown, **where}
                    append(given.out / "memory_of_layers.csv", [row])
                sized = {**found, **grown}
                sizes = [key for key in sized if not key.endswith(("_ms", "_s"))]
                memory = ", ".join(f"{key} {sized[key] / 1e9:.3f} GB" for key in sizes)
                times = f"step {found['step_ms']:.1f} ms, host {found['host_ms']:.1f} ms"
                print(f"{form} {way} {layers}: {memory}, {times}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
