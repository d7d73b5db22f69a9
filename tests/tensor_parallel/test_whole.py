"""Modules that a plan of words leaves whole, read by others too, on 2 real processes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.support.pool import Pool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from interlace.errors import InputError
from interlace.tensor_parallel import parallelize

DIM, CLASSES = 16, 5
PLAN = {"up": "colwise", "down": "rowwise"}


class Around(nn.Module):
    """Two linear layers of the plan, and a module that it leaves whole."""

    def __init__(self, inner: nn.Module, use: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.inner, self.use = inner, use

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.use(self.inner, x))))


class Below(nn.Module):
    """A module of which a grandparent reads the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, DIM)


def by_convolution(conv: Any, x: Tensor) -> Tensor:
    return F.conv1d(x.transpose(1, 2), conv.weight, conv.bias, padding=1).transpose(1, 2)


def tied(below: Any, x: Tensor) -> Tensor:
    """A head by the embedding's weight, and the embedding itself."""
    logits = F.linear(x, below.table.weight)
    return x + below.table(logits.argmax(-1)) + logits @ below.table.weight


def attends(inner: Any, x: Tensor) -> Tensor:
    return inner(x, x, x, need_weights=False)[0]


def kinds() -> dict[str, Around]:
    """Whole modules, each with how it is used."""
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(DIM, DIM))
    return {
        "convolution": Around(nn.Conv1d(DIM, DIM, 3), by_convolution),
        "tied": Around(Below(), tied),
        "attention": Around(nn.MultiheadAttention(DIM, 2, batch_first=True), attends),
        "encoder": Around(
            nn.TransformerEncoderLayer(DIM, 2, DIM, dropout=0.0, batch_first=True),
            lambda inner, x: inner(x),
        ),
        "list": Around(nn.ParameterList([torch.randn(DIM, DIM)]), lambda inner, x: x @ inner[0]),  # type: ignore[index]
        "parametrized": Around(normed, lambda inner, x: F.linear(x, inner.weight)),  # type: ignore[arg-type]
        "lstm": Around(nn.LSTM(DIM, DIM, batch_first=True), lambda inner, x: inner(x)[0]),
    }


def steps_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Outputs and Parameters of steps of SGD, of a checkpointed one, and of inference."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    found: list[Tensor] = []
    for again in (False, False, True):
        y: Any = checkpoint(model, x, use_reentrant=False) if again else model(x)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(y.detach())
    model.eval()
    with torch.no_grad():
        found.append(model(x))
    model.train()
    found += [p.detach() for p in model.parameters()]
    return [t.full_tensor() if isinstance(t, DTensor) else t for t in found]


def read_by_others(seed: int) -> list[str]:
    """Which differ from the whole model, on this rank."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(seed)
    wrong: list[str] = []
    for name, whole in kinds().items():
        whole, x = whole.double(), torch.randn(2, 8, DIM, dtype=torch.float64)
        model = copy.deepcopy(whole)
        parallelize(model, mesh, PLAN)
        assert all(isinstance(param, DTensor) for param in model.parameters())
        copied = copy.deepcopy(model)
        expected = steps_of(whole, x)
        for one in (model, copied):  # which must not read the Parameters of each other
            found = steps_of(one, x)
            same = [torch.allclose(a, b, atol=1e-8) for a, b in zip(found, expected, strict=True)]
            if not all(same):
                wrong.append(f"{name}: {same}")
        assert all(isinstance(param, DTensor) for param in model.parameters())
    return wrong


@pytest.mark.timeout(120)
def test_weights_that_others_read_are_as_in_the_whole_model(pool: Pool, seed: int) -> None:
    for wrong in pool(2).run(read_by_others, seed, timeout_s=110):
        assert not wrong


def own_forwards(seed: int) -> None:
    """A forward that stands at the module itself is what runs; its signature is kept."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(seed)
    whole = Around(nn.LayerNorm(DIM), lambda inner, x: inner(x))
    model, x = copy.deepcopy(whole), torch.randn(2, 8, DIM)
    for one in (whole, model):
        one.inner.forward = lambda x, one=one: 3 * x * one.inner.weight  # type: ignore[method-assign]
    parallelize(model, mesh, PLAN)
    torch.testing.assert_close(model(x), whole(x))
    for ours, theirs in ((model, whole), (model.inner, whole.inner)):
        names, expected = (inspect.signature(one.forward).parameters for one in (ours, theirs))
        assert [*names] == [*expected]


def test_a_forward_at_the_module_itself_runs(pool: Pool, seed: int) -> None:
    pool(2).run(own_forwards, seed)


class Adapter(nn.Module):
    """A linear layer around which PEFT has put a LoRA adapter: its attributes and its forward."""

    def __init__(self, base_layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.ModuleDict(
            {"default": nn.Linear(base_layer.in_features, rank, bias=False)}
        )
        self.lora_B = nn.ModuleDict(
            {"default": nn.Linear(rank, base_layer.out_features, bias=False)}
        )

    @property
    def weight(self) -> Tensor:
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        lora_a: Any = self.lora_A["default"]
        inner = lora_a(x.to(lora_a.weight.dtype))
        return self.base_layer(x) + 0.5 * self.lora_B["default"](inner)


def adapters(seed: int) -> None:
    """Refused by name and class; a plan that names the layers inside is taken."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(seed)
    whole = Around(nn.LayerNorm(DIM), lambda inner, x: inner(x)).double()
    whole.up, whole.down = Adapter(whole.up).double(), Adapter(whole.down).double()  # type: ignore[assignment]
    model, x = copy.deepcopy(whole), torch.randn(2, 8, DIM, dtype=torch.float64)
    with pytest.raises(InputError, match=rf"^up: .*{__name__}\.Adapter.*`base_layer`"):
        parallelize(model, mesh, PLAN)
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    inside = {"up.base_layer": "colwise", "up.lora_B.*": "colwise"}
    inside |= {"down.base_layer": "rowwise", "down.lora_A.*": "rowwise"}
    parallelize(model, mesh, inside)
    for found, right in zip(steps_of(model, x), steps_of(whole, x), strict=True):
        torch.testing.assert_close(found, right, atol=1e-8, rtol=1e-6)


def test_adapters_are_refused_and_their_layers_taken(pool: Pool, seed: int) -> None:
    pool(2).run(adapters, seed)
