"""What the CUDA engines of all ranks issue, done by simulated devices whose streams are now far
behind and now far ahead: nobody waits for ever, and nobody writes what a peer still uses."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.runtime.cuda_sites import (
    OPEN,
    SERVED,
    SIMULATED,
    WORLD,
    logs_of,
    lowered,
    program,
    runs_of,
    writes_what_peers_use,
)
from tests.support.fake_cuda import MAIN, Fake, FakeSide, fake_engine, word
from tests.support.fake_device import Entry, simulate

from interlace.ir import Expect, Fused, Get, parse
from interlace.options import Options
from interlace.runtime.cuda import binder
from interlace.runtime.cuda.waits.waiting import holds
from interlace.runtime.prepare.plan import Plan
from interlace.verify import check


@pytest.mark.parametrize("in_order", [False, True], ids=["overlapped", "in-order"])
@pytest.mark.parametrize(("site", "strategy"), SIMULATED)
def test_no_rank_waits_for_ever_nor_writes_too_early(
    site: str, strategy: str, in_order: bool, seed: int
) -> None:
    """Simulated, with ranks and streams far apart: all ends, and whoever writes what peers use in
    run n does so after they have ended run n - 2."""
    made = program(site, strategy)
    gotten = any(isinstance(op, Get) for op in made.ops)
    with contextlib.ExitStack() as stack:
        options = Options(in_order=in_order)
        fakes = [stack.enter_context(fake_engine(made, r, options)) for r in range(WORLD)]
        logs = [logs_of(fake, site, 6) for fake in fakes]

        def look(rank: int, run: int, entry: Entry, over: Any) -> None:
            if writes_what_peers_use(fakes[rank], entry, gotten):
                assert min(over(peer) for peer in range(WORLD)) >= run - 2

        for number in range(5):
            assert not simulate(logs, random.Random(seed + number), look)
        # The simulation tells: without one signal it does not end.
        last = logs[2][-1]
        word = next(entry[2] for entry in last if entry[0] == "write")
        last[:] = [entry for entry in last if entry[0::2][:2] != ("write", word)]
        assert simulate(logs, random.Random(seed))


@pytest.mark.parametrize("place", [1, 2, 3])
@pytest.mark.parametrize("waits", [True, False])
def test_a_kernel_that_holds_all_processors_leaves_none_waiting(
    waits: bool, place: int, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """What stands before any of a rank's puts may need a processor; without the rule none ends."""
    if not waits:
        monkeypatch.setattr(binder, "holds", lambda plan, near: {})
    parts = str(program("gather", "fused")).split("    comm: put")
    parts[place - 1] += '    comm: call("aten.mul.out", w, w, out=w2)\n'
    text = "    comm: put".join(parts)
    made = parse(text.replace(", y: out[", ", w2: out[bf16[16, 8]], y: out["))
    assert check(made).sound
    with contextlib.ExitStack() as stack:
        fakes = [stack.enter_context(fake_engine(made, rank)) for rank in range(WORLD)]
        x, w, w2 = (torch.randn(n, m).bfloat16() for n, m in ((8, 16), (16, 8), (16, 8)))
        out = [w2, torch.empty(32, 8, dtype=torch.bfloat16)]
        logs = [runs_of(fake, [x, w], out, 4) for fake in fakes]
        ends = [not simulate(logs, random.Random(seed + number)) for number in range(20)]
        assert all(ends) == waits


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("text", ["LAYERS", "BRANCHES"])
@pytest.mark.parametrize("strategy", ["fused", "ranges"])
def test_on_one_gpu_a_kernel_that_holds_all_processors_leaves_no_put_waiting(
    strategy: str, text: str, known: bool, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Copies within a GPU are kernels: behind those that hold it, in each rank's turn, they would
    wait for ever. Where the ranks do not know that they share it, some runs do not end."""
    monkeypatch.setattr(FakeSide, "shares_gpu", known)
    made = lowered(globals()[text], strategy)
    shapes = {"LAYERS": ((8, 16), (16, 16), (16, 16), (8, 16)), "BRANCHES": BRANCHED}[text]
    with contextlib.ExitStack() as stack:
        fakes = [stack.enter_context(fake_engine(made, rank)) for rank in range(WORLD)]
        given = [torch.randn(*shape).bfloat16() for shape in shapes]
        logs = [runs_of(fake, given, None, 3) for fake in fakes]
        seeds = [random.Random(seed + number) for number in range(20)]
        assert all(not simulate(logs, rng, one_gpu=True) for rng in seeds) == known


@pytest.mark.parametrize(
    ("site", "strategy"), [s for s in SIMULATED if s[1] != "get" or s not in SERVED]
)
@pytest.mark.parametrize("shared", [("comm", "arrivals"), ("main", "comm", "arrivals")])
def test_streams_may_share_a_queue_of_the_device(
    site: str, strategy: str, shared: tuple[str, ...], seed: int
) -> None:
    """So they do with CUDA_DEVICE_MAX_CONNECTIONS=1, in the order in which ops are issued."""
    with contextlib.ExitStack() as stack:
        made = program(site, strategy)
        fakes = [stack.enter_context(fake_engine(made, rank)) for rank in range(WORLD)]
        logs = [logs_of(fake, site, 3) for fake in fakes]
        for runs, fake in zip(logs, fakes, strict=True):
            lanes = {name: lane.handle for name, lane in fake.engine.binding.lanes.items()}
            one = {lanes[name] for name in shared if name in lanes}
            one |= {MAIN} if "main" in shared else set[int]()
            for log in runs:
                log[:] = [(e[0], min(one) if e[1] in one else e[1], *e[2:]) for e in log]
        for number in range(5):
            assert not simulate(logs, random.Random(seed + number))


BRANCHES = """
def f(tp: Team[4], x: bf16[32, 16], w: bf16[16, 16], r: bf16[8, 16]):
    t = empty(bf16[32, 16])
    main: call("aten.mm.out", x, w, out=t)
    y = empty(bf16[8, 16])
    main: reduce_scatter(t, y, reduce="sum", team=tp)
    g = empty(bf16[32, 16])
    main: all_gather(r, g, team=tp)
    main: call("aten.mm.default", g, w, out=(h := bf16[32, 16]))
    return y, h
"""


BRANCHED = ((32, 16), (16, 16), (8, 16))
"""The shapes of its inputs."""
REDUCED = BRANCHES.replace("x: bf16[32, 16]", "x: bf16[64, 16]").replace(
    """    t = empty(bf16[32, 16])
    main: call("aten.mm.out", x, w, out=t)
    y = empty(bf16[8, 16])
    main: reduce_scatter(t, y, reduce="sum", team=tp)
""",
    """    t = empty(bf16[64, 16])
    main: call("aten.mm.out", x, w, out=t)
    y = empty(bf16[64, 16])
    main: all_reduce(t, y, reduce="sum", team=tp)
""",
)


@pytest.mark.parametrize("strategy", ["put", "fused", "ranges", "beside", "slabs"])
@pytest.mark.parametrize(
    ("shared", "ranks"),
    [
        ((), range(WORLD)),
        (("comm", "arrivals"), (1, 3)),
        (("main", "arrivals"), (2,)),
        (("main", "comm", "arrivals"), range(WORLD)),
        (("main", "comm", "arrivals"), (1, 3)),
    ],
)
def test_a_sum_beside_a_kernel_holds_up_no_put(
    strategy: str, shared: tuple[str, ...], ranks: Sequence[int], seed: int
) -> None:
    """Of a gather whose kernel holds all processors, in whatever queue of these ranks sums and
    puts stand."""
    made = lowered(REDUCED if strategy == "slabs" else BRANCHES, strategy)
    given = [torch.randn(n, 16).bfloat16() for n in (64 if strategy == "slabs" else 32, 16, 8)]
    with contextlib.ExitStack() as stack:
        logs: list[list[list[Entry]]] = []
        for rank in range(WORLD):
            fake = stack.enter_context(fake_engine(made, rank))
            lanes = {name: lane.handle for name, lane in fake.engine.binding.lanes.items()}
            here = [name for name in shared if rank in ranks and name in lanes]
            one = {MAIN if name == "main" else lanes[name] for name in here}
            logs.append(
                [
                    [(e[0], min(one) if e[1] in one else e[1], *e[2:]) for e in log]
                    for log in runs_of(fake, given, None, 3)
                ]
            )
        for number in range(10):
            assert not simulate(logs, random.Random(seed + number))


@pytest.mark.parametrize("strategy", ["fused", "ranges"])
def test_turns_of_a_reduction_hold_up_no_kernel_of_a_gather(strategy: str) -> None:
    """That stands behind it: they wait for what other ranks put without a processor."""
    made = lowered(BRANCHES, strategy)
    assert sum(isinstance(op, Expect) and op.signal == "t_slots_turn" for op in made.ops) == 2
    assert not holds(Plan(made, made.instantiate(0), lambda team, asked: asked or "nccl"))
    # In a list of its own a rank does not know on which stream the others raise what it awaits.
    alone = made.instantiate(0)
    assert holds(Plan(alone, alone.instantiate(0), lambda team, asked: asked or "nccl"))


def test_executors_of_one_team_in_any_order(seed: int) -> None:
    """Runs that hear of every rank among runs that do not."""
    rng = random.Random(seed)
    with contextlib.ExitStack() as stack:
        pairs: list[tuple[Fake, Fake]] = []
        for rank in range(WORLD):
            first = stack.enter_context(fake_engine(program("gather", "fused"), rank))
            pairs.append((first, stack.enter_context(fake_engine(parse(OPEN), rank, None, first))))
        turns = [rng.random() < 0.6 for _ in range(10)]
        x, y = torch.randn(8, 16).bfloat16(), torch.empty(8, 16, dtype=torch.bfloat16)
        logs: list[list[list[Entry]]] = []
        for pair in pairs:
            logs.append([])
            for is_open in turns:
                if is_open:
                    logs[-1] += runs_of(pair[1], [x], [y], 1)
                else:
                    logs[-1] += logs_of(pair[0], "gather", 1)

        def look(rank: int, run: int, entry: Entry, over: Any) -> None:
            if any(writes_what_peers_use(fake, entry, False) for fake in pairs[rank]):
                assert min(over(peer) for peer in range(WORLD)) >= run - 2

        for number in range(10):
            assert not simulate(logs, random.Random(seed + number), look)


def test_the_simulation_tells_what_is_written_too_early(seed: int) -> None:
    """Runs that wait for one neighbour alone, with and without what makes them wait for all."""
    with contextlib.ExitStack() as stack:
        fakes = [stack.enter_context(fake_engine(parse(OPEN), rank)) for rank in range(WORLD)]
        x, y = torch.randn(8, 16).bfloat16(), torch.empty(8, 16, dtype=torch.bfloat16)
        logs = [runs_of(fake, [x], [y], 8) for fake in fakes]
        early: list[int] = []

        def look(rank: int, run: int, entry: Entry, over: Any) -> None:
            if writes_what_peers_use(fakes[rank], entry, False):
                early.extend([run] * (min(over(peer) for peer in range(WORLD)) < run - 2))

        for number in range(20):
            assert not simulate(logs, random.Random(seed + number), look)
        assert not early
        takes = {
            word("ended", reader, writer) for reader in range(WORLD) for writer in range(WORLD)
        }
        bare = [
            [[e for e in log if e[0] != "wait" or e[2] not in takes] for log in runs]
            for runs in logs
        ]
        for number in range(200):
            simulate(bare, random.Random(seed + number), look)
        assert early


LAYERS = """
def f(tp: Team[4], x: bf16[8, 16], w: bf16[16, 16], v: bf16[16, 16], r: bf16[8, 16]):
    full = empty(bf16[32, 16])
    main: all_gather(x, full, team=tp)
    other = empty(bf16[32, 16])
    main: all_gather(r, other, team=tp)
    main: call("aten.mm.default", full, w, out=(h := bf16[32, 16]))
    main: call("aten.mm.default", other, w, out=(o := bf16[32, 16]))
    main: call("aten.mul.Tensor", h, o, out=(a := bf16[32, 16]))
    main: call("aten.mm.default", a, v, out=(t := bf16[32, 16]))
    y = empty(bf16[8, 16])
    main: reduce_scatter(t, y, reduce="sum", team=tp)
    main: call("aten.add.Tensor", x, y, out=(z := bf16[8, 16]))
    again = empty(bf16[32, 16])
    main: all_gather(z, again, team=tp)
    main: call("aten.mm.default", again, w, out=(b := bf16[32, 16]))
    main: call("aten.mm.default", b, v, out=(c := bf16[32, 16]))
    q = empty(bf16[8, 16])
    main: reduce_scatter(c, q, reduce="sum", team=tp)
    return z, q
"""


@pytest.mark.parametrize("strategy", ["put", "get", "fused", "ranges", "beside"])
def test_layers_end_whatever_holds_the_processors(strategy: str, seed: int) -> None:
    made = lowered(LAYERS, strategy)
    assert any(isinstance(op, Fused) for op in made.ops) == (strategy not in ("put", "get"))
    with contextlib.ExitStack() as stack:
        fakes = [stack.enter_context(fake_engine(made, rank)) for rank in range(WORLD)]
        shapes = ((8, 16), (16, 16), (16, 16), (8, 16))
        given = [torch.randn(*shape).bfloat16() for shape in shapes]
        logs = [runs_of(fake, given, None, 4) for fake in fakes]
        for number in range(20):
            assert not simulate(logs, random.Random(seed + number))
        # And if the device has one queue for all streams, in the order in which ops are issued.
        alone = [[[(e[0], MAIN, *e[2:]) for e in log] for log in runs] for runs in logs]
        for number in range(5):
            assert not simulate(alone, random.Random(seed + number))
