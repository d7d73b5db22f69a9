"""Files of pipeline schedules: tokens, layouts, and errors that name place, token and fix."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from interlace.errors import InterlaceError, ParseError
from interlace_check.pipelining import check_pipelining
from interlace_check.pipelining.actions import (
    COMPUTE,
    WITH_MICROBATCH,
    WITHOUT_MICROBATCH,
    parse_action,
)
from interlace_check.pipelining.csv_file import MAX_CELLS, MAX_CHARACTERS, parse_csv

TWO = "0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n"
"""The smallest pipeline with communication."""


@pytest.mark.parametrize("kind", WITH_MICROBATCH)
def test_token_with_a_microbatch(kind: str) -> None:
    action = parse_action(f" 12{kind}345 ")
    assert action is not None
    assert (action.kind, action.stage, action.microbatch) == (kind, 12, 345)
    assert str(action) == f"12{kind}345"


@pytest.mark.parametrize("kind", WITHOUT_MICROBATCH)
def test_token_without_a_microbatch(kind: str) -> None:
    action = parse_action(f"3{kind}")
    assert action is not None
    assert (action.kind, action.stage, action.microbatch) == (kind, 3, None)


def test_overlap() -> None:
    action = parse_action("(10F1; 2B30)OVERLAP_F_B")
    assert action is not None
    assert [str(part) for part in action.leaves()] == ["10F1", "2B30"]
    assert str(action) == "(10F1;2B30)OVERLAP_F_B"


@pytest.mark.parametrize(
    ("token", "told"),
    [
        ("0F0x", "'x' stands behind the action 0F0"),
        ("0F0 0F1", "' 0F1' stands behind"),
        ("0F0;0F1", "';0F1' stands behind"),
        ("0F", "F needs a microbatch"),
        ("0SEND_F", "SEND_F needs a microbatch"),
        ("0UNSHARD3", "UNSHARD takes no microbatch"),
        ("0Q1", "unknown kind 'Q'"),
        ("0SENDF1", "unknown kind 'SENDF'"),
        ("0f0", "not an action"),
        ("F0", "not an action"),
        ("None", "not an action"),
        ("-1F0", "not an action"),
        ("0F-1", "'-1' stands behind the action 0F"),
        ("٣F0", "not an action"),
        ("0F٣", "'٣' stands behind the action 0F"),
        ("0F1234567890", "more than 9 digits"),
        (f"{'9' * 5000}F0", "more than 9 digits"),
        ("(0F1;1B0)", "write the parts as"),
        ("(0F1;1B0)OVERLAP_F_Bx", "write the parts as"),
        ("(0F1;1B0", "write the parts as"),
        ("((0F1;1B0)OVERLAP_F_B;0F0)OVERLAP_F_B", "write the parts as"),
        ("()OVERLAP_F_B", "not an action"),
        ("(0F1;)OVERLAP_F_B", "not an action"),
        ("(0F1;1B0)F", "only OVERLAP_F_B has parts"),
        ("(0F1;1SEND_F0)OVERLAP_F_B", "is no computation"),
        ("0OVERLAP_F_B1", "unknown kind 'OVERLAP_F_B'"),
    ],
)
def test_a_bad_token_is_named(token: str, told: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse_csv(f"0F0,0B0\n\n1F0,{token}\n", "bad.csv")
    message = str(caught.value)
    assert message.startswith("bad.csv, rank 2 action 1 ")
    assert token[:20] in message
    assert told in message
    assert "fix: " in message
    assert len(message) < 500


@pytest.mark.parametrize(
    "text",
    [
        TWO,
        TWO.replace("\n", "\r\n"),
        TWO.replace(",", " ,\t"),
        TWO.replace("0F0", '"0F0"'),
        TWO.rstrip("\n"),
    ],
)
def test_layouts_that_torch_accepts(text: str, tmp_path: Path) -> None:
    (tmp_path / "two.csv").write_bytes(text.encode())
    report = check_pipelining(tmp_path / "two.csv")
    assert report.sound, report
    assert not report.findings
    assert (report.num_ranks, report.num_stages, report.num_microbatches) == (2, 2, 1)


def test_layouts_that_torch_refuses(tmp_path: Path) -> None:
    """A byte order mark is no action, and a blank line at the end is a rank without one."""
    with pytest.raises(ParseError, match="not an action"):
        parse_csv("\ufeff" + TWO)
    (tmp_path / "two.csv").write_text(TWO + "\n")
    report = check_pipelining(tmp_path / "two.csv")
    assert [finding.message for finding in report.findings] == ["rank 2 computes nothing"]


def test_blank_cells_are_steps(tmp_path: Path) -> None:
    (tmp_path / "two.csv").write_text(TWO.replace(",", ",,", 1))
    report = check_pipelining(str(tmp_path / "two.csv"))
    assert (report.sound, report.findings) == (True, ())


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b",,\n,\n", b"\xff\xfe0\x00F\x000\x00", b"\x00", b'"0F0']
)
def test_files_without_a_schedule(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bad.csv").write_bytes(content)
    if content == b'"0F0':  # the quote is closed by the end, as in every CSV reader
        assert not check_pipelining(str(tmp_path / "bad.csv")).sound
        return
    with pytest.raises(ParseError, match=r"bad\.csv"):
        check_pipelining(str(tmp_path / "bad.csv"))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ParseError, match="cannot read"):
        check_pipelining(tmp_path / "none.csv")
    with pytest.raises(ParseError, match="cannot read"):
        check_pipelining(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["0F0," * (MAX_CELLS + 1), "0F0\n" * 5000, " " * (MAX_CHARACTERS + 1), "9" * 200_000],
    ids=["cells", "ranks", "characters", "field"],
)
def test_what_is_too_large_is_refused_at_once(text: str) -> None:
    began = time.process_time()
    with pytest.raises(ParseError):
        parse_csv(text)
    assert time.process_time() - began < 5


@pytest.mark.parametrize("token", ["999999999F0", "0F999999999", "0SEND_F999999999"])
def test_huge_indices_are_findings_and_take_no_memory(token: str, tmp_path: Path) -> None:
    (tmp_path / "huge.csv").write_text(TWO.replace("0B0\n", f"0B0,{token}\n"))
    report = check_pipelining(tmp_path / "huge.csv")
    assert not report.sound
    assert len(report.to_json()["findings"]) < 20


PIECES = (
    *("0", "1", "2", "7", "12", "999999999", "F", "B", "I", "W", "SEND_F", "RECV_B", "WAIT_SEND_F"),
    *("UNSHARD", "REDUCE_GRAD", "OVERLAP_F_B", "(", ")", ";", ",", ",", "\n", "\r\n", '"', " "),
    *("\t", "\ufeff", "\x00", "é", "-", "None", "0F0", "1B0", "0SEND_F0", "1RECV_F0"),
)


def malformed(rng: random.Random) -> str:
    """A file made of pieces of tokens, or one that was right before some of it changed."""
    if rng.random() < 0.4:
        return "".join(rng.choice(PIECES) for _ in range(rng.randrange(60)))
    cells = [list[str](line.split(",")) for line in TWO.splitlines()]
    for _ in range(rng.randrange(1, 5)):
        row = rng.choice(cells)
        k = rng.randrange(len(row) + 1)
        match rng.randrange(4):
            case 0:
                row.insert(k, rng.choice(PIECES))
            case 1:
                row[k:] = row[k + 1 :]
            case 2:
                kind = rng.choice((*WITH_MICROBATCH, *WITHOUT_MICROBATCH))
                row.insert(k, f"{rng.randrange(4)}{kind}{rng.choice(['', '0', '1'])}")
            case _:
                rng.shuffle(row)
    return "\n".join(map(",".join, cells))


def survive(count: int, seed: int, folder: Path) -> None:
    """Typed errors or reports alone, each in bounded time."""
    rng = random.Random(seed)
    path = folder / "random.csv"
    kinds: dict[str, int] = {}
    for _ in range(count):
        text = malformed(rng)
        path.write_bytes(text.encode())
        began = time.process_time()
        try:
            report = check_pipelining(path)
            str(report)
            report.to_json()
            outcome = "sound" if report.sound else "unsound"
        except InterlaceError as error:
            outcome = type(error).__name__ if len(str(error)) < 1000 else "endless"
        assert time.process_time() - began < 5, text
        kinds[outcome] = kinds.get(outcome, 0) + 1
    assert set(kinds) <= {"sound", "unsound", "ParseError", "UnsupportedError"}
    assert min(kinds["unsound"], kinds["ParseError"]) > count // 10, kinds


@pytest.mark.parametrize(
    "count", [1_500, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_malformed_files(seed: int, count: int, tmp_path: Path) -> None:
    survive(count, seed, tmp_path)


def test_kinds_of_the_parser_are_those_of_torch() -> None:
    """Every token that torch prints is known here, whichever torch it is."""
    from torch.distributed.pipelining.schedules import _ComputationType

    known = {*WITH_MICROBATCH, *WITHOUT_MICROBATCH, "OVERLAP_F_B"}
    assert {kind.value for kind in _ComputationType} <= known
    assert set(COMPUTE) <= {kind.value for kind in _ComputationType}
