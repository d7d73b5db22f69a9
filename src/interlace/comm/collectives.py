"""The kinds of collective on a torch.distributed backend: gloo, NCCL or UCC.

`bind_collective` gives one function per op, with everything decided beforehand that does not change
from run to run:

    gloo = team.backend("gloo", "cpu", time_out_s=60)
    run = bind_collective(gloo, Spec("all_gather", 4, me=0, parts=(8,) * 4, dtype=torch.int8), 60)
    run(src, dst, wait)

What only moves data goes as bytes, so every element type works. Order of reductions is the
backend's own: the same in every run of one shape and on every rank, but not that of another
backend. Where Interlace reduces itself, it is the ranks' order, in fp32: the same bits on every
rank.

    >>> reduce_into(out, [torch.ones(2), torch.ones(2)], "sum")
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d

from interlace.comm.backends import MARGIN_S
from interlace.comm.host.signals import Wait
from interlace.errors import UnsupportedError

c10d: Any = distributed_c10d
"""Untyped here: its option classes stand in no stub."""

Run = Callable[[torch.Tensor | None, torch.Tensor | None, Wait], None]

_OPS = {"sum": "SUM", "avg": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX"}
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

    @property
    def even(self) -> bool:
        """Whether all parts are equal."""
        return len(set(self.parts)) <= 1


def split(flat: torch.Tensor, parts: tuple[int, ...]) -> list[torch.Tensor]:
    """The ranks' parts of a flat tensor."""
    return list(flat.split(list(parts)))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as flat bytes of the same memory."""
    return tensor.reshape(-1).view(torch.uint8)


def _given(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "a collective lacks its source or its destination"
    return tensor


def bind_collective(backend: Any, spec: Spec, time_out_s: float) -> Run:
    """The function that runs this collective on the backend."""
    if spec.reduce is not None:
        check_reduction(spec.reduce, spec.dtype)
        if backend.name() == "gloo" and spec.dtype not in _TYPES:
            raise UnsupportedError(
                f"gloo does not reduce {spec.dtype}: choose 'peer' instead of gloo (the option "
                "transport='peer', or backend='peer' in a Program's text), or convert first"
            )
    if spec.kind != "barrier" and sum(spec.parts) == 0:
        return _nothing
    margin = MARGIN_S if backend.name() == "gloo" else 0.0  # Note [Whose time-out] in backends.py
    run = _Binder(backend, spec, timedelta(seconds=time_out_s + margin)).bind()
    return _apart(run) if backend.name() == "ucc" else run


def _apart(run: Run) -> Run:
    """From a copy of what shares memory with the destination: UCC works in place only where it is
    told so, and torch does not tell it."""

    def copied(src: torch.Tensor | None, dst: torch.Tensor | None, wait: Wait) -> None:
        if src is not None and dst is not None:
            if src.untyped_storage().data_ptr() == dst.untyped_storage().data_ptr():
                src = src.clone()
        run(src, dst, wait)

    return copied


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1)


def _nothing(src: torch.Tensor | None, dst: torch.Tensor | None, wait: Wait) -> None:
    """A collective of no elements: the rendezvous before it was all."""


class _Binder:
    """Makes the function of one collective."""

    def __init__(self, backend: Any, spec: Spec, limit: timedelta) -> None:
        self.backend = backend
        self.spec = spec
        self.limit = limit
        plain = backend.name() == "nccl" and spec.dtype in _TYPES
        self.moved: Callable[[torch.Tensor], torch.Tensor] = _itself if plain else as_bytes
        """A contiguous tensor as the backend moves it,"""
        self.flat: Callable[[torch.Tensor], torch.Tensor] = _itself if plain else _flat
        """and as it reduces it: NCCL minds no shapes, and a view costs a microsecond."""

    def options(self, cls: Any, **fields: Any) -> Any:
        """The options object that the backend takes."""
        options = cls()
        options.timeout = self.limit
        if hasattr(options, "asyncOp"):
            options.asyncOp = False  # NCCL: on the stream that is current
        for name, value in fields.items():
            setattr(options, name, value)
        return options

    def reduction(self, cls: Any, **fields: Any) -> Any:
        """Options with the reduction; an average is a sum, divided afterwards."""
        assert self.spec.reduce is not None
        op = getattr(c10d.ReduceOp, _OPS[self.spec.reduce])
        return self.options(cls, reduceOp=op, **fields)

    def bind(self) -> Run:
        match self.spec.kind:
            case "all_gather":
                return self.all_gather() if self.spec.even else self.uneven_all_gather()
            case "reduce_scatter":
                whole = self.backend.name() == "gloo" or not self.spec.even
                return self.reduce_and_split() if whole else self.reduce_scatter()
            case "all_reduce":
                return self.all_reduce()
            case "broadcast":
                return self.broadcast()
            case "reduce":
                return self.reduce()
            case "gather" | "scatter" | "all_to_all":
                return self.exchange()
            case "barrier":
                return self.barrier()
            case kind:
                raise UnsupportedError(f"no collective named {kind!r}")

    def barrier(self) -> Run:
        """NCCL has none. torch's is a sum on a GPU that it guesses, for which the host waits."""
        backend = self.backend
        if backend.name() != "nccl":
            wanted = self.options(c10d.BarrierOptions)
            return lambda src, dst, wait: wait.finish(backend.barrier(wanted))
        options = self.options(c10d.AllreduceOptions)
        word = [torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device()))]
        return lambda src, dst, wait: wait.finish(backend.allreduce(word, options))

    def all_gather(self) -> Run:
        backend, options = self.backend, self.options(c10d.AllgatherOptions)

        moved = self.moved

        def run(src: torch.Tensor | None, dst: torch.Tensor | None, wait: Wait) -> None:
            wait.finish(backend._allgather_base(moved(_given(dst)), moved(_given(src)), options))

        return run

    def uneven_all_gather(self) -> Run:
        """Every rank broadcasts its part, since gloo's own takes even parts only."""
        backend, spec = self.backend, self.spec
        sources = [rank for rank in range(spec.size) if spec.parts[rank]]
        options = [self.options(c10d.BroadcastOptions, rootRank=rank) for rank in sources]

        def run(src: torch.Tensor | None, dst: torch.Tensor | None, wait: Wait) -> None:
            parts = split(_given(dst).reshape(-1), spec.parts)
            parts[spec.me].copy_(_given(src).reshape(-1))
            works = [
                backend.broadcast([as_bytes(parts[rank])], option)
                for rank, option in zip(sources, options, strict=True)
            ]
            for work in works:
                wait.finish(work)

        return run

    def scaled(self, run: Run) -> Run:
        """With an average's division after it."""
        rooted = self.spec.kind == "reduce" and self.spec.me != self.spec.root
        if self.spec.reduce != "avg" or rooted:
            return run
        size = self.spec.size

        def averaged(src: torch.Tensor | None, dst: torch.Tensor | None, wait: Wait) -> None:
            run(src, dst, wait)
            _given(dst).div_(size)

        return averaged

    def reduce_scatter(self) -> Run:
        backend, options = self.backend, self.reduction(c10d.ReduceScatterOptions)
        flat = self.flat

        def run(src: torch.Tensor | None, dst: torch.Tensor | None, wait: Wait) -> None:
            into, whole = flat(_given(dst)), flat(_given(src))
            wait.finish(backend._reduce_scatter_base(into, whole, options))

        return self.scaled(run)

    def reduce_and_split(self) -> Run:
        """Reduces everything and keeps the own part: the even form's algorithms need even parts,
        and gloo's does the same in a `Work` whose waits no time-out ends."""
        backend, spec = self.backend, self.spec
        options = self.reduction(c10d.AllreduceOptions)

        def run(src: torch.Tensor | None, dst: torch.Tensor | None, wait: Wait) -> None:
            whole = _given(src).reshape(-1).clone()
            wait.finish(backend.allreduce([whole], options))
            _given(dst).reshape(-1).copy_(split(whole, spec.parts)[spec.me])

        return self.scaled(run)

    def all_reduce(self) -> Run:
        backend, options = self.backend, self.reduction(c10d.AllreduceOptions)
        flat = self.flat

        def run(src: torch.Tensor | None, dst: torch.Tensor | None, wait: Wait) -> None:
            into = flat(_given(dst))
            if src is not None and src.data_ptr() != into.data_ptr():
                into.copy_(flat(src))
            wait.finish(backend.allreduce([into], options))

        return self.scaled(run)

    def broadcast(self) -> Run:
        backend, spec = self.backend, self.spec
        options = self.options(c10d.BroadcastOptions, rootRank=spec.root)

        def run(src: torch.Tensor | None, dst: torch.Tensor | None, wait: Wait) -> None:
            place = dst if dst is not None else _given(src)
            if spec.me == spec.root and dst is not None and src is not None:
                dst.reshape(-1).copy_(src.reshape(-1))
            wait.finish(backend.broadcast([as_bytes(place)], options))

        return run

    def reduce(self) -> Run:
        """Works in a copy off the root: gloo leaves partial sums in what it is given."""
        backend, spec = self.backend, self.spec
        options = self.reduction(c10d.ReduceOptions, rootRank=spec.root)

        def run(src: torch.Tensor | None, dst: torch.Tensor | None, wait: Wait) -> None:
            scratch = _given(src).reshape(-1).clone()
            wait.finish(backend.reduce([scratch], options))
            if spec.me == spec.root:
                _given(dst).reshape(-1).copy_(scratch)

        return self.scaled(run)

    def exchange(self) -> Run:
        """Gather, scatter and all-to-all, each as bytes that go from every rank to every rank."""
        backend, spec = self.backend, self.spec
        item, nobody = spec.dtype.itemsize, [0] * spec.size
        parts = [part * item for part in spec.parts]
        own = [parts[spec.me] if rank == spec.root else 0 for rank in range(spec.size)]
        is_root = spec.me == spec.root
        alike = [parts[spec.me]] * spec.size
        taken, given = {
            "gather": (parts if is_root else nobody, own),
            "scatter": (own, parts if is_root else nobody),
            "all_to_all": (parts, alike) if spec.merges else (alike, parts),
        }[spec.kind]
        options = self.options(c10d.AllToAllOptions)

        def run(src: torch.Tensor | None, dst: torch.Tensor | None, wait: Wait) -> None:
            into = as_bytes(_given(dst)) if sum(taken) else nothing(_device(src, dst))
            out = as_bytes(_given(src)) if sum(given) else nothing(_device(src, dst))
            wait.finish(backend.alltoall_base(into, out, taken, given, options))

        return run


def _device(src: torch.Tensor | None, dst: torch.Tensor | None) -> torch.device:
    return (src if src is not None else _given(dst)).device


@functools.lru_cache(maxsize=16)
def nothing(device: torch.device, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """A tensor without elements, for a backend that wants one where a rank gives or gets nothing.

    It is made once for each device and type, and no run makes another. It has no memory that anyone
    else's could be.
    """
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


def reduce_into(out: torch.Tensor, parts: Sequence[torch.Tensor], reduce: str) -> None:
    """`out` becomes the reduction of `parts`, one after another."""
    wide = accumulator(out.dtype)
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        match reduce:
            case "sum" | "avg":
                total += part.to(wide)
            case "prod":
                total *= part.to(wide)
            case "min":
                torch.minimum(total, part.to(wide), out=total)
            case _:
                torch.maximum(total, part.to(wide), out=total)
    if reduce == "avg":
        total /= len(parts)
    out.copy_(total)
