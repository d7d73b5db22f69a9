"""What a replay of a Program's graphs copies, and where in the run: no GPU is needed."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from tests.runtime.test_cuda_plain import TWO_STREAMS
from tests.support.fake_cuda import MAIN, Fake, fake_engine
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from interlace.comm.cuda import driver as driver_file
from interlace.errors import BackendError, ExecutorError, PeerError
from interlace.ir import parse
from interlace.options import Options
from interlace.runtime.calling.calls import reader_of
from interlace.runtime.cuda.graphs import graphs as graphs_file
from interlace.runtime.cuda.graphs.captured import GraphPair, launcher
from interlace.runtime.cuda.graphs.warm_up import capture_thread, warm_up
from interlace.runtime.prepare.plan import QueuePlace
from interlace_bench.kernels.host import WIDTH, program

CAPTURE = 4711
NBYTES = 4 * WIDTH * WIDTH
PLAIN = ["replay", "record"]
log: list[tuple[Any, ...]] = []


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU, and notes what is copied into it by torch."""

    is_cuda = True  # pyright: ignore

    def copy_(self, source: torch.Tensor, *_: Any) -> torch.Tensor:  # pyright: ignore
        log.append(("copy_", self.data_ptr(), source.data_ptr()))
        return self


CACHE = f"""
def step(x: f32[{WIDTH}, {WIDTH}], c: f32[{WIDTH}, {WIDTH}], y: out[f32[{WIDTH}, {WIDTH}]]):
    main: copy(x, c)
    main: copy(c, y)
"""
"""A Program that changes one of its inputs."""


MAKES = f"""
def step(x: f32[{WIDTH}, {WIDTH}], w: f32[{WIDTH}, {WIDTH}]):
    y = empty(f32[{WIDTH}, {WIDTH}])
    main: call("aten.mm.out", x, w, out=y)
    return y
"""
"""A Program whose result is a buffer of its own."""


def tensor() -> OnGpu:
    return torch.zeros(WIDTH, WIDTH).as_subclass(OnGpu)


class Graphed:
    """The engine of a Program of two products with graphs; its replays are noted."""

    def __init__(self, fake: Fake, graphs: graphs_file.Graphs) -> None:
        self.fake, self.graphs, self.captures, self.made = fake, graphs, 0, 0
        self.results: tuple[Any, ...] = ()
        self.all: list[Any] = []
        self.held: list[Any] | None = []
        """What runs were given, so that nothing else comes to lie there."""
        self.captured: list[tuple[Any, ...]] = []
        """What was captured last."""
        self.pools: list[Any] = []
        """The pool of each capture."""
        context = fake.engine.context
        results = reader_of(context.plan.program.returned(), context.plan, context.values)
        object.__setattr__(context, "results", results)
        context.outputs.new = self.new
        fake.engine.warm = True

    def run(self, inputs: list[Any], out: list[Any] | None) -> list[tuple[Any, ...]]:
        """What one run asked of the driver and of torch."""
        log.clear()
        if self.held is not None:
            self.held.append((inputs, out))
        found = self.fake.attempt(inputs, out)
        self.results = self.fake.engine.issue(inputs, out) if found is None else found
        return [entry for entry in log if entry[0] != "call"]

    def kinds(self, inputs: list[Any], out: list[Any] | None) -> list[str]:
        """The same, without their numbers."""
        return [entry[0] for entry in self.run(inputs, out)]

    def new(self) -> list[torch.Tensor]:
        self.made += 1
        return [tensor()]

    def place(self, number: int) -> int:
        """Where the only pair has a tensor that is copied."""
        (pair,) = self.pairs
        return pair.places[number].data_ptr()

    @property
    def pairs(self) -> list[GraphPair]:
        return [pair for pairs in self.graphs.pairs.values() for pair in pairs]


class Pool(TorchDispatchMode):
    """Memory that is allocated in a capture stays, as that of a pool does."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.empty_strided:
            self.held.append(made)
        return made


class FakeGraph:
    """A CUDA graph; what is done while it is captured, is done, and noted apart."""

    def __init__(self, made: Graphed) -> None:
        made.captures += 1
        self.made, self.number = made, made.captures
        made.all.append(self)

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.before, self.pool = list(log), Pool()
        self.made.pools.append(pool)
        self.pool.__enter__()

    def capture_end(self) -> None:
        self.pool.__exit__(None, None, None)
        self.made.captured = log[len(self.before) :]
        log[:] = self.before

    def replay(self) -> None:
        log.append(("replay", self.number))

    def reset(self) -> None:
        log.append(("reset", self.number))


@pytest.fixture
def graphed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphed]:
    of = getattr(request, "param", program(2))
    stream = mock.Mock(cuda_stream=CAPTURE)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    with fake_engine(of, 0, Options(graph=True)) as fake:
        fake.driver.log = log
        fake.driver.done = lambda event: True  # pyright: ignore
        object.__setattr__(fake.engine.context.resources, "graph_spaces", ({}, {}))
        fake.engine.graphs = graphs_file.Graphs(fake.engine)
        made = Graphed(fake, fake.engine.graphs)

        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(made))
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
        yield made


def test_no_tensor_of_the_callers_is_kept(graphed: Graphed, seed: int) -> None:
    """Else an allocator could never give the same address again."""
    inputs, out = [tensor(), tensor()], [tensor()]
    graphed.held = None
    for _ in range(2):
        graphed.run(inputs, out)
        assert graphed.results[0] is out[0]
    held = [StorageWeakRef(t.untyped_storage()) for t in (*inputs, *out)]
    graphed.results = ()
    del inputs, out
    assert all(ref.expired() for ref in held)


def crossing(graphed: Graphed) -> None:
    """As if the Program put its first input into a peer, and got its output from one."""
    params = graphed.fake.engine.context.plan.program.params
    graphed.graphs.crossing = {params[0].name, params[2].name}


def another(graphed: Graphed, *tensors: torch.Tensor) -> None:
    """Memory is freed, and allocated anew at the same address."""
    numbers = graphed.fake.driver.allocations
    numbers.update({t.data_ptr(): numbers.get(t.data_ptr(), 1) + 1 for t in tensors})


def test_what_moves_is_copied(graphed: Graphed) -> None:
    """As a part of the run: reads of the same memory on another stream come before."""
    inputs, out = [tensor(), tensor()], [tensor()]
    graphed.graphs.moved = {0}
    assert graphed.kinds(inputs, out) == ["copy", *PLAIN]
    first = graphed.fake.engine.last
    assert first is not None
    for number in range(4):
        inputs[0] = tensor()
        graphed.fake.on(MAIN + 50 + number)
        assert graphed.run(inputs, out) == [
            ("wait_event", MAIN + 50 + number, first[1]),
            ("copy", MAIN + 50 + number, graphed.place(0), inputs[0].data_ptr(), NBYTES),
            ("replay", 2 - number % 2),
            ("record", MAIN + 50 + number, first[1]),
        ]
    assert graphed.captures == 2
    assert graphed.pools[0] is graphed.pools[1]


def test_what_loses_its_memory_again_and_again_is_copied_from_then_on(graphed: Graphed) -> None:
    graphed.held, inputs, out = None, [tensor(), tensor()], [tensor()]
    assert graphed.kinds(inputs, out) == PLAIN
    for number in range(6):
        inputs[0] = tensor()  # while the other is there, so that it lies elsewhere
        kinds = ["copy", *PLAIN] if number >= graphs_file.FEW else PLAIN
        resets = ["reset"] * 2 * (number <= graphs_file.FEW)
        assert graphed.kinds(inputs, out) == [*resets, *kinds]
        assert len(graphed.pairs) == 1
    assert graphed.graphs.moved == {0}
    assert len({*graphed.pools}) == 1
    weights = [tensor() for _ in range(graphs_file.FEW + 2)]
    for inputs[1] in weights:
        assert graphed.kinds(inputs, out)[-3:] == ["copy", *PLAIN]
    assert graphed.graphs.moved == {0}, "these are still there"


def test_runs_with_and_without_given_outputs_have_pairs_of_their_own(graphed: Graphed) -> None:
    """Also where the outputs are copied, as they came at other addresses again and again."""
    graphed.held, inputs, out = None, [tensor(), tensor()], [tensor()]
    for _ in range(graphs_file.FEW + 2):
        graphed.run(inputs, out)
        graphed.results, out[0] = (), tensor()
    assert graphed.graphs.moved == {2}
    captures = graphed.captures
    for _ in range(2):
        graphed.run(inputs, None)
        assert graphed.results[0] is not out[0]
        graphed.run(inputs, out)
        assert graphed.results[0] is out[0]
    assert graphed.captures == captures + 2
    assert len(graphed.pairs) == 2


def test_another_set_of_parameters_has_a_pair_of_its_own(
    graphed: Graphed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As layers have that share their code. Nothing is copied."""
    sets = [([tensor(), tensor()], [tensor()]) for _ in range(5)]
    for number in range(15):
        assert graphed.kinds(*sets[number % 5]) == PLAIN
    assert len(graphed.pairs) == 5
    monkeypatch.setattr(graphs_file, "MOST", 5)
    assert graphed.kinds([tensor(), tensor()], [tensor()]) == ["reset"] * 10 + PLAIN


def expanded() -> torch.Tensor:
    return torch.rand(WIDTH).as_subclass(OnGpu).expand(WIDTH, WIDTH)


@pytest.mark.parametrize(
    ("make", "nbytes"),
    [
        (expanded, 4 * WIDTH),
        (lambda: tensor().t(), NBYTES),
        (lambda: torch.rand(WIDTH, 2 * WIDTH).as_subclass(OnGpu)[:, :1].expand(-1, WIDTH), 0),
    ],
    ids=["expanded", "transposed", "expanded-with-gaps"],
)
def test_whatever_its_strides_an_input_is_copied_as_it_lies(
    graphed: Graphed, make: Any, nbytes: int
) -> None:
    """torch would refuse to write an expanded place."""
    graphed.graphs.moved = {0}
    w, y = tensor(), tensor()
    graphed.run([make(), w], [y])
    for _ in range(2):
        other = make()
        found = graphed.run([other, w], [y])
        if nbytes:
            assert found.pop(0) == ("copy", MAIN, graphed.place(0), other.data_ptr(), nbytes)
        else:
            assert torch.equal(graphed.pairs[0].places[0], other)
        assert [entry[0] for entry in found] == PLAIN


@pytest.mark.parametrize("graphed", [parse(CACHE)], indirect=True)
def test_an_input_that_a_program_changes_is_changed_wherever_it_lies(
    graphed: Graphed,
) -> None:
    graphed.graphs.moved = {1}
    x, cache, y = tensor(), tensor(), tensor()
    graphed.run([x, cache], [y])
    for _ in range(2):
        moved = tensor()
        found = graphed.run([x, moved], [y])
        home = graphed.place(1)
        assert ("copy", MAIN, home, moved.data_ptr(), NBYTES) in found
        kinds = [entry[0] for entry in found]
        copied = found.index(("copy_", moved.data_ptr(), home))
        assert kinds.index("replay") < copied < kinds.index("record")


def test_memory_that_is_another_allocation_is_captured_anew(graphed: Graphed) -> None:
    """A copy to a peer would read at address 0: captured.py, Note [Copies and allocations]."""
    crossing(graphed)
    x, w, y = tensor(), tensor(), tensor()
    for _ in range(2):
        assert graphed.kinds([x, w], [y]) == PLAIN
    another(graphed, w)  # which is copied to nobody
    assert graphed.kinds([x, w], [y]) == PLAIN
    for moved in (x, y):
        another(graphed, moved)
        for resets in (["reset", "reset"], [], []):
            assert graphed.kinds([x, w], [y]) == [*resets, *PLAIN]
    assert graphed.captures == 6


def test_a_tensor_of_the_cpu_is_refused_also_in_later_runs(graphed: Graphed) -> None:
    graphed.graphs.moved = {0}
    w, y, xs = tensor(), tensor(), [tensor() for _ in range(3)]
    for x in xs:
        graphed.run([x, w], [y])
        with pytest.raises(ExecutorError, match="a CUDA graph cannot read a tensor of the CPU"):
            graphed.run([torch.zeros(WIDTH, WIDTH), w], [y])


def test_graphs_that_go_are_reset_and_their_memory_too(graphed: Graphed) -> None:
    w = tensor()
    for _ in range(3):
        graphed.run([tensor(), w], None)
    log.clear()
    held = len(graphed.pairs)
    graphed.graphs.drop()
    assert [kind for kind, _ in log] == ["reset"] * 2 * held
    assert not graphed.graphs.pairs
    pools = len(graphed.pools)
    assert graphed.kinds([tensor(), w], None) == PLAIN
    assert graphed.pools[-1] is not graphed.pools[pools - 1], "whose graphs are gone"


SENDS = """
def step(tp: Team[2], x: f32[4], w: f32[4], y: out[f32[4]], z: out[f32[4]]):
    slots = alloc(f32[2, 4], symmetric=tp)
    main: put(x, slots[tp.rank], peer=tp.rank + 1)
    main: notify(ready, to=tp.rank + 1)
    main: expect(ready, tp.rank - 1)
    main: get(slots[tp.rank], y, peer=tp.rank + 1)
    main: call("aten.mul.out", w, slots[tp.rank + 1], out=z)
"""


def test_what_put_and_get_reach_is_told_to_the_graphs() -> None:
    with mock.patch.object(torch.cuda, "Stream"), fake_engine(program(2), 0) as fake:
        assert not graphs_file.Graphs(fake.engine).crossing
        context = fake.engine.context
        object.__setattr__(context.plan, "program", parse(SENDS))
        assert graphs_file.Graphs(fake.engine).crossing == {"x", "y", "slots"}


@pytest.mark.parametrize("wish", [None, "1"])
def test_ops_of_a_backend_are_captured_unregistered(wish: str | None) -> None:
    of = parse(f"""
def step(tp: Team[2], x: f32[{WIDTH}], w: f32[{WIDTH}], y: out[f32[{2 * WIDTH}]]):
    main: copy(w, y[0:{WIDTH}])
    main: all_gather(x, y, team=tp)
""")
    own = {} if wish is None else {"NCCL_GRAPH_REGISTER": wish}
    others = {name: value for name, value in os.environ.items() if name != "NCCL_GRAPH_REGISTER"}
    with (
        mock.patch.dict(os.environ, {**others, **own}, clear=True),
        mock.patch.object(torch.cuda, "Stream"),
        fake_engine(program(2), 0) as fake,
    ):
        graphs_file.Graphs(fake.engine)
        assert os.environ.get("NCCL_GRAPH_REGISTER") == wish
        object.__setattr__(fake.engine.context.plan, "program", of)
        object.__setattr__(fake.engine.context.plan, "turns", {1: QueuePlace("tp", "nccl", 0)})
        made = graphs_file.Graphs(fake.engine)
        assert made.crossing == ({"x", "y"} if wish else set())
        assert made.changed == {"y"}
        assert os.environ["NCCL_GRAPH_REGISTER"] == (wish or "0")


def test_the_graphs_of_a_turn_use_their_copy_of_slots(
    graphed: Graphed, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, found = graphed.fake.engine.context, list[Any]()
    begin = context.values.begin
    object.__setattr__(context.plan, "takes", {"slot": "tp"})
    monkeypatch.setattr(
        context.values, "begin", lambda given, uses: (found.append(uses), begin(given, {}))
    )
    graphed.run([tensor(), tensor()], [tensor()])
    assert found == [{"slot": 0}, {"slot": 1}]


def test_a_failure_between_two_captures_lets_go_of_the_first(graphed: Graphed) -> None:
    """NCCL would wait for it for as long as somebody keeps the error."""
    watched, binding = graphed.fake.engine.watched, graphed.graphs.bindings[0]
    issue = binding.issue

    def fail(stream: int, entry: int) -> None:
        issue(stream, entry)
        watched.failure = PeerError("a peer stopped meanwhile")

    cast("Any", binding).issue = fail
    with pytest.raises(PeerError, match="a peer stopped meanwhile"):
        graphed.run([tensor(), tensor()], [tensor()])
    assert [entry for entry in log if entry[0] == "reset"] == [("reset", 1)]
    assert not graphed.graphs.pairs
    assert len(graphed.pools) == 1  # the second was not begun


def test_no_graph_is_captured_after_a_failure(graphed: Graphed) -> None:
    graphed.fake.engine.watched.failure = PeerError("a peer stopped")
    with pytest.raises(PeerError, match="a peer stopped"):
        graphed.run([tensor(), tensor()], [tensor()])
    assert graphed.captured == []


@pytest.mark.parametrize("graphed", [parse(TWO_STREAMS)], indirect=True)
def test_a_capture_that_fails_joins_its_streams(graphed: Graphed) -> None:
    """Else the capture's end raises another error, and leaves the caller on the graphs' stream."""

    def fail() -> None:
        raise PeerError("heard in the midst of a capture")

    for binding in graphed.graphs.bindings:
        binding.steps[-1] = fail
    with pytest.raises(PeerError, match="in the midst"):
        graphed.run([tensor(), tensor()], [tensor()])
    side = graphed.graphs.bindings[0].sides[0].handle
    assert [entry[:2] for entry in graphed.captured[-2:]] == [
        ("record", side),
        ("wait_event", CAPTURE),
    ]


def test_captures_and_the_runs_before_them_are_on_one_thread(graphed: Graphed) -> None:
    """Whoever asks: a thread's handles of cuBLAS and cuDNN cannot be made while it captures."""
    engine, threads = graphed.fake.engine, list[threading.Thread]()

    def issue(stream: int, entry: int) -> None:
        threads.append(threading.current_thread())

    for binding in (engine.binding, *graphed.graphs.bindings):
        binding.issue = issue  # pyright: ignore
    engine.warm = False
    warm_up(engine, [])
    engine.warm = True
    graphed.run([tensor(), tensor()], [tensor()])
    with ThreadPoolExecutor(1) as another:
        another.submit(graphed.run, [tensor(), tensor()], [tensor()]).result(30)
    assert len(threads) == 5, "a run, and two pairs of graphs"
    assert len({*threads}) == 1
    assert threads[0] is not threading.current_thread()


def test_an_interrupt_waits_for_the_end_of_a_capture(graphed: Graphed) -> None:
    """Which uses what the caller goes on with."""
    ended: list[bool] = []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def capture() -> None:
        time.sleep(0.3)
        ended.append(True)

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(KeyboardInterrupt):
            capture_thread(torch.device("cpu")).run(capture)
        assert ended
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Held:
    """What is let go of only by the garbage collector."""

    def __init__(self, gone: list[str]) -> None:
        self.me = self
        weakref.finalize(self, gone.append, "gone")


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_collected_in_a_capture(graphed: Graphed, fails: bool) -> None:
    """An Executor that nobody has any more would be closed there, and its events asked about."""
    gone: list[str] = []
    inside: list[int] = []

    def issue(stream: int, entry: int) -> None:
        before = len(gone)
        Held(gone)
        assert [[] for _ in range(1000)]  # more than the collector lets pass
        inside.append(len(gone) - before)
        if fails:
            raise PeerError("as planned")

    def raised() -> Any:
        return pytest.raises(PeerError) if fails else contextlib.nullcontext()

    for binding in graphed.graphs.bindings:
        cast("Any", binding).issue = issue
    before = gc.get_threshold()
    gc.set_threshold(10)
    try:
        with raised():
            issue(0, 0)
        assert inside.pop()
        with raised():
            graphed.run([tensor(), tensor()], [tensor()])
        assert gc.isenabled()
    finally:
        gc.set_threshold(*before)
    assert inside == ([0] if fails else [0, 0])


DRAWS = """
def f(x: f32[1000], y: out[f32[1000]]):
    main: call("aten.bernoulli.p", x, 0.5, out=(kept := f32[1000]), rng=True)
    main: call("aten.neg.out", kept, out=y)
"""


@pytest.mark.parametrize("fails", [False, True])
def test_the_run_before_a_capture_leaves_random_numbers_as_they_were(
    fails: bool, seed: int
) -> None:
    """So that dropout in a graph, also in one that was captured anew, is that of the other runs."""
    x, y = torch.zeros(1000), torch.zeros(1000)
    with fake_engine(parse(DRAWS), 0) as fake:
        torch.manual_seed(seed)
        wanted = torch.zeros(1000).bernoulli_(0.5)
        torch.manual_seed(seed)
        ended = mock.patch.object(
            fake.engine, "synchronize", side_effect=PeerError("as planned") if fails else None
        )
        expected = pytest.raises(PeerError) if fails else contextlib.nullcontext()
        with ended as ends, expected:
            warm_up(fake.engine, [])
        ends.assert_called_once()
        fake.run([x], [y])
        assert torch.equal(y, -wanted)


PLAIN_MATH = 'call("aten.neg.out", x, out=y)'
REGION = """
    @region
    def mix(a):
        b = aten.neg.default(a)
        return b
"""


@pytest.mark.parametrize(
    ("op", "draws"),
    [
        (PLAIN_MATH, False),
        ("copy(x, y)", False),
        ('call("aten.bernoulli.p", x, 0.5, out=(k := f32[8]), rng=True)', True),
        ('call("aten.bernoulli.p", x, 0.5, out=(k := f32[8]))', True),
        ('call("aten.normal.Tensor_Tensor", x, x, out=(k := f32[8]))', True),
        ('call("interlace.matmul", x, x, out=(k := f32[8]))', True),
        ('call("mix", x, out=(k := f32[8]))', True),
        (f'fused(part({PLAIN_MATH}), part(call("aten.normal.out", x, x, out=x)))', True),
    ],
)
def test_what_may_draw_random_numbers_is_replayed_by_torch(op: str, draws: bool) -> None:
    """Which sees to it that each replay draws others."""
    region = REGION if "mix" in op else "\n"
    text = f"def f(x: f32[8], y: out[f32[8]]):{region}    main: {op}\n"
    driver, graph = mock.Mock(), mock.Mock()
    launch = launcher(parse(text), driver)(graph)
    assert driver.launcher.mock_calls == ([] if draws else [mock.call(graph)])
    launch(MAIN)
    assert graph.replay.call_count == int(draws)


def test_a_launch_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[tuple[Any, int]] = []

    def launch(handle: Any, stream: int) -> tuple[Any]:
        launches.append((handle, stream))
        return (SimpleNamespace(name="CUDA_ERROR_ILLEGAL_STATE") if len(launches) > 1 else 0,)

    known = mock.MagicMock(cuGraphLaunch=launch, CUgraphExec=lambda number: ("exec", number))
    monkeypatch.setattr(driver_file, "bindings", lambda: known)
    run = driver_file.Driver().launcher(mock.Mock(raw_cuda_graph_exec=lambda: 5))
    run(MAIN)
    assert launches == [(("exec", 5), MAIN)]
    with pytest.raises(BackendError, match=r"cuGraphLaunch .* CUDA_ERROR_ILLEGAL_STATE"):
        run(MAIN)


def test_a_replay_of_what_lies_where_it_lay_is_a_launch_and_little_else(graphed: Graphed) -> None:
    inputs, out, fake = [tensor(), tensor()], [tensor()], graphed.fake
    graphed.run(inputs, out)
    watched = graphed.fake.engine.watched
    with mock.patch.object(graphed.graphs, "_capture", side_effect=AssertionError("the long way")):
        for number in (2, 1, 2):
            found = graphed.run(inputs, out)
            assert [entry[:2] for entry in found] == [("replay", number), ("record", MAIN)]
            assert not watched.issuing
        assert (graphed.captures, graphed.made) == (2, 0)
        log.clear()
        assert fake.attempt(inputs[:1], out) is None
        assert fake.attempt(inputs, [torch.zeros(3)]) is None
        assert fake.attempt([inputs[0], inputs[1].t()[:-1]], out) is None
        fake.on_device(1)
        assert fake.attempt(inputs, out) is None
        fake.on_device(0)
        watched.failure = PeerError("as planned")
        assert fake.attempt(inputs, out) is None
        watched.failure = None
        assert log == []
        with pytest.raises(AssertionError, match="the long way"):
            fake.attempt(inputs, None)  # other tensors than the graphs know
    assert graphed.run(inputs, out)[0][0] == "replay"


def test_what_a_replay_writes_of_the_callers_is_seen_by_autograd(graphed: Graphed) -> None:
    inputs, out = [tensor(), tensor()], [tensor()]
    weight = torch.ones(WIDTH, WIDTH, requires_grad=True)
    graphed.run(inputs, out)
    for _ in range(3):
        loss = (out[0].as_subclass(torch.Tensor) * weight).sum()
        assert graphed.run(inputs, out)[0][0] == "replay"
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        assert [x._version for x in inputs] == [0, 0]


def test_graphs_that_another_thread_lets_go_of_are_not_launched(graphed: Graphed) -> None:
    """Between two runs it may: they are captured anew."""
    inputs, out = [tensor(), tensor()], [tensor()]
    graphed.run(inputs, out)
    graphed.graphs.drop()
    assert graphed.kinds(inputs, out) == ["replay", "record"]
    assert graphed.captures == 4


@pytest.mark.parametrize("known", [False, True])
def test_a_launch_that_fails_ends_its_run(graphed: Graphed, known: bool) -> None:
    """Where a peer's failure is known, that is what it failed for."""
    inputs, out = [tensor(), tensor()], [tensor()]
    graphed.run(inputs, out)
    (pair,) = graphed.pairs
    if known:
        failure = PeerError("a peer stopped")
        watched = graphed.fake.engine.watched

        def fail(error: BaseException) -> None:
            watched.failure = failure

        watched.fail = fail
    pair.launch[1] = mock.Mock(side_effect=BackendError("as planned"))
    engine, before = graphed.fake.engine, graphed.fake.engine.issued
    with pytest.raises(PeerError if known else BackendError) as found:
        graphed.run(inputs, out)
    assert "a peer stopped" in str(found.value) if known else "as planned" in str(found.value)
    assert engine.issued == engine.entered == before + 1  # else the watchdog waited for it
    assert not engine.watched.issuing
    engine.watched.failure = None
    assert graphed.run(inputs, out)[0] == ("replay", 1)
