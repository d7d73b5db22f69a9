"""Serves a small Llama: continuous batching over a paged or a static cache, tensor parallel.

    torchrun --nproc-per-node 2 examples/serve.py --check

Each step prefills a piece of each new prompt and decodes one token of each other request, so the
number of rows changes from step to step. The warm-up compiles all sizes. `--graph` has CUDA graphs
of them on GPUs. `--check` compares the tokens with those of the same run without a compiler.
docs/how-to/serving.md explains it.
"""

from __future__ import annotations

import argparse
import logging
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from train_llama import DEVICE, VOCABULARY, Attention, Llama

import interlace

Cache = tuple[Tensor, Tensor]
"""Keys and values of a layer: [blocks, positions of a block, heads of this rank, head]."""
SCRATCH = 0
"""The block that padding is written to; no request has it."""


# the model


class CachedAttention(Attention):
    """Attention of new tokens over those in the cache; each rank has some of the heads."""

    def forward(  # pyright: ignore
        self, x: Tensor, at: Tensor, tables: Tensor, slots: Tensor | None, cache: Cache
    ) -> Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, self.head)) for w in (self.wq, self.wk, self.wv))
        for kept, new in zip(cache, (rotated(k, at), v), strict=True):
            if slots is None:  # a block for each sequence
                kept[tables, at] = new
            else:
                kept.view(-1, *kept.shape[2:])[slots] = new
        keys, values = (kept[tables].flatten(1, 2).transpose(1, 2) for kept in cache)
        seen = torch.arange(keys.shape[2], device=x.device) <= at[:, None, :, None]
        q = rotated(q, at).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
        return self.wo(y.transpose(1, 2).flatten(2))


def rotated(x: Tensor, at: Tensor) -> Tensor:
    """Rotary position embedding of [rows, n, heads, head] at positions [rows, n]."""
    half = x.shape[-1] // 2
    angle = at[:, :, None, None] * 10_000 ** -(torch.arange(half, device=x.device) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Model(Llama):
    """The likeliest token after the last of each row of `tokens` [rows, n]."""

    def __init__(self, dim: int, layers: int, head: int) -> None:
        super().__init__(dim, layers, head)
        for layer in self.layers:
            layer.attention = CachedAttention(dim, head)

    def forward(  # pyright: ignore
        self, tokens: Tensor, at: Tensor, tables: Tensor, slots: Tensor | None, cache: list[Cache]
    ) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer, of_layer in zip(self.layers, cache, strict=True):
            x = layer(x, at, tables, slots, of_layer)
        return self.output(self.norm(x[:, -1])).argmax(-1)


def shard(model: Model, mesh: DeviceMesh) -> None:
    """Heads and features over the ranks; each block sums twice."""
    columns = [*(f"attention.w{each}" for each in "qkv"), "feed_forward.w1", "feed_forward.w3"]
    plan: Any = dict.fromkeys(columns, ColwiseParallel())
    plan |= {"attention.wo": RowwiseParallel(), "feed_forward.w2": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)


# requests, and the steps that serve them


@dataclass
class Request:
    """A prompt, the tokens after it, and when it arrives: in steps of the server, so that all ranks
    see it at once, and a second run makes the same batches."""

    tokens: list[int]
    prompt: int  # how many tokens it begins with,
    size: int  # and ends with
    arrives: float = 0.0
    table: list[int] = field(default_factory=list)  # its blocks in order, then SCRATCH
    known: int = 0  # tokens in the cache
    times: list[float] = field(default_factory=list)  # of its arrival, and of each token


def requests_of(args: argparse.Namespace) -> list[Request]:
    """Seeded prompts, lengths and arrivals."""
    draw, arrives, made = random.Random(args.seed), 0.0, []
    for _ in range(args.requests):
        size = draw.randint(3, args.length)
        prompt = draw.randint(max(2, size - args.new), size - 1)
        tokens = [draw.randrange(VOCABULARY) for _ in range(prompt)]
        made.append(Request(tokens, prompt, size, arrives))
        arrives += draw.expovariate(args.rate)
    return made


def padded(size: int, most: int) -> int:
    """The next power of two."""
    return min(1 << (size - 1).bit_length(), most)


class Server:
    """The cache of a model, and the steps that fill and read it."""

    def __init__(self, step: Callable[..., Tensor], heads: int, args: argparse.Namespace) -> None:
        self.step, self.args, self.changing = step, args, args.pieces == "changing"
        self.block = args.block if args.cache == "paged" else args.length
        self.width = args.length // self.block
        blocks = 1 + args.rows * self.width
        shape = 2, blocks, self.block, heads, args.head
        self.cache = [tuple(torch.zeros(shape, device=args.device)) for _ in range(args.layers)]
        self.free = [*range(1, blocks)]
        self.decodes: list[tuple[int, float]] = []  # rows and milliseconds of each step

    def run(self, rows: Sequence[Request], n: int, mark: int | None = None) -> list[int]:
        """Computes the next n tokens of each, or fewer and padding; returns the likeliest next.
        In later calls the size of dimension `mark` may differ."""
        count = len(rows)
        if self.args.pad:
            n = padded(n, self.args.piece)
            rows = [*rows, *self.nothing(padded(count, self.args.rows) - count)]
        words = [r.tokens[r.known : max(r.known + 1, min(r.known + n, r.prompt - 1))] for r in rows]
        given = (
            [each + [0] * (n - len(each)) for each in words],
            [[*range(r.known, r.known + n)] for r in rows],
            [r.table for r in rows],
        )
        tokens, at, tables = (torch.tensor(each, device=self.args.device) for each in given)
        slots = tables.gather(1, at // self.block) * self.block + at % self.block
        if mark is not None:
            for each in (tokens, at, slots, *([tables] if mark == 0 else [])):
                torch._dynamo.mark_dynamic(each, mark)
        paged = slots if self.args.cache == "paged" else None
        found = self.step(tokens, at, tables, paged, self.cache).tolist()  # waits for the device
        for request, each in zip(rows, words, strict=True):
            request.known += len(each)
        return found[:count]

    def nothing(self, count: int) -> list[Request]:
        """Requests that are padding."""
        return [Request([], 0, 0, table=[SCRATCH] * self.width) for _ in range(count)]

    def warm_up(self) -> None:
        """Runs all sizes that there may be: a Program serves those between two powers of two, and
        torch has a graph of its own for a size of 1. A CUDA graph serves one size."""
        powers, piece, rows = [1 << i for i in range(20)], self.args.piece, self.args.rows
        for n in [*(n for n in powers if 1 < n < piece and self.changing), piece]:
            self.run(self.nothing(1), n, mark=1 if self.changing else None)
        for count in [*(n for n in powers if n < rows), rows]:
            self.run(self.nothing(count), 1, mark=0 if count > 1 else None)

    def serve(self, requests: list[Request]) -> None:
        """All requests, to the last token."""
        coming, queue, running = deque(requests), deque[Request](), list[Request]()
        clock, piece = 0, self.args.piece
        while coming or queue or running:
            while coming and coming[0].arrives <= clock:
                coming[0].times.append(time.perf_counter())
                queue.append(coming.popleft())
            while queue and len(running) < self.args.rows:
                request = queue.popleft()
                need = -(-request.size // self.block)
                request.table = [self.free.pop() for _ in range(need)]
                request.table += [SCRATCH] * (self.width - need)
                running.append(request)
            ready = [r for r in running if r.known >= r.prompt - 1]
            for request in [r for r in running if r.known < r.prompt - 1]:
                left = request.prompt - 1 - request.known  # decode answers the last token
                self.run([request], min(max(2, left), piece) if self.changing else piece)
            began = time.perf_counter()
            for request, token in zip(ready, self.run(ready, 1) if ready else [], strict=True):
                request.tokens.append(token)
                request.times.append(time.perf_counter())
                if len(request.tokens) == request.size:
                    running.remove(request)
                    self.free += [block for block in request.table if block != SCRATCH]
            if ready:
                self.decodes.append((len(ready), (time.perf_counter() - began) * 1e3))
            clock += 1


# the run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    ways = {"compile": ("interlace", "inductor", "eager"), "cache": ("paged", "static")}
    for name, choices in (ways | {"pieces": ("fixed", "changing")}).items():
        parser.add_argument(f"--{name}", choices=choices, default=choices[0])
    sizes = {"requests": 24, "rows": 8, "length": 128, "block": 16, "piece": 32, "new": 32}
    for name, value in (sizes | {"dim": 128, "layers": 2, "head": 16, "seed": 0}).items():
        parser.add_argument(f"--{name}", type=int, default=value, help="(%(default)s)")
    parser.add_argument("--rate", type=float, default=0.5, help="requests a step (%(default)s)")
    parser.add_argument("--device", default=DEVICE, help="cpu or cuda (%(default)s here)")
    parser.add_argument("--pad", action="store_true", help="rows and pieces to powers of two")
    parser.add_argument("--graph", action="store_true", help="CUDA graphs of them; pads")
    parser.add_argument("--check", action="store_true", help="compare with eager's tokens")
    args = parser.parse_args()
    if args.length % args.piece or args.length % args.block or args.piece < 2:
        parser.error("--piece (of 2 or more) and --block must divide --length")
    if args.graph and (args.device != "cuda" or args.compile == "eager"):
        parser.error("--graph needs --device cuda and a compiler")
    args.pad |= args.graph
    bound: list[logging.LogRecord] = []  # Programs that Interlace makes
    (log := logging.getLogger("interlace.frontend.compiled_graph")).setLevel(logging.INFO)
    log.addFilter(bound.append)  # pyright: ignore
    shared = args.device == "cuda" and DEVICE == "cpu"  # ranks share a GPU, which NCCL refuses
    dist.init_process_group("gloo" if "cpu" in (args.device, DEVICE) else "nccl")
    if args.device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = init_device_mesh(args.device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(args.seed)
    model = Model(args.dim, args.layers, args.head).to(args.device)
    shard(model, mesh)
    step: Callable[..., Tensor] = model
    if args.compile != "eager":
        options: dict[str, Any] = {}
        if args.graph:
            options["triton.cudagraphs" if args.compile == "inductor" else "graph"] = True
        if shared and args.compile == "interlace":
            options["transport"] = "peer"
        how: Any = {"backend": args.compile, "options": options}
        step = torch.compile(model, fullgraph=True, dynamic=False, **how)
    heads, stats = args.dim // args.head // mesh.size(), counters["stats"]
    with torch.inference_mode():
        server, requests = Server(step, heads, args), requests_of(args)
        server.warm_up()
        warm, began = (stats["unique_graphs"], len(bound)), time.perf_counter()
        server.serve(requests)
        took, after = time.perf_counter() - began, (stats["unique_graphs"], len(bound))
        if args.check:
            known = requests_of(args)
            Server(model, heads, args).serve(known)
            assert [r.tokens for r in requests] == [r.tokens for r in known], "not eager's tokens"
    if dist.get_rank() == 0:
        rows, ms = zip(*server.decodes, strict=True)
        speed = sum(r.size - r.prompt for r in requests) / took
        print(f"{speed:.0f} tokens/s, {min(rows)} to {max(rows)} rows a step")
        print("compiled: {} graphs, {} Programs".format(*warm), "in the warm-up,", end=" ")
        print(*(now - before for now, before in zip(after, warm, strict=True)), "after it")
        first, last = ([(r.times[i] - r.times[0]) * 1e3 for r in requests] for i in (1, -1))
        for name, times in {"step": ms, "first token": first, "last token": last}.items():
            cuts = [0, *statistics.quantiles(times, n=100, method="inclusive")]
            print(name, *(f"p{part} {cuts[part]:.1f} ms" for part in (50, 90, 99)))
        if args.graph and args.compile == "interlace":
            left = interlace.explain(step).count("not captured in CUDA graphs")
            print(f"{left} Programs are not in CUDA graphs")
        print("tokens equal eager's" * args.check)


if __name__ == "__main__":
    main()
    interlace.release()
    dist.destroy_process_group()
