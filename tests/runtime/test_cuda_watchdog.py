"""What the watchdog sees of runs that go on, however far the host is ahead, and whoever looks."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.runtime.cuda_sites import bound, tensors
from tests.support.fake_cuda import Fake

from interlace.errors import CommTimeoutError
from interlace.runtime.cuda import watchdog as watchdog_file
from interlace.runtime.cuda.marks import APART, Marks

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
    with bound("gather", "put", time_out_s=LIMIT_S) as found:
        device = Device()
        monkeypatch.setattr(found.driver, "record", device.record)
        monkeypatch.setattr(found.driver, "done", device.done)
        yield found, device
        device.done_to = device.issued


def runs(fake: Fake, device: Device, num: int) -> list[int]:
    """Issues runs; where each has ended on the device."""
    ends: list[int] = []
    for _ in range(num):
        fake.run(*tensors("gather"))
        ends.append(device.recorded[fake.engine.marks.of(fake.engine.issued)[1]])
    return ends


def test_progress_is_seen_however_far_the_host_is_ahead(fake: tuple[Fake, Device]) -> None:
    found, device = fake
    num = 5 * found.engine.marks.num
    ends, watched = runs(found, device, num), found.engine.watched
    for run, end in enumerate(ends, 1):
        device.done_to = end
        known = watched._progress(found.engine)
        assert run - found.engine.marks.num // APART <= known <= run
    assert watched._progress(found.engine) == num
    assert watched.idle


def test_probes_are_used_again() -> None:
    device = Device()
    marks = Marks(device, 32)  # type: ignore[arg-type]
    for run in range(1, 1000):
        marks.probe(1, run)
        if run % 20 == 0:
            device.done_to = device.issued
            assert run - marks.passed() < 32
    assert len(marks.probes) <= 4


def test_what_a_waiting_thread_sees_of_the_end_is_progress(
    fake: tuple[Fake, Device], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller who synchronizes after every run, and is never found idle."""
    found, device = fake
    clock, watched = [1000.0], found.engine.watched
    now = SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep)
    monkeypatch.setattr(watchdog_file, "time", now)
    runs(found, device, 1)
    watched.look()
    for _ in range(6):
        clock[0] += 0.4 * LIMIT_S
        device.done_to = device.issued
        watched.finish()
        device.done_to = runs(found, device, 1)[0] - 1  # it has begun
        watched.look()
        assert watched.failure is None
    clock[0] += 1.1 * LIMIT_S
    watched.look()
    assert isinstance(watched.failure, CommTimeoutError)


def test_two_threads_that_count_do_not_count_twice(fake: tuple[Fake, Device]) -> None:
    found, device = fake
    watched, engine = found.engine.watched, found.engine
    wrong: list[Any] = []
    over = threading.Event()

    def count() -> None:
        while not over.is_set():
            known, ended = watched._progress(engine), ends_now[0]
            if known > ended:
                wrong.append((known, ended))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    ends, ends_now = runs(found, device, 31), [0]
    threads = [threading.Thread(target=count) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        for run, end in enumerate(ends, 1):
            ends_now[0], device.done_to = run, end
            time.sleep(0.002)
    finally:
        over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)
    assert not wrong
