"""Random serial Programs of ranks that work together, for properties of passes.

Every Program is one stream, sound and deterministic in list order: matmuls and pointwise calls
between gathers, scatters and reductions of every kind (collectives, messages, one-sided copies),
chunked writes, writes in place and uneven shards. ValueTable are small integers, so results do not
depend on the order of a reduction.

    program, inputs = serial_program(random.Random(seed), world=3, length=12)
    run_ranks(program, inputs, in_order=True)
"""

from __future__ import annotations

import random

import torch

from interlace.ir import (
    Alloc,
    Arg,
    Buffer,
    Call,
    Collective,
    Copy,
    Dim,
    DType,
    Expect,
    Get,
    Group,
    Notify,
    Op,
    Program,
    Put,
    RankIndex,
    Recv,
    Send,
    Site,
    Table,
    TableEntry,
    Team,
    View,
)

WIDTH = 3
RANK = RankIndex("tp")


class Maker:
    """Grows a Program op by op."""

    def __init__(self, rng: random.Random, world: int) -> None:
        self.rng, self.world = rng, world
        self.team = Team("tp", world)
        rows = tuple(rng.choice((1, 2, 2, 3)) for _ in range(world))
        self.even = rng.random() < 0.6
        if self.even:
            rows = (rows[0],) * world
        self.rows = rows
        self.table = Table("rows", "tp", rows)
        self.total = sum(rows)
        self.part: Dim = rows[0] if self.even else TableEntry("rows", RANK)
        self.parts: int | str = world if self.even else "rows"
        self.ops: list[Op] = []
        self.count = 0
        self.sites = 0
        self.params = [
            Buffer("x", DType.f32, (self.part, WIDTH), "input"),
            Buffer("y", DType.f32, (self.total, WIDTH), "input"),
            Buffer("w", DType.f32, (WIDTH, WIDTH), "input"),
        ]
        self.shards, self.fulls, self.owned = ["x"], ["y"], list[str]()

    def name(self, stem: str) -> str:
        """A new name."""
        self.count += 1
        return f"{stem}{self.count}"

    def site(self) -> int | None:
        """Sometimes a new site."""
        if self.rng.random() < 0.5:
            return None
        self.sites += 1
        return self.sites

    def alloc(self, rows: Dim, kind: str = "fresh") -> str:
        """A buffer of rows."""
        name = self.name("b")
        team = "tp" if kind == "symmetric" else None
        self.ops.append(Alloc(buffer=Buffer(name, DType.f32, (rows, WIDTH), kind, team)))
        return name

    def call(self, fn: str, *args: Arg, rows: Dim) -> str:
        """A call with a fresh result, kept small."""
        raw, name = self.name("t"), self.name("t")
        made = Buffer(raw, DType.f32, (rows, WIDTH), "fresh")
        self.ops.append(Call(fn=fn, args=args, fresh=(made,)))
        small = Buffer(name, DType.f32, (rows, WIDTH), "fresh")
        self.ops.append(Call(fn="aten.remainder.Scalar", args=(View(raw), 5), fresh=(small,)))
        self.owned.append(name)
        return name

    def pick(self, full: bool) -> str:
        """A value so far, the late ones more often."""
        values = self.fulls if full else self.shards
        return self.rng.choice(values[-3:] + values)

    def chunk(self, name: str, offset: int = 0) -> View:
        """The rows of a full value that belong to a rank."""
        return View(name).chunk(RankIndex("tp", offset), self.parts)

    # what a step may be

    def pointwise(self) -> None:
        full = self.rng.random() < 0.5
        a, b = View(self.pick(full)), View(self.pick(full))
        rows = self.total if full else self.part
        other: Arg = b if self.rng.random() < 0.5 else 3
        fn = "aten.add.Tensor" if other is b else "aten.mul.Tensor"
        (self.fulls if full else self.shards).append(self.call(fn, a, other, rows=rows))

    def matmul(self) -> None:
        full = self.rng.random() < 0.6
        rows = self.total if full else self.part
        made = self.call("aten.mm.default", View(self.pick(full)), View("w"), rows=rows)
        (self.fulls if full else self.shards).append(made)

    def chunked(self) -> None:
        src, out = self.pick(True), self.alloc(self.total, "local")
        for offset in self.rng.sample(range(self.world), self.world):
            chunk = self.chunk(src, offset)
            self.ops.append(
                Call(fn="aten.mm.out", args=(chunk, View("w")), outs=(self.chunk(out, offset),))
            )
        self.fulls.append(self.call("aten.mul.Tensor", View(out), 1, rows=self.total))

    def in_place(self) -> None:
        if self.owned:
            name = self.rng.choice(self.owned)
            self.ops.append(
                Call(fn="aten.add_.Scalar", args=(View(name), 1), outs=(View(name),), mutates=True)
            )

    def gather(self) -> None:
        if not self.even:
            self.gather_get()
            return
        out = self.alloc(self.total)
        src = View(self.pick(False))
        self.ops.append(
            Collective(kind="all_gather", team="tp", src=src, dst=View(out), site=self.site())
        )
        self.fulls.append(out)

    def scatter(self) -> None:
        if self.even:
            src, out = View(self.pick(True)), self.alloc(self.part)
            self.ops.append(
                Collective(kind="reduce_scatter", team="tp", src=src, dst=View(out), reduce="sum")
            )
            self.shards.append(self.call("aten.mul.Tensor", View(out), 1, rows=self.part))

    def reduce(self) -> None:
        src, out = View(self.pick(True)), self.alloc(self.total)
        self.ops.append(
            Collective(kind="all_reduce", team="tp", src=src, dst=View(out), reduce="sum")
        )
        if self.rng.random() < 0.7:
            self.fulls.append(self.call("aten.mul.Tensor", View(out), 1, rows=self.total))
        else:
            self.fulls.append(out)

    def gather_get(self) -> None:
        """Every rank offers its rows, and pulls those of the others; used in place."""
        src, site = View(self.pick(False)), self.site()
        full, ready = self.alloc(self.total, "symmetric"), self.name("ready")
        self.ops.append(Copy(src=src, dst=self.chunk(full), site=site))
        self.ops.append(Notify(signal=ready, peer=self.team.others, team="tp", site=site))
        out = self.alloc(self.total, "local")
        for offset in range(self.world):
            chunk, peer = self.chunk(full, offset), RankIndex("tp", offset)
            if offset:
                self.ops.append(Expect(signal=ready, peer=peer, team="tp", site=site))
                self.ops.append(Get(src=chunk, peer=peer, team="tp", site=site))
            self.ops.append(
                Call(
                    fn="aten.mm.out",
                    args=(chunk, View("w")),
                    outs=(self.chunk(out, offset),),
                    site=site,
                )
            )
        self.fulls.append(self.call("aten.mul.Tensor", View(full), 2, rows=self.total))
        self.fulls.append(self.call("aten.mul.Tensor", View(out), 1, rows=self.total))

    def gather_put(self) -> None:
        """Every rank pushes its rows to the others."""
        src, site = View(self.pick(False)), self.site()
        full, arrived = self.alloc(self.total, "symmetric"), self.name("arrived")
        self.ops.append(Copy(src=src, dst=self.chunk(full), site=site))
        for offset in range(1, self.world):
            peer = RankIndex("tp", offset)
            dst = self.chunk(full)
            self.ops.append(Put(src=src, dst=dst, peer=peer, team="tp", site=site))
            self.ops.append(Notify(signal=arrived, peer=peer, team="tp", site=site))
        for offset in range(1, self.world):
            peer = RankIndex("tp", offset)
            self.ops.append(Expect(signal=arrived, peer=peer, team="tp", site=site))
        self.fulls.append(self.call("aten.mul.Tensor", View(full), 1, rows=self.total))

    def relay(self) -> None:
        """Rows go round the ring, one rank at a time: a signal grows with every step."""
        src, site = View(self.pick(False)), self.site()
        full, step = self.alloc(self.total, "symmetric"), self.name("step")
        self.ops.append(Copy(src=src, dst=self.chunk(full), site=site))
        for hop in range(1, self.world):
            self.ops.append(
                Notify(signal=step, peer=RankIndex("tp", 1), team="tp", value=hop, site=site)
            )
            back = RankIndex("tp", -1)
            self.ops.append(Expect(signal=step, peer=back, team="tp", value=hop, site=site))
            self.ops.append(Get(src=self.chunk(full, -hop), peer=back, team="tp", site=site))
        self.fulls.append(self.call("aten.mul.Tensor", View(full), 1, rows=self.total))

    def ring(self) -> None:
        """Rows go round the ring in messages."""
        src, site, full = View(self.pick(False)), self.site(), self.alloc(self.total)
        self.ops.append(Copy(src=src, dst=self.chunk(full), site=site))
        for hop in range(1, self.world):
            give, take = self.chunk(full, 1 - hop), self.chunk(full, -hop)
            messages = (
                Send(src=give, peer=RankIndex("tp", 1), team="tp", site=site),
                Recv(dst=take, peer=RankIndex("tp", -1), team="tp", site=site),
            )
            self.ops.append(Group(ops=messages, site=site))
        self.fulls.append(full)

    def fence(self) -> None:
        """Rows pushed to the next rank; a collective tells that they are there."""
        src, site = View(self.pick(False)), self.site()
        full = self.alloc(self.total, "symmetric")
        self.ops.append(Copy(src=View(self.pick(True)), dst=View(full), site=site))
        self.ops.append(Collective(kind="barrier", team="tp", site=site))
        peer = RankIndex("tp", 1)
        self.ops.append(Put(src=src, dst=self.chunk(full), peer=peer, team="tp", site=site))
        self.ops.append(Collective(kind="barrier", team="tp", site=site))
        self.fulls.append(self.call("aten.mul.Tensor", View(full), 1, rows=self.total))

    def two_hops(self) -> None:
        """Rows pushed two ranks on; the signal comes by way of the rank between."""
        if self.world < 3:
            return
        src, site = View(self.pick(False)), self.site()
        full, first, second = (
            self.alloc(self.total, "symmetric"),
            self.name("first"),
            self.name("second"),
        )
        self.ops.append(Copy(src=View(self.pick(True)), dst=View(full), site=site))
        self.ops.append(Collective(kind="barrier", team="tp"))
        far, on, back = RankIndex("tp", 2), RankIndex("tp", 1), RankIndex("tp", -1)
        self.ops.append(Put(src=src, dst=self.chunk(full), peer=far, team="tp", site=site))
        for signal in (first, second):
            self.ops.append(Notify(signal=signal, peer=on, team="tp", site=site))
            self.ops.append(Expect(signal=signal, peer=back, team="tp", site=site))
        self.fulls.append(self.call("aten.mul.Tensor", View(full), 1, rows=self.total))

    def program(self, length: int, fences: bool) -> Program:
        """A Program of `length` such steps, which returns some of what it computed."""
        steps = [
            *(self.pointwise, self.matmul, self.matmul, self.chunked, self.in_place, self.gather),
            *(self.scatter, self.reduce, self.gather_get, self.gather_put, self.relay, self.ring),
            *((self.fence, self.two_hops) if fences else ()),
        ]
        for _ in range(length):
            self.rng.choice(steps)()
        values = [*self.shards[1:], *self.fulls[1:]]
        kept = self.rng.sample(values, min(len(values), 1 + len(values) // 3))
        return Program(
            name="serial",
            teams=(self.team,),
            tables=(self.table,),
            params=tuple(self.params),
            ops=tuple(self.ops),
            results=tuple(map(View, kept)),
            sites=tuple(Site(id=i + 1, kind="all_gather") for i in range(self.sites)),
        )

    def inputs(self) -> list[list[torch.Tensor]]:
        """Small integers for every rank."""
        draw = torch.Generator().manual_seed(self.rng.randrange(1 << 30))
        weight = torch.randint(-2, 3, (WIDTH, WIDTH), generator=draw).float()
        return [
            [
                torch.randint(-4, 5, (rows, WIDTH), generator=draw).float(),
                torch.randint(-4, 5, (self.total, WIDTH), generator=draw).float(),
                weight.clone(),
            ]
            for rows in self.rows
        ]


def serial_program(
    rng: random.Random, world: int, length: int, fences: bool = True
) -> tuple[Program, list[list[torch.Tensor]]]:
    """A random serial Program, and inputs for each of its ranks.

    With `fences`, one-sided copies may be ordered by what is no single signal between two ranks.
    """
    maker = Maker(rng, world)
    program = maker.program(length, fences)
    return program, maker.inputs()
