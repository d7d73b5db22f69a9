"""Forward passes are told apart by what they saved, and by no more than that needs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from interlace.frontend.calling.forwards import Forwards


def noted(saved: int, results: list[object], args: list[Tensor]) -> tuple[Forwards, list[int]]:
    kept: list[int] = []
    forwards = Forwards()
    forwards.saved = saved
    forwards.note(results, args, kept)
    return forwards, kept


def test_the_last_tensor_made_tells_if_it_is_saved() -> None:
    x, y, z = (torch.ones(2) for _ in range(3))
    forwards, kept = noted(3, [y, x, z, 3], [x])
    assert kept == [2]
    assert forwards.origin([x, z, torch.ones(2)]) == "of forward 1"
    assert forwards.origin([x, y]) == ""


def test_all_that_is_handed_on_tells_if_nothing_made_is_saved() -> None:
    x, w, y = (torch.ones(2) for _ in range(3))
    forwards, kept = noted(2, [y, x, w], [x, w])
    assert kept == [1, 2]
    assert forwards.origin([x, w, torch.ones(2)]) == "of forward 1"
    assert forwards.origin([x, torch.ones(2)]) == ""


def test_numbers_alone_tell_nothing() -> None:
    x = torch.ones(2)
    assert noted(1, [x, 3], [x])[0].origin([3, x]) == "of forward 1"
    assert noted(1, [3], [])[0].origin([3]) == ""


def test_a_graph_that_communicates_nothing_counts_no_forwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Forwards, "note", None)
    monkeypatch.setattr(Forwards, "origin", None)
    x = torch.ones(3, requires_grad=True)
    torch.compile(lambda x: x.sin() * x, backend="interlace")(x).sum().backward()
    assert x.grad is not None
