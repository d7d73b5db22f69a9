"""Runs one all-reduce Program for each of some flat tensors, beside other work.

    reductions = Reductions(flats, group, "mean", Options())     # every rank, together
    reductions.start(0)                # returns at once; every rank starts them in the same order
    reductions.wait()                  # or raises what made one fail

On CUDA a run is issued at once, on a stream of its own, which the current one joins in `wait`. On
the CPU a thread of this object does the runs one after another. In both cases the Executor bounds
every wait for a peer.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from queue import Queue
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.cost import Timeline
from interlace.errors import ExecutorError
from interlace.ir import Program
from interlace.options import Options
from interlace.runtime import Executor

NAMES = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16"}
REDUCES = {"mean": "avg", "sum": "sum"}


def reduction(index: int, flat: torch.Tensor, size: int, op: str) -> Program:
    """The Program of one bucket: an all-reduce in place."""
    with interlace.program(f"reduce_bucket_{index}", mesh={"dp": size}) as p:
        main_grad = p.input("main_grad", NAMES[flat.dtype], (flat.numel(),))
        with p.stream("comm"):
            p.all_reduce(main_grad, reduce=REDUCES[op])
    return p.program


class Reductions:
    """The Executors of some flat tensors."""

    def __init__(
        self,
        flats: Sequence[torch.Tensor],
        group: dist.ProcessGroup | None,
        op: str,
        options: Options,
    ) -> None:
        self._flats, self._device = list(flats), flats[0].device
        self._worker: Any = None
        self._stream: Any = None
        with contextlib.ExitStack() as made:  # undone here if ranks do not agree, else by close()
            given: Any = group or dist.group.WORLD
            if group is None and self._device.type == "cpu":
                given = dist.new_group(backend="gloo")
                made.callback(destroy, given)
            size = len(dist.get_process_group_ranks(given))
            self._executors: list[Executor] = []
            for index, flat in enumerate(flats):
                program, groups = reduction(index, flat, size, op), {"dp": given}
                executor = Executor(program, groups=groups, device=self._device, options=options)
                made.callback(executor.close)
                executor.prepare()
                made.callback(executor.synchronize)
                self._executors.append(executor)
            if self._device.type == "cuda":
                self._stream = torch.cuda.Stream(self._device)
                self._ends = [torch.cuda.Event() for _ in flats]
            else:
                each = zip(self._executors, flats, strict=True)
                self._worker = Worker([partial(executor.run, [flat]) for executor, flat in each])
                made.callback(weakref.finalize(self, self._worker.stop))
            self._made = made.pop_all()

    def start(self, index: int, writers: Sequence[Any] = ()) -> None:
        """Starts one; on CUDA after the current stream and `writers`, the streams that wrote it."""
        if self._worker is not None:
            self._worker.put(index)
            return
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            for stream in {current, *filter(None, writers)}:
                self._stream.wait_stream(stream)
            with torch.cuda.stream(self._stream):
                self._executors[index].run([self._flats[index]])
                self._ends[index].record()

    def wait(self) -> None:
        """Returns when all are over; on CUDA at once, and the current stream comes after them."""
        if self._worker is not None:
            self._worker.wait()
        else:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def done(self, index: int) -> bool:
        """Whether this one, which was started, is over."""
        if self._worker is not None:
            return self._worker.is_done(index)
        return self._ends[index].query()

    def reset(self) -> None:
        """After a failure, every rank: nothing is under way any more."""
        if self._worker is not None:
            self._worker.clear()
        self._executors[0].reset()  # which resets the team of all

    def timelines(self) -> list[Timeline]:
        """Of each Executor's last run."""
        return [executor.timeline() for executor in self._executors]

    def close(self) -> None:
        """Ends thread, Executors and process group, all of them; raises what failed on CUDA."""
        self._made.close()


def destroy(group: dist.ProcessGroup) -> None:
    """Destroys a process group, unless all have been destroyed already."""
    if dist.is_initialized():
        dist.destroy_process_group(group)


class Worker(threading.Thread):
    """A thread that runs the functions whose numbers it is given, in that order.

    After a failure nothing runs until `clear`. It is a daemon, so that a failed rank can end.
    """

    def __init__(self, runs: Sequence[Callable[[], object]]) -> None:
        super().__init__(name="interlace reductions", daemon=True)
        self._runs = runs
        self._asked: Queue[int | None] = Queue()
        self._done: set[int] = set()
        self._error: BaseException | None = None
        self.start()

    def put(self, index: int) -> None:
        """Asks for a run. After a failure it is dropped: `wait` raises that."""
        self._done.discard(index)
        self._asked.put(index)

    def is_done(self, index: int) -> bool:
        """Whether that run has ended well."""
        return index in self._done

    def wait(self) -> None:
        """Returns when nothing is asked for; raises what went wrong, until `clear`."""
        self._asked.join()
        if self._error is not None:
            raise self._error

    def clear(self) -> None:
        """Drops what was asked for and what went wrong."""
        self._drop()
        self._asked.join()
        self._error = None

    def stop(self) -> None:
        """Ends the thread, after the run that it is in."""
        self._drop()
        self._asked.put(None)
        if threading.current_thread() is not self:
            self.join(5.0)

    def _drop(self) -> None:
        self._error = self._error or ExecutorError("the reductions were stopped")

    def run(self) -> None:
        """What the thread does."""
        while (index := self._asked.get()) is not None:
            try:
                if self._error is None:
                    self._runs[index]()
                    self._done.add(index)
            except BaseException as error:
                self._error = error
            finally:
                self._asked.task_done()
