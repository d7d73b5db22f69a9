"""`interlace run`: schedules on real ranks, timed, drawn and compared."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cli.schedules import RACE, SOUND, STAGES, invoke
from tests.support.pool import Pool

from interlace.cost import Timeline
from interlace.errors import InputError
from interlace.ir import parse_set
from interlace_bench.commands.run import the_one
from interlace_bench.ranks import here
from interlace_bench.schedule import RunSettings, compare, work

CPU = torch.device("cpu")

SERIAL = """\
def all_gather_linear(tp: Team[2], x: f32[64, 256], w: f32[256, 512]):
    full = empty(f32[128, 256])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.default", full, w, out=(product := f32[128, 512]))
    return product
"""
WRONG = SOUND.replace("full[tp.rank], w,", "full[tp.rank + 1], w,")
"""It computes the other rank's rows twice."""
WRONG = WRONG.replace("    main: wait(e1)\n", "").replace(
    "    main: call", "    main: wait(e1)\n    main: call", 1
)
GATHER = """\
def gather(tp: Team[2], x: f32[4, 8].strides(1, 0), n: i64[3], y: out[f32[8, 8]]):
    slot = alloc(f32[4, 8], symmetric=tp)
    main: call("aten.add_.Tensor", n, 1, out=n, mutates=True)
    main: copy(x, y[tp.rank])
    main: put(x, slot, peer=tp.rank + 1)
    main: notify(came, to=tp.rank + 1)
    main: expect(came, tp.rank - 1)
    main: copy(slot, y[tp.rank - 1])
    main: free(slot)
    return y, n, None, y[0], x
"""


def settings(text: str, against: str = "", **given: Any) -> RunSettings:
    """What runs a text, and compares it with another."""
    other = tuple(parse_set(against)) if against else ()
    name = "another" if against else ""
    return RunSettings(
        programs=tuple(parse_set(text)), against=other, against_name=name, runs=3, **given
    )


def reports(*each: RunSettings) -> list[Any]:
    """What rank 0 reports of each, one after another."""
    return [work(one, here(CPU), lambda event: None) for one in each]


def refusal(one: RunSettings) -> str:
    """The error of it, on this rank."""
    with pytest.raises(InputError) as found:
        work(one, here(CPU), lambda event: None)
    dist.barrier()
    return str(found.value)


def verdicts(report: dict[str, Any]) -> list[list[str]]:
    return [[item["verdict"] for item in rank["compared"].values()] for rank in report["ranks"]]


def test_results_times_and_a_timeline(pool: Pool, tmp_path: Path, seed: int) -> None:
    page = tmp_path / "page.html"
    drawn = {"html": str(page), "seed": seed % 1000}
    data = tmp_path / "run.json"
    (report, again, wrong, in_order, stages, gathered), nothing = pool(2).run(
        reports,
        settings(SOUND, SERIAL, **drawn),
        settings(SOUND, seed=seed % 1000, out=str(data)),
        settings(SOUND, WRONG),
        settings(SOUND, SOUND, in_order=True),
        settings(STAGES),
        settings(GATHER),
    )
    assert nothing == [None] * 6
    assert verdicts(report) == [["equal"]] * 2
    outputs = [rank["outputs"] for rank in report["ranks"]]
    assert [rank["outputs"] for rank in again["ranks"]] == outputs, "the seed says what is drawn"
    assert outputs[0]["y"][0] == "f32[128, 512]"
    assert outputs[0] != outputs[1], "each rank draws its own inputs"
    assert list(report["ranks"][0]["inputs"]) == ["x", "w"]
    assert 0 < report["least_ms"] <= report["median_ms"] <= report["most_ms"]
    assert report["against"]["runs"] == report["runs"] == 3
    assert report["files"] == [str(page)]
    panels = re.findall('"source":"([a-z]+)"', page.read_text())
    assert panels == ["measured", "predicted"]
    assert page.read_text().count(f'"label":"{report["against"]["name"]}"') == len(panels)
    assert {row["rank"] for row in report["figures"]} >= {0, 1}
    measured = Timeline.from_json(data.read_text())
    assert (again["files"], measured.source, measured.ranks) == ([str(data)], "measured", (0, 1))
    assert verdicts(wrong) == [["differs"]] * 2
    (off,) = wrong["ranks"][0]["compared"].values()
    assert off["off"] > 0.1
    assert verdicts(in_order) == [["equal"]] * 2
    assert [list(rank["outputs"]) for rank in stages["ranks"]] == [[], ["y"]]
    one, other = (rank["outputs"] for rank in gathered["ranks"])
    assert one["y"] == other["y"]
    assert list(one) == ["y", "n", "y[0]"], "an input counts as a result where it is written"
    assert one["n"][0] == "i64[3]"


def test_schedules_with_other_inputs_are_not_compared(pool: Pool) -> None:
    for told in pool(2).run(refusal, settings(SOUND, GATHER)):
        assert "another takes other inputs: x, w, n" in told


@pytest.mark.parametrize(
    ("found", "wanted", "verdict", "off"),
    [
        ([1.0, float("nan")], [1.0, float("nan")], "equal", 0.0),
        ([1.0, 2.0 + 1e-6], [1.0, 2.0], "close", 5e-7),
        ([1.0, 2.1], [1.0, 2.0], "differs", 0.05),
        ([float("nan"), 2.0], [1.0, 2.0], "differs", None),
        ([float("inf"), 2.0], [float("inf"), 2.0 + 1e-6], "close", 5e-7),
        ([0.0, 1e-9], [0.0, 0.0], "differs", None),
        ([-0.0], [0.0], "close", 0.0),
        ([1.0], [1.0, 2.0], "differs", None),
        ([1, 2], [1, 3], "differs", 1 / 3),
        ([], [], "equal", 0.0),
    ],
    ids=str,
)
def test_how_results_differ(found: list[Any], wanted: list[Any], verdict: str, off: Any) -> None:
    told = compare(torch.tensor(found), torch.tensor(wanted))
    assert told.verdict == verdict
    assert told.off == (None if off is None else pytest.approx(off, rel=0.1))


def test_what_cannot_run(tmp_path: Path) -> None:
    path = tmp_path / "sound.ilc"
    path.write_text(SOUND)
    code, _, error = invoke("run", "-", text=RACE)
    assert (code, "race: nothing orders" in error) == (1, True)
    for args, told in {
        ("--check-against", "serial"): f"there is no {tmp_path / 'sound.serial.ilc'} to compare",
        ("--check-against", "gone.ilc"): "cannot read gone.ilc",
        ("--world", "3"): "a world of 3 ranks does not divide into teams tp[2]",
        ("--runs", "0"): "Invalid value for '--runs'",
        ("--seed", "9" * 23): "Invalid value for '--seed'",
        ("--html", "."): ". is a directory: name a file in it",
        ("--device", "tpu"): "Invalid value for '--device'",
    }.items():
        code, out, error = invoke("run", str(path), *args)
        assert (code, out) == (2, "")
        assert told in error
    code, _, error = invoke("run", "-", text=STAGES.split("\n\n\n")[1])
    assert (code, "unsound" in error) == (1, True)
    code, _, error = invoke("run", str(path), "--inputs", "x.safetensors")
    assert (code, "run --inputs went" in error) == (2, True)


def test_a_folder_stands_for_its_one_schedule(tmp_path: Path) -> None:
    assert "holds no schedule" in invoke("run", str(tmp_path))[2]
    (tmp_path / "a.serial.ilc").write_text(SERIAL)
    (tmp_path / "a.ilc").write_text(SOUND)
    assert the_one(tmp_path) == tmp_path / "a.ilc"
    (tmp_path / "b.ilc").write_text(SOUND)
    code, _, error = invoke("run", str(tmp_path))
    assert code == 2
    assert f"holds 2 schedules: name one: {tmp_path / 'a.ilc'}, {tmp_path / 'b.ilc'}" in error


@pytest.mark.usefixtures("launched_on_pool")
def test_the_command(tmp_path: Path) -> None:
    path, page = tmp_path / "sound.ilc", tmp_path / "deep" / "page.html"
    path.write_text(SOUND)
    path.with_suffix(".serial.ilc").write_text(WRONG)
    args = ("run", str(path), "--device", "cpu", "--runs", "2")
    code, out, error = invoke(*args, "--check-against", "serial", "--html", str(page))
    assert code == 1, error
    lines = out.splitlines()
    assert lines[0] == "sound; 2 ranks; drawn by seed: x, w"
    assert lines[2].split() == ["result", "type", "digest", "by", "rank", "against", "serial"]
    assert lines[3].startswith("y       f32[128, 512]")
    assert lines[3].endswith("DIFFERS")
    assert "rank 0, y: off by " in out
    assert "(median of 2 runs, " in out
    assert " times as long" in out
    assert lines[-1] == f"wrote {page}"
    assert page.exists()


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    import subprocess

    path = tmp_path / "sound.ilc"
    path.write_text(SOUND)
    ranks = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    run = ("-m", "interlace", "run", str(path), "--device", "cpu")
    done = subprocess.run(
        [sys.executable, *ranks, *run], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("sound; 4 ranks; drawn by seed: x, w\n")
