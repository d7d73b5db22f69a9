"""Adam's arithmetic on one tensor, in torch: the reference of adam/kernel.py, and the CPU's path.

    spec = AdamSpec(p=torch.bfloat16, g=torch.bfloat16, m=torch.bfloat16, v=torch.bfloat16)
    row = scalars(1, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
    update_reference(spec, FlatParam(p, g, m, v), row, key=key_of(seed=0, index=0))

All arithmetic is fp32, one IEEE operation after another and none contracted, so reference and
kernel give the same bits on every device. What is stored in bf16 with loss is rounded to nearest
or, where `AdamSpec.stochastic`, up with the probability of what would be cut off. Kingma and Ba,
"Adam" (arXiv:1412.6980); Loshchilov and Hutter, "Decoupled weight decay" (arXiv:1711.05101).

Note [Random bits]
    The bits that round are a hash of (seed, index of the parameter, step, index of the element in
    the whole parameter), so that all ranks, a resumed run and the kernel draw the same. Seed and
    parameter give a 64-bit key; step and key give two 32-bit keys a tensor; these and the element
    give one word: its low half rounds the first moment, its high half the second. The high half of
    its product with an odd constant rounds the parameter: uniform given the first of the others,
    and nearly so given the second.

Note [Remainders]
    A master of 32 bits is kept as a bf16 parameter and 16 bits more: master = parameter * 2^16 +
    remainder, as integers, the remainder signed. So the parameter is the master rounded to nearest
    (a tie away from zero), and the two together are exact. NaN is made canonical before it is
    split: a carry out of its mantissa would make it a zero. A number written to the parameter by
    others is joined with the old remainder, and is at most half a step of bf16 off; but a zero or
    an infinity may lie beside NaNs, and is then taken as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

WORD = 0xFFFFFFFF
NAN = 0x7FC00000
ROW = 11
"""Numbers in a row of scalars, in the order of `Scalars`."""


@dataclass(frozen=True, kw_only=True)
class AdamSpec:
    """Which kernel: the dtypes of parameter, gradient and moments, and what is done with them."""

    p: torch.dtype
    g: torch.dtype
    m: torch.dtype
    v: torch.dtype
    master: str | None = None
    """None, `fp32` (a master beside the parameter) or `remainder` (see Note [Remainders])."""
    coupled: bool = False
    """Adam's L2 penalty, through the gradient; AdamW decays the parameter."""
    stochastic: bool = False


class Scalars(NamedTuple):
    """Scalar inputs of a step, in double precision; each is rounded to fp32 once."""

    gain: float
    """Factor of the gradient: its sign."""
    l2: float
    from_g: float
    """1 if the first moment is worked out from the gradient's end, as torch.lerp does past 0.5."""
    slope: float
    beta2: float
    rest2: float
    """1 - beta2."""
    correction: float
    """1 / sqrt(1 - beta2^step)."""
    eps: float
    size: float
    """lr / (1 - beta1^step)."""
    decay: float
    step: float


class FlatParam(NamedTuple):
    """Dense memory of one parameter as 1-D tensors of the same length."""

    p: Tensor
    g: Tensor
    m: Tensor
    v: Tensor
    w: Tensor | None = None
    """The master or the remainder."""


def power(base: float, exponent: int) -> float:
    """Returns `base ** exponent` by repeated squaring, which rounds alike on every host."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def scalars(
    step: int,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    coupled: bool = False,
) -> Scalars:
    """The scalars of that step, counted from 1."""
    beta1, beta2 = betas
    near = 1 - beta1 < 0.5
    return Scalars(
        gain=-1.0 if maximize else 1.0,
        l2=weight_decay if coupled else 0.0,
        from_g=0.0 if near else 1.0,
        slope=1 - beta1 if near else 0.0 - beta1,
        beta2=beta2,
        rest2=1 - beta2,
        correction=1 / math.sqrt(1 - power(beta2, step)),
        eps=eps,
        size=lr / (1 - power(beta1, step)),
        decay=1.0 if coupled else 1 - lr * weight_decay,
        step=float(step),
    )


def key_of(seed: int, index: int) -> int:
    """The 64-bit key of a parameter: splitmix64 of the seed, then of that and the index."""

    def spread(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & (WORD << 32 | WORD)
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & (WORD << 32 | WORD)
        x = (x ^ x >> 27) * 0x94D049BB133111EB & (WORD << 32 | WORD)
        return x ^ x >> 31

    return spread(spread(seed & (WORD << 32 | WORD)) ^ index)


def mix(x: int) -> int:
    """A bijection of 32-bit words that scatters them."""
    x = (x ^ x >> 16) * 0x21F0AAAD & WORD
    x = (x ^ x >> 15) * 0x735A2D97 & WORD
    return x ^ x >> 15


def step_keys(key: int, step: int) -> tuple[int, int]:
    """The two 32-bit keys of a parameter at a step."""
    first = mix((key & WORD) ^ mix((step + 0x9E3779B9) & WORD))
    return first, mix((key >> 32) + mix(step ^ 0x85EBCA6B) & WORD)


def signed(word: int) -> int:
    """The int32 that has these bits."""
    return word - (1 << 32) if word >> 31 else word


def shifted(x: Tensor, by: int) -> Tensor:
    """A logical shift to the right of int32."""
    return (x >> by).bitwise_and_((1 << 32 - by) - 1)


def random_words(first: int, count: int, keys: tuple[int, int], device: torch.device) -> Tensor:
    """A random int32 for each element from number `first` on; see Note [Random bits]."""
    at = torch.arange(first, first + count, device=device)
    low = torch.bitwise_and(at, WORD).to(torch.int32)
    high = first >> 32
    here, next_ = (signed(keys[0] ^ mix(h & WORD)) for h in (high, high + 1))
    if (first + count - 1) >> 32 == high:
        x = low.bitwise_xor_(here)
    else:
        x = torch.where(at < (high + 1) << 32, low ^ here, low ^ next_)
    x = x.bitwise_xor_(shifted(x, 16)).mul_(0x21F0AAAD)
    x = x.bitwise_xor_(shifted(x, 15)).mul_(signed(0xD35A2D97)).add_(signed(keys[1]))
    return x.bitwise_xor_(shifted(x, 15))


def canonical(x: Tensor) -> Tensor:
    """The bits of an fp32 tensor, every NaN made the same."""
    return torch.where(x == x, x.view(torch.int32), NAN)


def store(to: Tensor, x: Tensor, bits: Tensor | None) -> None:
    """Rounds fp32 `x` into `to`: to nearest, or to bf16 by random `bits` of 0 to 2^16 - 1."""
    if bits is None or to.dtype != torch.bfloat16:
        to.copy_(x)
    else:
        to.view(torch.int16).copy_((canonical(x) + bits) >> 16)


def join(p: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of a bf16 parameter and its remainder (int16)."""
    bits = p.view(torch.int16).to(torch.int32) << 16
    master = (bits + remainder).view(torch.float32)
    return torch.where(master == master, master, bits.view(torch.float32))


def split(master: Tensor, p: Tensor, remainder: Tensor) -> None:
    """Writes a master into the parameter and its remainder; see Note [Remainders]."""
    bits = canonical(master)
    top = bits + 0x8000 >> 16
    p.view(torch.int16).copy_(top)
    remainder.copy_(bits - (top << 16))


def root(x: Tensor) -> Tensor:
    """The square root of fp32, correctly rounded: torch's own on a CPU may be off by one bit."""
    return x.double().sqrt_().float()


def update_reference(
    spec: AdamSpec,
    flat: FlatParam,
    row: Scalars,
    *,
    key: int,
    base: int = 0,
    chunk: int | None = None,
) -> None:
    """One step, in place, by chunks, so that temporaries stay small (and in the cache, on a CPU).
    `base` is the number of the first element in the whole parameter.
    """
    chunk = chunk or (1 << 16 if flat.p.device.type == "cpu" else 1 << 24)
    keys = step_keys(key, int(row.step))
    for start in range(0, flat.p.numel(), chunk):
        part = FlatParam(*(None if t is None else t[start : start + chunk] for t in flat))  # type: ignore[arg-type]
        _update_chunk(spec, part, row, base + start, keys)


def _update_chunk(
    spec: AdamSpec, c: FlatParam, row: Scalars, first: int, keys: tuple[int, int]
) -> None:
    if spec.master == "remainder":
        assert c.w is not None
        x = join(c.p, c.w)
    else:
        x = (c.p if c.w is None else c.w).float()
    g = c.g.float()
    if row.gain != 1:
        g = g * row.gain
    if spec.coupled and row.l2 != 0:
        g = g + x * row.l2
    old = c.m.float()
    m = (g - old).mul_(row.slope).add_(g if row.from_g else old)
    v = (g * row.rest2).mul_(g).add_(c.v.float() * row.beta2)
    update = (m * row.size).div_(root(v).mul_(row.correction).add_(row.eps))
    x = (x * row.decay).sub_(update)

    kept = (c.m, c.v) if spec.master else (c.m, c.v, c.p)
    draws = spec.stochastic and any(tensor.dtype == torch.bfloat16 for tensor in kept)
    words = random_words(first, x.numel(), keys, x.device) if draws else None
    store(c.m, m, None if words is None else words & 0xFFFF)
    store(c.v, v, None if words is None else shifted(words, 16))
    if spec.master == "remainder":
        assert c.w is not None
        split(x, c.p, c.w)
    elif c.w is not None:
        c.w.copy_(x)
        c.p.copy_(x)
    else:
        bits = None if words is None else shifted(words * signed(0x9E3779B1), 16)
        store(c.p, x, bits)
