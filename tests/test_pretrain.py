"""`examples/pretrain.py`: its losses are those of eager torch, bit for bit, also after faults."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.test_examples import ENVIRON, EXAMPLES

FAULTY = Path(__file__).parent / "support/faulty.py"
SMALL = "--steps 20 --dim 32 --layers 1 --head 16 --batch 4 --save-every 5 --evaluate-every 10"
LENGTHS = "--lengths 32 16 --checkpoint 1 --every 5 --timeout 20"


def pretrain(folder: Path, *options: str, fault: str = "", timeout_s: float = 140) -> str:
    """What four ranks print that train with these options; `fault` is that of `faulty.py`."""
    script = [str(FAULTY), fault, "pretrain.py"] if fault else [str(EXAMPLES / "pretrain.py")]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    given = [*SMALL.split(), *LENGTHS.split(), "--folder", str(folder), *options]
    strict = {"MKL_CBWR": "AVX512,STRICT", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    process = subprocess.Popen(
        [*torchrun, "--nproc-per-node", "4", "--max-restarts", "1", *script, *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ENVIRON, **strict},
    )
    try:
        printed, errors = process.communicate(timeout=timeout_s)
    except BaseException:
        process.terminate()  # torchrun ends its ranks, which have sessions of their own
        process.communicate()
        raise
    assert process.returncode == 0, printed + errors
    return printed


def losses(folder: Path) -> dict[int, str]:
    """The loss of each step in full digits; of a step that was repeated, the last."""
    rows = [line.split(",") for line in (folder / "losses.csv").read_text().splitlines()]
    return {int(step): loss for step, loss, _ in rows}


def held_out(printed: str) -> list[str]:
    """The lines of the last evaluation and of what was generated."""
    return [line for line in printed.splitlines() if line.startswith(("held out", "generated"))][
        -2:
    ]


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, str], list[str]]:
    """Losses, and what the run says at its end, of the blocks run by eager torch."""
    folder = tmp_path_factory.mktemp("eager")
    printed = pretrain(folder, "--compile", "eager")
    return losses(folder), held_out(printed)


@pytest.mark.strict
@pytest.mark.timeout(300)
def test_losses_equal_eager_torch_bit_for_bit(
    tmp_path: Path, eager: tuple[dict[int, str], list[str]]
) -> None:
    printed = pretrain(tmp_path, fault="backward:1000000:kill")  # never: it looks at each loss
    assert (losses(tmp_path), held_out(printed)) == eager
    assert len(eager[0]) == 20
    steps = [line for line in printed.splitlines() if "hidden" in line]
    assert len(steps) == 4
    assert all(line.endswith("%") for line in steps)
    assert sorted(path.name for path in tmp_path.glob("*/")) == ["15", "20"]


FAULTS = ["forward:22:kill", "backward:25:kill", "optimizer:13:kill"]


@pytest.mark.slow
@pytest.mark.strict
@pytest.mark.timeout(400)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_resumes_to_the_same_losses(
    tmp_path: Path, eager: tuple[dict[int, str], list[str]], fault: str
) -> None:
    printed = pretrain(tmp_path, fault=fault, timeout_s=280)
    phase, _, kind = fault.split(":")
    assert f"fault: {kind} in {phase}" in printed
    assert "resumed at step" in printed
    assert (losses(tmp_path), held_out(printed)) == eager
