# ruff: noqa: E501
"""Schedules that are made to keep a reader busy: of any size, each for one thing that may grow.

    text = HOSTILE["races"](1_000_000)      # about a megabyte
    measure(text, limit_s=60)               # what `interlace check` says, in a process of its own

Some are sound, most are not, some are refused: what they have in common is that their author wants
`interlace check` to take for ever, or all memory.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

Lines = Callable[[int], str]
Hostile = Callable[[int], str]


def filled(size: int, head: str, *lines: Lines, end: str = "") -> str:
    """A text of about so many characters: the head, each line in turn for 0, 1, 2 ..., the end."""
    made, length = [head], len(head) + len(end)
    for number in count():
        for line in lines:
            text = "".join(f"    {part}\n" for part in line(number).split("\n"))
            made.append(text)
            length += len(text)
        if length >= size:
            return "".join([*made, end])
    raise AssertionError


def listed(size: int, item: Lines, between: str = ", ") -> str:
    """Items side by side, about so many characters."""
    made, length = list[str](), 0
    for number in count():
        made.append(item(number))
        length += len(made[-1]) + len(between)
        if length >= size:
            break
    return between.join(made)


ONE = "def f(tp: Team[1], x: f32[4, 4], y: f32[4, 4]):\n"
TWO = "def f(tp: Team[2], x: f32[4, 4], y: f32[4, 4]):\n"
WIDE = "def f(tp: Team[1], x: f32[60000, 4096], y: out[f32[60000, 4096]]):\n"


# Boxes


def odd_strides(size: int) -> str:
    """Boxes of different buffers' shapes over one storage would be hulls: these are strides that
    have no small common multiple, of one buffer, through reshapes."""

    def line(k: int) -> str:
        a, b = 3 + k % 701, 5 + k % 499
        view = "t.view(-1){0}.view(-1, {1}).slice(1, 0, {2})"
        one = view.format(f"[0:{a * 1009}]", a, 1 + a // 2)
        two = view.format(f"[{b}:{b + b * 1009}]", b, 1 + b // 3)
        return f'main: call("aten.neg_", {one}, out={one}, mutates=True)\nside: call("aten.neg_", {two}, out={two}, mutates=True)'

    return filled(size, "def f(tp: Team[1], t: f32[1024, 1024]):\n", line)


def scattered(size: int) -> str:
    """Writes of single elements, and reads of all of them."""
    head = "def f(tp: Team[1], x: f32[100000], y: out[f32[100000]]):\n    t = alloc(f32[100000])\n"
    return filled(
        size,
        head,
        lambda k: f"main: copy(x[{k * 2}:{k * 2 + 1}], t[{k * 2}:{k * 2 + 1}])",
        lambda k: f"main: copy(t[0:{k * 2 + 2}], y[0:{k * 2 + 2}])",
    )


def sized_boxes(size: int) -> str:
    """Boxes of two named sizes: each comparison is one that the class has to decide."""
    head = (
        "def f(tp: Team[1], S: Size[4096], T: Size[512], x: f32[S + 9000, T], "
        "y: out[f32[S + 9000, T]]):\n    assume(S >= 1024, T >= 64)\n"
    )
    return filled(
        size,
        head,
        lambda k: f"main: copy(x[S + {k}:S + {k + 2}], y[S + {k}:S + {k + 2}])",
        lambda k: f"main: copy(x[T + {k}:T + {k + 2}], y[T + {k}:T + {k + 2}])",
    )


# Ranks


def signals(size: int) -> str:
    """A signal that grows, and is awaited from its end backwards."""
    half = filled(size // 2, "", lambda k: f"main: notify(s, to=tp.rank + 1, value={k + 1})")
    most = half.count("\n")
    back = filled(
        size // 2, "", lambda k: f"side: expect(s, tp.rank + 1, value={max(1, most - k)})"
    )
    return f"{TWO}{half}{back}"


def all_signals(size: int) -> str:
    """Signals between all ranks of a large team."""
    head = "def f(tp: Team[512], x: f32[4, 4], y: out[f32[4, 4]]):\n"
    return filled(
        size, head, lambda k: f"main: notify(s{k}, to=tp.others)\nmain: expect(s{k}, tp.others)"
    )


def large_team(size: int) -> str:
    """A thousand ranks that do not fold, and that signal round and round."""
    head = (
        "def f(tp: Team[1024], x: f32[1024, 4], y: f32[1024, 4]):\n"
        "    main: broadcast(x, y, team=tp, root=0)\n"
    )
    return filled(
        size,
        head,
        lambda k: f"main: copy(x[{k % 1024}], y[{k % 1024}])\nmain: notify(s{k}, to=tp.rank + 1)",
        lambda k: f"side: expect(s{k}, tp.rank - 1)\nside: record(e)\nmain: wait(e)",
    )


def wide_mesh(size: int) -> str:
    """As many ranks as there may be, each with a place in very many teams."""
    teams = [f"t{k}: Team[2]" for k in range(16)]
    more = listed(size, lambda k: f"u{k}: Team[1]")
    return f"def f({', '.join(teams)}, {more}, x: f32[4], y: out[f32[4]]):\n    main: copy(x, y)\n"


def many_programs(size: int) -> str:
    """A Program for each rank of one team."""
    number = max(2, size // 400)
    for _ in range(3):  # as large as the list of the ranks is long
        ranks = ", ".join(map(str, range(number)))
        number = max(2, min(number, size // (len(ranks) + 80)))
    head = "def f{0}(tp: Team[[{1}]], x: f32[4, 4], y: out[f32[4, 4]]):\n    ranks({0})\n"
    ops = '    main: all_reduce(x, y, team=tp, reduce="sum")\n'
    return "\n\n".join(f"{head.format(k, ranks)}{ops}" for k in range(number))


FILLED: dict[str, tuple[str, *tuple[Lines, ...]]] = {
    # Columns of 60,000 runs, on two streams that nothing orders.
    "long_boxes": (
        WIDE,
        lambda k: f"main: copy(x[:, {k % 999}:{k % 999 + 9}], y[:, {k % 999}:{k % 999 + 9}])",
        lambda k: f"side: copy(x[:, {k % 997}:{k % 997 + 7}], y[:, {k % 997}:{k % 997 + 7}])",
    ),
    # Buffers of one storage, each begins where no other does.
    "one_storage": (
        ONE,
        lambda k: (
            f'b{k} = alloc(f32[100000], storage="s", offset={k * 4})\nmain: copy(x, b{k}[0:16].view(4, 4))'
        ),
        lambda k: f"main: copy(b{k}[0:16].view(4, 4), y)",
    ),
    # One slot that is taken again and again, and never freed.
    "one_slot": (
        TWO,
        lambda k: f't{k} = alloc(f32[4, 4], symmetric=tp, storage="s")\nmain: copy(x, t{k})',
    ),
    # A stream for each op, and one that awaits them all.
    "many_streams": (
        ONE,
        lambda k: f"s{k}: copy(x, y)\ns{k}: record(e{k})",
        lambda k: f"main: wait(e{k})",
    ),
    # Streams each of which awaits others: a clock of all for each op.
    "woven_streams": (
        f"{ONE}    s0: record(e0)\n",
        lambda k: f"s{k + 1}: wait(e{k})\ns{k + 1}: wait(e{k // 2})\ns{k + 1}: record(e{k + 1})",
    ),
    # Messages that all wait for each other.
    "messages": (
        TWO,
        lambda k: "main: send(x, peer=tp.rank + 1)",
        lambda k: "main: recv(y, peer=tp.rank + 1)",
    ),
    # Circles of signals, each on two streams of its own.
    "circles": (
        TWO,
        lambda k: f"a{k}: expect(s{k}, tp.rank + 1)\na{k}: notify(t{k}, to=tp.rank + 1)",
        lambda k: f"b{k}: expect(t{k}, tp.rank + 1)\nb{k}: notify(s{k}, to=tp.rank + 1)",
    ),
    # Two streams that write the same, op by op.
    "races": (
        ONE,
        lambda k: "main: copy(x, y)",
        lambda k: "side: copy(x, y)",
    ),
    # A race for each buffer.
    "in_place": (
        ONE,
        lambda k: f"main: copy(y[{k % 3}:{k % 3 + 2}], y[{k % 3 + 1}:{k % 3 + 3}])",
    ),
}
"""Texts of a head and lines over and over, by name."""


def _repeated(name: str, size: int) -> str:
    head, *lines = FILLED[name]
    return filled(size, head, *lines)


HOSTILE: dict[str, Hostile] = {
    each.__name__: each
    for each in (
        odd_strides,
        scattered,
        sized_boxes,
        signals,
        all_signals,
        large_team,
        wide_mesh,
        many_programs,
    )
} | {name: partial(_repeated, name) for name in FILLED}
"""Functions by name that make a text of about so many characters."""


class Measured(NamedTuple):
    """The outcome of `interlace check` on a text."""

    code: int
    """1: unsound; 2: refused; negative: killed."""
    seconds: float
    most_bytes: int
    said: str


def measure(text: str, limit_s: int, *args: str) -> Measured:
    """Checks a text in a process of its own, which ends after so many seconds of a processor."""
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "hostile.ilc", Path(folder) / "out"
        path.write_text(text)
        command = [sys.executable, "-m", "interlace", "check", str(path), *args]
        with out.open("w") as said:
            child = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
            most = (limit_s, limit_s + 5)
            resource.prlimit(child.pid, resource.RLIMIT_CPU, most)
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
        seconds = usage.ru_utime + usage.ru_stime
        return Measured(child.returncode, seconds, usage.ru_maxrss << 10, out.read_text())


if __name__ == "__main__":
    length, *names = sys.argv[1:]
    for name in names or HOSTILE:
        text = HOSTILE[name](int(length))
        done = measure(text, int(os.environ.get("LIMIT", "90")))
        first = " | ".join(done.said.strip().splitlines()[:2])[:150]
        print(
            f"{name:18} {len(text):8} {done.code:3} {done.seconds:6.1f} s "
            f"{done.most_bytes >> 20:6} MB {len(done.said):8}  {first}",
            flush=True,
        )
