"""Mixture-of-experts layers over an expert-parallel axis, in the spellings that models have.

    module = filled(Experts(group), seed, exact=False)
    output, *gradients = step(module, module, x, grad)

Every rank has some experts and sends them tokens by an all-to-all with room for a fixed number.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn

from interlace.nn.grouped.linear import grouped_linear_ops

EXPERTS, ROOM, DIM, HIDDEN = 2, 16, 32, 64
"""Experts of a rank, tokens from each rank to each expert, and sizes."""


class Experts(nn.Module):
    """Experts of one rank, between two all-to-alls: (ranks * EXPERTS, ROOM, DIM) both ways."""

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.group, self.ranks = group, group.size()
        self.up = nn.Parameter(torch.empty(EXPERTS, DIM, HIDDEN, dtype=dtype))
        self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, DIM, dtype=dtype))

    def exchange(self, x: Tensor) -> Tensor:
        return funcol.all_to_all_single_autograd(x, None, None, self.group)

    def to_experts(self, x: Tensor) -> Tensor:
        """By sending rank, then expert -> by expert: (EXPERTS, ranks * ROOM, DIM)."""
        return x.view(self.ranks, EXPERTS, ROOM, DIM).transpose(0, 1).reshape(EXPERTS, -1, DIM)

    def from_experts(self, y: Tensor) -> Tensor:
        y = y.view(EXPERTS, self.ranks, ROOM, DIM).transpose(0, 1)
        return y.reshape(self.ranks * EXPERTS, ROOM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(torch.bmm(self.to_experts(self.exchange(x)), self.up))
        return self.exchange(self.from_experts(torch.bmm(h, self.down)))


class Einsum(Experts):
    """The same in the spelling of GShard."""

    def forward(self, x: Tensor) -> Tensor:
        got = self.exchange(x.view(self.ranks, EXPERTS, ROOM, DIM))
        h = torch.relu(torch.einsum("wech,ehf->wecf", got, self.up))
        return self.exchange(torch.einsum("wecf,efh->wech", h, self.down)).view(x.shape)


class Grouped(Experts):
    """The same by grouped matmuls of equal groups."""

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.arange(1, EXPERTS + 1, dtype=torch.int32, device=x.device)
        ends = ends * (self.ranks * ROOM)
        rows = self.to_experts(self.exchange(x)).reshape(-1, DIM)
        h = torch.relu(torch._grouped_mm(rows, self.up, ends))
        return self.exchange(self.from_experts(torch._grouped_mm(h, self.down, ends)))


class Layers(Experts):
    """The same as `GroupedLinear` is compiled on a GPU, with a mask of padding and biases."""

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(group, dtype)
        self.bias = nn.Parameter(torch.empty(EXPERTS, DIM, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        sizes = torch.full((EXPERTS,), self.ranks * ROOM, dtype=torch.int32, device=x.device)
        up, down = (weight.transpose(1, 2) for weight in (self.up, self.down))
        rows = self.to_experts(self.exchange(x)).reshape(-1, DIM)
        h = torch.relu(grouped_linear_ops(rows, up, None, sizes, torch.bfloat16))
        y = grouped_linear_ops(h, down, self.bias, sizes, torch.bfloat16)
        return self.exchange(self.from_experts(y))


class Gated(Experts):
    """Two matmuls take the tokens; experts have biases."""

    def __init__(self, group: dist.ProcessGroup, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(group, dtype)
        self.gate = nn.Parameter(torch.empty(EXPERTS, DIM, HIDDEN, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(EXPERTS, 1, DIM, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.to_experts(self.exchange(x))
        h = torch.relu(torch.bmm(tokens, self.gate)) * torch.bmm(tokens, self.up)
        return self.exchange(self.from_experts(torch.bmm(h, self.down) + self.bias))


def filled(module: nn.Module, seed: int, exact: bool) -> nn.Module:
    """Parameters of this rank alone: experts differ between ranks, a router does not matter."""
    g = torch.Generator().manual_seed(seed + dist.get_rank())
    with torch.no_grad():
        for parameter in module.parameters():
            if exact:
                parameter.copy_(torch.randint(-1, 2, parameter.shape, generator=g))
            else:
                parameter.copy_(torch.randn(parameter.shape, generator=g) / DIM**0.5)
    return module


def step(fn: Any, module: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """The output, and the gradients of the input and of all parameters."""
    module.zero_grad()
    given = x.clone().requires_grad_()
    y = fn(given)
    y.backward(grad)
    grads = [given.grad, *(parameter.grad for parameter in module.parameters())]
    assert all(g is not None for g in grads)
    return [y.detach().clone(), *(g.clone() for g in grads if g is not None)]
