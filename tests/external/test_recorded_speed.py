"""How long a large recorded run takes, in seconds of one core."""

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


def test_64_ranks(tmp_path: Path) -> None:
    """The fastest of three: what runs beside takes caches as well."""
    assert min(seconds(large(64, 100), tmp_path) for _ in range(3)) < LIMIT_S / 20


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_64_ranks_with_full_buffers(tmp_path: Path) -> None:
    assert seconds(large(64, 2000), tmp_path) < LIMIT_S
