"""Inputs that a Program frees: the caller gives them up, and each dies after its last use."""

from __future__ import annotations

import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from tests.frontend.models import Model, parallelise, world_mesh
from tests.support.fake_cuda import fake_engine
from tests.support.pool import Pool

from interlace.errors import ExecutorError
from interlace.frontend.binding import Bound
from interlace.ir import Free, Op, parse
from interlace.runtime.executor import Executor

TEXT = """
def f(x: f32[4], u: f32[4], w: f32[4]):
    main: call("aten.mul.Tensor", x, w, out=(a := f32[4]))
    main: free(x)
    main: call("aten.mul.Tensor", a, u, out=(b := f32[4]))
    main: free(u)
    main: call("aten.mul.Tensor", b, w, out=(c := f32[4]))
    return c
"""


def given() -> list[torch.Tensor]:
    return [torch.full((4,), 2.0) for _ in range(3)]


def test_each_dies_at_its_free() -> None:
    inputs = given()
    held = [weakref.ref(tensor) for tensor in inputs]
    alive: list[list[bool]] = []

    def look(_: int, __: int, op: Op) -> None:
        if not isinstance(op, Free):
            alive.append([ref() is not None for ref in held])

    with Executor(parse(TEXT), before_op=look).prepare() as executor:
        (result,) = executor.run(inputs, boxed=True)
        assert inputs == []
        assert alive == [[True] * 3, [False, True, True], [False, False, True]]
        assert result.tolist() == [16.0] * 4
        assert [ref() for ref in held] == [None] * 3


def test_without_boxed_the_callers_list_stays() -> None:
    inputs = given()
    with Executor(parse(TEXT)).prepare() as executor:
        for _ in range(2):
            (result,) = executor.run(inputs)
            assert result.tolist() == [16.0] * 4
    assert [tensor.tolist() for tensor in inputs] == [[2.0] * 4] * 3


def test_what_cannot_be_emptied_is_refused_before_the_run() -> None:
    with Executor(parse(TEXT)).prepare() as executor:
        with pytest.raises(ExecutorError, match="given a tuple of inputs to empty"):
            executor.run(tuple(given()), boxed=True)
        assert executor.run(given(), boxed=True)[0].tolist() == [16.0] * 4


def test_on_cuda_the_table_lets_go_of_them() -> None:
    with fake_engine(parse(TEXT), rank=0) as fake:
        inputs = given()
        held = [weakref.ref(tensor) for tensor in inputs]
        fake.engine.issue(inputs, None, (), (inputs,))
        assert inputs == []
        assert [ref() for ref in held] == [None] * 3


def backward_deaths(strategy: str, layers: int) -> tuple[list[str], list[str]]:
    """In the backward of so many layers: what the Program frees, in its order; what dies during the
    run, in order."""
    torch.manual_seed(0)
    options = {"strategy": strategy, "timeout_s": 40.0}
    net = parallelise(Model(layers), world_mesh())
    step: Any = torch.compile(net, backend="interlace", options=options)
    freed, died, during = list[str](), list[str](), list[str]()
    run = Bound.run

    def noted(self: Bound, args: list[Any], *rest: Any) -> list[Any] | None:
        if self.kind == "backward":
            freed[:] = [op.buffer for op in self.program.ops if isinstance(op, Free)]
            params = [buffer.name for buffer in self.program.params]
            died.clear()
            for name, place in zip(params, self.imported.inputs, strict=True):
                weakref.finalize(args[place], died.append, name)
        result = run(self, args, *rest)
        during[:] = died
        return result

    with mock.patch.object(Bound, "run", noted):
        for _ in range(2):  # the second is not the run that was compiled for
            step(torch.randint(32, (2, 8))).float().square().mean().backward()
    return freed, during


@pytest.mark.parametrize(("strategy", "layers"), [("serial", 8), ("peer", 2)])
def test_backward_lets_go_of_what_was_saved(pool: Pool, strategy: str, layers: int) -> None:
    for freed, during in pool(2).run(backward_deaths, strategy, layers):
        assert len(during) > 10 * layers
        if strategy == "serial":  # one stream
            assert during == [name for name in freed if name in during]
        else:
            assert {*during} <= {*freed}
