"""Headless Chromium for tests, which skip where there is none: a page's DOM, or a page to use.

with opened(page, 1280, 900) as tab:
    tab.key("n")
    tab.move(300, 200)
    tab.photograph(folder / "hover.png")
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--hide-scrollbars",
)
LIMIT_S = 60.0


def browser() -> str:
    """The browser's path."""
    found = next((found for name in NAMES if (found := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium on PATH: `apt-get install chromium` lets this test run")
    return found


def dump_dom(page: Path, fragment: str = "") -> str:
    """The page's DOM after its script ran."""
    program = browser()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        url = f"{page.resolve().as_uri()}#{fragment}"
        command = [program, *FLAGS, f"--user-data-dir={profile}", "--dump-dom", url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


class Tab:
    """One tab of a browser, driven through a pipe of its DevTools protocol."""

    def __init__(self, into: int, out: int) -> None:
        self._into, self._out = into, out
        self._calls, self._read = 0, b""
        self._session: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}

    def call(self, method: str, **params: Any) -> Any:
        """The result of a command of the protocol."""
        self._calls += 1
        told = {"id": self._calls, "method": method, "params": params, **self._session}
        os.write(self._into, json.dumps(told).encode() + b"\0")
        while (answer := self._message()).get("id") != self._calls:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _message(self) -> dict[str, Any]:
        until = time.monotonic() + LIMIT_S
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._out], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"Chromium did not answer within {LIMIT_S} s"
            read = os.read(self._out, 1 << 20)
            assert read, "Chromium ended"
            self._read += read
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def open(self, page: Path, wide: int, high: int, dark: bool = False) -> None:
        """Opens a page at a size, and waits until its script has run."""
        size = {"width": wide, "height": high, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.media("", dark)
        self.call("Page.navigate", url=page.resolve().as_uri())
        until = time.monotonic() + LIMIT_S
        while self.evaluate("document.documentElement.dataset.ready") != "yes":
            assert time.monotonic() < until, "the page's script did not end"
            time.sleep(0.02)

    def media(self, name: str, dark: bool = False) -> None:
        """Shows the page on `print`, or on the screen."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=name, features=[scheme])

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page, once what was asked for is drawn."""
        code = f"new Promise(r => setTimeout(() => r({expression}), 40))"
        given = {"expression": code, "awaitPromise": True, "returnByValue": True}
        found = self.call("Runtime.evaluate", **given)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def key(self, name: str, text: str = "") -> None:
        """Presses a key."""
        text = text or (name if len(name) == 1 else "")
        self.call("Input.dispatchKeyEvent", type="keyDown", key=name, text=text)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=name)

    def move(self, x: float, y: float) -> None:
        """Moves the pointer there."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def photograph(self, path: Path, whole: bool = False) -> bytes:
        """A picture of what is in sight, or of the whole page: its PNG."""
        self.evaluate("0")
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(png := base64.b64decode(shot["data"]))
        return png

    def print(self, path: Path) -> bytes:
        """The page on paper: its PDF."""
        given = {"printBackground": True, "preferCSSPageSize": True}
        pdf = base64.b64decode(self.call("Page.printToPDF", **given)["data"])
        path.write_bytes(pdf)
        return pdf


@contextlib.contextmanager
def tab() -> Iterator[Tab]:
    """A tab of a browser of its own."""
    program = browser()
    (there, into), (out, back) = os.pipe(), os.pipe()

    def placed() -> None:  # the browser reads descriptor 3 and writes 4
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 5) for end in (there, back)]
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)

    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        given = (f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank")
        running = subprocess.Popen(
            [program, *FLAGS, *given],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=placed,
        )
        os.close(there)
        os.close(back)
        try:
            yield Tab(into, out)
        finally:
            running.kill()
            running.wait()
            os.close(into)
            os.close(out)
