"""Ctrl-C on one rank, at any moment of a run: KeyboardInterrupt there, a typed error on its peers,
and after a reset all go on."""

from __future__ import annotations

import contextlib
import dis
import random
import sys
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.runtime.programs import inputs_of, prepared
from tests.support.interrupts import MAKERS, WAYS, campaign, compiled_step
from tests.support.pool import Pool
from torch.distributed.tensor import DTensor

import interlace
from interlace.comm.rendezvous.patience import Errand
from interlace.frontend.backend import Compilation, backend
from interlace.frontend.compiled_graph import Shelf

SOON_S = 5.0
"""Far below the time-out, on a machine that is busy with other tests."""


@pytest.mark.parametrize("way", WAYS)
def test_an_interrupt_at_a_random_moment_is_raised_at_once(pool: Pool, way: str, seed: int) -> None:
    for trials in pool(2).run(campaign, way, seed, 5, timeout_s=110):
        assert [wrong for trial in trials if (wrong := trial.wrong(SOON_S))] == []


def interrupted_guards(seed: int) -> tuple[str, int, bool]:
    """An interrupt of rank 0 amid the guards of its compiled model: the error; how often that was
    compiled since; and whether the values are right afterwards."""
    step, error = compiled_step(seed), ""
    wanted = [tensor.clone() for tensor in step()]
    step()
    known = len(backend.graphs)

    def interrupt(_: DTensor) -> None:
        patch.stop()
        raise KeyboardInterrupt

    patch = mock.patch.object(DTensor, "device_mesh", property(interrupt))
    try:
        if dist.get_rank() == 0:
            patch.start()
        step()
    except (KeyboardInterrupt, Exception) as caught:
        error = type(caught).__name__
    interlace.reset()
    equal = all(map(torch.equal, step(), wanted))
    return error, len(backend.graphs) - known, equal


def test_an_interrupt_that_torch_loses_amid_guards_is_raised(pool: Pool, seed: int) -> None:
    results = pool(2).run(interrupted_guards, seed)
    assert results == [("KeyboardInterrupt", 0, True), ("PeerError", 0, True)]


def interrupted_compilation(way: str, seed: int) -> tuple[list[str], bool]:
    """An interrupt of rank 0 after its last meeting and before what it made is kept: the errors of
    the steps, a reset after each; and whether the values are right in the end. Before the last step
    all compile anew."""
    torch.compiler.reset()
    errors, values = list[str](), list[torch.Tensor]()
    step = MAKERS[way](seed)
    owner: Any = Shelf if way == "eager" else Compilation
    name = "put" if way == "eager" else "prepare"
    whole = getattr(owner, name)

    def interrupted(*args: Any) -> None:
        whole(*args)
        raise KeyboardInterrupt

    lost = mock.patch.object(owner, name, interrupted)
    for number in range(3):
        try:
            with lost if number == 0 == dist.get_rank() else contextlib.nullcontext():
                values = [tensor.clone() for tensor in step()]
            errors.append("")
        except (KeyboardInterrupt, Exception) as caught:
            errors.append(f"{type(caught).__name__}: {caught}")
        interlace.reset()
        if number == 1:
            torch.compiler.reset()
    return errors, all(map(torch.equal, step(), values))


def test_a_compilation_that_an_interrupt_lost_says_what_all_ranks_do(pool: Pool, seed: int) -> None:
    for rank, (errors, equal) in enumerate(pool(2).run(interrupted_compilation, "compiled", seed)):
        assert errors[0].startswith(("PeerError", "KeyboardInterrupt")[rank == 0])
        assert errors[1].startswith("AgreementError: ")
        assert "all ranks call interlace.reset() and torch.compiler.reset()" in errors[1]
        assert (errors[2], equal) == ("", True)


def test_layers_whose_binding_an_interrupt_ended_are_bound_anew(pool: Pool, seed: int) -> None:
    for rank, (errors, equal) in enumerate(pool(2).run(interrupted_compilation, "eager", seed)):
        assert errors[0].startswith(("PeerError", "KeyboardInterrupt")[rank == 0])
        assert (errors[1:], equal) == (["", ""], True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS)
def test_many_interrupts_at_random_moments(pool: Pool, way: str, seed: int) -> None:
    for trials in pool(3).run(campaign, way, seed, 150, timeout_s=1700):
        assert [wrong for trial in trials if (wrong := trial.wrong())] == []


class Interrupt:
    """Raises KeyboardInterrupt at the nth place of a run of this thread where Python handles
    signals: behind a call, at the start of a function and at a jump back."""

    def __init__(self, nth: int) -> None:
        self.nth, self.places, self.at = nth, 0, ""
        self._last: dict[FrameType, int] = {}

    def during(self, action: Callable[[], object]) -> None:
        sys.settrace(self._trace)
        try:
            action()
        finally:
            sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if not any(part in code.co_filename for part in ("/interlace/", "/threading.py")):
            return None
        frame.f_trace_opcodes = True
        if event == "return":
            self._last.pop(frame, None)
        if event == "opcode":
            before = self._last.get(frame, -1)
            self._last[frame] = frame.f_lasti
            if before >= 0 and _handles_signals(code, before):
                self.places += 1
                if self.places == self.nth:
                    sys.settrace(None)
                    self.at = f"{code.co_filename}:{frame.f_lineno}"
                    raise KeyboardInterrupt
        return self._trace


def _handles_signals(code: CodeType, at: int) -> bool:
    return dis.opname[code.co_code[at]].startswith(("CALL", "RESUME", "JUMP_BACKWARD"))


def interrupted_runs(kind: str, seed: int, count: int) -> tuple[int, list[str]]:
    """Runs that an interrupt ends, each at another place: how many of them, and what went wrong."""
    executor = prepared(kind, timeout_s=20.0)
    inputs, draw = inputs_of(executor.program, dist.get_rank(), seed), random.Random(seed)
    (wanted,) = executor.run(inputs)
    whole, wrong, hits = Interrupt(0), list[str](), 0
    whole.during(lambda: executor.run(inputs))
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, whole.places)
    for _ in range(count):
        victim = draw.randrange(dist.get_world_size())
        interrupt, begun, error = Interrupt(draw.randint(1, told[victim])), time.monotonic(), ""
        try:
            if dist.get_rank() == victim:
                interrupt.during(lambda: executor.run(inputs))
            else:
                executor.run(inputs)
        except (KeyboardInterrupt, Exception) as caught:
            error = f"{type(caught).__name__}: {caught}"
        seconds = time.monotonic() - begun
        hits += bool(interrupt.at)
        interlace.reset()
        reset_s = time.monotonic() - begun - seconds
        (y,) = executor.run(inputs)
        dist.barrier()  # else the next interrupt would end this run of a peer
        if interrupt.at and not error.startswith("KeyboardInterrupt"):
            wrong.append(f"{interrupt.at}: {error}")
        if max(seconds, reset_s) > SOON_S:
            wrong.append(f"{interrupt.at}: {seconds:.1f} s, reset {reset_s:.1f} s, {error}")
        if not torch.equal(y, wanted) or not torch.is_grad_enabled():
            wrong.append(f"{interrupt.at}: wrong afterwards")
    executor.close()
    return hits, wrong


@pytest.mark.parametrize("kind", ["get", "shift"])
def test_an_interrupt_at_any_call_of_a_run_ends_it_and_a_reset_mends_it(
    pool: Pool, kind: str, seed: int
) -> None:
    check_interrupted_runs(pool, kind, seed, 60)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", ["get", "put", "shift", "pipeline", "slots"])
def test_an_interrupt_at_every_call_of_a_run(pool: Pool, kind: str, seed: int) -> None:
    check_interrupted_runs(pool, kind, seed, 3000)


def check_interrupted_runs(pool: Pool, kind: str, seed: int, count: int) -> None:
    results = pool(2).run(interrupted_runs, kind, seed, count, timeout_s=100 + count / 2)
    assert [wrong for _, wrong in results] == [[], []]
    assert sum(hits for hits, _ in results) > count / 2


def test_a_call_in_a_thread_of_its_own_is_asked_for_again_and_again() -> None:
    call = Errand(lambda: time.sleep(0.2))
    assert not call.is_back(0.01)
    assert call.is_back(20.0)
    assert call.is_back(0.0)
    assert call.result() is None
    failing = Errand(lambda: [][0])
    assert failing.is_back(20.0)
    with pytest.raises(IndexError):
        failing.result()
