"""A step of AdamW over layers of an 8B-sized model, in several storage formats, by us and others.

    cases = adam_cases(small=False)

Bytes that must move, an element: parameter, moments and master read and written, gradient read; of
a parameter beside an fp32 master only the write. All variants of a case share parameters and
gradients, and each has its own states. Before, each does some steps on a small tensor that are
compared with Adam in fp64.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from interlace.optim import AdamW
from interlace.torch_private import foreach_copy_
from interlace_bench.kernels.case import OURS, KernelCase, needed
from interlace_bench.race import Opened, Variant
from interlace_bench.sites import DTYPES

WIDTH, HIDDEN, KEYS, CLASSES, LAYERS = 4096, 14336, 1024, 128256, 4
LR = 1e-3
STEPS = 3
"""Steps that are compared with fp64."""
LOOSE = 4.0
"""Largest deviation in roundings (see `_off`): stochastic rounding is off by one at each step."""
Make = Callable[[list[nn.Parameter]], Any]
"""From parameters with gradients to an optimizer."""


@dataclass(frozen=True, slots=True)
class Format:
    """A storage format of parameters, moments and masters."""

    name: str
    dtype: str
    moved: int
    """Bytes that must move, an element."""
    options: dict[str, Any]
    rivals: tuple[str, ...]


BF16: dict[str, Any] = {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
NEAREST: dict[str, Any] = {**BF16, "stochastic_rounding": False}
FORMATS = (
    Format("all f32", "f32", 28, {}, ("torch", "torch foreach")),
    Format("all bf16", "bf16", 14, NEAREST, ("torch", "torch foreach")),
    Format("all bf16, stochastic", "bf16", 14, BF16, ("torchao",)),
    Format(
        "bf16, f32 masters, bf16 moments", "bf16", 20, {**BF16, "master_weights": "fp32"},
        ("torch masters",),
    ),
    Format(
        "bf16, remainders, bf16 moments", "bf16", 18, {**BF16, "master_weights": "remainder"},
        ("torch masters",),
    ),
)  # fmt: skip


def adam_cases(small: bool) -> list[KernelCase]:
    """The cases of `AdamW`."""
    shapes = [(16, 16), (33,), (8, 4)] if small else layer_shapes()
    count = sum(map(math.prod, shapes))
    text = f"{count / 1e9:.2f}e9" if count > 1e8 else str(count)
    return [
        KernelCase(
            op="adam",
            shape=f"{text} {kind.name}",
            dtype=kind.dtype,
            does="step",
            build=functools.partial(adam_variants, kind, shapes),
            nbytes=kind.moved * count,
            limit=LOOSE,
        )
        for kind in FORMATS
    ]


def layer_shapes() -> list[tuple[int, ...]]:
    """Some layers and the head of a Llama of 8B."""
    square, narrow = (WIDTH, WIDTH), (KEYS, WIDTH)
    layer = [square, narrow, narrow, square, *[(HIDDEN, WIDTH)] * 2, (WIDTH, HIDDEN)]
    return [*LAYERS * [*layer, (WIDTH,), (WIDTH,)], (CLASSES, WIDTH), (WIDTH,)]


def adam_variants(
    kind: Format, shapes: list[tuple[int, ...]], device: torch.device
) -> list[Variant]:
    params = filled(shapes, DTYPES[kind.dtype], device)
    makers: dict[str, Make] = {
        OURS: lambda given: AdamW(given, lr=LR, **kind.options),
        "torch": lambda given: torch.optim.AdamW(given, lr=LR, fused=True),
        "torch foreach": lambda given: torch.optim.AdamW(given, lr=LR, foreach=True),
        "torch masters": Masters,
        "torchao": functools.partial(_torchao, device),
    }
    return [
        Variant(name, functools.partial(opened_optimizer, makers[name], params, _off))
        for name in (OURS, *kind.rivals)
    ]


def filled(
    shapes: Iterable[tuple[int, ...]], dtype: torch.dtype, device: torch.device, width: float = 0.02
) -> list[nn.Parameter]:
    """Parameters with gradients, both random."""
    empty = functools.partial(torch.empty, dtype=dtype, device=device)
    params = [nn.Parameter(empty(shape).normal_(0, width)) for shape in shapes]
    for param in params:
        param.grad = torch.empty_like(param).normal_(0, 0.01)
    return params


def opened_optimizer(
    make: Make, params: list[nn.Parameter], off: Callable[[Make, nn.Parameter], float]
) -> Opened:
    """An optimizer of these parameters, whose first steps on small ones are not far `off`."""
    far = off(make, params[0])  # before the big states are made
    optimizer = make(params)
    return Opened(optimizer.step, lambda: far, lambda: state_bytes(optimizer))


def state_bytes(optimizer: Any) -> int:
    """Bytes of the tensors that an optimizer keeps, counted by their storages."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [t for t in (*values, *getattr(optimizer, "masters", ())) if torch.is_tensor(t)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _off(make: Make, like: nn.Parameter) -> float:
    """Some steps against fp64, in units of the rounding of the greatest parameter in each step.

    Parameters are small beside a step, so that a step that is wrong shows.
    """
    dtype = like.dtype
    (param,) = filled([(64, 64)], dtype, like.device, width=1e-4)
    assert param.grad is not None
    x = nn.Parameter(param.detach().double())
    x.grad = param.grad.double()
    optimizers = make([param]), torch.optim.AdamW([x], lr=LR)
    for _ in range(STEPS):
        for optimizer in optimizers:
            optimizer.step()
    rounding = torch.finfo(dtype).eps * float(x.detach().abs().max()) * STEPS
    # 16-bit moments move the update itself: by a rounding of each of them.
    rounding += STEPS * LR * torch.finfo(dtype).eps
    return float((param.detach().double() - x.detach()).abs().max()) / rounding


class Masters:
    """Keeps fp32 masters of bf16 parameters with torch alone: casts, step, copies."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self._params = params
        self.masters = [nn.Parameter(param.detach().float()) for param in params]
        for master in self.masters:
            master.grad = torch.empty_like(master)
        self._optimizer = torch.optim.AdamW(self.masters, lr=LR, fused=True)
        self.state = self._optimizer.state

    @torch.no_grad()
    def step(self) -> None:
        """A step of the masters, from and to the parameters."""
        wide: list[Tensor] = [m.grad for m in self.masters if m.grad is not None]
        foreach_copy_(wide, [p.grad for p in self._params if p.grad is not None])
        self._optimizer.step()
        foreach_copy_([*self._params], [*self.masters])


def _torchao(device: torch.device, params: list[nn.Parameter]) -> Any:
    rival = needed("torchao.optim", "torchao", device)
    return rival._AdamW(params, lr=LR, bf16_stochastic_round=True)
