"""Linear layers over a group: the communication of their rows runs under the matmuls.

Backward communicates anew: only this rank's own x is saved, and never memory of a communication.
Every call is collective, and so is its backward. The first one for a class of row counts prepares a
Program (see `interlace.Executor`), later ones run it.

Note [Casts stay outside]: inputs are cast for autocast by operators of torch before the Function,
so autograd casts the gradients back; the Programs hold one dtype, and run without autocast.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from interlace.errors import InputError
from interlace.float8.data import ALIGNMENT
from interlace.float8.linear import linear as float8_linear
from interlace.float8.recipe import Recipe
from interlace.frontend.backend import options_from
from interlace.nn.groups import GroupLike, group_of
from interlace.nn.parallel.sharded import Communication, applied
from interlace.nn.parallel.traced import graph_or_eager
from interlace.optim.grad_accumulator import GradAccumulator, accumulator_of
from interlace.options import Options

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
Given = Options | Mapping[str, Any] | None
"""Options as a caller gives them."""


@graph_or_eager
def all_gather_linear(
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    biases: Tensor | Sequence[Tensor | None] | None = None,
    *,
    group: GroupLike,
    dim: int = 0,
    options: Given = None,
    recipe: Recipe | None = None,
) -> Any:
    """Gathers rows under matmuls: `F.linear(all_gather(x), weight, bias)`, for one or more weights.

    Backward gathers x anew for the gradients of weights, and scatters that of x, summed over the
    ranks. A Parameter that has a `GradAccumulator` gets its gradient there. Floating tensors are of
    one dtype, or cast alike by autocast. Every rank of the group calls it.

    Args:
        x: [..., K], this rank's part of the rows. All ranks have equal parts; those of the result
            are in the order of the group's ranks.
        weights: this rank's rows [N, K] of a weight, or a sequence of such: that gives a tuple.
        biases: this rank's part [N] of the bias of each weight, None where it has none.
        group: a process group of this rank, or a DeviceMesh of one dimension.
        dim: the dimension of x that is gathered: any but the last. Unless it is the first, x is
            copied, and the output is a view that is not contiguous.
        options: `interlace.Options`, or a mapping of them; `overlap=False` runs the serial Program.
        recipe: multiplies in FP8, and x travels in FP8 (docs/how-to/fp8.md). K, N are multiples
            of 16; x is saved in FP8 too.

    Returns:
        [..., N] with the rows of all ranks, or a tuple of these.

    Raises:
        InputError: names the argument that does not fit the others.
        OptionError: an option is invalid.

    Examples:
        >>> x, w = torch.randn(16, 32), torch.randn(64, 32)  # 16 of 32 rows, 64 of 128 columns
        >>> all_gather_linear(x, w, group=mesh).shape
        torch.Size([32, 64])
    """
    return _columns("all_gather", x, weights, biases, group, dim, options, recipe)


@graph_or_eager
def replicated_linear(
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    biases: Tensor | Sequence[Tensor | None] | None = None,
    *,
    group: GroupLike,
    options: Given = None,
    recipe: Recipe | None = None,
) -> Any:
    """Computes `F.linear(x, weight, bias)`, for one or more weights, of an x that ranks have alike.

    Forward communicates nothing. Backward sums the gradients of x that the weights give, and
    all-reduces that sum once, under the gradients of the weights.

    Args:
        x: [..., K], the same on all ranks.
        weights, biases, group, options, recipe: as in `all_gather_linear`.

    Returns:
        [..., N], or a tuple of these.

    Raises:
        InputError, OptionError: as `all_gather_linear`.
    """
    return _columns("copy", x, weights, biases, group, None, options, recipe)


@graph_or_eager
def linear_reduce_scatter(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: GroupLike,
    dim: int = 0,
    options: Given = None,
    recipe: Recipe | None = None,
) -> Tensor:
    """Sums over the ranks under matmuls: `reduce_scatter(F.linear(x, weight)) + bias`.

    Backward gathers the upstream gradient for all that needs it; that of the bias is of all rows,
    and the same on all ranks.

    Args:
        x: [..., K], all rows, of this rank's columns. The size of `dim` is a multiple of the size
            of the group.
        weight: this rank's columns [N, K] of a weight.
        bias: [N], the same on all ranks.
        group, dim, options: as in `all_gather_linear`; `dim` is scattered.
        recipe: as there. The sums are of the dtype of x; the upstream gradient travels in FP8.

    Returns:
        [..., N] with this rank's part of the rows.

    Raises:
        InputError, OptionError: as `all_gather_linear`.
    """
    return _layers("reduce_scatter", x, [weight], [bias], group, dim, options, recipe)[0]


@graph_or_eager
def linear_all_reduce(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: GroupLike,
    options: Given = None,
    recipe: Recipe | None = None,
) -> Tensor:
    """Sums over the ranks under matmuls: `all_reduce(F.linear(x, weight)) + bias`.

    The upstream gradient is the same on all ranks, and backward communicates nothing.

    Args:
        x: [..., K], all rows, of this rank's columns.
        weight: this rank's columns [N, K] of a weight.
        bias: [N], the same on all ranks.
        group, options, recipe: as in `all_gather_linear`. The sums are of the dtype of x.

    Returns:
        [..., N] with all rows.

    Raises:
        InputError, OptionError: as `all_gather_linear`.
    """
    return _layers("all_reduce", x, [weight], [bias], group, None, options, recipe)[0]


def _columns(
    collective: str,
    x: Tensor,
    weights: Tensor | Sequence[Tensor],
    biases: Tensor | Sequence[Tensor | None] | None,
    group: GroupLike,
    dim: int | None,
    options: Given,
    recipe: Recipe | None,
) -> Any:
    """Layers of which each rank has rows of the weights, and so columns of the output."""
    many = not isinstance(weights, Tensor)
    each: Any = weights if many else [weights]
    bias: Any = [None] * len(each) if biases is None else biases if many else [biases]
    made = _layers(collective, x, each, bias, group, dim, options, recipe)
    return tuple(made) if many else made[0]


def _layers(
    collective: str,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    group: GroupLike,
    dim: int | None,
    options: Given,
    recipe: Recipe | None,
) -> list[Tensor]:
    """The outputs of all weights; `dim` is None where rows stay where they are."""
    via = _communication(collective, group, options, recipe, weights)
    dim = 0 if dim is None else _rows_dim(x, dim)
    x, tensors, accumulators = _checked(x, weights, biases, recipe)
    if via is None:
        pairs = zip(tensors[: len(weights)], tensors[len(weights) :], strict=True)
        return [_alone(x, weight, bias, recipe) for weight, bias in pairs]
    (rows, shape), ranks = _rows(x, dim), via.size
    first = shape[0]
    if collective == "all_gather":
        first *= ranks
    elif collective == "reduce_scatter":
        if first % ranks:
            raise InputError(
                f"`x` has size {first} in dimension {dim}, which {ranks} ranks cannot share "
                f"evenly: give a multiple of {ranks}, padded where need be"
            )
        first //= ranks
    return [_shaped(y, first, shape, dim) for y in applied(via, accumulators, [rows, *tensors])]


def _communication(
    collective: str,
    group: GroupLike,
    options: Given,
    recipe: Recipe | None,
    weights: Sequence[Tensor],
) -> Communication | None:
    """The communication of a call; None where one rank has all."""
    in_graph = torch.compiler.is_compiling()  # Note [In our own graphs] in traced.py
    chosen = DEFAULT if in_graph else _options(options)
    if group is None:
        raise InputError("`group` is None: give a process group or a mesh of one dimension")
    if not isinstance(recipe, Recipe | None):
        raise InputError(f"`recipe` is {recipe!r}: give an interlace.float8.Recipe, or None")
    found = group_of(group)
    if found is None:
        return None
    first = None if in_graph or not weights else weights[0]
    return Communication(collective, found, chosen, recipe, first)


def _alone(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe | None) -> Tensor:
    """The layer where one rank has all."""
    return linear(x, weight, bias) if recipe is None else float8_linear(x, weight, bias, recipe)


DEFAULT = Options()


def _options(given: Given) -> Options:
    """The options of a call; a mapping of the same items is read once."""
    if given is None:
        return DEFAULT
    if not isinstance(given, Mapping):
        return options_from(given)
    try:
        return _read(tuple([(name, type(value), value) for name, value in given.items()]))
    except TypeError:  # a value that cannot be a key is none that an option takes
        return options_from(given)


@functools.lru_cache
def _read(items: tuple[tuple[str, type, object], ...]) -> Options:
    return options_from({name: value for name, _, value in items})


def _rows_dim(x: Tensor, dim: int) -> int:
    """The dimension of the rows, from 0 up."""
    if not -x.dim() <= dim < x.dim() - 1 or dim == -1:
        raise InputError(
            f"`dim` is {dim}, and `x` has shape {list(x.shape)}: give a dimension of x that is not "
            "the last, which holds the features"
        )
    return dim % x.dim()


def _rows(x: Tensor, dim: int) -> tuple[Tensor, torch.Size]:
    """x [..., K] as rows, those of `dim` the slowest; and its shape, with `dim` first. What has two
    dimensions is left alone: each view takes the host a microsecond or more.
    """
    if x.dim() != 2:
        moved = x.movedim(dim, 0)
        return moved.reshape(math.prod(moved.shape[:-1]), x.shape[-1]), moved.shape
    return x, x.shape


def _shaped(y: Tensor, first: int, shape: torch.Size, dim: int) -> Tensor:
    """Rows back in such a shape, of so many in its first dimension, which is moved to `dim`."""
    if len(shape) == 2:
        return y
    whole = y.view(*((first, *shape[1:-1]) if len(shape) > 1 else ()), y.shape[1])
    return whole.movedim(0, dim) if dim else whole


def _checked(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    recipe: Recipe | None,
) -> tuple[Tensor, list[Any], tuple[GradAccumulator | None, ...]]:
    """x; weights and then biases, cast as autocast wants it; the weights' accumulators."""
    if not weights or len(biases) != len(weights):
        raise InputError(
            f"`weights` are {len(weights)}, and `biases` {len(biases)}: give as many, >= 1"
        )
    kind = x.device.type
    target = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    tensors: list[Any] = [*weights, *biases]
    facts = [t if t is None else (type(t), t.shape, t.dtype, t.device) for t in [x, *tensors]]
    check = _check.__wrapped__ if torch.compiler.is_compiling() else _check
    check(len(weights), target, recipe is not None, *facts)
    if target is not None:
        x = x.to(_cast(x.dtype, target))
        tensors = [t if t is None else t.to(_cast(t.dtype, target)) for t in tensors]
    return x, tensors, tuple([accumulator_of(weight) for weight in weights])


Facts = tuple[type[Tensor], torch.Size, torch.dtype, torch.device]


@functools.lru_cache(1024)
def _check(
    count: int, target: torch.dtype | None, float8: bool, x: Facts, *tensors: Facts | None
) -> None:
    """Raises InputError for weights and biases that do not fit x, or each other; once a set."""
    names = ["weight", "bias"]
    if count > 1:
        names = [f"{kind}[{i}]" for kind in ("weights", "biases") for i in range(count)]
    sharded, x_shape, dtype, device = hasattr(x[0], "device_mesh"), x[1], _cast(x[2], target), x[3]
    if sharded or dtype not in DTYPES:
        what = "a DTensor: give its local part, to_local()" if sharded else x[2]
        raise InputError(f"`x` is {what}; floating types of 16 bits and more are taken")
    for i, (name, facts) in enumerate(zip(names, tensors, strict=True)):
        if facts is None:
            continue
        form, shape, own, place = facts
        if hasattr(form, "device_mesh"):
            raise InputError(f"`{name}` is a DTensor: give its local part, to_local()")
        weight = tensors[i % count]
        assert weight is not None
        wanted = [*weight[1][:1], *([x_shape[-1]] if i < count else [])]
        if list(shape) != wanted or len(wanted) != 1 + (i < count) or not wanted[0]:
            told = f"[N, {wanted[-1]}], N > 0" if i < count else f"{wanted}, for its weight's rows"
            raise InputError(f"`{name}` has shape {list(shape)}: give {told}")
        if float8 and any(size % ALIGNMENT for size in shape):
            raise InputError(
                f"`{name}` has shape {list(shape)}: FP8's GEMM takes multiples of "
                f"{ALIGNMENT}; pad it, or leave `recipe` out"
            )
        if place != device:
            raise InputError(f"`{name}` is on {place}, and `x` on {device}")
        if _cast(own, target) != dtype:
            raise InputError(
                f"`{name}` is {_cast(own, target)}, and `x` {dtype}: cast one, or use autocast"
            )


def _cast(dtype: torch.dtype, target: torch.dtype | None) -> torch.dtype:
    """The dtype that F.linear casts to under autocast, which leaves float64 and integers alone."""
    if target is None or dtype == torch.float64 or not dtype.is_floating_point:
        return dtype
    return target
