"""Linear layers over a group by torch's operators, as in a graph that torch.compile traces.

    outputs = traced("all_gather", group, recipe, 1, [x, w, b])    # x [rows, K]

Note [In our own graphs]: where `backend="interlace"` or `interlace.compile` traces, a layer is no
Program of its own. Its collectives and matmuls stand in the graph, and are sites there beside all
others. The layer's options do not apply: the backend's do. Another backend would run the
collectives one after another; for it, the layer breaks the graph and overlaps as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.errors import OptionError
from interlace.float8.operators import run
from interlace.float8.recipe import Recipe
from interlace.frontend.backend import compiles_here
from interlace.nn.autograd import first_order
from interlace.nn.parallel.layer import backward, forward, packed
from interlace.torch_private.distributed import functional

P = ParamSpec("P")
T = TypeVar("T")
Team = tuple[str, int]
"""A process group's name and size."""


REASON = "it overlaps in eager mode, or in graphs of backend='interlace': leave fullgraph out"


def graph_or_eager(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which breaks the graph of every backend but ours."""
    disabled: Any = torch.compiler.disable(function, reason=REASON)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if "overlap" in kwargs:
            raise OptionError('`overlap` is an option. fix: options={"overlap": False}')
        if torch.compiler.is_compiling() and (
            not torch.compiler.is_dynamo_compiling() or compiles_here()
        ):
            return function(*args, **kwargs)
        return disabled(*args, **kwargs)

    return call


def traced(
    collective: str,
    group: dist.ProcessGroup,
    recipe: Recipe | None,
    count: int,
    tensors: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """The outputs [rows, N] of x [rows, K], of `count` weights, and of as many biases."""
    return Traced.apply(collective, (group.group_name, group.size()), recipe, count, *tensors)


class TorchOperations:
    """`Operations` on tensors, whose results and packed products are of `dtype`."""

    def __init__(
        self, collective: str, team: Team, recipe: Recipe | None, dtype: torch.dtype
    ) -> None:
        self.collective, self.recipe, self.dtype = collective, recipe, dtype
        self.group, self.ranks = team

    def mm(self, a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        return a.mm(b) if bias is None else torch.addmm(bias, a, b)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def sum_of_rows(self, dy: Tensor) -> Tensor:
        return dy.sum(0)

    def all_gather(self, rows: Tensor) -> Tensor:
        ops = functional
        return ops.wait_tensor(ops.all_gather_into_tensor(rows, self.ranks, self.group))

    def reduce(self, collective: str, x: Tensor, op: str = "sum") -> Tensor:
        ops = functional
        if collective == "all_reduce":
            return ops.wait_tensor(ops.all_reduce(x, op, self.group))
        return ops.wait_tensor(ops.reduce_scatter_tensor(x, op, self.ranks, self.group))

    def amax(self, x: Tensor) -> Tensor:
        return run("amax", x)

    def pack(self, form: str, x: Tensor, amax: Tensor, recipe: Recipe, kind: torch.dtype) -> Any:
        return run(form, x, amax, recipe.power_of_two, recipe.traced_eps, kind)

    def pack_across(self, weight: Tensor) -> Tensor:
        if self.recipe is None or weight.dtype == self.recipe.forward:  # packed before
            return weight
        return packed(self, weight.contiguous(), self.recipe, self.recipe.forward, "across")

    def turn(self, rows: Tensor, by: Tensor | None, blocks: int) -> Tensor:
        return run("turn", rows, by, blocks)

    def packed_mm(
        self, a: Tensor, b: Tensor, blocks: int, bias: Tensor | None, fast: bool
    ) -> Tensor:
        return run("mm", a, b, blocks, bias, fast, self.dtype)


class Traced(torch.autograd.Function):
    """A layer in a graph, which quantises its weights there as well."""

    @staticmethod
    def forward(
        ctx: Any,
        collective: str,
        team: Team,
        recipe: Recipe | None,
        count: int,
        *given: Any,
    ) -> tuple[Tensor, ...]:
        """x, weights and then biases give as many outputs as there are weights.

        (TorchDynamo takes a Function whose arguments are as many as forward's names, without a
        gradient, for one without `ctx`.)
        """
        x, *tensors = given
        weights, biases = list(tensors[:count]), tensors[count:]
        for_w = any(ctx.needs_input_grad[5 : 5 + count])
        ops = TorchOperations(collective, team, recipe, x.dtype)
        rows = weights
        if recipe is not None:
            rows = [packed(ops, w.contiguous(), recipe, recipe.forward, "rows") for w in weights]
        outputs = forward(ops, x.contiguous(), rows, biases, for_w)
        kept = outputs[count] if len(outputs) > count else x.contiguous()
        ctx.facts = collective, team, recipe
        ctx.save_for_backward(kept if for_w else None, *weights)
        return tuple(outputs[:count])

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        """Gradients of x, of weights and of biases."""
        collective, team, recipe = ctx.facts
        x, *weights = ctx.saved_tensors
        ops = TorchOperations(collective, team, recipe, upstream[0].dtype)
        dys = [dy.contiguous() for dy in upstream]
        grads = backward(ops, ctx.needs_input_grad[4:], dys, x, weights)
        return None, None, None, None, *map(first_order, grads)
