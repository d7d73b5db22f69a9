"""A linear layer for each group of rows: the experts of a mixture of experts, in one call.

    experts = GroupedLinear(8, 1024, 4096, device="cuda", dtype=torch.bfloat16)
    y = experts(x, group_sizes)        # x [tokens, 1024], its rows sorted by expert

On the device nothing waits for the host: `group_sizes` stays there. Where the kernels cannot serve
(the CPU, fp32, sizes that are no multiple of 16 bytes) a loop of matmuls does, with the bits of a
loop of `torch.nn.Linear`; if `group_sizes` is on a GPU then, the host waits for it. `explain(x)`
says which it is, and why. By kernel the weight is multiplied in torch's grouped GEMM and biases are
added after rounding, so there the bits are the same from run to run, not those of cuBLAS. Under
torch.compile a layer in bf16 is that GEMM on the CPU too, in one graph with its surroundings.

The gradient of the weight can go straight into a buffer, with no temporary of its size:

    accumulator = GradAccumulator(experts.weight)     # as long as it is held; under DDP: `.grad`
    LayerWise(optimizer, model, mesh)                 # into its buckets, in fp32
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from interlace.errors import GroupError, OptionError
from interlace.nn.autograd import first_order, without_autocast
from interlace.nn.grouped import products as grouped
from interlace.nn.grouped.products import ALIGNMENT, Groups
from interlace.nn.groups import is_dtensor
from interlace.optim.grad_accumulator import GradAccumulator, accumulator_of
from interlace.torch_private import grouped_mm


class GroupedLinear(nn.Module):
    """A linear layer for each group of rows: `y[rows of g] = x[rows of g] @ weight[g].T + bias[g]`.

    Args:
        num_groups: the number of groups, such as experts.
        in_features, out_features: the sizes of each group's layer.
        bias: adds `bias` [num_groups, out_features].
        device, dtype: of the Parameters. `weight` is [num_groups, out_features, in_features]; it is
            drawn as by that many `torch.nn.Linear` one after another.

    Raises:
        GroupError: a size is below 1.
        OptionError: a `recipe` is given, as in a former release.
    """

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        recipe: None = None,  # of a former release
    ) -> None:
        if recipe is not None:
            raise OptionError(
                "GroupedLinear takes no `recipe` any more: experts are multiplied in the type of "
                "their rows. fix: leave it out"
            )
        super().__init__()
        if min(num_groups, in_features, out_features) < 1:
            raise GroupError(
                f"GroupedLinear({num_groups}, {in_features}, {out_features}): give sizes from 1 up"
            )
        self.num_groups = num_groups
        self.in_features = in_features
        self.out_features = out_features
        shape = num_groups, out_features, in_features
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = (
            nn.Parameter(torch.empty(shape[:2], device=device, dtype=dtype)) if bias else None
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws each group's weight and bias as `torch.nn.Linear` does."""
        bound = 1 / math.sqrt(self.in_features)
        for group in range(self.num_groups):
            nn.init.kaiming_uniform_(self.weight[group], a=math.sqrt(5))
            if self.bias is not None:
                nn.init.uniform_(self.bias[group], -bound, bound)

    def _accumulator(self) -> GradAccumulator | None:
        """The weight's accumulator, to whose sum backward adds."""
        return None if is_dtensor(self.weight) else accumulator_of(self.weight)

    def forward(self, x: torch.Tensor, group_sizes: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """The output [tokens, out_features], in the order of the rows of x.

        Under autocast x, weight and bias are cast to its type, and gradients are the originals'.

        Args:
            x: [tokens, in_features], sorted by group. Rows behind the last group are padding: they
                give 0, and get a gradient of 0.
            group_sizes: the rows of each group: a list, or int32 or int64 on the CPU or x's device.
                On a GPU or in a compiled graph the host does not read them: they are cut off at
                `tokens`.

        Raises:
            GroupError: x and the sizes do not fit each other or the layer.
        """
        if torch.compiler.is_compiling() and self._accumulator() is None:
            if _traceable(self, x, group_sizes):
                assert isinstance(group_sizes, torch.Tensor)
                grouped.check_sizes(group_sizes, self.num_groups, x.device)
                return grouped_linear_ops(x, self.weight, self.bias, group_sizes, torch.bfloat16)
        eager: Any = self._eager  # whose decorator has no types
        return eager(x, group_sizes)

    @torch.compiler.disable
    def _eager(self, x: torch.Tensor, group_sizes: torch.Tensor | Sequence[int]) -> torch.Tensor:
        dtype = _check(self, x)
        groups = Groups.of(
            group_sizes,
            num_groups=self.num_groups,
            tokens=x.shape[0],
            device=x.device,
            by_kernel=grouped.refuse(x, self.weight, dtype) is None,
        )
        facts = groups, dtype, self._accumulator()
        return GroupedProduct.apply(x, self.weight, self.bias, *facts)

    def explain(self, x: torch.Tensor) -> str:
        """The way that `x` would be multiplied: "by kernel", or "by loop: " and why."""
        why = grouped.refuse(x, self.weight, _check(self, x))
        return "by kernel" if why is None else f"by loop: {why}"

    def extra_repr(self) -> str:
        """The sizes."""
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}"
        )


def _check(layer: GroupedLinear, x: torch.Tensor) -> torch.dtype:
    """The type to multiply in; `GroupError` for an x that does not fit."""
    if x.dim() != 2 or x.shape[1] != layer.in_features:
        raise GroupError(
            f"x has shape {list(x.shape)}: give [tokens, {layer.in_features}], sorted by group"
        )
    if x.device != layer.weight.device:
        raise GroupError(f"x is on {x.device}, and the weight on {layer.weight.device}")
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    if x.dtype != layer.weight.dtype:
        raise GroupError(
            f"x is {x.dtype} and the weight {layer.weight.dtype}: cast one, or use autocast"
        )
    return x.dtype


def dense_rows(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor cast, row by row and at an address that kernels take; itself if it is all that. A
    single row is contiguous whatever its stride, which kernels look at all the same.
    """
    tensor = _cast(tensor, dtype).contiguous()
    odd = tensor.stride(0) != tensor.shape[1] or (tensor.is_cuda and tensor.data_ptr() % ALIGNMENT)
    return tensor.clone(memory_format=torch.contiguous_format) if odd else tensor


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor.to(dtype)`, with no call where it has that type."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


class GroupedProduct(torch.autograd.Function):
    """The product, of the original Parameters: cast copies are made here."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        groups: Groups,
        dtype: torch.dtype,
        accumulator: GradAccumulator | None,
    ) -> torch.Tensor:
        rows = dense_rows(x, dtype)
        for_x, for_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(rows if for_weight else None, weight if for_x else None)
        ctx.groups, ctx.dtype, ctx.accumulator = groups, dtype, accumulator
        ctx.x_dtype, ctx.weight_dtype = x.dtype, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        cast = None if bias is None else _cast(bias, dtype)
        with without_autocast(x.device.type):
            return grouped.multiply(rows, _cast(weight, dtype), cast, groups)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        groups: Groups = ctx.groups
        # Where a graph of the gradient is made, autograd sums: a buffer would not know of it.
        accumulator = None if torch.is_grad_enabled() else ctx.accumulator
        dx = dw = db = None
        with torch.no_grad(), without_autocast(dy.device.type):  # a backward may be under both
            dy = dense_rows(dy, ctx.dtype)
            if ctx.needs_input_grad[0]:
                dx = grouped.input_gradient(dy, _cast(weight, ctx.dtype), groups)
                dx = _cast(dx, ctx.x_dtype)
            if ctx.needs_input_grad[1]:
                into = None if accumulator is None else accumulator.destination()
                if into is not None:
                    grouped.weight_gradient(dy, rows, groups, out=into, accumulate=True)
                else:  # of dy's type first: under autocast autograd casts it to the weight's last
                    made = dy.new_empty(groups.num, dy.shape[1], rows.shape[1])
                    grouped.weight_gradient(dy, rows, groups, out=made, accumulate=False)
                    dw = _cast(made, ctx.weight_dtype)
            if ctx.needs_input_grad[2]:
                db = _cast(grouped.bias_gradient(dy, groups), ctx.bias_dtype)
        return first_order(dx), first_order(dw), first_order(db), *[None] * 3


def _traceable(layer: GroupedLinear, x: torch.Tensor, group_sizes: object) -> bool:
    """Returns true where a compiler may see torch's own grouped GEMM in place of this layer."""
    whole = ALIGNMENT // torch.bfloat16.itemsize
    return (
        isinstance(group_sizes, torch.Tensor)
        and group_sizes.device == x.device
        and layer.in_features % whole == 0
        and layer.out_features % whole == 0
        and _check(layer, x) == torch.bfloat16
    )


def grouped_linear_ops(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    group_sizes: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """`GroupedLinear` in differentiable operators of torch: padding is masked, here and in the
    gradient of x, and sizes are cut off at `tokens`, beyond which they would read and write.
    """
    ends = group_sizes.cumsum(0, dtype=torch.int32).clamp(0, x.shape[0])
    at = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
    real = (at < ends[-1]).unsqueeze(1)
    rows = torch.where(real, x.to(dtype), 0)
    y = grouped_mm(rows, weight.to(dtype).transpose(1, 2), offs=ends)
    if bias is not None:
        group = torch.searchsorted(ends, at, right=True).clamp(max=weight.shape[0] - 1)
        y = y + bias.to(dtype).index_select(0, group)
    return torch.where(real, y, 0)
