"""What the tests of main gradients run on each rank: a small mixture of experts, and its data."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from interlace.nn import GroupedLinear
from interlace.optim import LayerWise
from interlace.options import Options

DIM, HIDDEN, GROUPS, TOKENS = 16, 24, 4, 24
SMALL = 1 << 11
"""Bytes of a bucket: the mixture then has several."""


class Mixture(nn.Module):
    """Dense, experts (the second of each step's groups may be empty), dense."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM, dtype=dtype)
        self.up = GroupedLinear(GROUPS, DIM, HIDDEN, dtype=dtype)
        self.down = GroupedLinear(GROUPS, HIDDEN, DIM, bias=False, dtype=dtype)
        self.outer = nn.Linear(DIM, DIM, dtype=dtype)

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.up(self.inner(x), sizes))
        return self.outer(self.down(hidden, sizes))


class Looped(nn.Module):
    """The same of plain Linears, for torch's own DistributedDataParallel."""

    def __init__(self, reference: Mixture) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.inner.load_state_dict(reference.inner.state_dict())
        self.outer.load_state_dict(reference.outer.state_dict())
        self.up = nn.ModuleList(nn.Linear(DIM, HIDDEN) for _ in range(GROUPS))
        self.down = nn.ModuleList(nn.Linear(HIDDEN, DIM, bias=False) for _ in range(GROUPS))
        pairs: Any = ((self.up, reference.up), (self.down, reference.down))
        for layers, grouped in pairs:
            for group, layer in enumerate(layers):
                layer.weight.data.copy_(grouped.weight.data[group])
                if grouped.bias is not None:
                    layer.bias.data.copy_(grouped.bias.data[group])

    def forward(self, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        parts = []
        for part, up, down in zip(
            self.inner(x).split(sizes.tolist()), self.up, self.down, strict=True
        ):
            parts.append(down(torch.relu(up(part))))
        return self.outer(torch.cat(parts))


def grads_alike(mixture: Mixture, looped: Looped, found: dict[str, torch.Tensor]) -> list[str]:
    """Names of the gradients in `found`, by the mixture's names, that differ from the loop's."""
    wrong = []
    for name, param in mixture.named_parameters():
        if not param.requires_grad:
            continue
        module, _, leaf = name.partition(".")
        reference = getattr(looped, module)
        if isinstance(reference, nn.ModuleList):
            wanted = torch.stack([getattr(layer, leaf).grad for layer in reference])
        else:
            wanted = getattr(reference, leaf).grad
        if not torch.equal(found[name], wanted):
            wrong.append(f"{name}: off by {(found[name] - wanted).abs().max():g}")
    return wrong


def mixture(seed: int, dtype: torch.dtype = torch.float32) -> Mixture:
    """The same on all ranks."""
    torch.manual_seed(seed)
    return Mixture(dtype)


def batch(
    seed: int, number: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and group sizes of a micro-batch, other ones on each rank."""
    draw = torch.Generator().manual_seed(seed + 1000 * number + dist.get_rank())
    x = torch.randn(TOKENS, DIM, generator=draw, dtype=torch.float32).to(dtype)
    cuts = torch.randint(0, TOKENS + 1, (GROUPS - 2,), generator=draw).sort().values
    ends = torch.cat([cuts[:1], cuts[:1], cuts[1:], torch.tensor([TOKENS])])  # group 1 is empty
    return x, ends.diff(prepend=torch.zeros(1, dtype=torch.int64))


def loss_of(model: nn.Module, x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return model(x, sizes).float().square().mean()


def optimizing(model: nn.Module, lr: float = 0.0, **facts: Any) -> LayerWise:
    """A LayerWise of SGD; at the rate 0 weights stay."""
    facts = {"bucket_bytes": SMALL, "options": Options(timeout_s=20), **facts}
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    sgd = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    return LayerWise(sgd, model, mesh, **facts)


def main_grads(made: LayerWise) -> dict[str, torch.Tensor]:
    """The main gradients of all Parameters once they are reduced: each from its owner."""
    made._finish()
    own = {made._names[param]: grad.cpu().clone() for param, grad in made._main_grads.items()}
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return {name: grad for each in found for name, grad in each.items()}


def is_reduced(made: LayerWise, index: int) -> bool:
    """Whether a bucket's reduction has ended in this step."""
    reducer: Any = made._reducer
    worker = reducer._runs._worker
    return index < reducer._gone and (
        reducer._runs._ends[index].query() if worker is None else index in worker._done
    )
