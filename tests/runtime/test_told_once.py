"""A fault that all ranks find is told whole by one of them, in a line by the others, and without
frames of Interlace's own."""

from __future__ import annotations

import traceback

import torch
import torch.distributed as dist
from tests.runtime.programs import attempt, executor_of, inputs_of, prepared, program_of
from tests.support.pool import Pool
from torch.distributed.device_mesh import init_device_mesh

from interlace.errors import InterlaceError, SoundnessError
from interlace.ir import Op, Program, Wait, parse
from interlace.options import Options
from interlace.runtime import Executor
from interlace.runtime.prepare.agreement import TOLD_S


def racy(world: int) -> Program:
    program = program_of("get", world)
    return program.replace(ops=tuple(op for op in program.ops if not isinstance(op, Wait)))


def failing(program: Program) -> tuple[str, str, int, int | None, list[str]]:
    """The error's type, text, number of findings and who has the whole; the files of its frames."""
    try:
        executor_of(program).prepare()
    except InterlaceError as error:
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        findings = len(getattr(error, "findings", ()))
        told_by = getattr(error, "told_by", None)
        return type(error).__name__, str(error), findings, told_by, frames
    return "", "", 0, None, []


def fail_alike() -> tuple[str, str, int, int | None, list[str]]:
    return failing(racy(dist.get_world_size()))


def test_one_rank_has_the_report_and_the_others_a_line(pool: Pool) -> None:
    (first, whole, findings, nobody, _), *others = pool(3).run(fail_alike)
    assert first == "SoundnessError"
    assert len(whole.splitlines()) > 5
    assert nobody is None
    for kind, text, count, told_by, frames in others:
        assert (kind, count, told_by) == (first, findings, 0)
        assert "\n" not in text
        assert text.startswith("unsound: ")
        assert ": race: nothing orders line" in text
        assert text.endswith("(rank 0 has the whole report)")
        assert sum("/interlace/" in name for name in frames) == 1, frames


MESH = """
def mesh(dp: Team[2], tp: Team[2], x: f32[2]):
    y = empty(f32[2])
    z = empty(f32[2])
    main: all_reduce(x, y, team=tp, reduce="sum")
    {}
    grads: all_reduce(y, z, team=dp, reduce="sum")
    return z
"""


def fail_on_a_mesh() -> tuple[str, float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    groups = {name: mesh.get_group(name) for name in ("dp", "tp")}
    options = Options(timeout_s=20.0)
    sound = parse(MESH.format("main: record(made)\n    grads: wait(made)"))
    Executor(sound, groups=groups, options=options).prepare().close()
    dist.barrier()
    racing = Executor(parse(MESH.format("")), groups=groups, options=options)
    kind, _, took = attempt(racing.prepare)
    return kind, took


def test_ranks_without_a_team_in_common_wait_at_one_place(pool: Pool) -> None:
    for kind, took in pool(4).run(fail_on_a_mesh):
        assert kind == "SoundnessError"
        assert took < TOLD_S


def test_the_error_has_an_attribute_that_names_who_tells() -> None:
    assert SoundnessError("a").told_by is None
    assert SoundnessError("a", (), 3).told_by == 3


def run_and_fail() -> tuple[str, list[str]]:
    def fail(rank: int, index: int, op: Op) -> None:
        if armed and rank == 1:
            raise ValueError("the planted fault")

    armed = False
    executor = prepared("get", before_op=fail)
    inputs = inputs_of(executor.program, dist.get_rank(), 1)
    wanted = executor.run(inputs)[0]
    dist.barrier()
    armed = True
    try:
        executor.run(inputs)
    except InterlaceError as error:
        frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        armed = False
        executor.reset()
        assert torch.equal(executor.run(inputs)[0], wanted)
        return str(error), frames
    return "", []


def test_the_error_of_a_run_names_the_op_and_has_no_frames_of_streams(pool: Pool) -> None:
    for text, frames in pool(2).run(run_and_fail):
        assert "the planted fault" in text
        assert not any(name.endswith("host/binder.py") for name in frames), frames
        assert sum("/interlace/" in name for name in frames) <= 3, frames
