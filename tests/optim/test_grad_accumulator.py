"""One Parameter's sum: what it takes, from whom, and when it says that it is ready."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from interlace.errors import GradientError
from interlace.nn import GroupedLinear
from interlace.optim import GradAccumulator


def test_moves_what_autograd_brings(seed: int) -> None:
    """A bf16 Parameter's gradients are added up in fp32, in order, and `.grad` is gone."""
    torch.manual_seed(seed)
    param = nn.Parameter(torch.randn(33, dtype=torch.bfloat16))
    main = torch.zeros(33)
    accumulator = GradAccumulator(param, main)
    wanted = torch.zeros(33)
    for _ in range(3):
        dy = torch.randn(33, dtype=torch.bfloat16)
        (param * dy).sum().backward()
        wanted += dy
        assert param.grad is None
    assert torch.equal(main, wanted)
    assert accumulator.grad is main


def test_is_ready_once_in_each_backward_that_reaches_it() -> None:
    param, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    ready: list[GradAccumulator] = []
    accumulator = GradAccumulator(param, torch.zeros(3), on_ready=ready.append)
    (param * 2 + param).sum().backward()
    assert ready == [accumulator]
    other.sum().backward()
    assert ready == [accumulator]
    (param * other).sum().backward()
    assert ready == [accumulator] * 2


def test_takes_from_layers_of_ones_own() -> None:
    """Without a buffer the sum is `.grad`, once there is one."""
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    ready: list[GradAccumulator] = []
    accumulator = GradAccumulator(param, on_ready=ready.append)
    assert accumulator.destination() is None
    param.grad = torch.zeros_like(param)
    assert accumulator.destination() is param.grad
    accumulator.mark_ready()
    assert ready == [accumulator]


def test_what_comes_late_is_an_error_not_a_wrong_sum() -> None:
    param, main = nn.Parameter(torch.ones(3)), torch.zeros(3)
    accumulator = GradAccumulator(param, main)
    accumulator.refuse("it is over")
    with pytest.raises(GradientError, match="came late: it is over"):
        param.sum().backward()
    with pytest.raises(GradientError, match="came late: it is over"):
        accumulator.destination()
    assert not main.any()
    accumulator.refuse(None)
    param.sum().backward()
    assert main.tolist() == [1.0] * 3


def test_leaves_nothing_behind() -> None:
    """No attribute on the Parameter, no hook after `close()`, and no cycle that stays."""
    param, main = nn.Parameter(torch.ones(3)), torch.zeros(3)
    before = set(vars(param))
    accumulator = GradAccumulator(param, main)
    assert set(vars(param)) == before
    accumulator.close()
    param.sum().backward()
    assert param.grad is not None
    assert not main.any()
    gone = weakref.ref(accumulator)
    del accumulator
    gc.collect()
    assert gone() is None
    kept = weakref.ref(GradAccumulator(param, main))
    gc.collect()
    assert kept() is None
    param.sum().backward()
    assert param.grad.tolist() == [2.0] * 3


@pytest.mark.parametrize("buffer", [True, False])
def test_once_closed_it_leaves_a_layers_gradient_to_autograd(buffer: bool) -> None:
    """Also in a graph that was made before, and more than once."""
    layer, x, sizes = GroupedLinear(2, 4, 4, bias=False), torch.ones(2, 4), [1, 1]
    main = torch.zeros(2, 4, 4) if buffer else None
    accumulator = GradAccumulator(layer.weight, main)
    y = layer(x, sizes)
    accumulator.close()
    y.sum().backward()
    for _ in range(2):
        layer(x, sizes).sum().backward()
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.full((2, 4, 4), 3.0))
    assert main is None or not main.any()


def test_a_parameter_has_one_at_a_time() -> None:
    """Of two the first would take everything, and the sum of the second stay 0."""
    param = nn.Parameter(torch.ones(3))
    first = GradAccumulator(param, torch.zeros(3))
    with pytest.raises(GradientError, match=r"has an accumulator: close\(\) that one"):
        GradAccumulator(param, torch.zeros(3))
    first.close()
    main = torch.zeros(3)
    second = GradAccumulator(param, main)
    param.sum().backward()
    assert second.grad is main
    assert main.tolist() == [1.0] * 3


def test_other_hooks_of_the_parameter_are_called() -> None:
    """An optimizer that steps inside backward hooks in where nothing is returned, too."""
    layer, calls = GroupedLinear(2, 4, 4, bias=False), []
    _held = GradAccumulator(layer.weight)
    layer.weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.sum().item()))
    for _ in range(3):
        layer(torch.ones(2, 4), [1, 1]).sum().backward()
    assert calls == [32.0, 64.0, 96.0]


def test_belongs_to_one_parameter() -> None:
    accumulator = GradAccumulator(nn.Parameter(torch.ones(3)))
    with pytest.raises(GradientError, match="make another for the copy"):
        copy.deepcopy(accumulator)
    with pytest.raises(GradientError, match="no Parameter that requires a gradient"):
        GradAccumulator(nn.Parameter(torch.ones(3), requires_grad=False))


class Stream:
    """Stands in for a stream of a GPU, and notes which it waited for."""

    def __init__(self, handle: int) -> None:
        self.handle, self.awaited = handle, []

    def wait_stream(self, other: Stream) -> None:
        self.awaited.append(other.handle)


def test_another_stream_waits_for_who_wrote_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each change; saying that the gradient is complete takes it over without a wait."""
    param = torch.nn.Parameter(torch.ones(3))
    accumulator = GradAccumulator(param, torch.zeros(3))
    accumulator._device = 0
    one, two = Stream(0), Stream(4096)
    current: list[Stream] = [one]
    raw = lambda device: current[0].handle  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", raw, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    for _ in range(2):
        assert accumulator.destination() is accumulator.buffer
    assert accumulator.writer is one
    current[0] = two
    for _ in range(2):
        accumulator.destination()
    assert (one.awaited, two.awaited) == ([], [0])
    current[0] = one
    accumulator.mark_ready()
    assert accumulator.writer is one
    accumulator.destination()
    assert one.awaited == []
    current[0] = two
    accumulator.destination()
    assert (one.awaited, two.awaited) == ([], [0, 0])


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(
    "change", [lambda p: p.double(), lambda p: p.bfloat16(), lambda p: p.double().float()]
)
def test_a_parameter_of_another_type_is_an_error(buffered: bool, change: Any) -> None:
    """Its node is another one then, without the hooks: nothing would be told when it is ready."""
    layer = nn.Linear(3, 2)
    ready: list[GradAccumulator] = []
    weight, buffer = layer.weight, torch.zeros(2, 3) if buffered else None
    assert isinstance(weight, nn.Parameter)
    accumulator = GradAccumulator(weight, buffer, on_ready=ready.append)
    layer(torch.ones(1, 3)).sum().backward()
    change(layer)
    x = torch.ones(1, 3, dtype=layer.weight.dtype)
    with pytest.raises(GradientError, match="make another"):
        layer(x).sum().backward()
    assert ready == [accumulator]
    accumulator.close()
    again = GradAccumulator(weight, torch.zeros(2, 3), on_ready=ready.append)
    weight.grad = None
    layer(x).sum().backward()
    assert ready == [accumulator, again]


def test_new_data_of_the_same_type_is_welcome() -> None:
    param = nn.Parameter(torch.ones(3))
    ready: list[GradAccumulator] = []
    accumulator = GradAccumulator(param, torch.zeros(3), on_ready=ready.append)
    param.data = torch.full((3,), 2.0)
    param.requires_grad_(False).requires_grad_(True)
    param.square().sum().backward()
    assert ready == [accumulator]
    assert accumulator.buffer is not None
    assert accumulator.buffer.tolist() == [4.0] * 3


@pytest.mark.parametrize(
    "buffer",
    [
        torch.zeros(3, 4, dtype=torch.float8_e4m3fn),
        torch.zeros(3, 4, dtype=torch.int32),
        torch.zeros(3, 4, device="meta"),
        torch.zeros(3, 4, requires_grad=True),
        torch.zeros(()).expand(3, 4),
        torch.zeros(4).expand(3, 4),
        torch.zeros(4, 3),
    ],
)
def test_a_buffer_that_cannot_sum_is_refused(buffer: torch.Tensor) -> None:
    with pytest.raises(GradientError, match="cannot hold the gradient"):
        GradAccumulator(nn.Parameter(torch.ones(3, 4)), buffer)
