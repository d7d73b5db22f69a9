"""Texts that are refused, with what the error says: the rows of tests/golden/refused.txt."""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).parents[1] / "golden" / "refused.txt"


def rows(section: str, columns: int) -> list[tuple[str, ...]]:
    """The rows of one section; columns that a row leaves out are empty."""
    _, _, text = FILE.read_text().partition(f"\n== {section}\n")
    lines = text.partition("\n==")[0].replace("\\n", "\0").splitlines()
    cells = [line.replace("\0", "\n").split(" | ") for line in lines if line]
    assert cells
    return [tuple(row + [""] * (columns - len(row))) for row in cells]


def assert_told(message: str, what: str, fix: str) -> None:
    """Sees that an error's first line says what is wrong, and its last how to fix it."""
    first, *_, last = message.splitlines()
    assert what in first
    assert last.startswith("fix: ")
    assert fix in last
