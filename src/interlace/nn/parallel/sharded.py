"""Linear layers over a group in autograd: what is saved, what is quantised, which Program runs.

(y,) = Sharded.apply(Communication("reduce_scatter", group, Options(), None), (None,), x, w, b)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.float8.linear import gradients as float8_gradients
from interlace.float8.linear import pack, turned
from interlace.float8.quantization import amax_size, check_device
from interlace.float8.recipe import Recipe
from interlace.frontend.importing.types import dtype_of
from interlace.nn.autograd import first_order, without_autocast
from interlace.nn.parallel.programs import programs
from interlace.nn.parallel.text import Layer
from interlace.optim.grad_accumulator import GradAccumulator
from interlace.options import Options


@dataclass(frozen=True, slots=True)
class Communication:
    """How a call communicates, and whether in FP8."""

    collective: str
    group: dist.ProcessGroup
    options: Options
    recipe: Recipe | None

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.group.size()


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
        x, count = x.contiguous(), len(accumulators)
        dense = [None if tensor is None else tensor.contiguous() for tensor in tensors]
        weights, biases = [w for w in dense[:count] if w is not None], dense[count:]
        for_x, *for_w = ctx.needs_input_grad[2 : 3 + count]
        ctx.via, ctx.accumulators, recipe = via, accumulators, via.recipe
        ctx.layer = layer = Layer(
            via.collective,
            dtype_of(x.dtype).value,
            x.shape[1],
            tuple([w.shape[0] for w in weights]),
            tuple([b is not None for b in biases]),
            recipe=recipe,
            maxima=amax_size(x.device),
        )
        kept = weights
        with without_autocast(x.device.type):
            if recipe is not None:
                check_device(x)
                weights = [pack(w, recipe.forward, recipe, False)[0] for w in weights]
            ranks = via.size if via.collective == "reduce_scatter" else 1
            pairs = [t for pair in zip(weights, biases, strict=True) for t in pair if t is not None]
            run = programs(via.group, layer, via.options, x.device)
            outputs = run(x.shape[0] // ranks, [x, *pairs])
        if layer.packs:
            x = outputs.pop()
        ctx.save_for_backward(x if any(for_w) else None, *(kept if for_x else ()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> Any:
        """The gradients that are wanted, in the order of forward's tensors."""
        x, *weights = ctx.saved_tensors
        wanted: tuple[bool, ...] = ctx.needs_input_grad[2:]
        # Where a graph of the gradient is made, autograd sums: a buffer would not know of it.
        accumulators = () if torch.is_grad_enabled() else ctx.accumulators
        with torch.no_grad(), without_autocast(dys[0].device.type):
            given = [dy.contiguous() for dy in dys]
            found = iter(_gradients(ctx.via, ctx.layer, wanted, given, x, weights))
            grads = [next(found) if want else None for want in wanted]
            for i, accumulator in enumerate(accumulators, 1):
                into = accumulator.destination() if accumulator and wanted[i] else None
                if into is not None:
                    into.add_(grads[i])
                    grads[i] = None
        return None, None, *map(first_order, grads)


def _gradients(
    via: Communication,
    layer: Layer,
    wanted: tuple[bool, ...],
    dys: list[Tensor],
    x: Tensor | None,
    weights: Sequence[Tensor],
) -> list[Tensor]:
    """Those that are wanted, of x, weights and biases."""
    if via.collective == "all_reduce":
        return _local_gradients(layer, wanted, dys[0], x, *weights)
    if via.recipe is not None:
        weights = [turned(w, via.recipe) for w in weights]
    ranks = via.size if via.collective == "all_gather" else 1
    layer = dataclasses.replace(layer, wanted=wanted)
    run = programs(via.group, layer, via.options, dys[0].device)
    return run(dys[0].shape[0] // ranks, [*dys, *(() if x is None else (x,)), *weights])


def _local_gradients(
    layer: Layer,
    wanted: tuple[bool, ...],
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None = None,
) -> list[Tensor]:
    """Where all ranks have all rows of dy, nothing is communicated."""
    for_x, for_w, for_b = wanted
    if layer.recipe is not None:
        made = float8_gradients(layer.recipe, dy, x, weight, (for_x, for_w, for_b))
        return [grad for grad in made if grad is not None]
    grads = [dy.mm(weight)] if for_x and weight is not None else []
    grads += [dy.t().mm(x)] if for_w and x is not None else []
    return grads + ([dy.sum(0)] if for_b else [])
