"""The arena of the process: what is alive between runs, growth, threads, and the end."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch
from tests.frontend.models import Model, parallelise, whole, world_mesh
from tests.support.fake_cuda import MAIN, fake_engine
from tests.support.pool import Pool
from torch.multiprocessing.reductions import StorageWeakRef

from interlace.errors import ExecutorError
from interlace.ir import Op, parse
from interlace.runtime import executor as executor_file
from interlace.runtime.arena import Arena
from interlace.runtime.executor import Executor
from interlace.runtime.values import ValueTable
from interlace_bench.kernels.host import WIDTH, chain, program

CPU = torch.device("cpu")


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Arena:
    """An arena of the test's own in place of the process's."""
    made = Arena(CPU)
    monkeypatch.setattr(executor_file, "arena_of", lambda device: made)
    return made


def sized(width: int) -> Executor:
    text = f"""
def f(x: f32[{width}, {width}], y: out[f32[{width}, {width}]]):
    a = alloc(f32[{width}, {width}], storage="arena", offset=0)
    b = alloc(f32[{width}, {width}], storage="arena", offset={width * width * 4})
    main: call("aten.add.out", x, x, out=a)
    main: copy(a, b)
    main: call("aten.mul.out", b, a, out=y)
"""
    return Executor(parse(text)).prepare()


def check(executor: Executor, width: int) -> None:
    x = torch.randn(width, width)
    (y,) = executor.run([x])
    assert torch.equal(y, 4 * x * x)


def test_executors_share_one_storage_as_large_as_the_largest_needs(own: Arena) -> None:
    executors = [(sized(width), width) for width in (8, 24, 16, 8)]
    for _ in range(2):
        for executor, width in executors:
            check(executor, width)
    assert own.storage.nbytes() == 2 * 4 * 24 * 24
    tables: list[ValueTable] = [each.engine.context.values for each, _ in executors if each.engine]
    assert {id(table.arena) for table in tables} == {id(own.storage)}


def test_growth_keeps_nothing_of_the_old_storage(own: Arena) -> None:
    small = sized(8)
    check(small, 8)
    old = own.storage
    large = sized(64)
    assert old.nbytes() == 0, "although the small one's views are of it"
    for _ in range(2):
        check(large, 64)
        check(small, 8)
    large.close()
    check(small, 8)
    assert own.storage.nbytes() == 2 * 4 * 64, "what it needed most for has gone"


def test_the_memory_goes_with_the_last_executor(own: Arena) -> None:
    first, second = sized(16), sized(16)
    check(first, 16)
    ref = StorageWeakRef(own.storage)
    first.close()
    check(second, 16)
    assert not ref.expired()
    second.close()
    assert own.storage.nbytes() == 0
    third = sized(4)
    check(third, 4)
    assert own.storage.nbytes() == 256


def test_runs_of_two_threads_share_no_bytes(own: Arena, seed: int) -> None:
    """Each run is amid its ops when the other begins, and reads what it wrote before."""
    torch.manual_seed(seed)
    meeting, seen = threading.Barrier(2, timeout=20), set[int]()

    def meet(_: int, index: int, op: Op) -> None:
        if index == 4:
            meeting.wait()

    executors = [Executor(program(8), before_op=meet).prepare() for _ in range(2)]

    def runs(executor: Executor) -> list[bool]:
        want, found = chain(8, CPU), list[bool]()
        for _ in range(5):
            x, w = given()
            (y,) = executor.run([x, w])
            found.append(torch.equal(y, want(x, w)))
        assert executor.engine is not None
        seen.add(executor.engine.context.values.arena.nbytes())
        return found

    with ThreadPoolExecutor(2) as threads:
        assert all(all(found) for found in threads.map(runs, executors))
    assert 0 in seen, "further memory is one run's alone"
    assert own.storage.nbytes() > 0


def given() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH) / WIDTH


def test_a_run_amid_another_of_the_same_thread_has_further_memory(own: Arena) -> None:
    inner = sized(32)

    def nested(_: int, index: int, op: Op) -> None:
        if index == 3:
            check(inner, 32)

    x, w = given()
    with Executor(program(4), before_op=nested).prepare() as outer:
        for _ in range(2):
            (y,) = outer.run([x, w])
            assert torch.equal(y, chain(4, CPU)(x, w))
        check(inner, 32)


def test_a_run_that_fails_gives_the_arena_back(own: Arena) -> None:
    fails = [True]

    def fail(_: int, index: int, op: Op) -> None:
        if fails[0] and index == 2:
            raise ZeroDivisionError

    x, w = given()
    with Executor(program(4), before_op=fail).prepare() as executor:
        with pytest.raises(ExecutorError, match="ZeroDivisionError"):
            executor.run([x, w])
        fails[0] = False
        for _ in range(2):
            (y,) = executor.run([x, w])
            assert torch.equal(y, chain(4, CPU)(x, w))
            assert executor.engine is not None
            assert executor.engine.context.values.arena is own.storage


def test_no_memory_for_a_larger_one_leaves_the_others_right(own: Arena) -> None:
    small = sized(8)
    check(small, 8)
    with mock.patch.object(torch, "empty", side_effect=RuntimeError("out of memory")):
        own.hold(1 << 20)
        own.let_go(1 << 20)
        own.hold(1 << 10)
        with pytest.raises(RuntimeError, match="out of memory"):
            small.run([torch.zeros(8, 8)], [torch.zeros(8, 8)])
    own.let_go(1 << 10)
    check(small, 8)


def test_on_cuda_a_run_has_the_arena_only_behind_the_last_one() -> None:
    """On its stream, behind an event that it waits for, or once the device is done."""
    with fake_engine(program(4), rank=0) as one, fake_engine(program(4), 0, beside=one) as two:
        arena, tables = one.engine.context.arena, [f.engine.context.values for f in (one, two)]
        inputs = list(given())
        places: list[torch.UntypedStorage] = []

        def run(fake: Any, stream: int) -> bool:
            """True if the run had the arena."""
            places.clear()
            for each in (one, two):
                each.on(stream)
            start = ValueTable.start

            def noted(table: ValueTable, *rest: Any) -> None:
                places.append(table.arena)
                start(table, *rest)

            with mock.patch.object(ValueTable, "start", noted):
                fake.run(inputs)
            return places[0] is arena.storage

        assert run(one, MAIN)
        assert run(two, MAIN)
        one.driver.done = lambda event: False  # type: ignore[method-assign]
        assert not run(one, 900), "the other's run is under way on another stream"
        assert tables[0].arena.nbytes() == 0
        assert run(two, 901), "it waits for its own last run"
        assert ("wait_event", 901) in [entry[:2] for entry in two.log]
        assert run(one, 901)
        one.driver.done = lambda event: True  # type: ignore[method-assign]
        assert run(two, 902)


def alive(layers: int, blocks: bool) -> tuple[int, int, bool]:
    """Bytes of an arena after steps of so many layers, and the Executors that share it; whether
    gradients are eager's."""
    arena = Arena(CPU)  # other tests' Executors may be alive in this process
    with mock.patch.object(executor_file, "arena_of", return_value=arena):
        found = steps(layers, blocks)
    size, held = arena.storage.nbytes(), len(arena._needs)
    torch.compiler.reset()
    assert arena.storage.nbytes() == 0
    right = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found[0], found[2], strict=True))
    return size, held, right


def steps(layers: int, blocks: bool) -> list[list[torch.Tensor]]:
    """The gradients of an eager step, and of two that are compiled: whole, or each block."""
    torch.manual_seed(0)
    net = parallelise(Model(layers), world_mesh())
    options: Any = {"strategy": "pipeline", "timeout_s": 40.0}
    step: Any = torch.compile(net, backend="interlace", options=options)
    tokens, found = torch.randint(32, (2, 8)), list[list[torch.Tensor]]()
    for turn in range(3):
        if turn == 1 and blocks:
            step = net
            for block in net.layers:
                block.compile(backend="interlace", options=options)
        (step if turn else net)(tokens).float().square().mean().backward()
        found.append([whole(parameter.grad) for parameter in net.parameters()])
        net.zero_grad()
    return found


@pytest.mark.parametrize("blocks", [False, True], ids=["whole", "blocks"])
def test_six_layers_hold_what_two_hold(pool: Pool, blocks: bool) -> None:
    few, many = (pool(2).run(alive, layers, blocks) for layers in (2, 6))
    for (size, held, right), (more, others, also) in zip(few, many, strict=True):
        assert right
        assert also
        assert min(held, others) >= 2, "a forward and a backward"
        assert more == size > 0
