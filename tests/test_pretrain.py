"""`examples/pretrain.py`: its losses are those of eager torch, bit for bit, also after faults."""

from __future__ import annotations

import csv
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.support.pool import Pool, Ranks
from tests.test_examples import ENVIRON, EXAMPLES, run_script

FAULTY = Path(__file__).parent / "support/faulty.py"
SMALL = "--dim 32 --layers 1 --head 16 --batch 4 --checkpoint 1"
TRAINED = (
    "--layers 2 --checkpoint 2 --steps 20 --save-every 5 --evaluate-every 10 --lengths 32 16 "
    "--timeout 120"
)
FAILED = "--steps 8 --save-every 2 --evaluate-every 4 --lengths 32 --timeout 40"
Result = tuple[dict[int, str], list[str]]
"""Losses by step, in full digits, and the lines of the last evaluation and of the text."""


def pretrain(
    folder: Path,
    options: str,
    fault: str = "",
    timeout_s: float = 280,
    code: int = 0,
    ranks: int = 4,
) -> str:
    """What ranks print that train with these options; `fault` is that of `faulty.py`."""
    script = [str(FAULTY), fault, "pretrain.py"] if fault else [str(EXAMPLES / "pretrain.py")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    restarts = str(fault.count(",") + 1)
    strict = {"MKL_CBWR": "AVX512,STRICT", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    process = subprocess.Popen(
        [
            *(*torchrun, "--nproc-per-node", str(ranks), "--max-restarts", restarts, *script),
            *(*SMALL.split(), "--folder", str(folder), *options.split()),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **ENVIRON, **strict},
    )
    try:
        printed, _ = process.communicate(timeout=timeout_s)
    except BaseException:
        process.terminate()  # torchrun ends its ranks, which have sessions of their own
        process.communicate()
        raise
    assert process.returncode == code, printed
    return printed


def on_pool(ranks: Ranks, folder: Path, options: str) -> str:
    """The same of processes that need no start."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = (*SMALL.split(), "--folder", str(folder), *options.split())
    script = str(EXAMPLES / "pretrain.py")
    return ranks.run(run_script, script, store.port, *given, timeout_s=180, replace=True)[0]


def result(folder: Path, printed: str) -> Result:
    """What a run comes to. Each step has one row, however often it was repeated."""
    rows = [line.split(",")[:2] for line in (folder / "losses.csv").read_text().splitlines()]
    last = [line for line in printed.splitlines() if line.startswith(("held out", "generated"))]
    assert [int(step) for step, _ in rows] == [*range(1, len(rows) + 1)]
    return {int(step): loss for step, loss in rows}, last[-2:]


@pytest.fixture(scope="module")
def faultless(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """The short run of `FAILED`, by eager torch, in which nothing fails."""
    folder = tmp_path_factory.mktemp("faultless")
    return result(folder, pretrain(folder, f"{FAILED} --compile eager"))


@pytest.mark.strict
@pytest.mark.timeout(200)
def test_a_few_losses_equal_eager_torch_bit_for_bit(pool: Pool, tmp_path: Path) -> None:
    options = "--layers 2 --checkpoint 2 --steps 4 --save-every 1 --lengths 32 --timeout 60"
    printed = on_pool(pool(4), tmp_path / "a", f"{options} --every 2")
    eager = on_pool(pool(4), tmp_path / "b", f"{options} --compile eager")
    assert result(tmp_path / "a", printed) == result(tmp_path / "b", eager)
    steps = [line for line in printed.splitlines() if "hidden" in line]
    assert len(steps) == 2
    assert all(line.endswith("%") for line in steps)
    assert sorted(path.name for path in (tmp_path / "a").glob("*/")) == ["3", "4"]


@pytest.mark.strict
@pytest.mark.timeout(200)
def test_a_rank_that_is_killed_costs_no_loss(pool: Pool, tmp_path: Path) -> None:
    """One of two, in its second checkpoint: the job goes on from the first, by eager torch."""
    options = "--steps 3 --save-every 1 --lengths 32 --timeout 40 --compile eager"
    printed = pretrain(tmp_path / "a", options, "save:2:kill", ranks=2)
    known = on_pool(pool(2), tmp_path / "b", options)
    assert "fault: kill in save" in printed
    assert printed.count("resumed at step 1") == 1
    assert result(tmp_path / "a", printed) == result(tmp_path / "b", known)


@pytest.mark.slow
@pytest.mark.strict
@pytest.mark.timeout(600)
def test_losses_equal_eager_torch_bit_for_bit(tmp_path: Path) -> None:
    """Two blocks share three graphs: of the first length, of any, and without gradients."""
    never = "backward:1000000:kill"  # it looks at each loss
    compiled = result(tmp_path / "a", pretrain(tmp_path / "a", TRAINED, never))
    eager = result(tmp_path / "b", pretrain(tmp_path / "b", f"{TRAINED} --compile eager"))
    assert compiled == eager
    assert len(eager[0]) == 20
    assert sorted(path.name for path in (tmp_path / "a").glob("*/")) == ["15", "20"]


def test_figures_of_the_page_are_rows() -> None:
    """Rows of the CPU: of 1,000 steps with two lengths, and of 100 with one."""
    root = EXAMPLES.parent
    page = (root / "docs/tutorial/pretrain.md").read_text()
    with (root / "benchmarks/results/pretrain.csv").open() as file:
        found = [row for row in csv.DictReader(file) if row["device"] == "cpu"]
    rows = {(row["variant"], row["steps"]): row for row in found}

    def line(figures: Iterable[str]) -> str:
        return f"| {' | '.join(figures)} |"

    long = [rows[variant, "1000"] for variant in ("interlace", "eager")]
    assert line(f"{row['memory_mb']} MB" for row in long) in page
    assert rows["interlace", "1000"]["equal_steps"] == "1000"
    with (root / "benchmarks/results/pretrain/cpu.csv").open() as file:
        losses = [float(row["interlace"]) for row in csv.DictReader(file)]
    assert f"| {losses[0]:.6f}, {losses[-1]:.6f} |" in page
    short = [rows[variant, "100"] for variant in ("interlace", "inductor", "eager")]
    assert line(f"{float(row['tokens_per_s']):.0f}" for row in short) in page
    assert line(f"{row['memory_mb']} MB" for row in short) in page
    assert short[0]["equal_steps"] == "100"
    assert f"at most {float(short[1]['off']):.1e} off".replace("e-0", "e-") in page


POINTS = ("data:4", "forward:3", "backward:4", "optimizer:2", "evaluation:5", "save:1", "commit:1")
"""In the fourth step, or at its end; so each attempt begins at the third."""
FAULTS = {
    **{kind: [f"{point}:{kind}" for point in POINTS] for kind in ("kill", "oom")},
    "stop, in a step": [f"{point}:stop" for point in POINTS[:4]],
    "stop, between steps": [f"{point}:stop" for point in POINTS[4:]],
    "disk": ["save:2:disk", "log:3:disk"],
}


@pytest.mark.slow
@pytest.mark.strict
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS)
def test_a_run_resumes_to_the_same_losses(
    tmp_path: Path, faultless: Result, faults: list[str]
) -> None:
    """Each attempt of the job ends by the next fault, and the last one by the end of the run."""
    printed = pretrain(tmp_path, FAILED, ",".join(faults), timeout_s=1100)
    struck = [line for line in printed.splitlines() if line.startswith("fault: ")]
    assert struck == ["fault: {2} in {0}".format(*each.split(":")) for each in faults]
    assert printed.count("resumed at step") == len(faults)
    assert result(tmp_path, printed) == faultless


@pytest.mark.slow
@pytest.mark.strict
@pytest.mark.timeout(600)
def test_muon_with_owners_keeps_the_bits_and_goes_on(tmp_path: Path) -> None:
    """Compiled blocks as eager ones, and a run that was saved midway."""
    options = f"{FAILED} --muon"
    compiled = result(tmp_path / "a", pretrain(tmp_path / "a", options))
    eager = result(tmp_path / "b", pretrain(tmp_path / "b", f"{options} --compile eager"))
    shutil.rmtree(tmp_path / "a/8")
    printed = pretrain(tmp_path / "a", options)
    assert "resumed at step 6" in printed
    assert compiled == eager == result(tmp_path / "a", printed)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fp8_trains_like_float32(tmp_path: Path, faultless: Result) -> None:
    fp8, _ = result(tmp_path, pretrain(tmp_path, f"{FAILED} --fp8"))
    for step, loss in faultless[0].items():
        assert float(fp8[step]) == pytest.approx(float(loss), rel=1e-2)


@pytest.mark.slow
@pytest.mark.strict
@pytest.mark.timeout(1200)
def test_a_run_that_is_interrupted_goes_on_when_started_again(
    tmp_path: Path, faultless: Result
) -> None:
    """Ctrl-C ends torchrun and all ranks, wherever they are."""
    for point in POINTS:
        printed = pretrain(tmp_path, FAILED, f"{point}:interrupt", code=1)
        assert f"fault: interrupt in {point.partition(':')[0]}" in printed
        assert signal.Signals.SIGINT.name in printed
    printed = pretrain(tmp_path, FAILED)
    assert "resumed at step" in printed
    assert result(tmp_path, printed) == faultless
