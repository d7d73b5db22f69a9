"""The patches that docs/upstream has for other projects fit what is installed, and work."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
import torch

UPSTREAM = Path(__file__).parents[2] / "docs" / "upstream"
PATCHES = {path.stem: path for path in UPSTREAM.glob("*.patch")}


def patched(name: str, folder: Path) -> list[Path]:
    """Copies of the installed files that a patch names, with it applied."""
    files: list[Path] = []
    for named in re.findall(r"^\+\+\+ b/(?:src/)?(.*)$", PATCHES[name].read_text(), re.MULTILINE):
        package = named.split("/")[0]
        if (spec := importlib.util.find_spec(package)) is None or spec.origin is None:
            pytest.skip(f"{package} is not installed")
        (folder / named).parent.mkdir(parents=True, exist_ok=True)
        files.append(Path(shutil.copy(Path(spec.origin).parents[1] / named, folder / named)))
    strip = "-p2" if "+++ b/src/" in PATCHES[name].read_text() else "-p1"
    command = ["git", "apply", strip, str(PATCHES[name])]
    subprocess.run(command, cwd=folder, check=True, timeout=30)
    return files


@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_applies_and_its_page_shows_it(name: str, tmp_path: Path) -> None:
    added = re.findall(r"^\+(?!\+\+)(.*)$", PATCHES[name].read_text(), re.MULTILINE)
    text = "".join(path.read_text() for path in patched(name, tmp_path))
    assert added
    assert all(line in text for line in added)
    assert PATCHES[name].read_text() in (UPSTREAM / f"{name}.md").read_text()


def test_the_patched_muon_keeps_its_momentum(tmp_path: Path) -> None:
    (path,) = patched("torch-muon", tmp_path)
    spec = importlib.util.spec_from_file_location("torch.optim._patched_muon", path)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    norms: list[float] = []
    for nesterov in (True, False):
        parameter = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
        muon = module.Muon([parameter], momentum=0.9, nesterov=nesterov)
        parameter.grad = torch.full_like(parameter, 100.0)
        muon.step()
        norms.append(muon.state[parameter]["momentum_buffer"].norm().item())
    assert norms == [80.0, 80.0]
