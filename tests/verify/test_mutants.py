"""Schedules of the passes with one fault each: what is unsound is flagged, what is sound is so.

And texts changed at random: whatever comes of it, parsing and checking end with an answer.

python -m tests.verify.test_mutants 20000        # as many as one has patience for
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

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

from interlace.errors import InterlaceError
from interlace.ir import Program, parse, parse_set
from interlace.options import Options
from interlace.runtime import Executor
from interlace.verify import check

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
WORD = re.compile(r"\w+|[^\w\s]")


def texts() -> list[list[str]]:
    """The lines of each schedule of the tests."""
    found: list[list[str]] = []
    for path in sorted(GOLDEN.rglob("*.ilc")):
        parts = re.split(r"(?m)^(?=def )", path.read_text())
        found += [part.splitlines() for part in parts if part.startswith("def ")]
    return found


def mutant(draw: random.Random, sources: list[list[str]]) -> str:
    """A schedule with a few lines or words left out, doubled, moved, or taken from another."""
    lines = list(draw.choice(sources))
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(lines))
        kind = draw.random()
        if kind < 0.15 and len(lines) > 2:
            del lines[at]
        elif kind < 0.3:
            lines.insert(at, draw.choice(lines))
        elif kind < 0.4:
            lines.insert(draw.randrange(1, len(lines) + 1), draw.choice(draw.choice(sources)[1:]))
        elif kind < 0.5:
            lines.insert(draw.randrange(len(lines)), lines.pop(at))
        elif words := [*WORD.finditer(lines[at])]:
            other = draw.choice(WORD.findall("\n".join(draw.choice(sources))))
            new = draw.choice(
                ("", "0", "-1", "99999999999", "tp.rank", "()", "[0:0]", other, other)
            )
            word = draw.choice(words)
            lines[at] = lines[at][: word.start()] + new + lines[at][word.end() :]
    return "\n".join(lines) + "\n"


def run(seed: int, count: int) -> dict[str, int]:
    """Counts the texts that were refused, found unsound and found sound."""
    draw, sources = random.Random(seed), texts()
    met = {"refused": 0, "unsound": 0, "sound": 0}
    for _ in range(count):
        text = mutant(draw, sources)
        try:
            report = check(parse_set(text))
            told = str(report)
        except InterlaceError:
            met["refused"] += 1
        except Exception as error:
            raise AssertionError(f"{error!r} for\n{text}") from error
        else:
            assert report.sound == told.startswith("sound"), text
            met["sound" if report.sound else "unsound"] += 1
    return met


@pytest.mark.timeout(300)
def test_texts_changed_at_random(seed: int) -> None:
    met = run(seed, 150)
    assert min(met.values()) >= 3, met


# Schedules with one fault

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
    options, jitter = Options(time_out_s=20), Jitter(seed + rank)
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


if __name__ == "__main__":
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    print(run(seed, int(sys.argv[1])))
