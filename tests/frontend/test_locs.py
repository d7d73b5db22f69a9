"""Where ops come from: module paths as users know them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.captured import capture
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import interlace
from interlace.frontend import Bound
from interlace.frontend.importing.nodes import is_state, label, module_path
from interlace.ir import Call

PATHS = {
    "L['self'].layers.0.mlp": "layers.0.mlp",
    "L['self'].self_attn.o_proj": "self_attn.o_proj",
    "L['self_attn'].o_proj": "o_proj",
    "L['self'].self.query": "self.query",
    "L['self']": "",
    "L['fn']._modules['layers']._modules['0']": "layers.0",
    "L['s'].layers.1.__dict__['_modules']['_checkpoint_wrapped_module'].mlp": "layers.1.mlp",
    "L['self'].__dict__['_modules']['_checkpoint_wrapped_module']": "",
    "L['self'].up._orig_mod.my_orig_mod": "up.my_orig_mod",
    "L['args'][0].model.layers.0.mlp": "model.layers.0.mlp",
    "G['net'].blocks['a'].up": "blocks.a.up",
}
"""What TorchDynamo notes, and the path that it stands for."""


@pytest.mark.parametrize("noted", PATHS)
def test_module_path(noted: str) -> None:
    assert module_path(noted) == PATHS[noted]


@pytest.mark.parametrize("of", ["._parameters['w']", ".__dict__['_parameters']['w']"])
def test_parameters_in_wrappers(of: str) -> None:
    source = f"L['self'].__dict__['_modules']['_checkpoint_wrapped_module'].self_attn{of}"
    assert label(source) == "self_attn_w"
    assert is_state(source)
    assert not is_state(source.removesuffix(of))


class Attention(nn.Module):
    """Named as in Hugging Face's models."""

    def __init__(self) -> None:
        super().__init__()
        self.o_proj = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        """The projection."""
        return self.o_proj(x).relu()


class Layer(nn.Module):
    """Attention and an MLP; the MLP is checkpointed by a call, the whole by a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        """The layer."""
        y: Any = checkpoint(self.mlp, self.self_attn(x), use_reentrant=False)
        return y


class Net(nn.Module):
    """A layer, and one that torch wraps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), checkpoint_wrapper(Layer())])

    def forward(self, x: Tensor) -> Tensor:
        """Both."""
        for layer in self.layers:
            x = layer(x)
        return x


def told(bound: list[Bound]) -> tuple[set[str], set[str]]:
    """The modules of the matmuls, and the names of the parameters."""
    calls = [op for b in bound for op in b.program.ops if isinstance(op, Call) and "mm" in op.fn]
    assert calls
    return {op.loc.module for op in calls}, {p.name for p in bound[0].program.params}


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("by", ["torch.compile", "interlace.compile"])
@pytest.mark.parametrize("make", [Layer, Net, lambda: checkpoint_wrapper(Layer())])
def test_ops_name_the_users_modules(make: Any, by: str, grad: bool) -> None:
    torch.compiler.reset()
    net, x = make(), torch.ones(2, 4)
    layers = ["layers.0.", "layers.1."] if make is Net else [""]
    with torch.set_grad_enabled(grad):
        if by == "torch.compile":
            with capture() as captured:
                y = torch.compile(net, backend="interlace")(x)
            bound = captured.bound
        else:
            compiled = interlace.compile(net)
            y, bound = compiled(x), list(compiled.bound)
    if grad:
        y.sum().backward()
    modules, names = told(bound)
    assert modules == {f"{layer}{m}" for layer in layers for m in ("self_attn.o_proj", "mlp.0")}
    wanted = {f"{layer}self_attn.o_proj.weight".replace(".", "_") for layer in layers}
    assert wanted <= names
