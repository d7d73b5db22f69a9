"""Where calibration files live: one for each kind of host, in the user's cache folder.

    >>> fingerprint("4 x NVIDIA H200")
    '4 x NVIDIA H200, Linux x86_64'
    >>> default_path("4 x NVIDIA H200").name
    '4-x-nvidia-h200-linux-x86_64.json'

The folder is `$XDG_CACHE_HOME/interlace`, or `~/.cache/interlace` where that is not set.
"""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def fingerprint(gpus: str = "") -> str:
    """This host as calibration files know it: its GPUs, or its cores, and its system.

    Whoever has looked for GPUs says so, as in `4 x NVIDIA H200`: nothing here asks a driver.
    """
    system = f"{platform.system()} {platform.machine()}"
    return f"{gpus}, {system}" if gpus else f"{system}, {os.cpu_count() or 1} cores"


def default_path(gpus: str = "") -> Path:
    """Where this host's calibration file is written, and looked for."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    name = re.sub(r"[^a-z0-9_]+", "-", fingerprint(gpus).lower())
    return folder / "interlace" / f"{name}.json"
