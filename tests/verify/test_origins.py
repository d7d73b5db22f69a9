"""Origins of bytes that views write and read, against a list with the origin of every byte."""

from __future__ import annotations

import random

from interlace.ir import Box, parse
from interlace.ir.sizes import number, numbers
from interlace.verify.build import GraphBuilder
from interlace.verify.regions import Regions
from interlace.verify.scales import Origin, Strip, _Walk
from interlace.verify.source import lower
from interlace.verify.sweep import Content, Sweep

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


def each(strip: Strip) -> list[object]:
    """The origin of each byte; no origin is named that has none."""
    assert all(size > 0 for size, _ in strip)
    keys = [(number(size), None if origin is None else origin.key) for size, origin in strip]
    return [
        key.name if isinstance(key, Content) else key for size, key in keys for _ in range(size)
    ]


def moves(lines: list[str]) -> _Walk:
    text = "def f(x: bf16[4, 6], y: bf16[4, 6]):\n    t = alloc(bf16[4, 6])\n"
    program, regions = parse(text + "".join(f"    main: {line}\n" for line in lines)), Regions()
    builder = GraphBuilder([lower(program, regions)], regions)
    builder.build()
    return _Walk(builder, Sweep(builder))


def test_origins_agree_with_a_list_of_bytes(seed: int) -> None:
    rng = random.Random(seed)
    views = [tuple(rng.choice(VIEWS).format(rng.choice("xyt")) for _ in "rw") for _ in range(1500)]
    walk = moves([f'call("aten.neg.out", {src}, out={dst})' for src, dst in views])
    memory: dict[str, list[object]] = {name: [name] * 48 for name in "xy"}
    memory["t"] = [None] * 48
    (place,) = walk.sweep.graph.places
    met = 0
    for item in place.source.items:
        for touch in item.touches if item.op is not None else ():
            known, box = memory[touch.spot.buffer.name], walk.box(place, touch)
            strip = walk.read(place, touch, rng.choice((None, box)))
            assert each(strip) == [known[at] for at in bytes_of(box)], (seed, touch.spot.view)
            met += len(strip)
            if not touch.write:
                continue
            new, left = list[tuple[int, Origin | None]](), len(bytes_of(box))
            while left:
                new.append((rng.randint(1, left), rng.choice((None, *map(Origin, "abc")))))
                left -= new[-1][0]
            given = rng.choice((new, new, new, None))
            walk.write(place, touch, given)
            held = each(new) if given is not None else [None] * len(bytes_of(box))
            for at, origin in zip(bytes_of(box), held, strict=True):
                known[at] = origin
    assert met > 4000
