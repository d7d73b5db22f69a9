"""What can go wrong with main gradients is an error on every rank, never a wrong gradient."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
import torch.distributed as dist
from tests.optim.reducing import main_grads, optimizing
from tests.support.pool import Pool
from torch import nn

from interlace.errors import (
    AgreementError,
    GradientError,
    InterlaceError,
    OptionError,
    PeerError,
)
from interlace.optim.bucket_runs import Worker
from interlace.options import Options
from interlace.runtime import Executor


def late(seed: int) -> str:
    """A second backward in a step: its buckets are gone, unless none goes by itself."""
    torch.manual_seed(seed)
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with optimizing(model) as made:
        model(x).sum().backward()
        with pytest.raises(GradientError) as caught:
            model(x).sum().backward()
        made.step()
        with pytest.raises(GradientError, match="call zero_grad"):
            model(x).sum().backward()
        made.zero_grad()
        with pytest.raises(OptionError, match=r"fix: leave relearn\(\) out"):
            made.relearn()
    with optimizing(model, options=Options(overlap=False, timeout_s=20)) as made:
        for _ in range(3):
            for _ in range(2):
                model(x).sum().backward()
            assert torch.equal(main_grads(made)["weight"], torch.full((4, 4), 4.0))
            made.step()
            made.zero_grad()
    return str(caught.value)


def test_a_late_gradient_is_an_error(pool: Pool, seed: int) -> None:
    for told in pool(2).run(late, seed):
        assert "came late: its bucket is being reduced. fix: run all backwards" in told


def strays(seed: int) -> None:
    model = nn.Linear(4, 4)
    with optimizing(model) as made:
        model.weight.grad = torch.ones(4, 4)
        with pytest.raises(GradientError, match=r"\[\[4, 4\]\] have a .grad that was not moved"):
            made.step()
        model.weight.grad = None
        made.step()
    with pytest.raises(GradientError, match="is closed"):
        made.zero_grad()


def test_a_gradient_that_was_not_moved_is_an_error(pool: Pool, seed: int) -> None:
    pool(1).run(strays, seed)


def cast_after(seed: int) -> None:
    """A model that is cast after its LayerWise was made: no bucket would ever go by itself."""
    torch.manual_seed(seed)
    model, x = nn.Linear(4, 4), torch.ones(2, 4).double()
    with optimizing(model):
        model.double()
        with pytest.raises(GradientError, match="make another"):
            model(x).sum().backward()
    model.zero_grad()
    with optimizing(model) as made:
        model(x).sum().backward()
        assert main_grads(made)["weight"].abs().sum() > 0


def test_a_model_that_is_cast_is_an_error(pool: Pool, seed: int) -> None:
    pool(2).run(cast_after, seed)


def again() -> None:
    """A second LayerWise beside the first would have gradients of 0."""
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with optimizing(model) as first:
        groups = len(dist.distributed_c10d._world.pg_map)
        with pytest.raises(GradientError, match="has an accumulator: close"):
            optimizing(model)
        assert len(dist.distributed_c10d._world.pg_map) == groups, "no group is left"
        model(x).sum().backward()
        assert main_grads(first)["weight"].any()
        first.step()
    with optimizing(model) as second:
        model(x).sum().backward()
        assert torch.equal(main_grads(second)["weight"], torch.full((4, 4), 2.0))


def test_a_second_one_is_refused(pool: Pool) -> None:
    pool(2).run(again)


def closes_all() -> None:
    """A run that failed is raised by `close()`, and keeps nothing open."""

    def fail(_: Executor) -> None:
        raise PeerError("made up")

    closed: list[Executor] = []
    close = Executor.close

    def count(executor: Executor) -> None:
        closed.append(executor)
        close(executor)

    gc.collect()  # graphs of other tests, whose Executors are closed then
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "synchronize", fail)
        patch.setattr(Executor, "close", count)
        made = optimizing(nn.Linear(4, 4), bucket_bytes=1)
        groups = len(dist.distributed_c10d._world.pg_map)
        with pytest.raises(PeerError, match="made up"):
            made.close()
        made.close()
    assert {*closed} == {*made._runs.executors}
    assert len(dist.distributed_c10d._world.pg_map) == groups - 1
    assert not [t for t in threading.enumerate() if t.name == "interlace buckets"]


def test_close_ends_everything_even_after_a_failure(pool: Pool) -> None:
    pool(1).run(closes_all)


def disagree() -> str:
    """Ranks whose Parameters differ; no group is left of the attempt."""
    groups = len(dist.distributed_c10d._world.pg_map)
    with pytest.raises(InterlaceError) as caught:
        optimizing(nn.Linear(4, 4 + 100 * dist.get_rank()), options=Options(timeout_s=5))
    assert isinstance(caught.value, AgreementError)
    assert len(dist.distributed_c10d._world.pg_map) == groups
    return str(caught.value)


def test_ranks_must_have_the_same_parameters(pool: Pool) -> None:
    for told in pool(2).run(disagree, replace=True):
        assert "rank" in told


# -- the thread of the CPU ------------------------------------------------------------------------


def test_thread_keeps_the_order_and_the_first_error() -> None:
    seen: list[int] = []

    def fail() -> None:
        raise PeerError("made up")

    worker = Worker([lambda: seen.append(0), lambda: seen.append(1), fail])
    for index in (1, 0, 1):
        worker.put(index)
    worker.wait()
    assert seen == [1, 0, 1]
    assert worker._done == {0, 1}
    worker.put(2)
    worker.put(0)
    for _ in range(2):
        with pytest.raises(PeerError, match="made up"):
            worker.wait()
    assert 2 not in worker._done
    assert seen == [1, 0, 1], "nothing runs after a failure"
    worker.clear()
    worker.put(0)
    worker.wait()
    assert seen == [1, 0, 1, 0]
    worker.stop()
    assert not worker.is_alive()


def test_a_thread_that_stops_drops_what_it_was_asked_for() -> None:
    began, go, seen = threading.Event(), threading.Event(), []
    worker = Worker([lambda: (began.set(), go.wait(20)), lambda: seen.append(1)])
    worker.put(0)
    worker.put(1)
    assert began.wait(5)
    threading.Timer(0.1, go.set).start()
    worker.stop()
    assert not worker.is_alive()
    assert not seen
