"""The first op of NCCL backends: bounded, told in words, and never left to a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from interlace.comm.cuda import nccl
from interlace.errors import AgreementError, BackendError


@pytest.fixture
def let_go(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Without a GPU; what stands still does so until this is set."""
    event = threading.Event()
    monkeypatch.setattr(nccl, "relax_captures", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    yield event
    event.set()


def meets(monkeypatch: pytest.MonkeyPatch, action: Callable[..., object]) -> Any:
    """A backend whose ranks meet so."""
    monkeypatch.setattr(nccl, "meet", action)
    return mock.Mock()


def nobody() -> set[int]:
    return set()


def nothing() -> None:
    """Nobody has given up."""


def test_ranks_that_meet_are_connected(
    let_go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    backend = meets(monkeypatch, lambda *given: seen.append((*given, threading.current_thread())))
    for device in (None, torch.device("cuda", 3)):
        nccl.join(backend, device, 5.0, "team tp on rank 0", nobody, nothing)
    assert [found[:3] for found in seen] == [
        (backend, torch.device("cuda", index), 5.0) for index in (1, 3)
    ]
    assert threading.main_thread() not in [found[3] for found in seen]
    assert not backend.abort.called


WORDS = RuntimeError("no route to host")
GIVEN_UP = AgreementError("rank 1 gave up: out of memory")
NOT_MET: dict[str, tuple[dict[str, Any], float, type[Exception], str]] = {
    "late": ({}, 0.2, BackendError, "team tp on rank 0: not all of its ranks came within"),
    "ended": (
        {"ended": lambda: {3, 2}},
        15.0,
        BackendError,
        "rank 0: the process of ranks 2 and 3 has ended",
    ),
    "gives up": (
        {"look": mock.Mock(side_effect=[None, None, GIVEN_UP])},
        15.0,
        AgreementError,
        "out of memory",
    ),
    "words": ({"meet": WORDS}, 5.0, BackendError, "team tp on rank 0: no route to host"),
}
"""What there is beside ranks that meet, the time-out, and the error."""


@pytest.mark.parametrize("how", NOT_MET)
def test_ranks_that_do_not_meet_are_an_error_and_not_waited_for(
    let_go: threading.Event, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    beside, timeout_s, error, text = NOT_MET[how]
    act = mock.Mock(side_effect=beside.get("meet", lambda *_: let_go.wait(20)))
    backend, begun = meets(monkeypatch, act), time.monotonic()
    checks = beside.get("ended", nobody), beside.get("look", nothing)
    with pytest.raises(error, match=text) as caught:
        nccl.join(backend, None, timeout_s, "team tp on rank 0", *checks)
    assert time.monotonic() - begun < 10
    assert backend.abort.called
    assert how != "words" or isinstance(caught.value.__cause__, RuntimeError)


def test_a_thread_whose_own_wait_ends_as_late_is_not_left_behind(
    let_go: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would come back while the interpreter ends, which is an abort of the process."""
    left = threading.Event()

    def wait_in_the_store(*_: object) -> None:
        let_go.wait(0.4)
        left.set()
        raise RuntimeError("wait timeout after 300ms")

    backend = meets(monkeypatch, wait_in_the_store)
    with pytest.raises(BackendError, match="not all of its ranks came within"):
        nccl.join(backend, None, 0.2, "team tp on rank 0", nobody, nothing)
    assert left.is_set()
