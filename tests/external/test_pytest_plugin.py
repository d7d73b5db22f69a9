"""The mark `schedule_sound`: a sound test passes, an unsound one fails with the finding, and one in
which nothing was checked fails."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

TESTS = """
from types import SimpleNamespace
import pytest, torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.pipelining import schedules

C10D = torch.ops._c10d_functional

def waited(x):
    return funcol.all_gather_tensor(x, 0, dist.group.WORLD) * 2

def pending(x):
    group = dist.group.WORLD.group_name
    return C10D.all_reduce.default(x, "sum", group)

def schedule(**options):
    stages = [
        SimpleNamespace(stage_index=k, num_stages=4, group_size=2, group_rank=0, submod=None)
        for k in (0, 3)
    ]
    return schedules.ScheduleZBVZeroBubble(stages, 4, **options)

@pytest.mark.filterwarnings("error::DeprecationWarning")  # which imports of torch give
@pytest.mark.schedule_sound(world_size=4)
def test_sound():
    assert dist.get_world_size() == 4
    assert torch.compile(waited, backend="aot_eager")(torch.ones(2)).shape == (8,)

@pytest.mark.schedule_sound
def test_unsound():
    torch.compile(pending, backend="aot_eager")(torch.ones(2))

@pytest.mark.schedule_sound
def test_backward():
    class Late(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2
        @staticmethod
        def backward(ctx, grad):
            return C10D.all_reduce.default(grad, "sum", dist.group.WORLD.group_name)

    x = torch.ones(2, requires_grad=True)
    torch.compile(Late.apply, backend="aot_eager")(x).sum().backward()

@pytest.mark.schedule_sound
def test_nothing():
    waited(torch.ones(2))

@pytest.mark.schedule_sound
def test_pipeline():
    schedule()

@pytest.mark.schedule_sound
def test_deferred_pipeline():
    schedule(defer_pp_recv=True)

@pytest.mark.schedule_sound
def test_own_error():
    torch.compile(pending, backend="aot_eager")(torch.ones(2))
    raise ValueError("of the test")

@pytest.mark.schedule_sound
def test_group_ended():
    torch.compile(waited, backend="aot_eager")(torch.ones(2))
    dist.destroy_process_group()

@pytest.mark.schedule_sound
def test_compiled_before():
    test = torch.compile(waited, backend="aot_eager")(torch.ones(2))

@pytest.mark.schedule_sound(order="none")
def test_option():
    torch.compile(waited, backend="aot_eager")(torch.ones(2))

def test_unmarked():
    assert not dist.is_initialized()
    torch.compile(torch.neg, backend="aot_eager")(torch.ones(2))
"""


@pytest.fixture(autouse=True)
def only_this_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its module's name, whether or not the installed package has the entry point."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


@pytest.fixture(autouse=True)
def not_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under CI pytest repeats whole messages in its summary."""
    for name in ("CI", "BUILD_NUMBER"):
        monkeypatch.delenv(name, raising=False)


def run(pytester: pytest.Pytester, text: str, *args: str) -> pytest.RunResult:
    pytester.makepyfile(text)
    plugins = ("-p", "interlace_check.pytest_plugin", "-p", "no:cacheprovider")
    return pytester.runpytest_subprocess(*plugins, "--strict-markers", *args, timeout=110)


def test_verdicts(pytester: pytest.Pytester) -> None:
    result = run(pytester, TESTS, "-rA")
    outcomes = {
        "sound": "PASSED",
        "pipeline": "PASSED",
        "group_ended": "PASSED",
        "compiled_before": "PASSED",
        "unmarked": "PASSED",
        "unsound": "FAILED",
        "backward": "FAILED",
        "nothing": "FAILED",
        "deferred_pipeline": "FAILED",
        "own_error": "FAILED",
        "option": "FAILED",
    }
    result.stdout.fnmatch_lines_random(
        [f"{outcome} *::test_{name}*" for name, outcome in outcomes.items()]
    )
    result.assert_outcomes(passed=5, failed=6)
    text = result.stdout.str()
    assert "E       ValueError: of the test" in text
    assert text.count("1 of 1 graphs and schedules can go wrong; the first:") == 3
    assert "1 of 2 graphs and schedules can go wrong; the first:" in text  # the backward one
    assert text.count("error: unwaited: all_reduce is returned, and nothing waited for") == 3
    assert "nothing was checked: the test made no graph by torch.compile" in text
    assert "error: exchanged: rank 0 to rank 1, message 3" in text
    assert "OptionError: order='none'; fix: it is one of auto, listed, any" in text


def test_the_test_of_the_page(pytester: pytest.Pytester) -> None:
    """docs/how-to/find-races.md shows it, and what it prints."""
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "find-races.md").read_text()
    code, shown = re.findall(r"^```(?:python title|text)[^\n]*\n(.*?)^```$", page, re.M | re.S)[:2]
    pytester.makepyfile(test_overlap=code)
    result = pytester.runpytest_subprocess("-p", "interlace_check.pytest_plugin", timeout=110)
    result.assert_outcomes(passed=1, failed=1)
    for line in re.sub(r"\d+ ms", "* ms", shown).splitlines():
        if line not in ("", "..."):
            result.stdout.fnmatch_lines([f"*{line.strip()}*"])


@pytest.mark.timeout(240)
def test_graphs_of_inductor_are_checked_after_its_passes(pytester: pytest.Pytester) -> None:
    """A pass of Inductor that drops a wait is found, and no cache hides a graph."""
    result = run(
        pytester,
        """
import pytest, torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch._inductor import config

def gathered(x):
    return funcol.all_gather_tensor(x, 0, dist.group.WORLD) * 2

def drop(graph):
    for node in list(graph.nodes):
        if "wait_tensor" in str(node.target):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)

@pytest.mark.schedule_sound
@pytest.mark.parametrize("turn", [1, 2])
def test_kept(turn):
    torch.compile(gathered)(torch.ones(2))

@pytest.mark.schedule_sound
def test_dropped():
    with config.patch(post_grad_custom_pre_pass=drop):
        torch.compile(gathered)(torch.ones(2))
""",
    )
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        ["*1 of 2 graphs and schedules can go wrong; the first:", "*error: unwaited: *"]
    )


def test_an_interrupt_ends_the_session(pytester: pytest.Pytester) -> None:
    """Also where a graph of the test is unsound."""
    interrupted = """
@pytest.mark.schedule_sound
def test_interrupted():
    torch.compile(pending, backend="aot_eager")(torch.ones(2))
    raise KeyboardInterrupt

def test_next():
    pass
"""
    result = run(pytester, TESTS.partition("@pytest")[0] + interrupted)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.assert_outcomes()


def test_a_process_group_of_the_user(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
import pytest, torch.distributed as dist

@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()

@pytest.mark.schedule_sound
def test_two(group):
    pass
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*schedule_sound makes a process group of its own*"])


def test_torch_is_not_imported_for_other_tests(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
import sys

def test_plain():
    loaded = {name.partition(".")[0] for name in sys.modules}
    assert "interlace_check" in loaded
    assert not {"torch", "numpy", "interlace"} & loaded
""",
    )
    result.assert_outcomes(passed=1)
