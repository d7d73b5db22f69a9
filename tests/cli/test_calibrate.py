"""`interlace calibrate`: files from measuring and from rows, and what `explain` makes of them."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_texts import run

from interlace.cost import Machine, default_machine, default_path, fingerprint
from interlace.cost.machine import Link
from interlace_bench.settings import nbytes

SITE = """def f(tp: Team[4], x: bf16[{part}, 512], w: bf16[512, 1024]):
    full = empty(bf16[{rows}, 512])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.default", full, w, out=(y := bf16[{rows}, 1024]))
    return y
"""


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of GPUs are read here as where there are none."""
    monkeypatch.setattr("interlace_bench.commands.calibrate.count_gpus", lambda: 0)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Rows of sites that were measured on GPUs; `exchange` is quickest, eager and as a graph."""
    times = {"serial": 100, "get": 90, "put": 80, "fused": 60, "exchange": 50, "auto": 10}
    path = tmp_path / "overlap.csv"
    with path.open("w", newline="") as file:
        base = {"op": "ag_gemm", "m": 4096, "k": 512, "n": 1024, "dtype": "bf16", "world": 4}
        writer = csv.DictWriter(file, [*base, "strategy", "mode", "median_us", "error", "gpu"])
        writer.writeheader()
        for mode in ("eager", "graph"):
            for name, us in times.items():
                done = {"strategy": name, "mode": mode, "median_us": us}
                writer.writerow({**base, **done, "error": "", "gpu": "NVIDIA H200"})
    return path


def test_rows_make_a_file_where_auto_looks(cache: Path, rows: Path) -> None:
    text = run("calibrate", "--from", str(rows), "--device", "cuda")
    path = default_path("4 x NVIDIA H200")
    assert path.parent == cache / "interlace"
    assert text.endswith(f"wrote {path}\n")
    machine = Machine.load(path)
    assert machine.host == fingerprint("4 x NVIDIA H200")
    assert len(machine.sites) == 10
    again = json.loads(run("calibrate", "--from", str(rows), "--device", "cuda", "--json"))
    assert (again["sites"], again["site times"]) == (2, 10)


def test_files_of_samples_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "samples.csv"
    path.write_text("kind,nbytes,seconds\nput,1024,0.001\n")
    text = run("calibrate", "--from", str(path), "--device", "cpu", code=2)
    assert "samples are no longer read. fix: run `interlace calibrate`" in " ".join(text.split())


def test_sizes_of_messages_have_units() -> None:
    assert "'1MB/s' is no size" in run("calibrate", "--most", "1MB/s", "--device", "cpu", code=2)
    assert nbytes("1MiB") == nbytes("1M") == nbytes("1048576") == 1 << 20


def test_explain_gives_predicted_and_measured(rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "mine.json"
    run("calibrate", "--from", str(rows), "--device", "cuda", "--out", str(out))
    path = tmp_path / "site.ilc"
    path.write_text(SITE.format(part=1024, rows=4096))
    for graph in ([], ["--graph"]):
        data = json.loads(run("explain", str(path), "--calibration", str(out), "--json", *graph))
        (program,) = data["programs"]
        assert program["sites"][0]["strategy"] == "exchange"
        assert program["sites"][0]["reason"] == "measured fastest (mine)"
        known: dict[str, dict[str, Any]] = {c["strategy"]: c for c in program["candidates"]["1"]}
        measured = {name: c["measured_ms"] for name, c in known.items()}
        assert measured["serial"] == pytest.approx(0.1)
        assert measured["peer/put"] == pytest.approx(0.08)
        assert measured["pipeline x2"] is None
        assert all(c["predicted_ms"] > 0 for c in known.values())
    text = run("explain", str(path), "--calibration", str(out))
    assert "candidates, by mine:" in text
    (line,) = [line for line in text.splitlines() if line.split()[1:2] == ["fused"]]
    assert line.split()[4:] == ["0.060", "ms"]


def test_errors(rows: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("op,median_us\nag_gemm,1\n")
    text = run("calibrate", "--from", str(other), "--device", "cuda", code=2)
    assert "do not say which GPU" in text
    assert "all is measured" in run("calibrate", "--measure", "moon", code=2)
    assert "cannot read" in run("calibrate", "--from", str(tmp_path / "none.csv"), code=2)
    path = tmp_path / "file"
    path.write_text("")
    out = str(path / "x.json")
    text = run("calibrate", "--from", str(rows), "--device", "cuda", "--out", out, code=2)
    assert "CalibrationError" in text
    here = ["--device", "cpu", "--out", str(tmp_path / "here.json")]
    text = run("calibrate", "--from", str(rows), *here, code=2)
    assert "measured on 'NVIDIA H200'" in text
    assert "give --device cuda" in text
    assert not (tmp_path / "here.json").exists()


def test_what_is_measured_on_several_hosts(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links between hosts, no sites; a link that was measured before, and not now, stays."""
    base, found, path = default_machine("cpu"), tmp_path / "found.json", default_path()
    path.parent.mkdir(parents=True)
    inside = tuple((name, replace(link, bandwidth=5e9)) for name, link in base.links)
    base.replace(links=inside, host=fingerprint()).save(path)
    across = (("gloo", Link(latency_s=1e-3, bandwidth=1e8, shared=True)),)
    base.replace(between=across).save(found)
    asked: list[Any] = []

    def measure(work: object, settings: Any, *_: object) -> dict[str, Any]:
        asked.append(settings)
        Path(settings.file).write_text(found.read_text())
        return {"rows": [], "skipped": [], "first": True}

    monkeypatch.setattr("interlace_bench.ranks.run", measure)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    run("calibrate", "--device", "cpu")
    assert [settings.sites for settings in asked] == [None], "no sites"
    machine = Machine.load(path)
    assert (machine.links, machine.between) == (inside, across)


@pytest.mark.usefixtures("launched_on_pool")
@pytest.mark.timeout(200)
def test_measuring_on_a_cpu(cache: Path, tmp_path: Path) -> None:
    sizes = ["--most", "4096", "--seconds", "2"]
    shapes = ["--shapes", "ag_gemm:128,64,64"]
    text = run("calibrate", "--device", "cpu", "--world", "2", *sizes, *shapes)
    path = default_path()
    assert f"wrote {path}" in text
    machine = Machine.load(path)
    assert {time.site.kind for time in machine.sites} == {"all_gather_matmul"}
    assert {time.strategy for time in machine.sites} >= {"serial", "peer/get", "peer/put"}
    assert "all_gather@2" in dict(machine.link("gloo").curves)
    site = tmp_path / "site.ilc"
    text = SITE.replace("512", "64").replace("1024", "64").replace("bf16", "f32")
    site.write_text(text.format(part=64, rows=128).replace("Team[4]", "Team[2]"))
    data = json.loads(run("explain", str(site), "--json"))
    known = {c["strategy"]: c for c in data["programs"][0]["candidates"]["1"]}
    assert known["serial"]["measured_ms"] > 0
