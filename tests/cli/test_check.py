"""`interlace check`: verdicts, counterexamples, worlds and meshes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.cli.schedules import RACE, RIGHT, RING, ROOT, SOUND, STAGES, command, invoke

from interlace.cost.memory import COPIES

RACE_TEXT = """\
unsound: 2 faults (2 ranks, 22 ops, _ ms)

error: race: nothing orders line 8 on rank 0, which writes, and line 11 on rank 0, which reads \
the same bytes of full (the same on ranks 0, 1)
"""


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "program.ilc"
        path.write_text(text)
        return str(path)

    return write


def run(*args: str) -> tuple[int, str, str]:
    """The verdict, without the line on memory."""
    code, out, error = invoke(*args)
    return code, re.sub(r"\nmemory: .*", "", re.sub(r"\d+ ms", "_ ms", out)), error


def test_sound(write) -> None:
    said = "sound (2 ranks by symmetry of tp: 1 visited, 24 ops, _ ms)\n"
    assert run("check", write(SOUND)) == (0, said, "")


def test_the_last_line_is_the_memory_of_a_run(write) -> None:
    peak = 128 * 512 * 4 + COPIES * 128 * 256 * 4
    told = invoke("check", write(SOUND))[1].splitlines()[-1]
    assert told.startswith(f"memory: peak {peak:,} bytes at op")
    assert json.loads(invoke("check", write(SOUND), "--json")[1])["memory"]["peak_bytes"] == peak
    assert "memory" not in invoke("check", write(RACE))[1]


def test_unsound_shows_the_counterexample_and_the_fix(write) -> None:
    code, out, _ = run("check", write(RACE))
    assert code == 1
    assert out.startswith(RACE_TEXT)
    assert '> 11 | main: call("aten.mm.out", full[tp.rank + 1], w, out=y[tp.rank + 1])' in out
    assert "fix: before line 11 add `main: wait(e1)`" in out


def test_json_is_a_report(write) -> None:
    code, out, _ = run("check", write(RACE), "--json")
    report = json.loads(out)
    assert (code, report["sound"], report["num_ranks"]) == (1, False, 2)
    assert {finding["kind"] for finding in report["findings"]} == {"race"}
    ops = report["findings"][0]["ops"]
    assert [op["line"] for op in ops] == [8, 11]


@pytest.mark.parametrize(("world", "ops"), [(2, 24), (6, 72)])
def test_a_larger_world_holds_copies(write, world: int, ops: int) -> None:
    code, out, _ = run("check", write(SOUND), "--world", str(world))
    teams = "tp" if world == 2 else "copies and tp"
    said = f"sound ({world} ranks by symmetry of {teams}: 1 visited, {ops} ops, _ ms)\n"
    assert (code, out) == (0, said)


@pytest.mark.parametrize(("size", "ranks"), [("tp=3", 3)])
def test_mesh_sizes_teams(write, size: str, ranks: int) -> None:
    teams = " and ".join(re.findall(r"[a-z]+", size))
    said = f"sound ({ranks} ranks by symmetry of {teams}: 1 visited, {ranks} ops, _ ms)\n"
    assert run("check", write(RING), "--mesh", size)[1] == said


def test_mesh_resizes_chunks_of_the_team(write) -> None:
    # the text has copies for 2 ranks only: with 4, the parts of two ranks are never gathered
    text = SOUND.replace("x: f32[64, 256]", "x: f32[32, 256]").replace("Team[2]", "Team[4]")
    code, out, _ = run("check", write(text))
    assert code == 1
    again = SOUND.replace("x: f32[64, 256]", "x: f32[32, 256]")
    code_again, out_again, err = run("check", write(again.replace("tp.rank + 1", "tp.rank - 1")))
    assert (code_again, out_again) == (2, "")  # 32 rows do not fit a half of 128
    assert "copy from x (f32[32, 256])" in err
    assert "uninitialized" in out


def test_a_set_of_programs(write) -> None:
    assert run("check", write(STAGES))[:2] == (0, "sound (2 ranks, 2 ops, _ ms)\n")
    assert run("check", write(STAGES), "--world", "2")[0] == 0
    assert run("check", write(STAGES), "--world", "3") == (
        *(2, ""),
        "error: TeamError: these 2 programs run on 2 ranks [0, 1], not on 3\n",
    )


def test_several_files_are_judged_by_turns(tmp_path: Path) -> None:
    """As pre-commit names them, CSVs of pipelines among them; the worst code counts."""
    texts = {"sound.ilc": SOUND, "race.ilc": RACE, "gone.ilc": None, "step.csv": RIGHT}
    paths = {name: tmp_path / name for name in texts}
    for name, text in texts.items():
        if text is not None:
            paths[name].write_text(text)

    def check(*names: str) -> tuple[int, str, str]:
        return invoke("check", *(str(paths[name]) for name in names))

    code, out, error = check(*texts)
    assert (code, error.count("\n")) == (2, 1)
    assert f"ParseError: cannot read {paths['gone.ilc']}" in error
    for name, verdict in {"sound.ilc": "sound", "race.ilc": "unsound", "step.csv": "sound"}.items():
        assert f"{paths[name]}: {verdict}" in out
    assert check("race.ilc", "step.csv")[0] == 1
    assert check("sound.ilc", "step.csv")[::2] == (0, "")
    told = json.loads(invoke("check", *map(str, paths.values()), "--json")[1])
    assert [each["file"] for each in told] == [str(path) for path in paths.values()]
    assert [each.get("sound") for each in told] == [True, False, None, True]
    assert told[2]["error"]["type"] == "ParseError"
    code, _, error = invoke("check", str(paths["step.csv"]), "--world", "4")
    assert (code, "takes --json alone" in error) == (2, True)


def test_hooks_of_pre_commit(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    (tmp_path / "race.ilc").write_text(RACE)
    (tmp_path / "a.pipelining.csv").write_text(RIGHT)
    codes = {}
    for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text()):
        program, *args = hook["entry"].split()
        assert program == "interlace"
        names = [path for path in tmp_path.iterdir() if re.search(hook["files"], path.name)]
        codes[hook["id"]] = invoke(*args, *map(str, names))[0]
    assert codes == {"interlace-check": 1, "interlace-check-pipelining": 0}


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--world", "3"], "a world of 3 ranks does not divide into teams tp[2]"),
        (["--world", "0"], "a world of 0 ranks does not divide"),
        (["--mesh", "tp=2,dp"], "write axes and their sizes, such as dp=2,tp=4"),
        (["--mesh", "tp=0"], "write axes and their sizes"),
        (["--mesh", "tp=2,tp=4"], "axis tp stands there twice"),
        (["--mesh", "tp=4", "--world", "8"], "--world 8 and a mesh of 4 ranks do not agree"),
        (["--mesh", "tp=2,dp=2"], "--mesh sizes dp, and the teams of all_gather_linear are tp"),
        (["--mesh", "dp=2"], "--mesh sizes dp, and the teams of all_gather_linear are tp"),
    ],
    ids=["indivisible", "none", "no-size", "zero", "twice", "both", "further", "unknown"],
)
def test_worlds_that_do_not_fit_are_errors(write, args: list[str], told: str) -> None:
    code, out, err = run("check", write(SOUND), *args)
    assert (code, out) == (2, "")
    assert err.startswith("error: TeamError: ")
    assert told in err


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("def f(:\n", "ParseError"),
        ("x = 1\n", "ParseError"),
        ("", "there is no program here"),
        ("def f(x: f32[8], y: out[f32[8]]):\n    main: copy(z, y)\n", "ProgramError"),
        ("def f(x: f32[8], y: out[f32[4]]):\n    main: copy(x, y)\n", "ProgramError"),
    ],
    ids=["syntax", "statement", "empty", "unknown-name", "sizes"],
)
def test_malformed_files_are_errors(write, text: str, told: str) -> None:
    code, out, err = run("check", write(text))
    assert (code, out) == (2, "")
    assert told in err
    assert "Traceback" not in err


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    code, out, err = run("check", str(tmp_path / "no.ilc"))
    assert (code, out) == (2, "")
    assert (
        err == f"error: ParseError: cannot read {tmp_path / 'no.ilc'}: No such file or directory\n"
    )


def test_the_real_command_ends_with_the_code_of_the_verdict() -> None:
    """Other codes: test_exits.py, in this process."""
    done = command("check", "-", stdin=RACE)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout
    assert "\x1b" not in done.stdout


def test_a_reader_that_leaves_early_is_no_error(write) -> None:
    import os
    import subprocess
    import sys

    path = write(SOUND)
    read, end = os.pipe()
    os.close(read)
    with os.fdopen(end, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "interlace", "show", path],
            **{"stdout": closed, "stderr": subprocess.PIPE, "timeout": 60, "text": True},
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            check=False,
        )
    assert done.stderr == ""
    assert done.returncode == 0


CALLS = """\
def calls(x: f32[3, 4]):
    main: call("{fn}", x, out=(y := f32[3, 4]))
    return y
"""


@pytest.mark.parametrize(
    ("fn", "told"),
    [
        ("aten.nothing.default", "no operator named 'aten.nothing.default'"),
        ("aten.add", "of torch's dispatcher with its overload, as aten.add.Tensor"),
        ("interlace.matmul", "no operator named 'interlace.matmul'"),
        ("aten.from_file.default", "it maps a file into memory"),
        ("operator.call", "Python's own functions are not reached"),
        ("aten.__getattr__.__func__.__globals__.get", "is no name of an operator"),
        ("import_module.__call__", "libraries are loaded by your own code"),
    ],
)
def test_an_operator_that_is_not_there_or_may_not_be_called_is_an_error(
    write, fn: str, told: str
) -> None:
    code, out, err = run("check", write(CALLS.format(fn=fn)))
    assert (code, out) == (2, "")
    assert err.startswith("error: ProgramError: program.ilc:2: ")
    assert told in err


def test_an_operator_of_others_is_an_error_and_a_remark_where_it_is_named(write) -> None:
    text = CALLS.format(fn="somebody.scale.default")
    code, out, err = run("check", write(text))
    assert (code, out) == (2, "")
    assert "program.ilc:2: a schedule may not call 'somebody.scale.default'" in err
    assert "interlace check --operators somebody.scale.default" in err
    code, out, _ = run("check", write(text), "--operators", "other", "--operators", "somebody")
    assert code == 0
    assert out.startswith("sound (1 ranks, 1 ops, _ ms)\n\nremark: unknown-operator: program.ilc:2")
    assert "'somebody.scale.default' is not known to Interlace" in out
    named = "--operators", "somebody.scale.default"
    code, out, _ = run("check", write(text), *named, "--json")
    (remark,) = json.loads(out)["findings"]
    assert (code, remark["kind"], remark["level"]) == (0, "unknown-operator", "remark")


@pytest.mark.parametrize("fn", ["aten.sinh.default", "prims.sinh.default", "aten.sinh"])
def test_operators_that_are_there(write, fn: str) -> None:
    assert run("check", write(CALLS.format(fn=fn))) == (0, "sound (1 ranks, 1 ops, _ ms)\n", "")


def test_operators_of_our_own_are_there(write) -> None:
    text = """\
def draws(x: f32[4]):
    main: call("interlace.get_rng_state.default", "@device", out=(s := u8[5056]), rng=True)
    main: call("interlace.set_rng_state.default", s, "@device", rng=True)
    return x
"""
    assert run("check", write(text)) == (0, "sound (1 ranks, 2 ops, _ ms)\n", "")
