"""Replays what passes, verifier and simulator made of Programs, on two trees, and compares them.

For changes that are to change nothing. What the tests or the demo hand to a pass, to the verifier
or to the simulator is recorded, as text; each of two trees then works it out anew, and the answers
are compared byte for byte:

    python scripts/replay.py record /tmp/cases -- -m pytest tests/passes tests/e2e
    python scripts/replay.py record /tmp/cases -- -m interlace demo --steps 2 --out /tmp/demo
    git worktree add /tmp/before main
    python scripts/replay.py compare /tmp/cases /tmp/before .

Recording adds to what is there, also from processes that the command starts. A tree is a checkout;
its `src` is what runs. `compare` ends with 1 where an answer differs, and shows the first of each
kind as a diff; an error is an answer too.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FOLDER = "INTERLACE_REPLAY"
"""Names the folder to processes that a recorded command starts."""


# Recording: `sitecustomize` calls `install` in every process of the command.


def install() -> None:
    """Has passes, `check` and `simulate` note what they are given."""
    import interlace.cost.simulate
    import interlace.verify  # noqa: F401
    from interlace.ir import Program, print_set
    from interlace.passes import PASSES, spell

    note = Recorder(Path(os.environ[FOLDER])).note

    def texts(programs: Any) -> str:
        return print_set([programs] if isinstance(programs, Program) else list(programs))

    def seen_pass(item: Any, program: Any) -> None:
        machine = getattr(item, "machine", None)
        note(what="pass", text=str(program), spelled=spell(item), machine=filed(machine))

    def seen_check(programs: Any, **given: Any) -> None:
        note(what="check", text=texts(programs), given=given)

    def seen_simulate(programs: Any, machine: Any, *_: Any, **__: Any) -> None:
        note(what="simulate", text=texts(programs), machine=filed(machine))

    passes: Any = PASSES.values()
    for cls in passes:
        cls.run = _noting(cls.run, seen_pass)
    for room, name, seen in (
        ("verify", "check", seen_check),
        ("cost", "simulate", seen_simulate),
    ):
        module = sys.modules[f"interlace.{room}.{name}"]
        wrapped = _noting(getattr(module, name), seen)
        for holder in list(sys.modules.values()):
            if getattr(holder, name, None) is getattr(module, name) and holder is not module:
                setattr(holder, name, wrapped)
        setattr(module, name, wrapped)


def _noting(function: Callable[..., Any], seen: Callable[..., None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def noting(*args: Any, **kwargs: Any) -> Any:
        try:
            seen(*args, **kwargs)
        except Exception as error:  # what has no text is no case
            print(f"replay: not recorded: {error}", file=sys.stderr)
        return function(*args, **kwargs)

    return noting


class Recorder:
    """Appends each case once to a file of this process."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.known = folder, set[str]()

    def note(self, **case: Any) -> None:
        line = json.dumps(case, sort_keys=True)
        key = hashlib.sha256(line.encode()).hexdigest()
        if key not in self.known:
            self.known.add(key)
            with (self.folder / f"{os.getpid()}.jsonl").open("a") as file:
                file.write(line + "\n")


@functools.cache
def filed(machine: Any) -> str | None:
    """A machine model as the text of its calibration file, with what such a file leaves out."""
    if machine is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "machine.json")
        machine.save(path)
        rest = {"captured": machine.captured, "kernels": machine.kernels}
        return json.dumps({"file": path.read_text(), **rest})


@functools.cache
def unfiled(text: str | None) -> Any:
    """The machine model that `filed` wrote."""
    if text is None:
        return None
    from interlace.cost import Machine

    held = json.loads(text)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "machine.json")
        path.write_text(held.pop("file"))
        return Machine.load(path, any_host=True).replace(**held)


def record(folder: Path, command: list[str]) -> int:
    """Runs Python with a command line, and records."""
    folder.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).resolve()
    with tempfile.TemporaryDirectory() as hook:
        start = (
            f"import sys; sys.path.append({str(here.parent)!r})\nimport replay; replay.install()\n"
        )
        Path(hook, "sitecustomize.py").write_text(start)
        source = str(here.parents[1] / "src")
        path = os.pathsep.join([hook, source, *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, FOLDER: str(folder.resolve()), "PYTHONPATH": path}
        return subprocess.run([sys.executable, *command], env=env, check=False).returncode


# Replaying: `answers` runs in a process of its own, with a tree's `src` first on the path.


def cases(folder: Path) -> Iterator[str]:
    """All recorded cases, each once, in an order that does not depend on who recorded them."""
    lines = {line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()}
    yield from sorted(lines)


def answers(folder: Path) -> None:
    """Prints the answer to each case as a line of JSON."""
    for line in cases(folder):
        print(json.dumps(answer(json.loads(line))), flush=False)


def answer(case: dict[str, Any]) -> str:
    """What this tree makes of a case."""
    from interlace.cost import simulate
    from interlace.errors import InterlaceError
    from interlace.ir import parse_set
    from interlace.passes import parse_pipeline
    from interlace.verify import check

    try:
        programs = parse_set(case["text"])
        if case["what"] == "pass":
            (program,), (item,) = (
                programs,
                parse_pipeline(case["spelled"], unfiled(case["machine"])),
            )
            return str(item.run(program))
        if case["what"] == "simulate":
            return _timeline(simulate(programs, unfiled(case["machine"])))
        report = check(programs, **case["given"])
        return str(dataclasses.replace(report, seconds=0.0))
    except InterlaceError as error:
        return f"{type(error).__name__}: {error}"


def _timeline(timeline: Any) -> str:
    return "\n".join(map(str, timeline.spans))


def compare(folder: Path, trees: list[Path]) -> int:
    """Has two trees answer all cases, side by side; how many differ, and the first of each kind."""
    total, differ = Counter[str](), Counter[str]()
    running = [_answering(folder, tree) for tree in trees]
    streams = [process.stdout for process in running]
    assert all(stream is not None for stream in streams)
    for line, *found in zip(cases(folder), *streams, strict=True):  # pyright: ignore[reportArgumentType]
        case = json.loads(line)
        kind = case["spelled"].partition("{")[0] if case["what"] == "pass" else case["what"]
        total[kind] += 1
        before, after = map(json.loads, found)
        if before != after:
            differ[kind] += 1
            if differ[kind] == 1:
                print(f"-- {kind}: { ({**case, 'text': '...', 'machine': '...'}) }\n{case['text']}")
                sides = before.splitlines(), after.splitlines()
                print("\n".join(difflib.unified_diff(*sides, *map(str, trees), lineterm="")))
    failed = [process.wait() for process in running]
    for kind, count in sorted(total.items()):
        print(f"{kind:20} {count:7} cases, {differ[kind]} differ")
    return 1 if differ or any(failed) else 0


def _answering(folder: Path, tree: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(tree.resolve() / "src")}
    command = [sys.executable, __file__, "answer", str(folder)]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parts = parser.add_subparsers(dest="what", required=True)
    part = parts.add_parser("record", help="run python with a command line, and record the cases")
    part.add_argument("folder", type=Path)
    part.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND")
    part = parts.add_parser("compare", help="have two trees answer all cases")
    part.add_argument("folder", type=Path)
    part.add_argument("trees", type=Path, nargs=2)
    part = parts.add_parser("answer", help="print this tree's answers")
    part.add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.what == "record":
        return record(given.folder, [x for x in given.command if x != "--"])
    if given.what == "compare":
        return compare(given.folder, given.trees)
    return answers(given.folder) or 0


if __name__ == "__main__":
    sys.exit(main())
