"""What a team shares on its devices goes when all ranks have let go of it, and not before."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from interlace.comm.cuda.side import CudaSide
from interlace.errors import AgreementError, CommTimeoutError


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
        team=SimpleNamespace(topic="tp/0", ranks=(0, 1), board=board),
        me=1,
        device=torch.device("cuda"),
        slots=SimpleNamespace(blocks=lambda: [Block("slots", log)]),
        areas=[SimpleNamespace(memory=Block("area", log))],
        heap=SimpleNamespace(memory=Block("words", log)),
        access=SimpleNamespace(rest=lambda _: act("rest", rests)),
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
