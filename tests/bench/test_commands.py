"""The commands end to end on two ranks of a CPU: rows, tables, files, errors; and torchrun."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.schedules import ROOT
from tests.support.pool import Pool
from typer.testing import CliRunner

from interlace.cli import app
from interlace_bench.layers import inference
from interlace_bench.ranks import here
from interlace_bench.rows import read
from interlace_bench.settings import LayerSettings, nbytes

pytestmark = pytest.mark.timeout(300)
TINY = ("--device", "cpu", "--preset", "tiny", "--dtype", "f32")


def bench_here(*args: str, code: int = 0) -> Any:
    """The command in this process, where torch is there; its ranks are processes all the same."""
    done = CliRunner().invoke(app, ["bench", *args])
    assert done.exit_code == code, done.output
    return done


@pytest.mark.usefixtures("launched_on_pool")
def test_overlap(tmp_path: Path) -> None:
    only = "put,auto,sequential"
    done = bench_here("overlap", *TINY, "--only", only, "--out", str(tmp_path), "--seconds", "20")
    assert done.stderr == "", "there is no progress bar off a terminal"
    rows = read(tmp_path / "overlap.csv")
    assert {row["op"] for row in rows} == {"ag_gemm", "gemm_rs", "gemm_ar"}
    timed = {(row["op"], row["strategy"]): row for row in rows}
    assert set(only.split(",")) | {"gemm torch"} == {strategy for _, strategy in timed}
    for row in rows:
        assert row["error"] == ""
        assert row["calibrated"] == "no"
        assert 0 < float(row["least_us"]) <= float(row["median_us"]) <= float(row["p90_us"])
        assert float(row["r"]) > 0
        assert row["torch"] and row["date"]  # noqa: PT018
        assert bool(row["commit"]) == (ROOT / ".git").exists()
        if not row["strategy"].startswith("gemm"):
            assert int(row["host_runs"]) > 5
            assert float(row["off"]) <= 2
    assert float(timed["ag_gemm", "sequential"]["speedup_eager"]) == pytest.approx(1.0)
    assert f"wrote {tmp_path}/overlap.csv" in done.stdout


@pytest.mark.slow
def test_overlap_under_torchrun(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    given = ("--only", "put,sequential", "--out", str(tmp_path), "--check", "--verbose")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "interlace", "bench", "overlap", *TINY, *given),
        ],
        **{"env": environment, "cwd": ROOT, "timeout": 250},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stdout.count("wrote ") == 1, "rank 0 alone prints"
    assert "gemm_ar 64,48,32 f32: put/eager" in done.stderr
    assert "bar" in done.stdout


@pytest.mark.usefixtures("launched_on_pool")
def test_interconnect(tmp_path: Path) -> None:
    given = ("--device", "cpu", "--most", "4KiB", "--json", "--out", str(tmp_path))
    done = bench_here("interconnect", *given)
    report = json.loads(done.stdout)
    kinds = {(row["kind"], row["backend"]) for row in report["rows"]}
    assert {("get", "peer"), ("put", "peer"), ("send", "gloo")} <= kinds
    for backend in ("gloo", "peer"):
        for kind in ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"):
            assert (kind, backend) in kinds
    assert {row["pattern"] for row in report["rows"]} == {"ring", "team", ""}
    absent = {row["backend"] for row in report["rows"] if row["error"]}
    assert {"nccl"} <= absent <= {"nccl", "ucc"}
    assert all(row["us"] > 0 for row in report["rows"] if not row["error"])
    assert len(read(tmp_path / "interconnect.csv")) == len(report["rows"])


def test_rows_are_written_with_out_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = {"rows": [], "facts": {"gpu": "cpu", "torch": "2"}}
    monkeypatch.setattr("interlace_bench.ranks.run", lambda *_: dict(report))
    monkeypatch.chdir(tmp_path)
    assert "wrote" not in bench_here("interconnect").stdout
    assert list(tmp_path.iterdir()) == []
    assert "wrote rows/interconnect.csv" in bench_here("interconnect", "--out", "rows").stdout


def layer(ways: str) -> Any:
    """The report of `bench layer` on this rank."""
    settings = LayerSettings(only=ways, seconds=4)
    return inference.work(settings, here(torch.device("cpu")), lambda event: None)


@pytest.mark.parametrize(
    "ways", ["eager", pytest.param("eager,interlace,interlace.compile", marks=pytest.mark.slow)]
)
def test_layer(pool: Pool, ways: str) -> None:
    report, nothing = pool(2).run(layer, ways, replace="," in ways, timeout_s=110)
    assert nothing is None
    known = [(row["step"], row["way"]) for row in report["rows"]]
    assert known == [(step, way) for step in ("prefill", "decode") for way in ways.split(",")]
    for row in report["rows"]:
        assert row["error"] == ""
        assert row["median_us"] > 0
        assert math.isnan(row["speedup"]), "Inductor did not run"
        assert math.isnan(row["device_us"]), "there is no device but the host"


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("overlap", "--device", "cpu", "--preset", "none"), "--preset none: choose from bars"),
        (("overlap", "--device", "cpu", "--shapes", "ag_gemm:1"), "ag_gemm:M,K,N"),
        (("overlap", "--device", "cpu", "--only", "magic"), "--only magic"),
        (("overlap", "--device", "cpu", "--world", "1"), "Invalid value for '--world'"),
        (("overlap", "--device", "tpu"), "Invalid value for '--device'"),
        (("interconnect", "--device", "cpu", "--most", "4XB"), "'4XB' is no size"),
        (("layer", "--device", "cpu", "--only", "magic"), "--only magic"),
    ],
)
def test_errors_say_what_to_mend(
    args: tuple[str, ...], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    done = bench_here(*args, code=2)
    assert isinstance(done.exception, SystemExit)
    assert told in done.stderr
    assert "Traceback" not in done.stderr + capfd.readouterr().err, "nor do ranks print one"


def test_a_run_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    done = bench_here("overlap", *TINY, "--timeout", "2", "--out", str(tmp_path), code=2)
    assert "2 s" in done.stderr or "ended with code" in done.stderr


def test_sizes_as_text() -> None:
    assert [nbytes(text) for text in ("4096", "1KiB", "64MiB", "1G")] == [
        *(4096, 1024, 64 << 20, 1 << 30),
    ]
