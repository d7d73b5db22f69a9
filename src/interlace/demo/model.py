"""A Llama-style model on bytes, in ordinary PyTorch, and its DTensor plan.

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize(Transformer(ModelConfig()), mesh)
    logits = model(tokens)  # (batch, sequence, 256), the same on every rank

The plan is the usual one: tensor parallel matmuls, sequence parallel norms between them, so each
block gathers the sequence before attention and before the feed-forward, and scatters it after both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from interlace.demo.plan import ModelConfig


class RMSNorm(nn.Module):
    """Scales each row to a root mean square of one, then by a weight."""

    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """The normalised rows, computed in fp32."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return scaled.to(x.dtype) * self.weight


def rotary_table(length: int, head_dim: int, base: float = 10_000.0) -> Tensor:
    """Cosines and sines of rotary positions: (2, length, head_dim / 2)."""
    frequencies = base ** -(torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.outer(torch.arange(length), frequencies)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotary position embedding of (batch, heads, length, head_dim), halves as pairs."""
    cos, sin = table[0], table[1]
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
    return turned.to(x.dtype)


class BlockDims(Protocol):
    """The dimensions of a block."""

    @property
    def dim(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def hidden(self) -> int: ...


class Plain:
    """Calls a block's linear maps as they are; the surrounding code communicates."""

    def column(self, x: Tensor, linears: Sequence[nn.Linear]) -> Sequence[Tensor]:
        """Applies several column-parallel maps to one input."""
        return [linear(x) for linear in linears]

    def row(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """Applies a row-parallel map."""
        return linear(x)


PLAIN = Plain()


class Attention(nn.Module):
    """Causal self-attention over the whole sequence; each rank holds some of the heads, which are
    one of so many `parts` where the module has a rank's shards."""

    def __init__(self, dims: BlockDims, parts: int = 1, maps: Plain = PLAIN) -> None:
        super().__init__()
        self.head_dim, self.maps = dims.dim // dims.heads, maps
        self.grouped = dims.kv_heads < dims.heads
        heads = dims.dim // parts
        kv_heads = heads * dims.kv_heads // dims.heads
        self.wq = nn.Linear(dims.dim, heads, bias=False)
        self.wk = nn.Linear(dims.dim, kv_heads, bias=False)
        self.wv = nn.Linear(dims.dim, kv_heads, bias=False)
        self.wo = nn.Linear(heads, dims.dim, bias=False)

    def forward(self, x: Tensor, table: Tensor | None) -> Tensor:
        """Attention for this rank's rows, or for all rows where the surrounding code gathers."""
        q, k, v = (
            y.view(*y.shape[:2], -1, self.head_dim).transpose(1, 2)
            for y in self.maps.column(x, [self.wq, self.wk, self.wv])
        )
        if table is not None:
            q, k = rotate(q, table), rotate(k, table)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.maps.row(y.transpose(1, 2).flatten(2), self.wo)


class FeedForward(nn.Module):
    """SwiGLU between two maps: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, dims: BlockDims, parts: int = 1, maps: Plain = PLAIN) -> None:
        super().__init__()
        self.maps, hidden = maps, dims.hidden // parts
        self.gate = nn.Linear(dims.dim, hidden, bias=False)
        self.up = nn.Linear(dims.dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dims.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The block's second half."""
        gate, up = self.maps.column(x, [self.gate, self.up])
        return self.maps.row(F.silu(gate) * up, self.down)


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, dims: BlockDims, parts: int = 1, maps: Plain = PLAIN) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(dims.dim)
        self.attention = Attention(dims, parts, maps)
        self.feed_forward_norm = RMSNorm(dims.dim)
        self.feed_forward = FeedForward(dims, parts, maps)

    def forward(self, x: Tensor, table: Tensor | None = None) -> Tensor:
        """One block."""
        x = x + self.attention(self.attention_norm(x), table)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Transformer(nn.Module):
    """Bytes in, a distribution over the next byte out."""

    table: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocabulary, bias=False)
        table = rotary_table(config.sequence, config.head_dim)
        self.register_buffer("table", table, persistent=False)
        depth = (2 * config.layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                last = name.endswith(("wo.weight", "down.weight"))
                nn.init.normal_(weight, std=0.02 * (depth if last else 1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the byte that follows each of `tokens`."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.table)
        return self.output(self.norm(x))


def parallelize(model: Transformer, mesh: DeviceMesh) -> Transformer:
    """Shards the model over a one-dimensional mesh, in place; the table stays on every rank."""
    whole, rows = Replicate(), Shard(1)
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=whole, output_layouts=rows),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=rows, output_layouts=whole),
        },
    )
    for block in model.layers:
        parallelize_module(block, mesh, block_plan(rows))
    return model


def block_plan(rows: Placement) -> dict[str, Any]:
    """Tensor parallelism of a block whose ranks have some of the rows, or all (`Replicate`)."""
    maps = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.gate", "feed_forward.up")
    found: dict[str, Any] = {
        **{name: ColwiseParallel() for name in maps},
        "attention.wo": RowwiseParallel(output_layouts=rows),
        "feed_forward.down": RowwiseParallel(output_layouts=rows),
    }
    if rows == Replicate():
        return found
    both = {"input_layouts": (rows, None), "desired_input_layouts": (Replicate(), None)}
    one = {"input_layouts": (rows,), "desired_input_layouts": (Replicate(),)}
    return found | {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(**both),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(**one),
    }
