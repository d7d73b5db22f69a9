"""The sum of a reduction's slots as the CUDA engine binds it, with a kernel that only notes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.runtime.cuda_sites import program, tensors
from tests.support.fake_cuda import MAIN, FakeDriver, fake_engine

from interlace.ir import Box, Call, DType, Op, View
from interlace.passes.fuse import SUM
from interlace.runtime.cuda import binder as binder_file
from interlace.runtime.cuda.lanes import Lane
from interlace.runtime.cuda.launches.fused import bind_sum
from interlace.runtime.run_sizes import RunSizes

WORDS = [4096, 4100, 4104]


@pytest.mark.parametrize("awaits", [False, True])
@pytest.mark.parametrize("odd", [None, "slots", "out"])
def test_sums_are_one_launch_unless_an_address_is_odd(
    odd: str | None, awaits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wide load needs 16 bytes: what begins elsewhere is added up by another kernel. The launch
    waits itself for what the sum awaits, before the other kernel the stream does."""
    launches: list[tuple[int, ...]] = []

    class Noted:
        def __init__(self, **facts: Any) -> None:
            assert (facts["size"], facts["dtype"], facts["aligned"]) == (2, torch.float32, True)
            assert ("words" in facts) == awaits
            assert not awaits or facts["words"].tolist() == WORDS

        def launch(self, *args: int) -> None:
            launches.append(args)

    table = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda words, **_: table(words, dtype=torch.int64))
    kernels = {"exchange.sums": {"SumSlots": Noted}, "launch": {"TYPES": {torch.float32: "fp32"}}}
    for name, content in kernels.items():
        monkeypatch.setitem(sys.modules, f"interlace.kernels.{name}", SimpleNamespace(**content))
    start = {name: int(name == odd) for name in ("slots", "out")}
    slots = torch.arange(17.0)[start["slots"] :][:16].view(2, 8)
    out = torch.zeros(9)[start["out"] :][:8]
    boxes = {
        "s": Box(0, (2, 8), (8, 1), DType.f32),
        "y": Box(0, (8,), (1,), DType.f32),
    }
    places = ["s", "y"]
    driver = FakeDriver()
    binder: Any = SimpleNamespace(
        context=SimpleNamespace(device=torch.device("cuda", 0)),
        driver=driver,
        plan=SimpleNamespace(box=lambda view: boxes[view.buffer]),
        values=SimpleNamespace(
            items=[slots, out], own=lambda view: places.index(view.buffer), sizes=RunSizes({})
        ),
    )
    op = Call(fn="interlace.sum_slots", args=(View("s"),), outs=(View("y"),))
    run = bind_sum(binder, Lane("main", MAIN), op, (WORDS, lambda: 7) if awaits else None)
    assert run is not None
    run()
    if odd is None:
        due = (7,) if awaits else ()
        assert launches == [(MAIN, slots.data_ptr(), 8, out.data_ptr(), 8, *due)]
        assert not driver.log
    else:
        assert not launches
        assert driver.log == [("wait", MAIN, word, 7) for word in WORDS if awaits]
        assert torch.equal(out, slots.sum(0))


@pytest.mark.parametrize("strategy", ["put", "ranges", "beside"])
def test_the_last_sum_waits_itself(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the words of all peers that its stream would wait for; a sum aside leaves that to it."""
    awaited: list[tuple[Sequence[int], int]] = []

    def sums_itself(binder: Any, lane: Lane, op: Op) -> bool:
        return lane is binder.binding.main and isinstance(op, Call) and op.fn == SUM

    def bind_sum(binder: Any, lane: Lane, op: Call, row: Any) -> Any:
        if op.fn != SUM:
            return None
        if row is None:
            return None
        assert lane.name == "main"
        return lambda: awaited.append((row[0], row[1]()))

    monkeypatch.setattr(binder_file, "sums_itself", sums_itself)
    monkeypatch.setattr(binder_file, "bind_sum", bind_sum)
    with fake_engine(program("scatter", strategy), 1) as fake:
        inputs, outputs = tensors("scatter")
        last = 4 if strategy == "beside" else 2 if strategy == "ranges" else 1
        for _ in range(3):
            awaited.clear()
            fake.run(inputs, outputs)
            ((words, due),) = awaited
            peers = (0, 2, 3)
            assert sorted(words) == [fake.space.own("t_slots_arrived", peer) for peer in peers]
            assert due == fake.space.base + last
            assert not [e for e in fake.log if e[:2] == ("wait", MAIN) and e[2] in words]
