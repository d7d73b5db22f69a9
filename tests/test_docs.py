"""The documents: generated pages are up to date, schedules in them sound, links alive."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from interlace.ir.parser import parse
from interlace.verify import check

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def blocks(language: str) -> dict[str, str]:
    """The fenced blocks of one language, by page and number."""
    return {
        f"{page}-{i}": code
        for page, text in PAGES.items()
        for i, (kind, code) in enumerate(BLOCK.findall(text))
        if kind == language
    }


PYTHON = blocks("python")
SCHEDULES = {name: code for name, code in PYTHON.items() if re.match(r"def \w+\(.*Team\[", code)}

QUICK_START_CHECK = """
eager = mlp._orig_mod
gradients = [p.grad.to_local() for p in eager.parameters()]
eager.zero_grad()
eager_loss = eager(x).square().mean()
eager_loss.backward()
torch.testing.assert_close(loss, eager_loss)
for ours, parameter in zip(gradients, eager.parameters(), strict=True):
    torch.testing.assert_close(ours, parameter.grad.to_local())
print("equal to eager")
torch.distributed.destroy_process_group()
"""


def test_op_table_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate_ops.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_every_op_is_in_the_table() -> None:
    import interlace.ir as ir

    page = PAGES["docs/ops.md"]
    missing = {
        kind.__name__ for kind in ir.Op.__subclasses__() if f"### {kind.__name__}\n" not in page
    }
    assert not missing


def test_there_are_schedules_to_check() -> None:
    assert len(SCHEDULES) >= 2


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_in_a_page_is_sound(name: str) -> None:
    program = parse(SCHEDULES[name])
    assert parse(str(program)) == program
    check(program).raise_if_unsound()


def test_builder_in_the_reference_makes_a_sound_program() -> None:
    (code,) = (code for code in PYTHON.values() if "with interlace.program(" in code)
    names: dict[str, Any] = {}
    exec(code, names)
    program = names["p"].program
    assert len(program.ops) == 14
    check(program).raise_if_unsound()


def test_counterexample_in_the_readme_is_real() -> None:
    """What the README shows for a schedule with a line deleted is what the verifier says."""
    (code,) = (code for name, code in SCHEDULES.items() if name.startswith("README.md"))
    deleted = "    main: wait(e1)\n"
    assert deleted in code
    report = check(parse(code.replace(deleted, "")))
    (shown,) = blocks("text").values()
    assert shown.strip() in str(report)


def test_quick_start_of_the_readme_runs(tmp_path: Path) -> None:
    """The README's first script, on two ranks, beside eager DTensor."""
    (code,) = (code for code in PYTHON.values() if "init_device_mesh" in code)
    script = tmp_path / "train.py"
    script.write_text(code + QUICK_START_CHECK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(script)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},  # its mesh is of CPUs
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal to eager") == 2


@pytest.mark.parametrize("name", PYTHON)
def test_python_in_a_page_is_python(name: str) -> None:
    ast.parse(PYTHON[name])


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    here = (ROOT / page).parent
    for target in LINK.findall(PAGES[page]):
        if "://" not in target:
            assert (here / target).exists(), f"{page} links to {target}"
