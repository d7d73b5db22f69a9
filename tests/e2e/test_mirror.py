"""A mirror team on the CPU: one process runs a schedule for N ranks, and is each of them."""

from __future__ import annotations

import os
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.gpu.cases import KINDS, STRATEGIES, program_of, run
from tests.runtime.programs import world_group
from tests.support.mirrored import executor_of, on, wrong_layer, wrong_sites
from tests.test_docs import of_page
from torch.distributed.device_mesh import init_device_mesh
from typer.testing import CliRunner

import interlace
from interlace.cli import app
from interlace.comm.teams import key_of
from interlace.errors import (
    CommTimeoutError,
    ExecutorError,
    InputError,
    OptionError,
    TeamError,
    UnsupportedError,
)
from interlace.ir import Put, parse
from interlace.ir.mirror import mirrored
from interlace.options import Options
from interlace.runtime import Executor
from interlace_bench.mirror import mirror

pytestmark = pytest.mark.timeout(150)


@pytest.fixture(autouse=True)
def no_groups() -> Any:
    """A test leaves no process group."""
    yield
    assert not dist.is_initialized()


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_site_has_the_bits_of_its_program_in_order(kind: str, size: int, seed: int) -> None:
    """By every strategy; and exact sums are of this rank's own parts, each once a peer."""
    wrong = wrong_sites(on("cpu", kind, size, "f32"), list(STRATEGIES), seed)
    wrong += wrong_sites(on("cpu", kind, size, "f32"), ["serial"], seed, transport="peer")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("size", "strategy"), [(2, "auto"), (4, "peer"), (4, "ring")])
def test_a_compiled_layer_has_the_bits_of_its_programs_in_order(
    size: int, strategy: str, seed: int
) -> None:
    wrong = wrong_layer(size, "cpu", seed, strategy=strategy)
    assert not wrong, "\n".join(wrong)


def test_torchs_own_collectives_come_back() -> None:
    """Each peer gives what this rank gives."""
    with mirror(4) as group:
        assert (dist.get_rank(), dist.get_world_size(group)) == (0, 4)
        x = torch.arange(8.0)
        full, part, same = x.new_empty(32), x.new_empty(2), x.new_empty(8)
        dist.all_gather_into_tensor(full, x)
        dist.reduce_scatter_tensor(part, x)
        dist.all_to_all_single(same, x)
        most = x.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX)
        dist.all_reduce(x)
        dist.barrier()
        assert full.tolist() == [*range(8)] * 4
        assert (part.tolist(), same.tolist()) == ([0, 4], [0, 1] * 4)
        assert most.tolist() == [*range(8)]
        assert x.tolist() == [4 * each for each in range(8)]


def test_all_reduces_are_as_those_of_torch() -> None:
    """Without options it is a sum; autograd does not see it; what cannot be told is refused."""
    with mirror(2) as group:
        x = torch.ones(3, requires_grad=True)
        y = torch.sigmoid(x)
        dist.all_reduce(y)
        y.sum().backward()
        assert x.grad is not None
        assert x.grad.isfinite().all()
        whole = torch.ones(3)
        group.allreduce([whole]).wait()
        assert whole.tolist() == [2, 2, 2]
        with pytest.raises(UnsupportedError, match="reduces by sum, product"):
            dist.all_reduce(torch.ones(3, dtype=torch.int32), dist.ReduceOp.BXOR)
        with pytest.raises(UnsupportedError, match="no scatter of another rank"):
            dist.scatter(whole, src=1)
        with pytest.raises(dist.DistError, match="sends before it receives"):
            dist.recv(whole, src=1)


def test_teams_of_a_mesh_meet_each_other() -> None:
    text = """
def f(dp: Team[2], tp: Team[2], x: f32[4, 8], y: out[f32[4, 8]]):
    t = alloc(f32[4, 8])
    main: all_reduce(x, t, reduce="sum", team=tp)
    main: all_reduce(t, y, reduce="sum", team=dp)
"""
    with mirror(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        groups = {name: mesh.get_group(name) for name in ("dp", "tp")}
        with Executor(parse(text), groups=groups, options=Options(timeout_s=10)) as executor:
            executor.prepare()
            (y,) = executor.run([torch.ones(4, 8)])
            assert y.eq(4).all()
            interlace.reset()
            assert executor.run([torch.ones(4, 8)])[0].eq(4).all()


def test_an_error_in_a_mirror_is_the_users_and_leaves_no_group() -> None:
    def fail() -> None:
        raise TeamError("a team that cannot be left")

    def work() -> None:
        with mirror(2) as group:
            assert key_of(group).startswith("mirror/"), "resets here are none of a real group's"
            raise ZeroDivisionError

    with mock.patch("interlace.comm.teams.release_teams", fail), pytest.raises(ZeroDivisionError):
        work()


def test_a_failure_is_mended_and_a_wait_is_timed(seed: int) -> None:
    """As on real ranks: an error in an op, a reset of all teams, and an op that comes late."""
    case, faults = on("cpu", "all_gather_matmul", 2, "f32"), ["raise"]

    def before(rank: int, index: int, op: Any) -> None:
        if isinstance(op, Put) and faults:
            if faults.pop() == "raise":
                raise ValueError("a fault")
            time.sleep(2)

    with mirror(2):
        options, inputs = Options(timeout_s=1.0), case.inputs(seed)
        executor = Executor(
            program_of(case, "peer-put"),
            groups={"tp": world_group()},
            options=options,
            before_op=before,
        )
        with executor.prepare():
            with pytest.raises(ExecutorError, match="raised ValueError: a fault"):
                run(executor, case, inputs)
            executor.reset()
            known = run(executor, case, inputs)
            faults.append("sleep")
            with pytest.raises(CommTimeoutError, match=r"waiting for rank 1:\n.*at `comm: put"):
                run(executor, case, inputs)
            interlace.reset()
            assert torch.equal(run(executor, case, inputs), known)


def test_what_cannot_be_mirrored_is_refused() -> None:
    text = """
def f(tp: Team[2], x: f32[8, 8], y: out[f32[8, 8]]):
    main: broadcast(x, y, root=0, team=tp)
"""
    with pytest.raises(OptionError, match="a mirror of 1 ranks"), mirror(1):
        pass
    with mirror(2):
        with pytest.raises(InputError, match=r"there is one already\. fix: destroy it"), mirror(2):
            pass
        with pytest.raises(UnsupportedError, match="has a root in op 0"):
            Executor(parse(text), groups={"tp": world_group()}).prepare()
        text = """
def f(tp: Team[2], pr: Team[[0, 1]], x: f32[8, 8], y: out[f32[8, 8]]):
    slot = alloc(f32[2, 8, 8], symmetric=tp)
    main: put(x, slot[pr.rank], peer=tp.rank + 1)
    main: notify(sent, to=tp.rank + 1)
    main: expect(sent, tp.rank - 1)
    main: copy(slot[pr.rank - 1], y)
"""
        with pytest.raises(UnsupportedError, match="has the rank of another team in op 1"):
            mirrored(parse(text))
        with executor_of(on("cpu", "matmul_all_reduce", 2, "f32"), "serial") as executor:
            assert executor.engine is not None, "and nothing had changed"


def test_the_test_on_the_page_passes() -> None:
    names: dict[str, Any] = {}
    (block,) = of_page("docs/how-to/gpus.md")
    exec(block.code, names)
    names["test_a_step_of_one_rank_of_four"]()


def bench(*args: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["bench", "transformer", *args])
    assert done.exit_code == code, done.output
    return done.output


TINY = ("--device", "cpu", "--model", "tiny", "--sequence", "32", "--dtype", "f32")


def test_the_bench_tells_that_it_is_a_mirror() -> None:
    """Ways of ours against themselves in order, bit for bit; others against eager."""
    names = "eager,compile,ideal,dist-gemm"
    text = bench(*TINY, "--mirror", "2", "--seconds", "1", "--only", names)
    assert "a mirror of 2 ranks (no link), tiny x 1" in text
    heads = next(line for line in text.splitlines() if "host us" in line)
    assert {"idle", "GiB", "at rest"} <= {*heads.split("  ")} | {
        h.strip() for h in heads.split("  ")
    }
    ways = [line.split()[2] for line in text.splitlines() if line.startswith("1 whole")]
    assert ways == ["eager", "compile", "ideal"]
    assert "1 whole dist-gemm: " in text


def test_the_bench_refuses_a_mirror_of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "give one of them" in bench("--mirror", "2", "--world", "2", code=2)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setitem(os.environ, name, "1")
    assert "start it without torchrun" in bench(*TINY, "--mirror", "2", code=2)
