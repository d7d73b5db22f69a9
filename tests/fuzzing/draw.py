"""Random small Programs, well-formed and mostly reasonable, some of them wrong on purpose.

A Program is drawn op by op. Whoever draws an op that touches what another stream (or rank) touched
before adds, most of the time, the event or the signal that orders the two; what is forgotten makes
races, and what is then mutilated on one rank makes deadlocks. Every op of the IR takes part.

    program = Draw(random.Random(7)).program(num_steps=4)
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable

from tests.fuzzing.collectives import draw_collective, draw_in_flight, uneven

from interlace.errors import ProgramError
from interlace.ir import (
    Alloc,
    Buffer,
    Call,
    Collective,
    Copy,
    DType,
    Expect,
    Free,
    Fused,
    FusedMember,
    Get,
    Group,
    HostSync,
    Notify,
    Op,
    Others,
    Program,
    Put,
    RankIndex,
    Record,
    Recv,
    Send,
    Table,
    Team,
    View,
    Wait,
    validate,
)
from interlace.ir.sizes import numbers

ROWS = 2


class Draw:
    """Draws one SPMD Program."""

    def __init__(self, rng: random.Random, size: int | None = None, counts: float = 0.0) -> None:
        """`counts`: the share of all-to-alls whose counts are data."""
        self.rng, self.counted = rng, counts
        self.size = size or rng.choice((2, 2, 2, 3))
        self.width = rng.choice((2, 2, 3, 4))
        self.slot_teams = ["tp"]
        """Teams whose ranks may share slots."""
        self.teams = self.draw_teams(tuple(range(self.size)))
        self.rows_of_all = ROWS * self.size
        self.tables = [uneven(team, ROWS * team.size, rng) for team in self.teams]
        self.streams = ("main", "comm", "side")[: rng.choice((1, 2, 2, 2, 3))]
        self.care = self.care_taken()
        self.ops: list[Op] = []
        self.last: dict[str, dict[str, bool]] = {}  # buffer -> stream -> whether it wrote
        self.live: list[Buffer] = []
        self.counts: dict[str, Buffer] = {}
        """Inputs with the counts of exchanges, by name."""
        self.where = Program(teams=tuple(self.teams), tables=tuple(self.tables)).where(0)
        self.num_events = 0
        self.num_signals = 0
        self.num_names = 0

    def draw_teams(self, ranks: tuple[int, ...]) -> list[Team]:
        aux = Team("aux", self.size, (ranks[::-1],))
        return [Team("tp", self.size), *([aux] if self.rng.random() < 0.4 else [])]

    def care_taken(self) -> float:
        """Draws the probability that an op needed for the order is kept."""
        return self.rng.choice((1.0, 1.0, 0.9, 0.7))

    def program(self, num_steps: int) -> Program:
        x = Buffer("x", DType.i16, (ROWS, self.width), "input")
        y = Buffer("y", DType.i16, (ROWS * self.size, self.width), "output")
        self.live = [x, y]
        params = [x, y]
        whole = View("y")
        if self.rng.random() < 0.8:
            self.add(Copy(src=View("x").expand(ROWS, self.width), dst=whole.chunk(0, self.size)))
            for i in range(1, self.size):
                self.add(Copy(src=View("x"), dst=whole.chunk(i, self.size)))
        steps = self.steps()
        drawn = self.rng.choices([*steps], [*steps.values()], k=num_steps)
        if self.counted == 1:
            drawn[self.rng.randrange(num_steps)] = self.collective
        for step in drawn:
            step()
        for buffer in [b for b in self.live if b.kind == "symmetric"]:
            if self.rng.random() < 0.95:
                self.release(buffer)
        return Program(
            teams=tuple(self.teams),
            tables=self.used_tables(),
            params=(*params, *self.counts.values()),
            ops=tuple(self.ops),
            results=(View("y"),),
        )

    def steps(self) -> dict[Callable[[], None], float]:
        """The possible next steps, each with its weight."""
        return {
            self.compute: 5,
            self.collective: 3,
            self.in_flight: 3,
            self.alloc: 3,
            self.exchange: 2,
            self.group: 1,
            self.fused: 1.5,
            self.one_sided: 5,
            self.free: 2,
            self.host_sync: 0.5,
            self.count: 0.5,
            self.stray: 0.5,
        }

    def used_tables(self) -> tuple[Table, ...]:
        used = {op.splits for op in self.ops if isinstance(op, Collective)}
        return tuple(table for table in self.tables if table.name in used)

    # Ops

    def add(self, op: Op) -> None:
        """Adds an op, behind the events that order it with what touched its buffers before."""
        touched = [(a, False) for a in op.reads()] + [(a, True) for a in op.writes()]
        waited: set[str] = set()
        for access, write in touched:
            for stream, wrote in self.last.get(access.view.buffer, {}).items():
                if stream == op.stream or not (write or wrote) or stream in waited:
                    continue
                if self.rng.random() < self.care:
                    waited.add(stream)
                    self.order(stream, op.stream)
        self.ops.append(op)
        for access, write in touched:
            self.remember(access.view.buffer, op.stream, write)

    def remember(self, name: str, stream: str, write: bool) -> None:
        streams = self.last.setdefault(name, {})
        if write:
            streams.clear()
        streams[stream] = write or streams.get(stream, False)

    def order(self, before: str, after: str) -> None:
        name = f"e{self.num_events % 3}" if self.rng.random() < 0.5 else f"f{self.num_events}"
        self.num_events += 1
        if self.rng.random() < 0.08:
            self.ops.append(HostSync(stream=before))
            return
        self.ops.append(Record(event=name, stream=before))
        self.ops.append(Wait(event=name, stream=after))

    def stream(self) -> str:
        return self.rng.choice(self.streams)

    def team(self) -> Team:
        return self.rng.choice(self.teams)

    def rows(self, buffer: Buffer) -> View:
        """A view of ROWS rows of a buffer."""
        return self.rows_in(View(buffer.name))

    def rows_in(self, view: View) -> View:
        """ROWS rows of a view, if it has as many rows as all ranks, else the view."""
        if self.sizes(view)[0] != ROWS * self.size:
            return view
        index = self.rng.choice((0, 1, RankIndex("tp"), RankIndex("tp", 1)))
        if self.rng.random() < 0.15:
            start = self.rng.randrange(ROWS * self.size - ROWS + 1)
            return view.slice(0, start, start + ROWS)
        return view.chunk(index, self.size)

    def columns(self, *views: View) -> tuple[View, ...]:
        """Some columns of each of the views: as many of each, and mostly the same."""
        some = self.rng.randint(1, self.width - 1)
        start = self.rng.randint(0, self.width - some)
        found: list[View] = []
        for view in views:
            if self.rng.random() < 0.4:
                start = self.rng.randint(0, self.width - some)
            found.append(view.slice(1, start, start + some))
        return tuple(found)

    def sizes(self, view: View) -> tuple[int, ...]:
        """On rank 0; a chunk by a table may have others elsewhere."""
        buffer = next(b for b in self.live if b.name == view.buffer)
        if not view.steps:
            return numbers(tuple(map(self.where.dim, buffer.shape)))
        return numbers(view.box(buffer, self.where).sizes)

    def some(self, symmetric: bool = True) -> Buffer:
        found = [b for b in self.live if symmetric or b.kind != "symmetric"]
        return self.rng.choice(found)

    def compute(self) -> None:
        src, dst = self.rows(self.some()), self.rows(self.some())
        if self.rng.random() < 0.15:
            src, dst = src.slice(0, 0, 1), dst.slice(0, *self.rng.choice(((0, 1), (1, 2))))
        if self.rng.random() < 0.4:
            src, dst = self.columns(src, dst)
        kind = self.rng.random()
        stream = self.stream()
        if kind < 0.1:
            self.add(
                Call(fn="aten.bernoulli.out", args=(src,), outs=(dst,), rng=True, stream=stream)
            )
        elif kind < 0.2:
            name = self.name("t")
            shape = self.sizes(src)
            fresh = Buffer(name, DType.i16, shape, "fresh")
            self.add(
                Call(
                    fn="aten.neg.default",
                    args=(src,),
                    fresh=(fresh,),
                    stream=stream,
                )
            )
            if shape == (ROWS, self.width):
                self.live.append(fresh)
        elif kind < 0.3:
            self.add(
                Call(fn="aten.neg_.default", args=(dst,), outs=(dst,), mutates=True, stream=stream)
            )
        elif kind < 0.35:
            step = self.rng.choice((1, self.width, self.width + 1))
            strided = View(dst.buffer).as_strided((2,), (step,), self.rng.choice((0, 1)))
            self.call("aten.neg.out", stream, (src,), strided)
        else:
            self.call("aten.neg.out", stream, (src,), dst)

    def call(self, fn: str, stream: str, args: tuple[View, ...], out: View, **more: object) -> None:
        op = Call(fn=fn, args=args, outs=(out,), stream=stream)
        self.add(dataclasses.replace(op, **more))  # pyright: ignore[reportArgumentType]

    def collective(self) -> None:
        self.add(draw_collective(self))

    def counts_of(self, team: Team) -> tuple[View, View]:
        """Two inputs with a count for each rank of a team, or one and the same."""
        names = [f"counts{self.rng.randrange(2)}_{team.name}" for _ in range(2)]
        for name in names:
            self.counts[name] = Buffer(name, DType.i64, (team.size,), "input")
        return View(names[0]), View(names[1])

    def count(self) -> None:
        """Writes counts, if there are any."""
        if self.counts:
            view = View(self.rng.choice([*self.counts]))
            self.call("aten.neg_.default", self.stream(), (view,), view, mutates=True)

    def in_flight(self) -> None:
        draw_in_flight(self, self.reachable())

    def message(self) -> tuple[View, View]:
        """Draws the source and destination of a message; now and then without a row."""
        src, dst = self.rows(self.some()), self.rows(self.some())
        if self.rng.random() < 0.15:
            return src.slice(0, 0, 0), dst.slice(0, 0, 0)
        return src, dst

    def exchange(self) -> None:
        """A send and a receive around the ring, on one stream (which blocks) or on two."""
        team, k = self.team().name, self.rng.choice((1, -1, 1, -1, 0))
        src, dst = self.message()
        send = Send(src=src, peer=RankIndex(team, k), team=team, stream=self.stream())
        receive = Recv(dst=dst, peer=RankIndex(team, -k), team=team, stream=self.stream())
        if len(self.streams) == 1:
            self.add(Group(ops=(send, dataclasses.replace(receive, stream=send.stream))))
            return
        if self.rng.random() < 0.8 and send.stream == receive.stream:
            other = self.rng.choice([s for s in self.streams if s != send.stream])
            receive = dataclasses.replace(receive, stream=other)
        for op in self.rng.sample((send, receive), 2):
            self.add(op)

    def group(self) -> None:
        team, k, stream = self.team().name, self.rng.choice((1, -1, 1, -1, 0)), self.stream()
        ops: list[Send | Recv] = []
        for _ in range(self.rng.choice((1, 1, 2))):
            src, dst = self.message()
            ops.append(Send(src=src, peer=RankIndex(team, k), team=team, stream=stream))
            ops.append(Recv(dst=dst, peer=RankIndex(team, -k), team=team, stream=stream))
        self.rng.shuffle(ops)
        self.add(Group(ops=tuple(ops), stream=stream))

    def fused(self) -> None:
        """Parts that compute; what orders them with each other and with peers is in them."""
        stream, care = self.stream(), self.care
        parts: list[list[FusedMember]] = []
        touched: list[dict[str, bool]] = []
        for _ in range(self.rng.choice((1, 2, 2, 3))):
            src, dst = self.rows(self.some()), self.rows(self.some())
            call = Call(fn="aten.neg.out", args=(src,), outs=(dst,), stream=stream)
            mine = {src.buffer: False, dst.buffer: True}
            waits: list[FusedMember] = []
            for other in {
                other
                for name, write in mine.items()
                for other, wrote in self.last.get(name, {}).items()
                if other != stream and (write or wrote) and self.rng.random() < care
            }:
                self.ops.append(Record(event=self.name("g"), stream=other))
                waits.append(Wait(event=f"g{self.num_names}", stream=stream))
            for part, theirs in zip(parts, touched, strict=True):
                both = mine.keys() & theirs.keys()
                if any(mine[n] or theirs[n] for n in both) and self.rng.random() < care:
                    part.append(Record(event=self.name("g"), stream=stream))
                    waits.append(Wait(event=f"g{self.num_names}", stream=stream))
            parts.append([*waits, call])
            touched.append(mine)
        if self.rng.random() < 0.4:
            signal, k = self.name("s"), self.rng.choice((1, -1))
            to, awaited = RankIndex("tp", k), RankIndex("tp", -k)
            raising, waiting = self.rng.choice(parts), self.rng.choice(parts)
            raising.append(Notify(signal=signal, peer=to, team="tp", stream=stream))
            expect = Expect(signal=signal, peer=awaited, team="tp", stream=stream)
            waiting.insert(self.rng.choice((0, len(waiting))), expect)
        self.ops.append(Fused(parts=tuple(map(tuple, parts)), stream=stream))
        for mine in touched:
            for name, write in mine.items():
                self.remember(name, stream, write)

    def name(self, prefix: str) -> str:
        self.num_names += 1
        return f"{prefix}{self.num_names}"

    def alloc(self, kind: str = "") -> None:
        name, stream = self.name("b"), self.stream()
        kind = kind or self.rng.choice(("local", "local", "symmetric", "symmetric", "fresh"))
        shape = self.rng.choice(((ROWS, self.width), (ROWS * self.size, self.width)))
        storage, offset, team = None, 0, None
        if kind == "symmetric":
            shape, team = (ROWS * self.size, self.width), self.rng.choice(self.slot_teams)
            storage = self.rng.choice((None, "slot"))
        elif kind == "local" and self.rng.random() < 0.7:
            storage, offset = "arena", self.rng.choice((0, 0, 2, 4, 6, 8))
        buffer = Buffer(name, DType.i16, shape, kind, team, storage=storage, offset=offset)
        self.ops.append(Alloc(buffer=buffer, stream=stream))
        if kind == "symmetric":
            self.remember(name, stream, True)
        if storage is not None and kind == "local":
            freed = [b for b in self.last if b.startswith("freed ")]
            for other in freed:
                for before in self.last[other]:
                    if before != stream and self.rng.random() < self.care:
                        self.order(before, stream)
            self.remember(name, stream, True)
        self.live.append(buffer)

    def free(self) -> None:
        inputs = ("input",) if self.rng.random() < 0.2 else ()
        kinds = ("local", "symmetric", *inputs)
        found = [b for b in self.live if b.kind in kinds]
        if found:
            self.release(self.rng.choice(found))

    def release(self, buffer: Buffer) -> None:
        stream = self.stream()
        for before in list(self.last.get(buffer.name, {})):
            if before != stream and self.rng.random() < self.care:
                self.order(before, stream)
        self.ops.append(Free(buffer=buffer.name, stream=stream))
        self.last[f"freed {buffer.name}"] = {stream: True}
        if self.rng.random() < 0.85:
            self.live.remove(buffer)

    def reachable(self) -> Buffer:
        """A buffer that peers reach."""
        slots = [b for b in self.live if b.team is not None]
        if not slots:
            self.alloc("symmetric")
            slots = self.live[-1:]
        return self.rng.choice(slots)

    def announce(self, source: str, sink: str, to: RankIndex, awaited: RankIndex) -> None:
        """`source` tells a peer (or all) that it is here, and `sink` awaits the same of another."""
        signal, team = self.name("s") if self.rng.random() < 0.7 else "s", to.team
        if signal == "s":
            self.num_signals += 1
        value = 1 if signal != "s" else self.num_signals
        peer, other = to, awaited
        if self.rng.random() < 0.2:
            peer = Others(team)
            other = Others(team) if self.rng.random() < 0.3 else awaited
        if self.rng.random() < max(self.care, 0.8):
            for kind, whose, stream in ((Notify, peer, source), (Expect, other, sink)):
                op = kind(signal=signal, peer=whose, team=team, value=value, stream=stream)
                self.ops.append(op)

    def one_sided(self) -> None:
        """Write, notify, expect and get; or put, notify, expect and read."""
        buffer = self.reachable()
        team = buffer.team or "tp"
        view, k = View(buffer.name), self.rng.choice((1, -1))
        mine, right, left = RankIndex(team), RankIndex(team, k), RankIndex(team, -k)
        source, sink = self.stream(), self.stream()
        cut = self.columns(view)[0].steps[-1] if self.rng.random() < 0.25 else None

        def part(of: View) -> View:
            """All of what a peer holds, or some columns of it."""
            return of if cut is None else of.then(cut)

        if self.rng.random() < 0.5:
            src = self.rows(self.some(symmetric=False))
            self.add(Copy(src=src, dst=view.chunk(mine, self.size), stream=source))
            self.announce(source, sink, left, right)
            src = part(view.chunk(right, self.size))
            self.add(Get(src=src, peer=right, team=team, stream=sink))
        else:
            src, dst = self.rows(self.some()), self.rows(self.some())
            target = part(view.chunk(mine, self.size))
            self.add(Put(src=part(src), dst=target, peer=right, team=team, stream=source))
            self.announce(source, sink, right, left)
            self.add(Copy(src=view.chunk(left, self.size), dst=dst, stream=sink))

    def host_sync(self) -> None:
        self.ops.append(HostSync(stream=self.stream()))

    def stray(self) -> None:
        """An event or a signal that nobody asked for."""
        kind = self.rng.random()
        if kind < 0.4:
            self.ops.append(Record(event=f"e{self.rng.randrange(3)}", stream=self.stream()))
        elif kind < 0.7 and self.num_events:
            self.ops.append(Wait(event=f"e{self.rng.randrange(3)}", stream=self.stream()))
        else:
            signal = self.name("s")
            self.ops.append(
                Notify(signal=signal, peer=RankIndex("tp", 1), team="tp", stream=self.stream())
            )


def well_formed(rng: random.Random, num_steps: int) -> Program:
    """A drawn Program that validates: no stray wait comes before its event."""
    while True:
        program = Draw(rng).program(num_steps)
        with contextlib.suppress(ProgramError):
            return validate(program)
