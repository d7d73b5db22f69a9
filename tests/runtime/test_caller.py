"""What a run takes over from the thread that calls it: its modes, its threads, its interrupts."""

from __future__ import annotations

import _thread
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from tests.runtime.programs import inputs_of, prepared
from tests.support.pool import Pool

from interlace.ir import Call, Op, parse
from interlace.runtime import Executor

KINDS = ("slots", "put", "pipeline")

TWO_STREAMS = """
def two(x: f32[4, 4]):
    y = empty(f32[4, 4])
    z = empty(f32[4, 4])
    main: call("aten.mm.out", x, x, out=y)
    side: call("aten.mm.out", x, x, out=z)
    return y, z
"""


def runs_in(kind: str, seed: int) -> list[bool]:
    """Prepares in one mode and runs in both; whether every result is that without modes."""
    with prepared(kind) as plain:
        inputs = inputs_of(plain.program, dist.get_rank(), seed)
        wanted = plain.run(inputs)[0]
    equal: list[bool] = []
    for first in (True, False):
        with torch.inference_mode(first):
            executor = prepared(kind)
        for mode in (first, not first, first):
            with torch.inference_mode(mode):
                equal.append(torch.equal(executor.run(inputs)[0], wanted))
        executor.close()
    return equal


@pytest.mark.parametrize("kind", KINDS)
def test_inference_mode_may_come_and_go(pool: Pool, kind: str, seed: int) -> None:
    assert pool(2).run(runs_in, kind, seed) == [[True] * 6] * 2


def test_every_stream_has_the_callers_number_of_threads() -> None:
    seen: dict[str, int] = {}

    def note(rank: int, index: int, op: Op) -> None:
        seen[op.stream] = torch.get_num_threads()

    before = torch.get_num_threads()
    with Executor(parse(TWO_STREAMS), before_op=note).prepare() as executor:
        try:
            for count in (before, before + 1):
                torch.set_num_threads(count)
                executor.run([torch.ones(4, 4)])
                assert seen == {"main": count, "side": count}
        finally:
            torch.set_num_threads(before)


def test_an_interrupt_ends_every_stream_before_it_is_raised() -> None:
    ended = threading.Event()

    def interrupt(rank: int, index: int, op: Op) -> None:
        if op.stream == "side" and isinstance(op, Call):
            time.sleep(0.3)  # by then the caller's own stream is done
            _thread.interrupt_main()
            time.sleep(0.7)
            ended.set()

    # What a shell starts in the background, it has ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Executor(parse(TWO_STREAMS), before_op=interrupt).prepare() as executor:
            with pytest.raises(KeyboardInterrupt):
                executor.run([torch.ones(4, 4)])
            assert ended.is_set()
    finally:
        signal.signal(signal.SIGINT, before)
