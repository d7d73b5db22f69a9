"""`interlace doctor`: names what is there, and how to mend what is not."""

from __future__ import annotations

import json
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from interlace.cli import app
from interlace.commands import doctor
from interlace.cost import default_machine


def findings(calibration: Path | None = None) -> dict[str, doctor.Finding]:
    return {item.name: item for item in doctor.look(calibration)}


def test_it_names_the_torch_that_is_installed() -> None:
    found = findings()["torch"]
    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    assert (found.state, found.found) == ("ok", f"{torch.__version__}, {build}")


def test_it_looks_at_everything_the_readme_promises() -> None:
    found = findings()
    assert {
        *("python", "torch", "gloo", "nccl", "ucc", "shared memory", "C++ compiler", "triton"),
        *("perfetto", "cores", "bit-equal chunks", "calibration", "torch.compile backend"),
    } <= set(found)
    assert all(item.mend for item in found.values() if item.state == "broken")


def test_json_for_scripts() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    data = json.loads(done.stdout)
    assert done.exit_code == (0 if data["ok"] else 1)
    states = {check["name"]: check["state"] for check in data["checks"]}
    assert states["gloo"] == "ok"


def test_text_says_how_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    done = CliRunner().invoke(app, ["doctor"])
    assert 'C++ compiler: only regions="inductor" on the CPU needs one' in done.stdout


def test_too_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage(64 << 20, 0, 64 << 20))
    found = findings()["shared memory"]
    assert (found.state, found.found) == ("absent", "64 MiB free of 64 at /dev/shm")
    assert "--shm-size" in found.mend


def test_a_torch_that_does_not_import_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_import", lambda name: ImportError("libgomp.so.1: no such file"))
    found = findings()["torch"]
    assert (found.state, "libgomp" in found.found) == ("broken", True)
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1


@pytest.mark.parametrize("good", [True, False], ids=["good", "malformed"])
def test_it_looks_at_a_calibration_file(tmp_path: Path, good: bool) -> None:
    path = tmp_path / "machine.json"
    default_machine("cpu").save(path)
    if not good:
        path.write_text("{}")
    found = findings(path)["calibration"]
    assert found.state == ("ok" if good else "broken")
