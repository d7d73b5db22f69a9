"""The example scripts, on real processes."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(
    script: str, ranks: int, options: dict[str, Any], time_out_s: float
) -> subprocess.CompletedProcess[str]:
    """The script under torchrun."""
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), str(EXAMPLES / script), *given),
        ],
        capture_output=True,
        text=True,
        timeout=time_out_s,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )


@pytest.mark.timeout(150)
def test_llama_trains_alike_in_every_way(tmp_path: Path) -> None:
    """Two ranks of tensor parallelism under FSDP2's two: the losses of the unparallelised model."""
    losses = tmp_path / "losses.csv"
    sizes = {"steps": 4, "batch": 4, "sequence": 32, "dim": 64, "layers": 1, "csv": losses}
    done = example("train_llama.py", 4, sizes, 140)
    assert done.returncode == 0, done.stderr
    with losses.open() as file:
        rows = list(csv.DictReader(file))
    assert [row.pop("step") for row in rows] == ["1", "2", "3", "4", "held out"]
    steps = [{way: float(loss) for way, loss in row.items()} for row in rows]
    for step in steps:
        assert step["overlapped"] == pytest.approx(step["single"], rel=2e-3)
        assert step["plain"] == pytest.approx(step["single"], rel=2e-3)
        assert step["fp8"] == pytest.approx(step["single"], rel=1e-2)
    assert steps[-1]["overlapped"] < steps[0]["overlapped"]
    assert done.stdout.count("text held out") == 4


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_muon_trains_alike_with_owners() -> None:
    """The losses of Muon on every rank; with gathers under the forward the same in print."""
    sizes = {"steps": 6, "batch": 4, "sequence": 32, "dim": 64, "layers": 1}
    ways = {"ways": "muon,synchronous,overlapped", "bucket_bytes": 65536}
    done = example("train_muon.py", 2, sizes | ways, 90)
    assert done.returncode == 0, done.stderr
    rows = map(str.split, done.stdout.splitlines())
    losses = {way: (first, last) for way, _, first, _, last, *_ in rows}
    assert losses["synchronous"] == losses["overlapped"]
    assert float(losses["muon"][1]) == pytest.approx(float(losses["overlapped"][1]), rel=2e-3)
    assert float(losses["overlapped"][1]) < float(losses["overlapped"][0])
