"""Reads and writes of words are bounded, also while the driver is held up."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from interlace.comm.cuda import words as words_file
from interlace.comm.cuda.words import DriverHeldUpError, WordAccess
from interlace.errors import BackendError, CommTimeoutError

pytestmark = pytest.mark.timeout(60)


class Device:
    """A driver whose calls may be held up, and the memory behind it."""

    def __init__(self) -> None:
        self.words = [0] * 64
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.calls = self.relaxed = self.finished = 0

    def private_stream(self) -> int:
        return 5

    def finish(self, stream: int, timeout_s: float) -> None:
        """What stands in the queue is done."""
        assert stream == 5
        self.finished += 1

    def read(self, address: int, count: int) -> list[int]:
        self.calls += 1
        assert self.goes_on.wait(30)
        return self.words[address // 4 :][:count]

    def fill(self, address: int, value: int, count: int) -> None:
        self.calls += 1
        assert self.goes_on.wait(30)
        self.words[address // 4 : address // 4 + count] = [value] * count


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """It; nothing is held up when the test is over."""
    found = Device()
    monkeypatch.setattr(words_file, "PATIENCE_S", 0.1)

    def relax() -> None:
        found.relaxed += 1

    monkeypatch.setattr(words_file, "relax_captures", relax)
    yield found
    found.goes_on.set()


def test_words_are_read_and_written(device: Any) -> None:
    access = WordAccess(device)
    access.fill(8, -1, 2)
    assert access.read(0, 5) == [0, 0, 0xFFFFFFFF, 0xFFFFFFFF, 0]
    assert device.relaxed == 2, "a capture of the user's in another thread would be lost"
    access.rest(1)
    assert device.finished == 0


def test_a_driver_that_is_held_up_is_an_error(device: Any) -> None:
    access = WordAccess(device)
    device.goes_on.clear()
    with pytest.raises(DriverHeldUpError, match=r"has not returned in 0\.1 s"):
        access.read(0, 1)
    for _ in range(3):
        with pytest.raises(DriverHeldUpError, match="an earlier call has not returned"):
            access.fill(0, 1, 1)
    assert device.calls == 1, "the driver was asked again while a call was held up"
    device.goes_on.set()
    access.rest(5)
    assert device.finished == 1, "writes may still stand in the queue"
    assert access.read(0, 1) == [0]


def test_an_abandoned_call_is_awaited(device: Any) -> None:
    """What it writes late must not meet words that count anew."""
    access = WordAccess(device)
    device.goes_on.clear()
    with pytest.raises(DriverHeldUpError):
        access.fill(0, 5, 1)
    with pytest.raises(CommTimeoutError, match=r"has not returned after 0.05 s.*end this process"):
        access.rest(0.05)
    threading.Timer(0.3, device.goes_on.set).start()
    access.rest(10)
    device.fill(0, 0, 1)
    time.sleep(0.1)
    assert device.words[0] == 0


def test_an_error_of_the_driver_is_raised(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise BackendError("cuMemsetD32Async of the CUDA driver failed: 999")

    monkeypatch.setattr(device, "fill", fail)
    with pytest.raises(BackendError, match="999"):
        WordAccess(device).fill(0, 1, 1)


def test_without_a_thread_there_is_no_unbounded_call(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", no_room)
    with pytest.raises(DriverHeldUpError, match="can't start new thread"):
        WordAccess(device).read(0, 1)
    assert not device.calls
