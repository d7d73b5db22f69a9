"""Backends are connected by all ranks or by none, and who tries again is not held up by the past.

NCCL is played as torch has it: rank 0 leaves an id in the backend's store, the others read it, and
all who hold one id meet, for which no time-out is known and which no abort ends.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support.pool import Ranks

from interlace.comm import backends, release_teams, team_of
from interlace.comm.backends import apart
from interlace.comm.cuda import nccl
from interlace.errors import AgreementError, BackendError, CommTimeoutError, InterlaceError
from interlace.ir import parse, parse_set
from interlace.options import Options
from interlace.runtime import Executor

TIMEOUT_S = 1.5
Heard = tuple[str, str, float]


class Nccl:
    """A backend that meets through its store."""

    def __init__(self, name: str, store: Any, me: int, size: int, *_: Any) -> None:
        self.store, self.me, self.ranks = apart(store, 20.0), me, size
        self.aborted = False

    def name(self) -> str:
        return "nccl"

    def abort(self) -> None:
        self.aborted = True


class World:
    """What happens to this rank where it meets the others."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.problem: str | None = None

    def meet(self, backend: Nccl, *_: Any) -> None:
        """Returns once all ranks with this id are here."""
        store = backend.store
        if backend.me == 0:
            time.sleep(0.05)
            store.set("0", str(time.monotonic_ns()))
        ident = store.get("0").decode()
        if self.problem is not None:
            raise RuntimeError(self.problem)
        store.set(f"{ident}/{backend.me}", "here")
        wanted = [f"{ident}/{rank}" for rank in range(backend.ranks)]
        while not store.check(wanted) and not self.over.is_set():
            time.sleep(0.01)


@contextlib.contextmanager
def played() -> Iterator[tuple[World, Any]]:
    """A set-up team of all ranks whose NCCL is played."""
    world = World()
    with contextlib.ExitStack() as stack:
        for where, name, new in (
            (backends, "connect", Nccl),
            (backends, "require_backend", lambda name: None),
            (nccl, "relax_captures", lambda: None),
            (nccl, "meet", world.meet),
            (torch.cuda, "current_device", lambda: 0),
        ):
            stack.enter_context(mock.patch.object(where, name, new))
        stack.callback(release_teams)
        stack.callback(world.over.set)
        team = team_of(dist.group.WORLD, "tp")  # pyright: ignore
        team.setup(20)
        yield world, team


def ask(team: Any, timeout_s: float = TIMEOUT_S) -> Heard:
    """What is heard when the backend is asked for to prepare something, and how long that takes."""
    team.num_prepared += 1
    begun, heard = time.monotonic(), ("result", "")
    try:
        backend = team.backend("nccl", "cuda", timeout_s)
        assert not backend.aborted
    except InterlaceError as error:
        heard = type(error).__name__, str(error)
    return *heard, time.monotonic() - begun


def asked_again(how: str) -> list[Heard]:
    """The first try, which fails on rank 1, the second, and what is heard after two resets."""
    rank = dist.get_rank()
    with played() as (world, team):
        if how == "late" and rank == 1:
            time.sleep(2 * TIMEOUT_S)
        if how == "refused":
            world.problem = "Duplicate GPU detected"
        if how == "fails before":
            why = BackendError("out of memory") if rank == 1 else None
            with mock.patch.object(backends, "connect", mock.Mock(wraps=Nccl, side_effect=why)):
                found = [ask(team, 20.0)]
        else:
            found = [ask(team)]
        world.problem = None
        dist.barrier()
        found.append(ask(team, 20.0))
        kept = team.backend("nccl", "cuda", 20.0)
        for _ in range(2):
            dist.barrier()
            team.reset(20.0)
            assert kept.aborted
            found.append(ask(team))
            kept = team.backend("nccl", "cuda", 20.0)
        dist.barrier()
    return found


@pytest.mark.parametrize("how", ["late", "refused", "fails before"])
def test_a_connection_that_failed_is_mended_by_the_next_try(pool: Any, how: str) -> None:
    ranks: Ranks = pool(2)
    for rank, (first, *later) in enumerate(ranks.run(asked_again, how, replace=True)):
        error, text, seconds = first
        if how == "fails before":
            assert seconds < 5, "who waits hears of it at once"
            assert "out of memory" in text
        elif how == "refused":
            assert "Duplicate GPU detected" in text
        else:
            assert error == ("BackendError" if rank == 0 else "AgreementError"), text
            assert "not all of its ranks came within 1.5 s" in text
        assert error != "result"
        assert [heard[0] for heard in later] == ["result"] * 3, later


def released() -> list[Heard]:
    """The user's backend, whose ranks did not meet, is not tried again by a team made later."""
    rank = dist.get_rank()
    with played() as (_, team):
        mine = Nccl("nccl", dist.distributed_c10d._get_default_store(), rank, 2)
        with mock.patch.object(backends.Connections, "users", return_value=mine):
            if rank == 1:
                time.sleep(2 * TIMEOUT_S)
            found = [ask(team)]
            dist.barrier()
            release_teams()
            dist.barrier()
            again: Any = team_of(dist.group.WORLD, "tp")  # pyright: ignore
            again.setup(20)
            found.append(ask(again, 20.0))
            assert again.backend("nccl", "cuda", 20.0) is not mine
        dist.barrier()
    return found


def test_a_backend_that_was_aborted_is_not_tried_by_a_later_team(pool: Any) -> None:
    for first, second in pool(2).run(released, replace=True):
        assert first[0] in ("BackendError", "AgreementError")
        assert second[0] == "result", second


def cut_off() -> bool:
    """The user's own gloo, after a failure cut the team's."""
    team = team_of(dist.group.WORLD, "tp")  # pyright: ignore
    team.num_prepared += 1
    backends.cut(team.backend("gloo", "cpu", 20.0))
    told = torch.tensor([dist.get_rank()])
    dist.all_reduce(told)
    release_teams()
    return told.item() == sum(range(dist.get_world_size()))


def test_a_transfer_that_is_cut_leaves_the_users_group_alone(pool: Any) -> None:
    assert pool(3).run(cut_off, replace=True) == [True] * 3


def test_a_store_whose_server_is_gone_says_so_at_once() -> None:
    """To connect to it anew takes as long as its time-out."""
    over = threading.Event()
    store = mock.Mock()
    store.clone.side_effect = lambda: over.wait(20)
    store.check.side_effect = RuntimeError("Broken pipe")
    begun = time.monotonic()
    assert apart(store, 20.0) is store
    assert time.monotonic() - begun < 5
    over.set()
    store.clone.side_effect = RuntimeError("pure virtual")
    assert apart(store, 20.0) is store


def test_a_store_that_does_not_answer_is_an_error_within_the_limit() -> None:
    over = threading.Event()
    store = mock.Mock()
    store.clone.side_effect = store.check.side_effect = lambda *_: over.wait(20)
    begun = time.monotonic()
    with pytest.raises(
        CommTimeoutError, match=r"has not answered for .* s: the process that holds it \(rank 0"
    ):
        apart(store, 0.5)
    assert time.monotonic() - begun < 5
    over.set()


def beside_a_wait() -> float:
    """Seconds until all ranks of a team have met while a thread waits in the default store."""
    store: Any = dist.distributed_c10d._get_default_store()  # pyright: ignore
    threading.Thread(target=_wait, args=(store,), daemon=True).start()
    time.sleep(0.3)
    begun = time.monotonic()
    team = team_of(dist.group.WORLD, "tp")  # pyright: ignore
    team.setup(20)
    team.board.exchange("beside", {}, 20)
    return time.monotonic() - begun


def _wait(store: Any) -> None:
    with contextlib.suppress(RuntimeError):
        store.wait(["what never comes"], timedelta(seconds=8))


def test_who_waits_in_the_default_store_holds_up_no_team(pool: Any) -> None:
    """As the first op of a user's own NCCL backend does, in the thread that connects."""
    assert max(pool(2).run(beside_a_wait, replace=True)) < 5


SET = """
def one(tp: Team[[0, 1, 2]], x: f32[4]):
    ranks(0)
    main: send(x, peer=1, team=tp)
    main: call("aten.neg.default", x, out=(y := f32[4]))
    return y


def two(tp: Team[[0, 1, 2]], x: f32[4]):
    ranks(1)
    y = empty(f32[4])
    main: recv(y, peer=0, team=tp)
    return y


def three(tp: Team[[0, 1, 2]], x: f32[4]):
    ranks(2)
    main: call("aten.neg.default", x, out=(y := f32[4]))
    return y
"""


def needed() -> tuple[Any, list[float]]:
    """What a rank connects, and its result."""
    program = parse_set(SET)[dist.get_rank()]
    groups: Any = {"tp": dist.group.WORLD}
    with Executor(program, groups=groups).prepare() as executor:
        (y,) = executor.run([torch.ones(4)])
        agreement: Any = executor.agreement
        return agreement.backends, y.tolist()


def unlike() -> str:
    """What is heard where ranks give other options."""
    text = """
def f(tp: Team[2], x: f32[4]):
    y = empty(f32[8])
    main: all_gather(x, y, team=tp)
    return y
"""
    transport = ("gloo", "peer")[dist.get_rank()]
    options = Options.from_dict({"transport": transport})
    groups: Any = {"tp": dist.group.WORLD}
    with pytest.raises(AgreementError) as caught:
        Executor(parse(text), groups=groups, options=options).prepare()
    return str(caught.value)


def test_ranks_that_would_go_by_different_backends_hear_of_it(pool: Any) -> None:
    for text in pool(2).run(unlike):
        assert "rank 0 would run 'f' by gloo, and rank 1 by peer" in text


def test_who_does_nothing_on_a_backend_connects_it_as_its_peers_do(pool: Any) -> None:
    """Else they would wait for it."""
    for rank, (found, y) in enumerate(pool(3).run(needed)):
        assert found == (("gloo",),)
        assert y == [1.0 if rank == 1 else -1.0] * 4
