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


def deep_boxes(size: int) -> str:
    """Boxes of eight dimensions, each a part of each."""
    shape = ", ".join(["8"] * 8)
    head = f"def f(tp: Team[1], x: f32[{shape}], y: out[f32[{shape}]]):\n"

    def box(k: int) -> str:
        return "[" + ", ".join(f"{k >> d & 3}:{4 + (k >> d & 3)}" for d in range(8)) + "]"

    return filled(
        size,
        head,
        lambda k: f"main: copy(x{box(k)}, y{box(k + 1)})",
        lambda k: f"side: copy(y{box(k * 7)}, x{box(k * 3)})",
    )


def wide_strided(size: int) -> str:
    """`as_strided` boxes of many dimensions whose strides run into each other."""

    def line(k: int) -> str:
        sizes = ", ".join("3" for _ in range(12))
        strides = ", ".join(str(1 + (k * 31 + d * d * 7) % 97) for d in range(12))
        return f"main: copy(x.as_strided(({sizes}), ({strides}), {k % 50}), y.view(-1)[0:531441].view({sizes}))"

    return filled(size, "def f(tp: Team[1], x: f32[8000], y: out[f32[531441]]):\n", line)


def scattered(size: int) -> str:
    """Writes of single elements, and reads of all of them."""
    head = "def f(tp: Team[1], x: f32[100000], y: out[f32[100000]]):\n    t = alloc(f32[100000])\n"
    return filled(
        size,
        head,
        lambda k: f"main: copy(x[{k * 2}:{k * 2 + 1}], t[{k * 2}:{k * 2 + 1}])",
        lambda k: f"main: copy(t[0:{k * 2 + 2}], y[0:{k * 2 + 2}])",
    )


# Names and lists


def nested(size: int) -> str:
    """An expression of brackets in brackets."""
    return f"{ONE}    main: copy(x[0:{'(' * (size // 2)}4{')' * (size // 2)}], y)\n"


def long_product(size: int) -> str:
    """A polynomial that would have millions of terms."""
    names = [f"S{k}" for k in range(24)]
    sizes = ", ".join(f"{name}: Size[2]" for name in names)
    factor = "(" + " + ".join(names) + ")"
    most = " * ".join([factor] * max(2, size // len(factor)))
    return f"def f(tp: Team[1], {sizes}, x: f32[{most}]):\n    main: host_sync()\n"


def many_sizes(size: int) -> str:
    """Thousands of named sizes, compared with one another."""
    sizes = listed(size // 3, lambda k: f"S{k}: Size[{8 + k % 3}]")
    number = sizes.count(":")
    inputs = ", ".join(f"x{k}: f32[S{k}, S{k - 1}]" for k in range(1, number, 2))
    body = lambda k: f"main: copy(x{1 + 2 * (k % (number // 2))}[0:S{k % number} // 2], y)"  # noqa: E731
    head = f"def f(tp: Team[1], {sizes}, {inputs}, y: out[f32[S0, S1]]):\n"
    return filled(size, head, body)


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


# Streams and events


def long_fused(size: int) -> str:
    """One op of very many parts."""
    parts = listed(size, lambda k: f'part(call("aten.neg.out", x, out=y), record(e{k}))')
    return f"{ONE}    main: fused({parts})\n"


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


def lonely(size: int) -> str:
    """Sends and collectives that nobody answers."""
    one = filled(size // 2, "", lambda k: f"s{k}: send(x, peer=1)")
    two = filled(size // 2, "", lambda k: f't{k}: all_reduce(x, y, team=tp, reduce="sum")')
    head = "(tp: Team[[0, 1]], x: f32[4, 4], y: out[f32[4, 4]]):\n    ranks({})\n"
    return f"def f{head.format(0)}{one}\n\ndef g{head.format(1)}{two}"


def collectives(size: int) -> str:
    """Collectives of many teams that two ranks issue in opposite orders."""
    number = max(2, size // 100)
    teams = ", ".join(f"t{k}: Team[[0, 1]]" for k in range(number))
    head = "({}, x: f32[4, 4], y: out[f32[4, 4]]):\n    ranks({})\n"
    ops = [f'    main: all_reduce(x, y, team=t{k}, reduce="sum")\n' for k in range(number)]
    one, two = head.format(teams, 0), head.format(teams, 1)
    return f"def f{one}{''.join(ops)}\n\ndef g{two}{''.join(reversed(ops))}"


def long_circle(size: int) -> str:
    """One circle through everything."""
    return filled(
        size,
        f"{TWO}    a: expect(s0, tp.rank + 1)\n",
        lambda k: (
            f"a: notify(t{k}, to=tp.rank + 1)\nb: expect(t{k}, tp.rank + 1)\nb: notify(s{k + 1}, to=tp.rank + 1)\na: expect(s{k + 1}, tp.rank + 1)"
        ),
        end="    b: notify(s0, to=tp.rank + 1)\n",
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


def largest_team(size: int) -> str:
    """As many ranks as there may be, told apart by what is at a fixed place."""
    head = "def f(tp: Team[65536], x: f32[65536, 4], y: out[f32[65536, 4]]):\n"
    return filled(
        size, head, lambda k: f"main: copy(x[{k % 65536}], y[{k % 65536}])\nmain: barrier(team=tp)"
    )


def many_members(size: int) -> str:
    """As many ranks as there may be, which fold, and each collective is of other views."""
    head = "def f(tp: Team[65536], x: f32[1000000, 4], y: f32[1000000, 4]):\n"
    return filled(
        size,
        head,
        lambda k: (
            f'main: all_reduce(x[{k}:{k + 2}], y[{k}:{k + 2}], team=tp, reduce="sum", '
            f'backend="b{k}")'
        ),
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


# Faults


def scales(size: int) -> str:
    """Packed rows that are cut and moved, over and over."""
    head = (
        "def f(tp: Team[2], x: bf16[4096, 64], w: f8e4m3[64, 64]):\n"
        "    p = empty(f8e4m3[4096, 80])\n    q = empty(f8e4m3[4096, 80])\n"
    )
    return filled(
        size,
        head,
        lambda k: f"main: copy(p[{k % 4000}:{k % 4000 + 9}], q[{k * 7 % 4000}:{k * 7 % 4000 + 9}])",
        lambda k: f"main: copy(q[{k % 99}:{k % 99 + 3000}], p[{k * 3 % 99}:{k * 3 % 99 + 3000}])",
    )


FILLED: dict[str, tuple[str, *tuple[Lines, ...]]] = {
    # Columns of 60,000 runs, on two streams that nothing orders.
    "long_boxes": (
        WIDE,
        lambda k: f"main: copy(x[:, {k % 999}:{k % 999 + 9}], y[:, {k % 999}:{k % 999 + 9}])",
        lambda k: f"side: copy(x[:, {k % 997}:{k % 997 + 7}], y[:, {k % 997}:{k % 997 + 7}])",
    ),
    # Columns of 60,000 runs that are written one by one, and read together, on one stream.
    "written_columns": (
        WIDE,
        lambda k: f"main: copy(x[:, {k % 4095}:{k % 4095 + 1}], y[:, {k % 4095}:{k % 4095 + 1}])",
        lambda k: f"main: copy(y[:, {k % 4000}:{k % 4000 + 96}], x[:, {k % 4000}:{k % 4000 + 96}])",
    ),
    # Buffers of one storage, each begins where no other does.
    "one_storage": (
        ONE,
        lambda k: (
            f'b{k} = alloc(f32[100000], storage="s", offset={k * 4})\nmain: copy(x, b{k}[0:16].view(4, 4))'
        ),
        lambda k: f"main: copy(b{k}[0:16].view(4, 4), y)",
    ),
    "one_storage_freed": (
        ONE,
        lambda k: f'b{k} = alloc(f32[4, 4], storage="s", offset={k % 64 * 4})\nmain: copy(x, b{k})',
        lambda k: f"side: copy(b{k}, y)\nside: free(b{k})",
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
    # Messages on streams of their own, behind others that wait for them.
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
        deep_boxes,
        wide_strided,
        scattered,
        nested,
        long_product,
        many_sizes,
        sized_boxes,
        long_fused,
        signals,
        all_signals,
        lonely,
        collectives,
        long_circle,
        large_team,
        largest_team,
        many_members,
        wide_mesh,
        many_programs,
        scales,
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
