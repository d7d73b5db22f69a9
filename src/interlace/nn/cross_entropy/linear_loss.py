"""Cross-entropy of a linear layer's output, which is never held whole: chunks of rows in turn.

loss = linear_cross_entropy(hidden, head.weight, target)           # (rows, in), (classes, in)
loss = linear_cross_entropy(hidden, weight, target, group=tp)      # some classes on each rank

Note [Under the next GEMM]: with a group, two chunks are under way. The next one's logits are
multiplied out before this one's stats, which the ranks gather meanwhile, are awaited; and a chunk's
gradient of `hidden` is added up over the ranks while its weight gradient and the next chunk are
computed. All ranks make the same calls in the same order, and each chunk's arithmetic is the same
whether anything overlaps or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from interlace.errors import InputError, refuse_removed
from interlace.nn.autograd import first_order, without_autocast
from interlace.nn.cross_entropy.loss import LOGITS, REMOVED, LossSetup, facts_of, terms_of
from interlace.nn.cross_entropy.steps import Problem, steps_for
from interlace.nn.cross_entropy.vocabulary import (
    Waiting,
    done,
    refuse_dtensors,
    start_gather,
    start_sum,
)
from interlace.nn.groups import GroupLike
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
    reduction: Literal["mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
    group: GroupLike = None,
    z_loss: float = 0.0,
    softcap: float | None = None,
    denominator: torch.Tensor | float | None = None,
    check_targets: bool = False,
    chunk_size: int | None = None,
    accumulate_dtype: torch.dtype | None = None,
    overlap: bool = True,
    **removed: object,
) -> torch.Tensor:
    """`cross_entropy(linear(hidden, weight, bias), target)` without the logits in memory.

    The gradients are computed in forward, chunk by chunk, which takes the three GEMMs that the
    unfused takes, and backward multiplies them by its upstream gradient, if that is not 1. Logits
    and their gradients are rounded to the type of `hidden`, as in the unfused. A target that is no
    class makes the loss NaN, and a later call raises, as in `cross_entropy`.

    Args:
        hidden: (..., in), bfloat16, float16, float32 or float64; the same on all ranks of the
            group, among which its gradient is added up (do not do so again).
        weight: (classes, in), of the same type; with `group`, this rank's classes. (Of a DTensor
            give `to_local()`; `unshard()` the module of a head that FSDP2 cut.)
        target: (...), int64 or int32.
        bias: (classes,), as the weight.
        class_weight, ignore_index, label_smoothing, group: see `cross_entropy`.
        reduction: "mean" or "sum", as in `cross_entropy`.
        z_loss, softcap, denominator, check_targets: see `cross_entropy`.
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
        The loss in float32 (float64 for float64), a scalar.

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
    terms = terms_of(target, ignore_index, reduction, label_smoothing, z_loss, softcap, denominator)
    if reduction == "none":
        raise InputError(
            "reduction is 'none': a loss of chunks is one number, 'mean' or 'sum'. fix: "
            "cross_entropy(linear(hidden, weight, bias), target, reduction='none')"
        )
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
    setup = LossSetup.of(target, hidden.device, weight.shape[0], terms, group, facts, check_targets)
    rows = hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1])
    chunks = Chunks(
        hidden=rows,
        weight=weight,
        bias=bias,
        target=target.reshape(-1).contiguous(),
        class_weight=class_weight,
        setup=setup,
        size=chunk_size or default_size(rows.shape[0], setup.shards.each),
        overlap=overlap,
    )
    dtype = accumulate_dtype or WIDER.get(weight.dtype, weight.dtype)
    with without_autocast(hidden.device.type):
        return LinearCrossEntropy.apply(
            rows, weight, bias, chunks, dtype, reduction == "mean", denominator
        )


WIDER = {torch.float16: torch.float32}
"""Where sums over rows, of gradients that backward has yet to scale, need a wider range."""

AT_ONCE = 200_000_000
"""Logits of a chunk, at most: 380 MiB in bfloat16."""


def default_size(rows: int, classes: int) -> int:
    """Rows a chunk: few enough that it is small, and so many that its GEMMs are efficient."""
    most = max(128, AT_ONCE // max(classes, 1) // 128 * 128)
    return min(most, max(256, rows // 7 // 128 * 128))


class Grads(NamedTuple):
    """Gradients as they are added up; None where none is wanted."""

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


@dataclass(slots=True)
class RowChunk:
    """Rows `start` to `stop`, with their logits."""

    start: int
    stop: int
    problem: Problem
    found: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    """The losses and what backward needs; or, once `wait` returned, what the ranks gathered."""
    wait: Waiting = done


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The rows in chunks of `size`, and what their logits and their loss are made of."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    target: torch.Tensor
    class_weight: torch.Tensor | None
    setup: LossSetup
    size: int
    overlap: bool

    def losses(
        self, grads: Grads | None, divisor: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's loss and what `total` needs of it; gradients by 1 / divisor, if asked for."""
        steps = steps_for(self.hidden)
        sums: list[Waiting] = []
        losses: list[torch.Tensor] = []
        kept: list[torch.Tensor] = []
        for chunk in self._begun():
            found = chunk.found
            if isinstance(found, torch.Tensor):
                chunk.wait()
                found = steps.losses(chunk.problem, found)
            losses.append(found[0])
            kept.append(found[1])
            if grads is not None:
                steps.gradient(chunk.problem, found[1], None, divisor, chunk.problem.logits)
                sums.append(self._add(chunk, grads))
        for wait in sums:
            wait()
        if not losses:
            self.setup.ready()
            return steps.alone(self._problem(self._buffer(), 0, 0))
        if len(losses) == 1:
            return losses[0], kept[0]
        return torch.cat(losses), torch.cat(kept, 1)

    def grads(self, wanted: tuple[bool, ...], dtype: torch.dtype) -> Grads:
        """Nothing yet; of `hidden` in its own type, of the others in `dtype`."""
        hidden, weight, bias = self.hidden, self.weight, self.bias
        empty = hidden.shape[0] == 0  # no chunk will write them
        new = torch.zeros_like if empty else torch.empty_like
        dense = torch.contiguous_format
        return Grads(
            torch.empty_like(hidden, memory_format=dense) if wanted[0] else None,
            new(weight, dtype=dtype, memory_format=dense) if wanted[1] else None,
            torch.zeros_like(bias, dtype=dtype) if bias is not None and wanted[2] else None,
        )

    def divisor(self, mean: bool, denominator: torch.Tensor | float | None) -> torch.Tensor | None:
        """The divisor of the sum of the losses, if that is known before any of them is:
        gradients of the logits are then rounded as those of the unfused. Not in float16, in
        which they would vanish before the upstream gradient, a loss scale, is there.
        """
        hidden = self.hidden
        if hidden.dtype == torch.float16:
            return None
        if mean and denominator is None:
            if self.class_weight is not None:
                return None
            self.setup.ready()
            return steps_for(hidden).count(self._problem(hidden, 0, hidden.shape[0]))
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        if isinstance(denominator, torch.Tensor):
            wait_free = hidden.is_cuda  # a copy to the host is not there until it is awaited
            return denominator.to(hidden.device, dtype, non_blocking=wait_free).reshape(())
        number = 1.0 if denominator is None else denominator
        return torch.full((), number, dtype=dtype, device=hidden.device)

    def _buffer(self) -> torch.Tensor:
        rows = min(self.size, self.hidden.shape[0])
        return self.hidden.new_empty(rows, self.weight.shape[0])

    def _problem(self, logits: torch.Tensor, start: int, stop: int) -> Problem:
        target = part(self.target, start, stop)
        return self.setup.problem(logits, target, self.class_weight, start)

    def _begun(self) -> Iterator[RowChunk]:
        """Each chunk once its stats are being gathered; see Note [Under the next GEMM]."""
        rows = self.target.shape[0]
        starts = range(0, rows, self.size)
        ahead = int(self.overlap and self.setup.group is not None and len(starts) > 1)
        buffers = [self._buffer() for _ in range(1 + ahead)]
        under_way: list[RowChunk] = []
        for index, start in enumerate(starts):
            stop = min(start + self.size, rows)
            under_way.append(self._begin(start, stop, buffers[index % len(buffers)]))
            if len(under_way) > ahead:
                yield under_way.pop(0)
        yield from under_way

    def _begin(self, start: int, stop: int, buffer: torch.Tensor) -> RowChunk:
        """A chunk's stats, their gathering started; without a group, its losses."""
        logits, rows = part(buffer, 0, stop - start), part(self.hidden, start, stop)
        if self.bias is None:
            torch.mm(rows, self.weight.t(), out=logits)
        else:
            torch.addmm(self.bias, rows, self.weight.t(), out=logits)
        steps, setup = steps_for(logits), self.setup
        problem = self._problem(logits, start, stop)
        if setup.group is None:
            return RowChunk(start, stop, problem, steps.alone(problem))
        stats = steps.stats(problem)
        if start == 0:
            setup.ready()
        packed = steps.pack(problem, stats)
        gathered = packed.new_empty(setup.shards.world, *packed.shape)
        return RowChunk(start, stop, problem, gathered, start_gather(gathered, packed, setup.group))

    def _add(self, chunk: RowChunk, grads: Grads) -> Waiting:
        """Adds what a chunk's gradient of the logits gives; what to wait for of its rows."""
        logits, wait = chunk.problem.logits, done
        if grads.hidden is not None:
            rows = part(grads.hidden, chunk.start, chunk.stop)
            torch.mm(logits, self.weight, out=rows)
            if self.setup.group is not None:
                wait = start_sum(rows, self.setup.group)
                if not self.overlap:
                    wait()
                    wait = done
        if grads.weight is not None:
            own = part(self.hidden, chunk.start, chunk.stop)
            add_product(grads.weight, logits.t(), own, not chunk.start)
        if grads.bias is not None:
            grads.bias.add_(logits.sum(0, dtype=grads.bias.dtype))
        return wait


def part(tensor: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Some rows of a tensor; where these are all, itself, which costs nothing."""
    return tensor if stop - start == tensor.shape[0] else tensor[start:stop]


def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor, first: bool) -> None:
    """total += a @ b, or = for the first: in the type of `total`, from operands of theirs."""
    if total.dtype == a.dtype:
        into = torch.mm(a, b, out=total) if first else total.addmm_(a, b)
    elif a.is_cuda and total.dtype == torch.float32:
        by = {"out_dtype": torch.float32, "out": total}
        into = torch.mm(a, b, **by) if first else torch.addmm(total, a, b, **by)
    else:  # a CPU has no GEMM of mixed types
        a, b = a.to(total.dtype), b.to(total.dtype)
        into = torch.mm(a, b, out=total) if first else total.addmm_(a, b)
    assert into is total


class LinearCrossEntropy(torch.autograd.Function):
    """The loss, its gradients computed in forward and scaled in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        chunks: Chunks,
        dtype: torch.dtype,
        mean: bool,
        denominator: torch.Tensor | float | None,
    ) -> torch.Tensor:
        """The loss; `dtype` is that of sums over chunks."""
        wanted = ctx.needs_input_grad[:3]
        grads = early = None
        if any(wanted):
            grads = chunks.grads(wanted, dtype)
            early = chunks.divisor(mean, denominator)
        losses, kept = chunks.losses(grads, early)
        weighted = chunks.class_weight is not None
        loss, divisor = steps_for(hidden).total(losses, kept, weighted, mean, denominator)
        if grads is not None:
            ctx.dtype, ctx.grads = hidden.dtype, grads
            ctx.counts = denominator is None
            ctx.save_for_backward(divisor if early is None else None)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.no_grad():
            grads = scaled_by(ctx, upstream)
        return (*map(first_order, grads), None, None, None, None)


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
