"""Ranks and counts in words.

>>> ranks_in_words([0, 1, 2, 5])
'ranks 0 to 2, 5'
"""

from __future__ import annotations

from collections.abc import Sequence


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Ranks in words, with runs of them as `0 to 7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    said = [str(a) if a == b else f"{a} and {b}" if b == a + 1 else f"{a} to {b}" for a, b in runs]
    if len(said) > 12:
        said = [*said[:12], "..."]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(said)}"


def times(count: int, what: str) -> str:
    """A number of things."""
    return f"{count} {what}{'s' if count != 1 else ''}"
