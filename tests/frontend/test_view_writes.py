"""Views of inputs that are written: results and inputs as eager leaves them, and nothing copied."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.frontend.view_programs import call_by_torch, differences, drawn
from tests.runtime.programs import world_group
from tests.support.captured import capture
from tests.support.pool import Died, Pool
from torch.distributed._functional_collectives import all_reduce

from interlace.errors import UnsupportedError
from interlace.frontend import backend
from interlace.ir import Alloc, Program

TIME_S = 10.0


@pytest.mark.parametrize("world", [1, 2])
def test_random_views_writes_and_reads_equal_eager(pool: Pool, seed: int, world: int) -> None:
    end, wrong, tried = time.monotonic() + TIME_S / 2, list[str](), list[str]()

    @hypothesis.seed(seed)
    @settings(
        max_examples=40, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
    )
    @given(st.data())
    def equal(data: st.DataObject) -> None:
        source, kind = drawn(lambda n: data.draw(st.integers(0, n - 1)))
        if time.monotonic() > end and not wrong:
            return
        for found in pool(world).run(
            differences, source, kind, timeout_s=110, may_die=range(world)
        ):
            if isinstance(found, Died):
                theirs = pool(world).run(call_by_torch, source, kind, may_die=range(world))
                dies = any(isinstance(each, Died) for each in theirs)
                found = "torch: the process ends by itself" if dies else f"{found}: {source}"
            tried.append(found)
            if found and not found.startswith(("torch:", "refused:")):
                wrong.append(found)
                pytest.fail(found)

    equal()
    assert "" in tried


# -- a paged cache ---------------------------------------------------------------------------------

BLOCKS, BLOCK, WIDTH = 256, 16, 32


def paged_step(
    x: torch.Tensor,
    w: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
) -> torch.Tensor:
    """A token of each sequence: its key and value go to their slot, attention goes by blocks."""
    q, k, v = (x @ w).chunk(3, -1)
    keys.view(-1, WIDTH)[slots] = k
    values.view(-1, WIDTH).index_copy_(0, slots, v)
    scores = (keys[tables].flatten(1, 2) * q[:, None]).sum(-1)
    places = torch.arange(scores.shape[1])
    scores = scores.masked_fill(places[None] >= lengths[:, None], -torch.inf)
    y = (scores.softmax(-1)[:, None] @ values[tables].flatten(1, 2))[:, 0]
    return all_reduce(y @ w[:, :WIDTH], "sum", world_group()) * 1


def serve(steps: int, seed: int) -> tuple[list[int], bool, list[Program]]:
    """Steps that differ from eager's, whether the caches are eager's, and the Programs."""
    torch.compiler.reset()
    torch.manual_seed(seed)
    caches = torch.zeros(2, BLOCKS, BLOCK, WIDTH), torch.zeros(2, BLOCKS, BLOCK, WIDTH)
    rows, blocks, w = 4, 5, torch.randn(WIDTH, 3 * WIDTH) / WIDTH
    tables = torch.randperm(BLOCKS)[: rows * blocks].view(rows, blocks)
    lengths, wrong = torch.randint(1, BLOCK, (rows,)), list[int]()
    with capture() as captured, torch.no_grad():
        call = torch.compile(paged_step, backend=backend)
        for number in range(steps):
            block = tables.gather(1, (lengths // BLOCK)[:, None])[:, 0]
            slots, lengths = block * BLOCK + lengths % BLOCK, lengths + 1
            x = torch.randn(rows, WIDTH)
            expected, found = (
                fn(x, w, cache[0], cache[1], slots, tables, lengths)
                for fn, cache in ((paged_step, caches[0]), (call, caches[1]))
            )
            if not torch.equal(expected, found):
                wrong.append(number)
    return wrong, torch.equal(*caches), captured.programs


def test_a_paged_cache_is_written_and_never_copied(pool: Pool, seed: int) -> None:
    for wrong, equal, programs in pool(2).run(serve, 40, seed, timeout_s=110):
        assert (wrong, equal) == ([], True)
        (program,) = programs
        made = [b for op in program.ops for b in getattr(op, "fresh", ())]
        made += [op.buffer for op in program.ops if isinstance(op, Alloc)]
        assert all(torch.Size(b.shape).numel() < BLOCKS * BLOCK * WIDTH for b in made), program
        written = {a.view.buffer for op in program.ops for a in op.writes()}
        assert len(written & {b.name for b in program.params}) == 2, program


# -- where a view begins ---------------------------------------------------------------------------


def placed(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((4,), (2,), 45) * 1


def placed_twice(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((2, 3), (3, 1), 60).as_strided((2, 3), (3, 1), 45) * 1


def written(x: torch.Tensor) -> torch.Tensor:
    x.as_strided((4,), (1,), 45).mul_(2)
    return x * 1


def after_a_write(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x.as_strided((4,), (1,), 45) * 1


def scattered(x: torch.Tensor) -> torch.Tensor:
    y = (x + 1) @ x @ x  # not the first in the Program's arena
    return torch.as_strided_scatter(y, x[:1], (1, 8), (8, 1), 3) * y.view(torch.int32).diagonal()


def empty(x: torch.Tensor) -> torch.Tensor:
    return x[3:3].view(torch.int64), x[2:, :2].view(torch.int64), x.view(torch.int32)[::2]  # pyright: ignore


def at_offsets(fn: Callable[..., Any], offsets: list[int]) -> list[bool | str]:
    """Whether results and memory are eager's, for an input that begins there in its storage."""
    torch.compiler.reset()
    call, found = torch.compile(fn, backend=backend), list[bool | str]()
    for offset in offsets:
        mine, theirs = (torch.arange(200.0) for _ in "me")
        expected = fn(theirs[offset : offset + 64].view(8, 8))
        try:
            result = call(mine[offset : offset + 64].view(8, 8))
        except UnsupportedError as error:
            found.append(str(error))
            continue
        pairs = zip(result, expected, strict=True)
        same = [a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs]
        found.append(all(same) and torch.equal(mine, theirs))
    return found


@pytest.mark.parametrize("fn", [placed, placed_twice, written, scattered, empty])
def test_an_input_that_is_a_part_of_a_storage(pool: Pool, fn: Callable[..., Any]) -> None:
    assert pool(1).run(at_offsets, fn, [40, 42, 0, 40], timeout_s=110) == [[True] * 4]


def test_a_part_that_was_written_before_is_refused(pool: Pool) -> None:
    """torch itself gives other memory than eager for these."""
    ((part, whole),) = pool(1).run(at_offsets, after_a_write, [40, 0], timeout_s=110)
    assert "counts in the storage of an input that is written" in str(part)
    assert whole is True


DIES = """
def f(x, y, k):
    o = []
    v0 = y.chunk(2, -1)[0]
    v1 = y.view(6, 4)
    x[torch.tensor([1, 2])] = k[1:13].view([2, 6])
    y[1:] = y[:-1].clone()
    o.append(v0.split(2)[1])
    o.append(v1 * 1)
    return o
"""
"""torch 2.13 ends the process here, with its own backend, too: it replays the views of a result."""


def test_no_process_ends_that_torchs_own_backend_leaves_alive(pool: Pool) -> None:
    (ours,) = pool(1).run(differences, DIES, "crossed", may_die=[0])
    (theirs,) = pool(1).run(call_by_torch, DIES, "crossed", may_die=[0])
    assert isinstance(ours, Died) == isinstance(theirs, Died), ours
