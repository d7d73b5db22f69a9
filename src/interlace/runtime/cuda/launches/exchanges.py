"""The backend `peer` on CUDA: a collective as one kernel over peer memory.

ensure_area(side, topic, specs, time_out_s)          # all ranks, together, while they prepare
issue = bind_exchange(side, spec, handle, src, dst)  # then per run: issue()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from interlace.comm import Spec
from interlace.comm.cuda.side import CudaSide
from interlace.comm.reductions import check_reduction
from interlace.runtime.cuda.lanes import Thunk

Tensors = Callable[[], torch.Tensor] | None


def ensure_area(side: CudaSide, topic: str, specs: Sequence[Spec], time_out_s: float) -> None:
    """Staging memory that is large enough for these collectives on every rank."""
    from interlace.kernels.exchange import launch as exchange

    needed = max(
        (
            exchange.staging_nbytes(spec.kind, spec.dtype, spec.parts, spec.size)
            for spec in specs
            if spec.size > 1
        ),
        default=0,
    )
    side.ensure_area(
        *(topic, needed, exchange.FLAG_NBYTES, exchange.WORDS_NBYTES, exchange.STOP_AT),
        time_out_s,
    )


def bind_exchange(
    side: CudaSide, spec: Spec, handle: Callable[[], int], src: Tensors, dst: Tensors
) -> Thunk | None:
    """The function that issues this collective on the stream that `handle` gives."""
    from interlace.kernels.exchange.launch import Exchange

    if spec.reduce is not None:
        check_reduction(spec.reduce, spec.dtype)
    if spec.kind != "barrier" and not sum(spec.parts):
        return None
    if spec.size == 1:
        return _alone(src, dst)
    area = side.the_area
    bound = Exchange(
        *(spec.kind, spec.dtype, spec.parts, spec.me, spec.size, side.device),
        *(area.stages, area.stage_nbytes, area.flags, area.words),
        reduce=spec.reduce,
        root=spec.root,
        merges=spec.merges,
    ).prepare()

    def run() -> None:
        a = src() if src is not None else None
        b = dst() if dst is not None else None
        into = 0 if b is None else b.data_ptr()
        bound.launch_at(handle(), into if a is None else a.data_ptr(), into)

    return run


def _alone(src: Tensors, dst: Tensors) -> Thunk | None:
    """A team of one: what is given is the result."""
    if src is None or dst is None:
        return None

    def run() -> None:
        a, b = src(), dst()
        if a.data_ptr() != b.data_ptr():
            b.copy_(a)

    return run
