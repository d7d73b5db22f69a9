"""Updates of inputs: written where they stand, and never where an old reader would see them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.frontend.tracing import agrees, graphs, imported
from torch.fx.experimental.proxy_tensor import make_fx

from interlace.frontend import Teams, import_graph
from interlace.frontend.importing.nodes import propagate
from interlace.ir import Alloc, Call, Copy, Program, Slice
from interlace.verify import check


def cache_slice(cache: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    cache[:, 2:4] = k
    return cache.sum(1)


def cache_two_dims(cache: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    cache[0, 1:3] = k[0]
    return cache * 2


def cache_select(cache: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    cache[:, 3] = k[:, 0]
    return cache.relu()


def cache_index_copy(cache: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    cache.index_copy_(1, torch.tensor([4, 0]), k)
    return cache.cumsum(1)


def cache_index_put(cache: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    cache[:, torch.tensor([1, 3])] = k
    return cache + 1


def cache_cast(cache: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    cache[:, 1:3] = k.double()
    return cache.mean()


def two_updates(cache: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    cache[:, 0:2] = k
    between = cache.sum()
    cache[:, 2:4] = k * between
    return cache.sum(1)


def read_before(cache: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    old = cache.sum(1)
    cache[:, 2:4] = k
    return old, cache.sum(1)


def masked(cache: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    cache.masked_fill_(k.sum() > -100, 0.5)
    return cache * 1


def through_a_view(cache: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    cache.view(-1, 3)[torch.tensor([9, 2])] = k[0]
    return cache.view(-1, 3)[torch.tensor([2, 3])].sum()


def transposed(cache: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    cache.transpose(0, 1)[3] += 1
    cache.permute(2, 0, 1)[1].fill_(2)
    return cache.view(-1) * k.sum()


def halves(cache: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    first, second = cache.split(1)
    first.view(5, 3)[1:3].copy_(k[0])
    second[0, ::2] = first[0, 1:4]
    return cache.amax(1)


def bits(cache: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    cache.view(torch.int32).view(-1)[3:5] = 7
    cache[0].diagonal().mul_(2)
    return cache.mT.relu() + k.sum()


IN_PLACE: dict[str, Callable[..., Any]] = {
    "slice": cache_slice,
    "two_dims": cache_two_dims,
    "select": cache_select,
    "index_copy": cache_index_copy,
    "index_put": cache_index_put,
    "cast": cache_cast,
    "two_updates": two_updates,
    "read_before": read_before,
    "masked": masked,
    "through_a_view": through_a_view,
    "transposed": transposed,
    "halves": halves,
    "bits": bits,
}


def read_after(cache: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    old = cache.view(-1)
    new = cache.index_copy(1, torch.tensor([4, 0]), k)
    result = old * 2, new.sum()
    cache.copy_(new)
    return result


def kept_copy(cache: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    old = cache.clone()
    cache[:, 2:4] = k
    return old, cache * 1


def shifted(cache: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    cache[:, :-2] = cache[:, 2:].clone()
    cache[:, -2:] = k
    return cache * 1


def overlapping_source(cache: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    new = torch.slice_scatter(cache, cache[:, 0:4], 1, 1, 5)
    cache.copy_(new)
    return new.sum() + k.sum()


def part_after_the_whole(cache: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    old = cache.view(2, 15)
    part = torch.slice_scatter(old, k.view(2, 6), 1, 0, 6)
    new = torch.slice_scatter(part, old[:, 9:] + part[:, :6], 1, 9, 15)
    cache.copy_(new.view(2, 5, 3))
    return old * 2 + new


def own_functional_result(
    cache: torch.Tensor, k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    new = torch.index_copy(cache, 1, torch.tensor([4, 0]), k)
    cache.copy_(new)
    cache[0] = 3
    return new, cache.sum()


def replaced(cache: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    cache.copy_(torch.cat([k, k, k], 1)[:, :5])
    return k + 1


def counted(cache: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    cache.add_(1)
    return cache[:, :2] + k


STILL_RIGHT: dict[str, Callable[..., Any]] = {
    "read_after": read_after,
    "kept_copy": kept_copy,
    "shifted": shifted,
    "overlapping_source": overlapping_source,
    "replaced": replaced,
    "part_after_the_whole": part_after_the_whole,
    "own_functional_result": own_functional_result,
    "counted": counted,
}


def programs(fn: Callable[..., Any]) -> list[Program]:
    """The Programs of `fn` on a cache and new entries, each compared with its graph."""
    cache, k = torch.arange(30.0).view(2, 5, 3).contiguous(), torch.randn(2, 2, 3)
    found = []
    for graph in graphs(fn, cache, k, gradient=False):
        mine = imported(graph)
        agrees(graph, mine)
        assert not torch.equal(graph.args[0], graph.args_after[0]), "the cache was not written"
        found.append(mine.program)
    assert found
    return found


@pytest.mark.parametrize("name", IN_PLACE)
def test_update_writes_the_input_itself(name: str) -> None:
    (program,) = programs(IN_PLACE[name])
    (cache, *_) = program.params
    for op in program.ops:
        # no buffer as large as the cache is made for the update, and the cache is never copied
        if isinstance(op, Copy):
            assert op.dst.buffer == cache.name, program
            assert op.dst.steps, program
        if isinstance(op, Call) and "scatter" in op.fn:
            assert op.mutates, program
        if isinstance(op, Call) and op.mutates:
            assert {view.buffer for view in op.outs} == {cache.name}, program
        assert not isinstance(op, Alloc), program
    written = [op for op in program.ops if any(a.view.buffer == cache.name for a in op.writes())]
    assert written, program


@pytest.mark.parametrize("name", STILL_RIGHT)
def test_old_readers_see_the_old_contents(name: str) -> None:
    (program,) = programs(STILL_RIGHT[name])
    cache = program.params[0]
    assert any(a.view.buffer == cache.name for op in program.ops for a in op.writes()), program


def test_running_statistics_are_written() -> None:
    def fn(mean: torch.Tensor, var: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, mean, var, w, training=True)

    args = (torch.zeros(3), torch.ones(3), torch.randn(4, 3), torch.ones(3).requires_grad_())
    for graph in graphs(fn, *args):
        agrees(graph, imported(graph))


def test_memory_that_a_graph_allocates_and_fills_by_parts_is_written() -> None:
    """A functional graph reads `empty` before it has filled it; a Program reads what is written."""

    def model(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(4, 3)
        y[:2] = x
        y[2:] = x * 2
        return y

    (graph,) = graphs(model, torch.ones(2, 3))
    made = imported(graph)
    assert check(made.program).sound, made.program
    agrees(graph, made)


def test_memory_that_is_filled_whole_is_not_filled_twice() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x).fill_(2.0) + x

    (graph,) = graphs(model, torch.ones(2, 3))
    made = imported(graph)
    assert check(made.program).sound, made.program
    assert not any(isinstance(op, Call) and "zero_" in op.fn for op in made.program.ops)
    agrees(graph, made)


def test_bounds_are_computed_where_sizes_are_those_of_a_call() -> None:
    """With CUDA graphs a graph with symbols is imported for each size: its numbers are plain."""

    def fn(cache: torch.Tensor) -> torch.Tensor:
        aten, rows = torch.ops.aten, cache.shape[0]
        half = aten.slice(cache, 0, rows // 2, rows - 1)
        last = aten.slice_scatter(cache, half * 2, 0, rows // 2, rows - 1)
        return aten.copy_(cache, last)

    gm = make_fx(fn, tracing_mode="symbolic")(torch.zeros(8, 3))
    values = propagate(gm, [torch.zeros(10, 3)])
    (copy,) = [
        op
        for op in import_graph(gm, teams=Teams.of({}), values=values).program.ops
        if isinstance(op, Copy)
    ]
    assert copy.dst.steps == (Slice(0, 5, 9),)
