"""One thing that `interlace doctor` looked at.

Finding("triton", "absent", "not installed", "it comes with a CUDA torch")
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `state`: ok, absent (something does without) or broken."""

    name: str
    state: str
    found: str
    mend: str = ""
