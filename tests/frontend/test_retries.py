"""A compilation that failed for a reason that passes is tried again at the next call."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from tests.frontend.models import bits, feed_forward, gradients
from tests.support.pool import Pool
from torch.distributed.tensor import Shard

import interlace
from interlace.errors import InterlaceError, OptionError, UnsupportedError
from interlace.frontend import backend

LIMIT_S = 2.0
TRACED_S = 4.0
"""More than one rank's trace of a model takes longer than the other's on a busy machine."""


def attempts(call: Any, late: int) -> list[str]:
    """What became of a call that rank `late` comes to when its peer has given up, and of one on
    time."""
    told: list[str] = []
    for number in range(2):
        if number == 0 and dist.get_rank() == late:
            dist.barrier()
        try:
            call()
            told.append("")
        except InterlaceError as error:
            told.append(f"{type(error).__name__}: {error}")
        if number == 0 and dist.get_rank() != late:
            dist.barrier()
        dist.barrier()
    return told


def late_to_train(late: int) -> tuple[list[str], bool]:
    torch.compiler.reset()
    model, x = feed_forward(16, Shard(0), Shard(0)), torch.ones(4, 16)

    def step(run: Any) -> tuple[float, dict[str, bytes]]:
        loss = run(x).square().mean()
        loss.backward()
        return loss.item(), bits(gradients(model))

    options: Any = {"timeout_s": TRACED_S}
    want = step(model)
    call: Any = torch.compile(model, backend=backend, options=options, fullgraph=True)
    told = attempts(lambda: call(x), late)
    got = step(call)
    return told, abs(want[0] - got[0]) < 1e-5 and step(call) == got


def test_a_peer_that_was_late_once_is_met_at_the_next_call(pool: Pool) -> None:
    for late, (told, right) in enumerate(pool(2).run(late_to_train, 1, replace=True)):
        assert "AgreementError" in told[0], (late, told)
        assert told[1] == "", (late, told)
        assert right


def short_batch(rank: int) -> tuple[str, list[bool]]:
    """One rank alone has a short batch; later all have it."""
    torch.compiler.reset()
    group: Any = dist.group.WORLD
    options: Any = {"timeout_s": LIMIT_S}

    def fn(x: torch.Tensor) -> torch.Tensor:
        return funcol.all_reduce(x, "sum", group)

    call = torch.compile(fn, backend=backend, dynamic=False, options=options)
    call(torch.ones(4))
    told = ""
    try:
        if dist.get_rank() == rank:
            call(torch.ones(3))
    except InterlaceError as error:
        told = f"{type(error).__name__}: {error}"
    dist.barrier()
    interlace.reset()
    return told, [bool(call(torch.ones(n)).eq(dist.get_world_size()).all()) for n in (3, 4, 3)]


def test_a_short_batch_on_one_rank_leaves_its_shape_usable_for_all(pool: Pool) -> None:
    (silent, right), (told, equal) = pool(2).run(short_batch, 1, replace=True)
    assert silent == ""
    assert told.startswith("AgreementError: rank 0 did not come")
    assert right == equal == [True] * 3


def test_an_error_that_is_raised_again_and_again_does_not_grow() -> None:
    torch.compiler.reset()
    options: Any = {"stratgy": "ring"}

    def cond(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))

    wrong = torch.compile(lambda x: x * 2, backend=backend, options=options)
    for call, kind in (
        (wrong, OptionError),
        (torch.compile(cond, backend=backend), UnsupportedError),
    ):
        lengths: list[int] = []
        for _ in range(4):
            with pytest.raises(kind) as caught:
                call(torch.ones(2))
            lengths.append(len("".join(traceback.format_exception(caught.value))))
        assert len(set(lengths[1:])) == 1, lengths
