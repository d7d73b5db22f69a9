"""`show`, `simulate`, `opt` and `explain` on text files, and what all commands share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.schedules import ROOT, SERIAL, SOUND, STAGES, invoke

from interlace.cost import Timeline, default_machine
from interlace.ir import parse, parse_set


@pytest.fixture
def sound(tmp_path: Path) -> str:
    path = tmp_path / "sound.ilc"
    path.write_text(SOUND)
    return str(path)


def run(*args: str, code: int = 0) -> str:
    ended, out, error = invoke(*args)
    assert ended == code, error
    return out if code == 0 else error


def test_show_prints_the_canonical_text(sound: str) -> None:
    assert run("show", sound) == SOUND


def test_show_of_one_rank_is_what_it_runs(sound: str) -> None:
    text = run("show", sound, "--rank", "1")
    assert parse(text) == parse(SOUND).instantiate(1)
    assert "main: copy(x, full[1])" in text
    assert "rank 2 is not among" in run("show", sound, "--rank", "2", code=2)


def test_show_json(sound: str) -> None:
    (facts,) = json.loads(run("show", sound, "--json"))["programs"]
    assert facts["text"] + "\n" == SOUND
    assert (facts["ranks"], facts["streams"], facts["teams"]) == (
        [0, 1],
        ["main", "comm"],
        {"tp": 2},
    )


def test_show_a_set_as_a_page(tmp_path: Path) -> None:
    path, page = tmp_path / "stages.ilc", tmp_path / "deep" / "stages.html"
    path.write_text(STAGES)
    assert run("show", str(path), "--html", str(page)) == f"wrote {page}\n"
    assert page.read_text().count("<li data-op=") == 2
    assert [program.name for program in parse_set(run("show", str(path)))] == ["first", "second"]


def test_simulate_prints_the_figures(sound: str) -> None:
    lines = run("simulate", sound).splitlines()
    assert lines[0] == "predicted for machine 'cpu':"
    assert lines[1].split() == "run rank makespan compute communication hidden exposed".split()
    assert [line.split()[:2] for line in lines[2:]] == [
        ["predicted", "0"],
        ["predicted", "1"],
        ["predicted", "mean"],
    ]


def test_simulate_writes_timeline_page_and_trace(sound: str, tmp_path: Path) -> None:
    out, page, trace = (tmp_path / name for name in ("t.json", "t.html", "t.pftrace"))
    run("simulate", sound, "-o", str(out), "--html", str(page), "--perfetto", str(trace))
    timeline = Timeline.from_json(out.read_text())
    assert timeline.ranks == (0, 1)
    assert json.loads(trace.read_text())["traceEvents"]
    assert "<!doctype html>" in page.read_text()
    figures = json.loads(run("simulate", sound, "--json"))["figures"]
    assert figures[0]["makespan_s"] == timeline.figures(0).makespan_s


def test_simulate_takes_a_calibration_file(sound: str, tmp_path: Path) -> None:
    slow, path = default_machine("cpu"), tmp_path / "slow.json"
    slow.replace(name="slow", launch_s=0.5).save(path)
    figures = json.loads(run("simulate", sound, "--json", "--calibration", str(path)))
    assert figures["machine"] == "slow"
    assert figures["figures"][0]["makespan_s"] > 1.0


STEP = """def step(dp: Team[1], tp: Team[4], x: f32[2, 8], w: f32[8, 8], g: f32[64]):
    full = alloc(f32[8, 8], symmetric=tp)
    main: copy(x, full[tp.rank])
    main: notify(ready, to=tp.others)
    main: expect(ready, tp.others)
    main: get(full[tp.rank + 1], peer=tp.rank + 1)
    main: free(full)
    main: all_reduce(g, g, reduce="sum", team=dp)
"""


def test_simulate_predicts_for_more_ranks_than_it_simulates(tmp_path: Path) -> None:
    path, machine = tmp_path / "step.ilc", tmp_path / "there.json"
    path.write_text(STEP)
    default_machine("cuda").replace(name="there", host="a ship at sea").save(machine)
    many = [
        "simulate",
        str(path),
        "--machine",
        str(machine),
        "--scale-to",
        "1024",
        "--per-host",
        "8",
    ]
    text = run(*many)
    first, headings, row, *_ = text.splitlines()
    assert first.startswith("predicted for machine 'there', 1024 ranks by 1 in ")
    assert headings.split()[:3] == ["rank", "ranks", "alike"]
    assert row.split()[:2] == ["0", "1024"]
    assert "nccl between hosts" in text
    told = json.loads(run(*many, "--json"))
    assert (told["prediction"]["world"], told["prediction"]["ranks"]) == (1024, {"0": 1024})
    assert told["prediction"]["busy_s"]["nccl between hosts"] > 0
    assert told["verdict"] == "unchecked"
    alone = json.loads(run("simulate", str(path), "--machine", str(machine), "--json"))
    assert alone["figures"][-1]["makespan_s"] < told["prediction"]["makespan_s"]
    html, out = tmp_path / "many.html", tmp_path / "many.json"
    run(*many, "--html", str(html), "-o", str(out))
    assert Timeline.from_json(out.read_text()).ranks == (0,)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--scale-to", "10"], "it is a multiple of 4"),
        (["--per-host", "0"], "a host has 1 rank or more"),
        (["--scale-to", "1024", "--per-host", "3"], "the instances of team tp do not lie on hosts"),
        (["--scale-to", "1024", "--per-host", "2"], "team 'tp' spans hosts"),
    ],
)
def test_worlds_and_hosts_that_cannot_be(tmp_path: Path, given: list[str], words: str) -> None:
    path = tmp_path / "step.ilc"
    path.write_text(STEP)
    assert words in " ".join(run("simulate", str(path), *given, code=2).split())
    path.write_text(STEP.replace("dp: Team[1]", "dp: Team[2].on([0], [1])"))
    told = run("simulate", str(path), "--scale-to", "1024", code=2)
    assert "say how many ranks each" in " ".join(told.split())
    path.write_text(STAGES)
    told = run("simulate", str(path), "--scale-to", "4", code=2)
    assert "write this text for 4 ranks" in told


@pytest.mark.parametrize("content", [None, "{", '{"schema": 99}'], ids=["none", "cut", "schema"])
def test_bad_calibration_files_are_errors(sound: str, tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "bad.json"
    if content is not None:
        path.write_text(content)
    told = run("simulate", sound, "--calibration", str(path), code=2)
    assert told.startswith("error: CalibrationError: ")


def test_opt_prints_the_text_after_each_pass(sound: str, tmp_path: Path) -> None:
    out = tmp_path / "out.ilc"
    line = ("opt", sound, "-p", "schedule,insert_sync", "--check")
    text = run(*line)
    assert text.count("# all_gather_linear after ") == 2
    assert run(*line, "-o", str(out)) == ""
    assert parse_set(text)[1] == parse(out.read_text())
    assert run(*line, "-o", str(out), "--diff").count("insert_sync") == 1
    steps = json.loads(run("opt", sound, "-p", "schedule,insert_sync", "--json"))["steps"]
    assert [step["pass"] for step in steps] == ["", "schedule", "insert_sync"]
    assert steps[0]["text"] == SOUND


def test_opt_says_in_a_line_that_a_pass_changes_nothing(sound: str) -> None:
    text = run("opt", sound, "-p", "schedule,schedule")
    assert text.count("# all_gather_linear after schedule\n") == 1
    assert text.endswith("# all_gather_linear: schedule changes nothing\n\n")


def test_opt_diff_shows_what_changed(sound: str) -> None:
    text = run("opt", sound, "-p", "schedule,schedule", "--diff")
    assert text.startswith("--- all_gather_linear\n+++ all_gather_linear after schedule\n")
    assert "\n-    comm: wait(e0)\n" in text
    assert text.endswith("# all_gather_linear: schedule changes nothing\n\n")


@pytest.mark.parametrize("passes", ["no_such_pass", "schedule{no=1}", "schedule{", ","])
def test_bad_pipelines_are_errors(sound: str, passes: str) -> None:
    assert run("opt", sound, "-p", passes, code=2).startswith("error: PassError: ")


def test_explain_a_hand_written_schedule(tmp_path: Path) -> None:
    site = 'site(7, "all_gather_matmul", "mlp.up", strategy="peer", protocol="get", chunks=2, '
    site += 'reason="it is faster", serial_ms=3.0, predicted_ms=2.0)'
    head, body = SOUND.split("\n", 1)
    path = tmp_path / "explained.ilc"
    path.write_text(f'{head}\n    {site}\n    remark("decompose", "why not", site=7)\n{body}')
    lines = run("explain", str(path)).splitlines()
    assert lines[0] == "all_gather_linear:"
    assert lines[2].split(maxsplit=9) == [
        *("7", "mlp.up", "all_gather_matmul", "peer/get", "x2"),
        *("3.000", "ms", "2.000", "ms", "1.50x  it is faster"),
    ]
    assert lines[3] == "decompose (site 7): why not"
    assert lines[-1].startswith("sound (2 ranks by symmetry of tp: 1 visited, 24 ops")
    data = json.loads(run("explain", str(path), "--json"))
    assert data["verdict"] == "sound"
    assert data["programs"][0]["sites"][0]["predicted_ms"] == 2.0


@pytest.fixture
def serial(tmp_path: Path) -> str:
    path = tmp_path / "serial.ilc"
    path.write_text(SERIAL)
    return str(path)


def test_opt_lowers_by_default(serial: str, tmp_path: Path) -> None:
    out = tmp_path / "lowered.ilc"
    steps = json.loads(run("opt", serial, "--json", "--check", "-o", str(out)))["steps"]
    assert steps[1]["pass"] == "find_sites"
    assert steps[-1]["pass"] == "fuse"
    (site,) = parse(out.read_text()).sites
    assert (site.kind, site.strategy != "serial") == ("all_gather_matmul", True)
    assert run("check", str(out)).startswith("sound (2 ranks")
    # and what was written is a schedule like any other
    before, after = (
        json.loads(run("simulate", path, "--json"))["figures"][0] for path in (serial, str(out))
    )
    assert after["makespan_s"] < before["makespan_s"]
    assert after["hidden"] > before["hidden"] == 0


def test_explain_lowers_what_is_serial(serial: str) -> None:
    data = json.loads(run("explain", serial, "--json"))
    (program,) = data["programs"]
    assert (program["lowered"], data["verdict"]) == (True, "sound")
    (site,) = program["sites"]
    assert site["predicted_ms"] < site["serial_ms"]
    assert site["reason"]
    text = run("explain", serial)
    assert text.startswith("mlp is serial; this is what lowering makes of it\n")
    assert f"{site['serial_ms'] / site['predicted_ms']:.2f}x" in text


def test_explain_says_why_alone(serial: str, sound: str, tmp_path: Path) -> None:
    lowered = tmp_path / "lowered.ilc"
    run("opt", serial, "-o", str(lowered))
    assert "no site stays serial" in run("explain", "--why", str(lowered))
    (program,) = json.loads(run("explain", "--why", serial, "--strategy", "serial", "--json"))[
        "programs"
    ]
    assert [site["strategy"] for site in program["sites"]] == ["serial"]
    assert [*program["candidates"]] == ["1"]
    (program,) = json.loads(run("explain", "--why", serial, "--strategy", "ring", "--json"))[
        "programs"
    ]
    assert (program["sites"], program["candidates"], program["lowered"]) == ([], {}, True)


@pytest.mark.parametrize("given", [["--strategy", "ring"], ["--graph"]])
def test_explain_refuses_to_lower_again(sound: str, given: list[str]) -> None:
    told = run("explain", sound, *given, code=2)
    assert told.startswith(f"error: OptionError: {given[0]}: {sound} is lowered already")
    assert "serial.ilc" in told


def test_explain_counts_what_a_text_without_sites_sends(sound: str) -> None:
    text = run("explain", sound)
    assert "the text states no sites; it has 1 get\n" in text


def test_only_json_is_printed_where_json_is_asked_for(
    sound: str, serial: str, tmp_path: Path
) -> None:
    for name in ("show", "simulate"):
        page = tmp_path / f"{name}.html"
        json.loads(run(name, sound, "--html", str(page), "--json"))
        assert page.exists()


def test_a_larger_team_for_whose_size_the_text_is_not(sound: str) -> None:
    for given in (["simulate", sound, "--scale-to", "8"], ["check", sound, "--mesh", "tp=8"]):
        told = " ".join(run(*given, code=2).split())
        assert told.startswith("error: TeamError: the buffers and views of all_gather_linear are")
        assert "are for tp of 2 and do not fit tp of 8" in told


def test_nothing_on_text_needs_torch(sound: str, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'numpy', 'triton'): sys.modules[name] = None\n"
        "from typer.testing import CliRunner\n"
        "from interlace.cli import app\n"
        f"sound, page = {sound!r}, {str(tmp_path / 'p.html')!r}\n"
        "for args in (['check', sound], ['show', sound], ['show', sound, '--html', page],\n"
        "             ['simulate', sound], ['opt', sound, '-p', 'schedule,insert_sync'],\n"
        "             ['explain', sound], ['--help']):\n"
        "    done = CliRunner().invoke(app, args)\n"
        "    assert done.exit_code == 0, (args, done.output, done.exception)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        **{"env": {"PYTHONPATH": str(ROOT / "src"), "PATH": ""}, "timeout": 60},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_command_line_is_light_to_import() -> None:
    code = (
        "import sys, interlace.cli\n"
        "print(sorted({'torch', 'numpy', 'interlace.ir', 'interlace.verify'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        **{"env": {"PYTHONPATH": str(ROOT / "src"), "PATH": ""}, "timeout": 60},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("line", ["fuzz", "demo --in-order", "explain f.ilc --html=page.html"])
def test_an_option_that_went_names_its_replacement(line: str) -> None:
    assert " went: " in run(*line.split(), code=2)


def test_version_and_help() -> None:
    import interlace

    for option in ("--version", "-V"):
        assert invoke(option)[1] == f"interlace {interlace.__version__}\n"
    code, out, _ = invoke("--help")
    assert code == 0
    for name in ("check", "opt", "show", "simulate", "explain", "doctor"):
        assert f" {name} " in out
    assert "\x1b" not in out
