"""Origins of bytes that views write and read, against a list with the origin of every byte."""

from __future__ import annotations

import random

import pytest

from interlace.ir import Box, parse
from interlace.ir.sizes import number, numbers
from interlace.verify import scales as module
from interlace.verify.build import GraphBuilder
from interlace.verify.regions import Regions
from interlace.verify.scales import Origins, Strip
from interlace.verify.source import lower
from interlace.verify.sweep import Sweep

VIEWS = (
    *("{}", "{}[1:3]", "{}[3:4]", "{}[2:2]", "{}.view(24)[5:6]", "{}.view(24)[3:17]"),
    *("{}.slice(1, 0, 1)", "{}.slice(1, 1, 3)", "{}.slice(1, 2, 6)", "{}[0:2].slice(1, 2, 4)"),
    *("{}.permute(1, 0)", "{}[1:3].permute(1, 0)", "{}.slice(1, 0, 2).permute(1, 0)"),
    *("{}.view(2, 2, 6).permute(1, 0, 2)", "{}.view(4, 3, 2).slice(1, 1, 2)"),
    *("{}.as_strided((2, 3), (1, 7), 4)", "{}.as_strided((3, 2), (2, 1), 9)"),
)


def bytes_of(box: Box) -> list[int]:
    """Every byte of a box, in the order of its elements."""
    starts, item = [number(box.offset)], box.dtype.itemsize
    for size, stride in zip(numbers(box.sizes), numbers(box.strides), strict=True):
        starts = [start + i * stride for start in starts for i in range(size)]
    return [start * item + i for start in starts for i in range(item)]


def each(strip: Strip[str]) -> list[str | None]:
    """The origin of each byte; no origin is named that has none."""
    assert all(size > 0 for size, _ in strip)
    return [origin for size, origin in strip for _ in range(number(size))]


def moves(lines: list[str]) -> tuple[Sweep, Origins[str]]:
    text = "def f(x: bf16[4, 6], y: bf16[4, 6]):\n    t = alloc(bf16[4, 6])\n"
    program, regions = parse(text + "".join(f"    main: {line}\n" for line in lines)), Regions()
    builder = GraphBuilder([lower(program, regions)], regions)
    sweep = Sweep(builder.build(), regions, builder.slot)
    return sweep, Origins(sweep, lambda content: f"all of {content.name}")


def test_origins_agree_with_a_list_of_bytes(seed: int) -> None:
    rng = random.Random(seed)
    views = [tuple(rng.choice(VIEWS).format(rng.choice("xyt")) for _ in "rw") for _ in range(1500)]
    sweep, origins = moves([f'call("aten.neg.out", {src}, out={dst})' for src, dst in views])
    memory: dict[str, list[str | None]] = {name: [f"all of {name}"] * 48 for name in "xy"}
    memory["t"] = [None] * 48
    (place,) = sweep.graph.places
    met = 0
    for item in place.source.items:
        for touch in item.touches if item.op is not None else ():
            known, box = memory[touch.spot.buffer.name], origins.box(place, touch)
            strip = origins.read(place, touch, rng.choice((None, box)))
            assert each(strip) == [known[at] for at in bytes_of(box)], (seed, touch.spot.view)
            met += len(strip)
            if not touch.write:
                continue
            new, left = list[tuple[int, str | None]](), len(bytes_of(box))
            while left:
                new.append((rng.randint(1, left), rng.choice((None, "a", "b", "c"))))
                left -= new[-1][0]
            given = rng.choice((new, new, new, None))
            origins.write(place, touch, given)
            held = each(new) if given is not None else [None] * len(bytes_of(box))
            for at, origin in zip(bytes_of(box), held, strict=True):
                known[at] = origin
    assert met > 4000


def test_a_view_of_many_runs_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four runs are; what twelve runs write is unknown from the first to the last."""
    monkeypatch.setattr(module, "MOST", 4)
    views = ("x.slice(1, 5, 6)", "x.view(4, 3, 2).slice(2, 0, 1)", "x")
    sweep, origins = moves([f'call("aten.neg.out", {view}, out={view})' for view in views])
    (place,) = sweep.graph.places
    calls = [item.touches for item in place.source.items if len(item.touches) == 2]
    (column, to_column), (twelve, to_twelve), (whole, _) = calls
    assert each(origins.read(place, column)) == ["all of x"] * 8
    origins.write(place, to_column, [(4, "a"), (4, "b")])
    assert each(origins.read(place, column)) == ["a"] * 4 + ["b"] * 4
    assert origins.read(place, twelve) == [(24, None)]
    assert each(origins.read(place, whole)).count("all of x") == 40
    origins.write(place, to_twelve, [(24, "c")])
    assert each(origins.read(place, whole)) == [None] * 46 + ["b"] * 2
