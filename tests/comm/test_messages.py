"""A transfer that one side starts is started by the other too, whatever fails in between."""

from __future__ import annotations

import random
import threading
import time
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from interlace.comm.host import messages
from interlace.comm.host.messages import Transfer
from interlace.comm.host.signals import CHECK_EVERY_S, BoundedWait
from interlace.comm.host.workspace import MessageBox


class Gates:
    """Lets one of several threads take one step at a time, in an order drawn from `rng`."""

    def __init__(self, rng: random.Random, names: list[str]) -> None:
        self._rng, self._left = rng, set(names)
        self._waiting: dict[str, threading.Event] = {}
        self._changed = threading.Condition()

    def step(self) -> None:
        """Called by a thread before each of its accesses."""
        event = threading.Event()
        with self._changed:
            self._waiting[threading.current_thread().name] = event
            self._changed.notify_all()
        assert event.wait(20)

    def over(self) -> None:
        """Called by a thread at its end."""
        with self._changed:
            self._left.discard(threading.current_thread().name)
            self._changed.notify_all()

    def run(self) -> None:
        """Lets steps go until all threads have ended."""
        while True:
            with self._changed:
                assert self._changed.wait_for(lambda: self._left <= {*self._waiting}, 20)
                if not self._left:
                    return
                chosen = self._waiting.pop(self._rng.choice(sorted(self._waiting)))
            chosen.set()


class Cells(list[int]):
    """The cells of both sides; each access waits for its turn."""

    def __init__(self, gates: Gates) -> None:
        super().__init__([0, 0])
        self._gates = gates

    def __getitem__(self, at: Any) -> Any:
        self._gates.step()
        return super().__getitem__(at)

    def __setitem__(self, at: Any, value: Any) -> None:
        self._gates.step()
        super().__setitem__(at, value)


def started_by(rng: random.Random) -> set[str]:
    """Which sides of a message start the transfer, if one leaves after a few tries, and the other
    some tries after it could have heard of that."""
    gates = Gates(rng, ["send", "recv"])
    cells: Any = Cells(gates)
    box = MessageBox((cells, 0), (cells, 1))
    started: list[str] = []

    def backend(name: str) -> Any:
        return SimpleNamespace(**{name: lambda *_: started.append(name)})

    team: Any = SimpleNamespace(control=SimpleNamespace(run=3))
    heard = threading.Event()

    def side(name: str, tries: int, after: int) -> None:
        """Leaves after so many tries, or so many after the other has left."""
        part = Transfer(team, 0, box, name == "send", backend(name))
        tensor = torch.zeros(4)
        part.begin(tensor)
        while not part.try_move(tensor):
            tries -= 1
            after -= heard.is_set()
            if tries <= 0 or after <= 0:
                heard.set()
                part.leave(tensor)
                break
        gates.over()

    first = rng.choice(["send", "recv"])
    threads = [
        threading.Thread(
            target=side,
            args=(name, rng.randint(1, 3) if name == first else 1000, rng.randint(1, 3)),
            name=name,
        )
        for name in ("send", "recv")
    ]
    for thread in threads:
        thread.start()
    gates.run()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    return set(started)


@pytest.mark.timeout(120)
def test_both_sides_go_or_neither(seed: int) -> None:
    rng = random.Random(seed)
    found = [frozenset(started_by(rng)) for _ in range(400)]
    assert set(found) == {frozenset(), frozenset({"send", "recv"})}


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
