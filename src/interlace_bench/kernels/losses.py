"""Cross-entropy, of logits and of a linear layer's output, by us and by others.

    cases = loss_cases(torch.device("cuda"), small=False)

Bytes that must move: the logits, read forward and again backward, and their gradient, written.
Each variant's loss, and the first rows of its gradients, are compared with torch's in wider
numbers.
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
    KernelCase,
    against,
    checked,
    needed,
)
from interlace_bench.race import Run, Variant
from interlace_bench.sites import CACHE, DTYPES

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
        terms_of = (rows, classes, dtype, smoothing, z_loss, does)
        found.append(
            KernelCase(
                op="cross-entropy",
                shape=f"{rows}x{classes}{terms}",
                dtype=dtype,
                does=does,
                build=functools.partial(cross_entropy_variants, *terms_of),
                nbytes=(3 if does == BOTH else 1) * rows * classes * DTYPES[dtype].itemsize,
                limit=LOOSE,
            )
        )
    return found


def linear_cases(small: bool) -> list[KernelCase]:
    """The case of `linear_cross_entropy`."""
    rows, width, classes, dtype = LINEAR_SMALL if small else LINEAR
    return [
        KernelCase(
            op="linear-cross-entropy",
            shape=f"{rows}x{width}x{classes}",
            dtype=dtype,
            does=BOTH,
            build=functools.partial(linear_variants, rows, width, classes, dtype),
            flops=3 * 2 * rows * width * classes,
            limit=LOOSE,
            launches=(2, 60),
        )
    ]


# -- cross-entropy -------------------------------------------------------------------------------


def cross_entropy_variants(
    rows: int, classes: int, dtype: str, smoothing: float, z_loss: float, does: str,
    device: torch.device,
) -> list[Variant]:  # fmt: skip
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
    plain = functools.partial(_torch_loss, smoothing=smoothing, z_loss=z_loss)

    def liger() -> Run:
        rival = needed("liger_kernel.transformers.cross_entropy", "liger_kernel", device)
        module = rival.LigerCrossEntropyLoss(label_smoothing=smoothing, lse_square_scale=z_loss)
        return with_gradients(lambda x, y: module(x.clone(), y))  # overwrites it

    options = {"label_smoothing": smoothing, "z_loss": z_loss}
    makers: dict[str, Callable[[], Run]] = {
        OURS: lambda: with_gradients(functools.partial(cross_entropy, **options)),
        "torch": lambda: with_gradients(plain),
    }
    if classes in COMPILED and not (smoothing or z_loss):  # it takes seconds each time
        makers["torch.compile"] = lambda: with_gradients(torch.compile(plain, dynamic=False))
    return checked(makers | {"liger": liger}, against(with_gradients(plain), sets[0]), sets)


def _torch_loss(x: Tensor, y: Tensor, smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    loss = F.cross_entropy(x, y, label_smoothing=smoothing)
    if z_loss:
        loss = loss + z_loss * torch.logsumexp(x.float(), -1).square().mean()
    return loss


def with_gradients(loss: Callable[..., Tensor]) -> Run:
    """Computes a loss, and then the gradients of the inputs that need one."""

    def run(*inputs: Tensor) -> list[Tensor]:
        wanted = [x for x in inputs if x.requires_grad]
        with torch.set_grad_enabled(bool(wanted)):
            made = loss(*inputs)
        return [made.detach(), *(torch.autograd.grad(made, wanted) if wanted else ())]

    return run


# -- of a linear layer's output ------------------------------------------------------------------


def linear_variants(
    rows: int, width: int, classes: int, dtype: str, device: torch.device
) -> list[Variant]:
    kind = DTYPES[dtype]
    h = torch.randn(rows, width, device=device, dtype=kind, requires_grad=True)
    w = (torch.randn(classes, width, device=device, dtype=kind) * width**-0.5).requires_grad_()
    y = torch.randint(classes, (rows,), device=device)

    def liger() -> Run:
        module = "liger_kernel.transformers.fused_linear_cross_entropy"
        rival = needed(module, "liger_kernel", device).LigerFusedLinearCrossEntropyLoss()
        return with_gradients(lambda h, w, y: rival(w, h, y))

    def plain(h: Tensor, w: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(h, w), y)

    sums = functools.partial(linear_cross_entropy, accumulate_dtype=torch.float32)
    makers: dict[str, Callable[[], Run]] = {
        OURS: lambda: with_gradients(linear_cross_entropy),
        f"{OURS} f32 sums": lambda: with_gradients(sums),
        "unfused": lambda: with_gradients(lambda h, w, y: cross_entropy(F.linear(h, w), y)),
        "torch": lambda: with_gradients(plain),
        "torch.compile": lambda: with_gradients(torch.compile(plain, dynamic=False)),
        "liger": liger,
    }
    return checked(makers, against(with_gradients(plain), (h, w, y)), [(h, w, y)])
