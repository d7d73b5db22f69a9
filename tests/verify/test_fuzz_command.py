"""`python -m tests.fuzzing`: its codes, its JSON, and what it keeps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.fuzzing.__main__ import main

from interlace.ir import parse_set
from interlace.verify.happens_before.build import GraphBuilder


def test_it_ends_with_0_where_both_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--programs", "40"]) == 0
    done = capsys.readouterr()
    assert "40 sets of Programs" in done.out
    assert "misses: 0, crashes: 0, false alarms: 0" in done.out
    seed = done.err.split()[-1]
    assert main(["--programs", "40", "--seed", seed, "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert str(again["seed"]) == seed
    assert f"{again['ops']:,} ops" in done.out
    assert (again["programs"], again["misses"], again["found"], again["files"]) == (40, 0, [], [])


def test_it_ends_with_1_and_a_file_where_they_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(GraphBuilder, "_has_part", lambda *_: False)
    words = ["--programs", "40", "--seed", "2", "--keep", str(tmp_path / "kept"), "--json"]
    assert main(words) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["false_alarms"] >= 1
    assert len(found["files"]) == len(found["found"]) >= 1
    for path, one in zip(found["files"], found["found"], strict=True):
        text = Path(path).read_text()
        assert text == one["text"]
        assert text.startswith(f"# {one['sort']}: {one['fault']}\n# found by: ")
        assert f"--seed 2, set {one['number']}" in text
        assert parse_set(text)


def test_time_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--programs", "1000000", "--seconds", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["programs"] <= 500


@pytest.mark.parametrize("words", [["--programs", "0"], ["--jobs", "0"], ["--seed", "-1"]])
def test_wrong_usage(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
