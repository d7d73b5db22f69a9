"""What streams do with words, brought together: the order on each stream, and what may be moved."""

from __future__ import annotations

import random
import types
from typing import Any
from unittest import mock

import pytest
from tests.support.fake_cuda import FakeDriver

from interlace.comm.cuda import driver as driver_file
from interlace.comm.cuda.driver import WAIT_VALUE_32, Batch
from interlace.comm.cuda.words import CudaSpace
from interlace.ir import parse
from interlace.runtime.cuda.lanes import Lane, Words, brought_together
from interlace.runtime.cuda.sharing import reaches
from interlace.runtime.prepare.plan import Plan

A, B = Lane("a", 1), Lane("b", 2)


class Counting(FakeDriver):
    """Counts the calls, and notes how many words each had."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def batch(self, *parts: Any) -> Any:
        made = super().batch(*parts)
        run = made.run
        size = sum(len(words) for _, words in parts)
        made.run = lambda *args: (self.sizes.append(size), run(*args))
        return made


def step(driver: Any, lane: Lane, kind: str, *words: int) -> Any:
    return Words.of(kind, driver, lane, words, lambda: 7)


def other(driver: FakeDriver, lane: Lane, name: int) -> Any:
    return lambda: driver.log.append(("op", lane.handle, name, 0))


def test_neighbours_are_one_call() -> None:
    driver = Counting()
    steps = [(A, step(driver, A, "write", 1, 2)), (A, step(driver, A, "wait", 3))]
    (both,) = brought_together(steps)
    both()
    assert driver.log == [("write", 1, 1, 7), ("write", 1, 2, 7), ("wait", 1, 3, 7)]
    assert driver.sizes == [3]


@pytest.mark.parametrize(
    ("first", "second", "place"),
    [("wait", "wait", 1), ("wait", "write", 0), ("write", "write", 0), ("write", "wait", None)],
)
def test_past_other_streams_a_wait_moves_later_and_a_write_earlier(
    first: str, second: str, place: int | None
) -> None:
    driver = FakeDriver()
    between = other(driver, B, 9)
    steps = [(A, step(driver, A, first, 1)), (B, between), (A, step(driver, A, second, 2))]
    found = brought_together(steps)
    assert len(found) == (3 if place is None else 2)
    assert found.index(between) == (1 if place is None else 1 - place)


def test_nothing_moves_past_the_host_or_the_streams_own_ops() -> None:
    driver = FakeDriver()
    for lane in (None, A):
        between = other(driver, A, 9)
        steps = [(A, step(driver, A, "wait", 1)), (lane, between), (A, step(driver, A, "wait", 2))]
        found = brought_together(steps)
        assert len(found) == 3
        assert found[1] is between


def test_a_call_has_no_more_words_than_the_driver_takes() -> None:
    driver = Counting()
    half = range(Batch.LIMIT // 2 + 1)
    steps = [(A, step(driver, A, "write", *half)), (A, step(driver, A, "write", *half))]
    assert len(brought_together(steps)) == 2


def test_each_stream_keeps_its_order(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        driver = FakeDriver()
        steps: list[Any] = []
        for number in range(draw.randrange(2, 14)):
            lane = draw.choice([A, B])
            kind = draw.choice(["wait", "write", "op", "host"])
            if kind in ("wait", "write"):
                words = [100 * number + i for i in range(draw.randrange(1, 4))]
                steps.append((lane, step(driver, lane, kind, *words)))
            else:
                run = other(driver, lane, number)
                steps.append((None if kind == "host" else lane, run))
        for _, run in steps:
            run()
        plain = list(driver.log)
        driver.log.clear()
        for run in brought_together(steps):
            run()
        log = driver.log
        for handle in (1, 2):
            assert [e for e in log if e[1] == handle] == [e for e in plain if e[1] == handle]
        # What was listed before a write stays before what was listed after it, but for waits.
        place = {entry: index for index, entry in enumerate(log)}
        for early, late in ((a, b) for i, a in enumerate(plain) for b in plain[i + 1 :]):
            if place[early] > place[late]:
                assert early[0] == "wait" or late[0] == "write", (early, late)


def test_more_words_than_the_driver_takes_are_several_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[list[tuple[str, int, int]]] = []

    class Item:
        def __init__(self) -> None:
            self.waitValue, self.writeValue = types.SimpleNamespace(), types.SimpleNamespace()

    def issue(stream: int, count: int, items: list[Any], flags: int) -> tuple[int]:
        assert count == len(items) < 256  # so the reference of cuStreamBatchMemOp has it
        told = [
            ("wait", i.waitValue) if i.operation == WAIT_VALUE_32 else ("write", i.writeValue)
            for i in items
        ]
        calls.append([(kind, part.address, part.value) for kind, part in told])
        return (0,)

    fake = types.SimpleNamespace(
        CUstreamBatchMemOpParams=Item, CUstreamBatchMemOpType=int, cuStreamBatchMemOp=issue
    )
    monkeypatch.setattr(driver_file, "bindings", lambda: fake)
    driver: Any = types.SimpleNamespace()
    Batch(driver, [("wait", range(200)), ("write", range(1000, 1300))]).run(1, 5, -1)
    assert [len(call) for call in calls] == [255, 245]
    wanted = [("wait", at, 5) for at in range(200)]
    wanted += [("write", at, 0xFFFFFFFF) for at in range(1000, 1300)]
    assert [entry for call in calls for entry in call] == wanted
    Batch(driver, [("write", [])]).run(1, 5)
    assert len(calls) == 2


def test_ranks_know_how_far_peers_raise_their_words() -> None:
    """With different values, of a Fused's members, and of few of the peers."""
    program = parse("""
def f(tp: Team[3], x: f32[4], y: out[f32[4]], z: out[f32[4]]):
    main: notify(some, to=tp.rank + 1, value=1)
    main: notify(some, to=tp.rank + 1, value=5)
    main: notify(all, to=tp.others, value=2)
    main: copy(x, y)
    main: expect(some, tp.rank - 1, value=4)
    main: fused(part(expect(all, tp.others), call("aten.neg.out", x, out=z)))
""")
    plans = [
        Plan(program, program.instantiate(rank), lambda team, asked: "nccl") for rank in range(3)
    ]
    assert reaches(plans[1], "raises") == {"tp": {"some": [0, 0, 5], "all": [2, 0, 2]}}
    assert reaches(plans[1], "expects") == {"tp": {"some": [4, 0, 0], "all": [1, 0, 1]}}
    told = [{"signals": {}, "span": 6, "uses": True, "gets": []} for _ in plans]
    for note, plan in zip(told, plans, strict=True):
        note["raises"] = reaches(plan, "raises")["tp"]
    side = mock.MagicMock(size=3, me=1)

    def exchange(topic: str, note: Any, limit: float) -> Any:
        assert note["raises"] == told[1]["raises"]
        return told

    side.team.board.exchange = exchange
    space = CudaSpace(
        side, "t", ("some", "all"), 6, True, (), 1.0, reaches(plans[1], "raises")["tp"]
    )
    assert [space.last("some", member) for member in range(3)] == [5, 0, 0]
    assert [space.last("all", member) for member in range(3)] == [2, 0, 2]
    assert space.last("other", 0) == 0
