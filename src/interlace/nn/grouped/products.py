"""The products of a grouped linear layer: rows sorted by group, a weight for each group.

    groups = Groups.of([3, 0, 5], num_groups=3, tokens=9, device=x.device, by_kernel=False)
    y = multiply(x, weight, bias, groups)            # [9, out]; row 8 is padding: 0

Two ways, chosen by `refuse`, which says why the first one cannot serve:

by kernel   torch's grouped GEMM for the rows, our kernels (grouped/kernel.py) for the rest. The
            sizes stay on the device: the host waits for nothing.
by loop     a matmul for each group, for the CPU, fp32 and odd sizes: the bits of a loop of
            `torch.nn.Linear`. The host needs the sizes, and waits for them if they are on a GPU.

The loop is the kernels' reference. A gradient is rounded once to the type of its buffer, then added
there: as autograd does for a buffer of the parameter's own type; beside 16-bit operands an fp32
buffer gets the fp32 product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from interlace.errors import GroupError
from interlace.kernels.gemm.support import ALIGNMENT, LIMIT, refuse_device
from interlace.torch_private import grouped_mm

TILE = {"BM": 128, "BN": 256, "BK": 64, "GROUP_M": 8}
SUMS = {"BK": 32, "BN": 128}
ROWS = {"BK": 16, "BN": 256}
_refuse_device = cache(refuse_device)


def refuse(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot serve `x` [tokens, in] and `weight` [groups, out, in] cast to `dtype`;
    None if they can.
    """
    _, rows, columns = weight.shape
    if x.device.type != "cuda":
        return refuse_device(x.device)
    if dtype != torch.bfloat16:
        return f"elements are {dtype}: the grouped GEMM multiplies bfloat16"
    for name, size in (("in_features", columns), ("out_features", rows)):
        if size * dtype.itemsize % ALIGNMENT:
            return f"{name} is {size}: rows must be multiples of {ALIGNMENT} bytes"
    if not weight.is_contiguous() or weight.data_ptr() % ALIGNMENT:
        return f"the weight has strides {weight.stride()}, or begins at an odd address"
    if min(x.shape[0], rows, columns) < 1 or max(x.shape[0], rows, columns) >= LIMIT:
        return f"{x.shape[0]} rows of {columns} to {rows} features are none, or too many"
    return _refuse_device(x.device, newer=True)


@dataclass(frozen=True, slots=True)
class Groups:
    """Which rows belong to which group; rows behind the last one are padding."""

    num: int
    tokens: int
    sizes: tuple[int, ...] | None
    """On the host, for the loop."""
    ends: torch.Tensor | None
    """The row behind each group, int32 on the device, for the kernels."""
    padded: bool
    """True where there may be padding."""

    @classmethod
    def of(
        cls,
        group_sizes: torch.Tensor | Sequence[int],
        *,
        num_groups: int,
        tokens: int,
        device: torch.device,
        by_kernel: bool,
    ) -> Groups:
        """Checks the sizes as far as the host sees them: `GroupError` for what does not fit."""
        if isinstance(group_sizes, torch.Tensor):
            check_sizes(group_sizes, num_groups, device)
            if by_kernel and group_sizes.device.type != "cpu":
                from interlace.nn.grouped.launch import group_ends

                return cls(num_groups, tokens, None, group_ends(group_sizes, tokens), padded=True)
            waits = group_sizes.device.type != "cpu"  # for nothing, if there are no rows
            group_sizes = [0] * num_groups if waits and not tokens else group_sizes.tolist()
        sizes = tuple(group_sizes)
        if len(sizes) != num_groups:
            raise GroupError(f"{len(sizes)} group sizes for {num_groups} groups: give one for each")
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in sizes):
            raise GroupError(f"group sizes {list(sizes)}: give whole numbers from 0 up")
        total = sum(sizes)
        if total > tokens:
            raise GroupError(
                f"group sizes {list(sizes)} ask for {total} rows, and there are {tokens}"
            )
        ends = None
        if by_kernel:
            host = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32)
            ends = host.pin_memory().to(device, non_blocking=True)
        return cls(num_groups, tokens, sizes, ends, padded=total < tokens)

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """Number, first row and the row behind the last, of each group that is not empty."""
        assert self.sizes is not None
        start = 0
        for group, size in enumerate(self.sizes):
            if size:
                yield group, start, start + size
            start += size

    @property
    def total(self) -> int:
        """Rows that belong to a group."""
        return sum(self.sizes or ())


def check_sizes(sizes: torch.Tensor, num_groups: int, device: torch.device) -> None:
    """`GroupError` for a tensor of sizes that is none, as far as can be seen from outside."""
    if sizes.dtype not in (torch.int32, torch.int64) or tuple(sizes.shape) != (num_groups,):
        raise GroupError(
            f"group_sizes is {sizes.dtype} of shape {list(sizes.shape)}: give int32 or int64 "
            f"of shape [{num_groups}]"
        )
    if sizes.device.type != "cpu" and sizes.device != device:
        raise GroupError(
            f"group_sizes is on {sizes.device} and the rows are on {device}: move it there, or "
            "to the CPU"
        )


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: Groups
) -> torch.Tensor:
    """`y[rows of g] = x[rows of g] @ weight[g].T + bias[g]`, and 0 in padding.

    x [tokens, in], weight [groups, out, in] and bias [groups, out] of one type, which y has too.
    By kernel the product is rounded before the bias is added; by loop as in `nn.functional.linear`.
    """
    if groups.ends is not None:
        y = grouped_mm(x, weight.transpose(1, 2), offs=groups.ends)
        return finish(y, bias, groups)
    y = x.new_empty(groups.tokens, weight.shape[1])
    for group, start, end in groups.spans():
        part = y[start:end]
        if bias is None:
            torch.mm(x[start:end], weight[group].t(), out=part)
        else:
            torch.addmm(bias[group], x[start:end], weight[group].t(), out=part)
    y[groups.total :].zero_()
    return y


def input_gradient(dy: torch.Tensor, weight: torch.Tensor, groups: Groups) -> torch.Tensor:
    """`dx[rows of g] = dy[rows of g] @ weight[g]`, and 0 in padding."""
    if groups.ends is not None:
        return finish(grouped_mm(dy, weight, offs=groups.ends), None, groups)
    dx = dy.new_empty(groups.tokens, weight.shape[2])
    for group, start, end in groups.spans():
        torch.mm(dy[start:end], weight[group], out=dx[start:end])
    dx[groups.total :].zero_()
    return dx


def weight_gradient(
    dy: torch.Tensor, x: torch.Tensor, groups: Groups, *, out: torch.Tensor, accumulate: bool
) -> torch.Tensor:
    """`out[g] (+)= dy[rows of g].T @ x[rows of g]`, rounded to `out`'s type before it is added.

    dy [tokens, out] and x [tokens, in], both contiguous; out [groups, out, in]. An empty group
    gives zeros, or adds nothing. No temporary is larger than one group's gradient; by kernel there
    is none, but where `out` is not contiguous.
    """
    if groups.ends is not None:
        from interlace.nn.grouped.launch import weight_gradient as launch

        if out.is_contiguous():
            launch(dy, x, groups.ends, out, accumulate)
        else:
            made = torch.empty(out.shape, dtype=out.dtype, device=out.device)
            launch(dy, x, groups.ends, made, False)
            out.add_(made) if accumulate else out.copy_(made)
        return out
    wide = torch.promote_types(dy.dtype, out.dtype)
    if not accumulate:
        out.zero_()
    for group, start, end in groups.spans():
        made = torch.mm(dy[start:end].to(wide).t(), x[start:end].to(wide))
        if accumulate:
            out[group] += made.to(out.dtype)
        else:
            out[group] = made
    return out


def bias_gradient(dy: torch.Tensor, groups: Groups) -> torch.Tensor:
    """`out[g] = dy[rows of g].sum(0)`, of dy's type, [groups, out]."""
    out = dy.new_zeros(groups.num, dy.shape[1])
    if groups.ends is not None:
        from interlace.nn.grouped.launch import row_sums

        row_sums(dy, groups.ends, out)
        return out
    for group, start, end in groups.spans():
        torch.sum(dy[start:end], 0, out=out[group])
    return out


def finish(y: torch.Tensor, bias: torch.Tensor | None, groups: Groups) -> torch.Tensor:
    """Adds the biases and clears the padding, where there is any: torch leaves it as it was."""
    if bias is not None or groups.padded:
        from interlace.nn.grouped.launch import finish_rows

        assert groups.ends is not None
        finish_rows(y, None if bias is None else bias.contiguous(), groups.ends)
    return y
