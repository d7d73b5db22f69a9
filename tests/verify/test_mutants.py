"""Schedules of the passes with one fault each: what is unsound is flagged, what is sound is so."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from tests.runtime.programs import world_group
from tests.runtime.test_concurrency import Jitter
from tests.support.pool import Pool
from tests.verify.mutants import (
    STRATEGIES,
    Sweep,
    inputs_of,
    mutants,
    outcome,
    same,
    schedule,
    schedules,
)

from interlace.ir import Program, parse
from interlace.options import Options
from interlace.runtime import Executor

WORLDS = (2, 3, 4, 5, 6, 7, 8)
SORTS = ("drop", "swap", "early free", "stream", "peer", "epoch", "slice", "dtype", "count", "team")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Matmuls of a few rows, of which each would wake the threads of all cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_every_strategy_has_its_schedules() -> None:
    found = schedules((2, 4))
    assert {way for _, way, _ in found} == {*STRATEGIES}
    assert {kind for kind, _, _ in found} == {"gather", "scatter", "reduce", "dispatch", "combine"}


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("one_thread")
def test_some_schedules_with_one_fault(
    seed: int, record_property: Callable[[str, object], None]
) -> None:
    sweep, draw = Sweep(seed), random.Random(seed)
    cases = [
        (kind, way, draw.choice(WORLDS)) for kind in ("gather", "reduce") for way in STRATEGIES
    ]
    for one in [*cases, ("dispatch", "ring", 3), ("combine", "peer-put", 4)]:
        if schedule(*one) is not None:
            sweep.visit(one, 5)
    record_property("fuzz", str(sweep))
    assert not sweep.wrong, "\n\n".join(sweep.wrong)
    assert sweep.of("flagged") >= 25, sweep
    assert sweep.of("equal") >= 5, sweep


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("world", WORLDS)
def test_all_schedules_with_one_fault(
    world: int, seed: int, record_property: Callable[[str, object], None]
) -> None:
    """All mutants of two ranks; of more, a part of each schedule's."""
    sweep = Sweep(seed)
    for one in schedules([world]):
        sweep.visit(one, None if world == 2 else 40)
    record_property("fuzz", str(sweep))
    assert not sweep.wrong, "\n\n".join(sweep.wrong)
    for sort in SORTS:
        if sort != "team" or (world > 2 and world % 2 == 0):  # else there is no other team
            assert sweep.of(sort, "flagged") >= 3, (sort, sweep.counts)


def run_with_delays(text: str, serial: str, seed: int) -> str:
    """Compares a rank's results with delays with those of the serial schedule."""
    rank, groups = dist.get_rank(), {"tp": world_group()}
    options, jitter = Options(timeout_s=20), Jitter(seed + rank)
    jitter.on = True
    with (
        Executor(
            parse(text), groups=groups, options=options, before_op=jitter
        ).prepare() as executor,
        Executor(parse(serial), groups=groups, options=options).prepare() as twin,
    ):
        inputs = inputs_of(parse(serial), seed)[rank]
        wanted = [twin.run(inputs)]
        found = [executor.run(inputs) for _ in range(6)]
        if not all(same(found[:1], [other]) for other in found):
            return "runs differ"
        return "equal" if same(found[:1], wanted) else "another function"


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("way", ["pipeline", "ring", "peer-put"])
def test_what_is_called_sound_runs_with_delays(way: str, pool: Pool, seed: int) -> None:
    made, draw = schedule("reduce", way, 2), random.Random(seed)
    assert made is not None
    makers, tried = [*mutants(made)], 0
    draw.shuffle(makers)
    for make in makers:
        mutant = make()
        if mutant is None or len(mutant.programs) > 1 or mutant.sort in ("dtype", "team"):
            continue
        expected = outcome(mutant, seed)
        if expected.said in ("equal", "another function"):
            program: Program = next(iter(mutant.programs))
            found = pool(2).run(run_with_delays, str(program), str(made.serial), seed)
            assert {*found} <= {expected.said, "equal"}, f"{found}, {expected}: {mutant}"
            assert expected.said in found, f"{found}, {expected}: {mutant}"
            tried += 1
        if tried == 3:
            return
    raise AssertionError(f"only {tried} mutants are sound")
