"""Strategies on two and four hosts, with one and two ranks each, beside plain torch.distributed."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.runtime.programs import Outcome, attempt, world_group
from tests.runtime.test_faults import TIMEOUT_S
from tests.support.hosts import Hosts, HostsPool, made_or_skipped

from interlace.ir import Program, parse
from interlace.options import Options
from interlace.passes.pipeline import lower
from interlace.runtime import Executor
from interlace.strategies import StrategyName

pytestmark = [pytest.mark.timeout(110), pytest.mark.xdist_group("hierarchy")]
CUDA_TIMEOUT_S = 10.0
SERVE = ("serial", "pipeline", "ring")
K, N = 16, 24


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    yield from made_or_skipped(4)


@pytest.fixture(scope="module")
def pairs(hosts: Hosts) -> Iterator[HostsPool]:
    """Two ranks a host: of four, ranks 0 and 1 are on the first, 2 and 3 on the second."""
    shared = HostsPool(hosts, in_a_row=2)
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def singles(hosts: Hosts) -> Iterator[HostsPool]:
    """One rank a host."""
    shared = HostsPool(hosts)
    yield shared
    shared.close()


TEXTS = {
    "gather": """
    full = empty(f32[{rows}, 16])
    main: all_gather(x, full, team=tp{splits})
    main: call("aten.mm.default", full, w, out=(y := f32[{rows}, 24]))
    return y, full
""",
    "scatter": """
    main: call("aten.mm.default", x, w, out=(y := f32[{rows}, 24]))
    out = empty(f32[{mine}, 24])
    main: reduce_scatter(y, out, reduce="sum", team=tp{splits})
    return out
""",
    "reduce": """
    main: call("aten.mm.default", x, w, out=(y := f32[{rows}, 24]))
    out = empty(f32[{rows}, 24])
    main: all_reduce(y, out, reduce="sum", team=tp)
    return out
""",
    "dispatch": """
    full = empty(f32[{rows}, 16])
    main: all_to_all(x, full, team=tp)
    main: call("aten.mm.default", full, w, out=(y := f32[{rows}, 24]))
    return y, full
""",
    "combine": """
    main: call("aten.mm.default", x, w, out=(y := f32[{rows}, 24]))
    out = empty(f32[{rows}, 24])
    main: all_to_all(y, out, team=tp)
    return out
""",
}


def text_of(kind: str, sizes: list[int], hosts: list[list[int]]) -> Program:
    """A site of these rows of each rank."""
    even, rows = len(set(sizes)) == 1, sum(sizes)
    mine = str(sizes[0]) if even else "rows[tp.rank]"
    table = "" if even else f"    rows = table(tp, {', '.join(map(str, sizes))})"
    team = f"tp: Team[{len(sizes)}].on({', '.join(map(str, hosts))})"
    head = f"def {kind}({team}, x: f32[{mine if kind == 'gather' else rows}, 16], w: f32[16, 24]):"
    splits = "" if even else ", splits=rows"
    return parse(f"{head}\n{table}{TEXTS[kind].format(rows=rows, mine=mine, splits=splits)}")


def plain(kind: str, x: torch.Tensor, w: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """What torch.distributed makes of it."""
    me, y = dist.get_rank(), x @ w
    if kind == "gather":
        parts = [torch.empty(size, K) for size in sizes]
        dist.all_gather(parts, x) if len(set(sizes)) == 1 else _gather_uneven(parts, x)
        full = torch.cat(parts)
        return [full @ w, full]
    if kind in ("scatter", "reduce"):
        dist.all_reduce(y)
        return [y.split(sizes)[me] if kind == "scatter" else y]
    moved = torch.empty_like(x if kind == "dispatch" else y)
    dist.all_to_all_single(moved, x if kind == "dispatch" else y)
    return [moved @ w, moved] if kind == "dispatch" else [moved]


def _gather_uneven(parts: list[torch.Tensor], x: torch.Tensor) -> None:
    for root, part in enumerate(parts):
        if root == dist.get_rank():
            part.copy_(x)
        dist.broadcast(part, root)


def exact(
    strategies: tuple[StrategyName, ...],
    kinds: tuple[str, ...],
    seed: int,
    device: str = "cpu",
    **more: Any,
) -> list[str]:
    """Which strategies differ from plain collectives, or could not serve; `more` are options."""
    wrong, (world, me) = list[str](), (dist.get_world_size(), dist.get_rank())
    found: list[Any] = [None] * world
    dist.all_gather_object(found, socket.gethostname())
    hosts = [[r for r in range(world) if found[r] == name] for name in dict.fromkeys(found)]
    common, own = (torch.Generator().manual_seed(seed + n) for n in (0, me + 1))
    for kind in kinds:
        uneven = [int(n) for n in torch.randint(1, 9, (world,), generator=common)]
        for sizes in [[4] * world, *([uneven] if kind in ("gather", "scatter", "reduce") else [])]:
            rows = sizes[me] if kind == "gather" else sum(sizes)
            x, w = (torch.randint(-3, 4, s, generator=own).float() for s in ((rows, K), (K, N)))
            expected, program = plain(kind, x, w, sizes), text_of(kind, sizes, hosts)
            for strategy in strategies:
                options = Options(strategy=strategy, timeout_s=30, **more)
                made, groups = lower(program, options), {"tp": world_group()}
                with Executor(made, groups=groups, device=device, options=options) as executor:
                    executor.prepare()
                    equal, given = True, [x.to(device), w.to(device)]
                    for _ in range(3):
                        results = [y.cpu() for y in executor.run(given)]
                        equal &= all(map(torch.equal, results, expected))
                served = made.sites[0].strategy
                cut = kind == "reduce" or (kind in ("gather", "scatter") and len({*sizes}) == 1)
                alone = strategy == "pipeline" and not cut
                if not equal or served != ("serial" if alone else strategy):
                    wrong.append(f"{kind} {sizes}: {strategy} as {served}, equal: {equal}")
    return wrong


ALL = tuple(TEXTS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize(("row", "world"), [(2, 4), (1, 4), (2, 8)], ids=["2x2", "4x1", "4x2"])
def test_all_strategies_on_hosts(
    pairs: HostsPool, singles: HostsPool, row: int, world: int, kind: str, seed: int
) -> None:
    pool = pairs if row == 2 else singles
    assert pool(world).run(exact, SERVE, (kind,), seed) == [[]] * world


def run_on(
    mark: str,
    seed: int,
    victim: int | None = None,
    strategy: StrategyName = "ring",
    device: str = "cpu",
) -> Outcome:
    """The outcome of the first run that fails; the file `mark` says that runs go on. The victim
    is killed in one."""
    program = lower(text_of("gather", [64] * 4, [[0, 1], [2, 3]]), Options(strategy=strategy))
    transport: Any = "nccl" if device == "cuda" else "auto"
    # NCCL connects within the limit, which takes seconds where many tests share the GPU.
    options = Options(
        timeout_s=CUDA_TIMEOUT_S if device == "cuda" else TIMEOUT_S, transport=transport
    )
    groups = {"tp": world_group()}
    executor = Executor(program, groups=groups, device=device, options=options).prepare()
    own = torch.Generator().manual_seed(seed + dist.get_rank())
    inputs = [torch.randn(size, generator=own).to(device) for size in ((64, K), (K, N))]

    def run() -> None:
        executor.run(inputs)
        executor.synchronize()

    run()
    dist.barrier()
    if dist.get_rank() == 0:
        Path(mark).touch()
    if dist.get_rank() == victim:
        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
    while (outcome := attempt(run))[0] == "result":
        pass
    return outcome


def once_running(mark: Path, act: Callable[[], None]) -> None:
    def wait_and_act() -> None:
        while not mark.exists():
            time.sleep(0.02)
        time.sleep(0.3)
        act()

    threading.Thread(target=wait_and_act, daemon=True).start()


MESH = """def both(dp: Team[[0, 2], [1, 3]], tp: Team[[0, 1], [2, 3]], x: f32[4]):
    y = empty(f32[4])
    z = empty(f32[4])
    main: all_reduce(x, y, reduce="sum", team=dp)
    main: all_reduce(y, z, reduce="sum", team=tp)
    return z
"""


def on_a_mesh(how: str) -> Outcome:
    """Runs whose two axes span hosts; rank 3 does not come to the second, or stalls in it."""
    me, stalls = dist.get_rank(), threading.Event()
    made: dict[str, list[Any]] = {
        name: [dist.new_group(ranks) for ranks in of] for name, of in MESH_GROUPS.items()
    }
    groups = {name: made[name][place[me]] for name, place in MESH_PLACES.items()}

    def before(rank: int, index: int, op: object) -> None:
        if rank == 3 and how == "in an op" and stalls.is_set():
            time.sleep(TIMEOUT_S + 4)

    options = Options(timeout_s=TIMEOUT_S)
    executor = Executor(parse(MESH), groups=groups, options=options, before_op=before).prepare()
    x = torch.ones(4)
    executor.run([x])
    dist.barrier()
    stalls.set()
    if me == 3 and how == "between runs":
        time.sleep(TIMEOUT_S + 4)
        return "", "", 0.0
    return attempt(lambda: executor.run([x]))


MESH_GROUPS = {"dp": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]}
MESH_PLACES = {"dp": [0, 1, 0, 1], "tp": [0, 0, 1, 1]}


@pytest.mark.parametrize("how", ["between runs", pytest.param("in an op", marks=pytest.mark.slow)])
def test_the_rank_that_is_behind_a_wait_on_another_team_is_named(
    singles: HostsPool, how: str
) -> None:
    results = singles(4).run(on_a_mesh, how, replace=True)
    for error, text, seconds in results[:3]:
        assert error in ("CommTimeoutError", "PeerError"), text
        assert "rank 3 on host interlace-d" in text, text
        assert seconds < TIMEOUT_S + 5


VANISH = "cut off", "killed", "gone"
"""How a host vanishes: its link goes down, all its processes end, or both."""


def vanish(
    hosts: Hosts, pairs: HostsPool, how: str, mark: Path, seed: int
) -> tuple[list[str], float]:
    """Who does not get the typed error that names the host, within the time-out and 5 s, when the
    second of two hosts vanishes; and how long the last took."""

    def act() -> None:
        if how != "killed":
            hosts.cut_off(1)
        if how != "cut off":
            hosts.kill(1)

    once_running(mark, act)
    try:
        dead = {2, 3} if how != "cut off" else set[int]()
        found = pairs(4).run(run_on, str(mark), seed, may_die=dead, replace=True)
    finally:
        hosts.join(1)
    wrong, slowest = list[str](), 0.0
    for rank, (error, text, seconds) in ((r, o) for r, o in enumerate(found) if r not in dead):
        away = "interlace-a" if rank > 1 else "interlace-b"
        named = re.search(rf"ranks? .* on host {away}", text)
        slowest = max(slowest, seconds)
        if error not in ("CommTimeoutError", "PeerError") or not named or seconds > TIMEOUT_S + 5:
            wrong.append(f"rank {rank}, after {seconds:.1f} s: {error}: {text}")
    return wrong, slowest


@pytest.mark.slow
@pytest.mark.parametrize("how", VANISH)
def test_a_host_that_vanishes_in_a_run_is_named(
    hosts: Hosts, pairs: HostsPool, how: str, tmp_path: Path, seed: int
) -> None:
    assert vanish(hosts, pairs, how, tmp_path / "running", seed)[0] == []


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pipeline", "ring"])
def test_where_the_host_of_the_store_vanishes_no_rank_blames_its_own_host(
    hosts: Hosts, pairs: HostsPool, strategy: str, tmp_path: Path, seed: int
) -> None:
    """Ranks of the other host cannot hear even each other then."""
    mark = tmp_path / "running"
    once_running(mark, lambda: hosts.cut_off(0))
    try:
        found = pairs(4).run(run_on, str(mark), seed, None, strategy, replace=True)
    finally:
        hosts.join(0)
    for error, text, seconds in found[2:]:
        assert error in ("CommTimeoutError", "PeerError"), text
        assert "on host interlace-a" in text, text
        assert "on host interlace-b does not answer" not in text, text
        assert seconds < TIMEOUT_S + 5
