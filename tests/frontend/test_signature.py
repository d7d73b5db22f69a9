"""The quick comparison of signatures says what the slow one says."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from interlace.frontend.calling.arguments import has_signature, signature

X = torch.zeros(4, 6)
ARGUMENTS: list[list[Any]] = [
    [X],
    [X, X],
    [X.double()],
    [X.t()],
    [X[:, :1]],
    [torch.zeros(4, 1)],
    [X[:1]],
    [torch.zeros(1, 6).t().contiguous().t()],
    [torch.zeros(0, 2, 6)],
    [torch.zeros(0, 4, 6)[:, :2]],
    [torch.zeros(())],
    [3],
    [4],
    [3.5],
    [True],
    [None],
    [object()],
    [X, 3, None],
    [X, 3, X],
    [],
]


def test_strides_of_nothing_say_nothing() -> None:
    """Of an empty batch ranks hold tensors with strides of their own, and must bind alike."""
    one, other = torch.zeros(0, 2, 6), torch.zeros(0, 4, 6)[:, :2]
    assert one.stride() != other.stride()
    assert signature([one]) == signature([other]) != signature([one.view(0, 6, 2)])
    assert has_signature([other], signature([one]))


def test_both_agree_on_every_pair() -> None:
    for one, other in itertools.product(ARGUMENTS, repeat=2):
        key = signature(one)
        assert has_signature(other, key) == (signature(other) == key), (one, other)
    assert sum(has_signature(b, signature(a)) for a in ARGUMENTS for b in ARGUMENTS) > len(
        ARGUMENTS
    )
