"""`interlace.compile(fn, dynamic=True)`, DTensors of symbolic sizes, caches that are too small."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.frontend.models import Model, gradients, parallelise
from tests.support.pool import Pool
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import interlace
from interlace.errors import CacheWarning, ExecutorError, UnsupportedError
from interlace.frontend import backend

WIDTH = 16


def world_mesh() -> DeviceMesh:
    """All ranks, for tensor parallelism."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def feed_forward(mesh: DeviceMesh, given: Placement, out: Placement) -> nn.Module:
    """Two layers of tensor parallelism, with these layouts outside."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    plan = {
        "0": ColwiseParallel(input_layouts=given),
        "2": RowwiseParallel(output_layouts=out),
    }
    return parallelize_module(model, mesh, plan)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of all ranks, detached."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def steps(model: nn.Module, call: Callable[..., Any], inputs: list[torch.Tensor]) -> list[str]:
    """Training steps through `call`, each compared with eager: what differs."""
    wrong: list[str] = []
    for x in inputs:
        found: list[list[torch.Tensor]] = []
        for chosen in (call, model):
            out = chosen(x)
            out.square().sum().backward()
            found.append([whole(out), *gradients(model).values()])
        for mine, eager in zip(*found, strict=True):
            if not torch.allclose(mine, eager, rtol=1e-4, atol=1e-4):
                wrong.append(f"{tuple(x.shape)}: {(mine - eager).abs().max()}")
    return wrong


PLACES = {"rep": Replicate(), "rows": Shard(0), "sequence": Shard(1)}


def style(name: str, wrapped: bool, sizes: list[tuple[int, int]]) -> list[str]:
    """Batches and lengths that change at once, through one of the usual styles."""
    torch.compiler.reset()
    torch.set_num_threads(1)
    mesh, place = world_mesh(), PLACES[name]
    model = feed_forward(mesh, place, place)
    call = interlace.compile(model, mesh=mesh, dynamic=True, options={"time_out_s": 60.0})
    inputs: list[torch.Tensor] = []
    for b, s in sizes:
        x = torch.randn(b, s, WIDTH, generator=torch.Generator().manual_seed(b * 100 + s))
        inputs.append(DTensor.from_local(x, mesh, [place]) if wrapped else x)
    return steps(model, call, inputs)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("name", "wrapped"),
    [
        ("rep", False),
        *(
            pytest.param(name, wrapped, marks=pytest.mark.slow)
            for name in PLACES
            for wrapped in (False, True)
            if (name, wrapped) != ("rep", False)
        ),
    ],
)
def test_batch_and_sequence_change_at_once(pool: Pool, seed: int, name: str, wrapped: bool) -> None:
    rng = random.Random(seed)
    sizes = [(rng.randrange(2, 5), rng.randrange(8, 24)) for _ in range(3)]
    assert pool(2).run(style, name, wrapped, sizes, time_out_s=110) == [[], []]


def what_it_tells(lengths: list[int]) -> dict[str, Any]:
    """What a compiled object tells when it is prepared, and after training steps."""
    torch.compiler.reset()
    torch.set_num_threads(1)
    mesh = world_mesh()
    model = feed_forward(mesh, Shard(1), Shard(1))
    inputs = [torch.randn(2, n, WIDTH) for n in lengths]
    options: Any = {"time_out_s": 60.0, "strategy": "peer"}
    call = interlace.compile(model, inputs[0], mesh=mesh, dynamic=True, options=options)
    prepared, sizes = [bound.kind for bound in call.bound], str(call.program.sizes)
    wrong = steps(model, call, inputs)
    return {
        "wrong": wrong,
        "prepared": prepared,
        "kinds": [bound.kind for bound in call.bound],
        "sizes": sizes,
        "explain": call.explain(),
        "predicted": call.simulate(kind="backward").makespan_s > 0,
    }


@pytest.mark.timeout(120)
def test_a_compiled_object_tells_of_its_sizes(pool: Pool) -> None:
    for told in pool(2).run(what_it_tells, [8, 12, 14], time_out_s=110):
        assert not told["wrong"], told["wrong"]
        assert told["prepared"] == ["forward"]
        assert told["kinds"] == ["forward", "backward"]
        assert "s0" in told["sizes"]
        assert "sizes: for these sizes alone" in told["explain"]
        assert "all_gather_matmul" in told["explain"]
        assert "sound where" in told["explain"]
        assert told["predicted"]


def whole_model(lengths: list[int]) -> dict[str, Any]:
    """A language model: steps, a profile, inference, a copy, and calls after it was closed."""
    torch.compiler.reset()
    torch.set_num_threads(1)
    mesh = world_mesh()
    torch.manual_seed(0)
    model = parallelise(Model(layers=1), mesh)
    tokens = [
        torch.randint(0, 32, (2, n), generator=torch.Generator().manual_seed(n)) for n in lengths
    ]
    call = interlace.compile(model, mesh=mesh, dynamic=True, options={"time_out_s": 60.0})
    told: dict[str, Any] = {"wrong": steps(model, call, tokens)}
    spans = [call.profile(kind=kind, runs=1).makespan_s for kind in (None, "backward")]
    with torch.no_grad():
        call(tokens[0])
        told["kinds"] = [bound.kind for bound in call.bound]
    call.close()
    pairs = [(call, tokens[0]), (copy.deepcopy(call), tokens[1])]
    told["close"], told["copy"] = [
        torch.allclose(whole(chosen(given)), whole(model(given)), atol=1e-4)
        for chosen, given in pairs
    ]
    return told | {"measured": min(spans)}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_whole_model(pool: Pool) -> None:
    for told in pool(2).run(whole_model, [8, 12, 14], time_out_s=290):
        assert not told["wrong"], told["wrong"]
        assert told["measured"] > 0
        assert told["kinds"] == ["inference"]
        assert told["close"]
        assert told["copy"]


def test_nothing_is_compiled_before_the_first_call() -> None:
    compiled = interlace.compile(torch.relu, dynamic=True)
    with pytest.raises(ExecutorError, match="nothing is compiled yet"):
        compiled.explain()


def test_many_compiled_objects_of_one_function() -> None:
    """TorchDynamo compiles one function eight times, and these are more."""
    for rows in range(2, 14):
        x = torch.randn(rows, 4)
        assert torch.equal(interlace.compile(F.relu, dynamic=True)(x), F.relu(x))


def test_what_cannot_be_one_graph_is_told() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x * 2

    with pytest.raises(Exception, match="graph_break"):
        interlace.compile(broken, dynamic=True)(torch.ones(3))


def what_torch_cannot_trace() -> str:
    """What is told where torch fails in a trace of a DTensor whose sizes are symbolic."""
    torch.compiler.reset()

    def fails(*_: Any) -> Any:
        raise TypeError("mul expected 2 arguments, got 3")

    call: Any = torch.compile(
        feed_forward(world_mesh(), Shard(0), Shard(0)), backend=backend, dynamic=True
    )
    with mock.patch("interlace.frontend.backend.aot_autograd", return_value=fails):
        try:
            call(torch.randn(8, WIDTH))
        except UnsupportedError as error:
            return str(error)
    return ""


def test_what_torch_cannot_trace_is_a_typed_error(pool: Pool) -> None:
    for told in pool(2).run(what_torch_cannot_trace):
        assert "torch cannot trace these DTensors" in told
        assert "mul expected 2 arguments" in told
        assert "dynamic=False" in told


def warned(call: Callable[[torch.Tensor], Any], rows: list[int]) -> list[str]:
    """The warnings of calls with so many rows."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CacheWarning)
        for n in rows:
            call(torch.ones(n, 4))
    return [str(each.message) for each in caught if each.category is CacheWarning]


def test_a_cache_that_drops_what_comes_again_warns_once() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.relu() + 1

    small = {"cache_size": 2}
    compiled = interlace.compile(fn, options=small)
    assert not warned(compiled, [2, 3, 4, 5])  # none comes again
    (told,) = warned(compiled, [2, 3, 4, 5, 2])
    for part in ("fn met about", "keeps 2", "cache_size", "dynamic=True"):
        assert part in told
    assert not warned(interlace.compile(fn, options={"cache_size": 4}), [2, 3, 4, 5] * 2)


def classes_that_come_again(rows: list[int]) -> list[str]:
    """The warnings of inference with so many rows, by one Program at a time."""
    torch.compiler.reset()
    options: Any = {"cache_size": 1}
    model = feed_forward(world_mesh(), Shard(0), Shard(0))
    call = torch.compile(model, backend=backend, dynamic=True, options=options)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always", CacheWarning)
        for n in rows:
            call(torch.ones(n, WIDTH))
    return [str(each.message) for each in caught if each.category is CacheWarning]


def test_classes_of_sizes_that_come_again_warn_once(pool: Pool) -> None:
    assert pool(2).run(classes_that_come_again, [20, 24, 40, 44]) == [[], []]
    for (told,) in pool(2).run(classes_that_come_again, [20, 40, 24, 44, 20]):
        assert "inference graph" in told
        assert "keeps 1" in told


@pytest.mark.timeout(120)
def test_what_has_no_program_is_told_and_not_run_by_prepare() -> None:
    """As on a GPU, where Inductor compiles what communicates nothing."""
    torch.compiler.reset()
    seen = torch.zeros(1)

    def step(x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        seen.add_(1)
        return x.sigmoid() * 2

    options: Any = {"regions": "inductor"}
    x = torch.randn(5, 3)
    call = interlace.compile(step, x, seen, dynamic=True, options=options)
    assert seen.item() == 0
    assert "compiled by Inductor as a whole" in call.explain()
    with pytest.raises(ExecutorError, match="compiled by Inductor as a whole"):
        _ = call.program
    for rows in (5, 7, 9):
        x = torch.randn(rows, 3)
        assert torch.allclose(call(x, seen), x.sigmoid() * 2)
    assert seen.item() == 3
    call.close()
