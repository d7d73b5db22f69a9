"""Cross-entropy, of logits and of a linear layer's output, by us and by others.

    cases = loss_cases(torch.device("cuda"), small=False)

Bytes that must move: the logits, read forward and again backward, and their gradient, written.
Each variant's loss, and its gradient of the first rows, are compared with wide arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from interlace.nn.functional import cross_entropy, linear_cross_entropy
from interlace_bench.kernels.case import (
    BOTH,
    FORWARD,
    OURS,
    BuiltCase,
    KernelCase,
    checked,
    needed,
    relative,
    unit,
)
from interlace_bench.race import Run, worst
from interlace_bench.sites import CACHE, DTYPES

LossOf = Callable[[Tensor, Tensor], Tensor]
CHECKED = 16
"""Rows whose gradients are compared."""
LOOSE = 16.0
"""Largest deviation, in units of `unit`: torch rounds log-probabilities of -12 to 16 bits,
which puts its gradients off by some per cent."""
SHAPES = (
    # rows, classes, dtype, label smoothing, z-loss, what is computed
    (8192, 128256, "bf16", 0.0, 0.0, BOTH),
    (8192, 128256, "bf16", 0.0, 0.0, FORWARD),
    (8192, 128256, "bf16", 0.1, 1e-4, BOTH),
    (4096, 128256, "f32", 0.0, 0.0, BOTH),
    (4096, 32000, "bf16", 0.0, 0.0, BOTH),
    (16384, 50257, "bf16", 0.0, 0.0, BOTH),
    (2048, 151936, "bf16", 0.0, 0.0, BOTH),
)
SMALL = ((64, 512, "f32", 0.0, 0.0, BOTH), (33, 257, "f32", 0.1, 1e-4, BOTH),
         (64, 512, "f32", 0.0, 0.0, FORWARD))  # fmt: skip
COMPILED = (128256, 512)
"""Classes with which torch.compile is tried as well."""
LINEAR = (8192, 4096, 128256, "bf16")
"""Rows, width, classes."""
LINEAR_SMALL = (64, 32, 512, "f32")


def cross_entropy_cases(small: bool) -> list[KernelCase]:
    """The cases of `cross_entropy`."""
    found: list[KernelCase] = []
    for rows, classes, dtype, smoothing, z_loss, does in SMALL if small else SHAPES:
        terms = f" smoothing {smoothing:g} z-loss {z_loss:g}" if smoothing or z_loss else ""
        build = functools.partial(cross_entropy_case, rows, classes, dtype, smoothing, z_loss, does)
        shape = f"{rows}x{classes}{terms}"
        found.append(
            KernelCase(op="cross-entropy", shape=shape, dtype=dtype, does=does, build=build)
        )
    return found


def linear_cases(small: bool) -> list[KernelCase]:
    """The case of `linear_cross_entropy`."""
    rows, width, classes, dtype = LINEAR_SMALL if small else LINEAR
    build = functools.partial(linear_case, rows, width, classes, dtype)
    shape = f"{rows}x{width}x{classes}"
    return [
        KernelCase(op="linear-cross-entropy", shape=shape, dtype=dtype, does=BOTH, build=build),
    ]


# -- cross-entropy -------------------------------------------------------------------------------


def cross_entropy_case(
    rows: int, classes: int, dtype: str, smoothing: float, z_loss: float, does: str,
    device: torch.device,
) -> BuiltCase:  # fmt: skip
    size = rows * classes * DTYPES[dtype].itemsize
    num_sets = 1 + min(8, 2 * CACHE // size) if device.type == "cuda" else 2
    sets = [
        (
            torch.randn(rows, classes, device=device, dtype=DTYPES[dtype]).mul_(2),
            torch.randint(classes, (rows,), device=device),
        )
        for _ in range(num_sets)
    ]
    for x, _ in sets:
        x.requires_grad_(does == BOTH)
    known = _reference(*sets[0], smoothing, z_loss)

    def of(loss: LossOf) -> Run:
        return functools.partial(_run, loss, does == BOTH)

    def liger(copies: bool) -> Run:
        rival = needed("liger_kernel.transformers.cross_entropy", "liger_kernel", device)
        module = rival.LigerCrossEntropyLoss(label_smoothing=smoothing, lse_square_scale=z_loss)
        if copies:
            return of(lambda x, y: module(x.clone(), y))
        own, run = sets[0][0].detach().clone(), of(module)
        return lambda x, y: run(own.detach().requires_grad_(x.requires_grad), y)  # overwrites it

    options = {"label_smoothing": smoothing, "z_loss": z_loss}
    plain = functools.partial(_torch_loss, smoothing=smoothing, z_loss=z_loss)
    makers: dict[str, Callable[[], Run]] = {
        OURS: lambda: of(functools.partial(cross_entropy, **options)),
        "torch": lambda: of(plain),
    }
    if classes in COMPILED and not (smoothing or z_loss):  # it takes seconds each time
        makers["torch.compile"] = lambda: of(torch.compile(plain, dynamic=False))
    makers |= {"liger": lambda: liger(True), "liger in place": lambda: liger(False)}
    return BuiltCase(
        variants=checked(makers, lambda found: _off(found, known, DTYPES[dtype]), sets),
        nbytes=(3 if does == BOTH else 1) * size,
        limit=LOOSE,
    )


def _torch_loss(x: Tensor, y: Tensor, smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    loss = F.cross_entropy(x, y, label_smoothing=smoothing)
    if z_loss:
        loss = loss + z_loss * torch.logsumexp(x.float(), -1).square().mean()
    return loss


def _run(loss: LossOf, backward: bool, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
    if not backward:
        with torch.no_grad():
            return loss(x, y), None
    made = loss(x, y)
    (grad,) = torch.autograd.grad(made, x)
    return made.detach(), grad


@torch.no_grad()
def _reference(x: Tensor, y: Tensor, smoothing: float, z_loss: float) -> tuple[Tensor, Tensor]:
    """The mean loss, and the gradient of the first rows, in fp32 (fp64 for fp32)."""
    wide = torch.float32 if x.element_size() == 2 else torch.float64
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    rows = x.shape[0]
    for at in range(0, rows, 512):
        part, targets = x[at : at + 512].to(wide), y[at : at + 512]
        lse = part.logsumexp(-1)
        hit = part.gather(1, targets[:, None]).squeeze(1)
        each = lse - (1 - smoothing) * hit - smoothing * part.mean(-1) + z_loss * lse.square()
        total += each.sum(dtype=torch.float64)
    part, targets = x[:CHECKED].to(wide), y[:CHECKED]
    lse = part.logsumexp(-1, keepdim=True)
    grad = (part - lse).exp() * (1 + 2 * z_loss * lse) - smoothing / x.shape[1]
    grad.scatter_add_(1, targets[:, None], torch.full_like(lse, smoothing - 1))
    return total / rows, grad / rows


def _off(found: tuple[Tensor, Tensor | None], known: tuple[Tensor, Tensor], dtype: torch.dtype
         ) -> float:  # fmt: skip
    (loss, grad), (true_loss, true_grad) = found, known
    far = [abs(float(loss) - float(true_loss)) / abs(float(true_loss))]
    if grad is not None:
        far.append(relative(grad[:CHECKED], true_grad))
    return worst(far) / unit(dtype)


# -- of a linear layer's output ------------------------------------------------------------------


def linear_case(rows: int, width: int, classes: int, dtype: str, device: torch.device) -> BuiltCase:
    kind = DTYPES[dtype]
    h = torch.randn(rows, width, device=device, dtype=kind, requires_grad=True)
    w = (torch.randn(classes, width, device=device, dtype=kind) * width**-0.5).requires_grad_()
    y = torch.randint(classes, (rows,), device=device)
    known = _linear_reference(h, w, y)

    def of(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Run:
        def run(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            made = loss(h, w, y)
            return made.detach(), *torch.autograd.grad(made, (h, w))

        return run

    def off(found: tuple[Tensor, ...]) -> float:
        pairs = zip((found[1][:CHECKED], found[2]), known[1:], strict=True)
        far = [relative(a[: len(b)], b) for a, b in pairs]
        far.append(abs(float(found[0]) - float(known[0])) / abs(float(known[0])))
        return worst(far) / unit(kind)

    def liger() -> Run:
        module = "liger_kernel.transformers.fused_linear_cross_entropy"
        rival = needed(module, "liger_kernel", device).LigerFusedLinearCrossEntropyLoss()
        return of(lambda h, w, y: rival(w, h, y))

    def plain(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w), y)

    sums = functools.partial(linear_cross_entropy, accumulate_dtype=torch.float32)
    makers: dict[str, Callable[[], Run]] = {
        OURS: lambda: of(linear_cross_entropy),
        f"{OURS} f32 sums": lambda: of(sums),
        "unfused": lambda: of(lambda h, w, y: cross_entropy(F.linear(h, w), y)),
        "torch": lambda: of(plain),
        "torch.compile": lambda: of(torch.compile(plain, dynamic=False)),
        "liger": liger,
    }
    return BuiltCase(
        variants=checked(makers, off, [(h, w, y)]),
        flops=3 * 2 * rows * width * classes,
        limit=LOOSE,
        launches=(2, 60),
    )


@torch.no_grad()
def _linear_reference(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and, of the first rows and classes, gradients; sums in fp32 or wider."""
    wide = torch.float32 if h.element_size() == 2 else torch.float64
    rows, total = h.shape[0], torch.zeros((), dtype=torch.float64, device=h.device)
    dh, dw = [], torch.zeros(CHECKED, w.shape[1], dtype=wide, device=h.device)
    for at in range(0, rows, 512):
        logits = F.linear(h[at : at + 512], w).to(wide)
        targets = y[at : at + 512]
        total += F.cross_entropy(logits, targets, reduction="sum").double()
        grad = logits.softmax(-1)
        grad[torch.arange(len(targets), device=h.device), targets] -= 1
        grad /= rows
        if at == 0:
            dh.append(grad[:CHECKED] @ w.to(wide))
        dw += grad[:, :CHECKED].t() @ h[at : at + 512].to(wide)
    return total / rows, dh[0], dw
