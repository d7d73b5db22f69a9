"""Teams that span hosts: namespaces with a host name, a /dev/shm, processes and a network apart."""

from __future__ import annotations

import random
import re
import signal
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from tests.nn.test_parallel_linear import KINDS, differentiated, drawn, ours, plain
from tests.runtime.programs import Outcome, attempt, inputs_of, prepared, world_group
from tests.runtime.test_faults import TIMEOUT_S, suffer
from tests.support.captured import capture
from tests.support.hosts import Hosts, HostsPool, made_or_skipped
from tests.support.pool import Died
from torch.distributed.device_mesh import DeviceMesh

from interlace.ir import parse
from interlace.nn.parallel.programs import kept
from interlace.options import Options
from interlace.runtime import Executor

SERVE = ("serial", "pipeline", "ring")
REACH = ("peer", "fused", "exchange")
APART = {
    2: "team tp spans hosts (rank 0 on interlace-a, rank 1 on interlace-b)",
    3: "team tp spans hosts (ranks 0 and 2 on interlace-a, rank 1 on interlace-b)",
    4: "team tp spans hosts (ranks 0 and 2 on interlace-a, ranks 1 and 3 on interlace-b)",
}
pytestmark = [pytest.mark.timeout(110), pytest.mark.xdist_group("hosts")]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    yield from made_or_skipped()


@pytest.fixture(scope="module")
def pool(hosts: Hosts) -> Iterator[HostsPool]:
    """Rank r is on host r % 2."""
    shared = HostsPool(hosts)
    yield shared
    shared.close()


def compared(strategies: tuple[str, ...], seed: int) -> tuple[list[str], set[str], set[str]]:
    """Layers on integers beside plain collectives, forward and backward: which differ, what their
    sites got, and the remarks."""
    wrong, before = list[str](), kept(world_group())
    for strategy in strategies:
        for kind in KINDS[:3]:
            given = drawn(kind, 3, True, torch.float32, seed, integers=True)
            options = {"strategy": strategy, "timeout_s": 30}
            found = differentiated(lambda *a, k=kind, o=options: ours(k, *a, options=o), *given)
            expected = differentiated(lambda *a, k=kind: plain(k, *a), *given)
            if not all(map(torch.equal, found, expected)):
                wrong.append(f"{strategy} {kind}")
    bound = [each for each in kept(world_group()) if each not in before]
    sites = {site.strategy for each in bound for site in each.program.sites}
    remarks = {remark.text for each in bound for remark in each.program.remarks}
    return wrong, sites, remarks


@pytest.mark.parametrize(
    ("world", "drawn"),
    [(2, 1), *(pytest.param(n, len(SERVE), marks=pytest.mark.slow) for n in (2, 4))],
)
def test_strategies_like_plain_collectives(
    pool: HostsPool, world: int, drawn: int, seed: int
) -> None:
    strategies = tuple(random.Random(seed).sample(SERVE, drawn))
    for wrong, sites, _ in pool(world).run(compared, strategies, seed):
        assert not wrong
        assert {*strategies} <= sites <= {*strategies, "serial"}


def test_strategies_that_reach_into_memory_of_peers_run_serially(
    pool: HostsPool, seed: int
) -> None:
    for wrong, sites, remarks in pool(4).run(compared, REACH, seed):
        assert not wrong
        assert sites == {"serial"}
        assert any(APART[4] in text for text in remarks)
        for strategy in REACH:
            why = f"{strategy} cannot serve this site: team tp spans hosts, which share no memory"
            assert any(why in text for text in remarks)


def step(across: str, seed: int) -> tuple[bool, str]:
    """Forward and backward, with weights sharded on dp and rows on tp, of which one is `across`
    hosts: equal to the same in eager mode, on integers? And what is explained."""
    torch.compiler.reset()
    table = [[0, 2], [1, 3]] if across == "dp" else [[0, 1], [2, 3]]
    mesh = DeviceMesh("cpu", table, mesh_dim_names=("dp", "tp"))
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        full = funcol.all_gather_tensor_autograd(w, 0, dp)
        h = F.linear(funcol.all_gather_tensor_autograd(x, 0, tp), full)
        return funcol.reduce_scatter_tensor_autograd(h @ full, "sum", 0, tp)

    own, sizes = torch.Generator().manual_seed(seed + dist.get_rank()), ((8, 16), (4, 16))
    x, w = (torch.randint(-2, 3, size, generator=own).float() for size in sizes)

    def results(function: Any) -> list[torch.Tensor]:
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        y = function(*leaves)
        return [y.detach(), *torch.autograd.grad(y.sum(), leaves)]

    options: Any = {"timeout_s": 20.0}
    with capture() as captured:
        call = torch.compile(fn, backend="interlace", options=options)
        found = results(call)
    return all(map(torch.equal, found, results(fn))), captured.explain()


@pytest.mark.parametrize("across", ["dp", pytest.param("tp", marks=pytest.mark.slow)])
def test_a_step_on_a_mesh_of_which_one_axis_spans_hosts(
    pool: HostsPool, across: str, seed: int
) -> None:
    for equal, told in pool(4).run(step, across, seed):
        assert equal
        assert f"team {across} spans hosts" in told
        assert ("peer/get" in told) == (across == "dp"), "tp shares memory where it is on one host"


def refused() -> Outcome:
    return attempt(lambda: prepared("put", timeout_s=10.0))


def test_shared_memory_is_refused(pool: HostsPool) -> None:
    for error, text, _ in pool(2).run(refused):
        assert error == "BackendError"
        why = f"{APART[2]}, which share no memory, and gather_matmul_put has symmetric buffers"
        assert why in text


def astray(how: str, seed: int) -> list[Outcome]:
    """Rank 1 calls another Program than the others, or prepares one alone; then all reset."""
    one, two = (prepared(kind, timeout_s=10.0) for kind in ("shift", "pipeline"))
    me = dist.get_rank()

    def run(executor: Any) -> Outcome:
        return attempt(lambda: executor.run(inputs_of(executor.program, me, seed)))

    if how == "alone" and me == 1:
        found = [attempt(lambda: prepared("pipeline", timeout_s=10.0))]
    else:
        found = [run(two if me == 1 else one)]
    one.reset()
    found += [run(one), run(two)]
    return found


@pytest.mark.parametrize("how", ["order", "alone"])
def test_a_rank_that_goes_astray_is_told_at_once(pool: HostsPool, how: str, seed: int) -> None:
    results = pool(3).run(astray, how, seed)
    assert any(first[0] == "AgreementError" for first, *_ in results), results
    for first, *after in results:
        assert [outcome[0] for outcome in after] == ["result", "result"]
        error, text, seconds = first
        assert seconds < 5
        if how == "order":
            assert error == "AgreementError", text
            assert "rank 1 on host interlace-b called 'matmul_scatter_pipeline'" in text
        else:  # it finds so itself, or hears first that others did, or that they reset
            assert error in ("AgreementError", "PeerError")
            told = "rank 1 on host interlace-b recompiled alone|rank [012] called reset"
            assert re.search(told, text), text


def stages_that_list_their_teams_in_another_order() -> Outcome:
    groups, me = [dist.new_group([0, 1]) for _ in range(2)], dist.get_rank()
    teams = ["a: Team[[0, 1]]", "b: Team[[0, 1]]"]
    ops = [
        ("send(x, peer=1, team=a)", "recv(y, peer=1, team=b)"),
        ("recv(y, peer=0, team=a)", "send(x, peer=0, team=b)"),
    ]
    first, second = ops[me]
    stage = parse(f"""def stage{me}({", ".join(teams[:: 1 - 2 * me])}, x: f32[4, 4]):
    ranks({me})
    y = empty(f32[4, 4])
    main: {first}
    main: {second}
    return y
""")
    given: Any = dict(zip("ab", groups, strict=True))
    executor = Executor(stage, groups=given, options=Options(timeout_s=10))

    def runs() -> list[float]:
        executor.prepare()
        x = torch.full((4, 4), me + 1.0)
        return [executor.run([x])[0].sum().item() for _ in range(3)]

    return attempt(runs)


def test_stages_may_list_their_teams_in_another_order(pool: HostsPool) -> None:
    first, second = pool(2).run(stages_that_list_their_teams_in_another_order)
    assert first[:2] == ("result", str([32.0] * 3))
    assert second[:2] == ("result", str([16.0] * 3))


def pipelined(runs: int) -> list[float]:
    """Stages of a pipeline; the last holds its first run until the first stage has begun a third,
    which is possible where runs overlap."""
    me, world = dist.get_rank(), dist.get_world_size()
    store, begun = dist.distributed_c10d._get_default_store(), 0
    receives = f"main: recv(h, peer={me - 1}, team=pp)" if me else "main: copy(x, h)"
    sends = f"main: send(h, peer={me + 1}, team=pp)" if me < world - 1 else ""
    members = ", ".join(map(str, range(world)))
    stage = parse(f"""def stage{me}(pp: Team[[{members}]], x: f32[4]):
    ranks({me})
    h = empty(f32[4])
    {receives}
    {sends}
    return h
""")

    def before(rank: int, index: int, op: object) -> None:
        nonlocal begun
        if index == 0:
            begun += 1
            if me == 0:
                store.set(f"pipelined/{begun}", "begun")
            if me == world - 1 and begun == 1:
                store.wait(["pipelined/3"], timedelta(seconds=10))

    groups, options = {"pp": world_group()}, Options(timeout_s=15)
    executor = Executor(stage, groups=groups, options=options, before_op=before).prepare()
    return [executor.run([torch.full((4,), float(n))])[0][0].item() for n in range(runs)]


def test_stages_on_hosts_are_in_different_runs(pool: HostsPool) -> None:
    assert pool(4).run(pipelined, 5) == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 4


SUFFERED = [
    ("shift", "raises"),
    ("pipeline", "dies"),
    pytest.param("shift", "stalls", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "fault"), SUFFERED)
def test_a_rank_that_fails_is_named_with_its_host(
    pool: HostsPool, kind: str, fault: str, seed: int
) -> None:
    dies = fault == "dies"
    results = pool(3).run(suffer, kind, fault, 1, seed, may_die={1} if dies else set())
    for rank, outcomes in enumerate(results):
        if rank == 1 and dies:
            assert outcomes == Died(-signal.SIGKILL)
            continue
        error, text, seconds = outcomes[0]
        own = rank == 1
        if fault == "raises":
            assert error == ("ExecutorError" if own else "PeerError")
            assert "the planted fault" in text
            assert own or "rank 1 on host interlace-b of team tp stopped" in text
            assert outcomes[1][0] == "ExecutorError"
        elif dies:
            assert error == "PeerError"
            assert "rank 1 on host interlace-b of team tp died" in text
        else:
            assert error in ("CommTimeoutError", "PeerError")
            assert own or "rank 1 on host interlace-b is in run " in text, text
        assert seconds < TIMEOUT_S + (5 if fault == "stalls" else 0)
        assert dies or outcomes[2][1] == "equal"
