"""Runs of Programs outside of teams on one GPU: streams that change, captures."""

from __future__ import annotations

import random

import pytest
import torch
from tests.gpu.cases import on_a_gpu

from interlace.errors import ExecutorError
from interlace.ir import parse
from interlace.runtime import Executor

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
