"""What `make` does before its targets: an environment that is whole, or not there.

The interpreter is a stand-in that writes down how it is called and fails on demand, so that a test
takes milliseconds; `make test` itself has shown the real one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

STAND_IN = """#!/bin/sh
echo "$*" >>"$LOG"
case "$*" in
--version) echo "Python 3.12.0" ;;
"-c import pip"*) exit "${OLD_PIP:-0}" ;;
"-c import sys"*) exit "${TOO_OLD:-0}" ;;
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip "*) sleep "${PIP_SECONDS:-0}"; exit "${PIP_FAILS:-0}" ;;
esac
"""


class Clone:
    """A directory with what `scripts/make-venv` reads, and a stand-in for python3."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "log"
        (directory / "scripts").mkdir(parents=True)
        shutil.copy(ROOT / "scripts" / "make-venv", directory / "scripts")
        for name in ("pyproject.toml", "constraints.txt", "Makefile"):
            shutil.copy(ROOT / name, directory)
        (directory / "bin").mkdir()
        python = directory / "bin" / "python3"
        python.write_text(STAND_IN)
        python.chmod(0o755)

    def start(self, **settings: str) -> subprocess.Popen[str]:
        env = {"PATH": f"{self.directory / 'bin'}:/usr/bin:/bin", "LOG": str(self.log), **settings}
        return subprocess.Popen(
            ["sh", "scripts/make-venv", ".venv"],
            cwd=self.directory,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def make(self, **settings: str) -> tuple[int, str]:
        """Runs the script; returns its exit status and what it said."""
        process = self.start(**settings)
        said, _ = process.communicate(timeout=60)
        return process.returncode, said

    def installs(self) -> list[str]:
        """The pip commands so far."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if line.startswith("-m pip ")]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path / "clone")


def test_makes_it_once(clone: Clone) -> None:
    assert clone.make()[0] == 0
    (install,) = clone.installs()
    assert "-c constraints.txt --group dev --group docs --editable ." in install
    assert clone.make() == (0, "")
    assert len(clone.installs()) == 1


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_makes_it_anew_when_its_sources_change(clone: Clone, changed: str) -> None:
    clone.make()
    path = clone.directory / changed
    path.write_text(path.read_text() + "\n# changed\n")
    clone.make()
    assert len(clone.installs()) == 2
    os.utime(path)
    clone.make()
    assert len(clone.installs()) == 2, "the time stamp alone changes nothing"


def test_half_made_is_not_whole(clone: Clone) -> None:
    status, _ = clone.make(PIP_FAILS="1")
    assert status != 0
    assert (clone.directory / ".venv" / "bin" / "python").exists()
    left = clone.directory / ".venv" / "left-over"
    left.touch()
    assert clone.make()[0] == 0
    assert not left.exists()
    assert len(clone.installs()) == 2


def test_killed_half_way_is_not_whole(clone: Clone) -> None:
    process = clone.start(PIP_SECONDS="30")
    while not clone.installs():
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert not (clone.directory / ".venv" / ".ready").exists()
    assert clone.make()[0] == 0
    assert len(clone.installs()) == 2


@pytest.mark.skipif(shutil.which("flock", path="/usr/bin:/bin") is None, reason="needs flock")
def test_two_at_once_make_one(clone: Clone) -> None:
    started = [clone.start(PIP_SECONDS="0.5") for _ in range(3)]
    for process in started:
        process.communicate(timeout=60)
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len(clone.installs()) == 1


def test_moved_checkout_makes_it_anew(clone: Clone, tmp_path: Path) -> None:
    clone.make()
    clone.directory.rename(tmp_path / "moved")
    clone.directory = tmp_path / "moved"
    clone.log = clone.directory / "log"
    assert clone.make()[0] == 0
    assert len(clone.installs()) == 2


def test_torch_from_its_own_index_is_remembered(clone: Clone) -> None:
    clone.make(TORCH_INDEX="file:///wheels")
    torch, rest = clone.installs()
    assert "--index-url file:///wheels torch" in torch
    assert "--index-url" not in rest
    assert clone.make() == (0, "")
    assert len(clone.installs()) == 2


def test_extras_are_remembered(clone: Clone) -> None:
    clone.make(EXTRAS="test-kernels")
    clone.make()
    (install,) = clone.installs()
    assert install.endswith("--group dev --group docs --group test-kernels --editable .")


def test_torchtitan_comes_without_what_it_requires(clone: Clone) -> None:
    clone.make(EXTRAS="test-kernels,integrations")
    first, second = clone.installs()
    assert first.endswith("--group dev --group docs --group test-kernels --editable .")
    assert second.endswith("-c constraints.txt --no-deps --group integrations")


def test_a_pip_without_dependency_groups_is_renewed(clone: Clone) -> None:
    clone.make(OLD_PIP="1")
    pip, rest = clone.installs()
    assert pip.endswith("--upgrade pip>=25.1")
    assert "--group dev" in rest


def test_without_a_python_it_says_what_to_do(clone: Clone) -> None:
    status, said = clone.make(
        TOO_OLD="1", PATH=f"{clone.directory / 'bin'}:/usr/bin:/bin", PYTHON="python3"
    )
    assert status == 1
    assert "Python >= 3.11" in said
    assert "make ... PYTHON=" in said
    assert not (clone.directory / ".venv").exists()


def test_leaves_a_stranger_alone(clone: Clone) -> None:
    theirs = clone.directory / ".venv" / "theirs"
    theirs.parent.mkdir()
    theirs.touch()
    status, said = clone.make()
    assert status == 1
    assert "not made by this script" in said
    assert theirs.exists()


def test_help_lists_the_targets(clone: Clone) -> None:
    done = subprocess.run(
        ["make", "help"],
        cwd=clone.directory,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    listed = {line.split()[1] for line in done.stdout.splitlines()}
    assert {"demo", "test", "lint", "help"} <= listed
