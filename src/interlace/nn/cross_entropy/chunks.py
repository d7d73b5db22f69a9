"""The chunks of `linear_cross_entropy`: a chunk's logits, their loss, and their gradients.

Note [Under the next GEMM]: with a group, two chunks are under way. The next one's logits are
multiplied out before this one's stats, which the ranks gather meanwhile, are awaited; and a chunk's
gradient of `hidden` is added up over the ranks while its weight gradient and the next chunk are
computed. All ranks make the same calls in the same order, and each chunk's arithmetic is the same
whether anything overlaps or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from interlace.nn.cross_entropy.loss import LossSetup
from interlace.nn.cross_entropy.steps import Problem, steps_for
from interlace.nn.cross_entropy.vocabulary import Waiting, done, start_gather, start_sum


class Grads(NamedTuple):
    """Gradients as they are added up; None where none is wanted."""

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


class Operands(NamedTuple):
    """The tensors that give the logits and get gradients."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None

    def grads(self, wanted: tuple[bool, ...], dtype: torch.dtype) -> Grads:
        """Nothing yet; of `hidden` in its own type, of the others in `dtype`."""
        hidden, weight, bias = self
        fresh = hidden.shape[0] == 0  # no chunk will write them
        new: Any = torch.zeros_like if fresh else torch.empty_like
        layout: Any = {"memory_format": torch.contiguous_format}
        return Grads(
            torch.empty_like(hidden, **layout) if wanted[0] else None,
            new(weight, dtype=dtype, **layout) if wanted[1] else None,
            torch.zeros_like(bias, dtype=dtype) if bias is not None and wanted[2] else None,
        )

    def logits(self, start: int, stop: int, buffer: torch.Tensor) -> torch.Tensor:
        """The logits of some rows, at the beginning of the buffer."""
        out, rows = part(buffer, 0, stop - start), part(self.hidden, start, stop)
        if self.bias is None:
            return torch.mm(rows, self.weight.t(), out=out)
        return torch.addmm(self.bias, rows, self.weight.t(), out=out)


@dataclass(slots=True)
class RowChunk:
    """Rows `start` to `stop`, with their logits."""

    start: int
    stop: int
    problem: Problem
    found: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None
    """The losses and what backward needs; or, once `wait` returned, what the ranks gathered."""
    wait: Waiting = done


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The rows in chunks of `size`, and what their loss is made of."""

    target: torch.Tensor
    class_weight: torch.Tensor | None
    setup: LossSetup
    size: int
    accumulate_dtype: torch.dtype
    overlap: bool

    def forward(
        self, operands: Operands, grads: Grads | None, divisor: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each row's loss and what backward needs of it; gradients by 1 / divisor, if asked for."""
        steps = steps_for(operands.hidden)
        sums: list[Waiting] = []
        losses: list[torch.Tensor] = []
        kept: list[torch.Tensor] = []
        for chunk in self._begun(operands):
            found: Any = chunk.found
            if isinstance(found, torch.Tensor):
                chunk.wait()
                found = steps.losses(chunk.problem, found)
            losses.append(found[0])
            kept.append(found[1])
            if grads is not None:
                steps.gradient(chunk.problem, found[1], None, divisor, chunk.problem.logits)
                sums.append(self._add(operands, chunk, grads))
        for wait in sums:
            wait()
        if not losses:
            self.setup.ready()
            return steps.alone(self._problem(self._buffer(operands), 0, 0))
        if len(losses) == 1:
            return losses[0], kept[0]
        return torch.cat(losses), torch.cat(kept, 1)

    def backward(
        self, operands: Operands, kept: torch.Tensor, upstream: torch.Tensor, grads: Grads
    ) -> None:
        """The gradients by the upstream gradient of each row, from logits computed again."""
        steps = steps_for(operands.hidden)
        sums: list[Waiting] = []
        buffer = self._buffer(operands)
        for start, stop in self._ranges():
            logits = operands.logits(start, stop, buffer)
            chunk = RowChunk(start, stop, self._problem(logits, start, stop))
            own = kept[:, start:stop].contiguous()
            steps.gradient(chunk.problem, own, upstream[start:stop], None, logits)
            sums.append(self._add(operands, chunk, grads))
        for wait in sums:
            wait()

    def divisor(
        self, hidden: torch.Tensor, reduction: str, denominator: torch.Tensor | float | None
    ) -> torch.Tensor | None:
        """The divisor of the sum of the losses, if that is known before any of them is:
        gradients of the logits are then rounded as those of the unfused. Not in float16, in
        which they would vanish before the upstream gradient, a loss scale, is there.
        """
        if hidden.dtype == torch.float16:
            return None
        if reduction == "mean" and denominator is None:
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

    def _ranges(self) -> list[tuple[int, int]]:
        rows = self.target.shape[0]
        return [(at, min(at + self.size, rows)) for at in range(0, rows, self.size)]

    def _buffer(self, operands: Operands) -> torch.Tensor:
        hidden, weight, _ = operands
        return hidden.new_empty(min(self.size, hidden.shape[0]), weight.shape[0])

    def _problem(self, logits: torch.Tensor, start: int, stop: int) -> Problem:
        target = part(self.target, start, stop)
        return self.setup.problem(logits, target, self.class_weight, start)

    def _begun(self, operands: Operands) -> Iterator[RowChunk]:
        """Each chunk once its stats are being gathered; see Note [Under the next GEMM]."""
        ranges = self._ranges()
        ahead = int(self.overlap and self.setup.group is not None and len(ranges) > 1)
        buffers = [self._buffer(operands) for _ in range(1 + ahead)]
        under_way: list[RowChunk] = []
        for index, (start, stop) in enumerate(ranges):
            logits = operands.logits(start, stop, buffers[index % len(buffers)])
            under_way.append(self._begin(RowChunk(start, stop, self._problem(logits, start, stop))))
            if len(under_way) > ahead:
                yield under_way.pop(0)
        yield from under_way

    def _begin(self, chunk: RowChunk) -> RowChunk:
        """A chunk's stats, their gathering started; without a group, its losses."""
        steps, setup = steps_for(chunk.problem.logits), self.setup
        if setup.group is None:
            chunk.found = steps.alone(chunk.problem)
            return chunk
        found = steps.stats(chunk.problem)
        if chunk.start == 0:
            setup.ready()
        packed = steps.pack(chunk.problem, found)
        chunk.found = gathered = packed.new_empty(setup.shards.world, *packed.shape)
        chunk.wait = start_gather(gathered, packed, setup.group)
        return chunk

    def _add(self, operands: Operands, chunk: RowChunk, grads: Grads) -> Waiting:
        """Adds what a chunk's gradient of the logits gives; what to wait for of its rows."""
        logits, wait = chunk.problem.logits, done
        if grads.hidden is not None:
            rows = part(grads.hidden, chunk.start, chunk.stop)
            torch.mm(logits, operands.weight, out=rows)
            if self.setup.group is not None:
                wait = start_sum(rows, self.setup.group)
                if not self.overlap:
                    wait()
                    wait = done
        if grads.weight is not None:
            own = part(operands.hidden, chunk.start, chunk.stop)
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
