"""Sites lowered for CUDA, with engines that only note what they issue.

with bound("gather", "fused", rank=1) as fake:
    first, second = logs_of(fake, "gather", runs=2)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from tests.passes.experts import layer
from tests.support.fake_cuda import Fake, fake_engine
from tests.support.fake_device import Entry

from interlace.ir import Program, kernels, parse
from interlace.options import Options
from interlace.passes import lower, take_turns
from interlace.passes.strategies import pieces

GATHER = """
def f(tp: Team[4], x: bf16[8, 16], w: bf16[16, 8], y: out[bf16[32, 8]]):
    full = empty(bf16[32, 16])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.out", full, w, out=y)
"""
SCATTER = """
def f(tp: Team[4], x: bf16[32, 16], w: bf16[16, 8], y: out[bf16[8, 8]]):
    t = empty(bf16[32, 8])
    main: call("aten.mm.out", x, w, out=t)
    main: reduce_scatter(t, y, reduce="sum", team=tp)
"""
REDUCE = """
def f(tp: Team[4], x: bf16[64, 16], w: bf16[16, 8], y: out[bf16[64, 8]]):
    t = empty(bf16[64, 8])
    main: call("aten.mm.out", x, w, out=t)
    main: all_reduce(t, y, reduce="sum", team=tp)
"""
OPEN = """
def f(tp: Team[4], x: bf16[8, 16], y: out[bf16[8, 16]]):
    slot = alloc(bf16[8, 16], symmetric=tp, stream="comm")
    comm: record(taken)
    comm: put(x, slot, peer=tp.rank + 1)
    comm: record(read)
    comm: notify(came, to=tp.rank + 1)
    main: wait(taken)
    main: expect(came, tp.rank - 1)
    main: copy(slot, y)
    main: wait(read)
    main: free(slot)
"""
"""Each rank hears of one other only, so a run says little of the last."""

WORLD = 4
EXPERTS, ROOM, DIM, HIDDEN = 2, 3, 16, 8
SITES = {
    "gather": GATHER,
    "scatter": SCATTER,
    "reduce": REDUCE,
    "experts": layer(WORLD, EXPERTS, ROOM, DIM, HIDDEN, "bf16"),
}
SHAPES: dict[str, tuple[list[tuple[int, ...]], list[tuple[int, ...]]]] = {
    "gather": ([(8, 16), (16, 8)], [(32, 8)]),
    "scatter": ([(32, 16), (16, 8)], [(8, 8)]),
    "reduce": ([(64, 16), (16, 8)], [(64, 8)]),
    "experts": ([(WORLD * EXPERTS, ROOM, DIM), (EXPERTS, DIM, HIDDEN), (EXPERTS, HIDDEN, DIM)], []),
}
"""Of inputs and outputs."""
STRATEGIES: dict[str, dict[str, Any]] = {
    "put": {"strategy": "peer"},
    "get": {"strategy": "peer"},
    "fused": {"strategy": "fused"},
    "ranges": {"strategy": "fused"},
    "beside": {"strategy": "fused"},
    "slabs": {"strategy": "fused"},
}
"""`beside`: own rows are made in ranges too, and summed while others are made; gathered rows come
in quarters; `slabs`: of `reduce` all rows, which then travel back as well."""
HOW: dict[str, dict[str, Any]] = {
    **{name: {"protocol": name} for name in ("put", "get")},
    **{"ranges": {"chunks": 8}, "beside": {"chunks": 16}, "slabs": {"chunks": 16}},
}
"""What `lower` is told beside the options."""
SERVED = [
    (site, strategy)
    for site in ("gather", "scatter", "reduce")
    for strategy in STRATEGIES
    if site == "reduce" or strategy != "slabs"
]
SIMULATED = [*SERVED, ("experts", "get"), ("experts", "put")]
"""With a layer of experts, of which each rank has some."""


def program(site: str, strategy: str) -> Program:
    return lowered(SITES[site], strategy)


def lowered(text: str, strategy: str) -> Program:
    found: dict[str, Any] = {"BESIDE_BYTES": 1 if strategy == "beside" else 1 << 40, "TILE_ROWS": 1}
    if strategy == "slabs":
        found |= {"SLAB_FLOPS": 1, "SLAB_BYTES": 1, "SMALL_BYTES": 0}
    with (
        mock.patch.multiple(pieces, **found),
        mock.patch.object(take_turns, "TURN_BYTES", 1),
        mock.patch.object(kernels, "TILE_ROWS", 1),
    ):
        return lower(parse(text), Options(**STRATEGIES[strategy]), **HOW.get(strategy, {}))


def tensors(site: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    given, made = SHAPES[site]
    inputs = [torch.randn(shape).bfloat16() for shape in given]
    return inputs, [torch.empty(shape, dtype=torch.bfloat16) for shape in made]


@contextlib.contextmanager
def bound(site: str, strategy: str, rank: int = 1, **options: Any) -> Iterator[Fake]:
    with fake_engine(program(site, strategy), rank, Options(**options)) as fake:
        yield fake


def logs_of(fake: Fake, site: str, runs: int) -> list[list[Entry]]:
    return runs_of(fake, *tensors(site), runs)


def runs_of(fake: Fake, inputs: Any, out: Any, runs: int) -> list[list[Entry]]:
    """What is issued in each of some runs."""
    found: list[list[Entry]] = []
    for _ in range(runs):
        fake.run(inputs, out)
        found.append(list(fake.log))
    return found


def writes_what_peers_use(fake: Fake, entry: Entry, gotten: bool) -> bool:
    """Whether it writes a peer's slot, or its own if peers read it."""
    written = entry[2:3] if entry[0] == "copy" else entry[4] if entry[0] == "call" else ()
    places = [place for place in map(fake.place, written) if place is not None]
    return any(gotten or member != fake.side.me for member, _ in places)
