"""Several teams: a 2-D mesh, a Program for each replica, and a set of Programs for a pipeline."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.runtime.programs import (
    attempt,
    executor_of,
    gather_matmul_get,
    inputs_of,
    prepared,
    world_group,
)
from tests.support.interpreter import run_ranks
from tests.support.pool import Pool
from torch.distributed.device_mesh import init_device_mesh

from interlace.comm import release_teams, team_of
from interlace.ir import Program, parse, parse_set
from interlace.options import Backend, Options
from interlace.runtime import Executor

OPTIONS = Options(timeout_s=10.0)

MESH = """
def mesh(dp: Team[2], tp: Team[2], x: f32[2, 3], w: f32[3, 4]):
    full = alloc(f32[4, 3], symmetric=tp)
    y = empty(f32[4, 4])
    total = empty(f32[4, 4])
    main: copy(x, full[tp.rank])
    main: notify(ready, to=tp.others)
    main: expect(ready, tp.rank + 1)
    main: get(full[tp.rank + 1], peer=tp.rank + 1)
    main: call("aten.mm.out", full, w, out=y)
    main: free(full)
    main: record(made)
    grads: wait(made)
    grads: all_reduce(y, total, team=dp, reduce="avg", backend="{}")
    return y, total
"""


def run_mesh(backend: str, seed: int) -> tuple[torch.Tensor, ...]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = {name: mesh.get_group(name) for name in ("dp", "tp")}
    program = parse(MESH.format(backend))
    with Executor(program, groups=groups, options=OPTIONS).prepare() as executor:
        assert executor.rank == dist.get_rank()
        for _ in range(3):
            found = executor.run(inputs_of(program, dist.get_rank(), seed))
        return found


def equal_to_interpreter(
    programs: Program | tuple[Program, ...],
    inputs: list[list[torch.Tensor]],
    results: list[tuple[torch.Tensor, ...]],
) -> None:
    for got, wanted in zip(results, run_ranks(programs, inputs, in_order=True), strict=True):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert isinstance(other, torch.Tensor)
            assert torch.equal(one, other)


@pytest.mark.parametrize("backend", ["gloo", "peer"])
def test_two_mesh_axes_in_one_program(pool: Pool, backend: str, seed: int) -> None:
    program = parse(MESH.format(backend))
    inputs = [inputs_of(program, rank, seed) for rank in range(4)]
    equal_to_interpreter(program, inputs, pool(4).run(run_mesh, backend, seed))


def run_replica(seed: int) -> tuple[int, tuple[torch.Tensor, ...]]:
    """Each row of the mesh runs the tensor-parallel Program on its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    program = parse(gather_matmul_get(2))
    groups = {"tp": mesh.get_group("tp")}
    with Executor(program, groups=groups, options=OPTIONS).prepare() as executor:
        row = mesh.get_local_rank("dp")
        return executor.rank, executor.run(inputs_of(program, executor.rank, seed + row))


def test_a_program_of_two_ranks_serves_every_replica(pool: Pool, seed: int) -> None:
    program = parse(gather_matmul_get(2))
    results = pool(4).run(run_replica, seed)
    assert [rank for rank, _ in results] == [0, 1, 0, 1]
    for row in range(2):
        inputs = [inputs_of(program, rank, seed + row) for rank in range(2)]
        equal_to_interpreter(program, inputs, [found for _, found in results[2 * row :][:2]])


STAGES = """
def first(tp: Team[[0, 1], [2, 3]], pipe: Team[[0, 2], [1, 3]], x: f32[2, 3], w: f32[3, 4]):
    ranks(0, 1)
    full = alloc(f32[4, 3])
    h = alloc(f32[4, 4])
    done = empty(f32[4, 4])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.out", full, w, out=h)
    main: send(h, peer=1, team=pipe{backend})
    main: recv(done, peer=1, team=pipe{backend})
    return done


def second(tp: Team[[0, 1], [2, 3]], pipe: Team[[0, 2], [1, 3]], w: f32[4, 4]):
    ranks(2, 3)
    h = alloc(f32[4, 4])
    y = alloc(f32[4, 4])
    z = empty(f32[4, 4])
    main: recv(h, peer=0, team=pipe{backend})
    main: call("aten.mm.out", h, w, out=y)
    main: all_reduce(y, z, team=tp, reduce="max")
    main: send(z, peer=0, team=pipe{backend})
    return z
"""


def stages(backend: str) -> tuple[Program, ...]:
    return parse_set(STAGES.format(backend=f', backend="{backend}"'))


def run_stage(backend: str, seed: int, drop: str = "") -> object:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    rank = dist.get_rank()
    text = STAGES.format(backend=f', backend="{backend}"').replace(drop or "\0", "")
    program = parse_set(text)[rank // 2]
    groups: dict[str, Any] = {"tp": rows[rank // 2], "pipe": columns[rank % 2]}
    executor = Executor(program, groups=groups, options=OPTIONS)
    if drop:
        return attempt(executor.prepare)
    with executor.prepare():
        for _ in range(2):
            found = executor.run(inputs_of(program, rank, seed))
        return found


@pytest.mark.parametrize("backend", ["gloo", "peer"])
def test_a_pipeline_of_two_programs_runs(pool: Pool, backend: str, seed: int) -> None:
    programs = stages(backend)
    inputs = [inputs_of(programs[rank // 2], rank, seed) for rank in range(4)]
    results = pool(4).run(run_stage, backend, seed)
    equal_to_interpreter(programs, inputs, results)


def test_a_pipeline_that_does_not_fit_together_is_refused(pool: Pool) -> None:
    drop = '    main: send(z, peer=0, team=pipe, backend="gloo")\n'
    for error, text, _ in pool(4).run(run_stage, "gloo", 0, drop):
        assert error == "AgreementError"
        assert "ranks 0 and 1, 'first'" in text
        assert "ranks 2 and 3, 'second'" in text


KINDS = """
def kinds(tp: Team[3], x: f32[rows[tp.rank], 2], even: f32[3, 2]):
    rows = table(tp, 1, 0, 3)
    full = empty(f32[4, 2])
    back = empty(f32[rows[tp.rank], 2])
    turned = empty(f32[3, 2])
    main: all_gather(x, full, team=tp, splits=rows)
    main: record(a)
    other: wait(a)
    other: reduce_scatter(full, back, team=tp, reduce="sum", splits=rows)
    other: record(b)
    main: all_to_all(even, turned, team=tp)
    main: wait(b)
    return full, back, turned
"""


def run_kinds(backend: Backend, seed: int) -> tuple[torch.Tensor, ...]:
    with executor_of(KINDS, transport=backend, timeout_s=10.0).prepare() as executor:
        for _ in range(3):
            found = executor.run(inputs_of(executor.program, dist.get_rank(), seed))
        return found


@pytest.mark.parametrize("backend", ["gloo", "peer"])
def test_collectives_of_two_streams_keep_their_order(pool: Pool, backend: str, seed: int) -> None:
    program = parse(KINDS)
    inputs = [inputs_of(program, rank, seed) for rank in range(3)]
    equal_to_interpreter(program, inputs, pool(3).run(run_kinds, backend, seed))


EXCHANGED = """
def exchanged(tp: Team[3], x: f32[5, 2]):
    rows = table(tp, 4, 0, 1)
    own = table(tp, 12, 0, 3)
    parts = empty(f32[own[tp.rank], 2])
    back = empty(f32[5, 2])
    main: all_to_all(x, parts, team=tp, splits=rows)
    main: all_to_all(parts, back, team=tp, splits=rows)
    return parts, back
"""


def run_exchanged(backend: Backend, seed: int) -> tuple[torch.Tensor, ...]:
    with executor_of(EXCHANGED, transport=backend, timeout_s=10.0).prepare() as executor:
        return executor.run(inputs_of(executor.program, dist.get_rank(), seed))


@pytest.mark.parametrize("backend", ["gloo", "peer"])
def test_uneven_parts_go_there_and_back(pool: Pool, backend: str, seed: int) -> None:
    given = [inputs_of(parse(EXCHANGED), rank, seed)[0] for rank in range(3)]
    cut = zip(*(x.split([4, 0, 1]) for x in given), strict=True)
    results = pool(3).run(run_exchanged, backend, seed)
    for (parts, back), x, sent in zip(results, given, cut, strict=True):
        assert torch.equal(parts, torch.cat(sent))
        assert torch.equal(back, x)


MIXED = """
def mixed(tp: Team[2], x: f32[2]):
    a = empty(f32[2])
    b = empty(f32[2])
    {}: all_reduce(x, a, team=tp, reduce="sum")
    {}: all_reduce(x, b, team=tp, reduce="max", backend="gloo")
    return a, b
"""


def run_mixed(first: str, second: str) -> object:
    lines = MIXED.format("one", "two").splitlines()
    if dist.get_rank() == 1 and first != second:
        lines[4], lines[5] = lines[5], lines[4]
    own = executor_of("\n".join(lines), timeout_s=3.0)
    return attempt(lambda: [t.tolist() for t in own.prepare().run([torch.ones(2)])])


def test_a_backend_named_and_left_open_is_one_queue(pool: Pool) -> None:
    for error, text, _ in pool(2).run(run_mixed, "same", "same"):
        assert (error, text) == ("result", "[[2.0, 2.0], [1.0, 1.0]]")
    for error, text, _ in pool(2).run(run_mixed, "one", "other"):
        assert error == "AgreementError"
        assert "mismatch" in text


def release_and_start_anew(seed: int) -> tuple[str, bool]:
    """Teams give everything back; Executors made afterwards set them up again."""
    old = prepared("get")
    inputs = inputs_of(old.program, dist.get_rank(), seed)
    (before,) = old.run(inputs)
    release_teams()
    error, text, _ = attempt(lambda: old.run(inputs))
    with prepared("get") as new:
        return f"{error}: {text}", torch.equal(before, new.run(inputs)[0])


def test_released_teams_can_be_set_up_again(pool: Pool, seed: int) -> None:
    for text, same in pool(2).run(release_and_start_anew, seed):
        assert text.startswith("TeamError: team tp")
        assert "new Executors" in text
        assert same


class Stuck:
    """Something that cannot let go."""

    def leave(self) -> None:
        raise RuntimeError("the device is in error")


def release_with_errors(seed: int) -> tuple[str, bool, bool]:
    """A team goes whatever those who use it say, who hear of it while it is still there."""
    prepared("get")
    team, stuck = team_of(world_group(), "tp"), Stuck()
    team.used_by(stuck)
    told = ""
    try:
        release_teams()
    except RuntimeError as error:
        told = str(error)
    return told, team.is_set_up, team_of(world_group(), "tp") is team


def test_a_team_goes_though_its_users_fail(pool: Pool, seed: int) -> None:
    for text, set_up, same in pool(2).run(release_with_errors, seed):
        assert text == "the device is in error"
        assert not set_up
        assert not same


def share_slots(seed: int) -> tuple[int, int, bool]:
    """Two Executors whose slots have one name and size: one pool, one memory."""
    slots = team_of(world_group(), "tp").slots
    before = slots.nbytes
    one = prepared("get")
    after_one = slots.nbytes
    two = executor_of(one.program.replace(name="again")).prepare()
    inputs = inputs_of(one.program, dist.get_rank(), seed)
    results = [either.run(inputs)[0] for _ in range(3) for either in (one, two)]
    one.close()
    results.append(two.run(inputs)[0])
    two.close()
    same = all(torch.equal(result, results[0]) for result in results)
    return after_one - before, slots.nbytes - after_one, same


def test_executors_share_slots(pool: Pool, seed: int) -> None:
    pool.close()  # fresh processes: no slot is there yet
    for first, second, same in pool(2).run(share_slots, seed):
        assert first > 0
        assert second == 0
        assert same


def open_files() -> list[str]:
    """What this process has open, one entry a descriptor."""
    found = list[str]()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one the folder was read by
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return sorted(found)


def prepare_again_and_again() -> list[tuple[int, list[str]]]:
    """Keys of the store, and open files, after each round of new Executors that are kept.

    Each rank in turn is late for a round: who waits opens what tells the end of the late process,
    once, and keeps it.
    """
    store: Any = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    rank, found, kept = dist.get_rank(), list[tuple[int, list[str]]](), list[Executor]()
    pairs = {name: [dist.new_group(ranks) for ranks in rows] for name, rows in PAIRS.items()}
    stage, mesh = stages("peer")[rank // 2], parse(MESH.format("peer"))
    whole = parse(gather_matmul_get(4))
    groups: dict[str, Any] = {"tp": pairs["tp"][rank // 2], "pipe": pairs["pipe"][rank % 2]}
    for number in range(7):
        for program, of in (
            (stage, groups),
            (mesh, {"dp": groups["pipe"], "tp": groups["tp"]}),
            (whole, {"tp": world_group()}),
        ):
            other = program.replace(name=f"{program.name}{number}")
            time.sleep(0.3 if rank == number else 0.0)
            kept.append(Executor(other, groups=of, options=OPTIONS).prepare())
        gc.collect()  # what teams of earlier tests held goes before it is counted
        dist.barrier()
        found.append((store.num_keys(), open_files()))
        dist.barrier()
    for executor in kept:
        executor.close()
    return found


PAIRS = {"tp": [[0, 1], [2, 3]], "pipe": [[0, 2], [1, 3]]}


@pytest.mark.slow
def test_preparing_more_leaves_no_more_keys_and_files_behind(pool: Pool) -> None:
    for found in pool(4).run(prepare_again_and_again, replace=True):
        (keys, files), (last_keys, last_files) = found[3], found[-1]  # by then all were late once
        assert last_keys <= keys + 8, found
        more = Counter(last_files) - Counter(files)
        assert len(last_files) <= len(files), f"{more} are new of {last_files}"
