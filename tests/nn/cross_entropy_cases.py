"""Cases of the cross-entropy, what each should give, in fp64, and how far off it may be.

The reference is `torch.nn.functional.cross_entropy` in fp64, over all classes on one rank, with
what it has not (z-loss, a denominator) around it, and torch's autograd for the gradients.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

LAYOUTS = ("dense", "sliced rows", "sliced classes", "transposed", "permuted")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call: its logits (..., classes), cut into `sizes`, and its options."""

    seed: int
    batch: tuple[int, ...] = (3, 5)
    sizes: tuple[int, ...] = (37,)
    dtype: torch.dtype = torch.float32
    layout: str = "dense"
    reduction: str = "mean"
    smoothing: float = 0.0
    weighted: bool = False
    z_loss: float = 0.0
    denominator: float | None = None
    ignored: float = 0.2
    bad: bool = False
    scale: float = 3.0
    offset: float = 0.0

    @property
    def classes(self) -> int:
        return sum(self.sizes)

    def draw(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """All logits, targets, class weights and the upstream gradient; every rank's are alike."""
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(*self.batch, self.classes, generator=generator)
        x = (x * self.scale + self.offset).to(self.dtype)
        y = torch.randint(0, self.classes, self.batch, generator=generator)
        chance = torch.rand(self.batch, generator=generator)
        y[chance < self.ignored] = -100
        if self.bad:
            y[chance > 0.8] = self.classes + 1
            y.view(-1)[-1] = -1
        weight = torch.rand(self.classes, generator=generator) + 0.1 if self.weighted else None
        up = torch.randn(self.batch if self.reduction == "none" else (), generator=generator)
        return x, y, weight, up

    def options(self) -> dict[str, Any]:
        """Of our function."""
        return {
            "reduction": self.reduction,
            "label_smoothing": self.smoothing,
            "z_loss": self.z_loss,
            "denominator": self.denominator,
        }


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values, with other strides."""
    if layout == "sliced rows" and x.dim() > 1:
        more = torch.full((*x.shape[:-2], x.shape[-2] + 1, x.shape[-1]), torch.nan).to(x)
        more[..., :-1, :] = x
        return more[..., :-1, :]
    if layout == "sliced classes":
        more = torch.full((*x.shape[:-1], x.shape[-1] + 3), torch.nan).to(x)
        more[..., 1:-2] = x
        return more[..., 1:-2]
    if layout == "transposed":
        return x.movedim(-1, 0).contiguous().movedim(0, -1)
    if layout == "permuted" and x.dim() > 2:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    return x.clone()


def arbitrary(draw: random.Random, **fixed: Any) -> Case:
    """A case whose other fields are drawn."""
    found: dict[str, Any] = {
        "seed": draw.getrandbits(32),
        "batch": draw.choice([(), (1,), (6,), (3, 5), (2, 3, 2)]),
        "dtype": draw.choice([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
        "layout": draw.choice(LAYOUTS),
        "reduction": draw.choice(["none", "mean", "sum"]),
        "smoothing": draw.choice([0.0, 0.1]),
        "weighted": draw.random() < 0.3,
        "z_loss": draw.choice([0.0, 0.0, 0.01]),
        "bad": draw.random() < 0.15,
    } | fixed
    if found["reduction"] != "none" and "denominator" not in found:
        found["denominator"] = draw.choice([None, None, 7.5])
    return Case(**found)


def reference(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, gradient, and how far off each may be; NaN where a target is no class."""
    x, y, weight, up = case.draw()
    leaf = x.double().requires_grad_()
    bad = (y != -100) & ((y < 0) | (y >= case.classes))
    known = y.masked_fill(bad, -100).reshape(-1)
    t = leaf.reshape(-1, case.classes)
    w = None if weight is None else weight.double()
    lse = t.logsumexp(-1)
    if case.dtype == torch.float64:  # torch's own gradient of smoothing is off by hundreds of units
        each = (lse[:, None] - t) * (1.0 if w is None else w)
        chosen = each.gather(1, known.clamp(min=0)[:, None])[:, 0]
        rows = (1 - case.smoothing) * chosen + case.smoothing / case.classes * each.sum(-1)
        rows = rows * (known != -100)
    else:
        rows = F.cross_entropy(t, known, w, reduction="none", label_smoothing=case.smoothing)
    rows = rows + case.z_loss * lse**2 * (known != -100)
    counted = (known != -100).double() if w is None else w[known.clamp(min=0)] * (known != -100)
    divisor: torch.Tensor | float = 1.0
    if case.reduction == "none":
        loss = rows.view(case.batch)
    else:
        divisor = counted.sum() if case.reduction == "mean" else 1.0
        divisor = divisor if case.denominator is None else case.denominator
        loss = rows.sum() / divisor
    loss.backward(up.double())
    assert leaf.grad is not None
    grad, loss = leaf.grad, loss.detach()
    grad[y == -100] = 0.0  # also where none counts: not 0 / 0
    if bool(bad.any()):
        grad[bad] = torch.nan
        loss = loss.masked_fill(bad, torch.nan) if case.reduction == "none" else loss * torch.nan
    return loss, grad, *room(case, t.detach(), rows.detach(), lse.detach(), up, divisor, grad)


def room(
    case: Case, t: torch.Tensor, rows: torch.Tensor, lse: torch.Tensor, up: torch.Tensor,
    divisor: torch.Tensor | float, grad: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """How far off loss and gradient may be.

    A row's loss is a few sums of numbers no larger than its logits' spread, the log of its sum of
    exponentials (whose relative error is some units) and its own result; z_loss squares the lse,
    which is as exact as the largest logit. An element of the gradient is a probability, with the
    relative error of exp at its argument, less what its target takes, and is rounded to the type.
    """
    unit = 2.0**-53 if case.dtype == torch.float64 else 2.0**-24
    size = t.abs().amax(-1) if t.numel() else t.new_zeros(t.shape[0])
    spread = t.amax(-1) - t.amin(-1) if t.numel() else size
    own = 16 * unit * (4 + rows.abs() + spread + case.z_loss * (1 + lse.abs()) * (4 + size))
    per_row = own if case.reduction == "none" else (own + 4 * unit * rows.abs()).sum()
    allowed = per_row.view(case.batch) if case.reduction == "none" else per_row / divisor
    weigh = 1.0 + 2 * case.z_loss * lse.abs()
    scale = (up.double() / divisor).abs().reshape(-1) * weigh * unit * 16
    more = (4 + spread) * scale
    smallest = torch.finfo(case.dtype).smallest_normal * torch.finfo(case.dtype).eps
    eps = torch.finfo(case.dtype).eps / 2
    slack = grad.nan_to_num().abs() * eps + more.nan_to_num().view(*case.batch, 1) + smallest
    return allowed, slack


def far(found: torch.Tensor, wanted: torch.Tensor, allowed: torch.Tensor) -> str | None:
    """What is wrong, if anything is: NaN must be where it should be, and nowhere else."""
    if found.shape != wanted.shape:
        return f"shape {tuple(found.shape)}, not {tuple(wanted.shape)}"
    found = found.detach().double().cpu()
    if not torch.equal(found.isnan(), wanted.isnan()):
        return f"NaN in {int(found.isnan().sum())} places, not in {int(wanted.isnan().sum())}"
    error = (found - wanted).abs().nan_to_num(nan=0.0)
    over = error > allowed.nan_to_num(nan=torch.inf)
    if not bool(over.any()):
        return None
    worst = (error / allowed).nan_to_num(nan=0.0).max()
    return f"{worst:.3g} times what is allowed, error {error.max():.3g}"
