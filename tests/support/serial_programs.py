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
from contextlib import AbstractContextManager, nullcontext

import torch

import interlace
from interlace.ir import Dim, Program
from interlace.ir.build import Handle

WIDTH = 3


class Maker:
    """Grows a Program step by step."""

    def __init__(self, rng: random.Random, world: int) -> None:
        self.rng, self.world = rng, world
        self.p = p = interlace.program("serial", team=world)
        self.tp = p.tp
        rows = tuple(rng.choice((1, 2, 2, 3)) for _ in range(world))
        self.even = rng.random() < 0.6
        if self.even:
            rows = (rows[0],) * world
        self.rows, self.total = rows, sum(rows)
        table = p.table("rows", rows)
        self.part: Dim = rows[0] if self.even else table[self.tp.rank]
        self.parts = world if self.even else table
        self.count = 0
        x, y = (
            p.input(name, "f32", (size, WIDTH))
            for name, size in (("x", self.part), ("y", self.total))
        )
        self.w = p.input("w", "f32", (WIDTH, WIDTH))
        self.shards, self.fulls, self.owned = [x], [y], list[Handle]()

    def name(self, stem: str) -> str:
        """A new name."""
        self.count += 1
        return f"{stem}{self.count}"

    def at_site(self) -> AbstractContextManager[object]:
        """Sometimes a new site, of the ops inside."""
        return nullcontext() if self.rng.random() < 0.5 else self.p.site("all_gather")

    def empty(self, rows: Dim) -> Handle:
        return self.p.empty(self.name("b"), "f32", (rows, WIDTH))

    def local(self) -> Handle:
        return self.p.alloc(self.name("b"), "f32", (self.total, WIDTH))

    def symmetric(self) -> Handle:
        return self.p.alloc(self.name("b"), "f32", (self.total, WIDTH), symmetric=self.tp)

    def call(self, fn: str, *args: object, rows: Dim) -> Handle:
        """A call with a fresh result, kept small."""
        raw, small = (self.p.fresh(self.name("t"), "f32", (rows, WIDTH)) for _ in range(2))
        self.p.call(fn, *args, out=raw)
        self.p.call("aten.remainder.Scalar", raw, 5, out=small)
        self.owned.append(small)
        return small

    def keep(self, value: Handle, factor: int = 1) -> None:
        """A product of a full value is one of the values from now on."""
        self.fulls.append(self.call("aten.mul.Tensor", value, factor, rows=self.total))

    def pick(self, full: bool) -> Handle:
        """A value so far, the late ones more often."""
        values = self.fulls if full else self.shards
        return self.rng.choice(values[-3:] + values)

    def chunk(self, value: Handle, offset: int = 0) -> Handle:
        """The rows of a full value that belong to a rank."""
        return value.chunk(self.tp.rank + offset, self.parts)

    # what a step may be

    def pointwise(self) -> None:
        full = self.rng.random() < 0.5
        a, b = self.pick(full), self.pick(full)
        rows = self.total if full else self.part
        fn, other = self.rng.choice((("aten.add.Tensor", b), ("aten.mul.Tensor", 3)))
        (self.fulls if full else self.shards).append(self.call(fn, a, other, rows=rows))

    def matmul(self) -> None:
        full = self.rng.random() < 0.6
        rows = self.total if full else self.part
        made = self.call("aten.mm.default", self.pick(full), self.w, rows=rows)
        (self.fulls if full else self.shards).append(made)

    def chunked(self) -> None:
        src, out = self.pick(True), self.local()
        for offset in self.rng.sample(range(self.world), self.world):
            self.p.mm(self.chunk(src, offset), self.w, self.chunk(out, offset))
        self.keep(out)

    def in_place(self) -> None:
        if self.owned:
            value = self.rng.choice(self.owned)
            self.p.call("aten.add_.Scalar", value, 1, out=value, mutates=True)

    def gather(self) -> None:
        if not self.even:
            self.gather_get()
            return
        src, out = self.pick(False), self.empty(self.total)
        with self.at_site():
            self.p.all_gather(src, out)
        self.fulls.append(out)

    def scatter(self) -> None:
        if self.even:
            src, out = self.pick(True), self.empty(self.part)
            self.p.reduce_scatter(src, out, reduce="sum")
            self.shards.append(self.call("aten.mul.Tensor", out, 1, rows=self.part))

    def reduce(self) -> None:
        src, out = self.pick(True), self.empty(self.total)
        self.p.all_reduce(src, out, reduce="sum")
        if self.rng.random() < 0.7:
            self.keep(out)
        else:
            self.fulls.append(out)

    def gather_get(self) -> None:
        """Every rank offers its rows, and pulls those of the others; used in place."""
        p, me = self.p, self.tp.rank
        src, full, ready, out = self.pick(False), self.symmetric(), self.name("ready"), self.local()
        with self.at_site():
            p.copy(src, self.chunk(full))
            p.notify(ready, to=self.tp.others)
            for offset in range(self.world):
                chunk = self.chunk(full, offset)
                if offset:
                    p.expect(ready, me + offset)
                    p.get(chunk, peer=me + offset)
                p.mm(chunk, self.w, self.chunk(out, offset))
        self.keep(full, 2)
        self.keep(out)

    def gather_put(self) -> None:
        """Every rank pushes its rows to the others."""
        p, peers = self.p, [self.tp.rank + offset for offset in range(1, self.world)]
        src, full, arrived = self.pick(False), self.symmetric(), self.name("arrived")
        with self.at_site():
            p.copy(src, self.chunk(full))
            for peer in peers:
                p.put(src, self.chunk(full), peer=peer)
                p.notify(arrived, to=peer)
            for peer in peers:
                p.expect(arrived, peer)
        self.keep(full)

    def relay(self) -> None:
        """Rows go round the ring, one rank at a time: a signal grows with every step."""
        p, me = self.p, self.tp.rank
        src, full, step = self.pick(False), self.symmetric(), self.name("step")
        with self.at_site():
            p.copy(src, self.chunk(full))
            for hop in range(1, self.world):
                p.notify(step, to=me + 1, value=hop)
                p.expect(step, me - 1, value=hop)
                p.get(self.chunk(full, -hop), peer=me - 1)
        self.keep(full)

    def ring(self) -> None:
        """Rows go round the ring in messages."""
        p, me = self.p, self.tp.rank
        src, full = self.pick(False), self.empty(self.total)
        with self.at_site():
            p.copy(src, self.chunk(full))
            for hop in range(1, self.world):
                with p.group():
                    p.send(self.chunk(full, 1 - hop), peer=me + 1)
                    p.recv(self.chunk(full, -hop), peer=me - 1)
        self.fulls.append(full)

    def fence(self) -> None:
        """Rows pushed to the next rank; a collective tells that they are there."""
        p, src, full = self.p, self.pick(False), self.symmetric()
        with self.at_site():
            p.copy(self.pick(True), full)
            p.barrier()
            p.put(src, self.chunk(full), peer=self.tp.rank + 1)
            p.barrier()
        self.keep(full)

    def two_hops(self) -> None:
        """Rows pushed two ranks on; the signal comes by way of the rank between."""
        if self.world < 3:
            return
        p, me, src, full = self.p, self.tp.rank, self.pick(False), self.symmetric()
        with self.at_site():
            p.copy(self.pick(True), full)
            p.barrier()
            p.put(src, self.chunk(full), peer=me + 2)
            for signal in (self.name("first"), self.name("second")):
                p.notify(signal, to=me + 1)
                p.expect(signal, me - 1)
        self.keep(full)

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
        self.p.returns(*self.rng.sample(values, min(len(values), 1 + len(values) // 3)))
        return self.p.program

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
