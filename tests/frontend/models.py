"""Small models for the frontend's tests, parallelised with DTensor in the usual styles."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from interlace.errors import OptionError


class Function(nn.Module):
    """A function as a module; `parts` are the modules that it uses."""

    def __init__(self, fn: Callable[..., Any], *parts: nn.Module) -> None:
        super().__init__()
        self.fn, self.parts = fn, nn.ModuleList(parts)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The function's result."""
        return self.fn(*args, **kwargs)


class Norm(nn.Module):
    """RMS normalisation."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    """Causal self-attention; with a cache, of the tokens from `start` on."""

    def __init__(self, dim: int, head: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.head, self.dropout = head, dropout
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(
        self,
        x: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor] | None = None,
        start: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            w(x).view(batch, length, -1, self.head).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        if cache is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        else:
            assert start is not None
            keys, values = cache
            keys.index_copy_(2, start, k)
            values.index_copy_(2, start, v)
            seen = torch.arange(keys.shape[2], device=start.device)[None, :] <= start[:, None]
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    """Gated feed-forward."""

    def __init__(self, dim: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.w1, self.w3 = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(self.w1(x)) * self.w3(x)
        return self.w2(F.dropout(hidden, self.dropout, self.training))


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, dim: int, head: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.n1, self.attn = Norm(dim), Attention(dim, head, dropout)
        self.n2, self.mlp = Norm(dim), Mlp(dim, hidden, dropout)

    def forward(self, x: torch.Tensor, cache: Any = None, start: Any = None) -> torch.Tensor:
        x = x + self.attn(self.n1(x), cache=cache, start=start)
        return x + self.mlp(self.n2(x))


class Model(nn.Module):
    """A stack of blocks over a vocabulary."""

    def __init__(
        self, layers: int = 1, vocabulary: int = 32, dim: int = 16, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.emb = nn.Embedding(vocabulary, dim)
        self.layers = nn.ModuleList(Block(dim, 4, 2 * dim, dropout) for _ in range(layers))
        self.norm, self.out = Norm(dim), nn.Linear(dim, vocabulary, bias=False)
        self.wrap: Callable[..., Any] = lambda layer, *args: layer(*args)
        """How a layer is called; checkpointing replaces it."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x = self.wrap(layer, x)
        return self.out(self.norm(x))


def parallelise(model: Model, mesh: DeviceMesh) -> Model:
    """Tensor and sequence parallelism over a mesh of one axis."""
    plan: dict[str, Any] = {
        "emb": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "out": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    for layer in model.layers:
        parallelise_block(layer, mesh)
    return model


def parallelise_block(block: nn.Module, mesh: DeviceMesh, **how: Any) -> nn.Module:
    """Tensor and sequence parallelism of one block, its input sharded along the sequence; `how`
    goes to torch."""
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan: dict[str, Any] = {"n1": SequenceParallel(), "n2": SequenceParallel()}
    plan |= {"attn": gathered, "mlp": gathered}
    plan |= {f"attn.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    plan |= {f"mlp.{name}": ColwiseParallel() for name in ("w1", "w3")}
    plan |= {name: RowwiseParallel(output_layouts=Shard(1)) for name in ("attn.wo", "mlp.w2")}
    parallelize_module(block, mesh, plan, **how)
    return block


def least_memory(compile_with: Callable[[int], object]) -> int:
    """The bytes that the refusal of no bytes names; the compiler is called with a budget."""
    with pytest.raises(OptionError, match="option memory=0: ") as refused:
        compile_with(0)
    found = re.search(r"fix: give memory=(\d+) or more", str(refused.value))
    assert found is not None, refused.value
    return int(found[1])


def world_mesh() -> DeviceMesh:
    """All ranks, for tensor parallelism."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def feed_forward(width: int, given: Placement, out: Placement) -> nn.Module:
    """Two layers of tensor parallelism, with these layouts outside."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    plan = {
        "0": ColwiseParallel(input_layouts=given),
        "2": RowwiseParallel(output_layouts=out),
    }
    return parallelize_module(model, world_mesh(), plan)


def whole(tensor: Any) -> torch.Tensor:
    """The tensor of all ranks, detached."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def wrong_steps(
    model: nn.Module, call: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> list[str]:
    """Training steps through `call`, each compared with eager, gradients too: what differs."""
    wrong: list[str] = []
    for x in inputs:
        found: list[list[torch.Tensor]] = []
        for chosen in (call, model):
            given = x.detach().clone().requires_grad_()
            out = chosen(given)
            out.square().sum().backward()
            found.append([whole(out), whole(given.grad), *gradients(model).values()])
        for mine, eager in zip(*found, strict=True):
            if not torch.allclose(mine, eager, rtol=1e-4, atol=1e-4):
                wrong.append(f"{tuple(x.shape)}: {(mine - eager).abs().max()}")
    return wrong


def local(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor, or the tensor itself; detached."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter's gradient on this rank; it is cleared."""
    found = {
        name: local(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None
    }
    model.zero_grad()
    return found


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    """Tensors as bytes, to compare them exactly."""
    return {name: t.contiguous().numpy().tobytes() for name, t in tensors.items()}
