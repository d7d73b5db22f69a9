"""Graphs that are replayed on a CPU: results are those of eager runs, bit for bit, and are never
overwritten while they are referenced. Before each run what lies in the graphs' pool is spoiled."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support.fake_cuda import MAIN, Fake, fake_engine
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from interlace.comm.cuda.memory import tensor_at
from interlace.ir import parse
from interlace.options import Options
from interlace.runtime import values as values_file
from interlace.runtime.calling.calls import reader_of
from interlace.runtime.cuda.graphs import graphs as graphs_file
from interlace.runtime.engine import GraphUse

SIZE = 8
LAYER = f"""
def forward(x: f32[{SIZE}, {SIZE}], w: f32[{SIZE}, {SIZE}]):
    h = empty(f32[{SIZE}, {SIZE}])
    t = alloc(f32[{SIZE}, {SIZE}])
    u = alloc(f32[{SIZE}, {SIZE}])
    main: call("aten.neg.out", x, out=t)
    main: call("aten.neg.out", t, out=u)
    main: call("aten.mm.out", u, w, out=h)
    main: call("aten.relu.default", h, out=(y := f32[{SIZE}, {SIZE}]))
    return y, x, w, h, y.permute(1, 0)
"""
BACKWARD = f"""
def backward(
    x: f32[{SIZE}, {SIZE}], w: f32[{SIZE}, {SIZE}], h: f32[{SIZE}, {SIZE}], dy: f32[{SIZE}, {SIZE}]
):
    main: call("aten.threshold_backward.default", dy, h, 0, out=(dh := f32[{SIZE}, {SIZE}]))
    main: free(h)
    dw = empty(f32[{SIZE}, {SIZE}])
    main: call("aten.mm.out", x.permute(1, 0), dh, out=dw)
    main: call("aten.mm.default", dh, w.permute(1, 0), out=(dx := f32[{SIZE}, {SIZE}]))
    return dx, dw
"""


USES = {
    "forward": GraphUse(frozenset({"x"}), frozenset({1, 2, 3, 4}), frozenset({3})),
    "backward": GraphUse(frozenset({"x", "dy"})),
}
"""What the frontend says: of forward, the first result is the caller's."""


class OnGpu(torch.Tensor):
    is_cuda = True  # pyright: ignore


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, known by its address alone."""
    storage = tensor.untyped_storage()
    with torch.inference_mode(False):
        memory = tensor_at(storage.data_ptr(), storage.nbytes(), tensor.device).untyped_storage()
        facts = tensor.storage_offset(), tensor.shape, tensor.stride()
        return torch.empty(0, dtype=tensor.dtype).set_(memory, *facts)  # pyright: ignore


POOL: list[torch.Tensor] = []
"""Memory that was allocated in captures."""


class Recording(TorchDispatchMode):
    """Operators as a graph has them: with addresses. What they allocate is the pool's."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is torch.ops.aten.set_:
            return func(*args, **kwargs)  # the memory is what later operators say
        bare = tree_map(lambda v: raw(v) if isinstance(v, torch.Tensor) else v, (args, kwargs))
        known = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        found = func(*args, **kwargs)
        for tensor in filter(torch.numel, _tensors(found)):
            if tensor.untyped_storage().data_ptr() not in known:
                POOL.append(raw(tensor))
                POOL[-1].kept = tensor.untyped_storage()  # pyright: ignore
                # its memory stays, as a pool's does
        if func.overloadpacket not in (torch.ops.aten.empty, torch.ops.aten.empty_strided):
            self.steps.append((func, *bare, [raw(t) for t in _tensors(found)]))
        return found

    def replay(self) -> None:
        for func, args, kwargs, results in self.steps:
            for result, again in zip(results, _tensors(func(*args, **kwargs)), strict=True):
                if result.data_ptr() != again.data_ptr():
                    result.copy_(again)


def _tensors(items: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map(lambda v: found.append(v) if isinstance(v, torch.Tensor) else None, items)
    return found


class CpuGraph:
    captures = 0

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        CpuGraph.captures += 1
        self.mode = Recording()
        self.mode.__enter__()

    def capture_end(self) -> None:
        self.mode.__exit__(None, None, None)

    def replay(self) -> None:
        self.mode.replay()

    def reset(self) -> None:
        self.mode.steps.clear()


class Layer:
    """Forward or backward of a layer, in graphs."""

    def __init__(self, fake: Fake) -> None:
        context = fake.engine.context
        results = reader_of(context.plan.program.returned(), context.plan, context.values)
        object.__setattr__(context, "results", results)
        object.__setattr__(context, "graph_use", USES.get(context.plan.program.name))
        fake.engine.graphs = self.graphs = graphs_file.Graphs(fake.engine)
        self.fake, fake.engine.warm = fake, True
        fake.driver.copy = self._copy
        self._capture, self.graphs._capture = self.graphs._capture, self._run_nothing

    @property
    def pairs(self) -> int:
        return sum(map(len, self.graphs.pairs.values()))

    def _run_nothing(self, given: Sequence[torch.Tensor], boxed: bool) -> Any:
        """A capture, which changes no tensor on a GPU."""
        before = [tensor.clone() for tensor in given]
        pair = self._capture(given, boxed)
        for tensor, value in zip(given, before, strict=True):
            tensor.copy_(value)
        return pair

    def _copy(self, stream: int, dst: int, src: int, nbytes: int) -> None:
        ctypes.memmove(dst, src, nbytes)

    def __call__(self, *inputs: torch.Tensor, boxed: bool = False) -> Any:
        for tensor in POOL:
            tensor.fill_(255 if tensor.dtype is torch.uint8 else torch.nan)  # by other graphs
        given = [tensor.as_subclass(OnGpu) for tensor in inputs]
        return self.fake.engine.issue(given, None, boxed=boxed)


@pytest.fixture(params=[True, False], ids=["", "nothing said"])
def layers(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Layer, Layer]]:
    for name in USES:
        if not request.param:
            monkeypatch.setitem(USES, name, GraphUse())
    # Inductor's function is seen by no dispatch mode.
    monkeypatch.setattr(values_file, "quick_empty_strided", lambda kind: None)
    stream = mock.Mock(cuda_stream=MAIN)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", CpuGraph)
    CpuGraph.captures = 0
    POOL.clear()
    with contextlib.ExitStack() as stack:
        made: list[Layer] = []
        for text in (LAYER, BACKWARD):
            fake = stack.enter_context(fake_engine(parse(text), 0, Options(graph=True)))
            object.__setattr__(fake.engine.context.resources, "graph_spaces", ({}, {}))
            made.append(Layer(fake))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
        yield made[0], made[1]


def forward(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    h = x @ w
    return h.relu(), x, w, h, h.relu().t()


def backward(
    x: torch.Tensor, w: torch.Tensor, h: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dh = torch.ops.aten.threshold_backward(dy, h, 0)
    return dh @ w.t(), x.t() @ dh


def random_matrix() -> torch.Tensor:
    return torch.randn(SIZE, SIZE)


def same(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def stepped(
    layers: tuple[Layer, Layer], weights: Sequence[torch.Tensor], order: Sequence[int]
) -> set[bool]:
    """Forwards (n >= 0) and their backwards (~n) of micro-batches through all layers, in this
    order; all that is referenced is looked at, bit by bit, until its end. Returns whether gradients
    lay where forward's saved tensor lay."""
    run, back = layers
    spent = set[bool]()
    drawn = random.Random(int(weights[0].sum() * 1e6))
    live: dict[int, Any] = {}
    gradients = [torch.zeros(SIZE, SIZE) for _ in weights]
    wanted = [torch.zeros(SIZE, SIZE) for _ in weights]

    def look() -> None:
        assert all(same(found, right) for pairs in live.values() for found, right in pairs)

    for number in order:
        if number >= 0:
            x = right = random_matrix()
            pairs: list[Any] = []
            for w in weights:
                found, eager = run(x, w), forward(right, w)
                pairs.append((found, eager))
                x, right = found[0], eager[0]
            live[number] = pairs
        else:
            dy = due = random_matrix()
            for index in reversed(range(len(weights))):
                found, eager = live[~number].pop()
                look()
                assert same(found, eager)
                retained = back(*found[1:4], dy) if drawn.random() < 0.3 else ()
                look()
                held = found[3].untyped_storage().data_ptr()
                dy, dw = back(*found[1:4], dy, boxed=True)
                due, right = backward(*eager[1:4], due)  # pyright: ignore
                assert torch.equal(dy, due)
                assert same(retained, (due, right)[: len(retained)])
                spent.add(dw.untyped_storage().data_ptr() == held)
                gradients[index] += dw
                wanted[index] += right
                del found, dw
                look()
        look()
    assert same(gradients, wanted)
    return spent


ORDERS = {
    "one": [0, ~0],
    "two micro-batches": [0, 1, ~1, ~0],
    "1F1B": [0, 1, ~0, 2, ~1, 3, ~2, ~3],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("count", [1, 3], ids=["a layer", "layers that share code"])
def test_steps_are_those_of_eager_runs(
    layers: tuple[Layer, Layer], order: str, count: int, seed: int
) -> None:
    torch.manual_seed(seed)
    weights = [random_matrix() for _ in range(count)]
    for _ in range(6):
        assert stepped(layers, weights, ORDERS[order]) == {bool(USES["forward"].handed)}
    limit = {"one": 1, "two micro-batches": 2, "1F1B": 2}[order] * count
    for layer, use, kinds in zip(layers, USES.values(), (1, 2), strict=True):
        assert count <= layer.pairs <= kinds * limit or not use.moving


def test_parameters_that_move_are_read_where_they_are(
    layers: tuple[Layer, Layer], seed: int
) -> None:
    torch.manual_seed(seed)
    for _ in range(5):
        stepped(layers, [random_matrix() for _ in range(2)], ORDERS["two micro-batches"])


def test_results_in_random_order_are_never_overwritten(
    layers: tuple[Layer, Layer], monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Also beyond the number of sets, and where callers come on other streams."""
    monkeypatch.setattr(graphs_file, "MOST", 8)
    torch.manual_seed(seed)
    drawn, (run, _) = random.Random(seed), layers
    held: list[Any] = []
    weights = [random_matrix() for _ in range(3)]
    for _ in range(60):
        run.fake.on(MAIN + drawn.randrange(8) // 7)
        x, w = random_matrix(), drawn.choice(weights)
        found = run(x, w)
        kept = drawn.sample(range(5), drawn.randrange(6))  # some of the results
        wanted = forward(x, w)
        assert same(found, wanted)
        held.append(([found[i] for i in kept], [wanted[i] for i in kept]))
        del found
        while len(held) > 4 or (held and drawn.random() < 0.4):
            del held[drawn.randrange(len(held))]
        assert all(same(mine, right) for mine, right in held)
    assert run.pairs <= 40


def test_what_a_caller_keeps_until_the_next_run_is_copied_from_then_on(
    layers: tuple[Layer, Layer], seed: int
) -> None:
    """The output, and not what forward saves."""
    torch.manual_seed(seed)
    run, _ = layers
    x, w = random_matrix(), random_matrix()
    out = None
    for number in range(6):
        found = run(x, w)
        y, h = found[0], found[3]
        del found
        assert same((y, h), (forward(x, w)[0], x @ w))
        assert out is None or torch.equal(out, forward(x, w)[0])
        out = y
        del y, h
        assert CpuGraph.captures == (2 if not number else 4)
        assert run.pairs == 1
    assert {0, 1, 2, 3} - run.graphs.lent == {0}


def test_results_are_nobodys_inference(layers: tuple[Layer, Layer]) -> None:
    run, _ = layers
    x, w = random_matrix(), random_matrix()
    with torch.inference_mode():
        run(x, w)
    y, *_ = run(x, w)
    weight = torch.ones(SIZE, SIZE, requires_grad=True)
    (y * weight).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, forward(x, w)[0])
