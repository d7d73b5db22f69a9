"""Decoding with a KV cache, tensor parallel: a prefill, then a step for each token.

    torchrun --nproc-per-node 2 examples/decode.py

Each rank has some of the heads, and the cache of these. `interlace.compile` keeps the host's share
of a step small; on GPUs `graph=True` replays each step as a CUDA graph as well. Token, position and
cache stay at the same addresses, so one graph serves all steps, and nothing of the cache is copied.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import interlace
from interlace import Options

DEVICE = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
VOCABULARY, LAYERS, DIM, HEAD, BATCH, PROMPT, NEW = 256, 2, 128, 16, 4, 16, 16

Cache = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer: [batch, heads of this rank, positions, HEAD]."""


class Block(nn.Module):
    """Attention over a cache, and a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.up = nn.Linear(DIM, 4 * DIM, bias=False)
        self.down = nn.Linear(4 * DIM, DIM, bias=False)

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor], at: Tensor) -> Tensor:
        h = self.attention_norm(x)
        made = (w(h) for w in (self.wq, self.wk, self.wv))
        q, k, v = (each.unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in made)
        keys, values = cache
        keys.index_copy_(2, at, k)
        values.index_copy_(2, at, v)
        seen = torch.arange(keys.shape[2], device=at.device) <= at[:, None]
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
        x = x + self.wo(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.ffn_norm(x))))


class Decoder(nn.Module):
    """The logits that follow the last of `tokens` [batch, n], which stand at positions `at` [n]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.positions = nn.Embedding(PROMPT + NEW, DIM)
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.output = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, cache: Cache, at: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions(at)
        for layer, of_layer in zip(self.layers, cache, strict=True):
            x = layer(x, of_layer, at)
        return self.output(x[:, -1])


def shard(model: Decoder, mesh: DeviceMesh) -> None:
    """Heads and features over the ranks; each block sums twice."""
    columns = dict.fromkeys(("wq", "wk", "wv", "up"), ColwiseParallel())
    for layer in model.layers:
        parallelize_module(
            layer, mesh, {**columns, "wo": RowwiseParallel(), "down": RowwiseParallel()}
        )


def generate(call: Callable[..., Tensor], prompt: Tensor, ranks: int) -> tuple[Tensor, float]:
    """The NEW likeliest tokens [batch, NEW], and the milliseconds of the median step."""
    sizes = BATCH, DIM // HEAD // ranks, PROMPT + NEW, HEAD
    cache = [tuple(torch.zeros(sizes, device=DEVICE) for _ in "kv") for _ in range(LAYERS)]
    at = torch.arange(PROMPT, device=DEVICE)
    token = call(prompt, cache, at).argmax(-1, keepdim=True)
    found, took, at = [token.clone()], [], at[-1:].clone()
    for _ in range(NEW - 1):  # all arguments stay at their addresses, for which a graph is made
        began = time.perf_counter()
        at += 1
        token.copy_(call(token, cache, at).argmax(-1, keepdim=True))
        found.append(token.clone())
        token[0, 0].item()  # as where an end is looked for
        took.append(time.perf_counter() - began)
    return torch.cat(found, 1), sorted(took)[len(took) // 2] * 1e3


def main() -> None:
    mesh = init_device_mesh(DEVICE, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = Decoder().to(DEVICE)
    shard(model, mesh)
    prompt = torch.randint(VOCABULARY, (BATCH, PROMPT), device=DEVICE)
    with torch.no_grad():
        step = interlace.compile(model, mesh=mesh, options=Options(graph=DEVICE == "cuda"))
        plain, plain_ms = generate(model, prompt, mesh.size())
        tokens, ms = generate(step, prompt, mesh.size())
    assert torch.equal(tokens, plain)
    if dist.get_rank() == 0:
        print(step.explain())
        print("generated", tokens[0].tolist())
        print(f"{ms:.2f} ms a step, of plain torch {plain_ms:.2f} ms")


if __name__ == "__main__":
    main()
    interlace.release()
    dist.destroy_process_group()
