"""A process that was forked from a rank: what it may not do is an error there, and the rank and its
peers notice nothing of it."""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.runtime.programs import Outcome, attempt, inputs_of, prepared, program_of, world_group
from tests.runtime.test_caller import TWO_STREAMS
from tests.support.pool import Pool

import interlace
from interlace.comm import team_of
from interlace.frontend.teams import consent_of_ranks
from interlace.ir import parse
from interlace.nn.functional import all_gather_linear
from interlace.runtime import Executor


def in_a_child(acts: dict[str, Callable[[], object]]) -> dict[str, Outcome]:
    """The outcome of each act in a forked process, which then ends as scripts do."""
    here, there = os.pipe()
    child = os.fork()
    if child:
        os.close(there)
        with os.fdopen(here) as answer:
            told = answer.read()
        os.waitpid(child, 0)
        return {name: tuple(outcome) for name, outcome in json.loads(told).items()}
    signal.alarm(30)
    try:
        found: dict[str, Any] = {name: attempt(act) for name, act in acts.items()}
        acts.clear()
        gc.collect()
        atexit._run_exitfuncs()  # what gives back the Executors that are left
        os.write(there, json.dumps(found).encode())
    finally:
        os._exit(0)


def fork_amid_runs(kind: str, seed: int) -> tuple[dict[str, Outcome], list[bool]]:
    """Rank 0 forks while all ranks run, and the child does all that reaches other ranks."""
    executor = prepared(kind, timeout_s=20.0)
    alone = Executor(parse(TWO_STREAMS)).prepare()
    square = alone.run([torch.eye(4)])[0]
    inputs = inputs_of(executor.program, dist.get_rank(), seed)
    (wanted,) = executor.run(inputs)
    found: dict[str, Outcome] = {}
    pair: Any = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        other = Executor(program_of("put", 2), groups={"tp": world_group()})
        unused = Executor(program_of("put", 2), groups={"tp": pair})
        acts: dict[str, Callable[[], object]] = {
            "run": lambda: executor.run(inputs),
            "reset of one": executor.reset,
            "reset": interlace.reset,
            "prepare": other.prepare,
            "prepare on an unused group": unused.prepare,
            "another team": lambda: team_of(pair, "tp"),
            "consent": lambda: consent_of_ranks(["a"], [(world_group(), True)], 20.0),
            "layer": lambda: all_gather_linear(
                torch.ones(1, 2), torch.ones(2, 2), group=world_group()
            ),
            "release": interlace.release,
            "run without a team": lambda: torch.equal(alone.run([torch.eye(4)])[0], square),
        }
        found = in_a_child(acts)
    equal = [torch.equal(executor.run(inputs)[0], wanted) for _ in range(20)]
    interlace.reset()
    equal += [torch.equal(executor.run(inputs)[0], wanted) for _ in range(20)]
    equal.append(
        bool(prepared("slots", timeout_s=20.0).run(inputs_of(program_of("slots", 2), 0, 1)))
    )
    executor.close()
    return found, equal


@pytest.mark.parametrize("kind", ["get", "shift"])
def test_a_forked_child_cannot_take_its_parents_place(pool: Pool, kind: str, seed: int) -> None:
    (found, equal), (_, peers) = pool(2).run(fork_amid_runs, kind, seed)
    assert found.pop("run without a team")[:2] == ("result", "True")
    for what, (error, text, seconds) in found.items():
        assert error == "TeamError", (what, error, text)
        assert "was forked from a rank" in text
        assert seconds < 5
    assert all(equal)
    assert all(peers)


def child_of_multiprocessing(seed: int) -> tuple[int | None, bool]:
    """A child as DataLoader starts one: it inherits Executors, and ends without a word."""
    executor = prepared("shift", timeout_s=20.0)
    inputs = inputs_of(executor.program, dist.get_rank(), seed)
    (wanted,) = executor.run(inputs)
    child: Any = multiprocessing.get_context("fork").Process(target=gc.collect, daemon=False)
    if dist.get_rank() == 0:
        multiprocessing.current_process()._config["daemon"] = False  # pyright: ignore
        child.start()
        child.join(20)
    equal = torch.equal(executor.run(inputs)[0], wanted)
    executor.close()
    return child.exitcode if dist.get_rank() == 0 else 0, equal


def test_a_child_that_uses_nothing_is_no_trouble(pool: Pool, seed: int) -> None:
    assert pool(2).run(child_of_multiprocessing, seed) == [(0, True)] * 2
