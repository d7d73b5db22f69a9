"""Linear layers over a group in autograd: what is saved, what is quantised, which Program runs.

(y,) = Sharded.apply(Communication("reduce_scatter", group, Options(), None), (None,), x, w, b)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

from interlace.errors import UnsupportedError
from interlace.float8.linear import weight_across, weight_rows
from interlace.float8.quantization import amax_size, check_device
from interlace.float8.recipe import Recipe, keeps_transposes
from interlace.frontend.importing.types import dtype_of
from interlace.nn.autograd import first_order, without_autocast
from interlace.nn.groups import size_of
from interlace.nn.parallel.layer import backward, forward
from interlace.nn.parallel.programs import KnownWeight, call_of, known, programs
from interlace.nn.parallel.serial import LinearLayer
from interlace.nn.parallel.traced import TorchOperations, traced
from interlace.optim.grad_accumulator import GradAccumulator
from interlace.options import Options
from interlace.torch_private import are_functorch_transforms_active, forward_ad_level
from interlace.torch_private.distributed import AsyncCollectiveTensor


@dataclass(frozen=True, slots=True)
class Communication:
    """The communication of a call, and its FP8 recipe."""

    collective: str
    group: dist.ProcessGroup
    options: Options
    recipe: Recipe | None
    weight: Tensor | None = field(default=None, compare=False)
    """The first weight as the caller has it, whatever it is cast to."""

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return size_of(self.group)


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """A forward pass, as its backward must know it."""

    weight: Tensor
    known: KnownWeight | None
    """None: it communicates nothing, and so asked nobody."""
    name: str
    """Name of its run: the same on all ranks."""


class Sharded(torch.autograd.Function):
    """The matmuls and the communication of rows [S, K]; Note [Casts stay outside] in linear.py."""

    @staticmethod
    def forward(
        ctx: Any,
        via: Communication,
        accumulators: tuple[GradAccumulator | None, ...],
        x: Tensor,
        *tensors: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """Weights, then biases, give as many outputs as there are weights."""
        wanted = ctx.needs_input_grad[2 : 3 + len(accumulators)]
        ctx.via, ctx.accumulators = via, accumulators
        ctx.layer, ctx.call, outputs, saved = _forward(via, wanted, x, tensors)
        ctx.save_for_backward(*saved)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        """The gradients that are wanted, in the order of forward's tensors."""
        x, *saved = ctx.saved_tensors
        weights, kept = saved[: len(dys)], saved[len(dys) :]
        wanted: tuple[bool, ...] = ctx.needs_input_grad[2:]
        # Where a graph of the gradient is made, autograd sums: a buffer would not know of it.
        accumulators = () if torch.is_grad_enabled() else ctx.accumulators
        with torch.no_grad(), without_autocast(dys[0].device.type):
            given = [_dense(dy) for dy in dys]
            if (recipe := ctx.via.recipe) is not None:
                pairs = zip(weights, kept, strict=True)
                weights = [weight_across(w, recipe, across) for w, across in pairs]
            found = iter(_gradients(ctx.via, ctx.layer, ctx.call, wanted, given, x, weights))
            grads = [next(found) if want else None for want in wanted]
            for i, accumulator in enumerate(accumulators, 1):
                into = accumulator.destination() if accumulator and wanted[i] else None
                if into is not None:
                    into.add_(grads[i])
                    grads[i] = None
        return None, None, *map(first_order, grads)


def applied(
    via: Communication,
    accumulators: tuple[GradAccumulator | None, ...],
    tensors: Sequence[Tensor | None],
) -> Sequence[Tensor]:
    """The outputs, of x, weights and biases; without autograd where nothing asks for a gradient.

    (There a Function takes as long, and saves what requires gradients although they are off.)
    """
    x = tensors[0]
    assert x is not None
    if torch.compiler.is_compiling():  # Note [In our own graphs] in traced.py
        if via.recipe is not None:
            check_device(x)
        return traced(via.collective, via.group, via.recipe, len(accumulators), tensors)
    if forward_ad_level() >= 0 or are_functorch_transforms_active():
        _refuse_transforms(tensors)
    if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in tensors]):
        return Sharded.apply(via, accumulators, *tensors)
    _, _, outputs, _ = _forward(via, (False,) * (1 + len(accumulators)), x, tensors[1:])
    return outputs


def _refuse_transforms(tensors: Sequence[Tensor | None]) -> None:
    """Raises before peers wait for this rank."""
    given = [tensor for tensor in tensors if tensor is not None]
    if are_functorch_transforms_active() or any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in given
    ):
        raise UnsupportedError(
            "forward-mode gradients and the transforms of torch.func (vmap, grad, jvp) cannot go "
            "through a layer that communicates: use torch.nn's own with collectives there"
        )


def _forward(
    via: Communication, wanted: tuple[bool, ...], x: Tensor, tensors: Sequence[Tensor | None]
) -> tuple[LinearLayer, ForwardPass, list[Tensor], list[Tensor | None]]:
    """The layer and its call, its outputs, and what is saved for the `wanted` gradients of x and of
    weights."""
    (for_x, *for_w), recipe = wanted, via.recipe
    x, count = _dense(x), len(for_w)
    dense = [None if tensor is None else _dense(tensor) for tensor in tensors]
    weights, biases = [w for w in dense[:count] if w is not None], dense[count:]
    layer = _layer(
        via.collective,
        x.dtype,
        x.shape[1],
        tuple([w.shape[0] for w in weights]),
        tuple([b is not None for b in biases]),
        recipe,
        1 if recipe is None else amax_size(x.device),
        recipe is not None and any(for_w),
    )
    first = via.weight
    if first is None or isinstance(first, AsyncCollectiveTensor):
        first = weights[0]
    saved: list[Tensor | None] = list(weights)
    with without_autocast(x.device.type):
        if recipe is not None:
            check_device(x)
            keep = keeps_transposes(len(x), sum(layer.outer), for_x, any(for_w))
            forms = [weight_rows(w, recipe, keep) for w in weights]
            saved = [None] * len(forms) if keep else saved
            weights = [packed for packed, _ in forms]
            saved += [kept for _, kept in forms]
        if via.collective == "copy":
            outputs = forward(_local(via, x), x, weights, biases, layer.keeps)
            call = ForwardPass(first, None, call_of(via.group))
        else:
            ranks = via.size if via.collective == "reduce_scatter" else 1
            pairs = zip(weights, biases, strict=True)
            given = [tensor for pair in pairs for tensor in pair if tensor is not None]
            told = known(via.group, layer, via.options, first)
            run = programs(via.group, layer, via.options, x.device, told.digests)
            outputs = run(x.shape[0] // ranks, [x, *given], told.name)
            call = ForwardPass(first, told, call_of(via.group))
    if layer.returns_x:
        x = outputs.pop()
    return layer, call, outputs, [x if any(for_w) else None, *(saved if for_x else ())]


@functools.lru_cache
def _layer(
    collective: str,
    dtype: torch.dtype,
    inner: int,
    outer: tuple[int, ...],
    biased: tuple[bool, ...],
    recipe: Recipe | None,
    maxima: int,
    keeps: bool,
) -> LinearLayer:
    """The layer of a forward pass."""
    facts = {"recipe": recipe, "maxima": maxima, "keeps": keeps}
    return LinearLayer(collective, dtype_of(dtype).value, inner, outer, biased, **facts)


def _gradients(
    via: Communication,
    layer: LinearLayer,
    call: ForwardPass,
    wanted: tuple[bool, ...],
    dys: list[Tensor],
    x: Tensor | None,
    weights: Sequence[Tensor],
) -> list[Tensor]:
    """The wanted gradients, of x, weights and biases; FP8 takes the transposes of weights."""
    if via.collective == "all_reduce" or (via.collective == "copy" and not wanted[0]):
        grads = backward(_local(via, dys[0]), wanted, dys, x, weights)
        return [grad for grad in grads if grad is not None]
    ranks = via.size if via.collective == "all_gather" else 1
    told = call.known or known(via.group, layer, via.options, call.weight)
    layer = dataclasses.replace(layer, wanted=wanted)
    run = programs(via.group, layer, via.options, dys[0].device, told.digests)
    given = [*dys, *(() if x is None else (x,)), *weights]
    return run(dys[0].shape[0] // ranks, given, call.name)


def _local(via: Communication, like: Tensor) -> TorchOperations:
    """The operators of a pass that communicates nothing."""
    return TorchOperations(via.collective, ("", 1), via.recipe, like.dtype)


def _dense(tensor: Tensor) -> Tensor:
    """Contiguous, and there: what DTensor is still communicating is waited for."""
    if isinstance(tensor, AsyncCollectiveTensor):
        tensor = tensor.wait()
    return tensor.contiguous()
