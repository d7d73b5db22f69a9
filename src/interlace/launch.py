"""Ranks as processes: started here by torch.multiprocessing, watched, and ended; or torchrun's.

    report = launch(work, {"out": "folder"}, world=2, hear=print, timeout_s=300, what="the demo")

    def work(settings, tell):               # on each rank, in a module that can be imported
        with joined("cuda", limit=timedelta(seconds=60), timeout_s=300) as device:
            tell({"event": "step", "loss": 0.1})
            return {"device": str(device)}

What rank 0 tells is heard here, and its result is the report. A rank finds the environment that
torchrun would give it. Whatever happens, no process stays: each is killed and reaped here, and ends
by itself when this process is gone. What ranks print goes to a log, whose end errors repeat.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from socket import create_server
from typing import TYPE_CHECKING, Any, TypeVar

from interlace import errors
from interlace.errors import BackendError, CommTimeoutError, InterlaceError, PeerError, TeamError
from interlace.torch_private import abort_process_group

if TYPE_CHECKING:
    import torch

Report = dict[str, Any]
Tell = Callable[[Report], None]
Settings = TypeVar("Settings")
Work = Callable[[Settings, Tell], Report | None]
"""Function that each rank runs on the settings and a `Tell`; it and the settings are pickled."""

STRICT = "AVX512,STRICT"
"""With this MKL_CBWR, chunks of an fp32 matmul on the CPU have the bits of the whole."""
NUM_LOG_LINES = 12
POLL_S = 0.1
LEAVE_S = 20.0
"""Seconds that a failed rank has to release its GPU before its process is ended."""
FAILED, ORPHANED = 3, 4


def launch(
    work: Work[Settings], settings: Settings, world: int, hear: Tell, timeout_s: float, what: str
) -> Report:
    """Rank 0's result of `work(settings, tell)`, which all ranks do; `hear` gets what it tells.

    `what` the ranks do is named in errors. Ranks are spawned: a fork server would have the
    environment and the preloaded modules of whoever started it first.
    """
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="interlace-")))
        with _environment(world):
            from torch.distributed import TCPStore
            from torch.multiprocessing.spawn import start_processes

            # A socket of ours, since torch's own would listen on every interface.
            socket = create_server(("127.0.0.1", 0))
            address, own = socket.getsockname(), {"master_listen_fd": socket.detach()}
            store = TCPStore(*address, is_master=True, wait_for_workers=False, **own)
            given = work, settings, world, store.port, str(logs)
            started: Any = start_processes(_serve, given, world, join=False, daemon=True)
        ranks: list[BaseProcess] = started.processes
        stack.callback(_end, ranks)
        hear({"event": "started"})
        report, count = Report(), 0
        while time.monotonic() < deadline:
            wait([rank.sentinel for rank in ranks if rank.is_alive()], POLL_S)
            codes = [rank.exitcode for rank in ranks]  # before what these told is read
            while store.check([f"launch/{count + 1}"]):
                count += 1
                event = json.loads(store.get(f"launch/{count}"))
                match event["event"]:
                    case "report":
                        report = event["report"]
                    case "error":
                        raise _error(event, what)
                    case _:
                        hear(event)
            for rank, code in enumerate(codes):
                if code:
                    how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                    raise PeerError(f"rank {rank} of {what} {how}{_tail(logs, rank)}")
            if codes == [0] * len(ranks):
                return report
        late = [number for number, rank in enumerate(ranks) if rank.is_alive()]
        raise CommTimeoutError(
            f"{what} did not end in {timeout_s:g} s (ranks {late} are still at it): give it "
            f"fewer steps or more time{_tail(logs, late[0] if late else 0)}"
        )


def _error(event: Report, what: str) -> InterlaceError:
    """The error of a rank as it raised it."""
    cls = getattr(errors, event["type"], None)
    if event["ours"] and isinstance(cls, type) and issubclass(cls, InterlaceError):
        return cls(f"rank {event['rank']}: {event['message']}")
    rank, kind = event["rank"], event["type"]
    return PeerError(f"rank {rank} of {what} raised {kind}: {event['message']}")


def _tail(logs: Path, rank: int) -> str:
    """The end of what a rank printed, without the frames of C++, which hide what torch says."""
    log = logs / str(rank)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    lines = [line for line in lines if line and not line.startswith("frame #")]
    return "".join(f"\n  {line}" for line in lines[-NUM_LOG_LINES:])


def _end(ranks: Sequence[BaseProcess]) -> None:
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.join()


def _threads(world: int) -> int:
    """Threads of one rank's matmuls: its share of the cores, which streams share again."""
    return max(1, (os.cpu_count() or 1) // (2 * world))


@contextlib.contextmanager
def _environment(world: int) -> Iterator[None]:
    """Sets the ranks' environment: threads, and bit-equal chunks where possible."""
    before = dict(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", str(_threads(world)))
    if has_avx512():
        os.environ.setdefault("MKL_CBWR", STRICT)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def has_avx512() -> bool:
    """True if this CPU has AVX-512, which MKL's strict mode needs."""
    with contextlib.suppress(OSError):
        return "avx512f" in Path("/proc/cpuinfo").read_text()
    return False


def _serve(
    rank: int, work: Work[Settings], settings: Settings, world: int, port: int, logs: str
) -> None:
    """Does `work` as one rank that `launch` started, and tells how it went."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log = os.open(f"{logs}/{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for output in (1, 2):
        os.dup2(log, output)
    os.environ |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    import torch
    from torch.distributed import TCPStore

    torch.set_num_threads(_threads(world))
    store = TCPStore("127.0.0.1", port, is_master=False)

    def tell(event: Report) -> None:
        if rank == 0 or event["event"] == "error":
            number = store.add("launch/told", 1)
            store.set(f"launch/{number}", json.dumps({**event, "rank": rank}))

    try:
        report = work(settings, tell)
        if report is not None:
            tell({"event": "report", "report": report})
    except BaseException as error:
        traceback.print_exc()
        ours = isinstance(error, InterlaceError)
        told = {"type": type(error).__name__, "message": str(error), "ours": ours}
        with contextlib.suppress(RuntimeError):  # the parent is gone
            tell({"event": "error", **told})
        os._exit(FAILED)  # threads of a broken run may not end by themselves


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(ORPHANED)


def prepare_for_gpus(environment: MutableMapping[str, str], exact: bool = False) -> None:
    """Sets variables that gloo, NCCL and cuBLAS read when they start; keeps those already set.

    No multicast: it needs more of the machine than peer access, and nothing here uses it. Ranks of
    one host meet on its loopback interface, whatever its name resolves to. `exact` gives each
    stream of cuBLAS one workspace, so that equal calls give equal bits.
    """
    environment.setdefault("NCCL_NVLS_ENABLE", "0")
    environment.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    if exact:
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if environment.get("LOCAL_WORLD_SIZE", "?") == environment.get("WORLD_SIZE"):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment.setdefault("NCCL_SOCKET_IFNAME", "lo")


@contextlib.contextmanager
def joined(
    device: str,
    limit: timedelta,
    timeout_s: float,
    exact: bool = False,
    own: contextlib.AbstractContextManager[Any] | None = None,
    **how: Any,
) -> Iterator[torch.device]:
    """This rank's device, with the default process group around it: gloo, and NCCL for GPUs.

    The environment says who else there is, or `how` does, to `init_process_group`. `limit` bounds
    torch's own waits; what hangs for `timeout_s` prints its stacks and ends. With `exact`, equal
    computations on a GPU give equal bits. At the end the group is destroyed, or aborted after an
    error, for then the others may never come to what is still waited for. `own` makes another
    default group in its place.
    """
    import torch
    import torch.distributed as dist

    prepare_for_gpus(os.environ, exact)
    stderr = sys.__stderr__ or sys.stderr
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=stderr)
    try:
        where = torch.device("cpu")
        if device == "cuda":
            where = _gpu(int(os.environ.get("LOCAL_RANK", "0")), exact)
        with own or contextlib.nullcontext():
            if own is None and device == "cuda":
                dist.init_process_group("cpu:gloo,cuda:nccl", timeout=limit, device_id=where, **how)
            elif own is None:
                dist.init_process_group("gloo", timeout=limit, **how)
            yield where
    except BaseException:
        faulthandler.dump_traceback_later(LEAVE_S, exit=True, file=stderr)
        _leave(failed=device == "cuda")
        raise
    else:
        _leave(failed=False)
    finally:
        faulthandler.cancel_dump_traceback_later()


def _gpu(local: int, exact: bool) -> torch.device:
    import torch

    if not torch.cuda.is_available():
        raise BackendError(
            "torch sees no GPU here: take --device cpu (`interlace doctor` says why)"
        )
    count = torch.cuda.device_count()
    if local >= count:
        raise TeamError(
            f"rank {local} of this host has no GPU, there are {count}: start at most {count} ranks "
            "on a host, or take --device cpu"
        )
    where = torch.device("cuda", local)
    torch.cuda.set_device(where)
    if exact:  # without these, the gradient of attention is summed in another order in every run
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore
        torch.backends.cuda.enable_cudnn_sdp(False)
    return where


def _leave(failed: bool) -> None:
    """Ends the process group; after a failure without waiting for what may never come."""
    import torch.distributed as dist

    from interlace.comm import release_teams

    with contextlib.suppress(InterlaceError, RuntimeError):
        release_teams()
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            if failed:
                abort_process_group()
            else:
                dist.destroy_process_group()
