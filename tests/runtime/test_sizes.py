"""Executors of Programs with named sizes on one rank: in turn, again, from threads, nested."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from typing import Any

import pytest
import torch

from interlace.errors import ExecutorError
from interlace.ir import parse
from interlace.ir.sizes import named
from interlace.options import Options
from interlace.passes import run_pipeline
from interlace.runtime import Executor
from interlace.runtime.run_sizes import RunSizes

TEXT = """
def f(S: Size[12], T: Size[3], x: f32[S, 4], y: out[f32[S // 2, 4]]):
    assume(S % 2 == 0)
    tmp = alloc(f32[S, 4])
    side: call("aten.mul.out", x, 2.0, out=tmp)
    side: record(e)
    main: wait(e)
    main: call("aten.add.out", tmp[0:S // 2, :], tmp[S // 2:S, :], out=y)
    main: call("aten.full.default", (T, S), 1.5, out=(t := f32[T, S]))
    return y, t
"""


def expected(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[0] // 2
    return 2 * x[:half] + 2 * x[half:]


def given(rows: int) -> torch.Tensor:
    return torch.randn(rows, 4)


def test_sizes_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    with Executor(parse(TEXT)).prepare() as executor:
        assert str(executor.sizes) == "S >= 3, S <= 15, S % 2 == 0, T >= 2"
        for _ in range(60):
            x = given(rng.choice([8, 10, 12, 14]))
            y, t = executor.run([x])
            assert torch.equal(y, expected(x))
            assert t.shape == (3, x.shape[0])
            out = torch.empty_like(y)
            assert executor.run([x], out=[out])[0] is out
            assert torch.equal(out, y)


def test_a_size_that_no_input_tells_is_given() -> None:
    with Executor(parse(TEXT)).prepare() as executor:
        x = given(12)
        assert executor.run([x])[1].shape == (3, 12)
        assert executor.run([x], sizes={"S": 12, "T": 2})[1].shape == (2, 12)
        assert executor.run([given(8)])[1].shape == (2, 8)
        with pytest.raises(ExecutorError, match=r"is for sizes where .*T = 1"):
            executor.run([x], sizes={"S": 12, "T": 1})
        with pytest.raises(ExecutorError, match="named sizes S, T, and `sizes` has no 'T'"):
            executor.run([x], sizes={"S": 12})
        assert executor.run([x])[1].shape == (2, 12)


def test_a_size_of_another_class_is_refused() -> None:
    with Executor(parse(TEXT)).prepare() as executor:
        for rows in (7, 64):
            with pytest.raises(ExecutorError, match="is for sizes where"):
                executor.run([given(rows)])
        with pytest.raises(ExecutorError, match="has shape"):
            executor.run([torch.randn(12, 5)])
        with pytest.raises(ExecutorError, match="takes 1 inputs"):
            executor.run([])
        x = given(12)
        assert torch.equal(executor.run([x])[0], expected(x))


def test_threads_with_sizes_of_their_own() -> None:
    right: list[int] = []
    with Executor(parse(TEXT)).prepare() as executor:

        def work(rows: int) -> None:
            for _ in range(50):
                x = given(rows)
                assert torch.equal(executor.run([x])[0], expected(x))
            right.append(rows)

        threads = [threading.Thread(target=work, args=(rows,)) for rows in (8, 10, 12, 14)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
    assert sorted(right) == [8, 10, 12, 14]


def test_memory_that_shrinks_as_a_size_grows() -> None:
    """Memory is laid out once, for the most that any size of the class needs."""
    text = """
def f(S: Size[12], x: f32[S], y: out[f32[16 - S]]):
    tmp = alloc(f32[16 - S])
    main: copy(x[0:16 - S], tmp)
    main: copy(tmp, y)
"""
    with Executor(parse(text)).prepare() as executor:
        x = torch.randn(12)
        executor.run([x], out=[y := torch.empty(4)])
        assert torch.equal(y, x[:4])
        x = torch.randn(8)
        executor.run([x], out=[y := torch.empty(8)])
        assert torch.equal(y, x)


def test_a_class_whose_largest_sizes_are_not_in_it() -> None:
    text = """
def f(S: Size[40], T: Size[50], x: f32[S], z: f32[T], y: out[f32[T - S]]):
    assume(T - S > 0)
    tmp = alloc(f32[T - S])
    main: copy(z[S:T], tmp)
    main: copy(tmp, y)
"""
    with Executor(parse(text)).prepare() as executor:
        z = torch.randn(50)
        executor.run([torch.randn(40), z], out=[y := torch.empty(10)])
        assert torch.equal(y, z[40:])


@pytest.mark.parametrize("after_s", [0.0, 0.01, 0.03])
def test_closing_while_another_thread_runs(after_s: float) -> None:
    """The run ends as if nothing was closed."""
    text = """
def f(x: f32[600, 600], y: out[f32[600, 600]]):
    t = alloc(f32[600, 600])
    main: call("aten.mm.out", x, x, out=t)
"""
    text += '    main: call("aten.mm.out", t, x, out=y)\n' * 8
    x, entered = torch.eye(600), threading.Event()
    executor = Executor(parse(text), before_op=lambda *_: entered.set()).prepare()
    found: list[torch.Tensor] = []

    def work() -> None:
        found.extend(executor.run([x], out=[torch.empty(600, 600)]))

    executor.run([x], out=[torch.empty(600, 600)])
    entered.clear()
    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(30)
    time.sleep(after_s)
    executor.close()
    thread.join(60)
    assert not thread.is_alive()
    assert torch.equal(found[0], x)


def test_a_turn_that_fails_leaves_the_sizes_before() -> None:
    sizes, size = RunSizes({"S": 8}), named("S")
    told: dict[str, tuple[int, ...]] = {}

    def tell(numbers: tuple[int, ...]) -> None:
        if numbers == (24,):
            raise MemoryError("full")
        told["middle"] = numbers

    sizes.follow((size, 4), lambda numbers: told.update(first=numbers))
    sizes.follow((2 * size,), tell)
    sizes.follow((size + 1,), lambda numbers: told.update(last=numbers))
    sizes.follow((7,), lambda numbers: told.update(fixed=numbers))
    sizes.turn((6,))
    assert told == {"first": (6, 4), "middle": (12,), "last": (7,), "fixed": (7,)}
    with pytest.raises(MemoryError):
        sizes.turn((12,))
    assert sizes.values == {"S": 6}
    assert told == {"first": (6, 4), "middle": (12,), "last": (7,), "fixed": (7,)}


def test_sizes_among_the_arguments_of_small_calls() -> None:
    """Regions have bodies without sizes: such calls stay outside."""
    text = """
def f(S: Size[6], x: f32[S, 4], w: f32[4, 4]):
    main: call("aten.mul.Tensor", x, S, out=(a := f32[S, 4]))
    main: call("aten.add.Tensor", a, 1.0, out=(b := f32[S, 4]))
    main: call("aten.neg.default", b, out=(c := f32[S, 4]))
    main: call("aten.add.Tensor", w, 1.0, out=(d := f32[4, 4]))
    main: call("aten.mul.Tensor", d, S, out=(e := f32[4, 4]))
    return c, e
"""
    program = run_pipeline(parse(text), "form_regions")
    assert program.regions
    assert parse(str(program)) == program
    with Executor(program).prepare() as executor:
        for rows in (6, 5, 7, 4):
            x, w = given(rows), torch.randn(4, 4)
            c, e = executor.run([x, w])
            assert torch.equal(c, -(x * rows + 1))
            assert torch.equal(e, (w + 1) * rows)


def test_memory_goes_with_the_executor() -> None:
    text = """
def f(S: Size[12], x: f32[S, 4], y: out[f32[S - 2, 4]]):
    tmp = alloc(f32[S, 4])
    main: call("aten.mul.out", x, 2.0, out=tmp)
    main: call("aten.neg.out", tmp[2:S, :], out=y)
"""
    executor = Executor(parse(text)).prepare()
    executor.run([given(12)])
    executor.run([given(8)])
    assert executor.engine is not None
    table = weakref.ref(executor.engine.context.values)
    gc.disable()
    try:
        executor.close()
        assert table() is None
    finally:
        gc.enable()


def test_a_run_within_a_run_of_another_size_is_refused() -> None:
    told: list[str] = []

    def nested(_rank: int, index: int, _op: Any) -> None:
        if index == 4:  # on the calling thread
            try:
                executor.run([given(8)])
            except ExecutorError as error:
                told.append(str(error))

    executor = Executor(parse(TEXT), before_op=nested, options=Options(timeout_s=5))
    x = given(12)
    assert torch.equal(executor.prepare().run([x])[0], expected(x))
    executor.close()
    assert len(told) == 1
    assert "was called in a run of its own" in told[0]
