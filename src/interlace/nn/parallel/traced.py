"""Linear layers over a group in a graph that torch.compile traces: operators and collectives.

    outputs = traced("all_gather", group, recipe, 1, [x, w, b])    # x [rows, K]

Note [In our own graphs]: where `backend="interlace"` or `interlace.compile` traces, a layer is no
Program of its own. Its collectives and matmuls stand in the graph, and are sites there beside all
others. The operators are those of the layer's serial Programs (text.py). The layer's options do not
apply: the backend's do. Another backend would run the collectives one after another; for it, the
layer breaks the graph and overlaps as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from interlace.float8.operators import run
from interlace.float8.recipe import Recipe
from interlace.frontend.backend import compiles_here
from interlace.nn.autograd import first_order

P = ParamSpec("P")
T = TypeVar("T")
Team = tuple[str, int]
"""A process group's name and size."""
Tensors = Sequence[Any]


def graph_or_eager(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which breaks the graph of every backend but ours."""
    disabled: Any = torch.compiler.disable(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
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
    tensors: Tensors,
) -> tuple[Tensor, ...]:
    """The outputs [rows, N] of x [rows, K], of `count` weights, and of as many biases."""
    return Traced.apply(collective, (group.group_name, group.size()), recipe, count, *tensors)


class Traced(torch.autograd.Function):
    """What `Sharded` computes, in a graph; see text.py for what is saved and quantised."""

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
        gathers, sums = collective == "all_gather", collective.endswith(("_scatter", "_reduce"))
        packs = recipe is not None and recipe.scaling == "tensor"
        for_w = any(ctx.needs_input_grad[5 : 5 + count])
        rows = saved = x.contiguous()
        if recipe is not None:
            form = "pair" if packs and for_w and not gathers else "rows"
            made = _packed(rows, recipe, recipe.forward, form, team if gathers else None)
            rows = made[0] if form == "pair" else made
            if packs:
                saved = made[-1] if form == "pair" else made
        if gathers:
            rows = _gathered(rows, team)
        outputs: list[Tensor] = []
        weights = list(tensors[:count])
        keeps = recipe is not None and bool(recipe.keep_transposes) and ctx.needs_input_grad[4]
        for i, (w, bias) in enumerate(zip(tensors[:count], tensors[count:], strict=True)):
            within = None if sums else bias
            if recipe is not None:
                made = _packed(w, recipe, recipe.forward, "pair" if keeps else "rows")
                w8, weights[i] = made if keeps else (made, w)
                blocks = team[1] if gathers else 1
                y = run("mm", rows, w8.t(), blocks if packs else 0, within, True, x.dtype)
            else:
                y = rows.mm(w.t()) if within is None else torch.addmm(within, rows, w.t())
            if sums:
                y = _summed(y, collective, team)
                y = y if bias is None else y + bias
            outputs.append(y)
        ctx.facts = collective, team, recipe, packs, keeps
        ctx.save_for_backward(saved if for_w else None, *weights)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        """Gradients of x, of weights and of biases."""
        collective, team, recipe, packs, keeps = ctx.facts
        x, *weights = ctx.saved_tensors
        for_x, *rest = ctx.needs_input_grad[4:]
        for_w, for_b = rest[: len(weights)], rest[len(weights) :]
        dys, kind = [dy.contiguous() for dy in upstream], upstream[0].dtype
        if collective == "reduce_scatter" and not packs:
            dys = [_gathered(dys[0], team)]
        dbs = [dy.sum(0) if b else None for dy, b in zip(dys, for_b, strict=True)]
        if collective == "reduce_scatter" and packs and for_b[0]:
            dbs = [_summed(dbs[0], "all_reduce", team)]
        rows, lefts, right = dys, [dy.t() for dy in dys], x
        if packs:
            rows, lefts, right = _transposes(collective, team, recipe, dys, x)
        elif recipe is not None and for_x:
            rows = [_packed(dy, recipe, recipe.gradient, "rows") for dy in dys]
        if collective == "all_gather" and x is not None and not packs:
            right = _gathered(x, team)
        dx = None
        for dy, w in zip(rows, weights, strict=True):
            if for_x and recipe is not None:
                across = w if keeps else _packed(w, recipe, recipe.forward, "across")
                blocks = team[1] if collective == "reduce_scatter" else 1
                part = run("mm", dy, across.t(), blocks if packs else 0, None, False, kind)
                dx = part if dx is None else dx + part
            elif for_x:
                part = dy.mm(w)
                dx = part if dx is None else dx + part
        if for_x and collective in _BACK:
            dx = _summed(dx, _BACK[collective], team)
        dws: list[Tensor | None] = [None] * len(weights)
        for i, left in enumerate(lefts):
            if for_w[i] and packs:
                dws[i] = run("mm", left, right.t(), 1, None, False, kind)
            elif for_w[i]:
                dws[i] = left.mm(right)
        return None, None, None, None, *map(first_order, (dx, *dws, *dbs))


_BACK = {"all_gather": "reduce_scatter", "copy": "all_reduce"}
"""How the gradient of x is summed over the ranks."""


def _transposes(
    collective: str, team: Team, recipe: Recipe, dys: list[Tensor], x: Tensor | None
) -> tuple[Tensors, Tensors, Any]:
    """dys as packed rows; and transposes, of them and of x, where gradients of weights are wanted.

    See Note [One scale for a sum over shards] in float8/quantization.py.
    """
    kind, size = recipe.gradient, team[1]
    if collective == "all_gather":
        rows = [_packed(dy, recipe, kind, "rows") for dy in dys]
        if x is None:
            return rows, [], None
        full = _gathered(x, team)
        return rows, [run("turn", dy, full, size) for dy in rows], run("turn", full, None, 0)
    if collective == "reduce_scatter":
        rows = [_gathered(_packed(dys[0], recipe, kind, "rows", team), team)]
        return rows, [] if x is None else [run("turn", rows[0], None, size)], x
    if x is None:
        return [_packed(dy, recipe, kind, "rows") for dy in dys], [], None
    pairs = [_packed(dy, recipe, kind, "pair") for dy in dys]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs], x


def _packed(
    x: Tensor, recipe: Recipe, kind: torch.dtype, form: str, team: Team | None = None
) -> Any:
    """`rows`, `across` or a `pair` of a matrix whose maximum a team may share."""
    x, amax = x.contiguous(), None
    if recipe.scaling == "tensor":
        amax = run("amax", x)
        if team is not None and recipe.scale == "team":
            amax = _summed(amax, "all_reduce", team, "max")
    return run(form, x, amax, recipe.power_of_two, recipe.traced_eps, kind)


def _gathered(x: Tensor, team: Team) -> Tensor:
    name, size = team
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(x, size, name))


def _summed(x: Any, collective: str, team: Team, op: str = "sum") -> Tensor:
    name, size = team
    ops = torch.ops._c10d_functional
    if collective == "all_reduce":
        return ops.wait_tensor(ops.all_reduce(x, op, name))
    return ops.wait_tensor(ops.reduce_scatter_tensor(x, op, size, name))
