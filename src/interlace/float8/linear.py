"""Linear layers in FP8 on one rank, and a model's own linear layers turned into them.

    model = convert_to_float8(model, Recipe(), filter=lambda name, module: "head" not in name)

Over a group, see `interlace.nn.functional` (`recipe=`). Under torch.compile the operators of
operators.py stand in the graph, so a sum over ranks behind such a layer is overlapped as any other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import interlace.float8.operators  # noqa: F401  (registers what is called below)
from interlace.errors import InputError
from interlace.float8.data import ALIGNMENT
from interlace.float8.quantization import check_device
from interlace.float8.recipe import E4M3, Recipe

OPS: Any = torch.ops.interlace
Packed = tuple[Tensor, Tensor | None]
"""Packed rows of a weight [N, K], and those of its transpose."""


def pack(x: Tensor, kind: torch.dtype, recipe: Recipe, transpose: bool) -> Packed:
    """A matrix [M, K] as packed rows, and those of the transpose if they are asked for."""
    amax = OPS.float8_amax(x) if recipe.scaling == "tensor" else None
    facts = amax, recipe.power_of_two, recipe.eps, kind
    return OPS.float8_pair(x, *facts) if transpose else (OPS.float8_rows(x, *facts), None)


def gradients(
    recipe: Recipe,
    dy: Tensor,
    x: Tensor | None,
    w_t: Tensor | None,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Those of x, weight and bias that are wanted, from dy [M, N].

    `x` is what forward kept: packed rows, or x itself where each row has its scale, since scales of
    rows do not go through a sum over rows. `w_t` is the transposed weight as packed rows.
    """
    by_row = recipe.scaling == "row"
    dx = dw = rows = across = None
    if wanted[0] or (wanted[1] and not by_row):
        rows, across = pack(dy, recipe.gradient, recipe, wanted[1] and not by_row)
    if wanted[0]:
        assert w_t is not None
        dx = OPS.float8_mm(rows, w_t.t(), int(not by_row), None, False, dy.dtype)
    if wanted[1]:
        assert x is not None
        dw = dy.t().mm(x) if by_row else OPS.float8_wgrad(rows, x, 1, across, dy.dtype)
    return dx, dw, dy.sum(0) if wanted[2] else None


class Linear(torch.autograd.Function):
    """`x @ w.T + bias` of x [M, K]."""

    @staticmethod
    def forward(
        ctx: Any, recipe: Recipe, kept: Packed | None, x: Tensor, w: Tensor, bias: Tensor | None
    ) -> Tensor:
        """`kept`: the weight as packed rows, where that is known."""
        for_x, for_w = ctx.needs_input_grad[2:4]
        w8, w8_t = pack(w, E4M3, recipe, for_x) if kept is None else kept
        x8, _ = pack(x, E4M3, recipe, False)
        ctx.recipe, by_row = recipe, recipe.scaling == "row"
        ctx.save_for_backward((x if by_row else x8) if for_w else None, w8_t if for_x else None)
        return OPS.float8_mm(x8, w8.t(), int(not by_row), bias, True, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> Any:
        """Gradients of x, weight and bias."""
        x, w_t = ctx.saved_tensors
        wanted = ctx.needs_input_grad[2:]
        return None, None, *gradients(ctx.recipe, dys[0].contiguous(), x, w_t, wanted)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    """`F.linear` of x [..., K], weight [N, K] and bias [N] in FP8, as x's dtype [..., N].

    K and N are multiples of 16; x is bf16, fp16 or fp32, and weight and bias are of its dtype.
    Raises InputError where they are not; UnsupportedError on a device without FP8.
    """
    _check(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    out = Linear.apply(recipe, None, rows, weight, bias)
    return out.view(*x.shape[:-1], len(weight))


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_device(x)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "device_mesh"):
            raise InputError(
                f"`{name}` is a DTensor: FP8 over a mesh is what interlace.nn.functional and "
                "interlace.tensor_parallel do, with recipe="
            )
        if tensor.dtype != x.dtype or tensor.device != x.device:
            raise InputError(
                f"`{name}` is {tensor.dtype} on {tensor.device}, and x {x.dtype} on {x.device}: "
                "cast one, or use autocast"
            )
    unfit = unfit_sizes(weight)
    if unfit or x.shape[-1] != weight.shape[1]:
        raise InputError(unfit or f"x is {tuple(x.shape)}: take (..., {weight.shape[1]})")


def unfit_sizes(weight: Tensor) -> str:
    """Why FP8's GEMM cannot take a weight; empty where it can."""
    if all(size % ALIGNMENT == 0 and size for size in weight.shape):
        return ""
    return f"`weight` has shape {list(weight.shape)}: FP8's GEMM takes multiples of {ALIGNMENT}"


class Float8Linear(nn.Linear):
    """`torch.nn.Linear` that multiplies in FP8; its parameters and state_dict are the same."""

    recipe: Recipe
    keep_weight: bool
    _kept: tuple[int, bool, Packed] | None

    @classmethod
    def of(cls, module: nn.Linear, recipe: Recipe, keep_weight: bool = False) -> Float8Linear:
        """A layer with the parameters of `module`.

        `keep_weight` keeps the quantised weight (two bytes a number) until the weight changes, for
        the next micro-batches; torch.compile quantises it in every call.
        """
        unfit = unfit_sizes(module.weight)
        if unfit:
            raise InputError(unfit)
        made = cls.__new__(cls)
        made.__dict__.update(module.__dict__)
        made.recipe, made.keep_weight, made._kept = recipe, keep_weight, None
        return made

    def forward(self, input: Tensor) -> Tensor:
        """`input` [..., K] as [..., N]; autocast casts as for `torch.nn.Linear`."""
        x, weight, bias, kind = input, self.weight, self.bias, input.device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        _check(x, weight, bias)
        with torch.autocast(kind, enabled=False):
            rows = x.reshape(-1, x.shape[-1])
            kept = self._kept_weight(weight, input) if self.keep_weight else None
            out = Linear.apply(self.recipe, kept, rows, weight, bias)
        return out.view(*x.shape[:-1], self.out_features)

    def _kept_weight(self, weight: Tensor, x: Tensor) -> Packed | None:
        """The quantised weight, made anew where the parameter has changed."""
        if torch.compiler.is_compiling():
            return None
        across = torch.is_grad_enabled()
        version = self.weight._version
        if self._kept is None or self._kept[0] != version or (across and not self._kept[1]):
            made = pack(weight.detach(), E4M3, self.recipe, across)
            self._kept = version, across, made
        return self._kept[2]


def convert_to_float8(
    model: nn.Module,
    recipe: Recipe | None = None,
    *,
    filter: Callable[[str, nn.Linear], bool] | None = None,
    keep_weights: bool = False,
) -> nn.Module:
    """Turns the `torch.nn.Linear` layers of a model into `Float8Linear`, in place; gives the model.

    `filter(name, module)` chooses layers; without one, all are that FP8's GEMM can take, and a
    warning names the others. Parameters stay what they are, so optimizers and state_dicts do too.
    `keep_weights` quantises a weight once for all micro-batches until it changes (see
    `Float8Linear.of`). Raises InputError where a chosen layer has sizes that FP8 cannot take, or no
    layer is chosen.
    """
    chosen: dict[str, nn.Linear] = {}
    left: list[str] = []
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module) is not nn.Linear or (filter is not None and not filter(name, module)):
            continue
        unfit = unfit_sizes(module.weight)
        if unfit and filter is not None:
            raise InputError(f"{name or 'the model'}: {unfit}; leave it out by `filter`")
        if unfit:
            left.append(name)
        else:
            chosen[name] = module
    if not chosen:
        raise InputError("no layer of the model is an nn.Linear that can be converted")
    if left:
        sizes = f"their sizes are no multiples of {ALIGNMENT}"
        warnings.warn(f"not converted to FP8, since {sizes}: {', '.join(left)}", stacklevel=2)
    made = {
        module: Float8Linear.of(module, recipe or Recipe(), keep_weights)
        for module in chosen.values()
    }
    if isinstance(model, nn.Linear):
        return made[model]
    for name, module in chosen.items():
        model.set_submodule(name, made[module])
    return model
