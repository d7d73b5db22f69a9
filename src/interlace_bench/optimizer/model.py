"""The model that `interlace bench optimizer` trains: a small Llama, whose matrices are Muon's.

model = Llama(SIZES["tiny"])
loss = F.cross_entropy(model(tokens).flatten(0, 1), target.flatten())
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Dimensions, and what goes with them where nothing else is asked for."""

    dim: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    layers: int
    batch: int
    sequence: int
    dtype: str
    bucket_bytes: int


SIZES = {
    "tiny": ModelSize(
        dim=32,
        hidden=64,
        heads=2,
        kv_heads=1,
        vocabulary=96,
        layers=2,
        batch=2,
        sequence=16,
        dtype="f32",
        bucket_bytes=1 << 14,
    ),
    "small": ModelSize(
        dim=256,
        hidden=768,
        heads=4,
        kv_heads=2,
        vocabulary=2048,
        layers=12,
        batch=4,
        sequence=128,
        dtype="f32",
        bucket_bytes=4 << 20,
    ),
    "llama3-8b": ModelSize(
        dim=4096,
        hidden=14336,
        heads=32,
        kv_heads=8,
        vocabulary=32768,
        layers=4,
        batch=1,
        sequence=4096,
        dtype="bf16",
        bucket_bytes=64 << 20,
    ),
}


class Layer(nn.Module):
    """Attention and a feed-forward."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        dim, head = size.dim, size.dim // size.heads
        self.head = head
        self.before_attention, self.before_feed_forward = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(dim, size.kv_heads * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(dim, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before_attention(x)
        q, k, v = (
            f(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.before_feed_forward(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """An embedding, layers, a norm and a head."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.dim)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.dim)
        self.head = nn.Linear(size.dim, size.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
