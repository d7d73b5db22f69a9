"""Collectives and messages on the CPU, of which each rank does its part late.

    with held_back(seed):
        executor = Executor(program, groups=groups).prepare()
        executor.run(inputs)

gloo and shared memory give a rank its part about when its peers get theirs. Here a rank begins and
reads its source after a random time, and what it gets comes into a place of its own, and goes on to
its destination after another, in which its peers have long gone on: semantics.md promises no
more.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from interlace.comm.collectives import Run, Spec
from interlace.comm.host.messages import Transfer
from interlace.comm.host.signals import BoundedWait
from interlace.ir import KINDS
from interlace.runtime.host import binder as host_ops

LONGEST_S = 0.003


@contextmanager
def held_back(seed: int) -> Iterator[None]:
    """Within it, Executors of this process are bound so."""
    rng = random.Random(seed)

    def pause() -> None:
        if rng.random() < 0.5:
            time.sleep(rng.random() * LONGEST_S)

    def late(bind: Callable[..., Run]) -> Callable[..., Run]:
        def bound(place: Any, spec: Spec, *others: Any) -> Run:
            run, kind = bind(place, spec, *others), KINDS[spec.kind]
            gets = kind.writes == "all" or (kind.writes == "root" and spec.me == spec.root)
            return _late_run(run, pause, gets)

        return bound

    def exchange(
        parts: Sequence[Transfer], tensors: Sequence[torch.Tensor], wait: BoundedWait
    ) -> None:
        incoming = [not part.sends for part in parts]
        places = [
            torch.empty(tensor.shape, dtype=tensor.dtype) if comes else tensor
            for tensor, comes in zip(tensors, incoming, strict=True)
        ]
        pause()
        whole(parts, places, wait)
        pause()
        for tensor, place in zip(tensors, places, strict=True):
            if place is not tensor:
                tensor.copy_(place)

    whole = host_ops.exchange
    with pytest.MonkeyPatch.context() as patch:
        for name in ("bind_collective", "bind_peer_collective"):
            patch.setattr(host_ops, name, late(getattr(host_ops, name)))
        patch.setattr(host_ops, "exchange", exchange)
        yield


def _late_run(run: Run, pause: Callable[[], None], gets: bool) -> Run:
    def late(src: torch.Tensor | None, dst: torch.Tensor | None, wait: BoundedWait) -> None:
        pause()
        if dst is None or not gets:
            run(src, dst, wait)
            return
        into = torch.empty(dst.shape, dtype=dst.dtype)
        run(src, into, wait)
        pause()
        dst.copy_(into)

    return late
