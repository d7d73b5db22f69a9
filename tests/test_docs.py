"""The documents: generated pages are up to date, schedules in them sound, links alive."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

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


def test_counterexample_in_the_readme_is_real() -> None:
    """What the README shows for a schedule with a line deleted is what the verifier says."""
    (code,) = (code for name, code in SCHEDULES.items() if name.startswith("README.md"))
    deleted = "    main: wait(e1)\n"
    assert deleted in code
    report = check(parse(code.replace(deleted, "")))
    (shown,) = blocks("text").values()
    assert shown.strip() in str(report)


@pytest.mark.parametrize("name", PYTHON)
def test_python_in_a_page_is_python(name: str) -> None:
    ast.parse(PYTHON[name])


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    here = (ROOT / page).parent
    for target in LINK.findall(PAGES[page]):
        if "://" not in target:
            assert (here / target).exists(), f"{page} links to {target}"
