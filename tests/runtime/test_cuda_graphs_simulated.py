"""Graphs of all ranks replayed in turn, simulated: signals that are taken back are neither lost nor
taken for those of a later run. No GPU is needed."""

from __future__ import annotations

import contextlib
import random
from typing import Any
from unittest import mock

import pytest
import torch
from tests.runtime.cuda_sites import SERVED, program
from tests.support.fake_cuda import MAIN, Fake, FakeSpace, fake_engine
from tests.support.fake_device import Entry, simulate

from interlace.ir import Program, parse
from interlace.options import Options
from interlace.runtime.cuda.graphs import graphs
from interlace.runtime.cuda.graphs.graphs import Graphs
from interlace.runtime.cuda.sharing import reaches
from interlace.runtime.prepare.plan import Plan
from interlace.runtime.values import DTYPES, new_storage
from interlace.verify import check

RUNS, TRIES = 6, 25

pytestmark = pytest.mark.timeout(120)


def zeros(buffer: Any) -> torch.Tensor:
    return torch.zeros([int(dim) for dim in buffer.shape], dtype=DTYPES[buffer.dtype])


class Replays:
    """What every rank's device does in some runs of a Program's two graphs."""

    def __init__(self, made: Program, stack: contextlib.ExitStack, **options: Any) -> None:
        assert check(made).sound
        (team,) = made.teams
        plans = [
            Plan(made, made.instantiate(rank), lambda _, asked: asked or "nccl")
            for rank in made.world
        ]
        told = [reaches(plan, "raises").get(team.name, {}) for plan in plans]
        stream = mock.patch.object(torch.cuda, "Stream")
        stack.enter_context(stream).return_value.cuda_stream = MAIN
        self.fakes: list[Fake] = []
        self.logs: list[list[list[Entry]]] = []
        for rank in made.world:
            given = Options(graph=True, **options)
            fake = stack.enter_context(fake_engine(made, rank, given))
            raised = {
                member: {signal: values[rank] for signal, values in signals.items()}
                for member, signals in enumerate(told)
            }
            self.fakes.append(fake)
            self.logs.append(self.replayed(fake, team.name, raised))

    def replayed(self, fake: Fake, team: str, raised: Any) -> list[list[Entry]]:
        """The entries of each run, of the even and of the odd graph in turn."""
        context, log = fake.engine.context, fake.log
        base = fake.space
        spaces = [FakeSpace(fake.side, base.span, base.gotten) for _ in (0, 1)]
        for space in spaces:
            space.raised = raised
        object.__setattr__(context.resources, "graph_spaces", [{team: space} for space in spaces])
        log.clear()
        graphs = fake.engine.graphs = Graphs(fake.engine)
        before = [("write", MAIN, *e[2:4]) for e in log if e[0] == "fill" and e[3]]
        runs = list[list[Entry]]()
        for number in range(RUNS):
            log.clear()
            context.values.move(new_storage(context.values.nbytes, context.device))
            given = {b.name: zeros(b) for b in context.plan.program.params}
            graphs.issue(number & 1, given, {})
            runs.append([*before, *log, ("record", MAIN, -1 - number, "over")])
            before = []
        return runs


BEGUN = """
def f(tp: Team[3], x: f32[4], y: out[f32[4]], n: out[f32[4]]):
    main: notify(begun, to=tp.others)
    comm: copy(x, n)
    comm: expect(begun, tp.others)
    comm: record(e)
    main: wait(e)
    main: copy(x, y)
"""
"""Nothing but a signal, raised on another stream than the one on which words are taken back."""
FURTHER = """
def f(tp: Team[2], x: f32[4], y: out[f32[4]], n: out[f32[4]]):
    slot = alloc(f32[4], symmetric=tp)
    main: record(taken)
    comm: wait(taken)
    comm: put(x, slot, peer=tp.rank + 1)
    comm: notify(came, to=tp.rank + 1, value=1)
    comm: copy(x, n)
    comm: notify(came, to=tp.rank + 1, value=2)
    comm: record(e)
    main: expect(came, tp.rank - 1, value=1)
    main: copy(slot, y)
    main: wait(e)
    main: free(slot)
"""
"""A signal that is raised further than anybody waits for."""


@pytest.fixture(params=[graphs.MANY, 0], ids=["", "apart"])
def _few_and_many_words(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many words of the other graph, these are cleared in a call of their own."""
    monkeypatch.setattr(graphs, "MANY", request.param)


few_and_many = pytest.mark.usefixtures("_few_and_many_words")


@few_and_many
@pytest.mark.parametrize("in_order", [False, True], ids=["overlapped", "in-order"])
@pytest.mark.parametrize("text", [BEGUN, FURTHER], ids=["begun", "further"])
def test_what_is_sound_ends_and_reads_nothing_too_early(
    text: str, in_order: bool, seed: int
) -> None:
    with contextlib.ExitStack() as stack:
        replays = Replays(parse(text), stack, in_order=in_order)
        put: set[tuple[int, int]] = set()

        def look(rank: int, run: int, entry: Entry, over: Any) -> None:
            if entry[0] == "copy":
                to, source = (replays.fakes[rank].place(address) for address in entry[2:4])
                if to is not None and to[0] != rank:
                    put.add((to[0], run))
                assert source is None or (rank, run) in put

        for number in range(TRIES):
            put.clear()
            assert not simulate(replays.logs, random.Random(seed + number), look)


@pytest.mark.parametrize(("site", "strategy"), SERVED)
def test_schedules_of_passes_end_and_wait_for_no_more(site: str, strategy: str, seed: int) -> None:
    with contextlib.ExitStack() as stack:
        replays = Replays(program(site, strategy), stack)
        for number in range(5):
            assert not simulate(replays.logs, random.Random(seed + number))
        for fake in replays.fakes:
            assert fake.engine.graphs is not None
            assert [list(binding.late()) for binding in fake.engine.graphs.bindings] == [[], []]
