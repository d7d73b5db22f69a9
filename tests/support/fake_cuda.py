"""A CUDA driver that writes down what it is asked to do, so that the engine's issue order is tested
without a GPU: tensors are the CPU's, streams are numbers, peers' memory is memory of this process.

    with fake_engine(program, rank=0) as fake:
        fake.run([x, w])
        fake.log                     # [("record", 1, 4), ("wait_event", 2, 4), ...]

Calls are noted and done; of kernels only the launch is noted. `tests/support/fake_device.py` does
what the logs of all ranks say.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from interlace.comm import Registered
from interlace.comm.control import NBYTES, Control
from interlace.comm.cuda.memory import slot_keys, tensor_at
from interlace.comm.host.shared_memory import Segment
from interlace.comm.rendezvous.liveness import PeerProcess, identity
from interlace.ir import Call, Get, Program, View
from interlace.ir import kernels as kernels_file
from interlace.ir.sizes import number
from interlace.kernels.gemm import support
from interlace.options import Options
from interlace.runtime.arena import Arena
from interlace.runtime.calling.calls import Thunk
from interlace.runtime.cuda import binder as binder_file
from interlace.runtime.cuda import engine as engine_file
from interlace.runtime.cuda.engine import CudaEngine
from interlace.runtime.cuda.lanes import Lane
from interlace.runtime.cuda.launches import transfers as transfers_file
from interlace.runtime.cuda.sharing import mark_gotten, signals_of
from interlace.runtime.engine import EngineContext, TeamResources
from interlace.runtime.executor import RunLabel
from interlace.runtime.flight import Flight
from interlace.runtime.inputs import Parameters
from interlace.runtime.prepare.plan import Plan
from interlace.runtime.prepare.registered import written
from interlace.runtime.run_sizes import RunSizes
from interlace.runtime.values import ValueTable, nbytes

MAIN = 1
"""The handle of the caller's stream; the others count on from there."""
WORD = 1 << 40
"""Where the words begin that peers can write; a rank's own lie below."""
TILES = 6
"""Times that a kernel raises a counter."""


@dataclass(frozen=True)
class Launch:
    """A kernel of several parts: what it was made for, and what it was given."""

    kind: str
    size: int
    rank: int
    subs: int
    tensors: dict[str, torch.Tensor | None]
    gates: int = 0
    expected: int = 0
    counters: int = 0
    own: int = 1


class FakeDriver:
    """Every call that reaches a stream, as a tuple in `log`: what, stream, and its numbers."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.events = 0
        self.allocations: dict[int, int] = {}
        """The numbers of those that are made where another was."""
        self.streams = itertools.count(MAIN + 1)

    def write(self, stream: int, address: int, value: int) -> None:
        self.log.append(("write", stream, address, value))

    def wait(self, stream: int, address: int, value: int) -> None:
        self.log.append(("wait", stream, address, value))

    def copy(self, stream: int, dst: int, src: int, nbytes: int) -> None:
        self.log.append(("copy", stream, dst, src, nbytes))

    def record(self, stream: int, event: int) -> None:
        self.log.append(("record", stream, event))

    def wait_event(self, stream: int, event: int) -> None:
        self.log.append(("wait_event", stream, event))

    def batch(self, *parts: tuple[str, Sequence[int]]) -> Any:
        def run(stream: int, *values: int) -> None:
            for (kind, words), value in zip(parts, values, strict=True):
                self.log.extend((kind, stream, word, value) for word in words)

        return types.SimpleNamespace(run=run)

    def event(self) -> int:
        self.events += 1
        return self.events

    def destroy_event(self, event: int) -> None:
        pass

    def fill(self, address: int, value: int, count: int) -> None:
        self.log.append(("fill", None, address, value, count))

    def launcher(self, graph: Any) -> Callable[[int], None]:
        return lambda _: graph.replay()

    def finish_device(self) -> None:
        self.log.append(("finish", None))

    def done(self, event: int) -> bool:
        return True

    def read(self, address: int, count: int) -> list[int]:
        return [0] * count

    def buffer_id(self, address: int) -> int:
        return self.allocations.get(address, 1)


CURRENT_STREAM = torch.cuda.current_stream


class FakeSide:
    """The device side of a team of which only this rank is there."""

    shares_gpu = False

    def __init__(self, driver: FakeDriver, size: int, me: int) -> None:
        self.driver, self.size, self.me, self.run, self.spaces = driver, size, me, 0, 0
        others = [member for member in range(size) if member != me]
        self.told = [word("ended", member, me) for member in others]
        self.heard = [word("ended", me, member) for member in others]
        self.device, self.last, self.closed = torch.device("cpu"), None, 0
        self.generation, self.teller = 0, None
        self.exchanges = 0

    def enter(self) -> int:
        self.run += 1
        return self.run

    def release(self, generation: int) -> None:
        self.driver.log.append(("release",))

    def late(self, behind: int) -> list[int]:
        return []


def word(signal: str, reader: int, writer: int, space: int = 0) -> int:
    """The address of the word of a signal on a rank, raised by another; spaces count from 1."""
    return WORD + (space * 10**8 + sum(signal.encode()) * 1000 + reader * 10 + writer) * 4


class FakeSpace:
    """The words of a Program."""

    def __init__(self, side: FakeSide, span: int, gotten: frozenset[str]) -> None:
        self.side, self.span, self.base, self.uses = side, span, 0, True
        self.gotten = gotten
        self.raised: dict[int, dict[str, int]] = {}
        """Values to which each other member says that it raises its signals here."""
        side.spaces += 1
        self.number = side.spaces
        self._next = WORD // 2 + self.number * 10**6

    def begin(self) -> int:
        self.base += self.span
        return self.base

    def own(self, signal: str, member: int) -> int:
        return word(signal, self.side.me, member, self.number)

    def theirs(self, signal: str, members: Sequence[int]) -> list[int]:
        return [word(signal, member, self.side.me, self.number) for member in members]

    def local(self, count: int) -> int:
        self._next += 4 * count
        return self._next - 4 * count

    def value(self, signal: str, member: int) -> int:
        return 0

    def last(self, signal: str, member: int) -> int:
        return self.raised.get(member, {}).get(signal, 0)


class FakeKernel:
    """Launches, noted."""

    def __init__(self, kind: str, driver: FakeDriver, facts: dict[str, Any]) -> None:
        self._kind, self._driver, self._facts = kind, driver, facts
        self.config, self.subs = None, facts.get("subs", 1)

    raised = TILES

    def launch(self, stream: int, *args: Any) -> None:
        gather = self._kind == "gather"
        names = ("x", "w", "slots", "y", "bias")
        names = names if gather else ("x", "w", "stage", "own", "bias")
        words = ("gates", "expected") if gather else ("counters",)
        launch = Launch(
            *(self._kind, self._facts["size"], self._facts["rank"], self.subs),
            dict(zip(names, args, strict=False)),
            **dict(zip(words, args[len(names) :], strict=True)),
            own=self._facts.get("own_parts", 1),
        )
        self._driver.log.append(("launch", stream, launch))


class Fake:
    """A bound engine, and what it asked of the driver."""

    def __init__(
        self, engine: CudaEngine, driver: FakeDriver, caller: Any, device: Any, capturing: Any
    ) -> None:
        self.engine, self.driver = engine, driver
        self._caller, self._device, self.capturing = caller, device, capturing
        """`capturing` replaces torch's query whether the stream is captured."""
        self.side: Any = next(iter(engine.sides), None)
        self.space: Any = next(iter(engine.context.resources.spaces.values()), None)
        self.team: Any = next(iter(engine.context.resources.teams.values()), None)
        """Its one team; `team.peers` has the control block as each rank sees it."""

    @property
    def log(self) -> list[tuple[Any, ...]]:
        """Calls of the driver in the last run."""
        return self.driver.log

    def run(self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None = None) -> Any:
        """One run. Its end is noted as such."""
        log = self.driver.log
        log.clear()
        result = self.attempt(inputs, out)
        ends = {over for _, over in self.engine.marks.events}
        log[:] = [
            (*entry, "over") if entry[0] == "record" and entry[2] in ends else entry
            for entry in log
        ]
        return result

    def attempt(
        self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None = None
    ) -> Any:
        """A run as the Executor begins it; None where it would check something first."""
        at = self.engine.admit(inputs, out)
        return None if at is None else self.engine.issue(inputs, out, at)

    def on(self, stream: int) -> None:
        """The stream that the caller is on from now on."""
        self._caller.return_value = stream

    def on_device(self, index: int) -> None:
        """The current device of the calling thread from now on."""
        self._device.return_value = index

    def place(self, address: int) -> tuple[int, int] | None:
        """Member and copy that hold an address in a slot; None for an address outside slots."""
        for slot in self.engine.context.resources.slots.values():
            for member, copies in enumerate(slot.copies):
                for copy, memory in enumerate(copies):
                    if 0 <= address - memory.data_ptr() < memory.nbytes:
                        return member, copy
        return None


def noting(driver: FakeDriver, engines: list[CudaEngine]) -> Callable[..., Any]:
    """`bind_call`, of Calls that are noted with the addresses of what they read and write."""
    bind_call = binder_file.bind_call

    def bind(op: Call, values: ValueTable, *rest: Any) -> Any:
        run = bind_call(op, values, *rest)
        reads = [values.own(view) for view in op.views()]
        writes = [values.own(out) for out in op.outs if isinstance(out, View)]

        def noted() -> None:
            lane = engines[0].binding.lanes[op.stream]
            read, written = (
                tuple(values.items[place].data_ptr() for place in places)
                for places in (reads, writes)
            )
            stream = lane.handle or MAIN  # of a graph's main stream the eager lanes know nothing
            driver.log.append(("call", stream, op.fn, read, written))
            run()

        return noted

    return bind


def exchanging(side: FakeSide, spec: Any, _sizes: Any, handle: Callable[[], int], *_: Any) -> Thunk:
    """`bind_exchange`: a kernel that needs a processor, tells all peers and waits for all."""
    others = [member for member in range(side.size) if member != side.me]

    def run() -> None:
        side.exchanges += 1
        log, stream, number = side.driver.log, handle(), side.exchanges
        log.append(("call", stream, f"exchange {spec.kind}", (), ()))
        log.extend(("write", stream, word("exchanged", o, side.me), number) for o in others)
        log.extend(("wait", stream, word("exchanged", side.me, o), number) for o in others)

    return run


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's memory as bytes."""
    return tensor_at(tensor.data_ptr(), tensor.numel() * tensor.itemsize, tensor.device)


class Apart(dict[tuple[str, int], int]):
    """No two takes of a slot share memory."""

    def __missing__(self, take: tuple[str, int]) -> int:
        return take[1]


def alone_or_teamed(
    plan: Plan, driver: FakeDriver, beside: Fake | None
) -> tuple[TeamResources, list[Segment]]:
    """Returns the resources that a rank shares with its one team, if it is in one."""
    if not plan.where.members:
        return TeamResources({}, {}, {}), []
    (name,) = plan.where.members
    member = plan.where.member(name)
    size, me = len(member.ranks), member.index
    _, span = signals_of(plan.program)
    side = FakeSide(driver, size, me) if beside is None else beside.side
    segments = [Segment.create(NBYTES) for _ in range(size)]
    lives = [PeerProcess.of(*identity()) for _ in range(size)]
    cells = [segment.cells for segment in segments]
    peers = [Control(name, range(size), member, cells, lives) for member in range(size)]
    facts: Any = {"resets": 0, "is_gone": False, "topic": name, "size": size}
    team: Any = mock.Mock(control=peers[me], peers=peers, lock=threading.RLock(), **facts)
    if beside is not None:
        team = beside.team
    slots: Any = {}
    keys = slot_keys(plan.takes, plan.buffers, Apart)
    shared: Any = {} if beside is None else beside.engine.context.resources.slots
    known = {(slot.name, slot.nbytes): slot for slot in shared.values()}
    for buffer in plan.takes:
        size_of = number(plan.buffers[buffer].offset) + nbytes(plan.buffers[buffer])
        copies = [
            tuple(torch.zeros(size_of, dtype=torch.uint8) for _ in (0, 1)) for _ in range(size)
        ]
        facts = {"name": keys[buffer], "nbytes": size_of, "gotten": False}
        made = types.SimpleNamespace(me=me, copies=copies, **facts)
        slots[buffer] = known.get((keys[buffer], size_of), made)
    gets = [op.src.buffer for op in plan.program.ops if isinstance(op, Get)]
    gotten = frozenset(keys[name] for name in gets if name in keys)
    mark_gotten({keys[buffer]: slot for buffer, slot in slots.items()}, gotten)
    spaces: Any = {name: FakeSpace(side, span, gotten)}
    return TeamResources({name: team}, slots, spaces), segments


@contextlib.contextmanager
def replaced_module(name: str, module: Any) -> Iterator[None]:
    """Another module under this name. `patch.dict(sys.modules)` would also forget all modules that
    are imported meanwhile, so that a later import makes second copies of their classes."""
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before


@contextlib.contextmanager
def fake_engine(
    program: Program,
    rank: int,
    options: Options | None = None,
    beside: Fake | None = None,
    registered: Mapping[str, Sequence[torch.Tensor]] | None = None,
    refuses: str | None = None,
) -> Iterator[Fake]:
    """The engine of one rank of a Program with one team or none; `beside` is another's of it.

    `registered` has each registered parameter's tensor on every rank; `refuses` says why the GPU
    has no kernels for Fused ops.
    """
    driver = FakeDriver() if beside is None else beside.driver
    device = torch.device("cpu")
    plan = Plan(program, program.instantiate(rank), lambda team, asked: asked or "nccl")
    resources, segments = alone_or_teamed(plan, driver, beside)
    held = {
        buffer: Registered(
            theirs[rank],
            rank,
            tuple(memory_of(tensor) for tensor in theirs),
            buffer in written(plan.program),
        )
        for buffer, theirs in (registered or {}).items()
    }
    values = ValueTable(
        plan.program,
        plan.box,
        resources.slots,
        device,
        RunSizes({}),
        registered=held,
    )
    options = options or Options()
    flight, limit = Flight(plan.program, rank), options.timeout_s or 60.0
    inputs, outputs = (
        Parameters(
            program.name,
            kind,
            [b for b in plan.program.params if b.kind == kind],
            device,
            registered=held,
        )
        for kind in ("input", "output")
    )
    context = EngineContext(
        *(plan, values, resources, options, device, flight, limit, None),
        *(inputs, outputs, tuple),
        RunLabel(program.name, lambda _: 7, values.sizes, flight.text),
        Arena(device) if beside is None else beside.engine.context.arena,
    )
    context.arena.hold(values.nbytes)
    engines: list[CudaEngine] = []
    matmuls = {
        f"{kind.title()}Matmul": lambda kind=kind, **facts: FakeKernel(kind, driver, facts)
        for kind in ("gather", "scatter")
    }
    name, kernels = "interlace.kernels.gemm.matmul", types.SimpleNamespace(**matmuls)
    with contextlib.ExitStack() as stack:
        for segment in segments:
            stack.callback(segment.unlink)

        def patch(where: Any, name: str, new: Any) -> None:
            stack.enter_context(mock.patch.object(where, name, new))

        raw = mock.patch.object(torch._C, "_cuda_getCurrentRawStream", create=True)
        caller = stack.enter_context(raw)
        caller.return_value = MAIN
        device_of = mock.patch.object(torch._C, "_cuda_getDevice", create=True)
        device_now = stack.enter_context(device_of)
        device_now.return_value = 0
        stack.enter_context(replaced_module(name, kernels))
        for name in ("device", "stream"):
            patch(torch.cuda, name, lambda _: contextlib.nullcontext())
        if torch.cuda.current_stream is CURRENT_STREAM:  # no test's own
            patch(torch.cuda, "current_stream", lambda _: None)
        patch(support, "refuse_device", lambda device: refuses)
        patch(kernels_file, "TILE_ROWS", 1)
        asked = mock.patch.object(torch._C, "_cuda_isCurrentStreamCapturing", create=True)
        capturing = stack.enter_context(asked)
        capturing.return_value = False
        patch(Lane, "own", lambda lane, device: Lane(lane, next(driver.streams)))
        patch(binder_file, "bind_call", noting(driver, engines))
        patch(transfers_file, "bind_exchange", exchanging)
        patch(engine_file, "watchdog", lambda: mock.MagicMock())
        if not resources.spaces:
            patch(engine_file, "Driver", lambda: driver)
        engine = CudaEngine(context)
        engines.append(engine)
        yield Fake(engine, driver, caller, device_now, capturing)
