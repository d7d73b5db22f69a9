"""What a plan of steps must notice, and what making one must not hang on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from interlace.errors import OptimizerError
from interlace.optim import AdamW

BF16 = torch.bfloat16


def parameters(count: int, *shape: int) -> list[Tensor]:
    params = [torch.ones(shape).requires_grad_() for _ in range(count)]
    for param in params:
        param.grad = torch.ones(shape)
    return params


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """As on a GPU, but launches do nothing; the kernels that are loaded, by name."""
    from interlace.kernels import launch
    from interlace.optim.adam import plan as adam_plan

    names: list[str] = []

    class Loaded:
        def __init__(self, source: Any, device: torch.device) -> None:
            names.append(source.kernel.fn.__name__)

        def launch(self, stream: int, grid: int, args: tuple[Any, ...]) -> None:
            pass

    monkeypatch.setattr(launch, "LoadedKernel", Loaded)
    monkeypatch.setattr(adam_plan, "served", lambda device: True)
    launch.kernel_of.cache_clear()
    yield names
    launch.kernel_of.cache_clear()


def test_steps_are_counted_in_fp32_whatever_the_default_dtype() -> None:
    """In bf16 256 + 1 is 256."""
    torch.set_default_dtype(BF16)
    try:
        (param,) = parameters(1, 3)
        optimizer = AdamW([param])
        for _ in range(300):
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert float(optimizer.state[param]["step"]) == 300
    assert optimizer.state[param]["step"].dtype == torch.float32


def test_the_default_device_does_not_matter() -> None:
    (param,) = parameters(1, 3)
    optimizer = AdamW([param])
    with torch.device("meta"):
        optimizer.step()
    assert optimizer.state[param]["step"].item() == 1
    assert bool((param < 1).all())


@pytest.mark.kernels
def test_the_default_device_does_not_matter_to_a_launch(loaded: list[str]) -> None:
    optimizer = AdamW(parameters(2, 3))
    with torch.device("meta"):
        optimizer.step()
        optimizer.step()
    assert "adam_kernel" in loaded


@pytest.mark.kernels
def test_kernels_are_loaded_once(loaded: list[str]) -> None:
    """Experts without gradients make another plan at every step; none may load a module anew."""
    params = parameters(3, 4)
    optimizer = AdamW(params)
    for step in range(6):
        for i, param in enumerate(params):
            param.grad = None if step % 3 == i else torch.ones(4)
        optimizer.step()
    AdamW(parameters(1, 9)).step()
    assert loaded == ["adam_kernel"]


@pytest.mark.kernels
def test_autograd_sees_that_parameters_were_written(loaded: list[str]) -> None:
    """Backward through what a step has overwritten is an error, as with torch.optim."""
    params = parameters(2, 4)
    params[1].grad = None
    optimizer = AdamW(params)
    square = params[0].square().sum()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.backward()
    assert params[1]._version == 0


def test_data_that_was_turned_in_place_is_noticed() -> None:
    """The address is the same, and so is the shape."""
    turned, plain = (torch.arange(9.0).view(3, 3).requires_grad_() for _ in range(2))
    ours, other = AdamW([turned], lr=0.1), AdamW([plain], lr=0.1)
    grads = [torch.arange(9.0).view(3, 3).square() - i for i in range(2)]
    turned.grad, plain.grad = grads[0], grads[0].t().contiguous()
    plain.data = plain.data.t().contiguous()
    ours.step()
    other.step()
    turned.data = turned.data.t()
    ours.state[turned]["exp_avg"].t_()
    ours.state[turned]["exp_avg_sq"].t_()
    turned.grad, plain.grad = grads[1].clone(), grads[1].clone()
    ours.step()
    other.step()
    assert torch.equal(turned, plain)


@pytest.mark.kernels
def test_data_that_was_cut_in_place_is_refused(loaded: list[str]) -> None:
    """A kernel would read past the end of the gradient."""
    (param,) = parameters(1, 8, 4)
    optimizer = AdamW([param])
    optimizer.step()
    whole = param.data
    param.grad = None
    param.data = whole[:4]
    param.grad = torch.ones(4, 4)
    with pytest.raises(OptimizerError, match="'exp_avg' is"):
        optimizer.step()


def test_a_gradient_of_another_shape_is_refused() -> None:
    (param,) = parameters(1, 4)
    param.data = torch.ones(8)
    with pytest.raises(OptimizerError, match=r"shape \(8,\) has shape \(4,\)"):
        AdamW([param]).step()


def test_a_parameter_that_changes_groups_is_noticed() -> None:
    """In the order of all parameters nothing moves."""
    params = parameters(3, 2)
    optimizer = AdamW([{"params": params[:2], "lr": 0.0}, {"params": params[2:], "lr": 0.5}])
    optimizer.step()
    optimizer.param_groups[0]["params"] = params[:1]
    optimizer.param_groups[1]["params"] = params[1:]
    optimizer.step()
    assert [bool((param < 1).all()) for param in params] == [False, True, True]


def test_a_step_that_is_set_to_a_number_counts_on() -> None:
    (param,) = parameters(1, 2)
    optimizer = AdamW([param])
    optimizer.step()
    optimizer.state[param]["step"] = 7
    optimizer.step()
    assert float(optimizer.state[param]["step"]) == 8


def test_a_parameter_without_memory_of_its_own_is_refused() -> None:
    """Tensor subclasses around others, as of quantized weights: their address is 0."""
    param = nn.Parameter(TwoTensor(torch.ones(3), torch.ones(3)))
    with pytest.raises(OptimizerError, match="TwoTensor"):
        AdamW([param])


def test_no_step_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay would be the same step again."""
    (param,) = parameters(1, 4)
    optimizer = AdamW([param])
    capturing = False
    monkeypatch.setattr(Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    optimizer.step()
    before, capturing = param.detach().clone(), True
    with pytest.raises(OptimizerError, match="counted on the host"):
        optimizer.step()
    assert torch.equal(param, before)
    assert float(optimizer.state[param]["step"]) == 1
