"""What the demo's model learns: the source text of Python's own standard library, byte by byte.

    batches = Batches(read_text(), sequence=256, batch=4, seed=0)
    tokens, targets = batches[3]    # of step 3: the same on every rank, on every machine

Nothing is downloaded: the text is there wherever Python is.
"""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from interlace.errors import UnsupportedError

ENOUGH = 2_000_000
"""Bytes that are read: more than the demo gets through."""


def read_text(enough: int = ENOUGH, folder: Path | None = None) -> bytes:
    """The modules of the standard library in order of their names, up to that many bytes."""
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    size = 0
    for path in sorted(folder.glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= enough:
            break
    text = b"".join(parts)[:enough]
    if len(text) < 10_000:
        raise UnsupportedError(
            f"the demo learns the source of Python's standard library, and {folder} holds only "
            f"{len(text)} bytes of it: use a Python that has its library as files"
        )
    return text


@dataclass(frozen=True, slots=True)
class Batches:
    """Batches by step: places drawn at random from the text, by seed and step alone."""

    text: bytes
    sequence: int
    batch: int
    seed: int = 0

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and the bytes that follow them, both (batch, sequence)."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        last = len(self.text) - self.sequence - 1
        starts = torch.randint(last, (self.batch,), generator=generator).tolist()
        rows = [list(self.text[start : start + self.sequence + 1]) for start in starts]
        windows = torch.tensor(rows, dtype=torch.long)
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
