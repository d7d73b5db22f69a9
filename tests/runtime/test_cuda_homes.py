"""Where the results of graph replays lie, and what a caller gets of them: no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any
from unittest.mock import Mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from interlace.runtime.cuda.graphs.captured import GraphPair, Touched, layouts_of


def five() -> list[torch.Tensor]:
    return [torch.randn(2, 3) for _ in range(5)]


def replayed(
    results: tuple[Any, ...],
    tensors: Sequence[torch.Tensor],
    kept: Sequence[torch.Tensor] = (),
    lasting: Sequence[torch.Tensor] = (),
    copied: Collection[int] = (),
    moved: frozenset[int] = frozenset(),
) -> tuple[GraphPair, Callable[[Sequence[torch.Tensor]], Any]]:
    """A pair that was captured with these tensors and had these results, and its replays."""
    pair = GraphPair(tensors, len(tensors), Mock(), Touched(), moved, copied)
    pair.make(layouts_of(results, tensors, kept, lasting))
    pair.bring(results)
    pair.take_results(results, tensors, kept, lasting)
    pair.launch.append(Mock())
    return pair, lambda given: pair.run(0, 1, given)


def test_results_in_the_callers_tensors_are_those_of_each_run() -> None:
    x, y, z, *_ = five()
    for results, numbers in (((z, y), (2, 1)), ((z,), (2,)), ((y, x), (1, 0))):
        _, run = replayed(results, [x, y, z])
        given = [x.clone(), y.clone(), z.clone()]
        for found, number in zip(run(given), numbers, strict=True):
            assert found is given[number]


def test_parts_of_the_callers_tensors_are_copies(seed: int) -> None:
    torch.manual_seed(seed)
    x, y, _, _, held = five()
    _, run = replayed((y.view(6), (x[:1], 3), None, held, y.view(torch.int32)), [x, y], [held])
    view, (part, number), none, same, bits = run([x, y])
    assert (number, none) == (3, None)
    assert same is held  # registered: no other replay writes it but where the caller wants it
    for mine, other in ((view, y.view(6)), (part, x[:1]), (bits, y.view(torch.int32))):
        assert torch.equal(mine, other)
        assert mine.data_ptr() != other.data_ptr()


def test_an_input_that_is_a_result_is_the_callers_also_where_it_moves() -> None:
    """As backward saves them; a view of one is copied."""
    x, y, *_ = five()
    pair = GraphPair([x, y], 2, Mock(), Touched(), frozenset({1}), ())
    tensors = pair.tensors([x, y])
    pair.take_results((*tensors, tensors[0][:1]), tensors, [], [])
    pair.launch.append(Mock())
    given = [x, torch.randn(2, 3)]
    first, second, part = pair.run(0, 1, given)
    assert first is x
    assert second is given[1]
    assert torch.equal(part, x[:1])
    assert part.data_ptr() != x.data_ptr()


def test_what_operators_made_lies_in_memory_of_the_pair(seed: int) -> None:
    """Each storage of it once, with all views of it; the graph's own memory is let go of."""
    torch.manual_seed(seed)
    x, lasting, *_ = five()
    block, alone = torch.randn(4, 6), torch.randn(3)
    results = (block[:, 1:3], (alone, block.t()), lasting)
    wanted = [block[:, 1:3].clone(), alone.clone(), block.t().clone(), lasting.clone()]
    where, ref = lasting.data_ptr(), StorageWeakRef(block.untyped_storage())
    pair, run = replayed(results, [x], lasting=[lasting])
    del block, alone, results, lasting
    assert ref.expired()
    first, (second, third), fourth = run([x])
    for found, right in zip((first, second, third, fourth), wanted, strict=True):
        assert torch.equal(found, right)
    assert first.untyped_storage().data_ptr() == third.untyped_storage().data_ptr()
    assert first.stride() == (6, 1)
    assert third.stride() == (1, 6)
    assert fourth.data_ptr() == where
    assert pair.held(1) == {0, 1, 2, 3}
    del found, third
    assert pair.held(1) == {0, 1, 2, 3}
    del first
    assert pair.held(1) == {1, 3}
    del second
    part = fourth[1:]
    del fourth
    assert pair.held(1) == {3}
    assert not pair.much(pair.held(1))
    del part
    assert not pair.held(1)
    assert pair.held(2) == {0, 1, 2, 3}, "reads on the first stream may be under way"


def test_copied_results_are_of_each_run_and_have_their_strides() -> None:
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
    for copied in ((), range(len(items))):
        pair, run = replayed(items, [], copied=copied)
        for found, item in zip(run([]), items, strict=True):
            assert torch.equal(found, item)
            assert (found.stride(), found.is_contiguous()) == (item.stride(), item.is_contiguous())
            assert found.data_ptr() != item.data_ptr() or not item.numel()
        del found
        assert bool(pair.own) == (not copied)
        assert not pair.held(1)


def test_each_run_hands_out_other_tensors_with_versions_of_their_own() -> None:
    """As autograd sees it: what a backward saved stays as it is."""
    x, y, *_ = five()
    _, run = replayed((y,), [x])
    (first,), (second,) = run([x]), run([x])
    assert first is not second
    first.add_(1)
    assert (first._version, second._version) == (1, 0)
