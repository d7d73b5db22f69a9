"""A Llama-style model on bytes, in ordinary PyTorch, and its DTensor plan.

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize(Transformer(ModelConfig()), mesh)
    logits = model(tokens)  # (batch, sequence, 256), the same on every rank

The plan is the usual one: tensor parallel matmuls, sequence parallel norms between them, so each
block gathers the sequence before attention and before the feed-forward, and scatters it after both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
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


class Attention(nn.Module):
    """Causal self-attention; each rank holds some of the heads."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, config.dim, bias=False)
        self.wv = nn.Linear(config.dim, config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """Attention over the whole sequence."""
        batch, length, _ = x.shape

        def heads(y: Tensor) -> Tensor:
            return y.view(batch, length, -1, self.head_dim).transpose(1, 2)

        q, k, v = rotate(heads(self.wq(x)), table), rotate(heads(self.wk(x)), table), self.wv(x)
        y = F.scaled_dot_product_attention(q, k, heads(v), is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.hidden, bias=False)
        self.up = nn.Linear(config.dim, config.hidden, bias=False)
        self.down = nn.Linear(config.hidden, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The block's second half."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.dim)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
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
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                depth = (
                    (2 * config.layers) ** -0.5
                    if name.endswith(("wo.weight", "down.weight"))
                    else 1.0
                )
                nn.init.normal_(weight, std=0.02 * depth)

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
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(rows, None), desired_input_layouts=(whole, None)
                ),
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=rows),
                "feed_forward_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(
                    input_layouts=(rows,), desired_input_layouts=(whole,)
                ),
                "feed_forward.gate": ColwiseParallel(),
                "feed_forward.up": ColwiseParallel(),
                "feed_forward.down": RowwiseParallel(output_layouts=rows),
            },
        )
    return model
