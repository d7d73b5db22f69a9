"""Public functions on schedules take paths as they take Programs; what is neither is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.cli.schedules import SERIAL, SOUND, STAGES

import interlace
from interlace.errors import ExecutorError, OptionError, ParseError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sound.ilc").write_text(SOUND)
    (tmp_path / "mlp.ilc").write_text(SERIAL)
    (tmp_path / "stages.ilc").write_text(STAGES)
    for program in interlace.parse_set(STAGES):
        (tmp_path / f"{program.name}.ilc").write_text(str(program))
    return tmp_path


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_stands_for_its_programs(folder: Path, kind: Any) -> None:
    program = interlace.load(folder / "sound.ilc")
    path = kind(folder / "sound.ilc")
    assert interlace.check(path).num_ops == interlace.check(program).num_ops
    assert interlace.simulate(path) == interlace.simulate(program)
    assert interlace.explain(path) == interlace.explain(program)


def test_a_file_may_hold_a_set_and_a_set_may_be_files(folder: Path) -> None:
    assert interlace.check(folder / "stages.ilc").num_ranks == 2
    files = [folder / "first.ilc", folder / "second.ilc"]
    assert interlace.check(files).sound
    assert interlace.simulate(files).ranks == (0, 1)
    text = interlace.explain(folder / "stages.ilc")
    assert ("first:" in text, "second:" in text) == (True, True)
    assert "it has 1 all_gather" in interlace.explain(folder / "mlp.ilc")


@pytest.mark.parametrize("name", ["check", "simulate", "explain"])
def test_what_cannot_be_read_is_an_error(folder: Path, name: str) -> None:
    function = getattr(interlace, name)
    with pytest.raises(ParseError, match=r"cannot read .*gone\.ilc"):
        function(folder / "gone.ilc")
    with pytest.raises(OptionError, match=r"read a text with interlace.parse"):
        function(SOUND)


@pytest.mark.parametrize("given", [5, None, [5]])
@pytest.mark.parametrize("name", ["check", "simulate"])
def test_what_is_no_schedule_is_an_error(given: Any, name: str) -> None:
    with pytest.raises(OptionError, match=f"interlace.{name} takes Programs and paths"):
        getattr(interlace, name)(given)


def test_a_report_is_of_a_model(folder: Path) -> None:
    with pytest.raises(ExecutorError, match="interlace simulate FILE --html"):
        interlace.report(str(folder / "sound.ilc"), folder / "page.html")  # pyright: ignore
