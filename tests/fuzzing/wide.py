"""Draws what `Draw` does not: more teams, parts by tables, sizes by the rank, odd views.

    program = WideDraw(random.Random(7)).program(num_steps=4)

Of two ranks each may be a team by itself, and of three ranks two may be one. An op of that team is
in the list of the third rank too: whoever instantiates the Program takes it out there (sets.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.fuzzing.draw import ROWS, Draw

from interlace.ir import (
    Alloc,
    Buffer,
    Call,
    Collective,
    Copy,
    DType,
    Free,
    Get,
    Group,
    Op,
    Put,
    RankIndex,
    Recv,
    Send,
    Table,
    TableEntry,
    Team,
    View,
)

PAIR = "pair"
"""The team of two ranks of three."""


class WideDraw(Draw):
    """Draws one SPMD Program of 2 or 3 ranks, with up to three teams."""

    def draw_teams(self, ranks: tuple[int, ...]) -> list[Team]:
        rng, teams = self.rng, super().draw_teams(ranks)
        if len(teams) > 1 and rng.random() < 0.3:
            self.slot_teams.append("aux")
        if rng.random() < 0.2:
            teams.append(Team("turned", len(ranks), ((*ranks[1:], 0),)))
            self.slot_teams.append("turned")
        if len(teams) < 3 and rng.random() < 0.15:
            if len(ranks) == 2:
                teams.append(Team("solo", 1, ((0,), (1,))))
                self.slot_teams.append("solo")
            elif len(ranks) == 3:
                teams.append(Team(PAIR, 2, (tuple(rng.sample(ranks, 2)),)))
        self.just_before = ""
        self.cut: set[str] = set()
        """Tables that views and buffers name."""
        return teams

    def care_taken(self) -> float:
        """More than elsewhere: a fault is seen best in what has no other."""
        return self.rng.choice((1.0, 1.0, 1.0, 1.0, 0.95, 0.9, 0.7))

    def some(self, symmetric: bool = True) -> Buffer:
        """Mostly not the buffer of just before: few ops may work in place."""
        found = super().some(symmetric)
        if found.name == self.just_before and self.rng.random() < 0.9:
            found = super().some(symmetric)
        self.just_before = found.name
        return found

    def alloc(self, kind: str = "") -> None:
        """Mostly written at once, since nobody reads what holds nothing."""
        super().alloc(kind)
        buffer = self.live[-1]
        if self.rng.random() < 0.85:
            self.fill(buffer)

    def fill(self, buffer: Buffer) -> None:
        view, stream = View(buffer.name), self.stream()
        source = View("x") if buffer.shape[0] == ROWS else View("y")
        self.add(Copy(src=source, dst=view, stream=stream))
        if buffer.kind == "symmetric":
            self.settle()

    def settle(self) -> None:
        """Often lets all ranks and streams wait for one another: what peers do needs that."""
        if self.rng.random() > 0.6:
            return
        stream = self.stream()
        others = [other for other in self.streams if other != stream]
        for other in others:
            self.order(other, stream)
        team = self.rng.choice(self.slot_teams[:1] * 3 + self.slot_teams)
        self.ops.append(Collective(kind="barrier", team=team, stream=stream))
        for other in others:
            self.order(stream, other)
        self.last.clear()

    def one_sided(self) -> None:
        super().one_sided()
        self.settle()

    def in_flight(self) -> None:
        super().in_flight()
        self.settle()

    def steps(self) -> dict[Callable[[], None], float]:
        return {
            **super().steps(),
            self.uneven_copy: 0.7,
            self.uneven_put_or_get: 0.7,
            self.uneven_messages: 0.4,
            self.sized_by_rank: 0.6,
            self.odd_views: 1.2,
        }

    def used_tables(self) -> tuple[Table, ...]:
        used = {table.name for table in super().used_tables()} | self.cut
        return tuple(table for table in self.tables if table.name in used)

    def wide(self) -> View:
        """A buffer with the rows of all ranks."""
        return View(self.rng.choice([b for b in self.live if b.shape[0] == self.rows_of_all]).name)

    def table(self) -> Table:
        """A table of the rows of all ranks, which is then used."""
        sizes = {team.name: team.size for team in self.teams}
        table = self.rng.choice([t for t in self.tables if sizes[t.team] == self.size])
        self.cut.add(table.name)
        return table

    def uneven_copy(self) -> None:
        table, k = self.table(), self.rng.choice((0, 0, 1))
        index = self.rng.choice((RankIndex(table.team, k), k))
        src, dst = (self.wide().chunk(index, table) for _ in range(2))
        self.add(Copy(src=src, dst=dst, stream=self.stream()))

    def uneven_put_or_get(self) -> None:
        buffer, table, k = self.reachable(), self.table(), self.rng.choice((1, -1))
        team, source, sink = buffer.team or "tp", self.stream(), self.stream()
        right, left = RankIndex(team, k), RankIndex(team, -k)
        slot, own = View(buffer.name), RankIndex(table.team)
        if self.rng.random() < 0.5:
            src, dst = self.wide().chunk(own, table), slot.chunk(own, table)
            self.add(Put(src=src, dst=dst, peer=right, team=team, stream=source))
            self.announce(source, sink, right, left)
            there = slot.chunk(RankIndex(table.team, -k), table)
            self.add(Call(fn="aten.neg.out", args=(there,), outs=(self.rows(self.some()),)))
            return
        self.add(Copy(src=self.wide().chunk(own, table), dst=slot.chunk(own, table), stream=source))
        self.announce(source, sink, left, right)
        there = slot.chunk(RankIndex(table.team, k), table)
        here = self.wide().chunk(RankIndex(table.team, k), table)
        dst = here if self.rng.random() < 0.5 else None
        self.add(Get(src=there, dst=dst, peer=right, team=team, stream=sink))
        self.settle()

    def uneven_messages(self) -> None:
        """Each rank gets as many rows as the table gives it."""
        table, k, stream = self.table(), self.rng.choice((1, -1)), self.stream()
        team, to, of = table.team, RankIndex(table.team, k), RankIndex(table.team, -k)
        src, dst = self.wide().chunk(to, table), self.wide().chunk(RankIndex(team), table)
        backend = self.rng.choice((None, None, "gloo"))
        send = Send(src=src, peer=to, team=team, backend=backend, stream=stream)
        receive = Recv(dst=dst, peer=of, team=team, backend=backend, stream=stream)
        if self.rng.random() < 0.6 or len(self.streams) == 1:
            self.add(Group(ops=(send, receive), stream=stream))
            return
        self.add(replace(receive, stream=self.rng.choice(self.streams)))
        self.add(send)

    def sized_by_rank(self) -> None:
        """A buffer with as many rows as a table gives the rank."""
        table, name = self.table(), self.name("r")
        own = RankIndex(table.team)
        kind = self.rng.choice(("fresh", "local"))
        shape = (TableEntry(table.name, own), self.width)
        self.ops.append(Alloc(buffer=Buffer(name, DType.i16, shape, kind), stream=self.stream()))
        part = self.wide().chunk(own, table)
        ops: list[Op] = [Copy(src=part, dst=View(name), stream=self.stream())]
        ops.append(Copy(src=View(name), dst=self.wide().chunk(own, table), stream=self.stream()))
        for op in ops if self.rng.random() < 0.9 else reversed(ops):
            self.add(op)
        if kind == "local":
            for before in list(self.last.get(name, {})):
                if self.rng.random() < self.care:
                    self.order(before, ops[0].stream)
            self.ops.append(Free(buffer=name, stream=ops[0].stream))

    def odd_views(self) -> None:
        """A call on views that are turned, cast, flat, expanded, or of one row or column."""
        src, dst = (self.twisted(self.rows(self.some()), write) for write in (False, True))
        self.add(Call(fn="aten.neg.out", args=(src,), outs=(dst,), stream=self.stream()))

    def twisted(self, view: View, write: bool) -> View:
        rng = self.rng
        kind = rng.randrange(5 if write else 6)
        if kind == 0:
            return view.permute(1, 0)
        if kind == 1:
            dim = rng.choice((0, 1))
            return view.select(dim, rng.randrange(2))
        if kind == 2:
            return view.cast(DType.u8)
        if kind == 3:
            flat = view.view(-1)
            start = rng.randrange(self.width)
            return flat.slice(0, start, start + rng.randint(1, self.width))
        if kind == 4:
            return view.permute(1, 0).slice(0, 1, self.width)
        return view.slice(0, 0, 1).expand(3, -1)
