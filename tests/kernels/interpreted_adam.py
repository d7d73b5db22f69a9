"""Runs the Adam kernels in Triton's interpreter; see test_interpreted.py.

Whole optimizers: tables, addresses and rows of scalars are those that a GPU would get. Each case
is stepped twice, by the kernel and by the reference, and everything must have the same bits.
"""

# pyright: reportArgumentType=false

from __future__ import annotations

import random
import warnings
from typing import Any

import torch
from tests.support.interpreting import run

from interlace.kernels import launch as launcher
from interlace.optim import Adam, AdamW
from interlace.optim.adam import plan as adam_plan
from interlace.optim.adam import table as adam_table
from interlace.optim.adam.arithmetic import AdamSpec, key_of, scalars, update_reference

warnings.filterwarnings("ignore", message="overflow encountered")


LAUNCHED: list[str] = []


class Interpreted:
    """Stands in for a compiled kernel."""

    def __init__(self, source: Any, device: torch.device) -> None:
        self.source = source

    def launch(self, stream: int, grid: int, args: tuple[int, ...]) -> None:
        LAUNCHED.append(self.source.kernel.fn.__name__)
        self.source.kernel[(grid,)](*args, **self.source.constants)


launcher.LoadedKernel = Interpreted  # type: ignore[misc]


def params_of(draw: random.Random, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    """Parameters of many sizes, empty ones and odd addresses among them."""
    made = []
    for _ in range(draw.randint(1, 4)):
        count = draw.choice([0, 1, 7, 8, 1030, 4099, 16384, 16384 + 1029])
        start = draw.choice([0, 0, 1, 3])
        whole = torch.randn(count + start).to(draw.choice(dtypes))
        param = whole[start:]
        if count % 4 == 0 and draw.random() < 0.5:
            param = param.view(4, -1).t()
        made.append(param.detach().requires_grad_())
    return made


def options_of(draw: random.Random) -> dict[str, Any]:
    dtypes = [torch.float32, torch.bfloat16]
    return {
        "lr": draw.choice([1e-3, 0.3]),
        "betas": draw.choice([(0.9, 0.999), (0.3, 0.7), (0.0, 0.0)]),
        "weight_decay": draw.choice([0.0, 0.1]),
        "maximize": draw.random() < 0.3,
        "exp_avg_dtype": draw.choice(dtypes),
        "exp_avg_sq_dtype": draw.choice(dtypes),
        "stochastic_rounding": draw.random() < 0.7,
        "seed": draw.randrange(1 << 40),
    }


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """For comparing: NaNs of any kind are equal, and zeros only if their signs are."""
    tensor = tensor.detach()
    if not tensor.is_floating_point():
        return tensor
    whole = tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize])
    return torch.where(tensor.isnan(), torch.zeros_like(whole) - 7, whole)


def same(mine: torch.Tensor, other: torch.Tensor, what: object) -> None:
    differ = (bits(mine) != bits(other)).nonzero()[:5].tolist()
    shown = [(at, mine[tuple(at)].item(), other[tuple(at)].item()) for at in differ]
    assert not differ, (what, shown)


def gradients(params: list[torch.Tensor], skip: int | None) -> list[torch.Tensor | None]:
    made: list[torch.Tensor | None] = []
    for i, param in enumerate(params):
        grad = torch.randn_like(param) * 10.0 ** random.randint(-6, 3)
        if param.numel() > 20:
            flat = grad.as_strided((param.numel(),), (1,), grad.storage_offset())
            flat[:9] = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 1e30, 1e-30, 1, 2, 3])
        made.append(None if i == skip else grad)
    return made


@torch.no_grad()
def overwrite(params: list[torch.Tensor], draw: random.Random) -> None:
    """What a user may write between steps: beside some remainders, 0 and inf look like NaN."""
    for param in params:
        flat = param.as_strided((param.numel(),), (1,), param.storage_offset())
        flat[9::3] = draw.choice([0.0, -0.0, float("inf"), -float("inf")])


def check_optimizer(draw: random.Random) -> None:
    """The same steps through the kernel and through the reference."""
    master = draw.choice([None, "fp32", "remainder"])
    dtypes = [torch.float32, torch.bfloat16] + ([torch.float16] if master != "remainder" else [])
    params, options = params_of(draw, dtypes), options_of(draw)
    options |= {"master_weights": master}
    references = [p.detach().clone().requires_grad_() for p in params]
    kind = draw.choice([Adam, AdamW])
    by_kernel, by_reference = kind(params, **options), kind(references, **options)
    for step in range(3):
        if step == 1:
            again = draw.random()
            overwrite(params, random.Random(again))
            overwrite(references, random.Random(again))
        skip = draw.choice([None, 0])
        grads = gradients(params, skip)
        for param, reference, grad in zip(params, references, grads, strict=True):
            param.grad = grad
            reference.grad = None if grad is None else grad.clone()
        LAUNCHED.clear()
        adam_plan.served = lambda device: True
        by_kernel.step()
        if any(grad is not None and grad.numel() for grad in grads):
            assert "adam_kernel" in LAUNCHED, (options, LAUNCHED)
        adam_plan.served = lambda device: False
        LAUNCHED.clear()
        by_reference.step()
        assert not LAUNCHED
        for number, (param, reference) in enumerate(zip(params, references, strict=True)):
            what = (kind.__name__, options, step, number, param.shape, param.dtype)
            what = (
                *what,
                by_kernel.state[param].get("step"),
                by_reference.state[reference].get("step"),
            )
            same(param, reference, what)
            mine, other = by_kernel.state[param], by_reference.state[reference]
            assert sorted(mine) == sorted(other), what
            for name in mine:
                word = torch.int16 if name == "remainder" else mine[name].dtype
                same(mine[name].view(word), other[name].view(word), (name, *what))


def check_far(draw: random.Random) -> None:
    """Elements on both sides of number 2^32: the random words take the upper half in."""
    count = 1031
    base = (draw.randrange(3) << 32) - draw.randrange(count) + (1 << 32)
    spec = AdamSpec(p=torch.bfloat16, g=torch.bfloat16, m=torch.bfloat16, v=torch.bfloat16,
                stochastic=True)  # fmt: skip
    made = [torch.randn(count).abs().bfloat16() for _ in range(4)]
    flat = adam_plan.FlatParam(*(t.clone() for t in made))
    key = key_of(draw.randrange(1 << 64), 5)
    hyper: Any = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    row = scalars(draw.randrange(1, 10**6), **hyper)
    update_reference(spec, flat, row, key=key, base=base, chunk=draw.choice([None, 100]))
    p, g, m, v = made
    work = adam_table.TableRow(
        p.data_ptr(), m.data_ptr(), v.data_ptr(), 0, count=count, base=base, key=key
    )
    launch = adam_table.Launch(torch.device("cpu"), spec, [work], aligned=True)
    launch.run([g.data_ptr()], [row], [0])
    for mine, other, name in zip((p, m, v), (flat.p, flat.m, flat.v), "pmv", strict=True):
        assert torch.equal(mine, other), (name, base)


if __name__ == "__main__":
    run(check_optimizer, once=check_far)
