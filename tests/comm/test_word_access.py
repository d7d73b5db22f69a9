"""Words are read and written though the driver is held up: by a real helper process, which gets a
library of plain memory in place of CUDA's."""

from __future__ import annotations

import gc
import io
import json
import mmap
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from interlace.comm.cuda import access as access_file
from interlace.comm.cuda import helper as helper_file
from interlace.comm.cuda.access import WordAccess
from interlace.comm.cuda.memory import PeerMemory
from interlace.errors import BackendError, CommTimeoutError

pytestmark = pytest.mark.timeout(60)

NBYTES = 4096
BASE = 1 << 40
HANDLE = "ab" * 64
BUS_ID = "0000:1b:00.0"
FAKE = '''
"""The helper, with a file for the device's memory."""
import ctypes, importlib.util, mmap, sys
spec = importlib.util.spec_from_file_location("helper", {helper!r})
helper = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helper)

class Library:
    """Of one allocation, mapped at 4096 here."""
    def __init__(self):
        with open({memory!r}, "r+b") as file:
            self.bytes = mmap.mmap(file.fileno(), 0)
    def cuInit(self, flags): return 0
    def cuDeviceGetByPCIBusId(self, device, bus_id): return 0 if bus_id == {bus_id!r} else 101
    def cuDevicePrimaryCtxRetain(self, context, device): return {context}
    def cuCtxSetCurrent(self, context): return 0
    def cuCtxSynchronize(self): return 0
    def cuIpcOpenMemHandle_v2(self, base, handle, flags):
        if bytes(handle.reserved) != bytes.fromhex({handle!r}):
            return 201
        base._obj.value = 4096
        return 0
    def cuMemcpyDtoH_v2(self, words, address, nbytes):
        at = address.value - 4096
        ctypes.memmove(words, self.bytes[at : at + nbytes.value], nbytes.value)
        return 0
    def cuMemcpyHtoD_v2(self, address, words, nbytes):
        at = address.value - 4096
        self.bytes[at : at + nbytes.value] = bytes(words)
        return 0

helper.IDLE_S = {idle}
helper.serve(Library, sys.argv[1], helper.asked(sys.stdin), sys.stdout)
'''


class Device:
    """A driver whose calls may be held up, and the memory behind it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        place.write_bytes(bytes(NBYTES))
        with place.open("r+b") as file:
            self.bytes = mmap.mmap(file.fileno(), 0)
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.calls = self.relaxed = self.finished = 0
        self.memory = PeerMemory(self, 1, NBYTES, (7, BASE), (), HANDLE)  # type: ignore[arg-type]

    @property
    def driver(self) -> Any:
        return self

    def relax_captures(self) -> None:
        self.relaxed += 1

    def private_stream(self) -> int:
        return 5

    def finish(self, stream: int, time_out_s: float) -> None:
        """What stands in the queue is done."""
        assert stream == 5
        self.finished += 1

    def read(self, address: int, count: int) -> list[int]:
        self.calls += 1
        assert self.goes_on.wait(30)
        return list(memoryview(self.bytes).cast("I")[(address - BASE) // 4 :][:count])

    def fill(self, address: int, value: int, count: int) -> None:
        self.calls += 1
        assert self.goes_on.wait(30)
        memoryview(self.bytes).cast("I")[(address - BASE) // 4 :][:count] = memoryview(
            value.to_bytes(4, "little") * count
        ).cast("I")


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """It, with a helper for it; nothing is held up when the test is over."""
    found = Device(tmp_path / "memory")
    use(monkeypatch, tmp_path, FAKE)
    monkeypatch.setattr(access_file, "PATIENCE_S", 0.1)
    yield found
    found.goes_on.set()


def use(
    monkeypatch: pytest.MonkeyPatch, place: Path, text: str, context: int = 0, idle: float = 10
) -> None:
    """This program is the helper."""
    facts: dict[str, Any] = {"bus_id": BUS_ID.encode(), "handle": HANDLE, "context": context}
    facts["idle"] = idle
    facts |= {"helper": helper_file.__file__, "memory": str(place / "memory")}
    (place / "fake.py").write_text(text.format(**facts))
    monkeypatch.setattr(access_file, "HELPER", (sys.executable, "-I", str(place / "fake.py")))


def test_a_driver_that_answers_needs_no_help(device: Device) -> None:
    access = WordAccess(BUS_ID)
    access.fill(device.memory, BASE + 8, -1, 2)
    assert access.read(device.memory, BASE, 5) == [0, 0, 0xFFFFFFFF, 0xFFFFFFFF, 0]
    assert device.relaxed == 2, "a capture of the user's in another thread would be lost"
    assert access._helper is None
    access.rest(device.driver, 1)


def test_words_are_there_though_the_driver_is_held_up(device: Device) -> None:
    access = WordAccess(BUS_ID)
    access.fill(device.memory, BASE + 4, 7, 1)
    device.goes_on.clear()
    assert access.read(device.memory, BASE, 3) == [0, 7, 0]
    access.fill(device.memory, BASE + 8, (1 << 32) + 9, 2)
    assert access.read(device.memory, BASE, 4) == [0, 7, 9, 9]
    assert device.calls == 2, "the driver was asked again while a call was held up"
    process: Any = access._helper
    device.goes_on.set()
    access.rest(device.driver, 5)
    assert device.finished == 1, "writes may still stand in the queue"
    assert process._process.poll() == 0, "the helper is to end by itself, and to be reaped"
    assert access.read(device.memory, BASE, 4) == [0, 7, 9, 9]
    assert access._helper is None


def test_a_call_that_was_given_up_is_awaited(device: Device) -> None:
    """What it writes late must not meet words that count anew."""
    access = WordAccess(BUS_ID)
    device.goes_on.clear()
    access.fill(device.memory, BASE, 5, 1)
    with pytest.raises(CommTimeoutError, match=r"has not returned after 0.05 s.*end this process"):
        access.rest(device.driver, 0.05)
    threading.Timer(0.3, device.goes_on.set).start()
    access.rest(device.driver, 10)
    device.fill(BASE, 0, 1)
    time.sleep(0.1)
    assert device.read(BASE, 1) == [0]


def test_an_error_of_the_driver_is_raised(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise BackendError("cuMemsetD32Async of the CUDA driver failed: 999")

    monkeypatch.setattr(device, "fill", fail)
    with pytest.raises(BackendError, match="999"):
        WordAccess(BUS_ID).fill(device.memory, BASE, 1, 1)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("raise SystemExit(3)", "helper process ended with 3"),
        ("import time; time.sleep(60)", r"did not answer in 0\.5 s"),
        (FAKE, "cannot help: cuDevicePrimaryCtxRetain: 2"),
    ],
    ids=["dies", "hangs", "refuses"],
)
def test_a_helper_that_fails_is_an_error(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    """It is started anew only after a while, and then it may help."""
    use(monkeypatch, tmp_path, text, context=2)
    monkeypatch.setattr(access_file, "HELP_S", 0.5 if "sleep" in text else 10.0)
    access = WordAccess(BUS_ID)
    device.goes_on.clear()
    with pytest.warns(RuntimeWarning, match=says), pytest.raises(BackendError, match=says):
        access.read(device.memory, BASE, 1)
    use(monkeypatch, tmp_path, FAKE)
    monkeypatch.setattr(access_file, "HELP_S", 10.0)
    with pytest.raises(BackendError, match=says):
        access.fill(device.memory, BASE, 1, 1)
    monkeypatch.setattr(access_file, "PAUSE_S", 0.0)
    access.fill(device.memory, BASE, 1, 1)
    assert access.read(device.memory, BASE, 2) == [1, 0]
    device.goes_on.set()
    access.rest(device.driver, 5)


def test_it_is_no_use_where_no_process_can_be_started(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_file, "HELPER", ("/nowhere/python",))
    device.goes_on.clear()
    access, says = WordAccess(BUS_ID), "no helper process can be started"
    with pytest.warns(RuntimeWarning, match=says), pytest.raises(BackendError, match=says):
        access.read(device.memory, BASE, 1)


def test_the_helper_says_what_it_cannot_do() -> None:
    """And goes on with the next question."""

    class Library:
        def __getattr__(self, name: str) -> Any:
            return lambda *_: 201 if name == "cuIpcOpenMemHandle_v2" else 0

    questions = [json.dumps({"handle": HANDLE, "at": 0, "count": 1})] * 2
    answers = io.StringIO()
    helper_file.serve(Library, BUS_ID, questions, answers)
    lines = [json.loads(line) for line in answers.getvalue().splitlines()]
    assert lines == [{"error": "cuIpcOpenMemHandle_v2: 201"}] * 2


def test_the_helper_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    """Where there is no such device, or no CUDA at all, it says so."""
    device, access = Device(tmp_path / "memory"), WordAccess("0000:ff:1f.0")
    device.goes_on.clear()
    says = r"cannot help: (libcuda|cuDeviceGetByPCIBusId|cuInit)"
    try:
        with pytest.warns(RuntimeWarning, match=says), pytest.raises(BackendError, match=says):
            access.read(device.memory, BASE, 1)
    finally:
        device.goes_on.set()


def test_the_helper_ends_when_nothing_is_asked(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds memory of the GPU; the next one is started when it is needed."""
    use(monkeypatch, tmp_path, FAKE, idle=0.2)
    access = WordAccess(BUS_ID)
    device.goes_on.clear()
    for value in (3, 4):
        access.fill(device.memory, BASE, value, 1)
        helper = access._helper
        assert helper is not None
        assert helper._process.wait(10) == 0
    device.goes_on.set()
    access.rest(device.driver, 5)


def test_an_interrupt_leaves_no_helper_that_is_out_of_step(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = WordAccess(BUS_ID)
    device.goes_on.clear()
    access.fill(device.memory, BASE, 6, 1)
    first: Any = access._helper

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(access_file.os, "read", interrupt)
        with pytest.raises(KeyboardInterrupt):
            access.fill(device.memory, BASE + 4, 7, 1)
    assert first.ended
    assert access.read(device.memory, BASE, 2)[0] == 6
    device.goes_on.set()
    access.rest(device.driver, 5)


def test_what_else_is_on_its_output_is_an_error(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, tmp_path, "print('a tool that was preloaded', flush=True); input()")
    device.goes_on.clear()
    says = "answered b'a tool"
    with pytest.warns(RuntimeWarning, match=says), pytest.raises(BackendError, match=says):
        WordAccess(BUS_ID).read(device.memory, BASE, 1)


@pytest.mark.filterwarnings("error")
def test_failures_are_errors_though_warnings_are_too_and_keep_nothing_alive(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_file, "HELPER", ("/nowhere/python",))
    access = WordAccess(BUS_ID)
    device.goes_on.clear()

    class Engine:
        pass

    kept = weakref.WeakSet[Engine]()
    for _ in range(20):
        engine = Engine()
        kept.add(engine)
        with pytest.raises(BackendError, match="no helper process"):
            access.read(device.memory, BASE, 1)
    del engine
    gc.collect()
    assert not kept


def test_the_garbage_collector_does_not_come_amid_a_question(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may end an Executor, which then asks too."""
    access, seen = WordAccess(BUS_ID), list[bool]()
    device.goes_on.clear()
    ask, end = access_file.Helper.ask, access_file.Helper.end

    def noted(what: Any, *args: Any) -> Any:
        seen.append(gc.isenabled())
        return what(*args)

    monkeypatch.setattr(access_file.Helper, "ask", lambda *args: noted(ask, *args))
    monkeypatch.setattr(access_file.Helper, "end", lambda *args: noted(end, *args))
    assert access.read(device.memory, BASE, 1) == [0]
    device.goes_on.set()
    access.rest(device.driver, 5)
    assert seen == [False, False]
    assert gc.isenabled()


def test_a_helper_that_is_just_leaving_is_replaced_at_once(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes its time to end, and the question comes too late for it: that is no failure."""
    slow = FAKE + "import time; time.sleep(0.5)"
    use(monkeypatch, tmp_path, slow, idle=0.1)
    access = WordAccess(BUS_ID)
    device.goes_on.clear()
    access.fill(device.memory, BASE, 3, 1)
    first = access._helper
    time.sleep(0.3)  # it asks no more, and has not ended
    assert first is not None
    assert not first.ended
    assert access.read(device.memory, BASE, 1) == [3]
    assert first.left
    assert access._helper is not first
    device.goes_on.set()
    access.rest(device.driver, 5)
