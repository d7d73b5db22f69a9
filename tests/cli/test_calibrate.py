"""`interlace calibrate`: the file that it writes, and what `explain` makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.cli.test_texts import run

from interlace.cost import Machine, default_machine, default_path, fingerprint
from interlace.cost.machine import Link
from interlace_bench.calibration.sites import site_times, with_sites
from interlace_bench.settings import nbytes

SITE = """def f(tp: Team[4], x: bf16[{part}, 512], w: bf16[512, 1024]):
    full = empty(bf16[{rows}, 512])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.default", full, w, out=(y := bf16[{rows}, 1024]))
    return y
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_sizes_of_messages_have_units() -> None:
    assert "'1MB/s' is no size" in run("calibrate", "--most", "1MB/s", "--device", "cpu", code=2)
    assert nbytes("1MiB") == nbytes("1M") == nbytes("1048576") == 1 << 20


def test_explain_gives_predicted_and_measured(tmp_path: Path) -> None:
    """`exchange` is quickest, eager and as a graph."""
    out = tmp_path / "mine.json"
    site = {"op": "ag_gemm", "m": 4096, "k": 512, "n": 1024, "dtype": "bf16", "world": 4}
    times = {"serial": 100, "get": 90, "put": 80, "fused": 60, "exchange": 50, "auto": 10}
    rows = [
        {**site, "strategy": name, "mode": mode, "median_us": us}
        for mode in ("eager", "graph")
        for name, us in times.items()
    ]
    machine = with_sites(default_machine("cuda").replace(name="mine"), site_times(rows))
    assert len(machine.sites) == 10
    machine.save(out)
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


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "all is measured" in run("calibrate", "--measure", "moon", code=2)
    assert "is measured where it runs" in run("calibrate", "--from", "rows.csv", code=2)
    path = tmp_path / "file"
    path.write_text("")
    out = str(path / "x.json")
    monkeypatch.setattr("interlace_bench.ranks.run", lambda *_: pytest.fail("measured"))
    text = run("calibrate", "--device", "cpu", "--out", out, code=2)
    assert "error" in text.lower()


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
