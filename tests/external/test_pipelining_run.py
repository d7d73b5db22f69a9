"""What `check_pipelining` says of a schedule is what happens when torch runs it on gloo.

gloo has a queue for each pair and direction, and its tags are all 0: model `direction`. A schedule
that is sound there gives the gradients of one process; one that exchanges messages gives others
without an error; one whose runtime refuses an action raises.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.external.pipelining_runs import REFUSED, Configuration, run_pipeline
from tests.external.pipelining_schedules import make, tokens
from tests.support.pool import Died, Pool

from interlace import check_pipelining

CLOSE = 1e-5
"""Relative error of gradients that differ by rounding alone."""
FAR = 0.05


def reordered(rows: list[list[str]], rank: int, listed: tuple[str, ...]) -> list[list[str]]:
    """The tokens of a rank in the order listed, all at the place of the first that came."""
    rows = [list(row) for row in rows]
    first = min(rows[rank].index(token) for token in listed)
    rest = [token for token in rows[rank] if token not in listed]
    rows[rank] = [*rest[:first], *listed, *rest[first:]]
    return rows


def agree(
    pool: Pool,
    seed: int,
    configuration: Configuration,
    sound: bool,
    rows: list[list[str]] | None = None,
    folder: Path | None = None,
    refused: bool = False,
) -> list[float | Died]:
    """Checks and runs a schedule; both say `sound`, and it dies if it is `refused`."""
    if rows is not None:
        assert folder is not None
        path = folder / "schedule.csv"
        path.write_text("\n".join(map(",".join, rows)) + "\n")
        configuration = Configuration(
            configuration.name, configuration.ranks, configuration.microbatches, csv=str(path)
        )
        report = check_pipelining(path)
    else:
        report = check_pipelining(
            make(
                configuration.name,
                configuration.ranks,
                configuration.microbatches,
                configuration.defer,
            )
        )
    assert report.verdicts["direction"] == sound, report
    dying = range(configuration.ranks) if refused else ()
    errors = pool(configuration.ranks).run(
        run_pipeline, configuration, seed, timeout_s=120, may_die=dying
    )
    print(f"{configuration}: {errors}")
    assert (Died(REFUSED) in errors) == refused, errors
    right = all(isinstance(error, float) and error < CLOSE for error in errors)
    assert right == sound, errors
    return errors


def test_a_right_and_a_wrong_schedule(pool: Pool, seed: int) -> None:
    agree(pool, seed, Configuration("ZBVZeroBubble", 2, 4), True)
    errors = agree(pool, seed, Configuration("ZBVZeroBubble", 2, 4, defer=True), False)
    assert all(isinstance(error, float) and error > FAR for error in errors), "it is silent"


RUNS = {
    ("Interleaved1F1B", 2, 4, False): True,
    ("Interleaved1F1B", 2, 4, True): True,
    ("LoopedBFS", 2, 4, False): True,
    ("LoopedBFS", 2, 4, True): True,
    ("InterleavedZeroBubble", 2, 4, False): True,
    ("InterleavedZeroBubble", 2, 4, True): False,
    ("InterleavedZeroBubble", 3, 6, True): True,
    ("DualPipeV", 2, 4, False): True,
    ("DualPipeV", 2, 4, True): True,
    ("DualPipeV", 3, 6, True): False,
    ("ZBVZeroBubble", 3, 6, True): False,
}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "microbatches", "defer"), RUNS)
def test_schedules_of_torch(
    pool: Pool, seed: int, name: str, ranks: int, microbatches: int, defer: bool
) -> None:
    sound = RUNS[name, ranks, microbatches, defer]
    agree(pool, seed, Configuration(name, ranks, microbatches, defer), sound)


FILES = {
    "as it was": (0, ("0F0",), True, False),
    "gradients crossed": (0, ("0RECV_B2", "0RECV_B3"), False, False),
    "activations crossed": (1, ("1RECV_F3", "1RECV_F2"), False, False),
    "losses out of order": (1, ("3RECV_F2", "3RECV_F3", "3F3", "3F2"), False, True),
    "in order all the same": (1, ("3RECV_F2", "3RECV_F3", "3F2", "3F3"), True, False),
    "forward before its receive": (1, ("1F2", "1RECV_F2"), False, True),
}
"""A rank, tokens in another order, whether that is right, and whether torch's runtime raises."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_files_with_tokens_in_another_order(
    pool: Pool, seed: int, tmp_path: Path, name: str
) -> None:
    rank, listed, sound, refused = FILES[name]
    rows = reordered(tokens(make("LoopedBFS", 2, 4)), rank, listed)
    configuration = Configuration("LoopedBFS", 2, 4)
    agree(pool, seed, configuration, sound, rows, tmp_path, refused)
