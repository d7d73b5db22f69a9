"""Sizes that change: steps and tokens of other lengths each, beside torch's own ways, and bars.

python benchmarks/sizes.py --check                        # all cases on two gloo ranks, 220 steps
python benchmarks/sizes.py --case lengths exchange --steps 60 --out /tmp
python benchmarks/sizes.py --device cuda --case tokens    # one rank, one GPU: host time a token

    lengths     a transformer of 2 layers, tensor and sequence parallel, trains on random lengths
    batches     the same on random numbers of sequences
    tokens      a Hugging Face Llama decodes with its own growing cache (needs `transformers`)
    exchange    a mixture of experts trains, whose ranks exchange as many rows as its router counts

All ways take every step, one after another, in another order each step; all ranks meet before each.
A step is timed on rank 0 from its begin to its end, on a GPU to where the host has issued it. The
first ten do not count (of tokens: a whole first text). Each way must give eager's results.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from interlace.launch import joined, launch
from interlace_bench.rows import append, facts

BARS = {
    ("lengths", "cpu"): ("aot_eager", 1.2),
    ("batches", "cpu"): ("aot_eager", 1.2),
    ("tokens", "cpu"): ("eager", 1.5),
    ("exchange", "cpu"): ("aot_eager", 1.5),
    ("tokens", "cuda"): ("inductor", 1.0),
}
"""Beside which way, and how many times as long ours may take."""
CASES = tuple(dict.fromkeys(case for case, _ in BARS))
WARM_UP = 10
LIMIT_S = 1800
TEXT = 40
"""Tokens of a text."""

Step = Callable[[Any, int], Any]
"""A model or its compiled form, and the number of the step: what comes of it."""


def training(case: str, device: Any, seed: int) -> tuple[Any, Step]:
    """Two layers of a transformer, and a step of a random length or batch."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    world, width, head = dist.get_world_size(), 128, 32
    rows = Shard(1)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
            self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norms[0](x)
            q, k, v = (
                layer(y).unflatten(-1, (-1, head)).transpose(1, 2)
                for layer in (self.q, self.k, self.v)
            )
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.o(y.transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.norms[1](x))))

    mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("tp",))
    plan: Any = {name: ColwiseParallel(input_layouts=rows) for name in ("q", "k", "v", "up")}
    plan |= {name: RowwiseParallel(output_layouts=rows) for name in ("o", "down")}
    model = nn.Sequential(Layer(), Layer()).to(device)
    for layer in model:
        parallelize_module(layer, mesh, plan)

    def step(way: Any, number: int) -> Any:
        rng = random.Random(seed + number)
        length = rng.randrange(32, 128) if case == "lengths" else 32  # of each rank's part
        batch = 1 if case == "lengths" else rng.randrange(1, 16)
        g = torch.Generator().manual_seed(seed + world * number + dist.get_rank())
        x = torch.randn(batch, length, width, generator=g).to(device)
        model.zero_grad()
        loss = way(x).square().mean()
        loss.backward()
        return loss.detach()

    return model, step


def experts(device: Any, seed: int) -> tuple[Any, Step]:
    """A mixture of experts on all ranks, and a step of it."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed._functional_collectives import (
        all_to_all_single,
        all_to_all_single_autograd,
    )

    group, ranks, width = dist.group.WORLD, dist.get_world_size(), 128

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(width, ranks, bias=False)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight, expert = self.router(x).softmax(-1).max(-1)
            order = expert.argsort(stable=True)
            counts = torch.zeros(ranks, dtype=torch.long, device=x.device)
            counts = counts.scatter_add(0, expert, torch.ones_like(expert))
            theirs = all_to_all_single(counts, None, None, group)
            sent, got = counts.tolist(), theirs.tolist()
            rows = all_to_all_single_autograd(x[order], got, sent, group)
            made = self.down(F.silu(self.up(rows)))
            back = all_to_all_single_autograd(made, sent, got, group)
            return x + torch.empty_like(x).index_copy(0, order, back) * weight[:, None]

    model = nn.Sequential(Mixture(), Mixture()).to(device)

    def step(way: Any, number: int) -> Any:
        g = torch.Generator().manual_seed(seed + ranks * number + dist.get_rank())
        x = torch.randn(256, width, generator=g).to(device)
        model.zero_grad()
        loss = way(x).square().mean()
        loss.backward()
        return loss.detach()

    return model, step


def decoding(device: Any) -> tuple[Any, Step]:
    """A Llama, tensor parallel by its own plan where there are ranks, and a text of it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM  # pyright: ignore

    heads = {"num_attention_heads": 8, "num_key_value_heads": 8}
    sizes = {"vocab_size": 1000, "hidden_size": 512, "intermediate_size": 2048}
    config = LlamaConfig(num_hidden_layers=2, max_position_embeddings=512, **sizes, **heads)
    model: Any = LlamaForCausalLM(config).eval().to(device)
    if dist.get_world_size() > 1:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("tp",))
        plan: Any = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        plan |= {f"{name}_proj": RowwiseParallel() for name in ("self_attn.o", "mlp.down")}
        for layer in model.model.layers:
            parallelize_module(layer, mesh, plan)

    def step(way: Any, number: int) -> Any:
        """The seconds of each token, and the tokens."""
        g = torch.Generator().manual_seed(number)
        ids = torch.randint(0, 1000, (1, 7), generator=g).to(device)
        cache, found, taken = DynamicCache(config=config), list[Any](), list[float]()
        with torch.no_grad():
            for _ in range(TEXT):
                _synchronize(device)
                begun = time.perf_counter()
                logits = way(input_ids=ids, past_key_values=cache, use_cache=True).logits
                if isinstance(logits, DTensor):
                    logits = logits.full_tensor()
                ids = logits[:, -1:].argmax(-1)
                taken.append(time.perf_counter() - begun)
                found.append(ids)
        return torch.cat(found, 1), taken[3:]

    return model, step


def work(given: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All steps of a case on one rank; the times of each way."""
    import torch
    import torch._dynamo
    import torch.distributed as dist

    case, steps, seed = given["case"], given["steps"], given["seed"]
    limit = timedelta(seconds=LIMIT_S)
    with joined(given["device"], limit=limit, timeout_s=LIMIT_S) as device:
        torch.set_num_threads(1)
        torch.manual_seed(0 if case != "exchange" else dist.get_rank())
        torch._dynamo.config.recompile_limit = 64
        if case == "tokens":
            model, step = decoding(device)
            steps = max(2, steps // TEXT)
        else:
            model, step = (
                experts(device, seed) if case == "exchange" else training(case, device, seed)
            )
        base, _ = BARS[case, device.type]
        dynamic = None if case == "exchange" else True
        names = list(dict.fromkeys(("eager", base, "interlace")))
        ways = {n: torch.compile(model, backend=n, dynamic=dynamic) for n in names if n != "eager"}
        ways["eager"] = model
        taken: dict[str, list[float]] = {name: [] for name in names}
        alike = dict.fromkeys(names, True)
        for number in range(steps):
            results: dict[str, Any] = {}
            for name in random.Random(number).sample(names, len(names)):
                dist.barrier()
                begun = time.perf_counter()
                results[name] = step(ways[name], number)
                seconds = time.perf_counter() - begun
                if case == "tokens":
                    results[name], more = results[name]
                    taken[name] += more if number else []
                elif number >= WARM_UP:
                    taken[name].append(seconds)
                _synchronize(device)
            for name in names:
                alike[name] &= torch.allclose(results[name], results["eager"], atol=1e-4)
        torch.compiler.reset()
    return {"taken": taken, "alike": alike}


def _synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(case: str, given: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each way of a case."""
    settings = {**given, "case": case}
    what, world = f"the case {case}", given["ranks"]
    report = launch(work, settings, world, lambda _: None, LIMIT_S, what)
    medians = {name: statistics.median(taken) for name, taken in report["taken"].items()}
    base, _ = BARS[case, given["device"]]
    rows: list[dict[str, Any]] = []
    for name, taken in report["taken"].items():
        head = {"case": case, "device": given["device"], "ranks": world, "way": name}
        figures = {
            "steps": len(taken),
            "median_ms": 1e3 * medians[name],
            "least_ms": 1e3 * min(taken),
            "beside": base,
            "ratio": medians[name] / medians[base],
            "equal": report["alike"][name],
        }
        rows.append(head | figures | facts(given["device"], given["commit"]))
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, prints and appends; 1 if a bar is missed or a result is not eager's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--case", nargs="+", choices=CASES, default=None)
    parser.add_argument("--steps", type=int, default=220)
    parser.add_argument("--ranks", type=int, help="default: two, on a GPU one")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--commit", default="", help="where git cannot tell")
    parser.add_argument("--check", action="store_true", help="hold the ratios against the bars")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    given = parser.parse_args(arguments)
    if given.steps <= WARM_UP:
        parser.error(f"--steps must be more than the {WARM_UP} that do not count")
    known = [case for case, device in BARS if device == given.device]
    ranks = given.ranks or (2 if given.device == "cpu" else 1)
    settings = {name: getattr(given, name) for name in ("steps", "device", "seed", "commit")}
    print(f"seed {given.seed}")
    missed: list[str] = []
    for case in given.case or known:
        rows = measure(case, {**settings, "ranks": ranks})
        append(given.out / "sizes.csv", rows)
        for row in rows:
            figures = f"{row['median_ms']:8.3f} ms, least {row['least_ms']:8.3f}"
            print(f"{case:9} {row['way']:10} {figures}  ({row['ratio']:.2f} of {row['beside']}'s)")
        ours, (_, bar) = rows[-1], BARS[case, given.device]
        if ours["ratio"] > bar:
            missed.append(f"over the bar: {case}, {ours['ratio']:.2f} of {bar}")
        missed += [f"not eager's: {case}, {row['way']}" for row in rows if not row["equal"]]
    print("\n".join([*missed, f"wrote {given.out / 'sizes.csv'}"]))
    return int(given.check and bool(missed))


if __name__ == "__main__":
    sys.exit(main())
