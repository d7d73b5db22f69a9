"""Runs the Programs of flat buffers, one for each, beside other work.

    write = partial(all_reduced, "bucket_0", flat, "mean")
    runs = BucketRuns([(write, flat)], group, Options())
    runs.start(0)                # returns at once; every rank starts the same ones, in one order
    runs.wait()                  # or raises what made one fail

Every rank makes them together. On CUDA a run is issued at once, on a stream of its own, which the
current one joins in `wait`. On the CPU a thread of this object does the runs one after another. In
both cases the Executor bounds every wait for a peer.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from queue import Queue
from typing import Any

import torch
import torch.distributed as dist

import interlace
from interlace.errors import ExecutorError
from interlace.ir import Program
from interlace.ir.build import Builder, Handle
from interlace.optim.layer_wise.ownership import BucketPlan
from interlace.options import Options
from interlace.runtime import Executor

NAMES = {
    **{torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16"},
    torch.int64: "i64",
}
REDUCES = {"mean": "avg", "sum": "sum", "max": "max"}

Write = Callable[[int, int], Program]
"""Writes a Program for so many ranks, and this one of them."""


def all_reduced(
    name: str, flat: torch.Tensor, op: str, ranks: int, rank: int, *, team: str = "dp"
) -> Program:
    """An all-reduce in place."""
    with interlace.program(name, mesh={team: ranks}, lines=False) as p:
        buffer = p.input("flat", NAMES[flat.dtype], (flat.numel(),))
        with p.stream("comm"):
            p.all_reduce(buffer, reduce=REDUCES[op])
    return p.program


@dataclass(frozen=True, slots=True)
class Move:
    """A region of memory that goes from one rank to another, with its place at each. (A place that
    lies on a rank which does not act is not needed: None.)
    """

    source: int
    target: int
    sent: Handle | None
    taken: Handle | None
    region: int
    """Number of the region at its source, from which it may go to several ranks."""
    numel: int


def write_moves(
    p: Builder, moves: Sequence[Move], rank: int, team: str, slot: str, numel: int = 0
) -> None:
    """Writes this rank's part of moves: one group of messages; or, through a `slot` of that element
    type (of `numel` elements at least), in which sources lay their regions and from which targets
    get them, one peer after another.
    """
    sent = [move for move in moves if move.source == rank]
    taken = [move for move in moves if move.target == rank]
    if not slot:
        if sent or taken:
            with p.group():
                for move in sent:
                    p.send(_known(move.sent), move.target, team=team)
                for move in taken:
                    p.recv(_known(move.taken), move.source, team=team)
        return
    if not moves:
        return
    starts, ends = dict[tuple[int, int], int](), dict[int, int]()
    for move in moves:
        if (key := (move.source, move.region)) not in starts:
            starts[key] = ends.get(move.source, 0)
            ends[move.source] = starts[key] + move.numel
    regions = p.alloc("regions", slot, (max(numel, *ends.values()),), symmetric=team)

    def place(move: Move) -> Handle:
        start = starts[move.source, move.region]
        return regions[start : start + move.numel]

    for move in {move.region: move for move in sent}.values():
        p.copy(_known(move.sent), place(move))
    for peer in sorted({move.target for move in sent}):
        p.notify("there", peer, team=team)
    for peer in dict.fromkeys(move.source for move in taken):
        p.expect("there", peer, team=team)
        for move in taken:
            if move.source == peer:
                p.get(place(move), _known(move.taken), peer=peer, team=team)
    p.free(regions)


def _known(place: Handle | None) -> Handle:
    assert place is not None
    return place


@dataclass(frozen=True, slots=True)
class BucketExchange:
    """Exchange of one bucket: its gradients go to owners, and its weights come from them."""

    plan: BucketPlan
    about: str
    """The parameters, for messages."""
    peer: bool
    """True if owners get gradients outside their shard from the peer's slot, and nothing is sent;
    weights go by `copies` then."""
    copies: bool
    """True if weights are copied from slots of their owners: on GPUs by copy engines, which leave
    every SM to the updates and the forward, while a collective would wait on some of them."""
    slot_bytes: int = 0
    """Bytes of the slot of copies, which those of other buckets use too; 0: what this one needs."""

    def reduced(self, name: str, tensor: torch.Tensor, op: str, ranks: int, rank: int) -> Program:
        """Gradients: shards are reduced, and what another rank owns of a shard goes to it."""
        messages = self.plan.messages()
        with interlace.program(name, mesh={"dp": ranks}, lines=False) as p:
            flat, kind = _flat(p, tensor)
            moves = [_move(flat, m.holder, m.owner, m.start, m.stop) for m in messages]
            with p.stream("comm"), p.module(self.about):
                p.reduce_scatter(flat, flat[p.dp.rank], reduce=REDUCES[op])
                write_moves(p, moves, rank, "dp", kind if self.peer else "")
        return p.program.instantiate(rank) if messages else p.program

    def gathered(self, name: str, tensor: torch.Tensor, ranks: int, rank: int) -> Program:
        """Weights: what lies in others' shards goes there, and the shards are gathered; or, by
        `copies`, each rank gets what the others own.
        """
        copies, messages = self.copies and ranks > 1, self.plan.messages()
        with interlace.program(name, mesh={"dp": ranks}, lines=False) as p:
            flat, kind = _flat(p, tensor)
            with p.stream("comm"), p.module(self.about):
                if copies:
                    moves = [
                        _move(flat, owner, reader, *bounds)
                        for owner, bounds in enumerate(pairwise(self.plan.bounds))
                        for reader in range(ranks)
                        if reader != owner and bounds[0] < bounds[1]
                    ]
                    # each rank begins with another
                    moves.sort(key=lambda move: (move.source - rank) % ranks)
                    numel = self.slot_bytes // tensor.itemsize
                    write_moves(p, moves, rank, "dp", kind, numel)
                else:
                    moves = [_move(flat, m.owner, m.holder, m.start, m.stop) for m in messages]
                    write_moves(p, moves, rank, "dp", "")
                    p.all_gather(flat[p.dp.rank], flat)
        return p.program.instantiate(rank) if copies or messages else p.program


def _flat(p: Builder, tensor: torch.Tensor) -> tuple[Handle, str]:
    """The one buffer, and its element type."""
    kind = NAMES[tensor.dtype]
    return p.input("flat", kind, (tensor.numel(),)), kind


def _move(flat: Handle, source: int, target: int, start: int, stop: int) -> Move:
    """A region that has the same place in both buffers."""
    return Move(source, target, flat[start:stop], flat[start:stop], start, stop - start)


class BucketRuns:
    """The Executors of some flat buffers; on the CPU, by a group of its own, unless the group given
    is `apart`, for these runs alone.

    Every rank of the job makes one together.
    `before`, `then`: for some runs, what precedes or follows each, on its thread or stream.
    """

    def __init__(
        self,
        runs: Sequence[tuple[Write, *tuple[torch.Tensor, ...]]],
        group: dist.ProcessGroup | None,
        options: Options,
        *,
        apart: bool = False,
        before: Mapping[int, Callable[[], None]] | None = None,
        then: Mapping[int, Callable[[], None]] | None = None,
    ) -> None:
        self._device = runs[0][1].device
        self._worker: Any = None
        self._stream: Any = None
        with contextlib.ExitStack() as made:  # undone here if ranks do not agree, else by close()
            given: Any = group or dist.group.WORLD
            if self._device.type == "cpu" and not apart:
                given = made.enter_context(
                    beside(dist.get_process_group_ranks(given), self._device)
                )
            self.executors: list[Executor] = []
            for write, *flats in runs:
                self.executors.append(prepared(write, given, flats, options, made))
            self._runs = [  # which the thread holds, and so they do not hold this object
                partial(_run, executor, flats, (before or {}).get(index), (then or {}).get(index))
                for index, (executor, (_, *flats)) in enumerate(
                    zip(self.executors, runs, strict=True)
                )
            ]
            if self._device.type == "cuda":
                self._stream = torch.cuda.Stream(self._device)
                self._ends = [torch.cuda.Event() for _ in runs]
            else:
                self._worker = Worker(self._runs)
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
                self._runs[index]()
                self._ends[index].record()

    def wait(self, index: int | None = None) -> None:
        """Returns when all, or one that was started, are over.

        On CUDA it returns at once, and the current stream comes after them.
        """
        if self._worker is not None:
            self._worker.wait(index)
        elif index is None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        else:
            torch.cuda.current_stream(self._device).wait_event(self._ends[index])

    def reset(self) -> None:
        """After a failure, every rank: nothing is under way any more."""
        if self._worker is not None:
            self._worker.clear()
        self.executors[0].reset()  # which resets the team of all

    def close(self) -> None:
        """Ends thread, Executors and process group, all of them; raises what failed on CUDA."""
        self._made.close()


def prepared(
    write: Write,
    group: dist.ProcessGroup,
    tensors: Sequence[torch.Tensor],
    options: Options,
    made: contextlib.ExitStack,
) -> Executor:
    """The Executor of a Program of one team and these parameters, closed when `made` is."""
    program = write(group.size(), group.rank())
    groups = {program.teams[0].name: group}
    executor = Executor(program, groups=groups, device=tensors[0].device, options=options)
    made.callback(executor.close)
    executor.prepare()
    made.callback(executor.synchronize)
    return executor


def _run(
    executor: Executor,
    flats: Sequence[torch.Tensor],
    before: Callable[[], None] | None,
    then: Callable[[], None] | None,
) -> None:
    if before is not None:
        before()
    executor.run(flats)
    if then is not None:
        then()


@contextlib.contextmanager
def beside(ranks: Sequence[int], device: torch.device) -> Iterator[Any]:
    """A group of these ranks, for a thread or a stream of its own: by gloo on the CPU, else by
    the backend of the default group. None where a rank gives none.

    Every rank of the job asks, for groups that have no rank in common.
    """
    least = min(ranks, default=-1)
    mine = torch.tensor([least], device=device)
    first = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(first, mine)
    members: dict[int, list[int]] = {}
    for rank, each in enumerate(map(int, first)):
        if each >= 0:
            members.setdefault(each, []).append(rank)
    backend = "gloo" if device.type == "cpu" else None
    made: Any = {each: dist.new_group(members[each], backend=backend) for each in sorted(members)}
    apart = made.get(least)
    try:
        yield apart
    finally:
        if apart is not None and dist.is_initialized():
            dist.destroy_process_group(apart)


class Worker(threading.Thread):
    """A thread that runs the functions whose numbers it is given, in that order.

    After a failure nothing runs until `clear`. It is a daemon, so that a failed rank can end.
    """

    def __init__(self, runs: Sequence[Callable[[], object]]) -> None:
        super().__init__(name="interlace buckets", daemon=True)
        self._runs = runs
        self._asked: Queue[int | None] = Queue()
        self._ended = threading.Condition()
        self._done: set[int] = set()
        self._error: BaseException | None = None
        self.start()

    def put(self, index: int) -> None:
        """Asks for a run. After a failure it is dropped: `wait` raises that."""
        self._done.discard(index)
        self._asked.put(index)

    def wait(self, index: int | None = None) -> None:
        """Returns when that run, or all asked for, ended; raises what went wrong, until `clear`."""
        if index is None:
            self._asked.join()
        else:
            with self._ended:
                self._ended.wait_for(lambda: index in self._done or self._error is not None)
        if self._error is not None and index not in self._done:
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
        self._error = self._error or ExecutorError("the runs of buckets were stopped")

    def run(self) -> None:
        """Does the runs that were asked for, one after another, until the thread is stopped."""
        while (index := self._asked.get()) is not None:
            try:
                if self._error is None:
                    self._runs[index]()
                    self._done.add(index)
            except BaseException as error:
                self._error = error
            finally:
                with self._ended:
                    self._ended.notify_all()
                self._asked.task_done()
