"""Counts lines of Python that a function runs: the same on a busy machine and on a calm one.

`lines(function)` counts lines. `per_op(work, size)` holds two sizes against each other, so that
work that grows faster than its input shows at sizes that take no time. Work inside a
function of C (a copy of a list, a search through it) is one line, whatever it takes; versions of
Python differ by some lines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def lines(function: Callable[[], Any]) -> int:
    """Lines of Python run by a call, those of all functions that it calls among them."""
    count = 0

    def line(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    before = sys.gettrace()
    sys.settrace(line)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def per_op(work: Callable[[int], tuple[int, Callable[[], Any]]], size: int) -> float:
    """Lines for each op at four times `size`, which may be a seventh more than at `size`.

    `work(size)` gives a count of ops and a function that does something about them all.
    """
    (few, small), (many, large) = work(size), work(4 * size)
    assert 3 * few < many < 5 * few
    for function in (small, large):  # what is imported or made once
        function()
    one, other = lines(small) / few, lines(large) / many
    print(f"{one:.1f} lines for each of {few} ops, {other:.1f} of {many}")
    assert other < 1.15 * one, f"{one:.1f} lines for each of {few} ops, {other:.1f} of {many}"
    return other
