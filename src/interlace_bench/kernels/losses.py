"""Cross-entropy, of logits and of a linear layer's output, by us and by others.

    cases = loss_cases(torch.device("cuda"), small=False)

Bytes that must move: the logits, read forward and again backward, and their gradient, written.
Each way's loss, and its gradient of the first rows, are compared with wide arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from interlace.nn.functional import cross_entropy, linear_cross_entropy
from interlace_bench.kernels.case import OURS, BuiltCase, KernelCase, needed
from interlace_bench.race.ways import Opened, Way, worst
from interlace_bench.sites import CACHE, DTYPES

LossOf = Callable[[Tensor, Tensor], Tensor]
BOTH, FORWARD = "forward+backward", "forward"
CHECKED = 16
"""Rows whose gradients are compared."""
LOOSE = 16.0
"""Largest deviation of a way, in units of `unit`: torch rounds log-probabilities of -12 to 16 bits,
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


def unit(dtype: torch.dtype) -> float:
    """Unit of `deviation`: one rounding of a 16-bit type, or 128 of a 32-bit type (sums differ)."""
    return torch.finfo(dtype).eps * (1 if dtype.itemsize == 2 else 128)


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

    def opened(loss: LossOf, keeps: bool = True) -> Opened:
        run = functools.partial(_run, loss, does == BOTH)

        def off() -> float:
            x, y = sets[0]
            if not keeps:
                x = x.detach().clone().requires_grad_(x.requires_grad)
            return _off(run(x, y), known, x.dtype)

        if keeps:
            return Opened(run, off)
        own = [x.detach().clone() for x, _ in sets[:1]]

        def destroy(x: Tensor, y: Tensor) -> Any:
            return run(own[0].detach().requires_grad_(x.requires_grad), y)

        return Opened(destroy, off)

    def liger(keeps: bool) -> Opened:
        rival = needed("liger_kernel.transformers.cross_entropy", "liger_kernel", device)
        module = rival.LigerCrossEntropyLoss(label_smoothing=smoothing, lse_square_scale=z_loss)
        return opened((lambda x, y: module(x.clone(), y)) if keeps else module, keeps)

    passes = 3 if does == BOTH else 1
    compiled = classes in COMPILED and not (smoothing or z_loss)  # it takes seconds each time
    options = {"label_smoothing": smoothing, "z_loss": z_loss}
    plain = functools.partial(_torch_loss, smoothing=smoothing, z_loss=z_loss)
    ways = (
        Way(OURS, lambda: opened(functools.partial(cross_entropy, **options))),
        Way("torch", lambda: opened(plain)),
        *([Way("torch.compile", lambda: opened(torch.compile(plain, dynamic=False)))] * compiled),
        Way("liger", lambda: liger(keeps=True)),
        Way("liger in place", lambda: liger(keeps=False)),
    )
    return BuiltCase(ways=ways, sets=sets, nbytes=passes * size, limit=LOOSE)


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


def relative(found: Tensor, known: Tensor) -> float:
    """Deviation by root mean square, relative to the reference."""
    return float((found.to(known.dtype) - known).norm() / known.norm().clamp_min(1e-30))


# -- of a linear layer's output ------------------------------------------------------------------


def linear_case(rows: int, width: int, classes: int, dtype: str, device: torch.device) -> BuiltCase:
    kind = DTYPES[dtype]
    h = torch.randn(rows, width, device=device, dtype=kind, requires_grad=True)
    w = (torch.randn(classes, width, device=device, dtype=kind) * width**-0.5).requires_grad_()
    y = torch.randint(classes, (rows,), device=device)
    known = _linear_reference(h, w, y)

    def opened(loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Opened:
        def run(h: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            made = loss(h, w, y)
            return made.detach(), *torch.autograd.grad(made, (h, w))

        def off() -> float:
            found = run(h, w, y)
            pairs = zip((found[1][:CHECKED], found[2]), known[1:], strict=True)
            far = [relative(a[: len(b)], b) for a, b in pairs]
            far.append(abs(float(found[0]) - float(known[0])) / abs(float(known[0])))
            return worst(far) / unit(kind)

        return Opened(run, off)

    def liger() -> Opened:
        rival = needed(
            "liger_kernel.transformers.fused_linear_cross_entropy", "liger_kernel", device
        )
        module = rival.LigerFusedLinearCrossEntropyLoss()
        return opened(lambda h, w, y: module(w, h, y))

    def unfused(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w), y)

    sums = functools.partial(linear_cross_entropy, accumulate_dtype=torch.float32)
    ways = (
        Way(OURS, lambda: opened(linear_cross_entropy)),
        Way(f"{OURS} f32 sums", lambda: opened(sums)),
        Way("unfused", lambda: opened(lambda h, w, y: cross_entropy(F.linear(h, w), y))),
        Way("torch", lambda: opened(unfused)),
        Way("torch.compile", lambda: opened(torch.compile(unfused, dynamic=False))),
        Way("liger", liger),
    )
    flops = 3 * 2 * rows * width * classes
    return BuiltCase(ways=ways, sets=[(h, w, y)], flops=flops, limit=LOOSE, launches=(2, 60))


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
