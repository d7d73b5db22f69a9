"""Installs the project as a user does, into a fresh environment.

It borrows torch and the other dependencies from the environment that runs the tests, by links, so
that nothing is downloaded; pip's own part is real.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("src", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")


def run(*command: str | Path, cwd: Path, home: Path) -> str:
    """Runs a command with a home and a temporary directory of its own; returns what it printed."""
    (home / "tmp").mkdir(parents=True, exist_ok=True)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    env |= {"HOME": str(home), "TMPDIR": str(home / "tmp"), "PIP_NO_CACHE_DIR": "1"}
    env["PATH"] = "/usr/bin:/bin"  # pip asks other tools of the PATH who they are
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def files_under(directory: Path) -> set[str]:
    """Every file below `directory`, but for the compiled ones that Python leaves behind."""
    found = (path for path in directory.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {str(path.relative_to(directory)) for path in found}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the sources, so that a build cannot leave anything in the real ones."""
    copy = tmp_path / "checkout"
    copy.mkdir()
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=ignore)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A fresh virtual environment that sees what the tests' own holds, except Interlace and pip."""
    borrowed, directory = tmp_path / "borrowed", tmp_path / "venv"
    borrowed.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        ours = path.name.lstrip("_").startswith(("interlace", "pip", "editable"))
        if not ours and path.suffix != ".pth":
            (borrowed / path.name).symlink_to(path)
    run(sys.executable, "-m", "venv", "--without-pip", directory, cwd=tmp_path, home=tmp_path)
    (site,) = (directory / "lib").glob("python3*/site-packages")
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    return directory


# The build back end is among the borrowed packages; `make` has already built with isolation.
INSTALL = ("install", "--no-deps", "--no-build-isolation", "--no-index")

BINARIES = {".so", ".pyd", ".dll", ".dylib", ".a", ".o", ".cubin", ".fatbin", ".exe"}

CHECK = """
import importlib.metadata, pathlib, interlace
print(pathlib.Path(interlace.__file__).parent)
assert importlib.metadata.version("interlace") == interlace.__version__
assert (pathlib.Path(interlace.__file__).parent / "py.typed").is_file()
points = importlib.metadata.distribution("interlace").entry_points
assert {(p.group, p.name) for p in points} == {
    ("console_scripts", "interlace"), ("pytest11", "interlace"),
    ("torch_dynamo_backends", "interlace"),
}, points
for point in points:
    assert callable(point.load()) or point.group == "pytest11", point  # a plugin is a module
import torch._dynamo
assert "interlace" in torch._dynamo.list_backends()
"""


def test_pip_install(checkout: Path, environment: Path, tmp_path: Path) -> None:
    """`pip install .` puts everything below site-packages and bin, and nothing into the sources:
    from one pure wheel for every platform, all sources and no compiled code, types marked."""
    home, python = tmp_path / "home", environment / "bin" / "python"
    (site,) = (environment / "lib").glob("python3*/site-packages")
    sources, before = files_under(checkout), files_under(environment)
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, *INSTALL, ".", cwd=checkout, home=home)
    assert files_under(checkout) == sources
    added = files_under(environment) - before
    below = f"{site.relative_to(environment)}/interlace"
    assert {name for name in added if not name.startswith(below)} == {"bin/interlace"}
    assert files_under(site / "interlace") == files_under(checkout / "src/interlace")
    assert not {name for name in added if Path(name).suffix in BINARIES}
    (info,) = site.glob("interlace-*.dist-info")
    wheel = (info / "WHEEL").read_text()
    assert "Root-Is-Purelib: true\nTag: py3-none-any" in wheel
    assert (info / "licenses" / "LICENSE").is_file()

    package = Path(run(python, "-c", CHECK, cwd=home, home=home).strip())
    assert package == site / "interlace"
    assert "demo" in run(environment / "bin" / "interlace", "--help", cwd=home, home=home)
    assert files_under(home) == set()


def test_the_sdist_runs_make(tmp_path: Path) -> None:
    """What `make` reads is there; the targets themselves are tested in a checkout."""
    out, home = tmp_path / "out", tmp_path / "home"
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", out, cwd=ROOT, home=home)
    (archive,) = out.iterdir()
    shutil.unpack_archive(archive, tmp_path, filter="data")
    made = tmp_path / archive.name.removesuffix(".tar.gz")
    for name in ("scripts/make-venv", "constraints.txt", "CHANGELOG.md", "tests/conftest.py"):
        assert (made / name).is_file()
    shown = run("make", "--dry-run", "demo", cwd=made, home=home)
    assert 'sh scripts/make-venv ".venv"' in shown
