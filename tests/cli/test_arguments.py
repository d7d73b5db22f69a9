"""Wrong arguments are answered without torch (seconds to import), with the nearest known names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.cli.schedules import ROOT, SOUND

WRONG = {
    "bench overlap --preset bar": "--preset bar: did you mean 'bars'? choose from bars, others",
    "bench overlap --only pear": "--only pear: choose from serial",
    "bench overlap --dtype b16": "'b16' is no element type: did you mean 'bf16'",
    "bench overlap --shapes ag_gem:8,8,8": "'ag_gem' is no site: did you mean 'ag_gemm'?",
    "bench overlap --shapes ag_gemm:8,8": "write them as ag_gemm:M,K,N",
    "bench overlap --shapes ag_gemm:8,8,0": "write them as ag_gemm:M,K,N",
    "bench overlap --world 0": "Invalid value for '--world'",
    "bench overlap --calibration gone.json": "cannot read calibration file gone.json",
    "bench transformer --model llama3-80b": "did you mean 'llama3-8b'",
    "bench transformer --forms block": "--forms block: did you mean 'blocks'?",
    "bench kernels --only adan": "--only adan: did you mean 'adam'?",
    "bench interconnect --most large": "'large' is no size",
    "bench --tims": "No such option: --tims",
    "bench overlp": "No such command 'overlp'. Did you mean 'overlap'?",
    "calibrate --shapes x:1,1,1": "'x' is no site",
    "calibrate --dtype x": "'x' is no element type",
    "calibrate --most x": "'x' is no size",
    "calibrate --seconds 0": "give --seconds > 0",
    "check --recorded gone": "RecordingError: cannot read gone",
    "check --pipelining gone": "ParseError: cannot read gone",
    "chek": "No such command 'chek'. Did you mean 'check'?",
    "demo --steps 0": "Invalid value for '--steps'",
    "demo --timeout 0": "Invalid value for '--timeout'",
    "explain x.ilc --strategy pear": "did you mean 'peer'?",
    "opt sound.ilc -p schedul": "did you mean 'schedule'?",
    "opt sound.ilc -p decompose{strategy=pear}": "did you mean 'peer'?",
    "run sound.ilc --runs 0": "Invalid value for '--runs'",
    "run sound.ilc --world 3": "a world of 3 ranks does not divide",
    "run gone.ilc": "cannot read gone.ilc",
}


def test_wrong_arguments_need_no_torch(tmp_path: Path) -> None:
    (tmp_path / "sound.ilc").write_text(SOUND)
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from typer.testing import CliRunner\n"
        "from interlace.cli import app\n"
        f"for line, words in {WRONG!r}.items():\n"
        "    done = CliRunner().invoke(app, line.split())\n"
        "    told = ' '.join(done.stderr.split())\n"
        "    assert (done.exit_code, words in told) == (2, True), (line, told, done.exception)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        **{"env": {"PYTHONPATH": str(ROOT / "src"), "PATH": ""}, "timeout": 60},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
