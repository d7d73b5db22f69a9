"""Starts the ranks of the demo as processes, passes on what rank 0 tells, and ends them all.

    settings = {"lesson": Lesson().to_json(), "out": "interlace-demo"}
    report = launch(settings, world=2, hear=print, time_out_s=300)

Whatever happens (an error on a rank, a rank that dies, a time-out, an interrupt), no process stays:
each is killed and reaped here, and ends by itself when this process is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any, TextIO

import interlace
from interlace import errors
from interlace.errors import CommTimeoutError, InterlaceError, PeerError

STRICT = "AVX512,STRICT"
"""With this MKL_CBWR, chunks of an fp32 matmul on the CPU have the bits of the whole."""
NUM_LOG_LINES = 12
"""Lines of a dead rank's log that the error repeats."""


def launch(
    settings: Mapping[str, Any],
    world: int,
    hear: Callable[[dict[str, Any]], None],
    time_out_s: float,
    arguments: tuple[str, ...] = ("-m", "interlace.demo.rank"),
    what: str = "the demo",
) -> dict[str, Any]:
    """Rank 0's report. `settings` go to every rank; `hear` gets rank 0's events.

    `what` the ranks do is named in errors.
    """
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="interlace-")))
        events: queue.Queue[dict[str, Any]] = queue.Queue()
        ranks: list[subprocess.Popen[str]] = []
        stack.callback(_end, ranks)
        for rank in range(world):
            own = {**settings, "rank": rank, "world": world, "threads": _threads(world)}
            with (logs / str(rank)).open("w") as log:
                process = subprocess.Popen(
                    [sys.executable, *arguments, json.dumps(own)],
                    **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": log},
                    env=_environment(world, own.get("lesson")),
                    text=True,
                )
            ranks.append(process)
            assert process.stdout is not None
            reader = threading.Thread(
                target=_read, args=(rank, process.stdout, events), daemon=True
            )
            reader.start()
        return _watch(ranks, events, hear, logs, time.monotonic() + time_out_s, time_out_s, what)


def _watch(
    ranks: list[subprocess.Popen[str]],
    events: queue.Queue[dict[str, Any]],
    hear: Callable[[dict[str, Any]], None],
    logs: Path,
    deadline: float,
    time_out_s: float,
    what: str,
) -> dict[str, Any]:
    report: dict[str, Any] | None = None
    ended = 0
    for event in _until(events, deadline):
        match event["event"]:
            case "store":
                for process in ranks[1:]:
                    assert process.stdin is not None
                    with contextlib.suppress(BrokenPipeError):
                        process.stdin.write(f"{event['port']}\n")
                        process.stdin.flush()
            case "report":
                report = event["report"]
            case "error":
                raise _first_error(event, events, what)
            case "end":
                ended += 1
                code = ranks[event["rank"]].wait()
                if code != 0:
                    raise PeerError(_death(event["rank"], code, logs, what))
                if ended == len(ranks):
                    break
            case _:
                hear(event)
    if ended < len(ranks) or report is None:
        late = [rank for rank, process in enumerate(ranks) if process.poll() is None]
        raise CommTimeoutError(
            f"{what} did not end in {time_out_s:g} s (ranks {late} are still at it): give it "
            f"fewer steps or more time{_tail(logs / str(late[0] if late else 0))}"
        )
    return report


def _until(events: queue.Queue[dict[str, Any]], deadline: float) -> Iterator[dict[str, Any]]:
    while (left := deadline - time.monotonic()) > 0:
        try:
            yield events.get(timeout=left)
        except queue.Empty:
            return


def _first_error(
    event: dict[str, Any], events: queue.Queue[dict[str, Any]], what: str
) -> InterlaceError:
    """The error of a rank as it raised it; one that only repeats a peer's gives way to that."""
    found = [event]
    for other in _until(events, time.monotonic() + 1.0):
        if other["event"] == "error":
            found.append(other)
    follows = ("PeerError", "CommTimeoutError", "AgreementError", "DistBackendError")
    first = next((other for other in found if other["type"] not in follows), event)
    rank, kind, message = first["rank"], first["type"], first["message"]
    cls = getattr(errors, kind, None) if first["ours"] else None
    if isinstance(cls, type) and issubclass(cls, InterlaceError):
        return cls(f"rank {rank}: {message}")
    return PeerError(f"rank {rank} of {what} raised {kind}: {message}")


def _death(rank: int, code: int, logs: Path, what: str) -> str:
    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return f"rank {rank} of {what} {how}{_tail(logs / str(rank))}"


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-NUM_LOG_LINES:]
    return "".join(f"\n  {line}" for line in lines)


def _read(rank: int, channel: TextIO, events: queue.Queue[dict[str, Any]]) -> None:
    for line in channel:
        with contextlib.suppress(ValueError):  # half a line of a rank that was killed
            events.put(json.loads(line))
    events.put({"event": "end", "rank": rank})


def _end(ranks: list[subprocess.Popen[str]]) -> None:
    """Kills and reaps every rank that still runs, and closes the pipes to all."""
    for process in ranks:
        if process.poll() is None:
            process.kill()
    for process in ranks:
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _threads(world: int) -> int:
    """Threads of one rank's matmuls: its share of the cores, which streams share again."""
    return max(1, (os.cpu_count() or 1) // (2 * world))


def prepare_for_gpus(environment: MutableMapping[str, str], one_host: bool) -> None:
    """What NCCL and cuBLAS read when they start; what is set already stays.

    No multicast: it needs more of the machine than peer access, and nothing here uses it. One
    workspace for each stream of cuBLAS, so that equal calls give equal bits. Ranks of one host meet
    on its loopback interface, whatever its name resolves to.
    """
    environment.setdefault("NCCL_NVLS_ENABLE", "0")
    environment.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if one_host:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment.setdefault("NCCL_SOCKET_IFNAME", "lo")


def _environment(world: int, lesson: Any) -> dict[str, str]:
    """This process's environment, with the same package and bit-equal chunks where they can be."""
    environment = dict(os.environ)
    if isinstance(lesson, dict) and lesson.get("device") == "cuda":
        prepare_for_gpus(environment, one_host=True)
    source = str(Path(interlace.__file__).resolve().parents[1])
    path = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = f"{source}{os.pathsep}{path}" if path else source
    environment.setdefault("OMP_NUM_THREADS", str(_threads(world)))
    if has_avx512():
        environment.setdefault("MKL_CBWR", STRICT)
    return environment


def has_avx512() -> bool:
    """Whether this CPU has what MKL's strict mode needs."""
    with contextlib.suppress(OSError):
        return "avx512f" in Path("/proc/cpuinfo").read_text()
    return False
