"""DTensors whose sizes are symbolic; caches of Programs that are too small."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from tests.frontend.models import feed_forward, world_mesh, wrong_steps
from tests.support.pool import Pool
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import interlace
from interlace.errors import CacheWarning, UnsupportedError
from interlace.frontend import backend

WIDTH = 16


PLACES = {"rep": Replicate(), "rows": Shard(0), "sequence": Shard(1)}


def style(name: str, wrapped: bool, sizes: list[tuple[int, int]]) -> list[str]:
    """Batches and lengths that change at once, through one of the usual styles."""
    torch.compiler.reset()
    torch.set_num_threads(1)
    mesh, place = world_mesh(), PLACES[name]
    model = feed_forward(WIDTH, place, place)
    options: Any = {"timeout_s": 60.0}
    call = torch.compile(model, backend=backend, dynamic=True, options=options)
    inputs: list[torch.Tensor] = []
    for b, s in sizes:
        x = torch.randn(b, s, WIDTH, generator=torch.Generator().manual_seed(b * 100 + s))
        inputs.append(DTensor.from_local(x, mesh, [place]) if wrapped else x)
    return wrong_steps(model, call, inputs)


SLOW = pytest.mark.slow


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "wrapped"),
    [
        ("rep", False),
        pytest.param("rows", True, marks=SLOW),
        pytest.param("sequence", False, marks=SLOW),
    ],
)
def test_batch_and_sequence_change_at_once(pool: Pool, seed: int, name: str, wrapped: bool) -> None:
    rng = random.Random(seed)
    sizes = [(rng.randrange(2, 5), rng.randrange(8, 24)) for _ in range(3)]
    assert pool(2).run(style, name, wrapped, sizes, timeout_s=110) == [[], []]


def batches_and_lengths() -> tuple[list[str], str]:
    """Sequence parallelism where the batch and the length change; what differs, and `explain`."""
    torch.compiler.reset()
    torch.set_num_threads(1)
    mesh = world_mesh()
    model = feed_forward(WIDTH, Shard(1), Shard(1))
    options: Any = {"timeout_s": 60.0, "strategy": "peer"}
    call: Any = torch.compile(model, backend=backend, dynamic=True, options=options)
    inputs: list[torch.Tensor] = [
        DTensor.from_local(torch.randn(batch, rows, WIDTH), mesh, [Shard(1)])
        for batch, rows in [(3, 9), (3, 11), (4, 9), (3, 13), (4, 12)]
    ]
    return wrong_steps(model, call, inputs), interlace.explain(call)


@pytest.mark.timeout(120)
def test_a_batch_that_a_class_pins_is_a_number(pool: Pool) -> None:
    """Rows are scattered as often as there are sequences, so each batch size has its Programs: for
    all lengths of a bucket, and overlapped."""
    for wrong, told in pool(2).run(batches_and_lengths, timeout_s=110):
        assert wrong == []
        assert "for these sizes alone" not in told
        assert "traced" not in told
        assert "number 3 of its graph" not in told
        assert "peer" in told


def warned(call: Callable[[torch.Tensor], Any], rows: list[int]) -> list[str]:
    """The warnings of calls with so many rows."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CacheWarning)
        for n in rows:
            call(torch.ones(n, 4))
    return [str(each.message) for each in caught if each.category is CacheWarning]


def test_a_cache_that_drops_what_comes_again_warns_once() -> None:
    net = nn.Sequential(nn.ReLU())
    compiled = interlace.compile(net, options={"cache_size": 2})
    assert not warned(compiled, [2, 3, 4, 5])  # none comes again
    (told,) = warned(compiled, [2, 3, 4, 5, 2])
    for part in ("Sequential met about", "keeps 2", "cache_size", "dynamic=True"):
        assert part in told
    assert not warned(interlace.compile(net, options={"cache_size": 4}), [2, 3, 4, 5] * 2)


def classes_that_come_again(rows: list[int]) -> list[str]:
    """The warnings of inference with so many rows, by one Program at a time."""
    torch.compiler.reset()
    options: Any = {"cache_size": 1}
    model = feed_forward(WIDTH, Shard(0), Shard(0))
    call = torch.compile(model, backend=backend, dynamic=True, options=options)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always", CacheWarning)
        for n in rows:
            call(torch.ones(n, WIDTH))
    return [str(each.message) for each in caught if each.category is CacheWarning]


def test_classes_of_sizes_that_come_again_warn_once(pool: Pool) -> None:
    assert pool(2).run(classes_that_come_again, [20, 24, 40, 44]) == [[], []]
    for (told,) in pool(2).run(classes_that_come_again, [20, 40, 24, 44, 20]):
        assert "inference graph" in told
        assert "keeps 1" in told


def what_torch_cannot_trace() -> str:
    """What is told where torch fails in a trace of a DTensor whose sizes are symbolic."""
    torch.compiler.reset()

    def fails(*_: Any) -> Any:
        raise TypeError("mul expected 2 arguments, got 3")

    call: Any = torch.compile(
        feed_forward(WIDTH, Shard(0), Shard(0)), backend=backend, dynamic=True
    )
    with mock.patch("interlace.frontend.backend.aot_autograd", return_value=fails):
        try:
            call(torch.randn(8, WIDTH))
        except UnsupportedError as error:
            return str(error)
    return ""


def test_what_torch_cannot_trace_is_a_typed_error(pool: Pool) -> None:
    for told in pool(2).run(what_torch_cannot_trace):
        assert "torch cannot trace these DTensors" in told
        assert "mul expected 2 arguments" in told
        assert "dynamic=False" in told
