"""What the CUDA engine issues for a Program outside of teams: its ops, and one event at most."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support.fake_cuda import MAIN, Fake, fake_engine
from torch.multiprocessing.reductions import StorageWeakRef

from interlace.comm.rendezvous.patience import Patience
from interlace.errors import ExecutorError
from interlace.ir import parse
from interlace.options import Options
from interlace.runtime.cuda.engine import keeps_memory
from interlace.runtime.executor import TeamLocks
from interlace_bench.kernels.host import WIDTH, program

TWO_STREAMS = f"""
def two(x: f32[{WIDTH}, {WIDTH}], w: f32[{WIDTH}, {WIDTH}], y: out[f32[{WIDTH}, {WIDTH}]]):
    t = alloc(f32[{WIDTH}, {WIDTH}])
    main: call("aten.mm.out", x, w, out=t)
    main: record(e)
    side: wait(e)
    side: call("aten.mm.out", t, w, out=y)
"""


@pytest.fixture
def plain() -> Iterator[Fake]:
    """Two calls, and an arena between them."""
    with fake_engine(program(2), rank=0) as fake:
        assert fake.engine.plain
        assert not fake.engine.watches
        yield fake


@pytest.fixture
def single() -> Iterator[Fake]:
    """One call, which shares nothing with the next run's."""
    with fake_engine(program(1), rank=0) as fake:
        assert fake.engine.plain
        yield fake


def given() -> list[torch.Tensor]:
    return [torch.randn(WIDTH, WIDTH) for _ in range(2)]


def shape_of(fake: Fake) -> list[tuple[Any, ...]]:
    return [entry[:2] for entry in fake.log]


def test_a_run_with_an_arena_leaves_one_event(plain: Fake) -> None:
    for _ in range(3):
        plain.run(given())
        assert shape_of(plain) == [("call", MAIN), ("call", MAIN), ("record", MAIN)]
        assert plain.log[-1][3:] == ("over",)
    assert plain.engine.issued == plain.engine.entered == 3


def test_a_run_on_another_stream_waits_for_the_last_ones_end(plain: Fake) -> None:
    plain.run(given())
    over = plain.log[-1][2]
    for stream, waits in ((900, True), (900, False), (MAIN, True), (901, True), (901, False)):
        plain.on(stream)
        plain.run(given())
        waited = [("wait_event", stream, over)] if waits else []
        assert plain.log[: len(waited)] == waited
        calls = [("call", stream), ("call", stream), ("record", stream)]
        assert shape_of(plain)[len(waited) :] == calls


def test_a_run_that_shares_nothing_leaves_no_event(single: Fake) -> None:
    for stream in (MAIN, 900, MAIN):
        single.on(stream)
        single.run(given())
        assert shape_of(single) == [("call", stream)]


def test_synchronize_waits_for_runs_that_left_no_event(single: Fake, plain: Fake) -> None:
    single.run(given())
    single.log.clear()
    single.engine.watched.finish()
    single.engine.watched.finish()
    assert single.log == [("finish", None)], "once, as nothing was issued between"
    single.run(given())
    single.engine.watched.finish()
    assert single.log[-1] == ("finish", None)
    plain.run(given())
    plain.log.clear()
    plain.engine.watched.finish()
    assert plain.log == [], "the event says it"


def test_the_watchdog_finds_nothing_wrong(plain: Fake) -> None:
    plain.run(given())
    plain.driver.done = lambda event: False
    with mock.patch.object(Patience, "is_over", return_value=True):
        plain.engine.watched.look()
    assert plain.engine.failure is None


def test_a_step_that_fails_ends_the_run_and_no_other(plain: Fake) -> None:
    plain.run(given())

    def fail() -> None:
        raise ValueError("as planned")

    first, second = plain.engine.binding.steps
    plain.engine.binding.steps[1] = fail
    with torch.enable_grad(), pytest.raises(ValueError, match="as planned"):
        plain.run(given())
    assert torch.is_grad_enabled()
    assert shape_of(plain) == [("call", MAIN), ("record", MAIN)], "what was issued ends there"
    assert plain.engine.watched.idle
    assert plain.engine.issued == 2
    plain.engine.binding.steps[:] = [first, second]
    assert plain.engine.admit(given(), None)
    plain.engine.synchronize()
    plain.run(given())
    assert shape_of(plain) == [("call", MAIN), ("call", MAIN), ("record", MAIN)]


def test_a_step_that_fails_between_streams_is_not_kept_either() -> None:
    with fake_engine(parse(TWO_STREAMS), 0) as fake:
        steps = fake.engine.binding.steps
        kept, steps[-1] = steps[-1], mock.Mock(side_effect=ValueError("as planned"))
        with pytest.raises(ValueError, match="as planned"):
            fake.run(given())
        assert shape_of(fake)[-1] == ("record", MAIN), "what was issued ends there"
        steps[-1] = kept
        assert fake.engine.admit(given(), None)
        fake.engine.synchronize()
        fake.engine.settle()  # a reset finds nothing to mend
        fake.engine.synchronize()
        fake.run(given())


def test_a_call_in_a_capture_is_refused(plain: Fake) -> None:
    plain.capturing.return_value = True
    assert plain.run(given()) is None  # so the Executor looks
    with pytest.raises(ExecutorError, match="chain was called inside a CUDA graph capture"):
        plain.engine.look()
    assert plain.log == []


def test_of_the_default_stream_each_thread_asks_once(plain: Fake) -> None:
    """CUDA refuses to capture it; but it is by this question that a new thread gets a context."""
    plain.on(0)

    def call() -> None:
        for _ in range(3):
            plain.run(given())

    for number in (1, 2):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(10)
        assert plain.capturing.call_count == number
    plain.on(MAIN)
    call()
    assert plain.capturing.call_count == 5


@pytest.mark.parametrize(
    ("text", "options"),
    [(TWO_STREAMS, {}), (str(program(2)), {"trace": True})],
    ids=["streams", "trace"],
)
def test_what_is_more_than_its_ops_is_not_plain(text: str, options: dict[str, Any]) -> None:
    with fake_engine(parse(text), 0, Options(**options)) as fake:
        assert not fake.engine.plain
        assert fake.engine.watches == bool(options)


def test_what_may_keep_memory_of_its_own_leaves_an_event() -> None:
    text = str(program(1)).replace("aten.mm.out", "interlace.matmul")
    changed = parse(text)
    with fake_engine(program(1), 0) as fake:
        context = fake.engine.context
        assert not keeps_memory(context)
        plan: Any = type("Plan", (), {"program": changed})
        other: Any = type("EngineContext", (), {"plan": plan, "values": context.values})
        assert keeps_memory(other)


def test_locks_of_several_teams_are_taken_all_or_none() -> None:
    locks: list[Any] = [threading.RLock() for _ in range(3)]
    teams: Any = [SimpleNamespace(lock=lock) for lock in locks]
    both = TeamLocks(teams)
    assert both.acquire(False)
    with ThreadPoolExecutor(1) as threads:
        assert not threads.submit(both.acquire, False).result()
        both.release()
        locks[2].acquire()
        assert not threads.submit(both.acquire, True, 0.05).result()
        locks[2].release()
        assert threads.submit(lambda: (both.acquire(True, 5), both.release())[0]).result()
        teams[1].lock = mock.Mock(acquire=mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            TeamLocks(teams).acquire(True)
        assert threads.submit(locks[0].acquire, False).result()  # nobody has it


def test_a_caller_on_another_device_is_looked_at_first() -> None:
    """As a new thread of another rank than the first: the driver takes streams for its device's."""
    for text in (TWO_STREAMS, str(program(1))):
        with fake_engine(parse(text), 0) as fake:
            assert fake.engine.admit(given(), None)
            fake.on_device(1)
            assert fake.engine.admit(given(), None) is None
            inside = mock.MagicMock()
            with mock.patch.object(torch.cuda, "device", inside):
                fake.engine.issue(given(), None)
            assert inside.mock_calls[:2] == [mock.call(fake.engine.device), mock.call().__enter__()]


def test_memory_goes_when_the_engine_is_closed(plain: Fake) -> None:
    """At once: what is in cycles, as engines are, may wait long for the garbage collector."""
    plain.run(given())
    arena = StorageWeakRef(plain.engine.context.values.arena)
    gc.disable()
    try:
        plain.engine.close()
        context = plain.engine.context
        context.arena.let_go(context.values.nbytes)
        assert arena.expired()
    finally:
        gc.enable()


def test_memory_of_a_run_that_does_not_end_stays(
    plain: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("interlace.runtime.cuda.waits.watchdog.GRACE_S", 0.05)
    plain.run(given())
    plain.driver.done = lambda event: False  # type: ignore[method-assign]
    arena = StorageWeakRef(plain.engine.context.values.arena)
    plain.engine.close()
    assert not arena.expired()


def test_a_run_that_is_being_issued_is_under_way(
    plain: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory does not go when another thread closes the Executor meanwhile."""
    monkeypatch.setattr("interlace.runtime.cuda.waits.watchdog.GRACE_S", 0.05)
    engine, seen = plain.engine, list[bool]()
    arena = StorageWeakRef(engine.context.values.arena)
    first, second = engine.binding.steps

    def meanwhile() -> None:
        first()
        engine.close()
        seen.append(arena.expired())

    engine.binding.steps = [meanwhile, second]
    plain.run(given())
    assert seen == [False]
    assert engine.watched.idle


def test_a_run_that_begins_amid_the_end_is_an_error(plain: Fake) -> None:
    """And not one whose results nobody has written, or whose memory goes."""
    plain.run(given())
    heard: list[BaseException] = []

    def meanwhile(*_: object) -> None:
        with pytest.raises(ExecutorError, match="closed by another thread") as caught:
            plain.run(given())
        heard.append(caught.value)

    with mock.patch.object(plain.engine.watched, "settle", meanwhile):
        plain.engine.close()
    assert heard
    assert plain.engine.watched.idle
