"""The few functions of the CUDA driver that runs use, each checked.

    driver = Driver()
    driver.copy(stream, dst, src, nbytes)      # by a copy engine where one side is another GPU's
    driver.write(stream, word, 7)              # once everything before it on the stream is done
    driver.wait(stream, word, 7)               # the stream goes on when (word - 7) as int32 >= 0

Streams and addresses are plain integers, and events are what the driver gave: nothing is wrapped
in the hot path. Note [No multicast]: nothing here makes or binds multicast objects.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from interlace.errors import BackendError, CommTimeoutError

WRITE_VALUE_32 = 2
WAIT_VALUE_32 = 1
ENABLE_PEER_ACCESS = 1
OUT_OF_MEMORY = 2
NOT_READY = 600
POLL_S = 0.0005

Event = Any
"""A CUevent: an integer would be made one in every call."""


def bindings() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise BackendError(
            "the package cuda-bindings is not there, which CUDA builds of torch bring along: "
            "install it with pip install 'cuda-bindings>=13.0.3,<14'"
        ) from error


def relax_captures() -> None:
    cu = bindings()
    cu.cuThreadExchangeStreamCaptureMode(cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)


def _name(error: Any) -> str:
    return getattr(error, "name", str(error))


class Driver:
    """The driver's functions, on the device that is current when it is made."""

    def __init__(self) -> None:
        cu = self._cu = bindings()
        self._write, self._wait = cu.cuStreamWriteValue32, cu.cuStreamWaitValue32
        self._copy, self._batch = cu.cuMemcpyDtoDAsync, cu.cuStreamBatchMemOp
        self._record, self._wait_event = cu.cuEventRecord, cu.cuStreamWaitEvent
        self._launch, self._attribute = cu.cuGraphLaunch, cu.cuPointerGetAttribute
        self._number = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
        self._private: int | None = None

    def fail(self, what: str, error: Any) -> None:
        raise BackendError(f"{what} of the CUDA driver failed: {_name(error)}")

    def check(self, what: str, result: Any) -> Any:
        error, *values = result
        if error:
            self.fail(what, error)
        return values[0] if values else None

    def write(self, stream: int, address: int, value: int) -> None:
        """Writes a 32-bit word once the stream gets here, after a fence of the whole system."""
        (error,) = self._write(stream, address, value & 0xFFFFFFFF, 0)
        if error:
            self.fail("cuStreamWriteValue32", error)

    def wait(self, stream: int, address: int, value: int) -> None:
        """The stream waits until the word has reached `value`, counted around."""
        (error,) = self._wait(stream, address, value & 0xFFFFFFFF, 0)
        if error:
            self.fail("cuStreamWaitValue32", error)

    def copy(self, stream: int, dst: int, src: int, nbytes: int) -> None:
        (error,) = self._copy(dst, src, nbytes, stream)
        if error:
            self.fail("cuMemcpyDtoDAsync", error)

    def record(self, stream: int, event: Event) -> None:
        (error,) = self._record(event, stream)
        if error:
            self.fail("cuEventRecord", error)

    def wait_event(self, stream: int, event: Event) -> None:
        (error,) = self._wait_event(stream, event, 0)
        if error:
            self.fail("cuStreamWaitEvent", error)

    def launcher(self, graph: Any) -> Callable[[int], None]:
        """Returns a function that launches a graph that torch captured, in two thirds of the host
        time of its own `replay`. It does not advance random numbers: the graph must draw none."""
        launch, handle = self._launch, self._cu.CUgraphExec(graph.raw_cuda_graph_exec())

        def run(stream: int) -> None:
            (error,) = launch(handle, stream)
            if error:
                self.fail("cuGraphLaunch", error)

        return run

    def batch(self, *parts: tuple[str, Sequence[int]]) -> Batch:
        """Operations on words in order, issued at once: ("wait", words), ("write", words)."""
        return Batch(self, parts)

    def event(self) -> Event:
        return self.check("cuEventCreate", self._cu.cuEventCreate(2))

    def destroy_event(self, event: Event) -> None:
        self._cu.cuEventDestroy(event)

    def done(self, event: Event) -> bool:
        """True if the work before the event's last record is done."""
        (error,) = self._cu.cuEventQuery(event)
        if error and int(error) != NOT_READY:
            self.fail("cuEventQuery", error)
        return not error

    def private_stream(self) -> int:
        if self._private is None:
            made = self._cu.cuStreamCreate(1)
            self._private = int(self.check("cuStreamCreate", made))
        return self._private

    def finish(self, stream: int, timeout_s: float = 10.0) -> None:
        """Waits until the stream is done, bounded."""
        deadline = time.monotonic() + timeout_s
        while True:
            (error,) = self._cu.cuStreamQuery(stream)
            if not error:
                return
            if int(error) != NOT_READY:
                self.fail("cuStreamQuery", error)
            if time.monotonic() > deadline:
                raise CommTimeoutError(f"a CUDA stream is not done after {timeout_s:g} s")
            time.sleep(POLL_S)

    def finish_device(self) -> None:
        self.check("cuCtxSynchronize", self._cu.cuCtxSynchronize())

    def alloc(self, nbytes: int, timeout_s: float = 10.0) -> int:
        """Device memory, filled with zeros. Where none is left torch gives up what it caches."""
        error, *found = self._cu.cuMemAlloc(nbytes)
        if error and int(error) == OUT_OF_MEMORY:
            torch.cuda.empty_cache()
            error, *found = self._cu.cuMemAlloc(nbytes)
        if error:
            raise BackendError(
                f"there are no {nbytes >> 20} MiB of GPU memory for what peers map "
                f"({_name(error)}): leave more of it free, or use smaller sizes, or a strategy "
                "without slots"
            )
        base = int(found[0])
        try:
            self.fill(base, 0, nbytes // 4, timeout_s)
        except BaseException:
            self.free(base)
            raise
        return base

    def free(self, base: int) -> None:
        self._cu.cuMemFree(base)

    def fill(self, address: int, value: int, count: int, timeout_s: float = 10.0) -> None:
        stream = self.private_stream()
        filled = self._cu.cuMemsetD32Async(address, value & 0xFFFFFFFF, count, stream)
        self.check("cuMemsetD32Async", filled)
        self.finish(stream, timeout_s)

    def read(self, address: int, count: int) -> list[int]:
        """Reads 32-bit words, whatever other streams are doing."""
        host = (ctypes.c_uint32 * count)()
        stream = self.private_stream()
        copied = self._cu.cuMemcpyDtoHAsync(ctypes.addressof(host), address, 4 * count, stream)
        self.check("cuMemcpyDtoHAsync", copied)
        self.finish(stream)
        return list(host)

    def buffer_id(self, address: int) -> int:
        """The number of the allocation there, which is never used again; 0: there is none."""
        error, number = self._attribute(self._number, address)
        return 0 if error else int(number)

    def handle(self, base: int) -> str:
        """The CUDA IPC handle, in hex, with which another process maps this memory."""
        handle = self.check("cuIpcGetMemHandle", self._cu.cuIpcGetMemHandle(base))
        return bytes(handle.reserved).hex()

    def open(self, handle: str) -> int:
        taken = self._cu.CUipcMemHandle()
        taken.reserved = bytes.fromhex(handle)
        opened = self._cu.cuIpcOpenMemHandle(taken, ENABLE_PEER_ACCESS)
        return int(self.check("cuIpcOpenMemHandle (the GPUs need peer access)", opened))

    def close(self, base: int) -> None:
        self._cu.cuIpcCloseMemHandle(base)


class Batch:
    """Memory operations that are issued as one call, and done in their order."""

    LIMIT = 255
    """Operations that the driver takes at once; more are several calls."""

    def __init__(self, driver: Driver, parts: Sequence[tuple[str, Sequence[int]]]) -> None:
        cu = bindings()
        self._driver = driver
        self._issue = cu.cuStreamBatchMemOp
        made = [[_item(cu, kind, address) for address in words] for kind, words in parts]
        items = [item for items in made for item, _ in items]
        self._calls = [items[at : at + self.LIMIT] for at in range(0, len(items), self.LIMIT)]
        self._values = [[place for _, place in items] for items in made]

    def run(self, stream: int, *values: int) -> None:
        """Part by part: waits until all words have reached its value, or writes that to all."""
        for places, value in zip(self._values, values, strict=True):
            for place in places:
                place.value = value & 0xFFFFFFFF
        for items in self._calls:
            (error,) = self._issue(stream, len(items), items, 0)
            if error:
                self._driver.fail("cuStreamBatchMemOp", error)


def _item(cu: Any, kind: str, address: int) -> tuple[Any, Any]:
    """An operation on a word, and the part of it that has the value."""
    item = cu.CUstreamBatchMemOpParams()
    code = cu.CUstreamBatchMemOpType(WAIT_VALUE_32 if kind == "wait" else WRITE_VALUE_32)
    item.operation = code
    part = item.waitValue if kind == "wait" else item.writeValue
    part.operation = code
    part.address = address
    part.flags = 0
    return item, part


class _Users:
    lock = threading.RLock()  # it may itself come by, amid the lines that turn it off
    count = 0
    was = False


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Without Python's garbage collector, which may ask about events and free memory: a thread that
    captures must not, and the watchdog would wait for the thread that a stall holds up (Note [Held
    up] in words.py). Threads may nest it."""
    with _Users.lock:
        if not _Users.count:
            _Users.was = gc.isenabled()
            gc.disable()
        _Users.count += 1
    try:
        yield
    finally:
        with _Users.lock:
            _Users.count -= 1
            if _Users.was and not _Users.count:
                gc.enable()
