"""What a replay of a Program's graphs copies, and where in the run: no GPU is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from tests.runtime.test_cuda_plain import TWO_STREAMS
from tests.support.fake_cuda import MAIN, Fake, fake_engine

from interlace.bench.kernels.host import WIDTH, program
from interlace.errors import ExecutorError, PeerError
from interlace.ir import parse
from interlace.runtime.cuda import graphs as graphs_file

CAPTURE = 4711
NBYTES = 4 * WIDTH * WIDTH
log: list[tuple[Any, ...]] = []


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, and notes what is copied into it by torch."""

    is_cuda = True  # pyright: ignore

    def copy_(self, source: torch.Tensor, *_: Any) -> torch.Tensor:  # pyright: ignore
        log.append(("copy_", self.data_ptr(), source.data_ptr()))
        return self

    def clone(self, **_: Any) -> torch.Tensor:  # pyright: ignore
        log.append(("clone", self.data_ptr()))
        return torch.zeros(()).as_subclass(OnGpu)


CACHE = f"""
def step(x: f32[{WIDTH}, {WIDTH}], c: f32[{WIDTH}, {WIDTH}], y: out[f32[{WIDTH}, {WIDTH}]]):
    main: copy(x, c)
    main: copy(c, y)
"""
"""A Program that changes one of its inputs."""


def tensor() -> OnGpu:
    return torch.zeros(WIDTH, WIDTH).as_subclass(OnGpu)


class Graphed:
    """The engine of a Program of two products with graphs; its replays are noted."""

    def __init__(self, fake: Fake, graphs: graphs_file.Graphs) -> None:
        self.fake, self.graphs, self.captures = fake, graphs, 0
        self.own: tuple[torch.Tensor, ...] = ()
        """What the graphs give as results,"""
        self.captured: list[tuple[Any, ...]] = []
        """and what was captured last."""

    def run(self, inputs: list[Any], out: list[Any] | None) -> list[tuple[Any, ...]]:
        """What one run asked of the driver and of torch."""
        log.clear()
        program = self.fake.engine.context.plan.program
        params = [b.name for b in program.params]
        names = params[:2], params[2:]
        self.graphs.run(names, inputs, out, lambda: [tensor()], lambda: self.own)
        return [entry for entry in log if entry[0] != "call"]


@pytest.fixture
def graphed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphed]:
    of = getattr(request, "param", program(2))
    stream = mock.Mock(cuda_stream=CAPTURE)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    with fake_engine(of, 0) as fake:
        fake.driver.log = log
        fake.driver.done = lambda event: True  # pyright: ignore
        object.__setattr__(fake.engine.context.crew, "graph_spaces", ({}, {}))
        fake.engine.graphs = graphs_file.Graphs(fake.engine)
        made = Graphed(fake, fake.engine.graphs)

        def graph() -> Any:
            made.captures += 1
            reset = lambda: log.append(("reset",))  # noqa: E731
            return mock.Mock(replay=lambda: log.append(("replay",)), reset=reset)

        @contextlib.contextmanager
        def capture(graph: Any, **how: Any) -> Iterator[None]:
            before = list(log)
            try:
                yield
            finally:
                made.captured = log[len(before) :]
                log[:] = before

        monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
        monkeypatch.setattr(torch.cuda, "graph", capture)
        yield made


def test_tensors_that_stay_are_not_copied(graphed: Graphed) -> None:
    inputs, out = [tensor(), tensor()], [tensor()]
    for _ in range(3):
        assert [entry[0] for entry in graphed.run(inputs, out)] == ["replay", "record"]
    assert graphed.captures == 2


def test_copies_are_a_part_of_the_run(graphed: Graphed) -> None:
    """On a stream of its own each run: another one's reads of the same memory come before."""
    x, w, y = tensor(), tensor(), tensor()
    graphed.run([x, w], [y])
    for number, captures in enumerate((4, 4, 4)):
        graphed.fake.on(MAIN + 50 + number)
        other, result = tensor(), tensor()
        before = graphed.fake.engine.last
        assert before is not None
        found = [e for e in graphed.run([other, w], [result]) if e != ("reset",)]
        home = graphed.graphs._baked
        assert found == [
            ("wait_event", MAIN + 50 + number, before[1]),
            ("copy", MAIN + 50 + number, home[0].data_ptr(), other.data_ptr(), NBYTES),
            ("replay",),
            ("copy_", result.data_ptr(), home[2].data_ptr()),
            ("record", MAIN + 50 + number, before[1]),
        ]
        assert home[1] is w
        assert graphed.captures == captures
        assert {home[0].data_ptr(), home[2].data_ptr()}.isdisjoint(
            tensor.data_ptr() for tensor in (x, y, other, result)
        )


def test_a_tensor_that_is_not_in_one_piece_is_copied_by_torch(graphed: Graphed) -> None:
    w, y = tensor(), tensor()
    graphed.run([tensor(), w], [y])
    other = torch.zeros(WIDTH, 2 * WIDTH)[:, :WIDTH].as_subclass(OnGpu)
    empty = torch.empty_strided
    with mock.patch.object(
        torch, "empty_strided", lambda *a, **k: empty(*a, **k).as_subclass(OnGpu)
    ):
        found = [e for e in graphed.run([other, w], [y]) if e != ("reset",)]
    home = graphed.graphs._baked[0]
    assert found[0] == ("copy_", home.data_ptr(), other.data_ptr())
    assert [entry[0] for entry in found] == ["copy_", "replay", "record"]


def test_graphs_are_captured_anew_once_their_runs_have_ended(graphed: Graphed) -> None:
    w, y = tensor(), tensor()
    graphed.run([tensor(), w], [y])
    graphed.fake.engine.synchronize = lambda: log.append(("synchronize",))
    anew = [("synchronize",), ("reset",), ("reset",)]
    assert graphed.run([tensor(), w], [y])[:3] == anew
    assert ("synchronize",) not in graphed.run([tensor(), w], [y])
    assert graphed.run([tensor(), w], None)[:3] == anew
    assert graphed.captures == 6


@pytest.mark.parametrize("graphed", [parse(CACHE)], indirect=True)
def test_an_input_that_a_program_changes_is_changed_wherever_it_lies(graphed: Graphed) -> None:
    x, cache, y = tensor(), tensor(), tensor()
    graphed.run([x, cache], [y])
    for _ in range(2):
        moved = tensor()
        found = graphed.run([x, moved], [y])
        home = graphed.graphs._baked[1].data_ptr()
        assert ("copy", MAIN, home, moved.data_ptr(), NBYTES) in found
        copied = found.index(("copy_", moved.data_ptr(), home))
        assert found.index(("replay",)) < copied < [e[0] for e in found].index("record")


def test_results_are_copied_before_the_end_of_the_run(graphed: Graphed) -> None:
    """Else a run on another stream may write what the copy still reads."""
    graphed.own = (tensor(),)
    inputs = [tensor(), tensor()]
    for _ in range(2):
        found = graphed.run(inputs, None)
    assert [entry[0] for entry in found] == ["replay", "clone", "record"]


def test_no_graph_is_captured_after_a_failure(graphed: Graphed) -> None:
    graphed.fake.engine.watched.fail(PeerError("a peer stopped"))
    with pytest.raises(PeerError, match="a peer stopped"):
        graphed.run([tensor(), tensor()], [tensor()])
    assert graphed.captured == []


@pytest.mark.parametrize("graphed", [parse(TWO_STREAMS)], indirect=True)
def test_a_capture_that_fails_joins_its_streams(graphed: Graphed) -> None:
    """Else the capture's end raises another error, and leaves the caller on the graphs' stream."""

    def fail() -> None:
        raise PeerError("heard in the midst of a capture")

    for binding in graphed.graphs._bindings:
        binding.steps[-1] = fail
    with pytest.raises(PeerError, match="in the midst"):
        graphed.run([tensor(), tensor()], [tensor()])
    side = graphed.graphs._bindings[0].sides[0].handle
    assert [entry[:2] for entry in graphed.captured[-2:]] == [
        ("record", side),
        ("wait_event", CAPTURE),
    ]


def test_a_tensor_of_the_cpu_is_refused_also_in_later_runs(graphed: Graphed) -> None:
    w, y = tensor(), tensor()
    for _ in range(2):
        graphed.run([tensor(), w], [y])
    with pytest.raises(ExecutorError, match="a CUDA graph cannot read a tensor of the CPU"):
        graphed.run([torch.zeros(WIDTH, WIDTH), w], [y])
