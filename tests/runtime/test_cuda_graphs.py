"""What a replay of a Program's graphs copies, and where in the run: no GPU is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from tests.support.fake_cuda import MAIN, Fake, fake_engine

from interlace.bench.kernels.host import WIDTH, program
from interlace.errors import ExecutorError
from interlace.runtime.cuda import graphs as graphs_file

NBYTES = 4 * WIDTH * WIDTH
log: list[tuple[Any, ...]] = []


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, and notes what is copied into it by torch."""

    is_cuda = True  # pyright: ignore

    def copy_(self, source: torch.Tensor, *_: Any) -> torch.Tensor:  # pyright: ignore
        log.append(("copy_", self.data_ptr(), source.data_ptr()))
        return self


def tensor() -> OnGpu:
    return torch.zeros(WIDTH, WIDTH).as_subclass(OnGpu)


class Graphed:
    """The engine of a Program of two products with graphs; its replays are noted."""

    def __init__(self, fake: Fake, graphs: graphs_file.Graphs) -> None:
        self.fake, self.graphs, self.captures = fake, graphs, 0

    def run(self, inputs: list[Any], out: list[Any] | None) -> list[tuple[Any, ...]]:
        """What one run asked of the driver and of torch."""
        fake = self.fake
        fake.log.clear()
        log.clear()
        names = ("x", "w"), ("y",)
        self.graphs.run(names, inputs, out, lambda: [tensor()], lambda: ())
        return [entry for entry in log if entry[0] != "call"]


@pytest.fixture
def graphed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphed]:
    stream = mock.Mock(cuda_stream=4711)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    with fake_engine(program(2), 0) as fake:
        fake.driver.log = log
        fake.driver.done = lambda event: True  # pyright: ignore
        object.__setattr__(fake.engine.context.crew, "graph_spaces", ({}, {}))
        fake.engine.graphs = graphs_file.Graphs(fake.engine)
        made = Graphed(fake, fake.engine.graphs)

        def graph() -> Any:
            made.captures += 1
            return mock.Mock(replay=lambda: log.append(("replay",)))

        @contextlib.contextmanager
        def capture(graph: Any, **how: Any) -> Iterator[None]:
            before = list(log)
            yield
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
        found = graphed.run([other, w], [result])
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
        found = graphed.run([other, w], [y])
    home = graphed.graphs._baked[0]
    assert found[0] == ("copy_", home.data_ptr(), other.data_ptr())
    assert [entry[0] for entry in found] == ["copy_", "replay", "record"]


def test_graphs_are_captured_anew_once_their_runs_have_ended(graphed: Graphed) -> None:
    w, y = tensor(), tensor()
    graphed.run([tensor(), w], [y])
    waited = mock.Mock()
    graphed.fake.engine.synchronize = waited
    graphed.run([tensor(), w], [y])
    waited.assert_called_once()
    graphed.run([tensor(), w], [y])
    waited.assert_called_once()
    graphed.run([tensor(), w], None)
    assert waited.call_count == 2
    assert graphed.captures == 6


def test_a_tensor_of_the_cpu_is_refused_also_in_later_runs(graphed: Graphed) -> None:
    w, y = tensor(), tensor()
    for _ in range(2):
        graphed.run([tensor(), w], [y])
    with pytest.raises(ExecutorError, match="a CUDA graph cannot read a tensor of the CPU"):
        graphed.run([torch.zeros(WIDTH, WIDTH), w], [y])
