"""What a team does with its words on a device when a run failed."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from interlace.comm.cuda.side import CudaSide
from interlace.errors import BackendError, CommTimeoutError


def side_of(log: list[str]) -> Any:
    """As much of a side as `reset` and `release` need."""
    return SimpleNamespace(
        team=SimpleNamespace(rank=1),
        me=1,
        size=2,
        generation=3,
        _ended=8,
        _lock=contextlib.nullcontext(),
        heap=SimpleNamespace(memory=None, address=lambda member, word: 1000 * member + word),
        access=SimpleNamespace(rest=lambda *_: log.append("rest")),
        areas=[],
        spaces=[],
    )


def test_words_count_anew_once_nothing_may_write_them() -> None:
    """A write that was given up, and comes late, lets go of what waits."""
    log: list[str] = []

    def fill(address: int, value: int, count: int) -> None:
        log.append(f"fill {address} {value} {count}")

    side = side_of(log)
    side.driver = SimpleNamespace(fill=fill)
    CudaSide.reset(side)
    assert log == ["rest", "fill 1008 0 2"]
    assert (side.generation, side.run, side.closed) == (4, 0, 0)


def test_all_that_waits_is_let_go_also_behind_what_fails() -> None:
    log: list[str] = []

    def release(name: str, error: bool) -> Any:
        def act(*_: Any) -> None:
            log.append(name)
            if error:
                raise BackendError(f"{name} failed")

        return act

    side = side_of(log)
    side.run = 17
    side.access.fill = release("ended", error=True)
    side.spaces = [SimpleNamespace(release=release("space", error=True))]
    side.areas = [SimpleNamespace(stop=release("area", error=False))]
    CudaSide.release(side, 2)
    assert log == []
    with pytest.raises(BackendError, match="failed"):
        CudaSide.release(side, 3)
    assert sorted(log) == ["area", "ended", "space"]
    side.last, side.driver = (1, 5), SimpleNamespace(done=lambda _: log.count("space") > 4)
    side.release = lambda generation: CudaSide.release(side, generation)
    CudaSide.drain(side, 20.0)  # again and again
    side.driver = SimpleNamespace(done=lambda _: False)
    with pytest.raises(CommTimeoutError, match=r"rank 1 is not done 0\.05 s .* \(.* failed\)"):
        CudaSide.drain(side, 0.05)
