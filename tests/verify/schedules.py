"""Schedules that the tests damage, and the tools to damage them."""

from __future__ import annotations

from pathlib import Path

from interlace.ir import Program, parse, parse_set

GOLDEN = Path(__file__).parents[1] / "golden"

GRADIENTS = """
def gradients(
    dp: Team[2], tp: Team[2],
    g: f32[4, 4], w: f32[4, 4], out_1: out[f32[4, 4]], out_2: out[f32[2, 4]],
):
    full = alloc(f32[8, 4])
    sums = alloc(f32[4, 4])
    comm: all_gather(g, full, team=tp)
    comm: record(gathered)
    main: call("aten.mm.out", g, w, out=sums)
    main: record(summed)
    main: wait(gathered)
    main: call("aten.mm.out", full[tp.rank], w, out=out_1)
    comm: wait(summed)
    comm: all_reduce(sums, sums, reduce="sum", team=dp)
    comm: reduce_scatter(sums, out_2, reduce="sum", team=tp)
    main: free(full)
    comm: free(sums)
"""
"""Collectives of two teams on a 2-D mesh."""

SLOTS = """
def layers(tp: Team[2], x: f32[2, 4], y: out[f32[4, 4]]):
    a = alloc(f32[4, 4], symmetric=tp, storage="slot")
    t = alloc(f32[4, 4], storage="arena")
    main: copy(x, a[tp.rank])
    main: notify(ready, to=tp.others, value=1)
    main: expect(ready, tp.rank + 1, value=1)
    main: get(a[tp.rank + 1], peer=tp.rank + 1)
    main: call("aten.relu.out", a, out=t)
    main: free(a)
    main: record(computed)
    b = alloc(f32[4, 4], symmetric=tp, storage="slot", stream="comm")
    comm: wait(computed)
    comm: copy(t[tp.rank], b[tp.rank])
    comm: notify(ready, to=tp.others, value=2)
    comm: record(copied)
    main: wait(copied)
    main: free(t)
    u = alloc(f32[4, 4], storage="arena")
    main: call("aten.neg.out", x, out=u[tp.rank])
    main: call("aten.neg.out", x, out=u[tp.rank + 1])
    comm: expect(ready, tp.rank + 1, value=2)
    comm: get(b[tp.rank + 1], peer=tp.rank + 1)
    comm: record(got)
    main: wait(got)
    main: call("aten.add.out", b, u, out=y)
    main: free(b)
    main: free(u)
"""
"""Two layers that take turns on one slot, and two buffers that share a storage."""


def text_of(name: str) -> str:
    """The text of a schedule: one of this page, or a golden file."""
    own = {"gradients": GRADIENTS, "slots": SLOTS}
    return own[name] if name in own else (GOLDEN / f"{name}.ilc").read_text()


def without(text: str, fragment: str, nth: int = 0) -> str:
    """The text without the nth line that holds the fragment."""
    lines = text.splitlines()
    found = [i for i, line in enumerate(lines) if fragment in line]
    del lines[found[nth]]
    return "\n".join(lines)


def moved(text: str, fragment: str, before: str) -> str:
    """The text with the line that holds one fragment moved before the line that holds another."""
    lines = text.splitlines()
    line = lines.pop(next(i for i, line in enumerate(lines) if fragment in line))
    lines.insert(next(i for i, other in enumerate(lines) if before in other), line)
    return "\n".join(lines)


def replaced(text: str, old: str, new: str, nth: int = 0) -> str:
    """The text with the nth occurrence of a fragment replaced."""
    parts = text.split(old)
    assert len(parts) > nth + 1, f"{old!r} is not there"
    return old.join(parts[: nth + 1]) + new + old.join(parts[nth + 1 :])


def on_ranks(text: str, damaged: str, ranks: tuple[int, ...] = (1,)) -> list[Program]:
    """A set in which only some ranks run the damaged text."""
    good, bad = parse(text), parse(damaged)
    return [(bad if rank in ranks else good).instantiate(rank) for rank in good.world]


def programs(text: str) -> tuple[Program, ...]:
    """The Programs of a text."""
    return parse_set(text)
