"""`interlace check --recorded`: what it prints, its exit codes, and what it refuses."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path

import pytest
from tests.cli.schedules import invoke
from tests.external.recorded_runs import Run

from interlace_check.recorded import explain_hang


def run(*args: str) -> tuple[int, str, str]:
    return invoke("check", *args)


def hung() -> Run:
    made = Run(2)
    made.each("all_reduce", [4], line=10)
    made.call(0, "broadcast", [4], line=11)
    return made


def test_the_verdict_and_its_code(tmp_path: Path) -> None:
    code, out, _ = run("--recorded", str(hung().write(tmp_path / "bad")))
    assert code == 1
    assert re.sub(r"[\d.]+ ms", "_ ms", out).splitlines() == [
        "1 fault (2 ranks, 3 records, _ ms)",
        "",
        "error: missing: rank 1 did not issue broadcast [4] Float, number 2 of group 0 "
        "(default_pg); rank 0 waits there",
        "  rank 0, record 1: waits here [scheduled]   from step (train.py:11)",
        "      broadcast [4] Float, number 2 of group 0 (default_pg)",
        "  rank 1, record 0: issued this last, and waits for nothing that it issued [completed]"
        "   from step (train.py:10)",
        "      all_reduce [4] Float, number 1 of group 0 (default_pg)",
        "  fix: look where the host of rank 1 is (py-spy dump, its log): it has not come to this "
        "op. Issue it on every rank of the group, or on none",
    ]
    made = hung()
    made.call(1, "broadcast", [4], line=11)
    code, out, _ = run("--recorded", str(made.write(tmp_path / "good")))
    assert code == 0
    assert out.startswith("nothing to report")


def test_json(tmp_path: Path) -> None:
    code, out, _ = run("--recorded", str(hung().write(tmp_path)), "--json")
    found = json.loads(out)
    assert code == 1
    assert found["schema"] == 1
    assert not found["sound"]
    assert found["findings"][0]["kind"] == "missing"
    assert found["findings"][0]["missing"] == [1]


def test_a_pickle_is_refused_and_how_to_get_json_is_said(tmp_path: Path) -> None:
    class Harm:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "harm",)

    folder = tmp_path / "dumps"
    folder.mkdir()
    (folder / "nccl_trace_rank_0").write_bytes(pickle.dumps(Harm(), protocol=2))
    code, _, err = run("--recorded", str(folder))
    assert code == 2
    assert "RecordingError" in err
    assert "is a pickle" in err
    assert "_dump_fr_trace_json" in err
    assert "json.dump(pickle.load(" in err
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("other.txt", "", "holds no dump"),
        ("trace_0", "", "is not JSON"),
        ("trace_0", "[" * 100_000, "nested too deeply"),
        ("trace_0", '{"a":' * 100_000, "nested too deeply"),
        ("trace_0", "9" * 5000, "is not JSON"),
        ("trace_0", "[]", "is not a JSON object"),
        ("trace_0", '{"version": "2.10", "entries": [1]}', "entry 0: it is not a JSON object"),
        ("trace_0", '{"version": "2.10", "entries": [{}]}', "entry 0: it has no record_id"),
        ("trace.json", '{"version": "2.10"}', "which rank it is of"),
        ("trace_99999", '{"version": "2.10"}', "rank 99999 is out of range"),
        (
            "trace_0",
            '{"version": "1", "pg_config": {"0": {"ranks": "[[[[0]]]]"}}}',
            "a rank is not a number",
        ),
    ],
)
def test_what_cannot_be_read(name: str, text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    code, _, err = run("--recorded", str(tmp_path))
    assert code == 2
    assert says in err
    assert "RecordingError" in err


def test_a_file_under_another_rank_s_name(tmp_path: Path) -> None:
    made = Run(2)
    made.group("1", [0], "alone")
    made.call(0, "all_reduce", [4], "1")
    made.write(tmp_path)
    (tmp_path / "trace_rank_0.json").rename(tmp_path / "trace_rank_7.json")
    code, _, err = run("--recorded", str(tmp_path))
    assert code == 2
    assert "name the file after the rank that wrote it" in err


def test_two_files_of_one_rank(tmp_path: Path) -> None:
    hung().write(tmp_path)
    (tmp_path / "old_1.json").write_bytes((tmp_path / "trace_rank_1.json").read_bytes())
    code, _, err = run("--recorded", str(tmp_path))
    assert code == 2
    assert "are both dumps of rank 1" in err


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    code, _, err = run("--recorded", str(tmp_path / "none"))
    assert code == 2
    assert "cannot read" in err


def test_other_options_beside_it(tmp_path: Path) -> None:
    code, _, err = run("--recorded", str(tmp_path), "--world", "2")
    assert code == 2
    assert "--recorded takes --json and no other option" in err
    code, _, err = run()
    assert code == 2
    assert "FILE is missing" in err


def test_pickles_that_were_converted_where_they_lie(tmp_path: Path) -> None:
    """As the fix of the refusal says: each has its JSON beside it, and is left alone."""
    hung().write(tmp_path)
    for path in list(tmp_path.iterdir()):
        plain = json.loads(path.read_text())
        path.with_suffix("").write_bytes(pickle.dumps(plain))
    code, out, error = run("--recorded", str(tmp_path))
    assert (code, out.startswith("1 fault (2 ranks")) == (1, True), error
    (tmp_path / "trace_rank_1.json").unlink()
    code, _, error = run("--recorded", str(tmp_path))
    assert (code, "trace_rank_1 is a pickle" in error) == (2, True)


def test_a_log_whose_name_ends_in_a_number(tmp_path: Path) -> None:
    (hung().write(tmp_path) / "stderr_0").write_text("Traceback")
    code, _, error = run("--recorded", str(tmp_path))
    assert (code, "stderr_0 is not JSON" in error, "move it elsewhere" in error) == (2, True, True)


def test_dumps_without_a_record_do_not_show_that_all_is_well(tmp_path: Path) -> None:
    code, out, _ = run("--recorded", str(Run(2).write(tmp_path)))
    assert code == 0
    assert "assumed:\n  no dump holds a record: nothing was issued, or the recorder was off" in out


def test_a_callback_gets_the_verdict_as_text(tmp_path: Path) -> None:
    """Also of the files of Ray Train's detector of hangs, which calls them RANK.log."""
    hung().write(tmp_path)
    for rank in range(2):
        (tmp_path / f"trace_rank_{rank}.json").rename(tmp_path / f"{rank}.log")
    text = explain_hang(tmp_path)
    assert "error: missing: rank 1 did not issue broadcast [4] Float, number 2" in text
    assert "rank 0, record 1: waits here [scheduled]   from step (train.py:11)" in text


def test_a_callback_raises_nothing(tmp_path: Path) -> None:
    """The hang would be hidden behind another failure."""
    text = explain_hang(tmp_path / "none")
    assert text.startswith("why the run hung is not known: cannot read ")
    (tmp_path / "trace_rank_0").write_bytes(pickle.dumps({}))
    assert "is a pickle" in explain_hang(tmp_path)
