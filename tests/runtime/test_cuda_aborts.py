"""When NCCL's communicators are aborted: after a failure, when no thread is in a call of theirs."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.runtime.cuda_sites import bound, logs_of, program, tensors
from tests.support.fake_cuda import Fake, fake_engine

from interlace.comm import Spec, TeamComm, release_teams, team_of
from interlace.comm import backends as connections_file
from interlace.comm.backends import end
from interlace.comm.cuda import nccl
from interlace.comm.cuda import side as side_file
from interlace.comm.cuda.nccl import abort, all_ended, bind_messages, bind_on_stream
from interlace.errors import (
    BackendError,
    CommTimeoutError,
    PeerError,
    TeamError,
    UnsupportedError,
)
from interlace.ir import Collective, Send, View
from interlace.runtime.cuda.launches import transfers as transfers_file
from interlace.runtime.cuda.launches.transfers import collective, messages
from interlace.runtime.cuda.waits import watchdog as watchdog_file
from interlace.runtime.cuda.waits.watchdog import Watched

PROBLEM = PeerError("a peer stopped")


class Nccl:
    """A backend whose abort may stand still until it is let go."""

    def __init__(self, stands_still: bool = False) -> None:
        self.begun, self._go, self.aborts = threading.Event(), threading.Event(), 0
        self.joined = threading.Event()
        if not stands_still:
            self._go.set()

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        self.aborts += 1
        self.begun.set()
        assert self._go.wait(10)

    def let_go(self) -> None:
        self._go.set()

    def stand_still(self) -> None:
        self._go.clear()


@contextlib.contextmanager
def under_way(*fakes: Fake) -> Iterator[Nccl]:
    """The engines share a backend, each in a run that does not end; the watchdog knows them."""
    backend = Nccl()
    known = mock.Mock(all=lambda: [fake.engine.watched for fake in fakes])
    with mock.patch.object(watchdog_file, "watchdog", return_value=known):
        for fake in fakes:
            fake.driver.done = lambda event: False
            fake.engine.context.resources.backends["tp", "nccl"] = backend
            logs_of(fake, "gather", 1)
        yield backend


def aborted(fake: Fake, backend: Nccl) -> bool:
    """Whether a look of the watchdog begins the abort."""
    fake.engine.watched.look()
    return backend.begun.wait(0.3)


def test_an_abort_waits_until_the_run_is_issued() -> None:
    with bound("gather", "put") as fake, under_way(fake) as backend:
        watched = fake.engine.watched
        watched.issuing = True
        watched.fail(PROBLEM)
        assert not aborted(fake, backend)
        watched.issuing = False
        assert aborted(fake, backend)
        watched.look()
        time.sleep(0.05)
        assert backend.aborts == 1


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
        inputs, out = tensors("gather")
        assert fake.engine.admit(inputs, out)
        fake.engine.watched.fail(PROBLEM)
        assert fake.run(inputs, out) is None  # so the Executor looks
        with pytest.raises(PeerError, match="a peer stopped"):
            fake.engine.issue(inputs, out)
        assert fake.log == []
        assert not fake.engine.watched.issuing
        assert fake.engine.entered == fake.engine.issued == 1


def test_a_failure_is_looked_for_once_the_thread_is_known_to_be_issuing() -> None:
    """The other way round, a failure and its abort could come between the two."""
    with bound("gather", "put") as fake:
        team, seen = next(iter(fake.engine.context.resources.teams.values())), list[bool]()

        def enter(*_: Any) -> None:
            seen.append(fake.engine.watched.issuing)
            fake.engine.watched.fail(PROBLEM)

        with mock.patch.object(team.control, "enter", enter), pytest.raises(PeerError) as found:
            logs_of(fake, "gather", 1)
        assert found.value is PROBLEM
        assert seen == [True]
        assert not fake.log


def test_an_abort_is_begun_though_streams_cannot_be_let_go() -> None:
    with bound("gather", "put") as fake, under_way(fake) as backend:
        fake.engine.watched.fail(PROBLEM)
        fake.engine.release = mock.Mock(side_effect=CommTimeoutError("no processor is free"))
        with pytest.raises(CommTimeoutError):
            fake.engine.watched.look()
        assert backend.begun.wait(5)


@pytest.mark.parametrize("captures", [False, True])
def test_a_thread_that_is_held_up_is_let_go(
    captures: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what only the abort ends, in a run or in a capture, of which no run has begun yet."""
    with bound("gather", "put") as fake, under_way(fake) as backend:
        fake.driver.done = lambda event: captures
        fake.engine.watched.issuing = True
        fake.engine.watched.fail(PROBLEM)
        assert not aborted(fake, backend)
        monkeypatch.setattr(watchdog_file, "PATIENCE_S", 0.0)
        assert aborted(fake, backend)


def test_the_garbage_collector_may_come_by_at_any_moment() -> None:
    """An Executor that goes in the midst of a look is dropped without a lock."""
    with bound("gather", "put") as fake:
        dog, watched = watchdog_file.Watchdog(), fake.engine.watched
        dog.add(watched)
        assert dog.all() == [watched]
        dog.drop(watched)
        dog.drop(watched)
        assert dog.all() == []
        dog.add(watched)
        other = Watched(fake.engine, fake.engine.context)
        dog.add(other)
        del other
        gc.collect()
        assert dog.all() == [watched]


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


@pytest.mark.parametrize("bind", [messages, collective])
def test_no_op_of_nccl_is_issued_once_there_is_a_failure(bind: Any) -> None:
    binder, backend = mock.MagicMock(), mock.Mock()
    binder.plan.messages.__getitem__.return_value.backend = "nccl"
    binder.plan.turns.__getitem__.return_value.backend = "nccl"
    binder.resources.backends.__getitem__.return_value = backend
    binder.values.counts.return_value = None
    binder.check.side_effect = PROBLEM
    lane: Any = mock.Mock(within=lambda run: run)
    send = mock.Mock(spec=Send, team="tp", peer=mock.Mock(), src=mock.Mock())
    gather = mock.Mock(spec=Collective, team="tp", src=mock.Mock(), dst=mock.Mock())
    with mock.patch.object(transfers_file, "bind_on_stream", return_value=backend.issue):
        run = bind(binder, lane, 0, (send,) if bind is messages else gather)
    with pytest.raises(PeerError):
        run()
    assert backend.mock_calls == []


@pytest.mark.parametrize("known", ["by this rank", "by its peer", "no"])
def test_an_op_that_nccl_ends_is_the_failure_that_it_was_ended_for(known: str) -> None:
    """NCCL itself says no more than that there was an internal error."""
    ended_by_nccl = BackendError("NCCL could not issue reduce: internal error")

    def step() -> None:
        if known == "by this rank":  # its watchdog has begun the abort meanwhile
            fake.engine.watched.fail(PROBLEM)
        raise ended_by_nccl

    with bound("gather", "put") as fake:
        control: Any = fake.engine.context.resources.teams["tp"].control
        if known == "by its peer":  # which the watchdog has not come to
            control.failure = lambda: PROBLEM
        told = mock.patch.object(control, "fail", wraps=control.fail)
        fake.engine.binding.steps[:] = [step]
        inputs, out = tensors("gather")
        with told as telling, pytest.raises((PeerError, BackendError)) as caught:
            fake.run(inputs, out)
        if known == "no":
            assert caught.value is ended_by_nccl
        else:
            assert caught.value is PROBLEM
            assert caught.value.__cause__ is ended_by_nccl
        assert fake.engine.failure is caught.value
        assert all(call.args[0] is caught.value for call in telling.call_args_list)


def test_what_is_not_nccls_stays_as_it_is() -> None:
    """An error of the caller's own is not hidden behind a peer's."""

    def step() -> None:
        fake.engine.watched.fail(PROBLEM)
        raise ValueError("mine")

    with bound("gather", "put") as fake:
        fake.engine.binding.steps[:] = [step]
        with pytest.raises(ValueError, match="mine"):
            fake.run(*tensors("gather"))


@pytest.mark.parametrize("what", ["all_gather", "send and recv"])
def test_errors_of_nccl_have_a_type(what: str) -> None:
    broken = mock.Mock(**{"name.return_value": "nccl"})
    fails = mock.Mock(side_effect=dist.DistBackendError("internal error"))
    broken.all_gather_single = broken._allgather_base = broken.allgather = broken.send = fails
    x = torch.ones(4)
    if what == "all_gather":
        spec = Spec("all_gather", 2, me=0, parts=(4, 4), dtype=x.dtype)
        run = bind_on_stream(broken, spec, 5)
        call = lambda: run(x, torch.ones(8))  # noqa: E731
    else:
        moves = bind_messages(broken, [("send", 1)], x.device)
        call = lambda: moves([x])  # noqa: E731
    with pytest.raises(BackendError, match=f"NCCL could not issue {what}: internal error"):
        call()


def test_a_group_has_messages_of_one_team() -> None:
    """NCCL would start a second team's after the first's have met, and those may wait for them."""
    messages_of = {(0, number): SimpleNamespace(backend="nccl") for number in range(2)}
    binder: Any = SimpleNamespace(plan=SimpleNamespace(messages=messages_of))
    ops = [Send(src=View("x"), peer=1, team=team) for team in ("a", "b")]
    with pytest.raises(UnsupportedError, match=r"messages of teams \['a', 'b'\]"):
        messages(binder, mock.Mock(), 0, ops)


def test_a_group_that_fails_amid_it_is_closed() -> None:
    """Left open, it would take in all that its thread issues from then on, of other groups too."""
    depth: list[int] = [0]

    def start() -> None:
        depth[0] += 1

    def end() -> None:
        depth[0] -= 1
        raise dist.DistBackendError("aborted")

    broken = mock.Mock(_start_coalescing=start, _end_coalescing=end)
    broken.recv.side_effect = dist.DistBackendError("aborted before")
    x = torch.ones(4)
    move = bind_messages(broken, [("send", 1), ("recv", 1)], x.device)
    with pytest.raises(BackendError, match="aborted before"):
        move([x, x])
    assert depth == [0]


def test_a_barrier_of_nccl_is_asynchronous_and_of_this_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = mock.Mock(**{"name.return_value": "nccl"})
    made: list[torch.device] = []
    zeros = torch.zeros

    def noted(*sizes: int, device: torch.device) -> torch.Tensor:
        made.append(device)
        return zeros(*sizes)

    monkeypatch.setattr(torch, "zeros", noted)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    spec = Spec("barrier", 2, me=0, parts=(), dtype=torch.uint8)
    run = bind_on_stream(backend, spec, 5)
    run(None, None)
    run(None, None)
    assert made == [torch.device("cuda", 3)]
    assert not backend.barrier.called
    assert backend.allreduce.call_count == 2


def test_graphs_of_all_engines_go_before_an_abort_is_waited_for() -> None:
    """NCCL's abort waits for the graphs that its ops were captured in."""
    with (
        bound("gather", "put") as one,
        fake_engine(program("gather", "put"), 1, beside=one) as other,
        under_way(one, other) as backend,
    ):
        still = Nccl(stands_still=True)
        for fake in (one, other):
            fake.engine.context.resources.backends["tp", "ucc"] = still
        graphs = mock.Mock()
        graphs.drop.side_effect = still.let_go
        other.engine.graphs = graphs
        one.engine.watched.fail(PROBLEM)
        assert aborted(one, backend)
        with mock.patch.object(watchdog_file, "GRACE_S", 0.05):
            one.engine.watched.settle()
            graphs.drop.assert_not_called()  # its run is still under way
            one.driver.done = lambda event: True
            other.engine.watched.issuing = True
            one.engine.watched.settle()
            graphs.drop.assert_not_called()  # a thread is about to replay them
        other.engine.watched.issuing = False
        start = time.monotonic()
        one.engine.watched.settle()
        assert time.monotonic() - start < 3
        graphs.drop.assert_called()


def test_a_reset_of_the_team_mends_all_its_engines() -> None:
    """Also one that has not run since, and so is not bound anew: nothing of it is under way."""
    with bound("gather", "put") as fake:
        fake.driver.done = lambda event: True
        logs_of(fake, "gather", 1)
        fake.engine.watched.fail(PROBLEM)
        with pytest.raises(PeerError, match="a peer stopped"):
            fake.engine.synchronize()
        team: Any = fake.engine.context.resources.teams["tp"]
        team.resets += 1
        fake.engine.synchronize()
        team.is_set_up = False  # released: nobody has mended it
        with pytest.raises(PeerError, match="a peer stopped"):
            fake.engine.synchronize()
        dog = watchdog_file.Watchdog()
        dog.add(fake.engine.watched)
        with mock.patch.object(watchdog_file, "watchdog", return_value=dog):
            with pytest.raises(PeerError, match="a peer stopped"):
                watchdog_file.synchronize()
            watchdog_file.synchronize()  # told once


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
    assert made == [gloo, still], "the next end waits for it too"
    still.let_go()
    end(made, 5, "team tp on rank 0")
    assert made == []
    gloo.abort.assert_not_called()


class User:
    """Notes when it is told that its team goes, or is mended."""

    def __init__(self, team: TeamComm, backend: Nccl) -> None:
        self.log: list[tuple[int, bool]] = []
        self._team, self._backend = team, backend
        team.used_by(self)

    def leave(self) -> None:
        self.log.append((self._team.resets, self._backend.begun.is_set()))


@pytest.fixture
def team(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TeamComm]:
    """A team of one, whose NCCL is ours."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    monkeypatch.setattr(connections_file, "connect", lambda *_: Nccl())
    monkeypatch.setattr(nccl, "join", lambda backend, *_: backend.joined.set())
    monkeypatch.setattr(connections_file, "require_backend", lambda name: None)
    side = mock.Mock(device=torch.device("cuda"))
    monkeypatch.setattr(side_file, "CudaSide", lambda *_: side)
    try:
        found = team_of(dist.group.WORLD, "tp")  # pyright: ignore
        found.setup(5)
        yield found
    finally:
        release_teams()
        dist.destroy_process_group()


def test_a_reset_ends_what_it_replaces_after_its_users_have_left(team: TeamComm) -> None:
    old: Any = team.backend("nccl", "cuda", 5)
    user = User(team, old)
    team.control.fail(PROBLEM)
    team.reset(5)
    assert user.log == [(0, False)]
    assert old.begun.is_set()
    assert team.control.failure() is None
    assert team.backend("nccl", "cuda", 5) is not old


def test_ranks_meet_before_runs_do_what_waits_for_all(
    team: TeamComm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they make a backend, where they use that of the user, and where a reset renews it."""
    asked: list[Any] = []
    monkeypatch.setattr(nccl, "join", lambda *given: asked.append(given))
    users = Nccl()
    monkeypatch.setattr(connections_file.Connections, "users", lambda *_: users)
    for _ in range(2):
        assert team.backend("nccl", "cuda", 5) is users
    known = "team tp on rank 0", team.board.ended
    assert [given[:-1] for given in asked] == [(users, None, 5, *known)]
    team.control.fail(PROBLEM)
    team.reset(7)
    renewed = team.backend("nccl", "cuda", 5)
    assert renewed is not users
    assert [given[:-1] for given in asked[1:]] == [(renewed, None, 7, *known)]


def test_a_reset_that_cannot_end_a_connection_mends_nothing(team: TeamComm) -> None:
    old: Any = team.backend("nccl", "cuda", 5)
    old.stand_still()
    assert team.control.failure() is None
    for _ in range(2):
        with pytest.raises(TeamError, match="did not end the connections of team tp on rank 0"):
            team.reset(0.2)
        assert team.control.failure() is not None
        assert team.resets == 0
    old.let_go()
    team.reset(5)
    assert team.control.failure() is None
    assert team.backend("nccl", "cuda", 5) is not old


def test_a_reset_that_cannot_connect_anew_leaves_a_failure(
    team: TeamComm, monkeypatch: pytest.MonkeyPatch
) -> None:
    team.backend("nccl", "cuda", 5)
    monkeypatch.setattr(connections_file, "connect", mock.Mock(side_effect=BackendError("no port")))
    with pytest.raises(BackendError, match="no port"):
        team.reset(5)
    assert "no port" in str(team.control.failure())


def test_a_team_that_goes_ends_what_it_made(team: TeamComm) -> None:
    old: Any = team.backend("nccl", "cuda", 5)
    user = User(team, old)
    release_teams()
    assert user.log == [(0, False)]
    assert old.begun.is_set()


def test_a_reset_that_cannot_be_sure_of_the_words_leaves_a_failure(team: TeamComm) -> None:
    """Peers hear of it, and do not wait."""
    side: Any = team.cuda(torch.device("cuda"), 5)
    side.reset.side_effect = CommTimeoutError("a call of the CUDA driver has not returned")
    with pytest.raises(CommTimeoutError, match="has not returned"):
        team.reset(5)
    assert "has not returned" in str(team.control.failure())
    side.reset.side_effect = None
    team.reset(5)
    assert team.control.failure() is None
