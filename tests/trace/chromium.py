"""Opens a page in headless Chromium and gives back its DOM; tests skip where there is none."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def dump_dom(page: Path, fragment: str = "") -> str:
    """The page's DOM after its script ran."""
    browser = next((found for name in NAMES if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no Chromium on PATH: `apt-get install chromium` lets this test run")
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        url = f"{page.resolve().as_uri()}#{fragment}"
        command = [browser, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
