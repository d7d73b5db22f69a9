"""What `import interlace` offers: every name is there, and none is looked for before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import interlace


@pytest.mark.parametrize("name", interlace.__all__)
def test_every_name_is_there(name: str) -> None:
    assert getattr(interlace, name) is not None
    assert name in dir(interlace)


def test_another_name_is_not() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        getattr(interlace, "nothing")  # noqa: B009


def test_without_a_gpu_there_is_nothing_to_wait_for() -> None:
    assert interlace.synchronize() is None
    code = "import interlace, sys; interlace.synchronize(); print('cuda' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.stdout.strip() == "False", done.stderr
