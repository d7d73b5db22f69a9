"""Real worker processes with gloo, shared by a whole test session.

Starting a process that imports torch costs seconds, so the ranks live as long as the session and
take one task after another. A task is a function that can be imported by name; it runs on every
rank of a default process group of the asked size, and each rank's result comes back:

    def total() -> float:
        x = torch.ones(1) * dist.get_rank()
        dist.all_reduce(x)
        return x.item()

    def test_total(pool):
        assert pool(3).run(total) == [3.0, 3.0, 3.0]

`Pool("cuda")` gives each rank a GPU of its own, and NCCL beside gloo in its default group. More
ranks than there are GPUs share them: then without NCCL, which wants one for each.

Each task is bounded by a time-out. A rank that raises, dies or does not come back becomes a
`RankFailure` that names it, with its traceback; the processes are then replaced, as they are after
a task that says that it leaves them unusable (`replace=True`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

MAX_WORLD = 8
ROOT = Path(__file__).resolve().parents[2]
END_S = 30.0
"""Within this a process is gone that was killed: a driver may have much to take down."""
TORCH = ("torch", "torch.distributed")
LOADED = (
    *TORCH,
    *("torch.distributed.tensor.parallel", "interlace.frontend", "interlace.runtime.host.engine"),
    *("pytest", "interlace.nn", "interlace.optim", "interlace.tensor_parallel"),
    # what the first compiled call imports
    *("functorch.compile", "torch._inductor.debug", "torch._inductor.pattern_matcher"),
)
"""Modules that ranks find loaded; else each imports them, for seconds, whenever it is replaced.

Where there are GPUs that is torch alone: a forked process can't use the CUDA state of another
process.
"""


class RankFailure(AssertionError):
    """A rank raised, died or did not come back; the message says which and how."""


@dataclass(frozen=True, slots=True)
class Died:
    """Stands for the result of a rank that was expected to die; `exit_code` is -9 for SIGKILL."""

    exit_code: int | None


@dataclass(frozen=True, slots=True)
class Task:
    """A worker's task: a function by name, its arguments, and the group to run it in."""

    module: str
    name: str
    args: tuple[Any, ...]
    path: tuple[str, ...]
    rank: int
    world: int
    prefix: str
    dump: str
    dump_after_s: float
    device: str


class Ranks:
    """The first `world` workers of a pool."""

    def __init__(self, pool: Pool, world: int) -> None:
        self.pool = pool
        self.world = world

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 60.0,
        may_die: Collection[int] = (),
        replace: bool = False,
    ) -> list[Any]:
        """`function(*args)` on every rank; the results by rank, `Died` for a rank in `may_die`."""
        return self.pool.run(self.world, function, args, timeout_s, may_die, replace)


def preload() -> None:
    """Starts the server of forks with what ranks find loaded, if none runs in this process yet.

    All that a process forks comes from one server, and the first to start it says what it loads:
    so this comes before the tests, some of which run commands that start ranks themselves.
    """
    from torch.cuda import device_count

    multiprocessing.set_forkserver_preload(list(TORCH if device_count() else LOADED))
    forkserver.ensure_running()


class Pool:
    """Up to four worker processes, started when first needed."""

    def __init__(self, device: str = "cpu", environ: Mapping[str, str] | None = None) -> None:
        """`environ` is added to the workers' environment before CUDA begins there."""
        self._device, self._environ = device, dict(environ or {})
        self._context = multiprocessing.get_context("forkserver")
        self._workers: list[tuple[Any, Connection]] = []
        self._generation = 0
        self._world = 0
        self._store: Any = None

    def __call__(self, world: int) -> Ranks:
        """The first `world` workers."""
        assert 1 <= world <= MAX_WORLD, f"the pool has 1 to {MAX_WORLD} ranks, not {world}"
        return Ranks(self, world)

    def run(
        self,
        world: int,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        timeout_s: float,
        may_die: Collection[int],
        replace: bool,
    ) -> list[Any]:
        """See `Ranks.run`."""
        assert "<" not in function.__qualname__, f"{function.__qualname__} has no importable name"
        self._start(world)
        if world != self._world:
            self._generation += 1
            self._world = world
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            for rank, (_, connection) in enumerate(self._workers[:world]):
                task = Task(
                    *(function.__module__, function.__qualname__),
                    *(args, (str(ROOT), *sys.path), rank, world),
                    *(str(self._generation), f"{folder}/{rank}", 0.9 * timeout_s),
                    self._device,
                )
                connection.send_bytes(pickle.dumps(task))
            answers = self._collect(world, timeout_s)
            failures: list[str] = []
            results: list[Any] = []
            for rank in range(world):
                kind, value = answers.get(rank, ("stuck", None))
                if kind == "died" and rank in may_die:
                    results.append(Died(value))
                elif kind == "ok":
                    results.append(value)
                elif kind == "error":
                    failures.append(f"rank {rank} of {world} raised:\n{value}")
                elif kind == "died":
                    failures.append(f"rank {rank} of {world} died with exit code {value}")
                else:
                    where = self._stacks(rank, Path(f"{folder}/{rank}"))
                    failures.append(
                        f"rank {rank} of {world} did not finish in {timeout_s:g} s:\n{where}"
                    )
        if failures or replace or any(isinstance(result, Died) for result in results):
            self.close()
        if failures:
            raise RankFailure(f"{function.__qualname__}{args}\n" + "\n".join(failures))
        return results

    def _stacks(self, rank: int, dump: Path) -> str:
        """Where a worker stands that does not come back, also where it holds Python's lock."""
        pid = self._workers[rank][0].pid
        if pid is None or not dump.exists():
            return "(no stack)"
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.5)
        return dump.read_text()

    @property
    def pids(self) -> list[int]:
        """The processes of the ranks."""
        return [process.pid for process, _ in self._workers]

    def close(self) -> None:
        """Ends every worker; a later task starts new ones."""
        workers, self._workers, self._world = self._workers, [], 0
        for _, connection in workers:
            connection.close()
        deadline = time.monotonic() + 1.0
        left: list[int | None] = []
        for process, _ in workers:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join(END_S)
            if process.is_alive():
                left.append(process.pid)
            else:
                process.close()
        assert not left, f"processes {left} were killed and have not ended"

    def _start(self, world: int) -> None:
        if self._store is None:
            self._store = self._store_of()
        if not self._workers:
            self._generation += 1
        while len(self._workers) < world:
            mine, theirs = self._context.Pipe()
            target, *first = self._target(len(self._workers))
            args = *first, theirs, self._store.port, self._environ
            process = self._context.Process(target=target, args=args, daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, mine))

    def _store_of(self) -> Any:
        from torch.distributed import TCPStore

        preload()
        # torch's own socket would take IPv4 for IPv6, and ask a name server who connects.
        own = socket.create_server(("127.0.0.1", 0))
        address, facts = own.getsockname(), {"master_listen_fd": own.detach()}
        return TCPStore(*address, is_master=True, wait_for_workers=False, **facts)

    def _target(self, rank: int) -> tuple[Any, ...]:
        """The function that a rank's process runs, and its first arguments."""
        return (work,)

    def _collect(self, world: int, timeout_s: float) -> dict[int, tuple[str, Any]]:
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._workers[:world])}
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), left):
                assert isinstance(ready, Connection)
                rank = waiting.pop(ready)
                try:
                    answers[rank] = pickle.loads(ready.recv_bytes())
                except (EOFError, ConnectionResetError):
                    process = self._workers[rank][0]
                    process.join(END_S)
                    answers[rank] = ("died", process.exitcode)
                if answers[rank][0] != "ok":  # the others have little reason to come back
                    deadline = min(deadline, time.monotonic() + max(10.0, timeout_s / 2))
        return answers


def work(connection: Connection, port: int, environ: Mapping[str, str]) -> None:
    """A worker's life: task after task, until the pool closes its end or its process is gone."""
    os.environ.update(environ)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("MKL_CBWR", "AVX512,STRICT")  # chunks of a matmul have the whole's bits
    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.freeze()  # collections need not walk torch's modules
    joined = ""
    while True:
        try:
            task: Task = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError, OSError):
            os._exit(0)  # no destructor may block on a peer that is gone
        try:
            with open(task.dump, "w") as dump:
                faulthandler.register(signal.SIGUSR1, file=dump)
                faulthandler.dump_traceback_later(task.dump_after_s, file=dump)
                try:
                    if joined != task.prefix:
                        _join(task, port)
                        joined = task.prefix
                    answer = ("ok", _function(task)(*task.args))
                    payload = pickle.dumps(answer)
                finally:
                    faulthandler.cancel_dump_traceback_later()
                    faulthandler.unregister(signal.SIGUSR1)
        except BaseException:
            payload = pickle.dumps(("error", traceback.format_exc()))
        try:
            connection.send_bytes(payload)
        except OSError:
            os._exit(0)


def launched(
    pool: Pool, work: Any, settings: Any, world: int, hear: Any, timeout_s: float, what: str
) -> Any:
    """Stands for `interlace.launch.launch`, on the pool's ranks: they need not be started."""
    (report, told), *_ = pool(world).run(serve, work, settings, timeout_s=min(timeout_s, 110.0))
    for event in [{"event": "started"}, *told]:
        hear(event)
    return report


def serve(work: Any, settings: Any) -> tuple[Any, list[Any]]:
    """What a rank that was launched does, in the pool's group: its report, and what it told."""
    import torch

    @contextlib.contextmanager
    def joined(*_: Any, **__: Any) -> Iterator[torch.device]:
        yield torch.device("cpu")

    told: list[Any] = []
    with (
        mock.patch("interlace.launch.joined", joined),
        mock.patch("interlace_bench.ranks.joined", joined),
    ):
        return work(settings, told.append), told


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@lru_cache
def _client(address: str, port: int) -> Any:
    """One for the life of a rank: as it connects, torch asks a name server."""
    from torch.distributed import TCPStore

    return TCPStore(address, port)


def _join(task: Task, port: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if dist.is_initialized():
        dist.destroy_process_group()
        from torch.distributed.tensor import debug

        # Results of operators that are kept have meshes, which equal new ones of the same name.
        debug._clear_sharding_prop_cache()
    limit, address = timedelta(seconds=60), os.environ.get("MASTER_ADDR", "127.0.0.1")
    client = _client(address, port)
    client.set_timeout(limit)
    store = dist.PrefixStore(task.prefix, client)
    backend, own = "gloo", None
    if task.device == "cuda":
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no multicast objects
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        count = torch.cuda.device_count()
        torch.cuda.set_device(task.rank % count)
        if task.world <= count:
            backend, own = "cpu:gloo,cuda:nccl", torch.device("cuda", task.rank)
    dist.init_process_group(
        backend, store=store, rank=task.rank, world_size=task.world, timeout=limit, device_id=own
    )


def _function(task: Task) -> Callable[..., Any]:
    for entry in reversed(task.path):
        if entry not in sys.path:
            sys.path.insert(0, entry)
    found: Any = importlib.import_module(task.module)
    for part in task.name.split("."):
        found = getattr(found, part)
    return found
