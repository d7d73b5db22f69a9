"""Calls, regions, views and results, on one rank without a process group."""

from __future__ import annotations

import random
import shutil
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from interlace.errors import (
    BackendError,
    ExecutorError,
    InterlaceError,
    ProgramError,
    UnsupportedError,
)
from interlace.ir import Name, Node, Program, Region, parse
from interlace.ir.sizes import divided, named
from interlace.kernels import sum_slots
from interlace.options import Options
from interlace.runtime import Executor, engine_for
from interlace.runtime.calling.regions import inductor_by_size

X = torch.arange(12.0).view(3, 4)


def run(text: str, *inputs: torch.Tensor, **options: object) -> tuple[object, ...]:
    with Executor(parse(text), options=Options.from_dict(options)).prepare() as executor:
        first = executor.run(list(inputs))
        again = executor.run(list(inputs))
        for one, other in zip(first, again, strict=True):
            if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
                assert torch.equal(one, other)
        return first


def tensors(found: tuple[object, ...]) -> list[torch.Tensor]:
    assert all(isinstance(tensor, torch.Tensor) for tensor in found)
    return [tensor for tensor in found if isinstance(tensor, torch.Tensor)]


CALLS = {
    "fresh": ('main: call("aten.mul.Tensor", x, 2.0, out=(y := f32[3, 4]))', X * 2),
    "out": (
        'y = empty(f32[3, 4])\n    main: call("aten.mul.out", x, x, out=y)',
        X * X,
    ),
    "copied-into": (
        'y = empty(f32[3, 4])\n    main: call("aten.mul.Tensor", x, 3.0, out=y)',
        X * 3,
    ),
    "keyword": (
        'main: call("aten.sum.dim_IntList", x, (1,), keepdim=True, out=(y := f32[3, 1]))',
        X.sum(1, keepdim=True),
    ),
    "list": (
        'main: call("aten.cat.default", (x, x.slice(0, 0, 1)), 0, out=(y := f32[4, 4]))',
        torch.cat([X, X[:1]]),
    ),
    "dtype-word": (
        'main: call("aten._to_copy.default", x, dtype=bf16, out=(y := bf16[3, 4]))',
        X.bfloat16(),
    ),
    "device-word": (
        'main: call("aten.full.default", (2, 2), 7.0, dtype=f32, device="@device", '
        "pin_memory=False, out=(y := f32[2, 2]))",
        torch.full((2, 2), 7.0),
    ),
    "alias": ('main: call("aten.view.default", x, (12,), out=(y := f32[12]))', X.view(12)),
    "other-strides": (
        'main: call("aten.clone.default", x.permute(1, 0), out=(y := f32[4, 3].strides(3, 1)))',
        X.t(),
    ),
    "view-of-input": (
        'main: call("aten.neg.default", x.permute(1, 0).slice(0, 1, 3), out=(y := f32[2, 3]))',
        -X.t()[1:3],
    ),
    "cast-view": (
        'main: call("aten.clone.default", x.cast(i32), out=(y := i32[3, 4]))',
        X.view(torch.int32),
    ),
    "kernel": (
        'main: call("interlace.sum_slots", x.view(3, 2, 2), out=(y := f32[2, 2]))',
        X.view(3, 2, 2).sum(0),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_call(name: str) -> None:
    line, wanted = CALLS[name]
    (y,) = tensors(run(f"def calls(x: f32[3, 4]):\n    {line}\n    return y\n", X))
    assert y.dtype == wanted.dtype
    assert torch.equal(y, wanted)
    assert y.untyped_storage().data_ptr() != X.untyped_storage().data_ptr()


def test_a_call_may_give_several_results() -> None:
    text = """
def several(x: f32[3, 4]):
    main: call("aten.topk.default", x, 2, out=(v := f32[3, 2], i := i64[3, 2]))
    return v, (i, 5, None), x
"""
    values, (indices, five, none), x = run(text, X)  # pyright: ignore[reportGeneralTypeIssues]
    wanted = X.topk(2)
    assert torch.equal(values, wanted.values)  # pyright: ignore[reportArgumentType]
    assert torch.equal(indices, wanted.indices)
    assert (five, none) == (5, None)
    assert x is X


def test_an_input_may_be_written() -> None:
    text = """
def cache(k: f32[4, 2], new: f32[1, 2]):
    main: copy(new, k.slice(0, 1, 2))
    main: call("aten.add_.Tensor", k.slice(0, 3, 4), 1.0, out=k.slice(0, 3, 4), mutates=True)
    return k.slice(0, 0, 2)
"""
    cache, new = torch.zeros(4, 2), torch.ones(1, 2)
    with Executor(parse(text)).prepare() as executor:
        (seen,) = executor.run([cache, new])
    assert cache.tolist() == [[0, 0], [1, 1], [0, 0], [1, 1]]
    assert seen.data_ptr() == cache.data_ptr()


def test_outputs_are_the_callers_or_new() -> None:
    text = (
        'def double(x: f32[3, 4], y: out[f32[3, 4]]):\n    main: call("aten.add.out", x, x, out=y)'
    )
    with Executor(parse(text)).prepare() as executor:
        mine = torch.empty(3, 4)
        (given,) = executor.run([X], out=[mine])
        (made,) = executor.run([X])
        assert given is mine
        assert torch.equal(mine, X * 2)
        assert torch.equal(made, X * 2)
        assert made is not mine
        with pytest.raises(ExecutorError, match="output 0 \\('y'\\)"):
            executor.run([X], out=[torch.empty(3)])


def test_results_take_part_in_autograd_and_the_run_does_not() -> None:
    weight = torch.ones(3, 4, requires_grad=True)
    text = """
def double(x: f32[3, 4]):
    main: call("aten.mul.Tensor", x, 2.0, out=(y := f32[3, 4]))
    return y
"""
    (y,) = tensors(run(text, weight))
    assert not y.requires_grad
    (y * weight).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((3, 4), 2.0))


REGION = """
def regional(x: f32[3, 4]):
    @region
    def gelu(a, b):
        t0 = aten.mul.Tensor(a, b)
        t1, t2 = aten.topk.default(t0, 2)
        t3 = aten.add.Tensor(t1, 1.0)
        return t3, t2
    main: call("gelu", x, x, out=(y := f32[3, 2], i := i64[3, 2]))
    return y, i
"""


@pytest.mark.parametrize("regions", ["eager", "inductor"])
def test_region(regions: str) -> None:
    if regions == "inductor" and not shutil.which("g++"):
        pytest.skip("there is no C++ compiler here")
    y, i = tensors(run(REGION, X, regions=regions))
    wanted = (X * X).topk(2)
    torch.testing.assert_close(y, wanted.values + 1)
    assert torch.equal(i, wanted.indices)


@pytest.mark.skipif(not shutil.which("g++"), reason="there is no C++ compiler here")
def test_a_region_of_named_sizes_is_compiled_once_for_all_values_of_a_condition(seed: int) -> None:
    rows, f32 = named("S"), torch.float32
    body = (
        Node(("t",), "aten.mul.Tensor", (Name("a"), Name("b"))),
        Node(("u",), "aten.add.Tensor", (Name("t"), 1.0)),
        Node(("v",), "aten.alias.default", (Name("b"),)),
    )
    region = Region("r", ("a", "b"), body, ("u", "v"))
    layouts = ((divided(rows, 2), 8), (8, 1), f32), ((divided(rows, 2), 8), (8, 1), f32)
    run_at = inductor_by_size(region, ("S",), layouts, torch.device("cpu"))
    generator = random.Random(seed)
    for size in (64, 66, 2 * generator.randrange(2, 500), 2, 0, 64):
        a, b = torch.rand(size // 2, 8), torch.rand(size // 2, 8)
        u, v = run_at((size,))([a, b])
        torch.testing.assert_close(u, a * b + 1)
        assert torch.equal(v, b)
        assert v.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() or not size
    same = inductor_by_size(region, ("S",), layouts, torch.device("cpu"))
    assert same.__self__ is run_at.__self__  # of another layer or Program
    assert len(run_at.__self__._compiled) == 2, "one row is a case of its own to Inductor"


def test_a_missing_compiler_is_an_error_that_says_so() -> None:
    from torch._inductor import config

    text = REGION.replace("1.0", "1.25")  # not in Inductor's cache
    # Not by pytest's monkeypatch: `cxx` is not in the proxy's `__dict__`, so its undo deletes it.
    missing = config.patch({"cpp.cxx": ("/nonexistent/g++",)})
    with missing, pytest.raises(UnsupportedError, match=r"(?s)regions='eager', .*a C\+\+ compiler"):
        Executor(parse(text), options=Options(regions="inductor")).prepare()


BAD = {
    "unknown-operator": (
        'main: call("aten.nothing.default", x, out=(y := f32[3, 4]))\n    return y',
        ProgramError,
        "no operator named 'aten.nothing.default'",
    ),
    "wrong-shape": (
        'main: call("aten.mul.Tensor", x, 2.0, out=(y := f32[3, 5]))\n    return y',
        ExecutorError,
        "shape \\[3, 4\\], but the Program declares y",
    ),
    "wrong-dtype": (
        'main: call("aten.mul.Tensor", x, 2.0, out=(y := f64[3, 4]))\n    return y',
        ExecutorError,
        "torch.float32 of shape",
    ),
    "resizes-out": (
        'y = empty(f32[2, 4])\n    main: call("aten.mul.out", x, x, out=y)\n    return y',
        ExecutorError,
        "but the Program has \\[2, 4\\] for it",
    ),
    "returns-local": (
        "y = alloc(f32[3, 4])\n    main: copy(x, y)\n    return y",
        InterlaceError,
        "y",
    ),
    "raises": (
        'main: call("aten.mm.default", x, x, out=(y := f32[3, 4]))\n    return y',
        InterlaceError,
        "mm",
    ),
}


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("name", BAD)
def test_bad_call(name: str) -> None:
    body, error, words = BAD[name]
    with pytest.raises(error, match=words):
        run(f"def bad(x: f32[3, 4]):\n    {body}\n", X)


def test_a_failed_run_outside_of_teams_needs_no_reset() -> None:
    text = """
def shaky(x: f32[3, 4], i: i64[1]):
    main: call("aten.index_select.default", x, 0, i, out=(y := f32[1, 4]))
    return y
"""
    with Executor(parse(text)).prepare() as executor:
        for row in range(3):
            with pytest.raises(ExecutorError, match=r"(?s)op 0 of shaky.*raised IndexError") as it:
                executor.run([X, torch.tensor([7])])
            assert "reset" not in str(it.value)
            assert isinstance(it.value.__cause__, IndexError)
            assert torch.is_grad_enabled()
            assert torch.equal(executor.run([X, torch.tensor([row])])[0], X[row : row + 1])
        executor.reset()  # which has nothing to do
        assert torch.equal(executor.run([X, torch.tensor([1])])[0], X[1:2])


def test_there_is_a_seam_for_other_devices() -> None:
    assert engine_for("cpu")[0].__name__ == "CpuEngine"
    with pytest.raises(BackendError, match="'meta' devices"):
        engine_for("meta")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
def test_sum_slots_goes_in_order_and_wide(dtype: torch.dtype, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    slots = (torch.randn(5, 7, 3, generator=generator) * 100).to(dtype)
    wide = torch.float32 if dtype.is_floating_point else dtype
    total = torch.zeros(7, 3, dtype=wide)
    for slot in slots:
        total += slot
    assert torch.equal(sum_slots(slots), total.to(dtype))
    out = torch.empty(7, 3, dtype=dtype)
    assert sum_slots(slots, out=out) is out
    assert torch.equal(out, total.to(dtype))


def test_threads_end_and_memory_goes_when_an_executor_does() -> None:
    import gc
    import threading
    import weakref

    text = """
def two(x: f32[3, 4]):
    t = alloc(f32[3, 4])
    y = empty(f32[3, 4])
    side: copy(x, t)
    side: record(e)
    main: wait(e)
    main: copy(t, y)
    return y
"""
    program: Program = parse(text)
    executor = Executor(program).prepare()
    assert torch.equal(executor.run([X])[0], X)
    assert any(
        thread.name == "interlace stream main" or "side" in thread.name
        for thread in threading.enumerate()
    )
    gone = weakref.ref(executor)
    del executor
    gc.collect()
    assert gone() is None
    assert not any("interlace stream" in thread.name for thread in threading.enumerate())


def test_results_that_an_operator_leaves_out_are_zeros() -> None:
    """As of attention whose backward is not wanted: its shapes tell of outputs that never come."""
    text = """
def f(g: f32[4, 8], x: f32[4, 8], m: f32[4, 1], r: f32[4, 1], w: f32[8], b: f32[8]):
    main: call(
        "aten.native_layer_norm_backward.default", g, x, (8,), m, r, w, b, (True, False, True),
        out=(dx := f32[4, 8], dw := f32[8], db := f32[8]),
    )
    return dx, dw, db
"""
    g, x = torch.randn(4, 8), torch.randn(4, 8)
    m, r = x.mean(1, keepdim=True), x.var(1, keepdim=True, correction=0).rsqrt()
    w, b = torch.randn(8), torch.randn(8)
    dx, dw, db = tensors(run(text, g, x, m, r, w, b))
    assert torch.allclose(db, g.sum(0), atol=1e-5)
    assert dx.abs().sum() > 0
    assert not dw.any()


@torch.library.custom_op("interlace_test::split", mutates_args=())
def split(x: torch.Tensor) -> list[torch.Tensor]:
    """Twice x, and no second tensor, although the Program declares one."""
    return [2 * x]


@pytest.mark.parametrize("used", [False, True])
def test_what_a_call_leaves_out_is_zeros_and_only_made_for_whoever_uses_it(used: bool) -> None:
    text = (
        "def f(x: f32[3, 4]):\n"
        '    main: call("interlace_test.split.default", x, out=(y := f32[3, 4], z := f32[5]))\n'
        f"    return y{', z' if used else ''}\n"
    )
    made: list[int] = []

    class Making(TorchDispatchMode):
        def __torch_dispatch__(
            self, fn: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = fn(*args, **(kwargs or {}))
            made.append(isinstance(result, torch.Tensor) and result.shape == (5,))
            return result

    with Executor(parse(text), operators=["interlace_test"]).prepare() as executor:
        with Making():
            found = tensors(executor.run([X]))
    assert torch.equal(found[0], 2 * X)
    assert any(made) == used
    assert not used or torch.equal(found[1], torch.zeros(5))
