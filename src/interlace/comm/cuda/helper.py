"""Reads and writes another process' device memory on its behalf: Note [Held up] in access.py.

    python -I -S helper.py 0000:1b:00.0        # the GPU, by its PCI address

A line of JSON on standard input asks, one on standard output answers:

    {"handle": "6a...", "at": 64, "count": 2}                  {"words": [7, 0]}
    {"handle": "6a...", "at": 64, "count": 2, "value": 9}      {"words": []}
    {"handle": "..", "at": 0, "count": 1}                   {"error": "cuIpcOpenMemHandle_v2: 201"}

`at` is in bytes, words have 32 bits. It ends with its input, or when nothing was asked for some
seconds. It imports nothing but the standard library, so that it starts in tenths of a second,
whatever the state of the process that it helps.
"""

from __future__ import annotations

import ctypes
import json
import select
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

ENABLE_PEER_ACCESS = 1
IDLE_S = 10.0
"""How long it waits for a question: it holds some hundred MB of the GPU's memory."""


class Handle(ctypes.Structure):
    """A CUipcMemHandle, which goes by value."""

    _fields_ = [("reserved", ctypes.c_byte * 64)]


class Memory:
    """Memory of the other process, as words."""

    def __init__(self, library: Any, bus_id: str) -> None:
        self._library = library
        self._bases: dict[str, int] = {}
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGetByPCIBusId", ctypes.byref(device), bus_id.encode())
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *args: Any) -> None:
        error = getattr(self._library, name)(*args)
        if error:
            raise OSError(f"{name}: {error}")

    def _address(self, handle: str, at: int) -> Any:
        if handle not in self._bases:
            taken, base = Handle.from_buffer_copy(bytes.fromhex(handle)), ctypes.c_uint64()
            self._call("cuIpcOpenMemHandle_v2", ctypes.byref(base), taken, ENABLE_PEER_ACCESS)
            self._bases[handle] = base.value
        return ctypes.c_uint64(self._bases[handle] + at)

    def read(self, handle: str, at: int, count: int) -> list[int]:
        """Words as they are now."""
        words = (ctypes.c_uint32 * count)()
        nbytes = ctypes.c_size_t(4 * count)
        self._call("cuMemcpyDtoH_v2", words, self._address(handle, at), nbytes)
        return list(words)

    def fill(self, handle: str, at: int, count: int, value: int) -> None:
        """Sets words, and returns when they are set."""
        words = (ctypes.c_uint32 * count)(*[value] * count)
        nbytes = ctypes.c_size_t(4 * count)
        self._call("cuMemcpyHtoD_v2", self._address(handle, at), words, nbytes)
        self._call("cuCtxSynchronize")


def answer(memory: Memory, question: dict[str, Any]) -> dict[str, Any]:
    """What is answered."""
    try:
        place = question["handle"], question["at"], question["count"]
        if "value" not in question:
            return {"words": memory.read(*place)}
        memory.fill(*place, question["value"])
    except OSError as error:
        return {"error": str(error)}
    return {"words": []}


def asked(lines: TextIO) -> Iterator[str]:
    """The questions, as long as they come; there is one at a time."""
    while select.select([lines], [], [], IDLE_S)[0] and (line := lines.readline()):
        yield line


def serve(load: Callable[[], Any], bus_id: str, questions: Iterable[str], answers: TextIO) -> None:
    """Answers until there are no more questions. Where it cannot begin, it says so and ends."""
    try:
        memory = Memory(load(), bus_id)
    except OSError as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        return
    for line in questions:
        print(json.dumps(answer(memory, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    serve(lambda: ctypes.CDLL("libcuda.so.1"), sys.argv[1], asked(sys.stdin), sys.stdout)
