"""Set-up with the store on rank 0: whoever is killed is named by all others, and a holder that does
not answer, within the limit."""

from __future__ import annotations

import os
import secrets
import signal
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from tests.runtime.programs import Outcome, attempt, prepared
from tests.support.deaths import blamed, trial, wrong
from tests.support.pool import Pool

from interlace.comm.backends import await_ranks
from interlace.comm.rendezvous.liveness import PeerProcess, lost_store
from interlace.comm.rendezvous.patience import Errand

LIMIT_S = 1.5


def test_survivors_of_set_up_blame_the_killed_rank_alone(pool: Pool, seed: int) -> None:
    for again in range(3):
        assert wrong(*trial(pool, 3, seed + again)) == []


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_survivors_of_a_hundred_kills(pool: Pool) -> None:
    assert [w for _ in range(100) for w in wrong(*trial(pool, 3, secrets.randbits(30)))] == []


def test_who_is_blamed_is_read_from_the_words_of_errors() -> None:
    gone = "the process of rank 1 and rank 3 has ended, and the store does not answer: rank 0, ..."
    assert blamed(gone) == {1, 3}
    assert blamed("rank 1 stopped: rank 2 of team tp died: its process has ended") == {2}
    assert blamed("ranks 1 and 2 cannot come to 'x' any more: the process has ended") == {1, 2}
    assert blamed("rank 1 cannot come to 'x' any more, for it stopped: oh") == set()


class EndsMeanwhile(PeerProcess):
    """A process that is seen to live once, and has ended when it is asked for anew."""

    seen = True  # pyright: ignore

    def alive(self) -> bool:
        alive, self._ended = not self._ended, True
        return alive


def test_a_holder_that_leaves_because_of_another_is_not_blamed() -> None:
    """Rank 1 was killed; the store goes with rank 0 an instant before that process ends."""
    lives = {0: EndsMeanwhile(None), 1: PeerProcess(None, ended=True)}
    assert blamed(lost_store(RuntimeError("reset by peer"), 2, lives)) == {1}
    assert blamed(lost_store(RuntimeError("reset by peer"), 2, {0: EndsMeanwhile(None)})) == {0}


def test_a_connection_that_breaks_names_the_process_that_ends_after_it() -> None:
    def broken() -> None:
        raise RuntimeError("Broken pipe")

    looks = iter([[], [], [0]])
    with pytest.raises(TimeoutError, match="process of rank 0 has ended"):
        await_ranks(Errand(broken), 5.0, lambda: next(looks), lambda: None)
    with pytest.raises(RuntimeError, match="Broken pipe"):  # where none ends
        await_ranks(Errand(broken), 5.0, tuple, lambda: None)


def prepare_over_a_stopped_store() -> Outcome:
    """Rank 0 holds the store of the default group, and is stopped before rank 1 uses a team."""
    rank, told = dist.get_rank(), [None, os.getpid()]
    store: Any = None
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        told = [store.port, os.getpid()]
    dist.broadcast_object_list(told)
    dist.destroy_process_group()
    port, pid = told
    store = store or dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    dist.barrier()
    found = "", "", 0.0
    if rank:
        waking = threading.Timer(25.0, os.kill, (pid, signal.SIGCONT))
        waking.start()
        os.kill(pid, signal.SIGSTOP)
        found = attempt(lambda: prepared("get", timeout_s=LIMIT_S))
        os.kill(pid, signal.SIGCONT)
        waking.cancel()
    dist.barrier()
    return found


def test_a_stopped_holder_of_the_store_is_an_error_within_the_limit(pool: Pool) -> None:
    error, text, seconds = pool(2).run(prepare_over_a_stopped_store, replace=True)[1]
    assert error == "CommTimeoutError"
    assert f"has not answered for {LIMIT_S:g} s: the process that holds it (rank 0," in text
    assert seconds < LIMIT_S + 4
