"""Tensors of a trace in Python objects: refused, and the objects as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.frontend.models import Function
from torch import nn

import interlace
from interlace.errors import UnsupportedError


class Cache:
    """A cache that grows, as `generate` has: no pytree, and no tensor at first."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.by_name: dict[str, torch.Tensor] = {}
        self.last: torch.Tensor | None = None
        self.count = 0

    def grow(self, key: torch.Tensor) -> torch.Tensor:
        """All keys."""
        self.keys[:] = [torch.cat([*self.keys, key])]
        self.by_name["last"] = self.last = key
        self.count += 1
        return self.keys[0]


class Decoder(nn.Module):
    """One layer over a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        """x [1, width]."""
        return cache.grow(self.key(x)).sum(0)


def tensors_of(cache: Cache) -> list[torch.Tensor]:
    """What it holds."""
    rest = [cache.last] if cache.last is not None else []
    return [*cache.keys, *cache.by_name.values(), *rest]


@pytest.mark.parametrize("full", [False, True])
def test_a_cache_that_grows_is_left_as_it_was(full: bool) -> None:
    cache, layer = Cache(), Decoder()
    if full:
        cache.grow(torch.ones(1, 8))
    before, count = tensors_of(cache), cache.count
    compiled = interlace.compile(layer)
    told = "uses a tensor that is not among its arguments" if full else "argument 1.*torch.compile"
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=told), torch.no_grad():
            compiled(torch.ones(1, 8), cache)
        assert [id(x) for x in tensors_of(cache)] == [id(x) for x in before]
        assert cache.count == count


def test_what_a_trace_leaves_as_it_fails_is_taken_out() -> None:
    cache = Cache()

    def fn(x: torch.Tensor, cache: Cache) -> torch.Tensor:
        cache.grow(x + 1)
        raise ValueError("of the user's own")

    with pytest.raises(ValueError, match="of the user's own"):
        interlace.compile(Function(fn))(torch.ones(1, 8), cache)
    assert tensors_of(cache) == []


def test_attributes_count_too() -> None:
    class Noting(nn.Module):
        """Keeps its last result."""

        last: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """x of any shape."""
            self.last = x * 2
            return self.last

    model = Noting()
    with pytest.raises(UnsupportedError, match=r"Noting\.last"):
        interlace.compile(model)(torch.ones(2))
    assert model.last is None


def test_what_holds_no_tensor_of_a_trace_is_left_alone() -> None:
    cache = Cache()
    kept = cache.last = torch.ones(2)

    def fn(x: torch.Tensor, cache: Cache) -> torch.Tensor:
        cache.count += 1
        return x * 2

    assert interlace.compile(Function(fn))(torch.ones(2), cache).tolist() == [2.0, 2.0]
    assert cache.last is kept
