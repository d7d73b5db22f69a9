"""Trains a small Llama on Python's standard library: tensor and sequence parallel, under FSDP2.

    torchrun --nproc-per-node 4 examples/train_llama.py --tp 2 --plot loss.png

Each way starts from the same weights and sees the same batches: `single` (no parallelism), `plain`
(torch's tensor parallel styles), `overlapped` (that plan by `parallelize`) and `fp8` (so, with a
recipe). The call that applies a plan to a block is all that differs. `--steps 300` is a longer run.
"""

from __future__ import annotations

import argparse
import csv
import os
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from interlace.float8 import Recipe
from interlace.tensor_parallel import parallelize

WAYS = ("single", "plain", "overlapped", "fp8")
ON_GPUS = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
DEVICE = "cuda" if ON_GPUS else "cpu"
"""GPUs where each rank has one of its own."""
VOCABULARY = 256
"""The text is trained on byte by byte."""


# the model


class Attention(nn.Module):
    def __init__(self, dim: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
                   for w in (self.wq, self.wk, self.wv))  # fmt: skip
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


def rotated(x: Tensor) -> Tensor:
    """Rotary position embedding of [B, heads, S, head]."""
    half = x.shape[-1] // 2
    speed = 10_000 ** -(torch.arange(half, device=x.device) / half)
    angle = torch.arange(x.shape[2], device=x.device)[:, None] * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, dim: int, head: int) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attention, self.feed_forward = Attention(dim, head), FeedForward(dim, 3 * dim)

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        x = x + self.attention(self.attention_norm(x), *more)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, dim: int, layers: int, head: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, dim)
        self.layers = nn.ModuleList([Block(dim, head) for _ in range(layers)])
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x)).float()


# how it is parallelised


def block_plan() -> dict[str, ParallelStyle]:
    """Of one block: sequence parallel between the matmuls, tensor parallel within."""
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    columns = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
    rows = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    return {
        "attention_norm": SequenceParallel(),
        "ffn_norm": SequenceParallel(),
        "attention": gathered,
        "feed_forward": gathered,
        **{name: ColwiseParallel() for name in columns},
        "attention.wo": rows,
        "feed_forward.w2": rows,
    }


def shard(model: Llama, mesh: DeviceMesh, way: str) -> None:
    """Shards a model in place: over mesh["tp"] by `block_plan`, over mesh["dp"] by FSDP2."""
    ends = {
        "tok_embeddings": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False
        ),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], ends)
    recipe = Recipe() if way == "fp8" else None
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        if way == "plain":
            parallelize_module(layer, mesh["tp"], block_plan())
        else:
            parallelize(layer, mesh["tp"], block_plan(), recipe=recipe)
        fully_shard(layer, mesh=mesh["dp"], mp_policy=precision)
    fully_shard(model, mesh=mesh["dp"], mp_policy=precision)


# training


def text(limit: int) -> Tensor:
    """Bytes of the modules of Python's standard library, in the order of their names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(
        bytearray(b"".join(map(Path.read_bytes, files))[:limit]), dtype=torch.uint8
    )


def batch(
    data: Tensor, draw: torch.Generator, parts: int, part: int, args: argparse.Namespace
) -> Tensor:
    """One of `parts` of a batch of sequences, with the byte that follows each."""
    starts = torch.randint(len(data) - args.sequence - 1, (args.batch,), generator=draw)
    rows = [data[i : i + args.sequence + 1] for i in starts.chunk(parts)[part]]
    return torch.stack(rows).long().to(args.device)


def loss_of(model: nn.Module, tokens: Tensor, autocast: bool) -> Tensor:
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=autocast):
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(way: str, mesh: DeviceMesh, args: argparse.Namespace) -> list[float]:
    """The loss of each step over the whole batch, and last that of text that was held out."""
    data, single = text(4 << 20), way == "single"
    learned, held_out = data[: -len(data) // 16], data[-len(data) // 16 :]
    torch.manual_seed(args.seed)
    model = Llama(args.dim, args.layers, args.head).to(args.device)
    parts, part = 1, 0
    if not single:
        parts, part = mesh["dp"].size(), mesh["dp"].get_local_rank()
        shard(model, mesh, way)

    def mean(loss: Tensor) -> float:
        if not single:
            loss = DTensor.from_local(loss[None], mesh["dp"], [Shard(0)]).full_tensor().mean()
        return float(loss)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=False)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, args.steps, pct_start=0.1)
    draw, losses, began = torch.Generator().manual_seed(args.seed), [], time.perf_counter()
    for step in range(1, args.steps + 1):
        loss = loss_of(model, batch(learned, draw, parts, part, args), single)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        losses.append(mean(loss.detach()))
        if dist.get_rank() == 0 and step % 50 == 0:
            took = (time.perf_counter() - began) / step * 1e3
            print(
                f"{way:>10}  step {step:4}  loss {losses[-1]:.4f}  {took:.0f} ms a step", flush=True
            )
    with torch.no_grad():
        tests = [
            loss_of(model, batch(held_out, draw, parts, part, args), single) for _ in range(16)
        ]
    return [*losses, mean(torch.stack(tests).mean())]


def report(found: dict[str, list[float]], args: argparse.Namespace) -> None:
    """Losses side by side; a CSV of all steps and a plot, if requested."""
    losses, last = (
        {way: one[:-1] for way, one in found.items()},
        {w: f[-1] for w, f in found.items()},
    )
    for way, loss in last.items():
        beside = [f"{loss / last[other] - 1:+.2%} of {other}" for other in last if other != way]
        print(f"{way:>10}  text held out: {loss:.4f}  ({', '.join(beside)})")
    if args.csv:
        with Path(args.csv).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["step", *losses])
            writer.writerows(
                [i, *row] for i, row in enumerate(zip(*losses.values(), strict=True), 1)
            )
            writer.writerow(["held out", *last.values()])
    if args.plot:
        from matplotlib import pyplot  # pyright: ignore[reportMissingImports]

        for way, each in losses.items():
            pyplot.plot(range(1, len(each) + 1), each, label=way, linewidth=1)
        pyplot.xlabel("step")
        pyplot.ylabel("loss, nats a byte")
        pyplot.legend()
        pyplot.savefig(args.plot, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ways", default=",".join(WAYS), help="of " + ", ".join(WAYS))
    parser.add_argument("--tp", type=int, default=2, help="ranks of tensor parallelism")
    parser.add_argument("--device", default=DEVICE, help="cpu or cuda (%(default)s here)")
    for name, value in (
        *(("steps", 30), ("batch", 8), ("sequence", 128), ("seed", 0)),
        *(("dim", 256), ("layers", 2), ("head", 32)),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--csv", help="file for the losses of all steps")
    parser.add_argument("--plot", help="file for a picture of them (needs matplotlib)")
    args = parser.parse_args()
    dist.init_process_group("gloo" if args.device == "cpu" else "nccl")
    shape = dist.get_world_size() // args.tp, args.tp
    mesh = init_device_mesh(args.device, shape, mesh_dim_names=("dp", "tp"))
    if args.device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    found = {way: train(way, mesh, args) for way in args.ways.split(",")}
    if dist.get_rank() == 0:
        report(found, args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
