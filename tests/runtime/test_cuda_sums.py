"""The sum of a reduction's slots as the CUDA engine binds it, with a kernel that only notes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.runtime.cuda_sites import program, tensors
from tests.support.fake_cuda import MAIN, FakeDriver, fake_engine

from interlace.ir import Box, Call, DType, Expect, View
from interlace.options import Options
from interlace.passes.fuse import SUM
from interlace.runtime.cuda.lanes import Lane
from interlace.runtime.cuda.launches import fused as fused_file
from interlace.runtime.cuda.launches.fused import bind_sum, sums_itself
from interlace.runtime.run_sizes import RunSizes

WORDS = (4096, 4100, 4104)


class Sum:
    """Stands for the kernel: notes its launches."""

    log: list[tuple[Any, ...]]

    def __init__(self, **facts: Any) -> None:
        self._waits = facts["words"]

    def launch(self, stream: int, *args: Any) -> None:
        assert len(args) == (6 if self._waits else 4)
        assert not self._waits or len(args[4]) == self._waits
        self.log.append(("sum", stream, *args))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The launches of sums, with kernels that only note."""
    noted: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Sum, "log", noted, raising=False)
    few = {"SumSlots": Sum, "few_registers": lambda size, aligned: aligned}
    kernels = {
        "exchange.sums": few,
        "launch": {"TYPES": {torch.float32: "fp32", torch.bfloat16: "bf16"}},
    }
    for name, content in kernels.items():
        monkeypatch.setitem(sys.modules, f"interlace.kernels.{name}", SimpleNamespace(**content))
    return noted


@pytest.mark.kernels
@pytest.mark.parametrize("length", [8, 7])
@pytest.mark.parametrize("awaits", [False, True])
@pytest.mark.parametrize("odd", [None, "slots", "out"])
def test_sums_are_one_launch_unless_an_address_is_odd(
    odd: str | None, awaits: bool, length: int, log: list[tuple[Any, ...]]
) -> None:
    """A wide load needs 16 bytes: what begins elsewhere is added up by another kernel, and rows of
    other lengths by narrow loads. For both the stream waits, a launch with wide loads itself."""
    start = {name: int(name == odd) for name in ("slots", "out")}
    slots = torch.arange(17.0)[start["slots"] :][: 2 * length].view(2, length)
    out = torch.zeros(9)[start["out"] :][:length]
    boxes = {
        "s": Box(0, (2, length), (length, 1), DType.f32),
        "y": Box(0, (length,), (1,), DType.f32),
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
    op = Call(fn=SUM, args=(View("s"),), outs=(View("y"),))
    run = bind_sum(binder, Lane("main", MAIN), op, (WORDS, lambda: 7) if awaits else None)
    assert run is not None
    run()
    wide = length % 4 == 0
    itself = awaits and wide and odd is None
    assert driver.log == [("wait", MAIN, word, 7) for word in WORDS if awaits and not itself]
    if odd is None or not wide:
        due = (WORDS, 7) if itself else ()
        assert log == [("sum", MAIN, slots.data_ptr(), length, out.data_ptr(), length, *due)]
    else:
        assert not log
        assert torch.equal(out, slots.sum(0))


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize(
    ("site", "strategy"),
    [*(("scatter", s) for s in ("put", "fused", "ranges", "beside")), ("reduce", "slabs")],
)
def test_each_word_is_awaited_once(
    site: str,
    strategy: str,
    in_order: bool,
    log: list[tuple[Any, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the last sum itself, by the stream for all others, and where ops go one by one."""
    monkeypatch.setattr(fused_file, "has_kernel", lambda device: True)
    made = program(site, strategy)
    expects = [op for op in made.ops if isinstance(op, Expect)]
    sums = sum(isinstance(op, Call) and op.fn == SUM for op in made.ops)
    with fake_engine(made, 1, Options(in_order=in_order)) as fake:
        inputs, outputs = tensors(site)
        for _ in range(3):
            log.clear()
            fake.run(inputs, outputs)
            base, space = fake.space.base, fake.space
            peers = {(op.signal, op.value): list[int]() for op in expects}
            for op in expects:
                peers[op.signal, op.value] += fake.engine.context.plan.members(op.team, op.peer)
            wanted = sorted(
                (space.own(signal, peer), base + value)
                for (signal, value), members in peers.items()
                for peer in members
            )
            mine = {word for word, _ in wanted}
            waits = [entry[2:4] for entry in fake.log if entry[0] == "wait" and entry[2] in mine]
            told = [(word, entry[7]) for entry in log if len(entry) > 6 for word in entry[6]]
            assert sorted([*waits, *told]) == wanted
            assert len(log) == sums
            itself = site == "scatter" and not in_order  # of slabs something else comes between
            assert [entry[1] for entry in log if len(entry) > 6] == [MAIN] * itself
            assert MAIN in [entry[1] for entry in log]


@pytest.mark.parametrize("trace", [False, True])
@pytest.mark.usefixtures("log")
def test_a_trace_tells_waits_from_sums(trace: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the stream waits, in a span of its own."""
    monkeypatch.setattr(fused_file, "has_kernel", lambda device: True)
    made = program("scatter", "put")
    (total,) = (op for op in made.ops if isinstance(op, Call) and op.fn == SUM)
    with fake_engine(made, 1, Options(trace=trace)) as fake:
        binding = fake.engine.binding
        assert sums_itself(binding.binder, binding.main, total) != trace
        assert not sums_itself(binding.binder, binding.sides[0], total)
