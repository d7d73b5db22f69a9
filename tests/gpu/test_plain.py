"""Runs of Programs outside of teams on one GPU: streams that change, failures, synchronize."""

from __future__ import annotations

import random

import pytest
import torch
from tests.gpu.cases import on_a_gpu

from interlace.errors import ExecutorError
from interlace.ir import parse
from interlace.runtime import Executor
from interlace.runtime.arena import Arena, arena_of

pytestmark = on_a_gpu(120)
SIZE = 512
ARENA = f"""
def twice(x: f32[{SIZE}, {SIZE}], y: out[f32[{SIZE}, {SIZE}]]):
    half = alloc(f32[{SIZE}, {SIZE}])
    main: call("aten.mm.out", x, x, out=half)
    main: call("aten.mm.out", half, x, out=y)
    main: free(half)
"""
PLAIN = f"""
def once(x: f32[{SIZE}, {SIZE}], y: out[f32[{SIZE}, {SIZE}]]):
    main: call("aten.mm.out", x, x, out=y)
"""


@pytest.mark.parametrize("text", [ARENA, PLAIN], ids=["arena", "plain"])
def test_callers_on_changing_streams(text: str, seed: int) -> None:
    """The arena is one run's at a time, on whatever streams the runs are."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    streams = [torch.cuda.Stream() for _ in range(3)]
    xs = [torch.randn(SIZE, SIZE, device="cuda") for _ in range(24)]
    wanted = [x @ x @ x if text is ARENA else x @ x for x in xs]
    torch.cuda.synchronize()
    with Executor(parse(text), device="cuda").prepare() as executor:
        for _ in range(3):
            found = []
            for x in xs:
                with torch.cuda.stream(draw.choice(streams)):
                    if draw.random() < 0.3:
                        torch.cuda._sleep(draw.randrange(400_000))
                    found += executor.run([x])
            executor.synchronize()
            for y, want in zip(found, wanted, strict=True):
                assert torch.equal(y, want)


def test_executors_share_the_arena_on_changing_streams(seed: int) -> None:
    """Programs of other sizes: the arena grows amid their runs, and shrinks when one goes."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    streams = [torch.cuda.Stream() for _ in range(3)]
    arena = arena_of(torch.device("cuda", torch.cuda.current_device()))
    share_an_arena(draw, streams, arena)
    before = torch.cuda.memory_allocated()  # with the workspaces that cuBLAS has for each stream
    share_an_arena(draw, streams, arena)
    assert torch.cuda.memory_allocated() <= before


def share_an_arena(draw: random.Random, streams: list[torch.cuda.Stream], arena: Arena) -> None:
    executors: list[tuple[Executor, int]] = []
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for size in (256, 128, 1024, SIZE):
        text = ARENA.replace(str(SIZE), str(size))
        executors.append((Executor(parse(text), device="cuda").prepare(), size))
        for _ in range(24):
            executor, width = draw.choice(executors)
            x = torch.randn(width, width, device="cuda")
            stream = draw.choice(streams)
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                if draw.random() < 0.3:
                    torch.cuda._sleep(draw.randrange(400_000))
                found += [(x, y) for y in executor.run([x])]
    torch.cuda.synchronize()
    for x, y in found:
        assert torch.equal(y, x @ x @ x)
    assert arena.storage.nbytes() >= 1024 * 1024 * 4
    for executor, _ in executors:
        executor.close()
    assert arena.storage.nbytes() == 0


@pytest.mark.parametrize("text", [ARENA, PLAIN], ids=["arena", "plain"])
def test_a_failed_run_needs_no_reset(text: str) -> None:
    x = torch.randn(SIZE, SIZE, device="cuda")
    broken = [False]

    def fail(rank: int, index: int, op: object) -> None:
        if broken[0]:
            raise ZeroDivisionError("on purpose")

    with Executor(parse(text), device="cuda", before_op=fail).prepare() as executor:
        (first,) = executor.run([x])
        broken[0] = True
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            executor.run([x])
        broken[0] = False
        for _ in range(2):
            executor.synchronize()
            (again,) = executor.run([x])
            assert torch.equal(first, again)
            executor.reset()  # which has nothing to do


def test_a_run_inside_a_capture_is_refused() -> None:
    x = torch.randn(SIZE, SIZE, device="cuda")
    with Executor(parse(PLAIN), device="cuda").prepare() as executor:
        executor.run([x])
        executor.synchronize()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(ExecutorError, match="graph=True"), torch.cuda.graph(graph):
            executor.run([x])
        executor.run([x])
        executor.synchronize()
