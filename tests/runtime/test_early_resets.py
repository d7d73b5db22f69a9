"""`interlace.reset()` before a team is set up: no run is paired with another step's."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from tests.support.pool import Pool

import interlace
from interlace.comm import teams
from interlace.ir import parse
from interlace.nn.functional import all_gather_linear
from interlace.options import Options
from interlace.runtime import Executor

TIMEOUT_S = 20.0
GATHER = """
def gather(tp: Team[{0}], x: f32[1, 1]):
    y = empty(f32[{0}, 1])
    main: all_gather(x, y, team=tp)
    return y
"""
Step = Callable[[torch.Tensor], torch.Tensor]
Result = tuple[str, str, float]


class Interrupt(KeyboardInterrupt):
    """As by Ctrl-C, and what a handler of the user's raises."""


def step_of(kind: str, group: Any) -> Step:
    """A first collective step on a group that nothing has run on; it gathers."""
    options = Options(timeout_s=TIMEOUT_S)
    if kind == "layer":
        one = torch.ones(1, 1)
        return lambda x: all_gather_linear(x, one, group=group, options=options)
    if kind == "executor":
        program = parse(GATHER.format(dist.get_world_size()))
        executor = Executor(program, groups={"tp": group}, options=options)
        return lambda x: executor.prepare().run([x])[0]
    torch.compiler.reset()
    own: Any = {"timeout_s": TIMEOUT_S}
    call = torch.compile(
        lambda x: funcol.all_gather_tensor(x, 0, group) * 1, backend="interlace", options=own
    )
    return lambda x: call(x)


def steps(kind: str, fault: str, first: int, early: bool) -> list[Result]:
    """Three steps, of which rank `first` leaves one out by a fault of its own; then it resets."""
    group, me, ranks = dist.new_group(), dist.get_rank(), dist.get_world_size()
    step, found = step_of(kind, group), list[Result]()
    dist.barrier()
    if early == (me != first):
        time.sleep(0.5)
    for batch in range(3):
        x, start = torch.full((1, 1), 100.0 * batch + me), time.monotonic()
        right = [[100.0 * batch + rank] for rank in range(ranks)]
        try:
            with Failing(fault if me == first and batch == 0 else ""):
                rows = step(x).tolist()
            found.append(("right" if rows == right else "WRONG", str(rows), 0.0))
        except (interlace.InterlaceError, ValueError, KeyboardInterrupt) as error:
            taken = time.monotonic() - start
            found.append((type(error).__name__, str(error), taken))
            interlace.reset(TIMEOUT_S)
    return found


class Failing:
    """Makes this rank fail within: before the step, as it waits for others, or in set-up."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __enter__(self) -> None:
        if self.fault == "own code":
            raise ValueError("a bad batch")
        if self.fault == "interrupt":  # while it waits for the others
            self.old = signal.signal(signal.SIGALRM, self.interrupt)
            signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)  # one in a finalizer is lost
        if self.fault == "set-up":  # the others have set up their part by then
            self.patch = mock.patch.object(teams, "Control", self.late)
            self.patch.start()

    def interrupt(self, *_: object) -> None:
        raise Interrupt

    def late(self, *_: object) -> None:
        time.sleep(0.3)
        raise Interrupt

    def __exit__(self, *_: object) -> None:
        if self.fault == "interrupt":
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, self.old)
        if self.fault == "set-up":
            self.patch.stop()


CASES = [
    ("layer", "own code", True),
    ("layer", "interrupt", True),
    ("layer", "set-up", False),
    ("compiled", "own code", False),
    ("compiled", "interrupt", True),
    ("executor", "own code", False),
    ("executor", "set-up", True),
]


@pytest.mark.parametrize(("kind", "fault", "early"), CASES)
def test_a_step_that_one_rank_left_out_is_given_up_by_all(
    pool: Pool, kind: str, fault: str, early: bool, seed: int
) -> None:
    ranks = 2 + seed % 2
    first = seed % ranks
    results = pool(ranks).run(steps, kind, fault, first, early)
    for rank, found in enumerate(results):
        outcomes = [outcome for outcome, _, _ in found]
        assert outcomes[1:] == ["right", "right"], results
        assert outcomes[0] in (("ValueError", "Interrupt") if rank == first else HEARD), results
        assert rank == first or f"rank {first}" in found[0][1], found
        assert found[0][2] < 5, found


HEARD = ("PeerError", "AgreementError")
_kept: list[Any] = []


def keep_groups() -> None:
    """Process groups that were reset, and are kept although others take their place."""
    _kept.extend(dist.new_group() for _ in range(3))
    interlace.reset(TIMEOUT_S)


def steps_on_new_groups() -> list[list[list[float]]]:
    """First steps on groups that are named as those that were kept; one reset came before."""
    interlace.reset(TIMEOUT_S)
    dist.barrier()
    found: list[list[list[float]]] = []
    for _ in range(3):
        step = step_of("executor", dist.new_group())
        found.append(step(torch.full((1, 1), float(dist.get_rank()))).tolist())
    return found


def test_the_reset_of_a_group_that_is_gone_is_not_taken_for_that_of_a_new_one(pool: Pool) -> None:
    pool(3).run(keep_groups)
    assert pool(2).run(steps_on_new_groups, replace=True) == [[[[0.0], [1.0]]] * 3] * 2
