"""What can go wrong with a GradReducer is an error on every rank, never a wrong gradient."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.optim.reducing import batch, loss_of, mixture
from tests.support.pool import Pool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from interlace.errors import (
    AgreementError,
    CommTimeoutError,
    GradientError,
    InterlaceError,
    OptionError,
    PeerError,
)
from interlace.optim import GradAccumulator, GradReducer
from interlace.optim.bucket_runs import Worker
from interlace.options import Options
from interlace.runtime import Executor


def step(reducer: GradReducer, model: nn.Module, x: torch.Tensor) -> None:
    model(x).sum().backward()
    reducer.finish()


def late(seed: int) -> str:
    """A second backward in a step, after steps that had one: its buckets are gone."""
    torch.manual_seed(seed)
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with GradReducer(model, options=Options(time_out_s=10)) as reducer:
        for _ in range(2):
            step(reducer, model, x)
            reducer.zero()
        model(x).sum().backward()
        with pytest.raises(GradientError) as caught:
            model(x).sum().backward()
        with pytest.raises(GradientError, match="finish\\(\\) first"):
            reducer.zero()
        with pytest.raises(GradientError, match="finish\\(\\) first"):
            reducer.relearn()
        reducer.finish()
        with pytest.raises(GradientError, match="call zero"):
            model(x).sum().backward()
        with pytest.raises(GradientError, match="call zero"):
            reducer.finish()
        reducer.zero()
        reducer.relearn()
        for _ in range(2):
            for _ in range(2):
                model(x).sum().backward()
            reducer.finish()
            assert torch.equal(reducer.main_grad(model.weight), torch.full((4, 4), 4.0))
            reducer.zero()
    return str(caught.value)


def shards() -> list[str]:
    """Tensor-parallel Parameters, as a reducer and an accumulator are given them."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model: Any = nn.Linear(4, 4)
    parallelize_module(model, mesh, ColwiseParallel())
    told: list[str] = []
    for make in (
        lambda: GradReducer(model),
        lambda: GradAccumulator(model.weight, torch.zeros(model.weight.shape)),
    ):
        with pytest.raises(GradientError) as found:
            make()
        told.append(str(found.value))
    model(torch.ones(2, 4)).sum().backward()  # and they are as they were
    assert model.weight.grad is not None
    return told


def test_a_dtensor_is_refused_where_it_is_given(pool: Pool) -> None:
    for reducer, accumulator in pool(2).run(shards):
        assert "some of the Parameters are DTensors" in reducer
        assert "cannot hold the gradient of torch.float32 [2, 4]" in accumulator


def test_a_late_gradient_is_an_error(pool: Pool, seed: int) -> None:
    for told in pool(2).run(late, seed):
        assert "came late: its bucket is being reduced" in told
        assert "relearn()" in told


def strays(seed: int) -> None:
    model = nn.Linear(4, 4)
    with GradReducer(model, options=Options(time_out_s=10)) as reducer:
        model.weight.grad = torch.ones(4, 4)
        with pytest.raises(GradientError, match=r"\[\[4, 4\]\] have a .grad that was not moved"):
            reducer.finish()
        model.weight.grad = None
        reducer.finish()
    with pytest.raises(GradientError, match="is closed"):
        reducer.finish()
    with pytest.raises(GradientError, match="is closed"):
        reducer.zero()


def test_a_gradient_that_was_not_moved_is_an_error(pool: Pool, seed: int) -> None:
    pool(1).run(strays, seed)


def early() -> None:
    """An optimizer must not see what is not reduced yet."""
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with GradReducer(model, options=Options(time_out_s=10)) as reducer:
        for _ in range(3):
            model(x).sum().backward()
            with pytest.raises(GradientError, match="finish\\(\\) first"), reducer.as_grads():
                pass
            reducer.finish()
            with reducer.as_grads():
                assert model.weight.grad is not None
            reducer.zero()


def cast_after(seed: int) -> None:
    """A model that is cast after its reducer was made: no bucket would ever go by itself."""
    torch.manual_seed(seed)
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with GradReducer(model, options=Options(time_out_s=10)) as reducer:
        model.double()
        with pytest.raises(GradientError, match="make another"):
            step(reducer, model, x.double())
    model.zero_grad()
    with GradReducer(model, options=Options(time_out_s=10)) as reducer:
        step(reducer, model, x.double())
        assert reducer.main_grad(model.weight).abs().sum() > 0


def test_a_model_that_is_cast_is_an_error(pool: Pool, seed: int) -> None:
    pool(2).run(cast_after, seed)


def test_gradients_that_are_not_reduced_are_not_shown(pool: Pool) -> None:
    pool(1).run(early)


def again() -> None:
    """A second reducer beside the first would have gradients of 0."""
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    options = Options(time_out_s=10)
    with GradReducer(model, options=options) as first:
        groups = len(dist.distributed_c10d._world.pg_map)
        with pytest.raises(GradientError, match="have an accumulator: close"):
            GradReducer(model, options=options)
        assert len(dist.distributed_c10d._world.pg_map) == groups, "before any group is made"
        step(first, model, x)
        assert first.main_grad(model.weight).any()
    with GradReducer(model, options=options) as second:
        step(second, model, x)
        assert torch.equal(second.main_grad(model.weight), torch.full((4, 4), 2.0))


def test_a_second_reducer_is_refused(pool: Pool) -> None:
    pool(2).run(again)


def counts_nothing() -> None:
    """A first step without a backward that counts: the next one learns in its place."""
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with GradReducer(model, options=Options(time_out_s=10)) as reducer:
        with reducer.no_sync():
            model(x).sum().backward()
        reducer.finish()
        reducer.zero()
        for _ in range(3):
            for _ in range(2):
                model(x).sum().backward()
            reducer.finish()
            assert torch.equal(reducer.main_grad(model.weight), torch.full((4, 4), 4.0))
            reducer.zero()


def test_learns_from_the_first_step_that_counts(pool: Pool) -> None:
    pool(1).run(counts_nothing)


def closes_all() -> None:
    """A run that failed is raised by `close()`, and keeps nothing open."""

    def fail(_: Executor) -> None:
        raise PeerError("made up")

    closed: list[Executor] = []
    close = Executor.close

    def count(executor: Executor) -> None:
        closed.append(executor)
        close(executor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "synchronize", fail)
        patch.setattr(Executor, "close", count)
        reducer = GradReducer(nn.Linear(4, 4), bucket_bytes=1, options=Options(time_out_s=10))
        groups = len(dist.distributed_c10d._world.pg_map)
        assert len(reducer.buckets) == 2
        with pytest.raises(PeerError, match="made up"):
            reducer.close()
        reducer.close()
    assert len(set(map(id, closed))) == 2
    assert len(dist.distributed_c10d._world.pg_map) == groups - 1
    assert not [t for t in threading.enumerate() if t.name == "interlace reductions"]


def test_close_ends_everything_even_after_a_failure(pool: Pool) -> None:
    pool(1).run(closes_all)


def refusals() -> None:
    linear = nn.Linear(4, 4)
    with pytest.raises(OptionError, match="mean or sum"):
        GradReducer(linear, op="max")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="main_grad_dtype"):
        GradReducer(linear, main_grad_dtype=torch.float16)
    with pytest.raises(OptionError, match="bucket_bytes=0"):
        GradReducer(linear, bucket_bytes=0)
    with pytest.raises(GradientError, match="0 Parameters"):
        GradReducer(linear.requires_grad_(False))
    mixed = [nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1, device="meta"))]
    with pytest.raises(GradientError, match=r"2 Parameters .* on \['cpu', 'meta'\]"):
        GradReducer(mixed)


def test_refuses_what_it_cannot_do(pool: Pool) -> None:
    pool(1).run(refusals)


def disagree() -> str:
    """Ranks whose Parameters differ; no group is left of the attempt."""
    groups = len(dist.distributed_c10d._world.pg_map)
    with pytest.raises(InterlaceError) as caught:
        GradReducer(nn.Linear(4, 4 + 100 * dist.get_rank()), options=Options(time_out_s=5))
    assert isinstance(caught.value, AgreementError)
    assert len(dist.distributed_c10d._world.pg_map) == groups
    return str(caught.value)


def test_ranks_must_have_the_same_parameters(pool: Pool) -> None:
    for told in pool(2).run(disagree, replace=True):
        assert "rank" in told


def frozen_elsewhere() -> str:
    """Each rank trains another one of two equal layers: buckets of one length, of others."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[dist.get_rank()].requires_grad_(False)
    with GradReducer(model, options=Options(time_out_s=20)) as reducer:
        model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(AgreementError) as caught:
            reducer.finish()
    return str(caught.value)


def test_gradients_of_other_parameters_are_not_summed(pool: Pool) -> None:
    for told in pool(2).run(frozen_elsewhere, replace=True):
        assert "rank 0 called 'reduce_bucket_0 of 2 gradients (" in told
        assert "0.bias[4] to 0.weight[4, 4]" in told
        assert "1.bias[4] to 1.weight[4, 4]" in told


def stalls(seed: int) -> tuple[str, float]:
    """Rank 1 does not come to the third step in time; afterwards both go on."""
    model = mixture(seed)
    x, sizes = batch(seed, 0)
    options = Options(time_out_s=2)
    with GradReducer(model, bucket_bytes=1 << 11, options=options) as reducer:
        for _ in range(2):
            loss_of(model, x, sizes).backward()
            reducer.finish()
            wanted = reducer.main_grad(model.up.weight).clone()
            reducer.zero()
        dist.barrier()
        began = time.monotonic()
        if dist.get_rank() == 1:
            time.sleep(3.5)
        error: Any = None
        try:
            loss_of(model, x, sizes).backward()
            reducer.finish()
        except InterlaceError as caught:
            error = caught
            reducer.zero()
            loss_of(model, x, sizes).backward()
            with pytest.raises(type(caught)):  # until every rank calls reset()
                reducer.finish()
        took = time.monotonic() - began
        assert isinstance(error, CommTimeoutError | PeerError), error
        dist.barrier()
        reducer.reset()
        for _ in range(2):
            loss_of(model, x, sizes).backward()
            reducer.finish()
            assert torch.equal(reducer.main_grad(model.up.weight), wanted)
            reducer.zero()
    return str(error), took


def test_a_rank_that_stalls_is_an_error_and_can_be_mended(pool: Pool, seed: int) -> None:
    results = pool(2).run(stalls, seed, replace=True)
    assert "reduce_bucket" in results[0][0]
    assert all(took < 12 for _, took in results)


def dropped(seed: int) -> None:
    """A reducer that nobody closes goes with its model, and its thread with it."""
    model = mixture(seed)
    reducer = GradReducer(model, options=Options(time_out_s=5))
    gone = weakref.ref(reducer)
    del reducer
    x, sizes = batch(seed, 0)
    loss_of(model, x, sizes).backward()
    kept = gone()
    assert kept is not None, "attached layers keep what they add to"
    assert kept.main_grad(model.up.weight).any()
    del kept, model
    gc.collect()
    assert gone() is None
    assert not [t for t in threading.enumerate() if t.name == "interlace reductions"]


def test_a_forgotten_reducer_leaves_no_thread(pool: Pool, seed: int) -> None:
    pool(1).run(dropped, seed, replace=True)


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
