"""docs/explanation/architecture.md: what it lists is there, and calls go the ways that it lists."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tests.conftest import ROOT
from tests.frontend.models import feed_forward
from tests.support.pool import Pool
from torch.distributed.tensor import Shard

import interlace

SOURCE = Path(interlace.__file__).parent
INSIDE = f"{SOURCE}/"
PAGE = (Path(ROOT) / "docs" / "explanation" / "architecture.md").read_text()
STEP = re.compile(r"^\d+\. `([\w/]+\.py)` `([\w.]+)`", re.MULTILINE)
Step = tuple[str, str]


def steps(title: str) -> list[Step]:
    """The files and functions that a section lists."""
    (section,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return STEP.findall(section)


COMPILING = steps("From a model to the first run")
REPLAYED = steps("A later call")


class Calls:
    """The functions of Interlace that any thread called, in the order of their first calls."""

    def __init__(self) -> None:
        self.seen: dict[Step, None] = {}

    def _note(self, frame: FrameType, event: str, _arg: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(INSIDE):
            self.seen.setdefault((code.co_filename.removeprefix(INSIDE), code.co_qualname))

    def __enter__(self) -> Calls:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def compile_and_run() -> tuple[list[Step], list[Step]]:
    """What compiling a two-layer tensor-parallel model calls, and what a later run of it calls."""
    # sizes of no other test, since the process keeps proofs
    mlp, x = feed_forward(272, Shard(0), Shard(0)), torch.randn(64, 272)
    with torch.no_grad():
        step = torch.compile(mlp, backend="interlace")
        with Calls() as compiling:
            step(x)
        step(x)
        with Calls() as running:
            step(x)
    return list(compiling.seen), list(running.seen)


@pytest.fixture(scope="module")
def walks(pool: Pool) -> tuple[list[Step], list[Step]]:
    return pool(2).run(compile_and_run)[0]


def assert_in_order(listed: list[Step], seen: list[Step]) -> None:
    assert [step for step in listed if step not in seen] == []
    assert sorted(listed, key=seen.index) == listed


def test_compiling_goes_the_way_that_is_listed(walks: tuple[list[Step], list[Step]]) -> None:
    assert_in_order(COMPILING, walks[0])
    assert 10 < len({file for file, _ in COMPILING}) <= 30


def test_a_call_goes_the_way_that_is_listed(walks: tuple[list[Step], list[Step]]) -> None:
    assert_in_order(REPLAYED, walks[1])
    assert 3 < len(REPLAYED) <= 7


def test_every_file_that_is_named_is_there() -> None:
    named = set(re.findall(r"`([a-z_]+/[\w/]+\.py)`", PAGE))
    missing = [
        name for name in named if not any((top / name).is_file() for top in (SOURCE, Path(ROOT)))
    ]
    assert named
    assert not missing
