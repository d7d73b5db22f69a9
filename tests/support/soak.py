"""Everything at once, in random order: Executors of all strategies, eager and in graphs, that come
and go, on changing streams, with tensors that stay and that move, and failures in between.

    for wrong, counts in ranks.run(soak, seed, 30.0, "cuda"):
        assert not wrong
"""

from __future__ import annotations

import random
import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from tests.gpu.cases import KINDS, STRATEGIES, Case, here, meet, prepared

from interlace.errors import InterlaceError
from interlace.ir import Op

TIMEOUT_S = 3.0
INPUTS = 3
LEAST = 41
"""Runs, however slow the machine."""
AT_ONCE = 5
"""Executors at a time."""


@dataclass
class Fault:
    """Raises before some op of this rank, once."""

    left: int = -1

    def __call__(self, rank: int, index: int, op: Op) -> None:
        if self.left >= 0:
            self.left -= 1
            if self.left < 0:
                raise ValueError("the planted fault")


@dataclass
class Subject:
    """An Executor, its inputs, and what comes of them: exact, whatever the order of the sums."""

    case: Case
    name: str
    graph: bool
    inputs: list[list[torch.Tensor]]
    wanted: list[torch.Tensor]
    fault: Fault = field(default_factory=Fault)
    executor: Any = None

    def prepare(self) -> None:
        hook = None if self.graph else self.fault
        self.executor = prepared(self.case, self.name, hook, graph=self.graph, timeout_s=TIMEOUT_S)


class Soak:
    """A rank's part; what all ranks do alike is drawn from `alike`."""

    def __init__(self, seed: int, device: str) -> None:
        self.gpu = device == "cuda"
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.alike, self.own = random.Random(seed), random.Random(seed * 31 + self.rank)
        self.names = here() if self.gpu else list(STRATEGIES)
        self.streams: list[Any] = []
        if self.gpu:
            self.streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(2))]
        self.cases: dict[str, Any] = {}
        for kind in KINDS:
            case = Case(kind, self.world, "bf16", "odd", device)
            inputs = [case.inputs(seed + n, exact=True) for n in range(INPUTS)]
            exact = [case.reference(seed + n, exact=True)[0] for n in range(INPUTS)]
            self.cases[kind] = case, inputs, [y.to(case.type) for y in exact]
        self.settle()
        self.subjects: list[Subject] = []
        self.done: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self.wrong: list[str] = []
        self.counts: dict[str, int] = {}

    def settle(self) -> None:
        if self.gpu:
            torch.cuda.synchronize()

    def step(self, number: int) -> None:
        """One random thing, the same on all ranks."""
        kinds = {"run": 85, "prepare": 5, "close": 3, "sync": 4, "fail": 2, "stay away": 1}
        what = self.alike.choices(list(kinds), list(kinds.values()))[0]
        if what in ("prepare", "run") and not self.subjects:
            what = "prepare"
        if what == "prepare" and len(self.subjects) == AT_ONCE:
            what = "close"
        self.counts[what] = self.counts.get(what, 0) + 1
        getattr(self, what.replace(" ", "_"))(number)

    def prepare(self, number: int) -> None:
        case, inputs, wanted = self.cases[self.alike.choice(KINDS)]
        name, graph = self.alike.choice(self.names), self.alike.random() < 0.5
        graph = graph and self.gpu
        subject = Subject(case, name, graph, inputs, wanted)
        subject.prepare()
        self.subjects.append(subject)

    def close(self, number: int) -> None:
        """Also while its runs are under way."""
        if self.subjects:
            self.subjects.pop(self.alike.randrange(len(self.subjects))).executor.close()

    def run(self, number: int) -> None:
        subject = self.alike.choice(self.subjects)
        which = self.alike.randrange(INPUTS)
        moved, given = self.own.random() < 0.3, self.own.random() < 0.5
        if self.own.random() < 0.1:
            time.sleep(self.own.random() * 0.002)
        with torch.cuda.stream(self.own.choice(self.streams)) if self.gpu else nullcontext():
            if self.gpu and self.own.random() < 0.3:
                torch.cuda._sleep(self.own.randrange(400_000))
            inputs = subject.inputs[which]
            if moved:
                inputs = [x.clone() for x in inputs]
            y = subject.case.output() if given else None
            (found,) = subject.executor.run(inputs, out=None if y is None else [y])
        label = (
            f"{number}: {subject.case.kind} {subject.name} graph={subject.graph} {moved} {given}"
        )
        self.done.append((label, found, subject.wanted[which]))

    def sync(self, number: int) -> None:
        """All results up to now are right."""
        for subject in self.subjects:
            subject.executor.synchronize()
        self.settle()
        self.wrong += [label for label, y, wanted in self.done if not torch.equal(y, wanted)]
        self.done = []

    def fail(self, number: int) -> None:
        """One rank raises in the middle of a run; the others hear of it; a reset mends it."""
        eager = [s for s in self.subjects if not s.graph]
        if not eager:
            return
        self.sync(number)
        subject, victim = self.alike.choice(eager), self.alike.randrange(self.world)
        meet()
        if self.rank == victim:
            subject.fault.left = self.own.randrange(4)
        time.sleep(self.own.random() * 0.003)
        self._until_it_fails(subject, "the planted fault", 4)

    def stay_away(self, number: int) -> None:
        """One rank does not come: a time-out for the others."""
        if not self.subjects:
            return
        self.sync(number)
        subject, victim = self.alike.choice(self.subjects), self.alike.randrange(self.world)
        meet()
        if self.rank == victim:
            time.sleep(TIMEOUT_S * 1.5)
        self._until_it_fails(subject, "", 3)

    def _until_it_fails(self, subject: Subject, text: str, runs: int) -> None:
        start, heard = time.monotonic(), ""
        for _ in range(runs):
            try:
                subject.executor.run(subject.inputs[0])
                subject.executor.synchronize()
            except (InterlaceError, ValueError) as error:
                heard = str(error)
                break
        assert heard, f"{subject.name} graph={subject.graph} heard nothing"
        assert text in heard, heard
        assert time.monotonic() - start < TIMEOUT_S * 1.5 + 5
        meet()
        subject.fault.left = -1
        subject.executor.reset()


def soak(seed: int, seconds: float, device: str) -> tuple[list[str], dict[str, int]]:
    """Steps for this long, and at least so many: what went wrong, and how much of what was done."""
    state, end, number = Soak(seed, device), time.monotonic() + seconds, 0
    store: Any = dist.distributed_c10d._get_default_store()
    with ExitStack() as stack:
        stack.callback(lambda: [s.executor.close() for s in state.subjects])
        while True:
            if number % 20 == 0:  # rank 0's clock is the one that counts
                if state.rank == 0:
                    more = time.monotonic() < end or state.counts.get("run", 0) < LEAST
                    store.set(f"soak/{seed}/{number}", str(int(more)))
                if store.get(f"soak/{seed}/{number}") == b"0":
                    break
            state.step(number)
            number += 1
        state.sync(number)
    return state.wrong, state.counts
