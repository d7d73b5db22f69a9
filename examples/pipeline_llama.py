"""Trains a small Llama by pipeline x FSDP2 x tensor parallelism: torch's stages, compiled blocks.

    MKL_CBWR=AVX512,STRICT torchrun --nproc-per-node 4 examples/pipeline_llama.py

Each stage has some of the blocks, and torch.distributed.pipelining passes activations on and
gradients back. Within a stage blocks are compiled one by one. The same run without a compiler has
the same losses: on CPUs bit for bit, with MKL_CBWR as above.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensor_parallel_llama import shard  # torch's styles, with sequence parallel norms
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Shard
from train_llama import DEVICE, VOCABULARY, Llama, text

import interlace


class Stage(nn.Module):
    """Part of a Llama. Between stages each rank has its part of the sequence, as a plain tensor."""

    def __init__(self, model: Llama, number: int, stages: int, tp: DeviceMesh) -> None:
        super().__init__()
        per_stage = len(model.layers) // stages
        self.tp = tp
        self.embed = model.tok_embeddings if number == 0 else None
        self.layers = model.layers[number * per_stage : (number + 1) * per_stage]
        self.head = nn.Sequential(model.norm, model.output) if number == stages - 1 else None

    def forward(self, given: Tensor) -> Tensor:
        x: Any = DTensor.from_local(given, self.tp, [Shard(1)]) if self.embed is None else None
        if self.embed is not None:
            x = self.embed(given).clone()  # waits for it, as blocks would, each compiled for that
        for layer in self.layers:
            x = layer(x)
        return (x.to_local() if self.head is None else self.head(x)).clone()  # no view, for FSDP2


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(mesh: DeviceMesh, args: argparse.Namespace, compiled: bool) -> tuple[list[float], Any]:
    """The losses of some steps on every rank, and this rank's stage."""
    pp, dp, tp = mesh["pp"], mesh["dp"], mesh["tp"]
    torch.manual_seed(0)  # the same weights on every rank
    model = Llama(args.dim, args.layers, args.head).to(DEVICE)
    shard(model, tp)
    stage: Any = Stage(model, pp.get_local_rank(), pp.size(), tp)
    for block in stage.layers:
        if compiled:
            block.compile(backend="interlace", fullgraph=True, options={"trace": True})
        fully_shard(block, mesh=dp)
    fully_shard(stage, mesh=dp)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)

    data, rows = text(1 << 20), args.batch // args.parts
    tokens = torch.zeros(rows, args.sequence, dtype=torch.long, device=DEVICE)
    hidden = torch.zeros(
        rows, args.sequence // tp.size(), args.dim, device=DEVICE, requires_grad=True
    )
    logits = torch.zeros(rows, args.sequence, VOCABULARY, device=DEVICE)
    first, last = stage.embed is not None, stage.head is not None
    place, device = (pp.get_local_rank(), pp.size()), torch.device(DEVICE)
    sent: Any = {
        "input_args": tokens if first else hidden,
        "output_args": logits if last else hidden,
    }
    placed = PipelineStage(stage, *place, device, group=pp.get_group(), **sent)
    schedule = Schedule1F1B(placed, args.parts, loss_of)
    draw, losses = torch.Generator().manual_seed(dp.get_local_rank()), list[float]()
    for _ in range(args.steps):
        starts = torch.randint(len(data) - args.sequence - 1, (args.batch,), generator=draw)
        batch = torch.stack([data[i : i + args.sequence + 1] for i in starts]).long().to(DEVICE)
        found: list[Tensor] = []
        given = (batch[:, :-1],) if first else ()
        schedule.step(*given, target=batch[:, 1:] if last else None, losses=found)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(found).mean().detach() if last else torch.zeros((), device=DEVICE)
        dist.all_reduce(loss, group=pp.get_group())
        dist.all_reduce(loss, group=dp.get_group())
        losses.append(loss.item() / dp.size())
    return losses, stage


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    for name, value in (
        *(("pp", 2), ("tp", 2), ("steps", 6), ("batch", 8), ("parts", 4), ("sequence", 64)),
        *(("dim", 64), ("layers", 4), ("head", 16)),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help="(%(default)s)")
    args = parser.parse_args()
    if args.layers % args.pp or args.batch % args.parts:
        parser.error("--pp must divide --layers, and --parts --batch")
    if args.sequence % args.tp or (args.dim // args.head) % args.tp:
        parser.error("--tp must divide --sequence, and the heads: --dim / --head")
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    if DEVICE == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    if dist.get_world_size() % (args.pp * args.tp):
        parser.error(f"--pp times --tp must divide the {dist.get_world_size()} processes")
    shape = args.pp, dist.get_world_size() // args.pp // args.tp, args.tp
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("pp", "dp", "tp"))
    losses, stage = train(mesh, args, compiled=True)
    plain, _ = train(mesh, args, compiled=False)
    torch.testing.assert_close(losses, plain, rtol=1e-4, atol=1e-5)
    figures = [timeline.figures() for timeline in interlace.timelines(stage)]
    shares = [f.overlap_s / f.comm_s for f in figures if f.comm_s]
    if dist.get_rank() == 0:
        for step, (ours, theirs) in enumerate(zip(losses, plain, strict=True), 1):
            print(f"step {step}  loss {ours:.6f}, of plain torch {theirs:.6f}")
        print("the same bits" if losses == plain else "the same but for rounding")
        print("hidden in each graph of the first stage:", *(f"{share:.0%}" for share in shares))


if __name__ == "__main__":
    main()
    interlace.release()
    dist.destroy_process_group()
