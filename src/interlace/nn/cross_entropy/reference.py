"""The cross-entropy in plain torch: what the CPU runs, and what the kernels are compared with.

With x a row's logits, w the class weights (1 without), y the target, V the number of
classes, s the smoothing and lse the log of the sum of exp(x) over all ranks:

    loss = (1 - s) w_y (lse - x_y) + s / V * sum_j w_j (lse - x_j) + z lse^2

in fp32 (fp64 for fp64 logits), relative to the row's maximum, so that large logits cost no bits. A
row at `ignore_index` has loss and gradient 0, one whose target is no class has NaN in both. It
works through blocks of rows: little is held beside the logits and their gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from interlace.nn.cross_entropy.steps import Problem

BLOCK = 1 << 22
"""Logits that are held in fp32 at a time."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that a loss is computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def blocks(tensor: torch.Tensor, first: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
    """Blocks of rows (rows, classes) that cover (..., classes), each with its first row's number;
    none is copied: rows that no two strides can describe come in several parts.
    """
    if tensor.dim() == 1:
        tensor = tensor[None]
    columns = tensor.shape[-1]
    rows = tensor.numel() // columns if columns else 0
    if tensor.dim() > 2:
        try:
            tensor = tensor.view(rows, columns) if columns else tensor
        except RuntimeError:
            each = tensor[0].numel() // columns
            for index, part in enumerate(tensor):
                yield from blocks(part, first + index * each)
            return
    step = max(1, BLOCK // max(columns, 1))
    for start in range(0, rows, step):
        yield first + start, tensor[start : start + step]


def finite(m: torch.Tensor) -> torch.Tensor:
    """A maximum to subtract: zero where all is -inf."""
    return m.masked_fill(m == -torch.inf, 0.0)


def span(problem: Problem) -> tuple[torch.Tensor | int, torch.Tensor | int]:
    """The first class of this rank, and the number of classes of all."""
    shards = problem.shards
    if shards.sizes is None:
        return 0, shards.classes
    return shards.sizes[: shards.rank].sum(), shards.sizes.sum()


def share(problem: Problem) -> torch.Tensor | float:
    """The share of a target that smoothing gives each class."""
    classes = span(problem)[1]
    if isinstance(classes, torch.Tensor):
        classes = classes.to(wide(problem.logits.dtype))
    return problem.terms.smoothing / classes


def stats(problem: Problem) -> torch.Tensor:
    """[1, K, rows] of this rank's classes; the target's logit and weight are left to `pack`."""
    logits, weight, terms = problem.logits, problem.weight, problem.terms
    found = logits.new_zeros(1, problem.num_stats, problem.target.numel(), dtype=wide(logits.dtype))
    found[0, 0] = -torch.inf
    for first, x in blocks(logits):
        at = found[0, :, first : first + x.shape[0]]
        x = x.to(wide(x.dtype))
        at[0] = x.amax(-1)
        x = x - finite(at[0])[:, None]
        at[1] = x.exp().sum(-1)
        if terms.smoothing:
            at[3] = (x if weight is None else x * weight.to(x.dtype)).sum(-1)
            at[4] = x.shape[-1] if weight is None else weight.to(x.dtype).sum()
    return found


def pack(problem: Problem, found: torch.Tensor) -> torch.Tensor:
    """[K, rows]: what this rank sends."""
    start, _ = span(problem)
    logits, found = problem.logits, found[0]
    local = logits.shape[-1]
    column = problem.target.reshape(-1).long() - start
    mine = (column >= 0) & (column < local)
    found[2] = -torch.inf
    if not local:
        return found
    for first, x in blocks(logits):
        at = slice(first, first + x.shape[0])
        picked = x.gather(1, column[at].clamp(0, local - 1)[:, None])[:, 0]
        found[2, at] = picked.to(found.dtype).masked_fill(~mine[at], -torch.inf)
    if problem.weight is not None:
        own = problem.weight.to(found.dtype)[column.clamp(0, local - 1)]
        found[-1] = own.masked_fill(~mine, 0.0)
    return found


def alone(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """`losses` where no other rank has classes."""
    return losses(problem, pack(problem, stats(problem))[None])


def losses(problem: Problem, found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's loss, and what backward needs of it (`num_kept`)."""
    terms = problem.terms
    ignored, known = kinds(problem)
    m = found[:, 0].amax(0)
    base = finite(m)
    log_sum = (found[:, 1] * torch.exp(found[:, 0] - base)).sum(0).log()
    loss = log_sum - (found[:, 2].amax(0) - base)
    kept = loss.new_empty(problem.num_kept, loss.numel())
    if problem.weight is not None:
        own = found[:, -1].sum(0)
        kept[-1] = own.masked_fill(ignored | ~known, 0.0)
        loss = loss * own
    if terms.smoothing:
        mass = found[:, 4].sum(0)
        away = (found[:, 3] + found[:, 4] * (finite(found[:, 0]) - base)).sum(0)
        each = share(problem)
        loss = (1.0 - terms.smoothing) * loss + each * (mass * log_sum - away)
        kept[2] = mass
    if terms.z_loss:
        loss = loss + terms.z_loss * (base + log_sum) ** 2
    loss = torch.where(ignored, 0.0, torch.where(known, loss, torch.nan))
    kept[0] = base.masked_fill(ignored, 0.0)
    kept[1] = log_sum.masked_fill(ignored | ~known, torch.inf)
    note(problem, ~ignored & ~known)
    shaped = loss.new_empty(problem.target.shape)  # no view: whoever has it may write to it
    shaped.view(-1).copy_(loss)
    return shaped, kept


def kinds(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows are ignored, and which have a target that is a class."""
    target = problem.target.reshape(-1).long()
    known = (target >= 0) & (target < span(problem)[1])
    return target == problem.terms.ignore_index, known


def note(problem: Problem, wrong: torch.Tensor) -> None:
    """Notes the first row whose target is no class."""
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        problem.word[1] = int(problem.target.reshape(-1)[row])
        problem.word[2] = int(span(problem)[1])
        problem.word[0] = problem.first_row + row + 1


def total(
    losses: torch.Tensor,
    kept: torch.Tensor,
    weighted: bool,
    mean: bool,
    denominator: torch.Tensor | float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the losses over its divisor, and that."""
    by: torch.Tensor | float = 1.0
    if mean:
        by = kept[-1].sum() if weighted else (kept[1] != torch.inf).sum()
    if denominator is not None:
        by = denominator
    divisor = torch.as_tensor(by, dtype=losses.dtype, device=losses.device).reshape(())
    return losses.sum() / divisor, divisor


def count(problem: Problem) -> torch.Tensor:
    """The number of rows that count, in the type of the loss; needs no logits."""
    ignored, known = kinds(problem)
    return (known & ~ignored).sum().to(wide(problem.logits.dtype))


def scale(tensors: Sequence[torch.Tensor], by: torch.Tensor) -> None:
    """Multiplies tensors by a number, in place."""
    if by.is_cuda or by.item() != 1.0:
        for tensor in tensors:
            tensor.mul_(by.view(1))  # of one dimension: it takes part in promotion


def gradient(
    problem: Problem,
    kept: torch.Tensor,
    upstream: torch.Tensor | None,
    divisor: torch.Tensor | None,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of the logits; `upstream` is a number, one for each row, or None: 1."""
    logits, weight, terms = problem.logits, problem.weight, problem.terms
    if into is None:
        into = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    ignored, known = kinds(problem)
    counted = known & ~ignored
    start, _ = span(problem)
    column = problem.target.reshape(-1).long() - start
    base, log_sum = kept[:2]
    up = torch.ones_like(base)
    if upstream is not None:
        up = upstream.reshape(-1).expand_as(base)
    if divisor is not None:
        up = up / divisor
    own = torch.ones_like(base) if weight is None else kept[-1]
    h = own * (1.0 - terms.smoothing)
    a = h + share(problem) * kept[2] if terms.smoothing else h
    if terms.z_loss:
        a = a + 2.0 * terms.z_loss * (base + log_sum)
    flat = into.view(-1, logits.shape[-1]) if into.numel() else into
    for first, x in blocks(logits):
        at = slice(first, first + x.shape[0])
        x = x.to(wide(x.dtype))
        g = torch.exp((x - base[at, None]) - log_sum[at, None]) * a[at, None]
        if terms.smoothing:
            even = g.new_ones(()) if weight is None else weight.to(g.dtype)
            g -= share(problem) * even
        here = column[at]
        rows = ((here >= 0) & (here < x.shape[1]) & counted[at]).nonzero()[:, 0]
        g[rows, here[rows]] -= h[at][rows]
        g *= up[at, None]
        g[ignored[at]] = 0.0
        g[~counted[at] & ~ignored[at]] = torch.nan
        flat[at] = g.to(logits.dtype)
    return into
