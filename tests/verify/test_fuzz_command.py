"""`python -m tests.fuzzing`: its codes, and what it says."""

from __future__ import annotations

import pytest
from tests.fuzzing.__main__ import main

from interlace.ir import parse_set
from interlace.verify.build import GraphBuilder


def test_it_ends_with_0_where_both_agree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--programs", "40"]) == 0
    done = capsys.readouterr()
    assert "40 sets of Programs" in done.out
    assert "misses: 0, crashes: 0, false alarms: 0" in done.out
    seed = done.err.split()[-1]
    assert main(["--programs", "40", "--seed", seed]) == 0
    again = capsys.readouterr().out
    assert again.partition(" in ")[0] == done.out.partition(" in ")[0]


def test_it_ends_with_1_and_the_texts_where_they_do_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(GraphBuilder, "_has_part", lambda *_: False)
    assert main(["--programs", "40", "--seed", "2"]) == 1
    told, *texts = capsys.readouterr().out.split("\n\n# ")
    assert "false alarms: " in told
    assert texts
    for text in texts:
        assert "\n# found by: python -m tests.fuzzing --seed 2, set " in text
        assert parse_set(f"# {text}")


def test_time_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--programs", "1000000", "--seconds", "0"]) == 0
    assert " 0 sets of Programs" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--programs", "0"], ["--seed", "-1"]])
def test_wrong_usage(words: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
