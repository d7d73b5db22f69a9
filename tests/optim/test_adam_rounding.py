"""Stochastic rounding: right on average, where nearest is not; and what its bits hang on."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from interlace.optim import AdamW
from interlace.optim.adam.arithmetic import (
    AdamSpec,
    FlatParam,
    key_of,
    random_words,
    scalars,
    step_keys,
    store,
    update_reference,
)

BF16 = torch.bfloat16
CPU = torch.device("cpu")


def second_moments(steps: int, **options: Any) -> tuple[float, float]:
    """The mean second moment before its gradient falls tenfold, and that many steps after."""
    param = torch.zeros(1024, requires_grad=True)
    optimizer = AdamW([param], lr=0.0, betas=(0.9, 0.999), **options)
    found = []
    for scale, count in ((1.0, 60), (0.1, steps)):
        param.grad = torch.full_like(param, scale)
        for _ in range(count):
            optimizer.step()
        found.append(optimizer.state[param]["exp_avg_sq"].double().mean().item())
    return found[0], found[1]


def test_second_moments_decay(seed: int) -> None:
    """beta2 = 0.999 in bf16: to nearest, v stays where it was; ours is that of fp32."""
    steps = 1000
    high = 1 - 0.999**60
    exact = high * 0.999**steps + 0.01 * (1 - 0.999**steps)
    before, after = second_moments(20, exp_avg_sq_dtype=BF16, stochastic_rounding=False)
    assert before == after > 0.9 * high, "v is frozen: a step of it is below half a unit"
    _, wide = second_moments(20)
    assert wide < 0.99 * high, "in fp32 the same steps are seen"
    _, ours = second_moments(steps, exp_avg_sq_dtype=BF16, seed=seed)
    # A rounding is off by a coin's deviation at most, half a unit: 2^-8 of v. Independent over
    # 1000 steps and 1024 elements that makes 2^-8 * sqrt(1000 / 1024) of the largest v; four such.
    assert abs(ours - exact) < 4 * 2**-8 * (steps / 1024) ** 0.5 * high
    assert exact < 0.5 * high


@pytest.mark.parametrize("master", ["fp32", None])
def test_small_updates_of_a_bf16_parameter_are_not_lost(master: str | None, seed: int) -> None:
    """Updates of 1/20 of a unit: to nearest none is ever made; ours come in the mean."""
    moved = []
    for stochastic in (False, True):
        param = torch.ones(4096, dtype=BF16, requires_grad=True)
        optimizer = AdamW(
            [param], lr=2**-7 / 20, weight_decay=0.0, master_weights=master,
            stochastic_rounding=stochastic, seed=seed,
        )  # fmt: skip
        for _ in range(100):
            param.grad = -torch.ones_like(param)
            optimizer.step()
        moved.append((param.detach().double().mean() - 1).item())
    wanted = 100 * 2**-7 / 20
    if master is None:
        assert moved[0] == 0
        # 100 coins of one unit each, over 4096 elements: four deviations of their mean.
        assert abs(moved[1] - wanted) < 4 * 2**-7 * (100 * 0.05 * 0.95 / 4096) ** 0.5
    else:
        assert moved[0] == moved[1] == pytest.approx(wanted, abs=2**-8)


def test_a_number_is_rounded_up_as_often_as_it_is_near(seed: int) -> None:
    """For every one of the 2^16 fractions: the two neighbours only, in the right proportion."""
    low = torch.arange(1 << 16, dtype=torch.int32)
    x = (low + 0x3F80_0000).view(torch.float32)  # from 1 to the next bf16
    ups = torch.zeros(1 << 16)
    rounds = 64
    for step in range(rounds):
        words = random_words(seed, 1 << 16, step_keys(key_of(seed, 3), step), CPU)
        to = torch.empty(1 << 16, dtype=BF16)
        store(to, x, words & 0xFFFF)
        assert bool(((to == 1.0) | (to == 1.0078125)).all())
        ups += to > 1
    assert float(ups[0]) == 0, "what is exact stays"
    wanted = low / 65536
    for part in range(16):  # each sixteenth: five deviations of the mean of 4096 * 64 coins
        at = slice(part << 12, part + 1 << 12)
        chance = wanted[at].mean().item()
        room = 5 * (chance * (1 - chance) / (4096 * rounds)) ** 0.5
        assert abs(ups[at].mean().item() / rounds - chance) < room


@pytest.mark.parametrize(
    ("key", "step", "first", "words"),
    [
        (key_of(0, 0), 1, 0, [-1558693219, -1428306909, 191802319, 1194009609]),
        (key_of(7, 3), 1000, (1 << 32) - 2, [11112342, -1641257067, -2073975628, 164137710]),
    ],
)
def test_random_words_stay_what_they_were(
    key: int, step: int, first: int, words: list[int]
) -> None:
    """Checkpoints go on bit for bit in later releases; these were found even and uncorrelated."""
    assert random_words(first, 4, step_keys(key, step), CPU).tolist() == words


def test_bits_hang_on_the_elements_number_alone(seed: int) -> None:
    """Cut anywhere, across 2^32 too, a parameter is rounded as when it is whole."""
    count, base = 5000, (1 << 32) - 1777
    spec = AdamSpec(p=BF16, g=BF16, m=BF16, v=BF16, stochastic=True)
    whole = [torch.randn(count).abs().bfloat16() for _ in range(4)]
    cut = [t.clone() for t in whole]
    row = scalars(77, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    key = key_of(seed, 1)
    update_reference(spec, FlatParam(*whole), row, key=key, base=base)
    for start, stop in itertools.pairwise((0, 3, 1777, 1778, 4000, count)):
        part = FlatParam(*(t[start:stop] for t in cut))
        update_reference(spec, part, row, key=key, base=base + start)
    assert all(map(torch.equal, whole, cut))


def test_replicas_round_alike_and_seeds_apart(seed: int) -> None:
    made = []
    for chosen in (seed, seed, seed + 1):
        params = [torch.linspace(-1, 1, 999).bfloat16().requires_grad_() for _ in range(2)]
        optimizer = AdamW(params, lr=0.01, seed=chosen)
        for _ in range(3):
            for param in params:
                param.grad = torch.full_like(param, 0.3)
            optimizer.step()
        assert not torch.equal(*params), "parameters have bits of their own"
        made.append(params[0])
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
