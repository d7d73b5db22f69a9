"""Messages by a backend: how their ends are awaited."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from interlace.comm.host import messages
from interlace.comm.host.signals import CHECK_EVERY_S, BoundedWait


def test_a_failure_is_heard_soon_after_a_transfer_began() -> None:
    waited = list[float]()

    def is_back(within_s: float) -> bool:
        waited.append(within_s)
        time.sleep(within_s)
        return False

    call, failed = SimpleNamespace(is_back=is_back), mock.Mock(side_effect=InterruptedError)
    parts: Any = [SimpleNamespace(works=[None])]
    with mock.patch.object(messages, "_ends", return_value=call), pytest.raises(InterruptedError):
        messages._end(parts, BoundedWait(20.0, str, failed))
    assert sum(waited) < 4 * CHECK_EVERY_S
