"""Random well-formed SPMD Programs over every op, validated.

    program = random_program(random.Random(seed), num_ops=30)

They are well formed, not sound: events may be missing and streams may race. With `in_order=True`
they also run to their end one op after another, on all ranks at once: every send meets its receive,
every signal is raised before it is expected.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.support.random_views import COLS, DTYPES, WORDS, Drawer, NoSuchViewError

from interlace.ir import (
    KINDS,
    Arg,
    Buffer,
    Call,
    Collective,
    Copy,
    Dim,
    DType,
    Expect,
    Free,
    Fused,
    FusedMember,
    Get,
    Group,
    HostSync,
    Name,
    Node,
    Notify,
    Others,
    Program,
    Put,
    RankIndex,
    Record,
    Recv,
    Region,
    Remark,
    Send,
    Site,
    TableEntry,
    Wait,
    validate,
)
from interlace.ir.ops import REDUCTIONS


def random_program(
    rng: random.Random,
    *,
    num_ops: int = 24,
    team_size: int | None = None,
    max_streams: int = 3,
    in_order: bool = False,
) -> Program:
    """A Program of about `num_ops` ops; `team_size` fixes the team `tp`, else 1 to 4."""
    while True:
        try:
            return _Generator(rng, team_size, max_streams, in_order).program(num_ops)
        except NoSuchViewError:
            continue  # all its buffers have a rank without rows, say


class _Generator(Drawer):
    def __init__(
        self, rng: random.Random, team_size: int | None, max_streams: int, in_order: bool
    ) -> None:
        super().__init__(rng, team_size, max_streams)
        self.in_order = in_order
        self.params: list[Buffer] = []
        self.events: list[str] = []
        self.raised: dict[str, int] = {}
        self.regions = [self.region(i) for i in range(rng.randint(0, 2))]
        self.sites = [self.site(i + 1) for i in range(rng.randint(0, 3))]

    def program(self, num_ops: int) -> Program:
        rng = self.rng
        for i in range(rng.randint(2, 4)):
            self.params.append(self.buffer(f"x{i}", "input"))
        for i in range(rng.randint(1, 2)):
            self.params.append(self.buffer(f"y{i}", "output"))
        for kind in ("local", "fresh", "symmetric"):
            self.alloc(kind)
        families: list[Callable[[], None]] = [
            *(self.call, self.call, self.copy, self.copy, self.order, self.order, self.alloc_any),
            *(self.collective, self.collective, self.one_sided, self.signal, self.transfer),
            *(self.free, self.fused),
        ]
        while len(self.ops) < num_ops:
            rng.choice(families)()
        for name, buffer in list(self.buffers.items()):
            if buffer.kind == "symmetric" or (buffer.kind == "local" and rng.random() < 0.5):
                self.emit(Free(buffer=name, **self.common()))
        return validate(
            Program(
                name=rng.choice(("main", "step", "layers.0.forward")),
                teams=self.teams,
                tables=(self.table,),
                params=tuple(self.params),
                ops=tuple(self.ops),
                results=self.results() if rng.random() < 0.6 else None,
                regions=tuple(self.regions),
                sites=tuple(self.sites),
                remarks=tuple(self.remark() for _ in range(rng.randint(0, 2))),
            )
        )

    def alloc_any(self) -> None:
        self.alloc(self.rng.choice(("local", "fresh", "symmetric")))

    def copy(self) -> None:
        src = self.view(uniform=True)
        self.emit(Copy(src=src, dst=self.target(src), **self.common()))

    def call(self) -> None:
        rng = self.rng
        match rng.randrange(6):
            case 0:
                dtype = rng.choice(DTYPES)
                a, b, c = (self.rows(dtype, COLS) for _ in range(3))
                self.emit(Call(fn="aten.mm.out", args=(a, b), outs=(c,), **self.common()))
            case 1:
                outs = tuple(self.made(i) for i in range(rng.randint(1, 3)))
                args = (self.view(), 2.5, (1, self.view()), None, DType.bf16, True, "@device")
                kwargs: tuple[tuple[str, Arg], ...] = (("alpha", 2), ("out", (1, -1)))
                self.call_making("aten.made_up.default", args[: rng.randint(1, 7)], kwargs, outs)
            case 2:
                view = self.view()
                if self.written(view):
                    fn = "aten.add_.Tensor"
                    args = (view, 1)
                    self.emit(Call(fn=fn, args=args, outs=(view,), mutates=True, **self.common()))
            case 3:
                self.call_making("aten.native_dropout.default", (self.view(), 0.1, True), (), None)
            case 4 if self.regions:
                region = rng.choice(self.regions)
                args = tuple(self.view() for _ in region.inputs)
                outs = tuple(self.made(i) for i in range(len(region.outputs)))
                self.call_making(region.name, args, (), outs)
            case _:
                view = self.view(uniform=True)
                out = self.target(view)
                self.emit(Call(fn="aten.neg.out", args=(view,), outs=(out,), **self.common()))

    def call_making(
        self,
        fn: str,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...],
        fresh: tuple[Buffer, ...] | None,
    ) -> None:
        made = (self.made(0), self.made(1)) if fresh is None else fresh
        random_numbers = fresh is None
        self.emit(
            Call(fn=fn, args=args, kwargs=kwargs, fresh=made, rng=random_numbers, **self.common())
        )
        self.buffers.update((buffer.name, buffer) for buffer in made)

    def order(self) -> None:
        match self.rng.randrange(5):
            case 0 | 1:
                self.events.append(self.rng.choice(("e1", "e2", "end of step")))
                self.emit(Record(event=self.events[-1], **self.common()))
            case 2 | 3 if self.events:
                self.emit(Wait(event=self.rng.choice(self.events), **self.common()))
            case 4:
                self.emit(HostSync(**self.common()))
            case _:
                pass

    def collective(self) -> None:
        rng = self.rng
        kind, dtype = rng.choice(tuple(KINDS)), rng.choice(DTYPES)
        row = KINDS[kind]
        splits = None
        part: Dim = 2
        whole: Dim = 2 * self.size
        if row.scales and rng.random() < 0.4:
            splits = self.table.name
            part, whole = TableEntry(splits, RankIndex("tp")), sum(self.table.values)
        src = dst = None
        if kind != "barrier":
            first, second = (part, whole) if row.scales == "gather" else (whole, part)
            src = self.rows(dtype, first)
            dst = self.rows(dtype, second if row.scales else first)
        if kind in ("all_reduce", "broadcast") and rng.random() < 0.5:
            dst = src
        self.emit(
            Collective(
                kind=kind,
                src=src,
                dst=dst,
                team="tp",
                reduce=rng.choice(REDUCTIONS) if row.reduces else None,
                root=rng.randrange(self.size) if row.rooted else None,
                splits=splits,
                backend=rng.choice((None, "gloo", "peer")),
                **self.common(),
            )
        )

    def peer(self) -> int | RankIndex:
        if self.rng.random() < 0.2:
            return self.rng.randrange(self.size)
        return RankIndex("tp", self.rng.randint(-1, self.size))

    def one_sided(self) -> None:
        if not any(buffer.kind == "symmetric" for buffer in self.buffers.values()):
            self.alloc("symmetric")
        src = self.view(uniform=True, kinds=("symmetric",))
        if self.rng.random() < 0.4 and self.written(src):
            self.emit(Get(src=src, peer=self.peer(), team="tp", **self.common()))
        elif self.rng.random() < 0.5:
            dst = self.target(src)
            self.emit(Get(src=src, dst=dst, peer=self.peer(), team="tp", **self.common()))
        else:
            local = self.view(uniform=True)
            dst = self.target(local, "symmetric")
            self.emit(Put(src=local, dst=dst, peer=self.peer(), team="tp", **self.common()))

    def signal(self) -> None:
        """A signal that a rank raises and another expects, by the same distance in the team."""
        name = f"{self.rng.choice(('ready', 'all there'))}_{self.rng.randint(0, 2)}"
        value = self.raised[name] = self.raised.get(name, 0) + self.rng.randint(1, 2)
        distance = self.rng.randint(0, self.size)
        others = self.rng.random() < 0.5
        to = Others("tp") if others else RankIndex("tp", distance)
        from_ = Others("tp") if others else RankIndex("tp", -distance)
        self.emit(Notify(signal=name, peer=to, team="tp", value=value, **self.common()))
        if self.in_order or self.rng.random() < 0.7:
            low = self.rng.randint(1, value)
            self.emit(Expect(signal=name, peer=from_, team="tp", value=low, **self.common()))

    def fused(self) -> None:
        """Parts that compute; one may tell a peer, whom a later one (or the same) then awaits."""
        rng, common = self.rng, self.common()
        parts: list[list[FusedMember]] = []
        for _ in range(rng.randint(1, 3)):
            members: list[FusedMember] = []
            if self.events and rng.random() < 0.3:
                members.append(Wait(event=rng.choice(self.events), **common))
            view = self.view(uniform=True)
            out = self.target(view)
            members.append(Call(fn="aten.neg.out", args=(view,), outs=(out,), **common))
            if rng.random() < 0.4:
                self.events.append(rng.choice(("e1", "e2", "end of step")))
                members.append(Record(event=self.events[-1], **common))
            parts.append(members)
        if rng.random() < 0.5:
            name = f"told_{len(self.ops)}"
            raising, distance = rng.randrange(len(parts)), rng.randint(0, self.size)
            to, awaited = RankIndex("tp", distance), RankIndex("tp", -distance)
            parts[raising].append(Notify(signal=name, peer=to, team="tp", **common))
            expect = Expect(signal=name, peer=awaited, team="tp", **common)
            parts[rng.randint(raising, len(parts) - 1)].append(expect)
        self.emit(Fused(parts=tuple(map(tuple, parts)), **common))

    def transfer(self) -> None:
        rng, common = self.rng, self.common()
        distance = rng.randint(1, 2)
        src = self.view(uniform=True)
        dst = self.target(src)
        send = Send(src=src, peer=RankIndex("tp", distance), team="tp", **common)
        recv = Recv(dst=dst, peer=RankIndex("tp", -distance), team="tp", **common)
        if self.in_order or rng.random() < 0.6:
            self.emit(Group(ops=(send, recv), **common))
        else:
            self.emit(rng.choice((send, recv)))

    def free(self) -> None:
        names = [name for name, b in self.buffers.items() if b.kind in ("local", "symmetric")]
        if names and self.rng.random() < 0.5:
            name = self.rng.choice(names)
            del self.buffers[name]
            self.emit(Free(buffer=name, **self.common()))

    def results(self) -> tuple[Arg, ...]:
        def one() -> Arg:
            view = self.view(kinds=("fresh", "output", "input"))
            return self.rng.choice((view, view, None, 2, (view, 1.5)))

        return tuple(one() for _ in range(self.rng.randint(0, 4)))

    def region(self, place: int) -> Region:
        inputs = ("x", "odd input", "y")[: self.rng.randint(1, 3)]
        body = [Node(("t0",), "aten.mul.Tensor", (Name(inputs[0]), 2.0), (("alpha", 1),))]
        if self.rng.random() < 0.5:
            body.append(Node(("t1", "t2"), "aten.aminmax.default", (Name("t0"),), (("dim", -1),)))
            body.append(Node((), "made_up.op", ((Name("t1"), None),)))
        outputs = self.rng.choice((("t0",), ("t0", inputs[0])))
        name = self.rng.choice((f"region_{place}", f"odd region {place}"))
        return Region(name, inputs, tuple(body), outputs)

    def site(self, number: int) -> Site:
        rng = self.rng
        return Site(
            id=number,
            kind=rng.choice(("all_gather_matmul", "matmul_reduce_scatter", "all_reduce")),
            module=rng.choice(WORDS),
            strategy=rng.choice(("serial", "peer", "ring")),
            protocol=rng.choice((None, "get", "put")),
            chunks=rng.choice((None, 2, 4)),
            reason=rng.choice(WORDS),
            predicted_ms=rng.choice((None, 0.25, 2.41)),
        )

    def remark(self) -> Remark:
        site = self.rng.choice((None, *(site.id for site in self.sites)))
        return Remark("decompose", self.rng.choice(WORDS), site)
