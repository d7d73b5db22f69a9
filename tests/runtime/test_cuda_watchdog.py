"""What the watchdog sees of runs that go on, however far the host is ahead, and whoever looks."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tests.runtime.cuda_sites import bound, program, tensors
from tests.support.fake_cuda import Fake, fake_engine
from torch.distributed import HashStore

from interlace.comm.control import EXITED
from interlace.comm.cuda.driver import uncollected
from interlace.comm.cuda.words import DriverHeldUpError
from interlace.comm.rendezvous import patience as patience_file
from interlace.comm.rendezvous.board import Board
from interlace.errors import AgreementError, BackendError, CommTimeoutError, PeerError
from interlace.ir import parse
from interlace.runtime.cuda import engine as engine_file
from interlace.runtime.cuda.graphs.warm_up import warm_up
from interlace.runtime.cuda.waits import watchdog as watchdog_file
from interlace.runtime.cuda.waits.watchdog import Marks, Watched
from interlace.runtime.executor import RunLabel, Teardown
from interlace.runtime.run_sizes import RunSizes

LIMIT_S = 20.0


class Device:
    """Does what is recorded in order; an event is done when its last record is."""

    def __init__(self) -> None:
        self.recorded: dict[int, int] = {}
        self.issued = self.done_to = self.events = 0

    def event(self) -> int:
        self.events += 1
        return self.events

    def record(self, stream: int, event: int) -> None:
        self.issued += 1
        self.recorded[event] = self.issued

    def done(self, event: int) -> bool:
        time.sleep(0)
        return self.recorded.get(event, 0) <= self.done_to


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Fake, Device]]:
    """An engine on such a device."""
    with bound("gather", "put", timeout_s=LIMIT_S) as found:
        device = Device()
        monkeypatch.setattr(found.driver, "record", device.record)
        monkeypatch.setattr(found.driver, "done", device.done)
        yield found, device
        device.done_to = device.issued


@pytest.mark.parametrize("fails", [True, False], ids=["before", "after"])
def test_peers_hear_of_a_run_before_a_capture_that_fails(fails: bool) -> None:
    """Also where it fails before anything is issued; and each Executor meets its own peers."""
    store, errors = HashStore(), list[AgreementError]()
    board, theirs = (Board(store, (0, 1), rank) for rank in (0, 1))
    with bound("gather", "put") as one:
        team: Any = SimpleNamespace(topic="tp", ranks=(0, 1), rank=0, resets=0, board=board)
        for tag in (7, 9):
            object.__setattr__(
                one.engine.context, "label", RunLabel("f", lambda _, tag=tag: tag, RunSizes({}))
            )
            peer = threading.Thread(target=meet, args=(theirs, f"tp/{tag:x}/0/warm-up", errors))
            peer.start()
            if fails:
                inputs, full = one.engine.context.inputs, MemoryError("full")
                with mock.patch.object(inputs, "zeros", side_effect=full):
                    with pytest.raises(MemoryError, match="full"):
                        warm_up(one.engine, [team])
                found = one.engine.context.resources.teams["tp"].control.failure()
                assert "rank 1 of team tp stopped: MemoryError: full" in str(found)
            else:
                warm_up(one.engine, [team])
            peer.join(2)
            assert not peer.is_alive()
    assert [str(error) for error in errors] == ["rank 0 gave up: full"] * 2 * fails


def meet(board: Board, place: str, errors: list[AgreementError]) -> None:
    try:
        board.exchange(place, {}, 5)
    except AgreementError as error:
        errors.append(error)


def runs(fake: Fake, device: Device, num: int) -> list[int]:
    """Issues runs; where each has ended on the device."""
    ends: list[int] = []
    for _ in range(num):
        fake.run(*tensors("gather"))
        ends.append(device.recorded[fake.engine.marks.of(fake.engine.issued)[1]])
    return ends


@pytest.mark.parametrize("marks", [64, 1024])
def test_progress_is_seen_however_far_the_host_is_ahead(
    fake: tuple[Fake, Device], monkeypatch: pytest.MonkeyPatch, marks: int
) -> None:
    """Of a run that has fewer behind it than there are marks; else of the first such one."""
    found, device = fake
    monkeypatch.setattr(found.engine, "marks", Marks(found.driver, marks))  # type: ignore[arg-type]
    ends, watched = runs(found, device, 320), found.engine.watched
    for run, over in enumerate(ends, 1):
        device.done_to = over
        assert watched.progress(found.engine) == (run if run > 320 - marks else 0)
    assert watched.idle


def test_no_event_is_asked_for_once_it_is_destroyed() -> None:
    """Neither by another thread nor, as a collector may have it, amid the question."""
    device, asked, destroyed = Device(), threading.Event(), list[int]()

    class Driver:
        event, record = device.event, device.record

        def done(self, event: int) -> bool:
            asked.set()
            time.sleep(0.05)
            assert event not in destroyed
            if amid:
                marks.close()
                assert event not in destroyed
            return False

        def destroy_event(self, event: int) -> None:
            destroyed.append(event)

    for amid in (False, True):
        asked.clear()
        marks = Marks(Driver(), 4)  # type: ignore[arg-type]
        asking = threading.Thread(target=lambda marks=marks: marks.begun(1))
        asking.start()
        assert asked.wait(5)
        marks.close()
        asking.join(5)
        assert len(destroyed) == len(set(destroyed)) == 8 * (1 + amid)
        assert marks.ended(1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that patience goes by."""
    now = [1000.0]
    times = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr(patience_file, "time", times)
    return now


def let_pass(seconds: float, clock: list[float], watched: Watched) -> None:
    """Time, in which the watchdog looks."""
    for _ in range(round(seconds / 0.5)):
        clock[0] += 0.5
        watched.look()


def test_a_pause_of_the_whole_job_is_no_stall(
    fake: tuple[Fake, Device], clock: list[float]
) -> None:
    """The watchdog sees nothing of the pause, and what stalls after it is found as ever."""
    found, device = fake
    watched = found.engine.watched
    runs(found, device, 1)
    device.done_to = device.issued
    watched.finish()
    device.done_to = runs(found, device, 1)[0] - 1  # it has begun
    watched.look()
    clock[0] += 10 * LIMIT_S
    watched.look()
    assert watched.failure is None
    let_pass(1.1 * LIMIT_S, clock, watched)
    assert isinstance(watched.failure, CommTimeoutError)


def test_runs_behind_the_callers_long_work_are_not_late(
    fake: tuple[Fake, Device], clock: list[float], seed: int
) -> None:
    """However many a device queues; the first that has begun is."""
    found, device = fake
    watched = found.engine.watched
    begun = device.issued + 1  # the first that they ask of the device
    runs(found, device, random.Random(seed).randrange(32, 1000))
    for place in (begun - 1, begun - 1, begun, begun):
        assert watched.failure is None
        device.done_to = place
        let_pass(0.7 * LIMIT_S, clock, watched)
    assert isinstance(watched.failure, CommTimeoutError)


def test_what_a_waiting_thread_sees_of_the_end_is_progress(
    fake: tuple[Fake, Device], clock: list[float]
) -> None:
    """A caller who synchronizes after every run, and is never found idle."""
    found, device = fake
    watched = found.engine.watched
    runs(found, device, 1)
    watched.look()
    for _ in range(6):
        let_pass(0.4 * LIMIT_S, clock, watched)
        device.done_to = device.issued
        watched.finish()
        device.done_to = runs(found, device, 1)[0] - 1  # it has begun
        watched.look()
        assert watched.failure is None
    let_pass(1.1 * LIMIT_S, clock, watched)
    assert isinstance(watched.failure, CommTimeoutError)


def test_two_threads_that_count_do_not_count_twice(fake: tuple[Fake, Device]) -> None:
    found, device = fake
    watched, engine = found.engine.watched, found.engine
    wrong: list[Any] = []
    over = threading.Event()

    def count() -> None:
        while not over.is_set():
            known, ended = watched.progress(engine), ends_now[0]
            if known > ended:
                wrong.append((known, ended))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    ends, ends_now = runs(found, device, 31), [0]
    threads = [threading.Thread(target=count) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        for run, place in enumerate(ends, 1):
            ends_now[0], device.done_to = run, place
            time.sleep(0.002)
    finally:
        over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
    assert not wrong


def test_what_a_peer_told_before_it_let_go_is_heard(fake: tuple[Fake, Device]) -> None:
    """The watchdog has not looked yet, and the run has ended: with what nobody may use."""
    found, device = fake
    runs(found, device, 1)
    found.team.peers[0].fail(CommTimeoutError("no progress in 60 s"))
    device.done_to = device.issued
    with pytest.raises(PeerError, match="rank 0 of team tp stopped: no progress"):
        found.engine.synchronize()


SYNCED = """
def f(tp: Team[2], x: f32[4], y: out[f32[4]]):
    main: notify(told, to=tp.others)
    main: expect(told, tp.rank + 1)
    main: copy(x, y)
    main: host_sync()
    main: copy(x, y)
"""


def test_the_host_does_not_go_on_with_what_a_stopped_peer_left() -> None:
    with fake_engine(parse(SYNCED), 1) as found:
        peer = found.team.peers[0]

        def done(event: int) -> bool:
            peer.fail(CommTimeoutError("no progress in 60 s"))
            return True

        found.driver.done = done  # type: ignore[method-assign]
        with pytest.raises(PeerError, match="rank 0 of team tp stopped"):
            found.run([torch.zeros(4)], [torch.zeros(4)])


def told_amid_a_run(found: Fake, value: Callable[[str, int], int]) -> str:
    """What is told of a stall while the host still issues a run, where words read so."""
    texts: list[str] = []

    def done(event: int) -> bool:
        if not texts:
            texts.append("")
            found.space.value = value
            texts[0] = found.engine.watched.stalled()
        return True

    found.driver.done = done  # type: ignore[method-assign]
    found.run([torch.zeros(4)], [torch.zeros(4)])
    return texts[0]


def test_ranks_that_have_told_are_not_named_as_late() -> None:
    """While the host still issues a run, the words that count are that run's."""
    with fake_engine(parse(SYNCED), 1) as found:
        text = told_amid_a_run(found, lambda signal, member: found.space.base + 1)
        assert "rank 1 in f" in text
        assert "expect" not in text


def test_a_rank_has_left_its_runs_when_all_its_executors_have(fake: tuple[Fake, Device]) -> None:
    """Peers go by that when its process ends: has it died in a run, or after it?"""
    found, device = fake
    with fake_engine(program("scatter", "put"), 1, beside=found) as other:
        team, dog = found.team, watchdog_file.Watchdog()
        dog.add(found.engine.watched)
        dog.add(other.engine.watched)
        runs(found, device, 1)
        device.done_to = device.issued
        other.run(*tensors("scatter"))
        assert found.engine.watched.idle
        assert not other.engine.watched.idle
        dog.once()
        assert (team.control.run, team.control.cells[EXITED]) == (2, 0)
        device.done_to = device.issued
        dog.once()
        assert team.control.cells[EXITED] == 2
        found.engine.watched.issuing = True  # a run that is entered, and not on the device yet
        team.control.enter(1, "next", None)
        dog.once()
        assert team.control.cells[EXITED] == 2
        found.engine.watched.issuing = False


@pytest.mark.parametrize("how", ["synchronize", "close"])
def test_a_rank_that_ends_well_says_so_at_once(fake: tuple[Fake, Device], how: str) -> None:
    found, device = fake
    team = found.team
    runs(found, device, 1)
    device.done_to = device.issued
    dog = watchdog_file.Watchdog()
    dog.add(found.engine.watched)
    with mock.patch.object(engine_file, "watchdog", return_value=dog):
        getattr(found.engine, how)()
    assert team.control.cells[EXITED] == team.control.run == 1


def await_ends() -> None:
    """What the watchdog ends goes in threads of their own."""
    for thread in threading.enumerate():
        if thread.name == "interlace end":
            thread.join(10)
            assert not thread.is_alive()


def test_what_runs_use_is_given_back_behind_them(
    fake: tuple[Fake, Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers may be late, and within their time: nothing that they write into goes before."""
    found, device = fake
    monkeypatch.setattr(watchdog_file, "GRACE_S", 0.01)
    destroyed: list[int] = []
    monkeypatch.setattr(found.driver, "destroy_event", destroyed.append)
    dog, kept, close = watchdog_file.Watchdog(), Teardown(), mock.Mock()
    kept.engine = found.engine
    kept.shared.callback(close)
    runs(found, device, 1)
    with mock.patch.object(engine_file, "watchdog", return_value=dog):
        kept.close()
        dog.once()
        assert not destroyed
        assert not close.called
        device.done_to = device.issued
        dog.once()
        await_ends()
        assert destroyed
        dog.once()
        await_ends()
        close.assert_called_once()


def test_what_is_given_back_does_not_hold_up_the_watchdog(
    fake: tuple[Fake, Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait in the driver behind a run that stalls, which only the watchdog ends."""
    found, _ = fake
    dog, begins, goes_on = watchdog_file.Watchdog(), threading.Event(), threading.Event()

    def end() -> None:
        begins.set()
        assert goes_on.wait(30)

    dog.later(found.engine.watched, end)
    begun = time.monotonic()
    dog.once()
    assert time.monotonic() - begun < 5
    assert begins.wait(10)
    goes_on.set()
    await_ends()


def test_what_stalls_is_told_though_words_cannot_be_read() -> None:
    with fake_engine(parse(SYNCED), 1) as found:
        text = told_amid_a_run(found, mock.Mock(side_effect=BackendError("the GPU is full")))
        assert "no progress in" in text
        assert "rank 1 in f" in text
        assert "its signals cannot be read (the GPU is full)" in text


def test_a_process_whose_driver_is_held_up_ends_itself_with_a_report(
    fake: tuple[Fake, Device], clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some seconds after the failure, which the peers have heard by then."""
    found, device = fake
    reports, watched = list[str](), found.engine.watched
    monkeypatch.setattr(watchdog_file, "time", patience_file.time)
    held_up = mock.Mock(side_effect=DriverHeldUpError("the CUDA driver is held up"))
    monkeypatch.setattr(found.space, "value", held_up)
    monkeypatch.setattr(found.side, "release", held_up)
    monkeypatch.setattr(watchdog_file, "end_process", reports.append)
    watched.look()
    device.done_to = runs(found, device, 1)[0] - 1  # it has begun
    while watched.failure is None:
        let_pass(0.5, clock, watched)
    assert "its signals cannot be read (the CUDA driver is held up)" in str(watched.failure)
    assert "rank 1 of team tp stopped: no progress" in str(found.team.peers[0].failure())
    clock[0] += watchdog_file.HELD_UP_S
    for number in range(2):
        assert len(reports) == 0, "the driver gets some seconds"
        clock[0] += 0.1 * number
        with pytest.raises(DriverHeldUpError):
            watched.look()
    (report,) = reports
    assert report.startswith("interlace: rank 1 ends its process")
    assert "the CUDA driver is held up" in report
    assert "no progress in 20 s: rank 1 in f, and its signals cannot be read" in report
    assert "rank 0 has not entered run 1" in report


def test_a_driver_that_is_let_go_in_time_ends_nothing(
    fake: tuple[Fake, Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort of NCCL may do it, or a rank that is late."""
    found, device = fake
    monkeypatch.setattr(watchdog_file, "HELD_UP_S", 0.0)
    monkeypatch.setattr(watchdog_file, "end_process", mock.Mock(side_effect=AssertionError))
    monkeypatch.setattr(found.side, "release", mock.Mock(side_effect=BackendError("full")))
    runs(found, device, 1)
    found.engine.watched.fail(CommTimeoutError("no progress in 20 s"))
    with pytest.raises(BackendError, match="full"):
        found.engine.watched.look()
    device.done_to = device.issued
    monkeypatch.setattr(found.side, "release", mock.Mock(side_effect=DriverHeldUpError("held up")))
    found.engine.watched.look()


def test_the_report_of_a_process_that_ends_itself_is_on_stderr() -> None:
    """Not as an exception, of which a thread could die alone; and with every thread's stack."""
    text = "from interlace.runtime.cuda.waits.watchdog import end_process as e; e('rank 3 ends')"
    ended = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert ended.returncode == watchdog_file.EXIT_CODE
    assert ended.stderr.startswith("rank 3 ends\n")
    assert "(most recent call first)" in ended.stderr


def test_what_failed_is_raised_though_it_cannot_be_ended(
    fake: tuple[Fake, Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, device = fake
    monkeypatch.setattr(watchdog_file, "GRACE_S", 0.05)
    runs(found, device, 1)
    collects: list[bool] = []

    def release(generation: int) -> None:
        collects.append(gc.isenabled())
        raise BackendError("the GPU is full")

    monkeypatch.setattr(found.side, "release", release)
    found.engine.watched.fail(CommTimeoutError("no progress in 20 s"))
    with pytest.raises(CommTimeoutError, match="no progress in 20 s"):
        found.engine.synchronize()
    assert len(collects) > 1
    assert not any(collects), "the garbage collector may wait for a lock of torch's"
    assert gc.isenabled()
    device.done_to = device.issued


def test_the_watchdog_outlives_a_device_that_is_past_asking(
    fake: tuple[Fake, Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, device = fake
    runs(found, device, 1)

    def done(event: int) -> bool:
        raise BackendError("cuEventQuery failed: CUDA_ERROR_ILLEGAL_ADDRESS")

    monkeypatch.setattr(found.driver, "done", done)
    dog = watchdog_file.Watchdog()
    monkeypatch.setattr(watchdog_file, "PERIOD_S", 0.001)
    monkeypatch.setattr(watchdog_file, "relax_captures", lambda: None)
    dog.add(found.engine.watched)
    dog.start()
    for _ in range(200):
        if isinstance(found.engine.failure, BackendError):
            break
        time.sleep(0.01)
    time.sleep(0.05)
    assert isinstance(found.engine.failure, BackendError)
    assert "interlace watchdog" in [thread.name for thread in threading.enumerate()]
    dog.drop(found.engine.watched)


class Cyclic:
    """What only the garbage collector ends, as it does an Executor in a cycle."""

    def __init__(self) -> None:
        self.me = self


def test_the_garbage_collector_may_end_an_executor_that_is_being_looked_at(
    fake: tuple[Fake, Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, device = fake
    monkeypatch.setattr(watchdog_file, "GRACE_S", 0.01)
    destroyed: list[int] = []
    monkeypatch.setattr(found.driver, "destroy_event", destroyed.append)
    runs(found, device, 1)
    kept, ended, watched = Teardown(), found.engine.marks.ended, found.engine.watched
    kept.engine = found.engine

    def collected(run: int) -> bool:
        gc.collect()
        return ended(run)

    monkeypatch.setattr(found.engine.marks, "ended", collected)
    dog = watchdog_file.Watchdog()
    with uncollected(), mock.patch.object(engine_file, "watchdog", return_value=dog):
        weakref.finalize(Cyclic(), kept.close)
        thread = threading.Thread(target=watched.look, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
        assert not destroyed
        device.done_to = device.issued
        dog.once()
        await_ends()
        assert destroyed
