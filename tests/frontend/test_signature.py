"""Signatures tell arguments from one another, and say nothing of what has no meaning."""

from __future__ import annotations

from typing import Any

import torch

from interlace.frontend.calling.arguments import signature

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


def test_every_other_layout_type_and_number_is_told() -> None:
    """But for the strides of a dimension of one and of nothing, and for what is no number."""
    keys = [signature(args) for args in ARGUMENTS]
    alike = [(i, j) for i, one in enumerate(keys) for j in range(i) if one == keys[j]]
    assert [(len(ARGUMENTS[i]), i - j) for i, j in alike] == [(1, 1)] * 3, alike
