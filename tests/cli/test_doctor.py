"""`interlace doctor`: names what is there, and how to fix what is not."""

from __future__ import annotations

import json
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.frontend.test_store import changed, entry_of
from typer.testing import CliRunner

from interlace.cli import app
from interlace.commands import doctor
from interlace.commands.doctor import look_at_gpus
from interlace.cost import default_machine
from interlace.errors import BackendError
from interlace.frontend.store import Store


def findings() -> dict[str, doctor.Inspection]:
    return {item.name: item for item in doctor.look()}


def test_it_names_the_torch_that_is_installed() -> None:
    found = findings()["torch"]
    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    assert (found.state, found.found) == ("ok", f"{torch.__version__}, {build}")


def test_it_looks_at_everything_the_readme_promises() -> None:
    found = findings()
    assert {
        *("python", "torch", "gloo", "nccl", "ucc", "shared memory", "C++ compiler", "triton"),
        *("bit-equal chunks", "calibration", "torch.compile backend"),
    } <= set(found)
    assert all(item.fix for item in found.values() if item.state == "broken")


def test_json_for_scripts() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    data = json.loads(done.stdout)
    assert done.exit_code == (0 if data["ok"] else 1)
    states = {check["name"]: check["state"] for check in data["checks"]}
    assert states["gloo"] == "ok"


def test_text_says_how_to_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    done = CliRunner().invoke(app, ["doctor"])
    assert 'C++ compiler: only regions="inductor" on the CPU needs one' in done.stdout


def test_too_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage(64 << 20, 0, 64 << 20))
    found = findings()["shared memory"]
    assert (found.state, found.found) == ("absent", "64 MiB free of 64 at /dev/shm")
    assert "--shm-size" in found.fix


def test_a_torch_that_does_not_import_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_import", lambda name: ImportError("libgomp.so.1: no such file"))
    found = findings()["torch"]
    assert (found.state, "libgomp" in found.found) == ("broken", True)
    assert CliRunner().invoke(app, ["doctor"]).exit_code == 1


def test_it_looks_for_this_machine_s_calibration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = findings()["calibration"]
    assert found.state == "absent"
    assert "interlace calibrate" in found.fix
    path = Path(found.found.removeprefix("none at ").split(": ")[0])
    path.parent.mkdir(parents=True)
    default_machine("cpu").save(path)
    assert findings()["calibration"].state == "ok"
    path.write_text("{}")
    assert findings()["calibration"].state == "broken"


class FakeDriver:
    """A CUDA driver that does what it is told, or cannot share memory."""

    def __init__(self, shares: bool) -> None:
        self.shares = shares

    def alloc(self, nbytes: int) -> int:
        return 4096

    def handle(self, base: int) -> str:
        if not self.shares:
            raise BackendError("cuIpcGetMemHandle of the CUDA driver failed: CUDA_ERROR_NOT_MAPPED")
        return "00"


def fake_torch(count: int, reach: bool) -> Any:
    """A torch that is built for CUDA and sees so many GPUs."""
    cuda = SimpleNamespace(
        device_count=lambda: count,
        get_device_name=lambda index: "NVIDIA H200",
        can_device_access_peer=lambda i, j: reach or {i, j} != {0, 1},
        nccl=SimpleNamespace(version=lambda: (2, 28, 9)),
        set_device=lambda index: None,
        synchronize=lambda: None,
    )
    return SimpleNamespace(cuda=cuda)


@pytest.mark.parametrize("works", [True, False], ids=["works", "does-not"])
def test_gpus(monkeypatch: pytest.MonkeyPatch, works: bool) -> None:
    driver = FakeDriver(works)
    monkeypatch.setattr("interlace.comm.cuda.driver.Driver", lambda: driver)
    found = {item.name: item for item in look_at_gpus(fake_torch(4, works))}
    assert found["GPUs"].found == "4 NVIDIA H200"
    assert found["NCCL version"].found == "2.28.9"
    peers, shared = found["peer access"], found["memory shared by processes"]
    if works:
        assert (peers.state, peers.found) == ("ok", "12 of 12 ordered pairs")
        assert shared.state == "ok"
    else:
        assert (peers.state, shared.state) == ("absent", "absent")
        assert peers.found == "10 of 12 ordered pairs; none 0 > 1, 1 > 0"
        assert "choose GPUs that reach each other" in peers.fix
        assert "--ipc=host" in shared.fix


def test_a_cuda_build_without_a_gpu() -> None:
    found = {item.name: item for item in look_at_gpus(fake_torch(0, True))}
    assert set(found) == {"GPUs"}
    assert "nvidia-smi" in found["GPUs"].fix


def test_gloo_that_other_hosts_do_not_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = findings()["gloo's address"]
    assert found.state == "absent"
    assert found.found == "listens on 127.0.0.1 (GLOO_SOCKET_IFNAME=lo)"
    assert "set GLOO_SOCKET_IFNAME on each host" in found.fix
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-such")
    assert "no IPv4 address" in findings()["gloo's address"].found


def test_one_rank_of_a_host_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    done = CliRunner().invoke(app, ["doctor"])
    assert (done.exit_code, done.stdout) == (0, "")


def test_kept_schedules_that_do_not_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = Store(tmp_path)
    monkeypatch.setattr(Store, "of", lambda _: store)
    assert findings()["kept schedules"].state == "ok"
    key, entry = entry_of()
    store.keep(key, entry)
    other = tmp_path / "forward-other.json"
    other.write_text(changed(entry.text, facts={**key.facts, "torch": "1.0", "triton": "0"}))
    (tmp_path / "forward-damaged.json").write_text(entry.text[:-9])
    found = findings()["kept schedules"]
    assert (found.state, found.found) == ("ok", f"1 of 3 fit what is installed ({tmp_path})")
    assert "1 with another torch and another triton" in found.fix
    assert "1 with another content" in found.fix
    monkeypatch.setattr(Store, "of", lambda _: None)
    assert findings()["kept schedules"].state == "absent"
