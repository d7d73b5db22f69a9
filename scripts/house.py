"""The house in figures: lines by room, lengths of functions, class names that stand for two things.

    python scripts/house.py                   # this tree
    python scripts/house.py ../before .       # two trees side by side

Lines are those of `src/**/*.py`, all of them (code, docstrings, imports, blank lines).
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class House:
    """What is counted of a tree."""

    files: Counter[str] = field(default_factory=Counter[str])
    lines: Counter[str] = field(default_factory=Counter[str])
    lengths: list[int] = field(default_factory=list[int])
    classes: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    folders: Counter[str] = field(default_factory=Counter[str])
    small: list[str] = field(default_factory=list[str])


def measure(tree: Path) -> House:
    """Reads every module under `tree`/src."""
    house, root = House(), tree / "src"
    for path in sorted(root.rglob("*.py")):
        text, name = path.read_text(), path.relative_to(root)
        package, *inner = name.parts
        room = package if package != "interlace" else inner[0] if len(inner) > 1 else "(top)"
        num_lines = len(text.splitlines())
        house.files[room] += 1
        house.lines[room] += num_lines
        house.folders[str(name.parent)] += path.name != "__init__.py"
        if num_lines < 60 and not path.name.startswith("__"):
            house.small.append(str(name))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                house.classes[node.name].append(str(name))
            if isinstance(node, Function):
                house.lengths.append(body_lines(node))
    return house


def body_lines(function: Function) -> int:
    """Lines from `def` to the end, without the docstring."""
    whole = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        whole -= (first.end_lineno or 0) - first.lineno + 1
    return whole


def report(before: House | None, now: House) -> Iterator[str]:
    """The figures, a line each."""
    yield f"{'room':16}{'files':>12}{'lines':>18}"
    for room in sorted({*now.lines, *(before.lines if before else ())}):
        yield row(
            room,
            before and before.files[room],
            now.files[room],
            before and before.lines[room],
            now.lines[room],
        )
    yield row(
        "all",
        before and before.files.total(),
        now.files.total(),
        before and before.lines.total(),
        now.lines.total(),
    )
    yield f"median function: {statistics.median(now.lengths)} lines, without docstring"
    many = {name: where for name, where in now.classes.items() if len(where) > 1}
    yield f"class names of more than one class: {len(many)}"
    yield from (f"  {name}: {', '.join(where)}" for name, where in sorted(many.items()))
    yield f"files under 60 lines: {len(now.small)}"
    yield from (f"  {name}" for name in now.small)
    yield "folders of more than 14 files: " + (
        ", ".join(f"{name} ({n})" for name, n in now.folders.items() if n > 14) or "none"
    )


def row(room: str, old_files: int | None, files: int, old_lines: int | None, lines: int) -> str:
    """A line of the table."""
    of_files = f"{files}" if old_files is None else f"{old_files} -> {files}"
    of_lines = f"{lines}" if old_lines is None else f"{old_lines} -> {lines}"
    return f"{room:16}{of_files:>12}{of_lines:>18}"


if __name__ == "__main__":
    trees = [measure(Path(tree)) for tree in sys.argv[1:] or ["."]]
    print("\n".join(report(trees[0] if len(trees) > 1 else None, trees[-1])))
