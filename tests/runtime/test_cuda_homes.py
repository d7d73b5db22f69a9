"""Where the results of graph replays lie, and what a caller gets of them: no GPU is needed."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from interlace.runtime.cuda.graphs.captured import GraphPair, giver


def five() -> list[torch.Tensor]:
    return [torch.randn(2, 3) for _ in range(5)]


@pytest.mark.parametrize("static", [False, True])
def test_results_in_the_callers_outputs_are_those_of_each_run(static: bool) -> None:
    x, y, z, *_ = five()
    outs = [(1, y), (2, z)]
    for results, numbers in (((z, y), (2, 1)), ((z,), (2,)), ((y, x), (1,))):
        give = giver(results, outs, [], [x, y, z] if static else None)
        given = [x.clone(), y.clone(), z.clone()]
        for found, number in zip(give(given), numbers, strict=False):
            assert found is given[number]


def test_other_results_are_copies(seed: int) -> None:
    torch.manual_seed(seed)
    x, y, z, own, held = five()
    results = (y, (own, y.view(6), 3), None, x, held)
    given = [x.clone(), y.clone(), z.clone()]
    found: Any = giver(results, [(1, y), (2, z)], [held])(given)
    assert found[0] is given[1]
    copy, view, number = found[1]
    assert torch.equal(copy, own)
    assert copy.data_ptr() != own.data_ptr()
    assert torch.equal(view, y.view(6))
    assert view.data_ptr() != y.data_ptr()
    assert (number, found[2]) == (3, None)
    assert torch.equal(found[3], x)
    assert found[3].data_ptr() != x.data_ptr()
    assert found[4] is held


def test_static_results_are_the_graphs_own() -> None:
    """But not what lies in memory of the caller's, also as a view: that is copied."""
    x, y, z, own, held = five()
    results: Any = (own, (x, y), y[:1], z, held)
    give = giver(results, [(2, z)], [held], [x.view(6), y])
    given = [x, y, z.clone()]
    first, (second, third), part, out, kept = give(given)
    assert (first is own, out is given[2], kept is held) == (True, True, True)
    for mine, other in ((second, x), (third, y), (part, y[:1])):
        assert torch.equal(mine, other)
        assert mine.data_ptr() != other.data_ptr()
    one = giver((own, z), [], [], [x])
    assert one([x]) is one([y])
    assert giver((), [], [], [])([]) == giver((), [], [])([]) == ()


def test_views_of_outputs_are_not_taken_for_the_outputs() -> None:
    y, empty = torch.randn(3, 3), torch.empty(0)
    others = y.permute(1, 0), y.view(torch.int32), y[:2], empty
    given = torch.full((3, 3), torch.nan), torch.empty(0)
    for outs, kept in (([(0, y), (1, empty)], []), ([], [y, empty])):
        found = giver(others, outs, kept)(given)
        assert not any(mine is tensor for mine in found for tensor in (*given, y, empty))
        for mine, other in zip(found, others, strict=True):
            assert torch.equal(mine, other)
            assert mine.dtype == other.dtype
            assert mine.stride() == other.stride()
            assert mine.data_ptr() != other.data_ptr() or not mine.numel()


@pytest.mark.parametrize("static", [False, True])
def test_an_input_that_is_a_result_is_the_callers(static: bool) -> None:
    """As backward saves them; a view of one is copied."""
    x, y, *_ = five()
    none = frozenset[int]()
    pair = GraphPair([x, y], 2, Mock(), frozenset({1}), none, none, none)
    tensors = pair.tensors([x, y])
    pair.keep((*tensors, tensors[0][:1]), tensors, [], static)
    given = [x, torch.randn(2, 3)]
    first, second, part = pair.gives[0](given)
    assert first is x
    assert second is given[1]
    assert torch.equal(part, x[:1])
    assert part.data_ptr() != x.data_ptr()


def test_what_is_copied_is_not_kept_alive() -> None:
    """So that other graphs of the same memory can use it, and the caller's tensors can go."""
    for static in (False, True):
        block = torch.randn(4, 4)
        others = [block] if static else None
        item, ref = block[1:, ::2], StorageWeakRef(block.untyped_storage())
        give = giver((item, (item,), block[4:, 1:]), [], [], others)
        first, (second,), empty = give([])
        assert torch.equal(first, item)
        assert torch.equal(second, item)
        assert (empty.shape, empty.stride()) == ((0, 3), block[4:, 1:].stride())
        del item, block, others
        assert ref.expired()


@pytest.mark.parametrize("static", [False, True])
def test_copies_have_the_strides_of_what_they_are_copies_of(static: bool) -> None:
    """A backward is made for those of what its forward saves, such as a part of a split product."""
    whole, flat = torch.randn(4, 24), torch.randn(8)
    items = (
        whole.split(8, -1)[1],
        whole.t(),
        whole[:, :8].t(),
        flat.expand(4, 8),
        whole[:, :1].expand(4, 8),
        flat.unfold(0, 3, 1),
        flat[:1].expand(4),
        whole[:0].expand(0, 24),
    )
    for given in giver(items, [], [], [whole, flat] if static else None)([]), items:
        for found, item in zip(given, items, strict=True):
            assert torch.equal(found, item)
            assert (found.stride(), found.is_contiguous()) == (item.stride(), item.is_contiguous())
    found = giver(items, [], [], None)([])
    assert not {t.data_ptr() for t in found[:-1]} & {t.data_ptr() for t in (*items, whole, flat)}
