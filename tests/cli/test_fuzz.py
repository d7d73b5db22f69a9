"""`interlace fuzz`: its codes, its JSON, and what it keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from interlace.cli import app
from interlace.ir import parse_set
from interlace.verify.happens_before.build import GraphBuilder

RUN = CliRunner().invoke


def test_it_ends_with_0_where_both_agree() -> None:
    done = RUN(app, ["fuzz", "--programs", "40"])
    assert done.exit_code == 0, done.output
    assert "40 sets of Programs" in done.stdout
    assert "misses: 0, crashes: 0, false alarms: 0" in done.stdout
    seed = done.stderr.split()[-1]
    again = json.loads(RUN(app, ["fuzz", "--programs", "40", "--seed", seed, "--json"]).stdout)
    assert str(again["seed"]) == seed
    assert f"{again['ops']:,} ops" in done.stdout
    assert (again["programs"], again["misses"], again["found"], again["files"]) == (40, 0, [], [])


def test_it_ends_with_1_and_a_file_where_they_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GraphBuilder, "_has_part", lambda *_: False)
    words = ["fuzz", "--programs", "40", "--seed", "2", "--keep", str(tmp_path / "kept"), "--json"]
    done = RUN(app, words)
    assert done.exit_code == 1, done.output
    found = json.loads(done.stdout)
    assert found["false_alarms"] >= 1
    assert len(found["files"]) == len(found["found"]) >= 1
    for path, one in zip(found["files"], found["found"], strict=True):
        text = Path(path).read_text()
        assert text == one["text"]
        assert text.startswith(f"# {one['sort']}: {one['fault']}\n# found by: ")
        assert f"--seed 2, set {one['number']}" in text
        assert parse_set(text)


def test_time_ends_it() -> None:
    done = RUN(app, ["fuzz", "--programs", "1000000", "--seconds", "0", "--json"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["programs"] <= 500


@pytest.mark.parametrize("words", [["--programs", "0"], ["--jobs", "0"], ["--seed", "-1"]])
def test_wrong_usage(words: list[str]) -> None:
    assert RUN(app, ["fuzz", *words]).exit_code == 2
