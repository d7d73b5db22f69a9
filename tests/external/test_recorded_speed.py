"""How the time that a recorded run takes grows with its records, and how long a large one takes, in
seconds of one core."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.external.recorded_runs import Run

import interlace

LIMIT_S = 10.0
"""For 64 ranks with 2,000 records each."""


def large(world: int, count: int) -> Run:
    """Half of the calls in the default group, half in groups of eight; rank 5 stops early, and the
    others go on, far ahead."""
    run = Run(world)
    groups = [run.group(f"tp{k}", range(k, k + 8), "tp") for k in range(0, world, 8)]
    for k in range(count // 2):
        for rank in range(world):
            if rank != 5 or k < 4:
                run.call(rank, "all_reduce", [k + 1], line=7)
                run.call(rank, "all_gather", [k + 1], groups[rank // 8], out=[8 * (k + 1)], line=9)
    return run


def seconds(run: Run, folder: Path) -> float:
    run.write(folder)
    check = interlace.check_recorded  # imports what it needs
    began = time.process_time()
    report = check(folder)
    took = time.process_time() - began
    missing = [one.missing for one in report.findings]
    assert missing == [(5,), (5,)], report
    return took


def test_time_grows_with_the_number_of_records(tmp_path: Path) -> None:
    """Eight times as many take less than 24 times as long: if each were compared with all others,
    it would be 64 times. Both sizes in turn, on whatever machine; the fastest of three."""
    runs = {count: tmp_path / str(count) for count in (25, 200)}
    for folder in runs.values():
        folder.mkdir()
    took = [{count: seconds(large(64, count), runs[count]) for count in runs} for _ in range(3)]
    few, many = (min(each[count] for each in took) for count in runs)
    assert many < 24 * few, took


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_64_ranks_with_full_buffers(tmp_path: Path) -> None:
    assert seconds(large(64, 2000), tmp_path) < LIMIT_S
