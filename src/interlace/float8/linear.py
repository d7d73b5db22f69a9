"""Linear layers in FP8 on one rank, and a model's own linear layers turned into them.

    convert_to_float8(model, Recipe(), filter=lambda name, module: "head" not in name)

Over a group, see `interlace.nn.functional` (`recipe=`). Under torch.compile the operators of
operators.py stand in the graph, so a sum over ranks behind such a layer is overlapped as any other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from interlace.errors import InputError
from interlace.float8.data import ALIGNMENT
from interlace.float8.operators import again, run, unseen
from interlace.float8.quantization import check_device
from interlace.float8.recipe import E4M3, Recipe, keeps_transposes

T = TypeVar("T", Tensor, Tensor | None)
Packed = tuple[Tensor, Tensor | None]
"""Packed rows of a weight [N, K], and those of its transpose."""
Keep = dict[tuple[torch.dtype, bool], tuple[Tensor, int, Packed]]
"""A weight quantised once, for each dtype, and whether in inference mode; the weight as it was, on
its memory, which so is not used again, and its version."""


def pack(
    x: Tensor,
    kind: torch.dtype,
    recipe: Recipe,
    form: str,
    *,
    place: tuple[int, str] | None = None,
) -> Any:
    """A matrix [M, K] as packed `rows`, as those of the transpose (`across`), or as a `pair`.

    `place` tells the matrix from others: what was quantised there before, had about the same
    maximum.
    """
    made = None if place is None else again(form, x, recipe, kind, place)
    if made is not None:
        return made if form == "pair" else made[0]
    return run(form, x, run("amax", x), recipe.power_of_two, recipe.traced_eps, kind)


def place_of(weight: Tensor, role: str) -> tuple[int, str] | None:
    """Where a layer's `x`, `w` and `dy` are quantised; None if that is not to be known."""
    return (weight.data_ptr(), role) if unseen(weight) else None


def weight_rows(w: Tensor, recipe: Recipe, keep: bool) -> tuple[Tensor, Tensor | None]:
    """A weight as packed rows, and those of the transpose if backward shall find them."""
    place = place_of(w, "w")
    if keep:
        return pack(w, E4M3, recipe, "pair", place=place)
    return pack(w, E4M3, recipe, "rows", place=place), None


def weight_across(w: Tensor | None, recipe: Recipe, kept: Tensor | None) -> Tensor:
    """The transpose of a weight as packed rows: what was kept, or made now."""
    if kept is not None:
        return kept
    assert w is not None
    return pack(w, E4M3, recipe, "across", place=place_of(w, "w"))


class Float8Product(torch.autograd.Function):
    """`x @ w.T + bias` of x [M, K]."""

    @staticmethod
    def forward(
        ctx: Any, recipe: Recipe, known: Packed | None, x: Tensor, w: Tensor, bias: Tensor | None
    ) -> Tensor:
        """`known`: the weight as packed rows, where that is known."""
        for_x, for_w = ctx.needs_input_grad[2:4]
        if known is None:
            w8, kept = weight_rows(w, recipe, keeps_transposes(len(x), len(w), for_x, for_w))
        else:
            w8, kept = known
        place = place_of(w, "x")
        if for_w:
            x8, saved = pack(x, E4M3, recipe, "pair", place=place)
        else:
            x8, saved = pack(x, E4M3, recipe, "rows", place=place), None
        ctx.recipe, ctx.place = recipe, place_of(w, "dy")
        ctx.save_for_backward(saved, w if for_x and kept is None else None, kept if for_x else None)
        return run("mm", x8, w8.t(), 1, bias, True, x.dtype)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        """Gradients of x, weight and bias."""
        from interlace.nn.autograd import first_order  # nn's own layers are made of this file

        x, weight, kept = ctx.saved_tensors
        recipe: Recipe = ctx.recipe
        for_x, for_w, for_bias = ctx.needs_input_grad[2:]
        dy = dys[0].contiguous()
        dx = dw = rows = across = None
        with torch.no_grad():
            w = weight_across(weight, recipe, kept) if for_x else None
            if for_x or for_w:
                form = "pair" if for_x and for_w else "across" if for_w else "rows"
                made = pack(dy, recipe.gradient, recipe, form, place=ctx.place)
                rows, across = made if form == "pair" else (made, made)
            if w is not None:
                dx = run("mm", rows, w.t(), 1, None, False, dy.dtype)
            if for_w:
                dw = run("mm", across, x.t(), 1, None, False, dy.dtype)
            db = dy.sum(0) if for_bias else None
        return None, None, *map(first_order, (dx, dw, db))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    """Computes `F.linear` in FP8; gradients are computed in FP8 as well.

    Args:
        x: [..., K], bf16, fp16 or fp32.
        weight: [N, K]; K and N are multiples of 16. It and `bias` are of x's dtype, or all are cast
            by autocast.
        bias: [N].
        recipe: formats and scales.

    Returns:
        [..., N] of x's dtype.

    Raises:
        InputError: sizes, dtypes or devices do not fit, or a tensor is a DTensor.
        UnsupportedError: the device has no FP8.
    """
    return _linear(x, weight, bias, recipe, None)


def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: Recipe,
    keep: Keep | None,
) -> Tensor:
    kind, own = x.device.type, weight
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weight, bias = _cast(x, dtype), _cast(weight, dtype), _cast(bias, dtype)
    _check(x, weight, bias)
    with torch.autocast(kind, enabled=False):
        kept = None
        # What counts no versions may change unseen; what is no Parameter is made for each call.
        if keep is not None and type(own) is nn.Parameter and not own.is_inference():
            key = x.dtype, torch.is_inference_mode_enabled()  # whose tensors backward cannot save
            if key not in keep or not _unchanged(own, *keep[key][:2]):
                packed = pack(weight.detach(), E4M3, recipe, "pair")
                keep[key] = own.detach(), own._version, packed
            kept = keep[key][2]
        given = x.reshape(-1, x.shape[-1]), weight, bias
        if not torch.is_grad_enabled():  # a Function is told of gradients that nobody takes, too
            given = [None if tensor is None else tensor.detach() for tensor in given]
        out = Float8Product.apply(recipe, kept, *given)
    return out.view(*x.shape[:-1], len(weight))


def _unchanged(weight: Tensor, before: Tensor, version: int) -> bool:
    """Returns true where a weight lies where it lay, and was not written to."""
    same = weight.data_ptr() == before.data_ptr() and weight.stride() == before.stride()
    return same and weight._version == version


def _cast(tensor: T, dtype: torch.dtype) -> T:
    """As autocast does for `F.linear`: float64 stays, and what does not float."""
    if tensor is None or tensor.dtype == torch.float64 or not tensor.is_floating_point():
        return tensor
    return tensor.to(dtype)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_device(x)
    wanted = (("weight", weight, weight.shape), ("bias", bias, weight.shape[:1]))
    for name, tensor, shape in wanted:
        if tensor is None:
            continue
        if type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "device_mesh"):
            raise InputError(
                f"`{name}` is a DTensor: FP8 over a mesh is what interlace.nn.functional and "
                "interlace.tensor_parallel do, with recipe="
            )
        if tensor.dtype != x.dtype or tensor.device != x.device or tensor.shape != shape:
            raise InputError(
                f"`{name}` is {tensor.dtype} {list(tensor.shape)} on {tensor.device}: give "
                f"{x.dtype} {list(shape)} on {x.device}, as x is; cast one, or use autocast"
            )
    unfit = unfit_sizes(weight)
    if unfit or x.shape[-1] != weight.shape[1]:
        raise InputError(unfit or f"x is {tuple(x.shape)}: take (..., {weight.shape[1]})")


def unfit_sizes(weight: Tensor) -> str:
    """Why FP8's GEMM cannot take a weight; empty where it can."""
    if weight.dim() == 2 and all(size % ALIGNMENT == 0 and size for size in weight.shape):
        return ""
    return (
        f"`weight` has shape {list(weight.shape)}: FP8's GEMM takes two dimensions that are "
        f"multiples of {ALIGNMENT}"
    )


class Float8Linear(nn.Linear):
    """`torch.nn.Linear` that multiplies in FP8; arguments, parameters, state_dict are the same."""

    recipe: Recipe = Recipe()
    _kept: Keep | None = None

    def forward(self, input: Tensor) -> Tensor:
        """The output [..., N] of an `input` [..., K], as by `linear`."""
        keep = None if torch.compiler.is_compiling() else self._kept
        return _linear(input, self.weight, self.bias, self.recipe, keep)


def convert_to_float8(
    model: nn.Module,
    recipe: Recipe | None = None,
    *,
    filter: Callable[[str, nn.Linear], bool] | None = None,
) -> nn.Module:
    """Makes the `torch.nn.Linear` layers of a model `Float8Linear`, in place.

    Modules, parameters and hooks stay the objects that they are, so optimizers and state_dicts do
    too. A warning names linear layers that stay as they are for another reason than the filter.

    Args:
        model: a model, before `torch.compile`.
        recipe: of all these layers; None is `Recipe()`.
        filter: chooses layers as `filter(name, module)`; by default all that FP8's GEMM can take.

    Returns:
        The model.

    Raises:
        InputError: the filter chooses a layer of sizes that FP8 cannot take, or no layer is left.
    """
    chosen: list[nn.Linear] = []
    left: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or (filter is not None and not filter(name, module)):
            continue
        unfit = unfit_sizes(module.weight)
        own = type(module) is not nn.Linear or "forward" in module.__dict__
        if unfit and filter is not None:
            raise InputError(f"{name or 'the model'}: {unfit}; leave it out by `filter`")
        if unfit or own or module._compiled_call_impl is not None:
            left.append(name or "the model")
        else:
            chosen.append(module)
    if left:
        why = f"a size is no multiple of {ALIGNMENT}, or class or forward are not nn.Linear's"
        warnings.warn(f"not converted to FP8 ({why}): {', '.join(left)}", stacklevel=2)
    if not chosen:
        raise InputError("no layer of the model is an nn.Linear that can be converted")
    for module in chosen:
        module.__class__ = Float8Linear
        module.recipe = recipe or Recipe()  # pyright: ignore
    return model


@contextmanager
def kept_weights(model: nn.Module) -> Iterator[None]:
    """Quantises the weight of each `Float8Linear` once for all calls in this context.

    A weight is quantised anew where it has changed: a step of an optimizer, load_state_dict, any
    write that autograd sees. A write to `weight.data` goes unseen: write to the weight itself.
    Kept weights take two bytes a number more. Weights that fully_shard gathers, and all under
    torch.compile, are quantised in every call all the same.

    Args:
        model: a model with such layers.

    Yields:
        Nothing: use it in a `with` statement around the micro-batches of a step.
    """
    from torch.distributed.fsdp import FSDPModule  # takes long

    sharded = [part for part in model.modules() if isinstance(part, FSDPModule)]
    gathered = {layer for part in sharded for layer in part.modules()}
    layers = [
        module
        for module in model.modules()
        if isinstance(module, Float8Linear) and module not in gathered
    ]
    for layer in layers:
        layer._kept = {}
    try:
        yield
    finally:
        for layer in layers:
            layer._kept = None
