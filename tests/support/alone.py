"""A rank of a benchmark without a process group, for what is measured on one device.

rows = time_case(case, Alone(torch.device("cpu")), 0.05)
"""

from __future__ import annotations

import torch

from interlace_bench.ranks import WAIT_S, Note, Ranks


class Alone(Ranks):
    """One rank with nobody to meet, for what is measured on one device."""

    def __init__(self, device: torch.device) -> None:
        self.me, self.size, self.device = 0, 1, device

    def exchange(self, note: Note, wait_s: float = WAIT_S) -> list[Note]:
        """The note."""
        return [note]

    def agree(self, problem: str | None) -> str | None:
        """The problem."""
        return problem

    def align(self) -> None:
        """Waits for the device."""
        self.synchronize()
