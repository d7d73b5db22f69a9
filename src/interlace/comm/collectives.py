"""The kinds of collective on a torch.distributed backend: gloo, NCCL or UCC.

`bind_collective` gives one function per op, with everything decided beforehand that does not change
from run to run:

    gloo = team.backend("gloo", "cpu", timeout_s=60)
    run = bind_collective(gloo, Spec("all_gather", 4, me=0, parts=(8,) * 4, dtype=torch.int8), 60)
    run(src, dst, wait)

What only moves data goes as bytes, so every element type works. Order of reductions is the
backend's own: the same in every run of one shape and on every rank, but not that of another
backend. Where Interlace reduces itself, it is the ranks' order, in fp32: the same bits on every
rank.

    >>> reduce_into([torch.ones(2), torch.ones(2)], "sum", out=out)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d

from interlace.comm.backends import MARGIN_S
from interlace.comm.host.signals import BoundedWait
from interlace.errors import InputError, UnsupportedError

c10d: Any = distributed_c10d

Run = Callable[[torch.Tensor | None, torch.Tensor | None, BoundedWait], None]
Moves = Callable[[torch.Tensor, torch.Tensor, BoundedWait], None]
"""A `Run` whose tensors are there where its kind says so, which a Program keeps to."""

_OPS = {"sum": "SUM", "avg": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX"}
_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "sum": torch.Tensor.add_,
    "avg": torch.Tensor.add_,
    "prod": torch.Tensor.mul_,
    "min": lambda total, part: torch.minimum(total, part, out=total),
    "max": lambda total, part: torch.maximum(total, part, out=total),
}
_TYPES = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
}
"""The element types that gloo reduces, and that NCCL knows."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One collective as a rank sees it."""

    kind: str
    size: int
    me: int
    parts: tuple[int, ...]
    """Elements of each rank's part, on the side that is split (else the whole, once)."""
    dtype: torch.dtype
    reduce: str | None = None
    root: int = 0
    merges: bool = False
    """An all-to-all whose parts are cut on the destination's side: every rank sends its own part to
    all, and the parts that it receives have their owners' sizes."""
    counted: bool = False
    """An all-to-all whose counts are data; `parts` has the most elements that the rank sends."""

    @property
    def even(self) -> bool:
        return len(set(self.parts)) <= 1


def split(flat: torch.Tensor, parts: tuple[int, ...]) -> list[torch.Tensor]:
    return list(flat.split(list(parts)))


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as flat bytes of the same memory."""
    return tensor.reshape(-1).view(torch.uint8)


@dataclass(slots=True, eq=False)
class Counts:
    """The rows that an all-to-all sends to each rank and gets from each, other ones in each run."""

    tensors: Callable[[], tuple[torch.Tensor, torch.Tensor]]
    earlier: Counts | None = None
    """Counts of an exchange that comes before this one in every run, and has the same,"""
    swapped: bool = False
    """or goes the other way."""
    sent: list[int] = field(default_factory=list[int])
    received: list[int] = field(default_factory=list[int])

    def known(self) -> bool:
        """Takes the numbers from the earlier exchange, if there is one, which has checked them."""
        if (other := self.earlier) is None:
            return False
        self.sent, self.received = other.sent, other.received
        if self.swapped:
            self.sent, self.received = self.received, self.sent
        return True

    def check(self, told: list[int], rows: int, room: int, me: int) -> None:
        """Raises InputError for counts that do not fit the source of `rows`, the destination with
        `room`, or what peers have `told`."""
        for name, side, most in (("sends", self.sent, rows), ("receives", self.received, room)):
            if min(side) < 0 or sum(side) > most:
                raise InputError(
                    f"rank {me} of an all-to-all {name} {side} rows, {sum(side)} in all, where "
                    f"{most} are the most. fix: declare as many as can come (of experts: "
                    "`max_rows`)"
                )
        if told != self.received:
            raise InputError(
                f"rank {me} of an all-to-all expects {self.received} rows, and its peers send "
                f"{told}. fix: exchange the counts by an all_to_all, and give what comes as "
                "received="
            )


def bind_collective(
    backend: Any, spec: Spec, timeout_s: float, counts: Counts | None = None
) -> Run:
    if spec.reduce is not None:
        check_reduction(spec.reduce, spec.dtype)
        if backend.name() == "gloo" and spec.dtype not in _TYPES:
            raise UnsupportedError(
                f"gloo does not reduce {spec.dtype}: choose 'peer' instead of gloo (the option "
                "transport='peer', or backend='peer' in a Program's text), or convert first"
            )
    if spec.kind != "barrier" and sum(spec.parts) == 0 and not spec.counted:
        return lambda src, dst, wait: None  # the rendezvous before it was all
    margin = MARGIN_S if backend.name() == "gloo" else 0.0  # Note [Whose time-out] in backends.py
    binder = _Binder(backend, spec, timedelta(seconds=timeout_s + margin))
    run: Any = binder.bind() if counts is None else binder.counted(counts)
    return _apart(run) if backend.name() == "ucc" else run


def _apart(run: Run) -> Run:
    """From a copy of what shares memory with the destination, which UCC does not expect."""

    def copied(src: torch.Tensor | None, dst: torch.Tensor | None, wait: BoundedWait) -> None:
        if src is not None and dst is not None:
            if src.untyped_storage().data_ptr() == dst.untyped_storage().data_ptr():
                src = src.clone()
        run(src, dst, wait)

    return copied


class _Binder:
    def __init__(self, backend: Any, spec: Spec, limit: timedelta) -> None:
        self.backend, self.spec, self.limit = backend, spec, limit
        plain = backend.name() == "nccl" and spec.dtype in _TYPES
        self.moved: Callable[[torch.Tensor], torch.Tensor] = (lambda x: x) if plain else as_bytes
        """A contiguous tensor as the backend moves it,"""
        self.flat = (lambda x: x) if plain else flattened
        """and as it reduces it: NCCL minds no shapes, and a view costs a microsecond."""

    def options(self, cls: Callable[[], Any], **fields: object) -> object:
        options = cls()
        options.timeout = self.limit
        if hasattr(options, "asyncOp"):
            options.asyncOp = False  # NCCL: on the stream that is current
        for name, value in fields.items():
            setattr(options, name, value)
        return options

    def reduction(self, cls: Callable[[], Any], **fields: object) -> object:
        """Options with the reduction; an average is a sum, divided afterwards."""
        op = getattr(c10d.ReduceOp, _OPS[self.spec.reduce or "sum"])
        return self.options(cls, reduceOp=op, **fields)

    def bind(self) -> Moves:
        spec, gloo = self.spec, self.backend.name() == "gloo"
        match spec.kind:
            case "all_gather":
                return self.all_gather() if spec.even else self.uneven_all_gather()
            case "reduce_scatter":
                run = self.reduce_and_split() if gloo or not spec.even else self.reduce_scatter()
            case "all_reduce":
                run = self.all_reduce()
            case "reduce":
                run = self.reduce()
            case "broadcast":
                return self.broadcast()
            case "gather" | "scatter" | "all_to_all":
                return self.exchange()
            case "barrier":
                return self.barrier()
            case kind:
                raise UnsupportedError(f"no collective named {kind!r}")
        rooted = spec.kind == "reduce" and spec.me != spec.root
        return run if spec.reduce != "avg" or rooted else self.averaged(run)

    def averaged(self, run: Moves) -> Moves:
        def averaged(src: torch.Tensor, dst: torch.Tensor, wait: BoundedWait) -> None:
            run(src, dst, wait)
            dst.div_(self.spec.size)

        return averaged

    def barrier(self) -> Moves:
        """NCCL has none. torch's is a sum on a GPU that it guesses, for which the host waits."""
        backend = self.backend
        if backend.name() != "nccl":
            wanted = self.options(c10d.BarrierOptions)
            return lambda src, dst, wait: wait.finish(backend.barrier(wanted))
        options = self.options(c10d.AllreduceOptions)
        word = [torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device()))]
        return lambda src, dst, wait: wait.finish(backend.allreduce(word, options))

    def all_gather(self) -> Moves:
        backend, options = self.backend, self.options(c10d.AllgatherOptions)
        moved = self.moved
        return lambda src, dst, wait: wait.finish(
            backend._allgather_base(moved(dst), moved(src), options)
        )

    def uneven_all_gather(self) -> Moves:
        """Every rank broadcasts its part, since gloo's own takes even parts only."""
        backend, spec = self.backend, self.spec
        sources = [rank for rank in range(spec.size) if spec.parts[rank]]
        options = [self.options(c10d.BroadcastOptions, rootRank=rank) for rank in sources]

        def run(src: torch.Tensor, dst: torch.Tensor, wait: BoundedWait) -> None:
            parts = split(dst.reshape(-1), spec.parts)
            parts[spec.me].copy_(src.reshape(-1))
            works = [
                backend.broadcast([as_bytes(parts[rank])], option)
                for rank, option in zip(sources, options, strict=True)
            ]
            for work in works:
                wait.finish(work)

        return run

    def reduce_scatter(self) -> Moves:
        backend, options = self.backend, self.reduction(c10d.ReduceScatterOptions)
        flat = self.flat
        return lambda src, dst, wait: wait.finish(
            backend._reduce_scatter_base(flat(dst), flat(src), options)
        )

    def reduce_and_split(self) -> Moves:
        """Reduces everything and keeps the own part: the even form's algorithms need even parts,
        and gloo's does the same in a `Work` whose waits no time-out ends."""
        backend, spec = self.backend, self.spec
        options = self.reduction(c10d.AllreduceOptions)

        def run(src: torch.Tensor, dst: torch.Tensor, wait: BoundedWait) -> None:
            whole = src.reshape(-1).clone()
            wait.finish(backend.allreduce([whole], options))
            dst.reshape(-1).copy_(split(whole, spec.parts)[spec.me])

        return run

    def all_reduce(self) -> Moves:
        backend, options = self.backend, self.reduction(c10d.AllreduceOptions)
        flat = self.flat

        def run(src: torch.Tensor, dst: torch.Tensor, wait: BoundedWait) -> None:
            into = flat(dst)
            if src is not None and src.data_ptr() != into.data_ptr():
                into.copy_(flat(src))
            wait.finish(backend.allreduce([into], options))

        return run

    def broadcast(self) -> Moves:
        backend, spec = self.backend, self.spec
        options = self.options(c10d.BroadcastOptions, rootRank=spec.root)

        def run(src: torch.Tensor, dst: torch.Tensor, wait: BoundedWait) -> None:
            place: torch.Tensor = src if dst is None else dst
            if spec.me == spec.root and dst is not None and src is not None:
                dst.reshape(-1).copy_(src.reshape(-1))
            wait.finish(backend.broadcast([as_bytes(place)], options))

        return run

    def reduce(self) -> Moves:
        """Works in a copy off the root: gloo leaves partial sums in what it is given."""
        backend, spec = self.backend, self.spec
        options = self.reduction(c10d.ReduceOptions, rootRank=spec.root)

        def run(src: torch.Tensor, dst: torch.Tensor, wait: BoundedWait) -> None:
            scratch = src.reshape(-1).clone()
            wait.finish(backend.reduce([scratch], options))
            if spec.me == spec.root:
                dst.reshape(-1).copy_(scratch)

        return run

    def exchange(self) -> Moves:
        """Gather, scatter and all-to-all, each as bytes that go from every rank to every rank."""
        backend, spec = self.backend, self.spec
        parts = [part * spec.dtype.itemsize for part in spec.parts]
        own = [parts[spec.me] if rank == spec.root else 0 for rank in range(spec.size)]
        at_root = parts if spec.me == spec.root else [0] * spec.size
        alike = [parts[spec.me]] * spec.size
        taken, given = {
            "gather": (at_root, own),
            "scatter": (own, at_root),
            "all_to_all": (parts, alike) if spec.merges else (alike, parts),
        }[spec.kind]
        options = self.options(c10d.AllToAllOptions)

        def run(src: torch.Tensor, dst: torch.Tensor, wait: BoundedWait) -> None:
            device = next(tensor.device for tensor in (src, dst) if tensor is not None)
            into = as_bytes(dst) if sum(taken) else nothing(device)
            out = as_bytes(src) if sum(given) else nothing(device)
            wait.finish(backend.alltoall_base(into, out, taken, given, options))

        return run

    def counted(self, counts: Counts) -> Moves:
        """An all-to-all whose counts are data. Ranks first tell each other what they send, unless
        they have: bytes that one does not expect would end its process, and others would wait for
        what never comes."""
        backend, me = self.backend, self.spec.me
        options = self.options(c10d.AllToAllOptions)

        def run(src: torch.Tensor, dst: torch.Tensor, wait: BoundedWait) -> None:
            told = None
            if not counts.known():
                sent, received = counts.tensors()
                arrives = torch.empty_like(received)
                wait.finish(backend.alltoall_base(arrives, sent, [], [], options))
                numbers = torch.stack((sent, received, arrives)).tolist()
                counts.sent, counts.received, told = numbers
            given, taken = counts.sent, counts.received
            counts.check(taken if told is None else told, src.shape[0], dst.shape[0], me)
            into, out = dst[: sum(taken)], src[: sum(given)]
            width = math.prod(dst.shape[1:]) * dst.element_size()
            sizes = [[rows * width for rows in side] for side in (taken, given)]
            ends = as_bytes(into), as_bytes(out)
            wait.finish(backend.alltoall_base(*ends, *sizes, options))
            dst[sum(taken) :].zero_()

        return run


@functools.lru_cache(maxsize=16)
def nothing(device: torch.device, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A tensor without elements, made once, where a rank gives or gets nothing."""
    with torch.inference_mode(False):  # else runs out of that mode could not take it
        return torch.empty(0, dtype=dtype, device=device)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type a reduction accumulates in: fp32 for narrower floats, else the type itself."""
    narrow = dtype.is_floating_point and dtype.itemsize < 4
    return torch.float32 if narrow else dtype


def check_reduction(reduce: str, dtype: torch.dtype) -> None:
    """Raises `UnsupportedError` where the reduction has no meaning for the element type."""
    exact = not (dtype.is_floating_point or dtype.is_complex)
    if reduce == "avg" and exact:
        raise UnsupportedError(
            f"an average of {dtype} is not defined: reduce with sum and divide, or convert first"
        )
    if dtype.is_complex and reduce in ("min", "max"):
        raise UnsupportedError(f"{reduce} of {dtype} is not defined: complex numbers have no order")
    if dtype == torch.bool and reduce not in ("min", "max"):
        raise UnsupportedError(f"{reduce} of {dtype} is not defined: reduce with max (or) or min")


def reduce_into(
    parts: Sequence[torch.Tensor] | torch.Tensor, reduce: str = "sum", *, out: torch.Tensor
) -> None:
    """`out` becomes the reduction of `parts`, one after another."""
    wide = accumulator(out.dtype)
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        _REDUCTIONS[reduce](total, part.to(wide))
    if reduce == "avg":
        total /= len(parts)
    out.copy_(total)
