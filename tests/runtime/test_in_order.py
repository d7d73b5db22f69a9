"""A schedule in order is a schedule of its own: its twin is verified before a rank waits for it."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from tests.runtime.programs import Outcome, attempt, executor_of, world_group
from tests.support.pool import Pool
from typer.testing import CliRunner

from interlace import check
from interlace.cli import app
from interlace.comm import team_of
from interlace.ir import parse, parse_set
from interlace.options import Options
from interlace.runtime.prepare.agreement import agree_and_prove

HEAD = "def f(tp: Team[2], x: f32[4], y: out[f32[4]], z: out[f32[4]]):\n    "
BODIES = {
    "messages": """
    s: send(x, peer=tp.rank + 1)
    t: recv(y, peer=tp.rank + 1)
    t: copy(y, z)
    """,
    "groups": """
    s: group(send(x, peer=tp.rank + 1))
    t: group(recv(y, peer=tp.rank + 1))
    t: copy(y, z)
    """,
    "a signal": """
    s: expect(late, tp.rank + 1)
    s: copy(x, y)
    t: notify(late, to=tp.rank + 1)
    t: copy(x, z)
    """,
}
"""Schedules that are sound, and wait for ever one op after another."""
QUEUES = """\
def f(a: Team[[0, 1]], b: Team[[0, 1]], x: f32[4], y: out[f32[4]], z: out[f32[4]]):
    ranks(0)
    s: all_reduce(x, y, team=a, reduce="sum")
    t: all_reduce(x, z, team=b, reduce="sum")


def g(a: Team[[0, 1]], b: Team[[0, 1]], x: f32[4], y: out[f32[4]], z: out[f32[4]]):
    ranks(1)
    t: all_reduce(x, z, team=b, reduce="sum")
    s: all_reduce(x, y, team=a, reduce="sum")
"""
SAME = HEAD + 's: copy(x, y)\n    all: all_reduce(x, z, team=tp, reduce="sum")\n'


def text_of(kind: str) -> str:
    return QUEUES if kind == "collectives of two teams" else HEAD + BODIES[kind].strip() + "\n"


KINDS = [*BODIES, "collectives of two teams"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_schedule_may_wait_for_ever_in_order(kind: str) -> None:
    programs = parse_set(text_of(kind))
    assert check(programs).sound
    report = check(programs, in_order=True)
    assert report.kinds() == {"deadlock"}
    assert str(report).startswith("unsound in order, one op after another: 1 fault")


def test_the_command_refuses_to_compare_with_it() -> None:
    args = ["run", "-", "--check-against", "in-order", "--runs", "1", "--timeout", "20"]
    done = CliRunner().invoke(app, args, input=text_of("messages"))
    assert done.exit_code == 1
    assert "SoundnessError: unsound in order, one op after another" in done.stderr
    assert "deadlock: ranks 0 and 1 wait for each other, in a circle" in done.stderr


def prepare(text: str, in_order: bool) -> Outcome:
    """How a text is prepared."""
    executor = executor_of(text, timeout_s=3.0, in_order=in_order)
    try:
        return attempt(executor.prepare)
    finally:
        executor.close()


def prepare_unlike(text: str) -> Outcome:
    return prepare(text, dist.get_rank() == 1)


def agree_unlike(text: str) -> Outcome:
    """As of GPUs: rank 1 would make words and capture graphs, for which rank 0 makes none."""
    team, rank = team_of(world_group(), "tp"), dist.get_rank()
    options = Options(graph=rank == 1)
    return attempt(lambda: agree_and_prove(parse(text), rank, [team], 3.0, options=options))


@pytest.mark.parametrize("kind", BODIES)
def test_an_executor_refuses_it(pool: Pool, kind: str) -> None:
    for error, text, _ in pool(2).run(prepare, text_of(kind), True):
        assert error == "SoundnessError"
        assert "in order, one op after another" in text
    for error, text, _ in pool(2).run(prepare, text_of(kind), False):
        assert error == "result", text


def test_ranks_run_in_order_all_or_none(pool: Pool) -> None:
    for error, text, _ in pool(2).run(prepare_unlike, SAME):
        assert error == "AgreementError"
        assert "rank 1 would run 'f' in order, and rank 0 on its streams" in text
    assert [error for error, *_ in pool(2).run(prepare, SAME, True)] == ["result"] * 2


def test_ranks_run_in_graphs_all_or_none(pool: Pool) -> None:
    """Else one would wait for words that the other does not make."""
    for error, text, seconds in pool(2).run(agree_unlike, SAME):
        assert error == "AgreementError"
        assert "rank 1 would run 'f' in CUDA graphs, and rank 0 op by op" in text
        assert "option `graph`" in text
        assert seconds < 2
