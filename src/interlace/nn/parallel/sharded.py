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

from interlace.float8.products import multiply_into, wgrad_into
from interlace.float8.quantization import amax_size, quantize
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
    group: dist.ProcessGroup | None
    """None: one rank has all."""
    options: Options
    recipe: Recipe | None

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return 1 if self.group is None else self.group.size()


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
        turned: Sequence[Tensor | None] = weights
        with without_autocast(x.device.type):
            if recipe is not None:
                made = [quantize(w, recipe.forward, recipe, transpose=for_x) for w in weights]
                weights, turned = [w.packed for w in made], [w.transposed for w in made]
            outputs = _outputs(via, layer, x, weights, biases)
        if layer.packs:
            x = outputs.pop()
        ctx.save_for_backward(x if any(for_w) else None, *(turned if for_x else ()))
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


def _outputs(
    via: Communication,
    layer: Layer,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
) -> list[Tensor]:
    """One for each weight, and x as packed rows where the layer keeps those."""
    if via.group is not None:
        ranks = via.size if via.collective == "reduce_scatter" else 1
        pairs = [t for pair in zip(weights, biases, strict=True) for t in pair if t is not None]
        run = programs(via.group, layer, via.options, x.device)
        return run(x.shape[0] // ranks, [x, *pairs])
    assert via.recipe is not None
    x8 = quantize(x, via.recipe.forward, via.recipe).packed
    made: list[Tensor] = []
    for w, bias, outer in zip(weights, biases, layer.outer, strict=True):
        made.append(x.new_empty(len(x), outer))
        within = bias if via.collective == "all_gather" else None  # else it is added to the sum
        multiply_into(made[-1], x8, w, int(layer.packs), within, True)
        if bias is not None and within is None:
            made[-1] += bias
    return [*made, x8] if layer.packs else made


def _gradients(
    via: Communication,
    layer: Layer,
    wanted: tuple[bool, ...],
    dys: list[Tensor],
    x: Tensor | None,
    weights: Sequence[Tensor],
) -> list[Tensor]:
    """Those that are wanted, of x, weights and biases."""
    if via.group is None or via.collective == "all_reduce":
        return _local_gradients(layer, wanted, dys, x, weights)
    ranks = via.size if via.collective == "all_gather" else 1
    layer = dataclasses.replace(layer, wanted=wanted)
    run = programs(via.group, layer, via.options, dys[0].device)
    return run(dys[0].shape[0] // ranks, [*dys, *(() if x is None else (x,)), *weights])


def _local_gradients(
    layer: Layer,
    wanted: tuple[bool, ...],
    dys: list[Tensor],
    x: Tensor | None,
    weights: Sequence[Tensor],
) -> list[Tensor]:
    """Where all ranks have all rows of dy, or one rank has all."""
    count, recipe, packs = len(dys), layer.recipe, layer.packs
    for_x, for_w, for_b = wanted[0], wanted[1 : 1 + count], wanted[1 + count :]
    made: list[Tensor] = []
    if recipe is None:
        rows = []
    else:
        kind, turned = recipe.gradient, packs and any(for_w)
        rows = [quantize(dy, kind, recipe, transpose=turned) for dy in dys]
    if for_x:
        products = [dy.new_empty(len(dy), layer.inner) for dy in dys]
        for i, (dy, w) in enumerate(zip(dys, weights, strict=True)):
            if recipe is None:
                torch.mm(dy, w, out=products[i])
            else:
                multiply_into(products[i], rows[i].packed, w, int(packs), None, False)
        made.append(sum(products[1:], start=products[0]))
    for i, dy in enumerate(dys):
        if for_w[i]:
            assert x is not None
            if packs:
                made.append(dy.new_empty(layer.outer[i], layer.inner))
                wgrad_into(made[-1], rows[i].packed, x, 1, rows[i].transposed)
            else:
                made.append(dy.t().mm(x))
    return made + [dy.sum(0) for dy, want in zip(dys, for_b, strict=True) if want]
