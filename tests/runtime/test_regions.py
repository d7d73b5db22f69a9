"""Regions: through Inductor compiled once for all layers, and never two names for one tensor."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from interlace.errors import ProgramError
from interlace.frontend import backend
from interlace.ir import parse
from interlace.options import Options
from interlace.runtime import Executor
from interlace.runtime.calling import regions

pytestmark = [
    pytest.mark.skipif(not shutil.which("g++"), reason="there is no C++ compiler here"),
    pytest.mark.timeout(300),
]

LAYERS = """
def layers(x: f32[4, 8], y: f32[4, 8]):
    @region
    def activation(a, b):
        t0 = aten.mul.Tensor(a, {factor})
        t1 = aten.add.Tensor(t0, b)
        return t1
    main: call("activation", x, y, out=(h := f32[4, 8]))
    main: call("activation", h, y, out=(z := f32[4, 8]))
    return z
"""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The layouts of each compilation."""
    found: list[Any] = []
    original = regions.compile_graph

    def counting(module: Any, layouts: Any, device: torch.device) -> Any:
        found.append(layouts)
        return original(module, layouts, device)

    monkeypatch.setattr(regions, "compile_graph", counting)
    regions.forget()
    yield found
    regions.forget()


def run(text: str, *inputs: torch.Tensor, how: Any = "inductor") -> tuple[Any, ...]:
    with Executor(parse(text), options=Options(regions=how)).prepare() as executor:
        return executor.run(inputs)


def test_layers_and_programs_share_one_compilation(compiled: list[Any]) -> None:
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    text = LAYERS.format(factor=3.0)
    for name in ("layers", "other"):
        (z,) = run(text.replace("def layers", f"def {name}"), x, y)
        torch.testing.assert_close(z, (x * 3 + y) * 3 + y)
    assert len(compiled) == 1
    run(text.replace("[4, 8]", "[2, 8]"), x[:2], y[:2])
    assert len(compiled) == 2, "other sizes are another task"
    run(LAYERS.format(factor=3), x, y)
    assert len(compiled) == 3, "3 and 3.0 are equal, but no two of a kind"


TWINS = """
def twins(x: f32[4, 8]):
    @region
    def both(a):
        t0 = aten.mul.Tensor(a, 2.0)
        t1 = aten.mul.Tensor(a, 2.0)
        t2 = aten.mul.Tensor(a, 1)
        t3 = aten.clone.default(a)
        return t0, t1, t2, t3
    main: call("both", x, out=(p := f32[4, 8], q := f32[4, 8], r := f32[4, 8], s := f32[4, 8]))
    return p, q, r, s
"""


@pytest.mark.parametrize("how", ["inductor", "eager"])
def test_equal_outputs_are_tensors_of_their_own(compiled: list[Any], how: str) -> None:
    x = torch.randn(4, 8)
    results = run(TWINS, x, how=how)
    for result, wanted in zip(results, (x * 2, x * 2, x, x), strict=True):
        assert torch.equal(result, wanted)
    storages = {tensor.untyped_storage().data_ptr() for tensor in (x, *results)}
    assert len(storages) == 5


VIEWS = """
def f(x: f32[4, 8]):
    @region
    def views(a):
        b = aten.view.default(a, (32,))
        c = aten.neg.default(a)
        d = aten.t.default(c)
        e = aten.view.default(b, (8, 4))
        return b, c, d, e
    main: call("views", x, out=(p := f32[32], q := f32[4, 8], r := f32[8, 4], s := f32[8, 4]))
    main: call("aten.mul.out", x, 0.0, out=x)
    main: call("aten.mul.out", q, 0.0, out=q)
    return p, r, s
"""


@pytest.mark.parametrize("how", ["inductor", "eager"])
def test_views_are_tensors_of_their_own(compiled: list[Any], how: str) -> None:
    """What is written later to the tensor that they would be views of is not seen in them."""
    x = torch.randn(4, 8)
    wanted = x.flatten().clone(), -x.t(), x.view(8, 4).clone()
    for result, right in zip(run(VIEWS, x, how=how), wanted, strict=True):
        assert torch.equal(result, right)
    assert not x.any()


def test_arguments_with_strides_of_all_kinds(compiled: list[Any]) -> None:
    text = """
def strides(x: f32[8, 4], w: f32[4], n: i64[3]):
    @region
    def body(a, b, c):
        t0 = aten.mul.Tensor(a, b)
        t1 = aten.floor_divide.default(c, c)
        return t0, t1
    main: call("body", x.permute(1, 0), w.view(4, 1).expand(4, 8), n, out=(
        y := f32[4, 8], m := i64[3]))
    return y, m
"""
    x, w, n = torch.randn(8, 4), torch.randn(4), torch.tensor([3, 5, 7])
    y, m = run(text, x, w, n)
    torch.testing.assert_close(y, x.t() * w.view(4, 1))
    assert m.tolist() == [1, 1, 1]


def test_tensors_made_inside(compiled: list[Any]) -> None:
    text = """
def masked(x: f32[4, 8], m: bool[4]):
    @region
    def body(a, b):
        t0 = aten.full.default((), 0.0, dtype=f32, device="@device", pin_memory=False)
        t1 = aten.view.default(b, (4, 1))
        t2 = aten.where.self(t1, t0, a)
        return t2
    main: call("body", x, m, out=(y := f32[4, 8]))
    return y
"""
    x, mask = torch.randn(4, 8), torch.tensor([True, False, True, False])
    (y,) = run(text, x, mask)
    assert torch.equal(y, x.masked_fill(mask.view(4, 1), 0.0))


def test_what_was_compiled_is_kept_until_settings_change(compiled: list[Any]) -> None:
    from torch._inductor import config

    x = torch.randn(4, 8)
    for _ in range(2):
        run(LAYERS.format(factor=0.5), x, x)
        torch.compiler.reset()
        backend.reset()
    assert len(compiled) == 1
    with config.patch(max_fusion_size=1):
        run(LAYERS.format(factor=0.5), x, x)
    assert len(compiled) == 2
    regions.forget()
    run(LAYERS.format(factor=0.5), x, x)
    assert len(compiled) == 3


def test_a_region_names_all_results_of_an_operator() -> None:
    text = """
def f(x: f32[4, 8]):
    @region
    def halves(a):
        b, c = aten.split.Tensor(a, 1)
        d = aten.add.Tensor(b, c)
        return d
    main: call("halves", x, out=(z := f32[1, 8]))
    return z
"""
    with Executor(parse(text), options=Options(regions="eager")).prepare() as executor:
        with pytest.raises(ProgramError, match="gives 4 results, and the region names 2"):
            executor.run([torch.ones(4, 8)])
