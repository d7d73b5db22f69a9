"""Weights that a model gathers where it uses them: how much of that is hidden, and a bar.

python benchmarks/hosts.py -- benchmarks/gathered_weights.py --check     # 2 hosts of 2 ranks
python benchmarks/hosts.py --mbit 400 --ranks 1 -- benchmarks/gathered_weights.py --layers 8

The weights are cut over the hosts, as FSDP does, but by the model's own code: each layer gathers a
weight where it uses it, in the forward and again in the backward, and scatters its gradient; all of
that is in the graph. With two ranks a host the layers are tensor parallel inside of it too. The
hosts are those of `benchmarks/hosts.py`, joined by a slow link.

Ways, in turn: `in order` (`overlap=False`), `overlapped`, and `alone`: the same layers with whole
weights, which send nothing between hosts. The first two are recorded: of the time in which rank 0
communicates, `hidden` is the part in which it computes, too (`interlace.timelines`), the median of
the rounds. Step times are medians of the slowest rank; on a CPU what computes shares the processor
with what communicates. Results and gradients of the first two must have the same bits. `--check`
ends with 1 where less than 0.8 is hidden.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HIDDEN = 0.8
"""The part of the gathers' and scatters' time that is hidden at least."""
WAYS: dict[str, Any] = {
    "in order": {"overlap": False, "trace": True},
    "overlapped": {"trace": True},
    "alone": {},
}


def work(given: argparse.Namespace) -> None:
    """A rank: times the ways in turn; rank 0 prints and keeps the rows."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    import interlace
    from interlace.commands.output import table
    from interlace_bench.rows import append, facts

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    me, world = dist.get_rank(), dist.get_world_size()
    hosts = int(os.environ["HOSTS"])
    mesh = init_device_mesh("cpu", (hosts, world // hosts), mesh_dim_names=("dp", "tp"))
    data, team, rows = mesh["dp"], mesh["tp"], [Shard(0)]
    dim, mean = given.dim, [Partial("avg")]

    class Weight(nn.Module):
        """A rank's part of a matrix that is cut over `tp` as placed, and over `dp` by rows."""

        def __init__(self, inputs: int, outputs: int, placed: Shard, whole: bool) -> None:
            super().__init__()
            self.placed, self.whole = [placed], whole
            own = torch.randn(outputs, inputs) / inputs**0.5
            own = own.chunk(team.size(), placed.dim)[team.get_local_rank()].contiguous()
            part = own if whole else own.chunk(data.size())[data.get_local_rank()].clone()
            self.part = nn.Parameter(part)

        def forward(self) -> DTensor:
            own = self.part
            if not self.whole:
                cut = DTensor.from_local(own, data, rows, run_check=False)
                own = cut.redistribute(placements=[Replicate()]).to_local(grad_placements=mean)
            return DTensor.from_local(own, team, self.placed, run_check=False)

    class Layer(nn.Module):
        def __init__(self, whole: bool) -> None:
            super().__init__()
            self.up = Weight(dim, 4 * dim, Shard(0), whole)
            self.down = Weight(4 * dim, dim, Shard(1), whole)

        def forward(self, x: DTensor) -> DTensor:
            hidden = F.gelu(F.linear(x.redistribute(placements=[Replicate()]), self.up()))
            return x + F.linear(hidden, self.down()).redistribute(placements=rows)

    class Layers(nn.Module):
        def __init__(self, whole: bool) -> None:
            super().__init__()
            torch.manual_seed(given.seed)
            self.layers = nn.ModuleList([Layer(whole) for _ in range(given.layers)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = DTensor.from_local(x, team, rows, run_check=False)
            for layer in self.layers:
                y = layer(y)
            return y.to_local()

    models = {way: Layers(way == "alone") for way in WAYS}
    compiled = {
        way: torch.compile(model, backend="interlace", options={**WAYS[way], "timeout_s": 60})
        for way, model in models.items()
    }
    torch.manual_seed(given.seed + me)
    x = torch.randn(given.tokens // team.size(), dim)

    def step(way: str) -> list[torch.Tensor]:
        y = compiled[way](x)
        y.square().mean().backward()
        grads = [parameter.grad for parameter in models[way].parameters()]
        models[way].zero_grad()
        return [y.detach(), *grads]

    first = {way: step(way) for way in WAYS}
    bits = all(map(torch.equal, first["in order"], first["overlapped"]))
    took: dict[str, list[float]] = {way: [] for way in WAYS}
    hidden: dict[str, list[float]] = {way: [] for way in WAYS}
    order = random.Random(given.seed)
    for number in range(given.rounds + 1):
        for way in order.sample(sorted(WAYS), len(WAYS)):
            dist.barrier()
            begin = time.perf_counter()
            step(way)
            seconds = torch.tensor(time.perf_counter() - begin)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            if number:  # the first warms up
                took[way].append(seconds.item())
                figures = [timeline.figures() for timeline in interlace.timelines(compiled[way])]
                comm_s = sum(each.comm_s for each in figures)
                exposed_s = sum(each.exposed_s for each in figures)
                hidden[way].append(1 - exposed_s / comm_s if comm_s else math.nan)
    same = torch.tensor(float(bits))
    dist.all_reduce(same, dist.ReduceOp.MIN)
    interlace.release()
    dist.barrier()
    dist.destroy_process_group()
    if me:
        return
    of = {way: statistics.median(each) for way, each in took.items()}
    share = {way: statistics.median(each) for way, each in hidden.items()}
    common = {
        **{"layers": given.layers, "dim": dim, "tokens": given.tokens, "hosts": hosts},
        **{"ranks": world, "mbit": int(os.environ["MBIT"]), "rounds": given.rounds},
        "same_bits": bool(same),
    }
    made = [
        {**common, "way": way, "median_s": of[way], "least_s": min(took[way])}
        | {"hidden": share[way], **facts("cpu", given.commit)}
        for way in WAYS
    ]
    append(Path(given.out) / "gathered_weights.csv", made)
    shown = [
        [way, f"{of[way]:.3f} s", "-" if math.isnan(share[way]) else f"{share[way]:.0%}"]
        for way in WAYS
    ]
    table(["way", "median", "hidden"], shown)
    least = share["overlapped"]
    if given.check and (least < HIDDEN or not same):
        sys.exit(f"missed: {least:.0%} hidden (bar {HIDDEN:.0%}), same bits: {bool(same)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192, help="of each host")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "results"))
    parser.add_argument("--commit", default="")
    parser.add_argument("--check", action="store_true")
    work(parser.parse_args())
