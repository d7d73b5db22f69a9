"""Draws buffers and views of them, for `random_programs.py`."""

from __future__ import annotations

import random
from typing import Any

from interlace.errors import InterlaceError
from interlace.ir import (
    Alloc,
    Box,
    Buffer,
    Dim,
    DType,
    Loc,
    Op,
    Program,
    RankIndex,
    Site,
    Table,
    TableEntry,
    Team,
    View,
)
from interlace.ir.sizes import numbers

STREAMS = ("main", "comm", "copy engine", "stream")
DTYPES = (DType.f32, DType.f32, DType.bf16, DType.i64)
COLS = 4
WORDS = ("layers.0", "it's", 'a "small" one', "")


TRIES = 500


class NoSuchViewError(Exception):
    """No buffer that there is has such a view, as far as was tried."""


class Drawer:
    """The buffers of the Program being made, and views of them that exist on every rank."""

    def __init__(self, rng: random.Random, team_size: int | None, max_streams: int) -> None:
        self.rng = rng
        self.size = team_size or rng.randint(1, 4)
        self.teams = (Team("tp", self.size),)
        if rng.random() < 0.3:
            first = Team(rng.choice(("dp", "data parallel")), rng.randint(1, 2))
            self.teams = (first, *self.teams)
        rows = tuple(rng.randint(0, 3) for _ in range(self.size))
        self.table = Table(rng.choice(("rows", "uneven rows")), "tp", rows)
        frame = Program(teams=self.teams, tables=(self.table,))
        self.wheres = tuple(frame.where(rank) for rank in frame.world)
        self.streams = STREAMS[: rng.randint(1, max_streams)]
        self.sites: list[Site] = []
        self.buffers: dict[str, Buffer] = {}
        self.ops: list[Op] = []

    def emit(self, op: Op) -> None:
        self.ops.append(op)

    def common(self) -> dict[str, Any]:
        site = self.rng.choice((None, *(site.id for site in self.sites)))
        loc = Loc(self.rng.choice(WORDS)) if self.rng.random() < 0.2 else Loc()
        return {"stream": self.rng.choice(self.streams), "site": site, "loc": loc}

    def buffer(self, name: str, kind: str) -> Buffer:
        """All ranks' rows, one rank's (even or uneven), or another shape."""
        rng = self.rng
        own = TableEntry(self.table.name, RankIndex("tp", rng.randint(0, 3)))
        shapes: list[tuple[Dim, ...]] = [(2 * self.size, COLS), (2 * self.size, COLS), (2, COLS)]
        shapes += [(sum(self.table.values), COLS), (COLS, COLS)]
        if kind != "symmetric":
            shapes += [(own, COLS), (), (3,)]
        shape = rng.choice(shapes)
        turned = kind in ("input", "fresh") and shape == (COLS, COLS) and rng.random() < 0.5
        shares = kind == "local" and rng.random() < 0.5
        return self.known(
            Buffer(
                name=f"{name}.odd name" if rng.random() < 0.1 else name,
                dtype=rng.choice(DTYPES),
                shape=shape,
                kind=kind,
                team="tp" if kind == "symmetric" else None,
                strides=(1, COLS) if turned else None,
                storage="arena" if shares else None,
                offset=8 * rng.randint(0, 9) if shares else 0,
            )
        )

    def known(self, buffer: Buffer) -> Buffer:
        self.buffers[buffer.name] = buffer
        return buffer

    def declare(self, buffer: Buffer) -> View:
        self.emit(Alloc(buffer=self.known(buffer), **self.common()))
        return View(buffer.name)

    def alloc(self, kind: str) -> View:
        return self.declare(self.buffer(f"b{len(self.ops)}", kind))

    def like(self, view: View, kind: str) -> View:
        """A new buffer of a view's sizes and element type, which are the same on every rank."""
        (found,) = self.all_sizes(view) or {None}
        assert found is not None, view
        sizes, dtype = found
        team = "tp" if kind == "symmetric" else None
        return self.declare(Buffer(f"b{len(self.ops)}", dtype, sizes, kind, team))

    def boxes(self, view: View) -> list[Box]:
        buffer = self.buffers[view.buffer]
        return [view.box(buffer, where) for where in self.wheres]

    def all_sizes(self, view: View) -> set[tuple[tuple[int, ...], DType]] | None:
        """The view's sizes and element type over the ranks; None where it does not exist."""
        try:
            boxes = self.boxes(view)
        except InterlaceError:
            return None
        whole = self.boxes(View(view.buffer))
        if any(box.hull[1] > all_.hull[1] for box, all_ in zip(boxes, whole, strict=True)):
            return None
        return {(numbers(box.sizes), box.dtype) for box in boxes}

    def view(self, uniform: bool = False, kinds: tuple[str, ...] = ()) -> View:
        """A view of a buffer there is; `uniform`: of the same sizes on every rank."""
        for _ in range(TRIES):
            names = [b.name for b in self.buffers.values() if not kinds or b.kind in kinds]
            view = View(self.rng.choice(names))
            for _ in range(self.rng.choice((0, 0, 1, 1, 2, 3))):
                longer = self.step(view)
                if self.all_sizes(longer) is not None:
                    view = longer
            if not uniform or len(self.all_sizes(view) or ()) == 1:
                return view
        raise NoSuchViewError(f"of {sorted(self.buffers)}")

    def step(self, view: View) -> View:
        rng, index = self.rng, RankIndex("tp", self.rng.randint(-2, 3))
        row = TableEntry(self.table.name, RankIndex("tp", rng.randint(0, 2)))
        return rng.choice(
            (
                view.chunk(index, self.size),
                view.chunk(rng.randrange(self.size), self.size),
                view.chunk(index, self.size, dim=1),
                view.chunk(index, self.table),
                view.slice(0, 0, rng.randint(1, 2)),
                view.slice(1, rng.randint(0, 1), rng.randint(1, 4)),
                view.slice(0, 0, row),
                view.select(rng.randint(0, 1), 0),
                view.permute(1, 0),
                view.view(-1),
                view.view(2, -1),
                view.view(1, -1).expand(2, -1),
                view.cast(DType.u8),
                view.cast(DType.i32),
                view.as_strided((2, 2), (2, 1), 0),
            )
        )

    def written(self, view: View) -> bool:
        """Returns True if no two elements of a view share bytes, so that it may be written."""
        dims = [
            pair for box in self.boxes(view) for pair in zip(box.sizes, box.strides, strict=True)
        ]
        return all(size < 2 or stride for size, stride in dims)

    def target(self, src: View, kind: str = "local") -> View:
        """Somewhere to write what `src` has the size of."""
        wanted = self.all_sizes(src)
        for _ in range(4):
            view = self.view(uniform=True, kinds=(kind,) if kind == "symmetric" else ())
            found = self.all_sizes(view)
            if found == wanted and self.written(view):
                return view
        return self.like(src, kind)

    def rows(self, dtype: DType, rows: Dim) -> View:
        """A new buffer of that many rows."""
        return self.declare(Buffer(f"c{len(self.ops)}", dtype, (rows, COLS)))

    def made(self, place: int) -> Buffer:
        return Buffer(f"t{len(self.ops)}_{place}", self.rng.choice(DTYPES), (2, COLS), "fresh")
