"""`interlace check --pipelining`: verdicts, codes and JSON of torch's pipeline schedules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.schedules import RIGHT, SOUND, invoke

CROSSED = RIGHT.replace("0RECV_B0,0B0,0RECV_B1,0B1", "0RECV_B1,0RECV_B0,0B0,0B1")


@pytest.fixture
def check(tmp_path: Path):
    def check(text: str, *more: str) -> tuple[int, str, str]:
        (tmp_path / "pp.csv").write_text(text)
        return invoke("check", "--pipelining", str(tmp_path / "pp.csv"), *more)

    return check


def test_sound(check) -> None:
    code, out, _ = check(RIGHT)
    assert (code, out.startswith("sound (2 ranks, 2 stages, 2 microbatches,")) == (0, True)
    assert out.count("\n  sound ") == 3


def test_json(check) -> None:
    code, out, _ = check(CROSSED)
    assert (code, out.startswith("unsound: ")) == (1, True)
    assert "fix: issue the receives in the order of the sends" in out
    code, out, _ = check(CROSSED, "--json")
    report = json.loads(out)
    assert (code, report["sound"], report["num_ranks"]) == (1, False, 2)
    assert [model["name"] for model in report["models"]] == ["rank", "pair", "direction"]
    tokens = [op["text"] for op in report["findings"][0]["ops"]]
    assert tokens == ["1SEND_B0", "0RECV_B1"]


def test_malformed(check) -> None:
    code, out, error = check("0F0,0B0junk\n")
    assert (code, out) == (2, "")
    assert "ParseError: pp.csv, rank 0 action 1 '0B0junk'" in error
    code, out, _ = check("0F0,0B0junk\n", "--json")
    assert (code, json.loads(out)["error"]["type"]) == (2, "ParseError")


def test_standard_input() -> None:
    code, out, _ = invoke("check", "--pipelining", "-", text=RIGHT)
    assert (code, out.startswith("sound ")) == (0, True)


def test_usage(check, tmp_path: Path) -> None:
    (tmp_path / "sound.ilc").write_text(SOUND)
    for more in ([str(tmp_path / "sound.ilc")], ["--world", "4"], ["--in-order"]):
        code, _, error = check(RIGHT, *more)
        assert (code, "no other option" in error) == (2, True)
    code, _, error = invoke("check")
    assert (code, "FILE is missing" in error) == (2, True)
