"""A mirror team: one process is one rank of N, and its peers are itself.

    with mirror(4) as group:                     # the default process group, of 4 ranks
        model = parallelize_module(model, init_device_mesh("cpu", (4,)), plan)
        torch.compile(model, backend="interlace")(x)

It runs a schedule for N ranks as each of them would, but for the link. How set-up takes it, and
what ops reach in a peer's memory, is in interlace's comm/mirror.py and ir/mirror.py.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any

import torch
import torch.distributed as dist

from interlace.comm.mirror import MirrorGroup, seen_by
from interlace.comm.teams import release_teams
from interlace.errors import InputError, InterlaceError, OptionError, UnsupportedError
from interlace.ir.types import MAX_RANKS
from interlace.torch_private import group_name

SAME = (
    dist.ReduceOp.AVG,
    dist.ReduceOp.MIN,
    dist.ReduceOp.MAX,
    dist.ReduceOp.BAND,
    dist.ReduceOp.BOR,
)
"""Reductions that give what all ranks have alike."""


class Done(dist.distributed_c10d.Work):
    """Work that ends with a function, or had ended when it was issued."""

    def __init__(self, end: Callable[[float], object] | None = None) -> None:
        super().__init__()
        self._end = end

    def is_completed(self) -> bool:
        """True if nothing is to be waited for."""
        return self._end is None

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Ends it; DistError where that does not come in time: at once, where none is given, for
        this process cannot send while it waits."""
        end, self._end = self._end, None
        if end is not None:
            end(timeout.total_seconds())
        return True


class CopyGroup(MirrorGroup):
    """A mirror's process group, whose collectives and messages come back.

    All is done by copies and sums on the current stream. `library` is the backend of torch whose
    place it takes in a Program.
    """

    def __init__(self, rank: int, size: int, library: str = "mirror") -> None:
        super().__init__(rank, size)  # pyright: ignore  # its stub has the other form alone
        self._library = library
        self._sent = defaultdict[tuple[int, int], SimpleQueue[Any]](SimpleQueue)
        self._taken: list[Callable[[float], None]] | None = None

    def name(self) -> str:
        """The name of the backend."""
        return self._library

    def as_backend(self, library: str) -> CopyGroup:
        """The same in the place of a backend of torch."""
        return CopyGroup(self.rank(), self.size(), library)

    @property
    def group_name(self) -> str:
        """The name in this process; torch's own wants a backend of C++."""
        return group_name(self)

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Done:
        """Reduces what all ranks have alike: a sum, without options."""
        for tensor in tensors:  # autograd sees no real one's writes, either
            self._reduce(tensor.data, dist.ReduceOp.SUM if opts is None else opts.reduceOp)
        return Done()

    def _allgather_base(self, out: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Done:
        _rows(out, self.size()).copy_(own.reshape(1, -1).expand(self.size(), -1))
        return Done()

    def _reduce_scatter_base(self, out: torch.Tensor, own: torch.Tensor, opts: Any = None) -> Done:
        out.reshape(-1).copy_(_rows(own, self.size())[self.rank()])
        return self.allreduce([out], opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Done:
        """An all-reduce of torch's functional collectives."""
        return self.allreduce(tensors, opts)

    def allgather_into_tensor_coalesced(
        self, outs: list[torch.Tensor], own: list[torch.Tensor], opts: Any = None
    ) -> Done:
        """Their all-gather."""
        for out, each in zip(outs, own, strict=True):
            self._allgather_base(out, each)
        return Done()

    def reduce_scatter_tensor_coalesced(
        self, outs: list[torch.Tensor], own: list[torch.Tensor], opts: Any = None
    ) -> Done:
        """Their reduce-scatter."""
        for out, each in zip(outs, own, strict=True):
            self._reduce_scatter_base(out, each, opts)
        return Done()

    def alltoall_base(
        self,
        out: torch.Tensor,
        own: torch.Tensor,
        taken: Sequence[int],
        given: Sequence[int],
        opts: Any = None,
    ) -> Done:
        """This rank's part, as from each of its peers."""
        if len({*taken, *given}) > 1:
            raise UnsupportedError("a mirror team exchanges even parts. fix: run on real ranks")
        return self._allgather_base(out, _rows(own, self.size())[self.rank()])

    all_gather_single: Any = _allgather_base
    reduce_scatter_single: Any = _reduce_scatter_base
    all_to_all_single: Any = alltoall_base
    """As torch 2.13 calls them."""

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Done:
        """Nothing: the root has what this rank has."""
        return Done()

    def scatter(
        self, outs: list[torch.Tensor], own: list[list[torch.Tensor]], opts: Any = None
    ) -> Done:
        """This rank's part of what it has as a root."""
        if not own:
            raise UnsupportedError("a mirror has no scatter of another rank. fix: take root 0")
        for out, parts in zip(outs, own, strict=True):
            out.copy_(parts[self.rank()])
        return Done()

    def barrier(self, opts: Any = None) -> Done:
        """Nothing: all ranks are there."""
        return Done()

    def _reduce(self, tensor: torch.Tensor, op: Any) -> None:
        """As many equal values: their mean, least and most is that value."""
        if op == dist.ReduceOp.SUM:
            tensor.mul_(self.size())
        elif op == dist.ReduceOp.PRODUCT:
            tensor.pow_(self.size())
        elif not any(op == each for each in SAME):  # `in` asks the other way round
            raise UnsupportedError(
                "a mirror team reduces by sum, product, average, least, most, and, or alone. fix: "
                "take one of these, or run on real ranks"
            )

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Done:
        """A message: it comes back as one from the rank that is as far away on the other side."""
        (tensor,), there = tensors, seen_by(self.rank(), peer, self.size())
        event = torch.cuda.current_stream().record_event() if tensor.is_cuda else None
        self._sent[there, tag].put((tensor.clone(), event))
        return Done()

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int = 0) -> Done:
        """Takes a message, at the end of this work: on CUDA it was issued before that."""
        (tensor,), queue = tensors, self._sent[peer, tag]

        def take(limit: float) -> None:
            try:
                message, event = queue.get(timeout=limit)
            except Empty:
                raise dist.DistError(
                    f"no message of rank {peer} came in {limit:g} s. A mirror sends before it "
                    "receives, or both in one group"
                ) from None
            if event is not None:
                torch.cuda.current_stream().wait_event(event)
                message.record_stream(torch.cuda.current_stream())
            tensor.copy_(message)

        if self._taken is not None:
            self._taken.append(take)
        return Done(take)

    def _start_coalescing(self, device: Any = None) -> None:
        self._taken = []

    def _end_coalescing(self, device: Any = None) -> Done:
        taken, self._taken = self._taken or [], None
        return Done(lambda limit: [take(limit) for take in taken])


def _rows(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """A contiguous tensor as a row for each rank."""
    return tensor.reshape(count, -1)


@contextlib.contextmanager
def mirror(size: int) -> Iterator[MirrorGroup]:
    """A default process group of `size` ranks, of which this process is each: rank 0, as all.

    One process then runs a schedule for so many ranks as each of them would, but for the link, on
    one GPU or CPU: for measurements and tests. Results are those of no real team: a peer's part is
    this rank's own of another chunk, so that they differ by strategy. Those of a Program are equal
    to its own in order (the option `in_order`), bit for bit.

    Args:
        size: ranks of the group, two or more.

    Returns:
        The group, until the block ends.

    Raises:
        OptionError: no such number of ranks.
        InputError: there is a process group already.

    Examples:
        >>> with mirror(4):
        ...     print(torch.distributed.get_world_size())
        4
    """
    if not 2 <= size <= MAX_RANKS:
        raise OptionError(f"a mirror of {size} ranks: it has two or more")
    if dist.is_initialized():
        raise InputError(
            "a mirror makes a process group of its own, and there is one already. fix: destroy it "
            "first (interlace.release(), destroy_process_group)"
        )
    if not hasattr(dist.Backend, "MIRROR"):
        made = lambda store, rank, size, timeout: CopyGroup(rank, size)  # noqa: E731
        dist.Backend.register_backend("mirror", made, devices=["cpu", "cuda"])
    dist.init_process_group("mirror", store=dist.HashStore(), rank=0, world_size=size)
    try:
        group: Any = dist.group.WORLD
        yield group
    finally:
        with contextlib.suppress(InterlaceError, RuntimeError):
            release_teams()
        if dist.is_initialized():
            dist.destroy_process_group()
