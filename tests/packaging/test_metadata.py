"""What the package asks for: nothing that only GPUs need, and entry points that lead somewhere."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

PROJECT: dict[str, Any] = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())[
    "project"
]


def names(requirements: list[str]) -> set[str]:
    return {text.split(">")[0].split("=")[0].strip() for text in requirements}


def test_a_cpu_build_of_torch_is_enough() -> None:
    assert names(PROJECT["dependencies"]) == {"torch", "typer", "rich"}
    assert "matplotlib" in names(PROJECT["optional-dependencies"]["bench"])


def test_entry_points_lead_somewhere() -> None:
    found = {
        **PROJECT["scripts"],
        **PROJECT["entry-points"]["torch_dynamo_backends"],
    }
    for target in found.values():
        module, _, name = target.partition(":")
        assert callable(getattr(import_module(module), name))
