"""What a hot run does beyond the Program's own calls: counted, not timed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from interlace.errors import ExecutorError
from interlace.ir import parse
from interlace.options import Options
from interlace.runtime import Executor
from interlace_bench.kernels.host import WIDTH, chain, program

CPU = torch.device("cpu")


class Count(TorchDispatchMode):
    """Counts the operators that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def given() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH) / WIDTH


@pytest.mark.parametrize("calls", [1, 2, 8, 33])
def test_a_run_dispatches_the_programs_calls_and_nothing_else(calls: int) -> None:
    """No view, no slice, no copy, no event and no temporary: also in the very first run."""
    executor = Executor(program(calls)).prepare()
    x, w = given()
    own = {"aten.mm.out": (calls + 1) // 2, "aten.add.out": calls // 2}
    own = {name: number for name, number in own.items() if number}
    for _ in range(3):
        with Count() as count:
            (y,) = executor.run([x, w])
        assert count.seen == own, "its output is made without the dispatcher"
        assert torch.equal(y, chain(calls, CPU)(x, w))
        with Count() as count:
            (z,) = executor.run([x, w], [torch.full_like(y, torch.nan)])
        assert count.seen == {**own, "aten.full_like.default": 1}, "full_like is this test's own"
        assert torch.equal(y, z)


def test_results_of_runs_share_no_memory_with_later_runs() -> None:
    executor = Executor(program(8)).prepare()
    x, w = given()
    (y,) = executor.run([x, w])
    kept = y.clone()
    (z,) = executor.run([x + 1, w])
    assert y.data_ptr() != z.data_ptr()
    assert torch.equal(y, kept)


def test_a_run_lets_go_of_what_it_was_given() -> None:
    executor = Executor(program(2)).prepare()
    held: list[StorageWeakRef] = []
    for rows in (WIDTH, 3):
        x, w = given()
        held += [StorageWeakRef(tensor.untyped_storage()) for tensor in (x, w)]
        with contextlib.suppress(ExecutorError):  # of another shape, the second time
            executor.run([x[:rows], w])
    del x, w
    assert all(ref.expired() for ref in held)


@pytest.mark.parametrize("grad", [True, False])
def test_the_callers_grad_mode_is_as_it_was(grad: bool) -> None:
    executor = Executor(program(3)).prepare()
    x, w = given()
    with torch.set_grad_enabled(grad):
        (y,) = executor.run([x.requires_grad_(), w])
        assert torch.is_grad_enabled() is grad
        assert not y.requires_grad
        with pytest.raises(ExecutorError, match="takes 2 inputs"):
            executor.run([x])
        assert torch.is_grad_enabled() is grad


OTHER: Any = torch.randn(2 * WIDTH, WIDTH).untyped_storage(), 0, (WIDTH, WIDTH), (2 * WIDTH, 1)
CHANGES: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "resize_": (lambda x: x.resize_(3, WIDTH), "has shape"),
    "transpose_": (lambda x: x.transpose_(0, 1), "has strides"),
    "set_": (lambda x: x.set_(*OTHER), "has strides"),
    "data": (lambda x: setattr(x, "data", torch.randn(WIDTH)), "has shape"),
    "dtype": (lambda x: setattr(x, "data", x.double()), "has dtype"),
    "unsqueeze_": (lambda x: x.unsqueeze_(0), "has shape"),
    "as_strided_": (lambda x: x.as_strided_((WIDTH, WIDTH), (0, 1)), "has strides"),
    "empty": (lambda x: x.resize_(0), "has shape"),
}


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_a_tensor_that_changed_in_place_between_runs_is_seen(change: str, which: int) -> None:
    """The same object, the same number of writes to it, but not the same shape any more."""
    do, told = CHANGES[change]
    executor = Executor(program(2)).prepare()
    tensors = [*given(), torch.empty(WIDTH, WIDTH)]
    for place in (which, 2):  # an input, and the output
        x, w, y = tensors
        executor.run([x, w], [y])
        do(tensors[place])
        with pytest.raises(ExecutorError, match=rf"(in|out)put {place % 2} .*{told}"):
            executor.run(tensors[:2], tensors[2:])
        tensors[place] = torch.randn(WIDTH, WIDTH)
        executor.run(tensors[:2], tensors[2:])  # a refusal leaves nothing behind


LOOSE = """\
def loose(x: f32[1, 4], z: f32[0, 3], y: out[f32[1, 4]]):
    main: call("aten.add.out", x, x, out=y)
"""


def test_strides_that_reach_the_same_elements_will_do() -> None:
    executor = Executor(parse(LOOSE)).prepare()
    x, z = torch.ones(1, 4), torch.empty(0, 3)
    for one in (x, x.as_strided((1, 4), (9, 1)), torch.ones(4, 1).t()):
        for none in (z, torch.empty_strided((0, 3), (7, 5))):
            assert torch.equal(executor.run([one, none])[0], 2 * x)


WRONG = """\
def wrong(x: f32[4, 4], y: out[f32[4, 2]]):
    main: call("aten.add.out", x, x, out=y)
"""


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_a_result_of_another_shape_is_an_error_in_every_run() -> None:
    executor = Executor(parse(WRONG)).prepare()
    for _ in range(2):
        with pytest.raises(ExecutorError, match=r"\[4, 4\], but the Program has \[4, 2\]"):
            executor.run([torch.ones(4, 4)])
        executor.reset()


def test_a_run_within_a_run_of_its_own_is_refused() -> None:
    """At once: nobody waits for a lock that this thread has."""
    executor = Executor(program(1), before_op=lambda *_: again()).prepare()
    x, w = given()

    def again() -> None:
        executor.run([x, w])

    for _ in range(2):
        with pytest.raises(ExecutorError, match="was called in a run of its own"):
            executor.run([x, w])


def test_parameters_may_stand_in_any_order() -> None:
    text = """
def mixed(y: out[f32[4]], a: f32[4], z: out[f32[4]], b: f32[4]):
    main: call("aten.sub.out", a, b, out=y)
    main: call("aten.sub.out", b, a, out=z)
    return z, y
"""
    a, b = torch.randn(4), torch.randn(4)
    z, y = Executor(parse(text)).prepare().run([a, b])
    assert torch.equal(y, a - b)
    assert torch.equal(z, b - a)


def test_a_thread_that_waits_too_long_gets_an_error() -> None:
    begun, held, release = time.monotonic(), threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        held.set()
        assert release.wait(30)

    options = Options(timeout_s=0.2)
    executor = Executor(program(1), options=options, before_op=hold).prepare()
    x, w = given()
    thread = threading.Thread(target=executor.run, args=([x, w],))
    thread.start()
    assert held.wait(30)
    with pytest.raises(ExecutorError, match="another thread"):
        executor.run([x, w])
    assert time.monotonic() - begun < 30
    release.set()
    thread.join(30)
    executor.reset()
    assert executor.run([x, w])[0].shape == (WIDTH, WIDTH)
