"""What the package asks for: nothing that only GPUs need, and entry points that lead somewhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import interlace

ROOT = Path(__file__).parents[2]
SETTINGS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = SETTINGS["project"]


def names(requirements: list[str]) -> set[str]:
    return {text.split(">")[0].split("=")[0].strip() for text in requirements}


def test_a_cpu_build_of_torch_is_enough() -> None:
    assert names(PROJECT["dependencies"]) == {"torch", "typer", "rich"}
    groups = SETTINGS["dependency-groups"]
    assert {name for name, listed in groups.items() if "triton" in names(listed)} == {
        "test-kernels"
    }


def test_extras_are_for_users_and_groups_for_developers() -> None:
    assert PROJECT["optional-dependencies"].keys() == {"bench"}
    assert "matplotlib" in names(PROJECT["optional-dependencies"]["bench"])
    assert SETTINGS["dependency-groups"].keys() == {"dev", "docs", "integrations", "test-kernels"}


def test_the_changelog_tells_of_this_version() -> None:
    assert f"## {interlace.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_site_is_of_this_version() -> None:
    assert f"copyright: Interlace {interlace.__version__}," in (ROOT / "mkdocs.yml").read_text()


def test_the_citation_is_of_this_version() -> None:
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    assert "cff-version: 1.2.0" in lines
    assert f"version: {interlace.__version__}" in lines
    assert f"license: {PROJECT['license']}" in lines


@pytest.mark.parametrize("path", sorted((ROOT / ".github").rglob("*.yml")), ids=lambda p: p.name)
def test_workflows_and_forms_can_be_read(path: Path) -> None:
    found = pytest.importorskip("yaml").safe_load(path.read_text())
    for job in found.get("jobs", {}).values():
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            for made in re.findall(r"\bmake(?: --directory \w+)? (\w+)", step.get("run", "")):
                assert f"\n{made}:" in (ROOT / "Makefile").read_text()
