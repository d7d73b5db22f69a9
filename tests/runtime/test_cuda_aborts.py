"""When NCCL's communicators are aborted: after a failure, when no thread is in a call of theirs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
from tests.runtime.cuda_sites import bound, logs_of, program, tensors
from tests.support.fake_cuda import Fake, fake_engine

from interlace.comm.backends import end
from interlace.comm.cuda import aborts as aborts_file
from interlace.comm.cuda.aborts import abort, all_ended
from interlace.errors import PeerError, TeamError
from interlace.ir import Send
from interlace.runtime.cuda import watchdog as watchdog_file
from interlace.runtime.cuda.transfers import messages

PROBLEM = PeerError("a peer stopped")


class Nccl:
    """A backend whose abort may stand still until it is let go."""

    def __init__(self, stands_still: bool = False) -> None:
        self.begun, self._go = threading.Event(), threading.Event()
        if not stands_still:
            self._go.set()

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        self.begun.set()
        assert self._go.wait(10)

    def let_go(self) -> None:
        self._go.set()


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aborts_file, "relax_captures", lambda: None)


@contextlib.contextmanager
def under_way(*fakes: Fake) -> Iterator[Nccl]:
    """The engines share a backend, each in a run that does not end; the watchdog knows them."""
    backend = Nccl()
    known = mock.Mock(all=lambda: [fake.engine.watched for fake in fakes])
    with mock.patch.object(watchdog_file, "watchdog", return_value=known):
        for fake in fakes:
            fake.driver.done = lambda event: False
            fake.engine.watched._backends = [backend]
            logs_of(fake, "gather", 1)
        yield backend


def aborted(fake: Fake, backend: Nccl) -> bool:
    """Whether a look of the watchdog begins the abort."""
    fake.engine.watched.look()
    return backend.begun.wait(5) if fake.engine.watched._aborts else backend.begun.is_set()


def test_an_abort_waits_until_the_run_is_issued() -> None:
    with bound("gather", "put") as fake, under_way(fake) as backend:
        watched = fake.engine.watched
        watched.issuing = True
        watched.fail(PROBLEM)
        assert not aborted(fake, backend)
        watched.issuing = False
        assert aborted(fake, backend)
        begun = watched._aborts
        watched.look()
        assert watched._aborts is begun, "once"


def test_an_abort_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that issues may be held up by what only the abort ends."""
    with bound("gather", "put") as fake, under_way(fake) as backend:
        fake.engine.watched.issuing = True
        fake.engine.watched.fail(PROBLEM)
        assert not aborted(fake, backend)
        monkeypatch.setattr(watchdog_file, "PATIENCE_S", 0.0)
        assert aborted(fake, backend)


def test_nothing_is_aborted_where_all_has_ended_or_nothing_failed() -> None:
    with bound("gather", "put") as fake, under_way(fake) as backend:
        assert not aborted(fake, backend)
        fake.driver.done = lambda event: True
        fake.engine.watched.fail(PROBLEM)
        assert not aborted(fake, backend)


def test_all_who_use_a_communicator_know_before_it_is_aborted() -> None:
    """Else one that has not heard yet issues an op with it, which never ends."""
    with (
        bound("gather", "put") as one,
        fake_engine(program("gather", "put"), 1, beside=one) as other,
        under_way(one, other) as backend,
    ):
        other.engine.watched.issuing = True
        one.engine.watched.fail(PROBLEM)
        assert not aborted(one, backend)
        assert other.engine.failure is PROBLEM
        other.engine.watched.issuing = False
        assert aborted(one, backend)


def test_no_run_begins_once_there_is_a_failure() -> None:
    """Though the Executor saw none yet when it last looked."""
    with bound("gather", "put") as fake:
        logs_of(fake, "gather", 1)
        assert fake.runner.ready
        fake.engine.watched.fail(PROBLEM)
        inputs, out = tensors("gather")
        with pytest.raises(PeerError, match="a peer stopped"):
            fake.run(inputs, out)
        assert fake.log == []
        assert not fake.engine.watched.issuing
        assert fake.engine.entered == fake.engine.issued == 1


def test_a_thread_is_issuing_from_before_the_first_op_to_after_the_last() -> None:
    with bound("gather", "put") as fake:
        seen: list[bool] = []
        steps = fake.engine.binding.steps
        note = lambda: seen.append(fake.engine.watched.issuing)  # noqa: E731
        steps[:] = [note, *steps, note]
        assert not fake.engine.watched.issuing
        logs_of(fake, "gather", 1)
        assert seen == [True, True]
        assert not fake.engine.watched.issuing


def test_no_message_is_issued_once_there_is_a_failure() -> None:
    op = mock.Mock(spec=Send, team="tp", peer=mock.Mock(), src=mock.Mock())
    binder, backend = mock.MagicMock(), mock.Mock()
    binder.plan.letters.__getitem__.return_value.backend = "nccl"
    binder.crew.backends.__getitem__.return_value = backend
    binder.links.check.side_effect = PROBLEM
    lane: Any = mock.Mock(within=lambda run: run)
    with pytest.raises(PeerError):
        messages(binder, lane, 0, (op,))()
    assert backend.mock_calls == []


def test_graphs_of_all_engines_go_before_an_abort_is_waited_for() -> None:
    """NCCL's abort waits for the graphs that its ops were captured in."""
    with (
        bound("gather", "put") as one,
        fake_engine(program("gather", "put"), 1, beside=one) as other,
        under_way(one, other) as backend,
    ):
        still = Nccl(stands_still=True)
        for fake in (one, other):
            fake.engine.watched._backends = [backend, still]
        graphs = mock.Mock()
        graphs.drop.side_effect = still.let_go
        other.engine.graphs = graphs
        one.engine.watched.fail(PROBLEM)
        assert aborted(one, backend)
        assert not one.engine.watched._aborted()
        graphs.drop.assert_not_called()  # its run is still under way
        one.driver.done = lambda event: True
        start = time.monotonic()
        one.engine.watched.settle()
        assert time.monotonic() - start < 3
        graphs.drop.assert_called()
        assert one.engine.watched._aborted()


def test_a_reset_of_the_team_mends_all_its_engines() -> None:
    """Also one that has not run since, and so is not bound anew: nothing of it is under way."""
    with bound("gather", "put") as fake:
        fake.driver.done = lambda event: True
        logs_of(fake, "gather", 1)
        fake.engine.watched.fail(PROBLEM)
        with pytest.raises(PeerError, match="a peer stopped"):
            fake.engine.synchronize()
        (team,) = fake.engine.context.crew.teams.values()
        team.resets += 1
        fake.engine.synchronize()


def test_aborts_go_on_side_by_side() -> None:
    """One may only end once another has: memory is freed when the whole device stands still."""
    still, other = Nccl(stands_still=True), Nccl()
    begun = abort([still, other])
    assert other.begun.wait(5)
    start = time.monotonic()
    assert not all_ended(begun, 0.1)
    assert time.monotonic() - start < 2
    still.let_go()
    assert all_ended(begun, 5)


def test_an_end_that_stands_still_is_an_error() -> None:
    still = Nccl(stands_still=True)
    gloo = mock.Mock(**{"name.return_value": "gloo"})
    made: list[Any] = [gloo, still]
    with pytest.raises(TeamError, match=r"did not end the connections of team tp on rank 0 within"):
        end(made, 0.05, "team tp on rank 0")
    assert made == []
    still.let_go()
    gloo.abort.assert_not_called()
    end([Nccl(), gloo], 5, "team tp on rank 0")
    end([], 5, "team tp on rank 0")
