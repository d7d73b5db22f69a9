"""What a team shares on its devices goes when all ranks have let go of it, and not before."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from interlace.comm.cuda.side import CudaSide
from interlace.errors import AgreementError, BackendError, CommTimeoutError


class Block:
    """Device memory that says what is done with it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def unmap(self) -> None:
        self.log.append(f"unmap {self.name}")

    def free(self) -> None:
        self.log.append(f"free {self.name}")


def side_of(log: list[str], meets: Exception | None, rests: Exception | None = None) -> Any:
    """As much of a side as `close` needs."""

    def act(what: str, error: Exception | None) -> None:
        log.append(what)
        if error is not None:
            raise error

    board = SimpleNamespace(exchange=lambda *_: act("meet", meets))
    return SimpleNamespace(
        team=SimpleNamespace(topic="tp/0", ranks=(0, 1), rank=1, board=board),
        me=1,
        device=torch.device("cuda"),
        slots=SimpleNamespace(blocks=lambda: [Block("slots", log)]),
        areas=[SimpleNamespace(memory=Block("area", log))],
        heap=SimpleNamespace(memory=Block("words", log)),
        access=SimpleNamespace(rest=lambda *_: act("rest", rests)),
        driver=None,
    )


@pytest.fixture(autouse=True)
def _no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())


def test_memory_goes_once_no_rank_maps_it() -> None:
    log: list[str] = []
    CudaSide.close(side_of(log, None), 1.0)
    unmapped, freed = (
        [f"{what} {name}" for name in ("slots", "area", "words")] for what in ("unmap", "free")
    )
    assert log == ["rest", *unmapped, "meet", *freed]


def test_memory_stays_where_a_rank_does_not_come() -> None:
    log: list[str] = []
    with pytest.raises(AgreementError, match="rank 0 did not come"):
        CudaSide.close(side_of(log, AgreementError("rank 0 did not come")), 1.0)
    assert log[-1] == "meet"


def test_memory_stays_where_it_may_still_be_written() -> None:
    log: list[str] = []
    with pytest.raises(CommTimeoutError, match="has not returned"):
        CudaSide.close(side_of(log, None, CommTimeoutError("has not returned")), 1.0)
    assert log == ["rest"]


def test_words_count_anew_once_nothing_may_write_them() -> None:
    """A write that was given up, and comes late, lets go of what waits."""
    log: list[str] = []

    def fill(address: int, value: int, count: int) -> None:
        log.append(f"fill {address} {value} {count}")

    side = side_of(log, None)
    side.driver, side.size, side._ended = SimpleNamespace(fill=fill), 2, 8
    side.heap.address = lambda member, word: 1000 * member + word
    side._lock, side.generation, side.spaces = contextlib.nullcontext(), 3, set()
    side.areas, side.registry = [], SimpleNamespace(trim=lambda _: None)
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

    side = side_of(log, None)
    side.generation, side._ended, side.size, side.run = 3, 8, 2, 17
    side._lock = contextlib.nullcontext()
    side.heap.address = lambda member, word: 1000 * member + word
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
