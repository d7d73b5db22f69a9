"""Views of inputs that stay the same tensors: made once, right when they change, and let go of."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from interlace.ir import parse
from interlace.runtime import Executor
from interlace.runtime.kept import KeptViews

TEXT = """
def f(w: f32[6, 4], x: f32[3, 4]):
    main: call("aten.mm.default", x, w.permute(1, 0), out=(y := f32[3, 6]))
    return y
"""


class Views(TorchDispatchMode):
    """Counts the views that are made."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0

    def __torch_dispatch__(self, fn: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.made += "as_strided" in str(fn) or "set_" in str(fn)
        return fn(*args, **(kwargs or {}))


@pytest.fixture
def executor() -> Any:
    with Executor(parse(TEXT), static_inputs=["w"]).prepare() as made:
        yield made


def test_the_views_of_a_parameter_are_made_once(executor: Executor) -> None:
    w, x = torch.randn(6, 4), torch.randn(3, 4)
    with Views() as views:
        for _ in range(4):
            (y,) = executor.run([w, x])
    assert torch.equal(y, x @ w.t())
    assert views.made == 1


def test_other_memory_and_other_tensors_are_seen(executor: Executor) -> None:
    w, x = torch.nn.Parameter(torch.randn(6, 4)), torch.randn(3, 4)
    for _ in range(2):
        executor.run([w, x])
    with torch.no_grad():
        w.mul_(2)
    assert torch.equal(executor.run([w, x])[0], x @ w.t())
    w.data = torch.randn(6, 4)
    assert torch.equal(executor.run([w, x])[0], x @ w.t())
    other = torch.randn(12, 4)[6:]
    assert torch.equal(executor.run([other, x])[0], x @ other.t())
    w.data = other.clone()
    assert torch.equal(executor.run([w, x])[0], x @ w.t())


def test_a_parameter_that_is_let_go_of_takes_its_memory_with_it(executor: Executor) -> None:
    w, x = torch.nn.Parameter(torch.randn(6, 4)), torch.randn(3, 4)
    executor.run([w, x])
    tensor, storage = weakref.ref(w), weakref.ref(w.untyped_storage())
    (places,) = (
        kept
        for kept in gc.get_objects()
        if isinstance(kept, KeptViews) and kept._tensor is not None and kept._tensor() is w
    )
    assert len(places._views) == 1
    del w
    gc.collect()
    assert tensor() is None
    assert places._views == []
    assert storage() is None


def test_what_a_program_writes_is_no_parameter_that_stays() -> None:
    text = """
def f(w: f32[6, 4], x: f32[4]):
    main: copy(x, w[0:1].view(4))
    main: call("aten.mul.Tensor", w, 1.0, out=(y := f32[6, 4]))
    return y
"""
    with Executor(parse(text), static_inputs=["w"]).prepare() as executor:
        w, x = torch.zeros(6, 4), torch.ones(4)
        before = w._version
        executor.run([w, x])
        assert torch.equal(w[0], x)
        assert w._version > before  # autograd sees it
