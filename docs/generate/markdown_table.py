"""A Markdown table."""

from __future__ import annotations

from collections.abc import Iterable


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """The rows below their head, with what would end a cell escaped."""
    lines = [head, tuple("---" for _ in head), *rows]
    escaped = (tuple(" ".join(c.replace("|", "\\|").split()) for c in line) for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped) + "\n"
