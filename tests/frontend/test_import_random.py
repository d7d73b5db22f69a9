"""Random small models: forward and backward Programs give what torch's graphs give, bit for bit.

A model is a random chain of layers over a few live tensors; what is drawn is shown on failure.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.frontend.tracing import agrees, graphs, imported

from interlace.ir import parse, print_program, validate

Tensors = list[torch.Tensor]
Layer = tuple[str, Callable[[Tensors], torch.Tensor]]


class Drawn:
    """A random model on (batch, length, dim) tensors, and the layers that were drawn."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.batch, self.length = self.rng.choice([1, 2, 3]), self.rng.choice([1, 2, 4])
        self.dim = self.rng.choice([2, 4, 6])
        self.x = torch.randn(self.batch, self.length, self.dim)
        self.w = torch.randn(self.dim, self.dim)
        self.b = torch.randn(self.dim)
        self.layers = [self.layer() for _ in range(self.rng.randint(3, 9))]
        self.training = self.rng.random() < 0.8

    def layer(self) -> Layer:
        """One layer, which takes a tensor of the chain and gives one of the same sizes."""
        batch, length, dim = self.batch, self.length, self.dim
        depth = self.rng.randint(1, 3)  # which of the last tensors it takes

        def last(xs: Tensors) -> torch.Tensor:
            return xs[-min(depth, len(xs))]

        order = self.rng.sample(range(3), 3)
        back = [order.index(i) for i in range(3)]
        cut = self.rng.randint(0, length)
        half = max(1, dim // 2)
        choices: list[Layer] = [
            ("linear", lambda xs: F.linear(last(xs), self.w, self.b)),
            ("linear no bias", lambda xs: F.linear(last(xs), self.w)),
            ("matmul", lambda xs: last(xs) @ self.w),
            ("residual", lambda xs: last(xs) + xs[-1]),
            ("gate", lambda xs: F.silu(last(xs)) * xs[0]),
            ("norm", lambda xs: F.layer_norm(last(xs), (dim,), self.b)),
            ("softmax", lambda xs: last(xs).softmax(-1)),
            ("permuted", lambda xs: last(xs).permute(order).relu().permute(back)),
            ("flat", lambda xs: (last(xs).reshape(-1) * 2).view(batch, length, dim)),
            ("copying reshape", lambda xs: last(xs).mT.reshape(batch, length, dim) + 1),
            ("split and cat", lambda xs: torch.cat(last(xs).split(half, -1)[::-1], -1)),
            ("split back", lambda xs: torch.cat([last(xs)[:, :cut], last(xs)[:, cut:]], 1)),
            ("mean", lambda xs: last(xs).mean(1, keepdim=True).expand(batch, length, dim)),
            ("cast", lambda xs: last(xs).to(torch.bfloat16).float()),
            ("clone", lambda xs: last(xs).clone()),
            ("contiguous", lambda xs: last(xs).transpose(0, 1).contiguous().transpose(0, 1)),
            ("dropout", lambda xs: F.dropout(last(xs), 0.3)),
            ("select", lambda xs: last(xs)[:, :1] * xs[-1]),
            ("gather", lambda xs: last(xs)[torch.arange(batch).flip(0)]),
            ("max", lambda xs: last(xs).amax(-1, keepdim=True) * xs[-1]),
            ("attend", lambda xs: F.scaled_dot_product_attention(last(xs), xs[0], xs[-1])),
        ]
        return self.rng.choice(choices)

    def __call__(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> Tensors:
        """The last tensor, one before it, and a view of the first."""
        kept, self.w, self.b = (self.w, self.b), w, b
        xs = [x]
        for _, layer in self.layers:
            xs.append(layer(xs))
        self.w, self.b = kept
        return [xs[-1], xs[len(xs) // 2] * 1, xs[-1].mT]


@pytest.mark.parametrize("trial", range(16))
def test_random_model(trial: int, seed: int) -> None:
    drawn = Drawn(seed)
    print(drawn.x.shape, "training" if drawn.training else "", [n for n, _ in drawn.layers])
    args = [t.clone().requires_grad_(drawn.training) for t in (drawn.x, drawn.w, drawn.b)]
    try:
        found = graphs(drawn, *args)
    except RuntimeError as error:  # torch's graph, run by torch: strides that it traced otherwise
        if "view size is not compatible" not in str(error):
            raise
        pytest.skip(f"torch cannot run its own graph of this model: {error}")
    for graph in found:
        mine = imported(graph)
        validate(mine.program)
        assert parse(print_program(mine.program)) == mine.program
        agrees(graph, mine, exact=drawn.batch > 1)  # in a batch of one, `bmm` becomes `mm`
