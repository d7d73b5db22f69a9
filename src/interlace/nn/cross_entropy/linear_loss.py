"""Cross-entropy of a linear layer's output, which is never held whole: chunks of rows in turn.

loss = linear_cross_entropy(hidden, head.weight, target)           # (rows, in), (classes, in)
loss = linear_cross_entropy(hidden, weight, target, group=tp)      # some classes on each rank
"""

from __future__ import annotations

from typing import Any

import torch

from interlace.errors import InputError, refuse_removed
from interlace.nn.autograd import first_order, without_autocast
from interlace.nn.cross_entropy.chunks import Chunks, Operands
from interlace.nn.cross_entropy.loss import (
    LOGITS,
    REMOVED,
    LossSetup,
    Reduction,
    facts_of,
    terms_of,
)
from interlace.nn.cross_entropy.steps import steps_for
from interlace.nn.cross_entropy.vocabulary import refuse_dtensors
from interlace.optim.untraced import eager
from interlace.torch_private import keeps_graph


@eager
def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    class_weight: torch.Tensor | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    group: Any = None,
    z_loss: float = 0.0,
    denominator: torch.Tensor | float | None = None,
    chunk_size: int | None = None,
    accumulate_dtype: torch.dtype | None = None,
    overlap: bool = True,
    **removed: object,
) -> torch.Tensor:
    """`cross_entropy(linear(hidden, weight, bias), target)` without the logits in memory.

    With "mean" and "sum" the gradients are computed in forward, chunk by chunk, which takes the
    three GEMMs that the unfused takes, and backward multiplies them by its upstream gradient, if
    that is not 1;
    with "none", backward computes the logits again (four GEMMs). Logits and their gradients are
    rounded to the type of `hidden`, as in the unfused. A target that is no class makes the loss
    NaN, and a later call raises, as in `cross_entropy`.

    Args:
        hidden: (..., in), bfloat16, float16, float32 or float64; the same on all ranks of the
            group, among which its gradient is added up (do not do so again).
        weight: (classes, in), of the same type; with `group`, this rank's classes. (Of a DTensor
            give `to_local()`; `unshard()` the module of a head that FSDP2 cut.)
        target: (...), int64 or int32.
        bias: (classes,), as the weight.
        class_weight, ignore_index, reduction, label_smoothing, group: see `cross_entropy`.
        z_loss, denominator: see `cross_entropy`.
        chunk_size: rows at a time, as many on all ranks. By default a seventh of them, at most as
            many as make 200 million logits (380 MiB in bfloat16; with a group, 4096 rows) and at
            least 256: two chunks are held with a group, one without.
        accumulate_dtype: the type in which the gradients of weight and bias are added up over
            chunks, and held until backward. By default the weight's own: a sum is rounded once a
            chunk, and becomes the gradient itself. float32 rounds once in all, and holds twice the
            memory of bfloat16 weights, beside the gradient; it is the default for float16, in
            which a sum that is not divided yet may overflow.
        overlap: with a group, let a chunk's collectives run under the next one's GEMM. The result
            is the same bits with and without.

    Returns:
        The loss in float32 (float64 for float64): a scalar, or (...) for "none".

    Raises:
        TargetError, InputError, AgreementError: as `cross_entropy`.
    """
    refuse_removed("linear_cross_entropy", removed, REMOVED)
    refuse_dtensors(hidden=hidden, weight=weight, target=target, bias=bias)
    refuse_dtensors(class_weight=class_weight, denominator=denominator)
    if torch.is_autocast_enabled(hidden.device.type) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(hidden.device.type)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    check_operands(hidden, weight, target, bias, class_weight)
    terms = terms_of(target, ignore_index, reduction, label_smoothing, z_loss, denominator)
    if chunk_size is not None and chunk_size < 1:
        raise InputError(f"chunk_size is {chunk_size}: take a positive number of rows")
    if not torch.is_grad_enabled():  # `needs_input_grad` asks only the tensors themselves
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    facts = facts_of(
        hidden, target, class_weight, terms, reduction,
        **{"chunk_size": chunk_size or 0, "overlap": overlap,
           "requires_grad of hidden": hidden.requires_grad},
    )  # fmt: skip
    setup = LossSetup.of(hidden.device, weight.shape[0], terms, group, facts)
    rows = hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1])
    chunks = Chunks(
        target=target.reshape(-1).contiguous(),
        class_weight=class_weight,
        setup=setup,
        size=chunk_size or default_size(rows.shape[0], setup.shards.each),
        accumulate_dtype=accumulate_dtype or WIDER.get(weight.dtype, weight.dtype),
        overlap=overlap,
    )
    with without_autocast(hidden.device.type):
        loss = LinearCrossEntropy.apply(rows, weight, bias, chunks, reduction, denominator)
    return loss.view(target.shape) if reduction == "none" else loss


WIDER = {torch.float16: torch.float32}
"""Where sums over rows, of gradients that backward has yet to scale, need a wider range."""

AT_ONCE = 200_000_000
"""Logits of a chunk, at most: 380 MiB in bfloat16."""


def default_size(rows: int, classes: int) -> int:
    """Rows a chunk: few enough that it is small, and so many that its GEMMs are efficient."""
    most = max(128, AT_ONCE // max(classes, 1) // 128 * 128)
    return min(most, max(256, rows // 7 // 128 * 128))


class LinearCrossEntropy(torch.autograd.Function):
    """Gradients in forward where a scalar scales them later; in backward where rows do."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        chunks: Chunks,
        reduction: str,
        denominator: torch.Tensor | float | None,
    ) -> torch.Tensor:
        operands, wanted = Operands(hidden, weight, bias), ctx.needs_input_grad[:3]
        rowwise = reduction == "none"
        grads = early = None
        if any(wanted) and not rowwise:
            grads = operands.grads(wanted, chunks.accumulate_dtype)
            early = chunks.divisor(hidden, reduction, denominator)
        loss, kept = chunks.forward(operands, grads, early)
        ctx.each_row = rowwise
        if rowwise:
            ctx.chunks = chunks
            target, class_weight = chunks.target, chunks.class_weight
            ctx.save_for_backward(hidden, weight, bias, target, class_weight, kept)
            return loss
        mean = reduction == "mean"
        weighted = chunks.class_weight is not None
        loss, divisor = steps_for(hidden).total(loss, kept, weighted, mean, denominator)
        if grads is not None:
            ctx.dtype, ctx.grads = hidden.dtype, grads
            ctx.counts = denominator is None
            ctx.save_for_backward(divisor if early is None else None)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            found = each_row(ctx, upstream) if ctx.each_row else scaled_by(ctx, upstream)
        return (*(first_order(grad) for grad in found), None, None, None)


def each_row(ctx: Any, upstream: torch.Tensor) -> list[torch.Tensor | None]:
    """The gradients by the upstream gradient of each row: all is computed here."""
    hidden, weight, bias, *_, kept = ctx.saved_tensors  # checks what was written to since
    operands = Operands(hidden, weight, bias)
    grads = operands.grads(ctx.needs_input_grad[:3], ctx.chunks.accumulate_dtype)
    ctx.chunks.backward(operands, kept, upstream.contiguous(), grads)
    return [None if grad is None else grad.to(hidden.dtype) for grad in grads]


def scaled_by(ctx: Any, upstream: torch.Tensor) -> list[torch.Tensor | None]:
    """The gradients that forward computed, by one upstream gradient; in place in the last backward,
    so that autograd need not copy them into `.grad`.
    """
    (divisor,) = ctx.saved_tensors
    found, last = ctx.grads, not keeps_graph()
    if last:
        ctx.grads = None
    scale = upstream
    if divisor is not None:
        scale = scale / divisor
        if ctx.counts:
            scale = scale.masked_fill(divisor == 0, 0.0)  # no row counts: 0, not 0 / 0
    results: list[torch.Tensor | None] = []
    here: list[torch.Tensor] = []  # scaled in place
    for grad in found:
        if grad is not None and last and grad.dtype == ctx.dtype:
            here.append(grad)
        elif grad is not None:
            result = torch.empty_like(grad, dtype=ctx.dtype)
            grad = torch.mul(grad, scale.view(1), out=result)  # of one dimension: it promotes
        results.append(grad)
    if here:
        steps_for(here[0]).scale(here, scale)
    return results


def check_operands(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None,
    class_weight: torch.Tensor | None,
) -> None:
    """Raises `InputError` where these do not fit together."""
    if hidden.dtype not in LOGITS or weight.dtype != hidden.dtype:
        raise InputError(
            f"hidden is {hidden.dtype} and weight {weight.dtype}: take one type of {LOGITS}"
        )
    if not hidden.dim() or weight.dim() != 2 or hidden.shape[-1] != weight.shape[1]:
        raise InputError(
            f"hidden is {tuple(hidden.shape)} and weight {tuple(weight.shape)}: for hidden "
            "(..., in) the weight is (classes, in)"
        )
    if hidden.shape[:-1] != target.shape:
        raise InputError(
            f"hidden is {tuple(hidden.shape)} and targets {tuple(target.shape)}: for hidden "
            "(..., in) targets are (...)"
        )
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
        raise InputError(f"bias is {bias.dtype} {tuple(bias.shape)}: it takes one for each class")
    if class_weight is not None and class_weight.shape != weight.shape[:1]:
        raise InputError(
            f"class_weight is {tuple(class_weight.shape)}: there are {weight.shape[0]} classes here"
        )
    if class_weight is not None and class_weight.requires_grad:
        raise InputError("no gradient flows to class weights: detach them")
    for name, tensor in (("weight", weight), ("target", target), ("bias", bias),
                         ("class_weight", class_weight)):  # fmt: skip
        if tensor is not None and tensor.device != hidden.device:
            raise InputError(f"{name} is on {tensor.device} and hidden on {hidden.device}")
