"""The sum of a reduction's slots as the CUDA engine binds it, with a kernel that only notes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.fake_cuda import MAIN

from interlace.ir import Box, Call, DType, View
from interlace.runtime.cuda.lanes import Lane
from interlace.runtime.cuda.launches.fused import bind_sum
from interlace.runtime.run_sizes import RunSizes


@pytest.mark.parametrize("odd", [None, "slots", "out"])
def test_sums_are_one_launch_unless_an_address_is_odd(
    odd: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wide load needs 16 bytes: what begins elsewhere is added up by another kernel."""
    launches: list[tuple[int, ...]] = []

    class Noted:
        def __init__(self, **facts: Any) -> None:
            assert (facts["size"], facts["dtype"], facts["aligned"]) == (2, torch.float32, True)

        def launch(self, *args: int) -> None:
            launches.append(args)

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
    binder: Any = SimpleNamespace(
        context=SimpleNamespace(device=torch.device("cuda", 0)),
        plan=SimpleNamespace(box=lambda view: boxes[view.buffer]),
        values=SimpleNamespace(
            items=[slots, out], own=lambda view: places.index(view.buffer), sizes=RunSizes({})
        ),
    )
    op = Call(fn="interlace.sum_slots", args=(View("s"),), outs=(View("y"),))
    run = bind_sum(binder, Lane("main", MAIN), op)
    assert run is not None
    run()
    if odd is None:
        assert launches == [(MAIN, slots.data_ptr(), 8, out.data_ptr(), 8)]
    else:
        assert not launches
        assert torch.equal(out, slots.sum(0))
