"""Blocks of device memory that ranks share: what is given back where the set-up of one fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from interlace.comm.cuda import driver as driver_file
from interlace.comm.cuda.driver import Driver
from interlace.comm.cuda.memory import share_memory
from interlace.errors import (
    AgreementError,
    BackendError,
    CommTimeoutError,
    InterlaceError,
    PeerError,
)

OWN, THEIRS = 1000, 2000


class Blocks:
    """A driver that counts what is taken and mapped."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []

    def alloc(self, nbytes: int, timeout_s: float) -> int:
        self.log.append(("alloc", OWN))
        return OWN

    def handle(self, base: int) -> str:
        return "mine"

    def open(self, handle: str) -> int:
        if handle == "bad":
            raise BackendError("cannot be mapped")
        self.log.append(("open", THEIRS))
        return THEIRS

    def close(self, base: int) -> None:
        self.log.append(("close", base))

    def free(self, base: int) -> None:
        self.log.append(("free", base))


def log_of(*met: Any) -> list[tuple[str, int]]:
    """What rank 0 does of three whose meetings give these notes, or errors."""
    answers = iter(met)

    def exchange(*args: Any, problem: Exception | None) -> Any:
        if problem is not None:
            raise problem
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    driver: Any = Blocks()
    board: Any = SimpleNamespace(exchange=exchange, me=0)
    with pytest.raises(InterlaceError):
        share_memory(driver, board, "t", 1 << 20, 5.0)
    return driver.log


def notes(*handles: str) -> list[dict[str, Any]]:
    return [{"handle": handle} for handle in handles]


def test_what_no_peer_can_have_mapped_is_freed() -> None:
    assert log_of(BackendError("a peer has no memory")) == [
        ("alloc", OWN),
        ("free", OWN),
    ]
    late = AgreementError("rank 2 did not come, which is the verdict for all")
    assert log_of(late) == [("alloc", OWN), ("free", OWN)]
    lost = PeerError("the store does not answer; the others may have met")
    assert log_of(lost) == [("alloc", OWN)]


@pytest.mark.parametrize("mine", [True, False])
def test_what_was_mapped_is_unmapped(mine: bool) -> None:
    """And the own block stays: peers may have mapped it, and when they let go is not known."""
    good = notes("mine", "theirs", "bad" if mine else "theirs")
    opened = [("open", THEIRS)] * (1 if mine else 2)
    found = log_of(good, BackendError("a peer could not map it"))
    assert found == [("alloc", OWN), *opened, *[("close", THEIRS)] * len(opened)]


@pytest.mark.parametrize("left", [0, 1])
def test_memory_that_torch_caches_is_used_where_there_is_no_other(
    left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, freed = iter([(2, 0)] * (2 - left) + [(0, OWN)]), list[int]()
    cu = SimpleNamespace(cuMemAlloc=lambda nbytes: next(answers), cuMemFree=freed.append)
    monkeypatch.setattr(driver_file, "bindings", lambda: mock.MagicMock(**vars(cu)))
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    driver = Driver()
    monkeypatch.setattr(driver, "fill", lambda *_: None)
    if left:
        assert driver.alloc(4 << 20) == OWN
    else:
        with pytest.raises(BackendError, match="no 4 MiB of GPU memory for what peers map"):
            driver.alloc(4 << 20)
    assert emptied == [True]

    def late(*_: Any) -> None:
        raise CommTimeoutError("not done")

    monkeypatch.setattr(driver, "fill", late)
    if left:
        monkeypatch.setattr(driver._cu, "cuMemAlloc", lambda nbytes: (0, OWN))
        with pytest.raises(CommTimeoutError):
            driver.alloc(4 << 20)
        assert freed == [OWN]
