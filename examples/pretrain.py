"""Pretrains a small Llama on Python's standard library: FSDP2 x tensor parallel, a whole run.

    torchrun --nproc-per-node 4 --max-restarts 3 examples/pretrain.py --steps 200

What each part does, and what goes wrong where: docs/tutorial/pretrain.md. `--compile eager` and
`--compile inductor` run the same by plain torch; with `--parts torch` the loss and the optimizer
are torch's too. A line that names something of Interlace's can be taken out without the others.
"""

from __future__ import annotations

import argparse
import math
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from operator import call
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from tensor_parallel_llama import shard  # torch's styles, with sequence parallel norms
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout as set_timeout
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module
from torch.optim.lr_scheduler import LambdaLR
from train_llama import DEVICE, Llama, text

import interlace
from interlace.float8 import Recipe
from interlace.nn.functional import linear_cross_entropy
from interlace.optim import AdamW, LayerWise, Muon, muon_groups
from interlace.tensor_parallel import parallelize


class Model(Llama):
    """Llama that computes its loss itself: only in this forward is its output weight whole."""

    loss: Callable[..., Tensor] | None = None

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x: Any = self.tok_embeddings(tokens)  # a DTensor: each rank has a part of the sequence
        x = x.clone()  # waits for it: else the first block, which would, compiles for itself
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x)
        if targets is None or self.loss is None:
            logits = self.output(x).float()
            return logits if targets is None else F.cross_entropy(logits.mT, targets)
        weight: Any = self.output.weight
        if isinstance(x, DTensor):  # this rank has a part of the sequence, and of the classes
            x, weight = x.redistribute(placements=[Replicate()]).to_local(), weight.to_local()
        return self.loss(x, weight, targets)


def build(dp: DeviceMesh, tp: DeviceMesh, args: argparse.Namespace) -> Any:
    """The model on this rank. Tensor parallel, compiler, checkpoint, FSDP2: in this order."""
    torch.manual_seed(args.seed)
    model = Model(args.dim, args.layers, args.head).to(args.device)
    if args.parts == "interlace":
        model.loss = partial(linear_cross_entropy, group=tp)
    style = partial(parallelize, recipe=Recipe()) if args.fp8 else parallelize_module
    if tp.size() > 1:
        shard(model, tp, style)
    precision = MixedPrecisionPolicy(getattr(torch, args.dtype), reduce_dtype=torch.float32)
    layers: Any = model.layers
    for i, block in enumerate(layers):
        if args.compile == "interlace" and not args.fp8:  # whose layers overlap by themselves
            block.compile(backend="interlace", fullgraph=True, options=args.options)
        elif args.compile == "inductor":
            block.compile(fullgraph=True)
        if args.checkpoint:  # of every n-th; others get the wrapper too, so one class compiles
            block = checkpoint_wrapper(block, checkpoint_fn=call if i % args.checkpoint else None)
        layers[i] = fully_shard(block, mesh=dp, mp_policy=precision)
    return fully_shard(model, mesh=dp, mp_policy=precision)


def optimizer_of(model: nn.Module, dp: DeviceMesh, args: argparse.Namespace) -> Any:
    """AdamW; Interlace's keeps its states in bfloat16. Or Muon, whose matrices have owners."""
    if args.muon:
        muon = Muon(muon_groups(model), lr=20 * args.lr, adamw={"lr": args.lr})
        return LayerWise(muon, model, dp)
    if args.parts == "interlace":
        states: Any = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
        return AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), **states)
    return torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))


def rate(step: int, steps: int) -> float:
    """Learning rate of a step, as a part of the highest: linear warm-up, then half a cosine."""
    warm = max(1, steps // 10)
    return min((step + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * step / steps))


def micro_batches(data: Tensor, step: int, dp: DeviceMesh, args: Any) -> Iterator[Tensor]:
    """Yields this rank's sequences of a step. They depend on the step alone, so a resumed run
    sees what it would have seen; so does their length, of which there are few."""
    length, parts = args.lengths[step % len(args.lengths)], dp.size()
    draw = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(len(data) - length - 1, (args.accumulate, args.batch), generator=draw)
    for row in starts.chunk(parts, dim=1)[dp.get_local_rank()]:
        yield torch.stack([data[i : i + length + 1] for i in row]).long().to(args.device)


def train_step(model: Any, batches: list[Tensor], optimizer: Any) -> tuple[Tensor, Tensor]:
    """The mean loss of this rank's micro-batches, and the norm of all gradients."""
    total = torch.zeros((), device=batches[0].device)
    for i, tokens in enumerate(batches, 1):
        model.set_requires_gradient_sync(i == len(batches))  # FSDP2 reduces after the last
        loss = model(tokens[:, :-1], tokens[:, 1:]) / len(batches)
        loss.backward()
        total += loss.detach()
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total, norm.full_tensor()


@torch.no_grad()
def blend(average: Any, model: Any, share: float) -> None:
    """Moves the average of weights towards the weights: shards alone, no communication."""
    for kept, new in zip(average.parameters(), model.parameters(), strict=True):
        kept.to_local().lerp_(new.to_local(), share)


@torch.no_grad()
def evaluate(model: Any, data: Tensor, dp: DeviceMesh, args: Any) -> float:
    """Mean loss over text that was held out; of length and batch as in training."""
    steps = range(0, 4 * len(args.lengths), len(args.lengths))
    batches = (tokens for step in steps for tokens in micro_batches(data, step, dp, args))
    losses = [model(tokens[:, :-1], tokens[:, 1:]) for tokens in batches]
    model.reshard()  # without a backward the root's weights stay whole, and `blend` needs shards
    return mean(torch.stack(losses).mean(), dp)


@torch.no_grad()
def generate(model: Any, tokens: Tensor) -> str:
    """The first row, its second half replaced by the likeliest bytes."""
    tokens = tokens.clone()
    for i in range(tokens.shape[1] // 2, tokens.shape[1]):
        tokens[:, i] = model(tokens)[:, i - 1].argmax(-1)
    model.reshard()
    return bytes(tokens[0].tolist()).decode(errors="replace")


def mean(loss: Tensor, dp: DeviceMesh) -> float:
    """The mean over the data-parallel ranks."""
    dist.all_reduce(loss, group=dp.get_group())
    return loss.item() / dp.size()


def state_of(model: Any, average: Any, optimizer: Any, schedule: LambdaLR) -> dict[str, Any]:
    """All that a resumed run needs."""
    stateful = isinstance(optimizer, LayerWise)  # DCP then saves and loads it by its own methods
    return {
        "model": states.get_model_state_dict(model),
        "average": states.get_model_state_dict(average),
        "optimizer": optimizer if stateful else states.get_optimizer_state_dict(model, optimizer),
        "schedule": schedule.state_dict(),
    }


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first: DCP writes `.metadata` after all ranks' files."""
    return sorted((file.parent for file in folder.glob("*/.metadata")), key=lambda p: int(p.name))


def save(folder: Path, step: int, state: dict[str, Any]) -> None:
    """Writes a checkpoint, and keeps two: one may be incomplete when a rank dies."""
    dcp.save(state, checkpoint_id=folder / str(step))
    if dist.get_rank() == 0:
        for old in checkpoints(folder)[:-2]:
            shutil.rmtree(old)


def resume(folder: Path, model: Any, average: Any, optimizer: Any, schedule: LambdaLR) -> int:
    """Loads the newest complete checkpoint; returns how many steps it has behind it."""
    if not (found := checkpoints(folder)):
        return 0
    state = state_of(model, average, optimizer, schedule)
    dcp.load(state, checkpoint_id=found[-1])
    states.set_model_state_dict(model, state["model"])
    states.set_model_state_dict(average, state["average"])
    if not isinstance(optimizer, LayerWise):
        states.set_optimizer_state_dict(model, optimizer, state["optimizer"])
    schedule.load_state_dict(state["schedule"])
    return int(found[-1].name)


def memory_mb(device: str) -> float:
    """Memory in use on this rank's GPU, by all ranks that share it; or the process' peak."""
    if device == "cuda":
        free, whole = torch.cuda.mem_get_info()
        return (whole - free) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def hidden(model: nn.Module) -> str:
    """Communication that ran under computation, in the last run of each compiled graph."""
    figures = [timeline.figures() for timeline in interlace.timelines(model)]
    whole = sum(f.comm_s for f in figures)
    none = f"- ({len(figures)} timelines)"  # 0: no graph of Interlace's ran
    return f"{sum(f.overlap_s for f in figures) / whole:.0%}" if whole else none


def run(mesh: DeviceMesh, args: argparse.Namespace) -> None:
    """Trains, saves, resumes, and at the end evaluates and writes text."""
    leads, data, losses = dist.get_rank() == 0, text(4 << 20), args.folder / "losses.csv"
    learned, held_out = data[: -len(data) // 16], data[-len(data) // 16 :]
    dp, tp = mesh["dp"], mesh["tp"]  # once: guards of compiled blocks compare meshes by identity
    model, average = build(dp, tp, args), build(dp, tp, args)  # alike, each with FSDP2's own state
    optimizer = optimizer_of(model, dp, args)
    inner = getattr(optimizer, "optimizer", optimizer)  # that of LayerWise, which has the rates
    schedule = LambdaLR(inner, lambda step: rate(step, args.steps))
    first = resume(args.folder, model, average, optimizer, schedule)
    if leads and first:
        print(f"resumed at step {first}", flush=True)
    if leads and losses.exists():  # of steps that are repeated no row stays
        rows = losses.read_text().splitlines(keepends=True)
        losses.write_text("".join(rows[:first]))
    for step in range(first + 1, args.steps + 1):
        began = time.perf_counter()
        batches = list(micro_batches(learned, step, dp, args))
        loss, norm = train_step(model, batches, optimizer)
        schedule.step()
        blend(average, model, 1 - args.decay)
        loss = mean(loss, dp)
        took = time.perf_counter() - began
        if leads:
            tokens = len(batches) * batches[0][:, 1:].numel() * dp.size()
            speed, memory = round(tokens / took), round(memory_mb(args.device))
            line = f"step {step:5}  loss {loss:.6f}  norm {norm:.3f}  {speed:8} tokens/s"
            if step % args.every == 0:
                line += f"  {memory} MB  hidden {hidden(model)}"
            print(line, flush=True)
            with losses.open("a") as file:
                file.write(f"{step},{loss!r},{speed},{memory}\n")
        if step % args.evaluate_every == 0 or step == args.steps:
            found = [evaluate(each, held_out, dp, args) for each in (model, average)]
            if leads:
                print("held out: {:.6f}, by the average {:.6f}".format(*found), flush=True)
        if step % args.save_every == 0 or step == args.steps:
            save(args.folder, step, state_of(model, average, optimizer, schedule))
    written = generate(average, next(micro_batches(held_out, 0, dp, args))[:, :-1])
    if leads:
        print(f"generated: {written!r}")


@record  # torchrun prints the error of the rank that failed first
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    compilers = ("interlace", "inductor", "eager")
    parser.add_argument("--compile", choices=compilers, default=compilers[0])
    parser.add_argument("--parts", choices=("interlace", "torch"), default="interlace")
    parser.add_argument("--device", default=DEVICE, help="cpu or cuda (%(default)s here)")
    parser.add_argument("--fp8", action="store_true", help="blocks' matmuls, and what they gather")
    parser.add_argument("--muon", action="store_true", help="in place of AdamW")
    parser.add_argument("--dtype", default="float32", help="of matmuls; reductions are float32")
    parser.add_argument("--folder", type=Path, default=Path("pretrain"), help="checkpoints, losses")
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 96], help="in turn")
    for name, value in (
        *(("tp", 2), ("steps", 100), ("save-every", 20), ("evaluate-every", 50), ("every", 10)),
        *(("batch", 8), ("accumulate", 2), ("checkpoint", 2), ("seed", 0)),
        *(("dim", 128), ("layers", 2), ("head", 32), ("timeout", 300)),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, help="(%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--decay", type=float, default=0.98, help="of the average of weights")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    patience = timedelta(seconds=args.timeout)  # with a rank that stalls
    # Each rank has its GPU: NCCL refuses to share one, and gloo has no gathers of GPU tensors.
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", timeout=patience)
    args.options = {"trace": True}
    if args.device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    shape = dist.get_world_size() // args.tp, args.tp
    mesh = init_device_mesh(args.device, shape, mesh_dim_names=("dp", "tp"))
    for axis in ("dp", "tp"):  # its groups wait for half an hour else, as Interlace does with them
        set_timeout(patience, mesh.get_group(axis))
    run(mesh, args)
    interlace.release()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
