"""Registered parameters on real processes: peers read and write the caller's own tensors."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.runtime.programs import executor_of
from tests.support.interpreter import LifetimeFault, run_ranks
from tests.support.pool import Pool
from tests.support.registered import REGISTERED, ROWS, TEXTS, K, N, drawn
from torch.distributed.device_mesh import init_device_mesh

from interlace.errors import ExecutorError, InterlaceError
from interlace.ir import parse
from interlace.optim.layer_wise.arriving import arriving
from interlace.options import Options
from interlace.runtime import Executor
from interlace.runtime.prepare.registered import collect

pytestmark = pytest.mark.timeout(120)


def registering(kind: str, tensor: torch.Tensor | None, **options: Any) -> Executor:
    """An Executor of one of the Programs, with its one tensor registered."""
    program = parse(TEXTS[kind](dist.get_world_size()))
    given = {} if tensor is None else {REGISTERED[kind]: tensor}
    return executor_of(program, registered=given, **options)


def run_gather_matmul(seed: int, runs: int, options: dict[str, Any]) -> list[str]:
    """The shard is written anew before each run, at once after the one before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.empty(ROWS, K)
    wrong: list[str] = []
    with registering("gather_matmul", x, **options).prepare() as executor:
        for run in range(runs):
            x.copy_(drawn(rank, seed + run, ROWS, K))
            w = drawn(0, seed - run, K, N)
            (y,) = executor.run([x, w])
            whole = torch.cat([drawn(other, seed + run, ROWS, K) for other in range(world)])
            if not torch.equal(y, whole @ w):
                wrong.append(f"run {run}: y differs")
            x.fill_(torch.nan)  # peers are done with it
    return wrong


def run_gather_put(seed: int, runs: int, options: dict[str, Any]) -> list[str]:
    """What peers write is in the caller's own output, which is what comes back."""
    rank, world = dist.get_rank(), dist.get_world_size()
    y = torch.empty(world * ROWS, K)
    wrong: list[str] = []
    with registering("gather_put", y, **options).prepare() as executor:
        for run in range(runs):
            y.fill_(torch.nan)
            (found,) = executor.run([drawn(rank, seed + run, ROWS, K)], [y] if run % 2 else None)
            whole = torch.cat([drawn(other, seed + run, ROWS, K) for other in range(world)])
            if found is not y or not torch.equal(y, whole):
                wrong.append(f"run {run}: y differs")
    return wrong


def run_update(seed: int, runs: int, options: dict[str, Any]) -> list[str]:
    """A flat buffer of parameters, which lies in the midst of a larger tensor."""
    rank, world = dist.get_rank(), dist.get_world_size()
    arena = torch.full((3, world * ROWS, K), 7.0)
    flat = arena[1]
    flat.copy_(drawn(99, seed, world * ROWS, K))
    wanted = flat.clone()
    wrong: list[str] = []
    with registering("update", flat, **options).prepare() as executor:
        for run in range(runs):
            (found,) = executor.run([flat, drawn(rank, seed + run, ROWS, K)])
            wanted += torch.cat([drawn(other, seed + run, ROWS, K) for other in range(world)])
            if found is not flat or not torch.equal(flat, wanted):
                wrong.append(f"run {run}: flat differs")
    if not (arena[0] == 7).all() or not (arena[2] == 7).all():
        wrong.append("what lies around the parameter was written")
    return wrong


RUNS = {"gather_matmul": run_gather_matmul, "gather_put": run_gather_put, "update": run_update}


def run_both(kind: str, seed: int) -> list[str]:
    """On streams, and in order."""
    return [wrong for alone in (False, True) for wrong in RUNS[kind](seed, 4, {"in_order": alone})]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", RUNS)
def test_is_right_bit_by_bit(pool: Pool, kind: str, world: int, seed: int) -> None:
    for wrong in pool(world).run(run_both, kind, seed):
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("world", [2, 3])
def test_is_right_in_any_order_of_the_ranks(world: int, seed: int) -> None:
    """The reference interpreter, which also refuses what is done out of the owner's run."""
    for number in range(20):
        shards = [drawn(rank, seed, ROWS, K) for rank in range(world)]
        whole, w = torch.cat(shards), drawn(0, seed + 1, K, N)
        flats = [torch.ones(world * ROWS, K) for _ in range(world)]
        inputs = {
            "gather_matmul": [[shard, w] for shard in shards],
            "gather_put": [[shard] for shard in shards],
            "update": [[flat, shard] for flat, shard in zip(flats, shards, strict=True)],
        }
        wanted = {"gather_matmul": whole @ w, "gather_put": whole, "update": 1 + 2 * whole}
        for kind, given in inputs.items():
            program = parse(TEXTS[kind](world))
            for (found,) in run_ranks(program, given, seed=seed + number, runs=2):
                assert torch.equal(found, wanted[kind]), kind


def test_the_interpreter_refuses_a_get_out_of_the_peers_run(seed: int) -> None:
    lines = TEXTS["gather_matmul"](2).splitlines()
    program = parse("\n".join(line for line in lines if "done" not in line))
    inputs = [[torch.zeros(ROWS, K), torch.zeros(K, N)] for _ in range(2)]

    def run_in_many_orders() -> None:
        for number in range(200):
            run_ranks(program, inputs, seed=seed + number, runs=2)

    with pytest.raises(LifetimeFault, match="reaches x out of a run there"):
        run_in_many_orders()


def run_strided(seed: int) -> list[str]:
    """A registered parameter that is a transpose, read by peers."""
    world, rank = dist.get_world_size(), dist.get_rank()
    program = parse(
        TEXTS["gather_matmul"](world).replace(
            f"x: f32[{ROWS}, {K}]", f"x: f32[{ROWS}, {K}].strides(1, {ROWS})"
        )
    )
    x, w = drawn(rank, seed, K, ROWS).t(), drawn(0, seed + 1, K, N)
    with executor_of(program, registered={"x": x}).prepare() as executor:
        (y,) = executor.run([x, w])
    whole = torch.cat([drawn(other, seed, K, ROWS).t() for other in range(world)])
    return [] if torch.equal(y, whole @ w) else ["y differs"]


def test_strides_are_kept(pool: Pool, seed: int) -> None:
    assert pool(2).run(run_strided, seed) == [[], []]


def refused(case: str) -> str:
    """What rank 0 does wrong, and what this rank hears of it."""
    first = dist.get_rank() == 0
    size = (dist.get_world_size() * ROWS, K)
    tensor: torch.Tensor | None = torch.empty(size)
    if first and case == "none":
        tensor = None
    if first and case == "shape":
        tensor = torch.empty(3, K)
    if first and case == "dtype":
        tensor = torch.empty(size, dtype=torch.float64)
    executor = registering("gather_put", tensor, timeout_s=20)
    if first and case == "name":
        own = {"y": torch.empty(size), "z": torch.empty(3)}
        executor = executor_of(TEXTS["gather_put"](dist.get_world_size()), registered=own)
    with pytest.raises(InterlaceError) as caught:
        executor.prepare()
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("none", "was given no tensor for it: make it with registered={'y': tensor}"),
        ("shape", "registered parameter 0 ('y') of gather_put has shape [3, 8], not [8, 8]"),
        ("dtype", "has dtype torch.float64, not torch.float32: convert it"),
        ("name", "gather_put has no registered parameter 'z': it has ['y']"),
    ],
)
def test_every_rank_hears_what_cannot_be_registered(pool: Pool, case: str, told: str) -> None:
    mine, other = pool(2).run(refused, case)
    assert mine.startswith("ExecutorError")
    assert told in mine
    assert other.startswith("PeerError: rank 0:")
    assert told in other


@pytest.mark.parametrize("kind", ["dtensor", "inference", "number"])
def test_what_has_no_memory_of_its_own_is_refused(kind: str) -> None:
    program = parse(TEXTS["gather_put"](2))
    size = 2 * ROWS, K
    given: Any = 3
    if kind == "inference":
        with torch.inference_mode():
            given = torch.empty(size)
    elif kind == "dtensor":
        given = torch.empty(size).as_subclass(type("DTensor", (torch.Tensor,), {}))
    problem = collect(program, 0, {"y": given}, torch.device("cpu")).problem
    told = {"dtensor": r"\.to_local\(\)", "inference": "inference mode", "number": "is a int"}
    with pytest.raises(ExecutorError, match=told[kind]):
        raise problem or AssertionError


def test_a_parameter_that_is_still_arriving_is_waited_for_and_registered() -> None:
    given: Any = torch.nn.Parameter(torch.empty(2 * ROWS, K))
    waited: list[bool] = []

    def wait() -> None:
        given.__class__ = torch.nn.Parameter
        waited.append(True)

    given.__class__ = arriving(torch.nn.Parameter, wait)
    found = collect(parse(TEXTS["gather_put"](2)), 0, {"y": given}, torch.device("cpu"))
    assert (found.problem, waited, found.wanted["tp"]["y"][0] is given) == (None, [True], True)


def moved() -> list[str]:
    """The registered tensor itself is given other memory: peers would reach the old."""
    y = torch.empty(2 * ROWS, K)
    told: list[str] = []
    with registering("gather_put", y, timeout_s=20) as executor:
        executor.prepare().run([torch.ones(ROWS, K)])
        dist.barrier()
        if dist.get_rank() == 0:
            y.data = torch.empty(2 * ROWS, K)
        with pytest.raises(InterlaceError) as caught:
            executor.run([torch.ones(ROWS, K)])
        told.append(str(caught.value))
        executor.reset()
    return told


def test_a_registered_tensor_stays_where_it_is(pool: Pool) -> None:
    mine, other = pool(2).run(moved)
    assert "'y') of gather_put is registered" in mine[0]
    assert "rank 0" in other[0]


def far() -> str:
    """Four ranks in two teams each; rank 0 gives what it cannot."""
    text = (
        "def f(a: Team[[0, 1], [2, 3]], b: Team[[0, 2], [1, 3]], x: f32[4].registered(a), "
        "y: f32[4].registered(b), z: out[f32[4]]):\n"
        "    main: copy(x, z)"
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("b", "a"))
    groups = {name: mesh.get_group(name) for name in "ab"}
    given = {"x": torch.empty(4 if dist.get_rank() else 5), "y": torch.empty(4)}
    options = Options(timeout_s=20)
    with pytest.raises(InterlaceError) as caught:
        Executor(parse(text), groups=groups, registered=given, options=options).prepare()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_ranks_of_other_teams_hear_it_too(pool: Pool) -> None:
    mine, *others = pool(4).run(far)
    assert mine.startswith("ExecutorError: registered parameter 0 ('x') of f has shape [5]")
    for other in others:
        assert other.startswith("PeerError: rank 0: registered parameter 0 ('x') of f has shape")


def apart() -> str:
    """Rank 0's Program puts into y of rank 1, whose own only waits; there x and y overlap."""
    head = "def {}(tp: Team[2], x: f32[4].registered(tp), y: out[f32[4].registered(tp)]):\n"
    bodies = [
        "    main: expect(open, 1)\n    main: put(x, y, peer=1)\n    main: notify(came, to=1)",
        "    main: notify(open, to=0)\n    main: expect(came, 0)",
    ]
    rank = dist.get_rank()
    program = parse(head.format("fg"[rank]) + bodies[rank]).instantiate(rank)
    memory = torch.empty(6)
    given = {"x": memory[:4], "y": memory[2:] if rank else torch.empty(4)}
    with pytest.raises(InterlaceError) as caught:
        executor_of(program, registered=given).prepare()
    return str(caught.value)


def test_what_a_peer_writes_overlaps_nothing(pool: Pool) -> None:
    first, second = pool(2).run(apart)
    assert "rank 1: the registered parameters 'x' and 'y' of g overlap" in first
    assert "the registered parameters 'x' and 'y' of g overlap" in second


def give_another(seed: int) -> list[str]:
    """Rank 0 gives another tensor in the second run; all hear it, and after a reset all goes on."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, w = drawn(rank, seed, ROWS, K), drawn(0, seed, K, N)
    told: list[str] = []
    with registering("gather_matmul", x, timeout_s=20).prepare() as executor:
        executor.run([x, w])
        with pytest.raises(InterlaceError) as caught:
            executor.run([x.clone() if rank == 0 else x, w])
        told.append(f"{type(caught.value).__name__}: {caught.value}")
        executor.reset()
        (y,) = executor.run([x, w])
        whole = torch.cat([drawn(other, seed, ROWS, K) for other in range(world)])
        told.append("equal" if torch.equal(y, whole @ w) else "differs")
    return told


def test_another_tensor_stops_all_ranks_until_a_reset(pool: Pool, seed: int) -> None:
    mine, other = pool(2).run(give_another, seed)
    assert mine[0].startswith("ExecutorError: input 0 ('x') of gather_matmul is registered")
    assert "registered['x']" in mine[0]
    assert other[0].startswith("PeerError: rank 0 of team tp stopped: input 0 ('x')")
    assert mine[1] == other[1] == "equal"


def run_beside(seed: int) -> list[str]:
    """Two Executors with one tensor, and one after another with the next, closed in between."""
    rank, world = dist.get_rank(), dist.get_world_size()
    wrong: list[str] = []
    for round_ in range(3):
        x, w = drawn(rank, seed + round_, ROWS, K), drawn(0, seed, K, N)
        whole = torch.cat([drawn(other, seed + round_, ROWS, K) for other in range(world)])
        first = registering("gather_matmul", x).prepare()
        second = registering("gather_matmul", x, in_order=True).prepare()
        for executor in (first, second, first):
            (y,) = executor.run([x, w])
            if not torch.equal(y, whole @ w):
                wrong.append(f"round {round_} differs")
        first.close()
        (y,) = second.run([x, w])
        if not torch.equal(y, whole @ w):
            wrong.append(f"round {round_} differs after a close")
        second.close()
    return wrong


def test_executors_share_a_tensor_and_come_and_go(pool: Pool, seed: int) -> None:
    assert pool(2).run(run_beside, seed) == [[], []]


def let_go() -> bool:
    """Whether a closed Executor holds on to what was registered with it."""
    x = torch.zeros(ROWS, K)
    executor = registering("gather_matmul", x).prepare()
    executor.run([x, torch.zeros(K, N)])
    gc.disable()
    try:
        executor.close()
        told = weakref.ref(x)
        del x
        return told() is None
    finally:
        gc.enable()


def test_a_closed_executor_lets_go_of_the_tensors(pool: Pool) -> None:
    assert pool(2).run(let_go) == [True, True]
