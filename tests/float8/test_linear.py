"""Linear layers in FP8, and a model's own turned into them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interlace.errors import InputError, UnsupportedError
from interlace.float8 import (
    E4M3,
    Float8Linear,
    Recipe,
    convert_to_float8,
    kept_weights,
    linear,
    matmul,
    quantize,
)
from interlace.optim import AdamW

float8_linear = sys.modules["interlace.float8.linear"]  # a function has its name
TEAM = Recipe(scale="team", gradient=E4M3)


def by_hand(x: Tensor, w: Tensor, b: Tensor | None, dy: Tensor, recipe: Recipe) -> list[Any]:
    """Output, and gradients of x, weight and bias."""
    x8, w8 = (quantize(t, E4M3, recipe, transpose=True) for t in (x, w))
    dy8 = quantize(dy, recipe.gradient, recipe, transpose=True)
    y = matmul(x8, w8, torch.float32)
    dw = matmul(dy8.t(), x8.t(), x.dtype)
    dx = matmul(dy8, w8.t(), x.dtype)
    return [(y if b is None else y + b).to(x.dtype), dx, dw, *([] if b is None else [dy.sum(0)])]


def close(found: list[Tensor], wanted: list[Any]) -> bool:
    """To the bit, but for the order of a sum in fp32 before it is rounded."""
    return all(
        a.dtype == b.dtype and torch.allclose(a.float(), b.float(), rtol=2**-7, atol=1e-5)
        for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("recipe", [Recipe(), TEAM], ids=["tensor", "powers"])
def test_as_by_hand(recipe: Recipe, biased: bool, seed: int) -> None:
    torch.manual_seed(seed)
    for shape in ((21, 32), (2, 3, 32), (32,), (0, 32)):
        x = torch.randn(shape).bfloat16().requires_grad_()
        w = torch.randn(48, 32).bfloat16().requires_grad_()
        b = torch.randn(48).bfloat16().requires_grad_() if biased else None
        y = linear(x, w, b, recipe)
        assert y.shape == (*shape[:-1], 48)
        dy = torch.randn(y.shape).bfloat16()
        y.backward(dy)
        found = [y.reshape(-1, 48), x.grad.reshape(-1, 32), w.grad]  # type: ignore[union-attr]
        found += [] if b is None else [b.grad]  # type: ignore[list-item]
        given = [t if t is None else t.detach() for t in (x.reshape(-1, 32), w, b)]
        assert close(found, by_hand(*given, dy.reshape(-1, 48), recipe))  # type: ignore[arg-type]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(torch.relu(self.up(x))))


def test_a_model_is_converted_in_place(seed: int) -> None:
    """Parameters, state_dict and hooks stay; training lowers the loss; autocast casts."""
    torch.manual_seed(seed)
    model = Model()
    before, names = list(model.parameters()), list(model.state_dict())
    seen: list[Any] = []
    model.up.register_forward_hook(lambda module, args, out: seen.append(out))
    with pytest.warns(UserWarning, match=r"not converted.*: head"):
        assert convert_to_float8(model) is model
    converted = [type(m) is Float8Linear for m in (model.up, model.down, model.head)]
    assert converted == [True, True, False]
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert list(model.state_dict()) == names
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, target = torch.randn(64, 32), torch.randint(10, (64,))
    losses: list[float] = []
    for _ in range(20):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert seen[0].dtype == torch.bfloat16


def test_layers_are_chosen() -> None:
    model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_to_float8(model, TEAM, filter=lambda name, module: name == "down")
    assert type(model.up) is nn.Linear
    assert isinstance(model.down, Float8Linear)
    assert model.down.recipe is TEAM
    alone = nn.Linear(16, 16)
    assert convert_to_float8(alone) is alone
    assert isinstance(alone, Float8Linear)
    shared = nn.Linear(16, 16)
    tied = nn.ModuleList([shared, shared])
    convert_to_float8(tied)
    assert tied[0] is tied[1]
    with pytest.raises(InputError, match=r"head: `weight` has shape \[10, 32\].*filter"):
        convert_to_float8(Model(), filter=lambda name, module: True)
    with pytest.raises(InputError, match="no layer"):
        convert_to_float8(nn.ReLU())


def test_layers_of_their_own_kind_are_named() -> None:
    class Own(nn.Linear):
        pass

    patched, compiled = nn.Linear(16, 16), nn.Linear(16, 16)
    patched.forward = lambda input: input
    compiled.compile(backend="eager")
    model = nn.ModuleDict(
        {"own": Own(16, 16), "patched": patched, "compiled": compiled, "plain": nn.Linear(16, 16)}
    )
    with pytest.warns(UserWarning, match="own, patched, compiled$"):
        convert_to_float8(model)
    assert [type(m) is Float8Linear for m in model.values()] == [False, False, False, True]


def test_what_it_refuses() -> None:
    x, w = torch.randn(4, 32), torch.randn(48, 32)
    for given, told in (
        ((x, w.bfloat16(), None), r"`weight` is torch\.bfloat16 \[48, 32\]"),
        ((x, w, torch.randn(48).double()), r"`bias` is torch\.float64"),
        ((x, w, torch.randn(1)), r"`bias` is torch\.float32 \[1\].*: give torch\.float32 \[48\]"),
        ((x, torch.randn(2, 16, 32), None), r"`weight` has shape \[2, 16, 32\]"),
        ((x, torch.randn(20, 32), None), r"`weight` has shape \[20, 32\]: .*multiples of 16"),
        ((torch.randn(4, 16), w, None), r"x is \(4, 16\): take \(\.\.\., 32\)"),
        ((x.double(), w.double(), None), r"x is torch\.float64"),
    ):
        with pytest.raises(InputError, match=told):
            linear(*given, Recipe())
    for given, told in (
        (torch.ones(4, 32).double(), "float64"),
        (torch.ones(4, 32).long(), "int64"),
    ):
        layer = convert_to_float8(nn.Linear(32, 16).to(torch.float64 if "float" in told else None))
        with torch.autocast("cpu", torch.bfloat16), pytest.raises(InputError, match=told):
            layer(given)  # autocast leaves what torch leaves
    y = linear(x.requires_grad_(), w.requires_grad_(), None, Recipe())
    (dx,) = torch.autograd.grad(y.sum(), [x], create_graph=True)
    with pytest.raises(UnsupportedError, match="cannot be differentiated again"):
        dx.square().sum().backward()


def test_what_is_kept_until_backward(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Bytes; and the gradients are the same, whether the weight's transpose is kept or made."""
    torch.manual_seed(seed)
    recipe, rule = Recipe(), float8_linear.keeps_transposes
    for rows, wanted, kept_bytes in (
        (256, (True, True), 2),  # x as FP8, and the weight
        (64, (True, True), 1),
        (256, (True, False), 0),  # a frozen weight
    ):
        monkeypatch.setattr(float8_linear, "keeps_transposes", rule)
        x, w = torch.randn(rows, 128).bfloat16(), torch.randn(128, 128).bfloat16()
        given = [t.clone().requires_grad_(want) for t, want in zip((x, w), wanted, strict=True)]
        saved: list[Tensor] = []

        def hook(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(hook, lambda tensor: tensor):
            y = linear(given[0], given[1], None, recipe)
        eight = [t for t in saved if t.dtype == E4M3]
        assert len(eight) == kept_bytes
        y.float().square().sum().backward()
        plain = [t.clone().requires_grad_(want) for t, want in zip((x, w), wanted, strict=True)]
        monkeypatch.setattr(float8_linear, "keeps_transposes", lambda *_: False)
        linear(plain[0], plain[1], None, recipe).float().square().sum().backward()
        for one, other in zip(given, plain, strict=True):
            mine, references = one.grad, other.grad
            assert (mine is None) == (references is None)
            if mine is not None and references is not None:
                assert torch.equal(mine, references)


def _swapped(layer: nn.Linear, value: Tensor) -> None:
    torch.utils.swap_tensors(layer.weight, nn.Parameter(value))


def _set(layer: nn.Linear, value: Tensor) -> None:
    with torch.no_grad():
        layer.weight.set_(value)  # type: ignore[call-overload]


def _written(layer: nn.Linear, value: Tensor) -> None:
    with torch.inference_mode():
        layer.weight.copy_(value)


def _stepped(layer: nn.Linear, value: Tensor) -> None:
    layer.weight.grad = layer.weight.detach() - value
    torch.optim.SGD([layer.weight], lr=1.0).step()


def _turned(layer: nn.Linear, value: Tensor) -> None:
    """The same memory with other strides."""
    layer.weight.data = layer.weight.data.t()


CHANGES: dict[str, Callable[[nn.Linear, Tensor], Any]] = {
    "a write": _written,
    "a step": _stepped,
    "a step of Adam": lambda layer, _: _adam(layer, AdamW),
    "load_state_dict": lambda layer, value: layer.load_state_dict({"weight": value}),
    "assigned": lambda layer, value: layer.load_state_dict({"weight": value}, assign=True),
    "another Parameter": lambda layer, value: setattr(layer, "weight", nn.Parameter(value)),
    "data": lambda layer, value: setattr(layer.weight, "data", value),
    "set_": _set,
    "swap_tensors": _swapped,
    "strides": _turned,
}


def _adam(layer: nn.Linear, make: Callable[..., Any]) -> None:
    layer.weight.grad = torch.ones_like(layer.weight)
    make([layer.weight], lr=0.1).step()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_kept_weights_that_change_are_quantised_anew(
    change: Callable[[nn.Linear, Tensor], Any], autocast: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    layer, x = convert_to_float8(nn.Linear(32, 32, bias=False)), torch.randn(16, 32)
    assert isinstance(layer, nn.Linear)
    with kept_weights(layer), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        before = layer(x)
        for _ in range(2):  # the second time in memory that the first one freed
            change(layer, 2 * layer.weight.detach())
            fresh = linear(x, layer.weight, None, Recipe())
            assert torch.equal(layer(x), fresh)
            assert torch.equal(layer(x), fresh)
            assert not torch.equal(fresh, before)
            before = fresh


def test_each_context_quantises_anew(seed: int) -> None:
    """A fused optimizer between two tells nobody that it changed weights."""
    torch.manual_seed(seed)
    layer, x = convert_to_float8(nn.Linear(32, 32, bias=False)), torch.randn(16, 32)
    assert isinstance(layer, nn.Linear)
    for _ in range(2):
        with kept_weights(layer):
            assert torch.equal(layer(x), linear(x, layer.weight, None, Recipe()))
        _adam(layer, lambda params, lr: torch.optim.AdamW(params, lr=lr, fused=True))


def test_a_weight_that_is_computed_is_not_kept() -> None:
    """It is another tensor in each call, maybe where the last one lay."""
    layer: Any = convert_to_float8(nn.Linear(32, 32, bias=False))
    nn.utils.parametrizations.weight_norm(layer)
    x = torch.randn(16, 32)
    with kept_weights(layer), torch.no_grad():
        layer(x)
        layer.parametrizations.weight.original0.mul_(2)
        assert torch.equal(layer(x), linear(x, layer.weight, None, Recipe()))


def test_kept_weights_of_inference_do_not_reach_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each mode has its own, once for all its calls."""
    layer, forms, real = convert_to_float8(nn.Linear(32, 16)), list[str](), float8_linear.pack
    x = torch.randn(4, 32)

    def counted(*args: Any, **facts: Any) -> Any:
        forms.append(args[3])
        return real(*args, **facts)

    monkeypatch.setattr(float8_linear, "pack", counted)
    with kept_weights(layer):
        with torch.inference_mode():
            layer(x)
            layer(x)
            assert forms == ["pair", "rows", "rows"]  # the weight, and x twice
        layer(x).sum().backward()
    assert isinstance(layer.weight, Tensor)
    assert layer.weight.grad is not None


def test_recipes_compile_one_after_another() -> None:
    torch.compiler.reset()  # TorchDynamo makes a symbol of a number that it meets anew
    recipes = [Recipe(), Recipe(eps=1e-12), TEAM, Recipe(eps=0.5)]
    for recipe in recipes:
        torch.manual_seed(0)
        models = [convert_to_float8(nn.Linear(32, 16), recipe) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        step = torch.compile(models[0], backend="interlace", fullgraph=True)
        for rows in (32, 48):
            x = torch.randn(rows, 32)
            step(x).square().sum().backward()
            models[1](x).square().sum().backward()
        for mine, eager in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert mine.grad is not None
            assert eager.grad is not None
            assert torch.equal(mine.grad, eager.grad), recipe
