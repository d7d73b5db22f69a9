"""What a caller does around a compiled function: autocast, backward again, copies, lazy bits."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.frontend.models import Function
from tests.support.pool import Pool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import interlace
from interlace.errors import ExecutorError, OptionError, TeamError
from interlace.frontend import backend
from interlace.frontend.compile import Compiled

Compile = Callable[..., Callable[..., Any]]


def by_torch(fn: Callable[..., Any]) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(fn, backend=backend, dynamic=False)


def directly(fn: Callable[..., Any]) -> Compiled:
    return interlace.compile(fn if isinstance(fn, nn.Module) else Function(fn))


both = pytest.mark.parametrize("compile", [by_torch, directly], ids=["torch", "interlace"])


def make(seed: int) -> tuple[nn.Module, torch.Tensor]:
    """A model and its argument."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)), torch.randn(8, 16)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Every parameter's gradient; they are cleared."""
    found = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


# -- autocast -------------------------------------------------------------------------------------


@both
def test_backward_in_autocast_is_that_of_the_forward(compile: Compile, seed: int) -> None:
    model, x = make(seed)
    call = compile(model)
    call(x).sum().backward()
    want = gradients(model)
    y = call(x)
    with torch.autocast("cpu", torch.bfloat16):
        y.sum().backward()
    got = gradients(model)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(got, want, strict=True))


def test_new_sizes_of_a_backward_in_autocast(seed: int) -> None:
    torch.compiler.reset()
    model, _ = make(seed)
    call = torch.compile(model, backend=backend, dynamic=True)
    for rows in (4, 6, 9):
        x = torch.randn(rows, 16)
        model(x).square().sum().backward()
        want = gradients(model)
        loss = call(x).square().sum()
        with torch.autocast("cpu", torch.bfloat16):
            loss.backward()
        torch.testing.assert_close(gradients(model), want)


@both
def test_autocast_compiles_anew(compile: Compile, seed: int) -> None:
    model, x = make(seed)
    call = compile(model)
    for dtype in (None, torch.bfloat16, None):
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            got, want = call(x), model(x)
        assert got.dtype == want.dtype == (dtype or torch.float32)
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)


# -- modules --------------------------------------------------------------------------------------


def converted() -> list[torch.dtype]:
    """The types of what a parallel module gives, converted before and after its first call."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    call = interlace.compile(parallelize_module(net, mesh, {"0": ColwiseParallel()}))
    found: list[torch.dtype] = []
    for dtype in (torch.float64, torch.float32):
        call.to(dtype)
        y = call(torch.ones(2, 8, dtype=dtype))
        y.float().sum().backward()
        net.zero_grad()
        found.append(y.dtype)
    net.to(torch.float32)
    return found


def test_a_compiled_module_is_converted(pool: Pool) -> None:
    wanted = [torch.float64, torch.float32]
    assert pool(2).run(converted) == [wanted] * 2


def test_a_compiled_sequence_has_a_length_and_items(seed: int) -> None:
    made, x = make(seed)
    model: Any = made
    call: Any = interlace.compile(made)
    assert (len(call), call[1], [*call]) == (3, model[1], [*model])
    call[1] = nn.ReLU()
    torch.testing.assert_close(call(x), model(x))
    linear: Any = interlace.compile(model[0])
    assert bool(linear)
    with pytest.raises(TypeError, match="Linear"):
        len(linear)


# -- autograd -------------------------------------------------------------------------------------


@both
def test_backward_runs_again(compile: Compile, seed: int) -> None:
    model, x = make(seed)
    found: list[list[torch.Tensor]] = []
    for call in (model, compile(model)):
        loss = call(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        found.append(gradients(model))
    for want, got in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


@both
def test_backward_does_not_read_what_forward_wrote(compile: Compile, seed: int) -> None:
    def fn(memory: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (memory.view(2, 4).cos().exp() * w).sin()
        memory.add_(1)
        return y.sum()

    torch.manual_seed(seed)
    first, w = torch.randn(8), torch.randn(2, 4)
    found: list[torch.Tensor | None] = []
    for call in (fn, compile(fn)):
        memory, weight = first.clone(), w.clone().requires_grad_()
        call(memory, weight).backward()
        assert torch.equal(memory, first + 1)
        found.append(weight.grad)
    torch.testing.assert_close(*found)


# -- copies and arguments -------------------------------------------------------------------------


def test_copies_of_a_compiled_module(seed: int) -> None:
    torch.compiler.reset()
    model, x = make(seed)
    call: Any = torch.compile(model, backend=backend)
    want = call(x)
    for twin in (copy.deepcopy(call), pickle.loads(pickle.dumps(call))):
        assert twin is not call
        assert torch.equal(twin(x), want)
    assert copy.deepcopy(backend) is backend


@both
def test_a_lazily_conjugated_argument_cannot_be_written(compile: Compile, seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(2, dtype=torch.complex64)
    given, kept = x.conj(), x.conj().clone()
    with pytest.raises(ExecutorError, match=r"conjugated only by a mark.*resolve_conj"):
        compile(lambda x: x.mul_(2))(given)
    assert torch.equal(given, kept)


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_modes_of_other_backends_are_refused(mode: str) -> None:
    torch.compiler.reset()
    call = torch.compile(torch.relu, backend=backend, mode=mode)
    with pytest.raises(OptionError, match=rf"mode='{mode}'.*options="):
        call(torch.ones(2))


def released() -> list[str]:
    """What is told after `interlace.release()`, and what then helps, for both ways of compiling."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    x = distribute_tensor(torch.ones(4, 3), mesh, [Shard(0)])
    told: list[str] = []
    for compile in (by_torch, directly):
        call = compile(lambda x: x.sum().full_tensor())
        assert call(x).item() == 12
        interlace.release()
        try:
            call(x)
        except TeamError as error:
            told.append(str(error))
        torch.compiler.reset()
        if isinstance(call, Compiled):
            call.close()
        assert call(x).item() == 12
    return told


def test_after_a_release_one_is_told_what_helps(pool: Pool) -> None:
    for told in pool(2).run(released):
        assert len(told) == 2
        assert all("torch.compiler.reset()" in text and "close()" in text for text in told)
