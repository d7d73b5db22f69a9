"""A language model trained with low-precision states ends where one with fp32 states does.

Where that is, is known up to noise: the spread over runs that differ in their seed alone (initial
weights and order of batches). After some hundred steps the smallest difference has grown into a run
as different as another seed's, so means over seeds are compared, by their standard error.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from interlace.demo.model import Transformer
from interlace.demo.plan import ModelConfig
from interlace.demo.train import Batches, read_text
from interlace.optim import AdamW

BF16 = torch.bfloat16
MOMENTS: dict[str, Any] = {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}
SMALL = ModelConfig(layers=2, dim=64, heads=4, hidden=192, sequence=64, batch=8)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small are slower on several, above all where others compute as well."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def losses(
    steps: int, seed: int, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[float, float]:
    """The loss on text that is not trained on: before, and after that many steps."""
    text = read_text(400_000)
    torch.manual_seed(seed)
    model = Transformer(SMALL).to(dtype)
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.1, **options)
    batches = Batches(text[:-50_000], SMALL.sequence, SMALL.batch, seed)
    unseen = Batches(text[-50_000:], SMALL.sequence, 64)

    def loss_of(batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        tokens, targets = batch
        return F.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())

    def measure() -> float:
        with torch.no_grad():
            return loss_of(unseen[0]).item()

    first = measure()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20, 2 * (1 - step / steps))
        optimizer.zero_grad()
        loss_of(batches[step]).backward()
        optimizer.step()
    return first, measure()


def check(steps: int, dtype: torch.dtype, master: str | None, seeds: range) -> None:
    """Means of the last losses, four standard errors apart at most (with 5 seeds, once in 250)."""
    wide = [losses(steps, seed, dtype, {"master_weights": master and "fp32"}) for seed in seeds]
    narrow = [losses(steps, seed, dtype, {**MOMENTS, "master_weights": master}) for seed in seeds]
    ends = [end for _, end in wide]
    others = [end for _, end in narrow]
    spread = ((statistics.variance(ends) + statistics.variance(others)) / 2) ** 0.5
    noise = spread * (2 / len(seeds)) ** 0.5
    apart = statistics.mean(others) - statistics.mean(ends)
    print(f"fp32 states end at {ends}, bf16 moments at {others}: {apart / noise:.2f} errors apart")
    assert all(start - end > 1 for start, end in wide + narrow), "it learns"
    assert abs(apart) < 4 * noise
    assert spread < 0.03, "were runs this different, the comparison would show nothing"


def test_ends_within_noise_after_a_few_steps() -> None:
    check(40, torch.float32, None, range(3))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("dtype", "master"), [(torch.float32, None), (BF16, "remainder"), (BF16, "fp32")]
)
def test_ends_within_noise_after_a_thousand_steps(dtype: torch.dtype, master: str | None) -> None:
    check(1000, dtype, master, range(5))
