"""A whole training step of a model on many GPUs, as a set of Programs: one for each stage.

    programs = step_of(StepSettings(model="llama3-70b", tp=8, pp=4, dp=32))      # 1,024 ranks
    report = check(programs)

A rank has a place in three teams: `tp` (tensor and sequence parallelism, within a host), `dp`, and
`pp`. A stage computes microbatches in the order that is called 1F1B. Its work for one of them,
forward or backward, is a Program that the passes lower, as the compiler does. The stage's Program
is these one after another, each begun when the one before has ended on this rank, as it would run
them, and the messages between stages. Under the last backward each layer's gradients are scattered
over `dp`; at the end each rank updates its shard of the weights, and all gather them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.stage_text import StageText

from interlace.errors import OptionError
from interlace.ir import (
    Alloc,
    Buffer,
    Expect,
    Free,
    Fused,
    Group,
    Notify,
    Op,
    Program,
    Record,
    Recv,
    Send,
    Team,
    View,
    Wait,
    parse,
    validate,
)
from interlace.ir.program import map_values
from interlace.options import Options
from interlace.passes import lower
from interlace.strategies import StrategyName
from interlace_bench.layers.models import MODELS

LAYERS = {"llama3-8b": 32, "llama3-70b": 80, "tiny": 4}
"""Numbers of layers of the whole models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """The model to train, and the number of ranks in each dimension."""

    model: str = "llama3-70b"
    tp: int = 8
    pp: int = 4
    dp: int = 32
    microbatches: int = 8
    sequence: int = 8192
    strategy: StrategyName = "peer"

    def __post_init__(self) -> None:
        if self.model not in LAYERS:
            raise OptionError(f"--model {self.model}: choose from {', '.join(LAYERS)}")
        if min(self.tp, self.pp, self.dp, self.microbatches) < 1:
            raise OptionError("--tp, --pp, --dp and --microbatches must be >= 1")
        if LAYERS[self.model] % self.pp:
            raise OptionError(
                f"--pp {self.pp}: {LAYERS[self.model]} layers do not divide into as many stages"
            )
        MODELS[self.model].check(self.tp, self.sequence)

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.tp * self.pp * self.dp


def step_of(settings: StepSettings) -> list[Program]:
    """The Programs of all stages; validated on the ranks of one `tp` team, where views differ."""
    dims, layers = MODELS[settings.model], LAYERS[settings.model] // settings.pp
    text = StageText(dims, layers, settings.tp, settings.dp, settings.sequence)
    parts = _Parts.of(text, settings)
    made = [_Stage(settings, stage, parts).program() for stage in range(settings.pp)]
    for program in made:
        validate(program, ranks=program.world[: settings.tp])
    return made


@dataclass(frozen=True, slots=True)
class _Parts:
    """The lowered Programs of a stage: the same for all stages."""

    forward: Program
    backward: Program
    last_backward: Program
    update: Program

    @classmethod
    def of(cls, text: StageText, settings: StepSettings) -> _Parts:
        options = Options(strategy=settings.strategy)
        texts = text.forward(), text.backward(False), text.backward(True), text.update()
        return cls(*(lower(parse(each), options) for each in texts))


class _Stage:
    """Composes the Program of one stage."""

    def __init__(self, settings: StepSettings, number: int, parts: _Parts) -> None:
        self.settings, self.number, self.parts = settings, number, parts
        count = settings.tp * settings.dp
        self.ranks = tuple(range(number * count, (number + 1) * count))
        lines = tuple(tuple(range(rank, settings.world, count)) for rank in range(count))
        self.teams = (
            Team("dp", settings.dp),
            Team("tp", settings.tp),
            Team("pp", settings.pp, lines),
        )
        self.ops: list[Op] = []
        self.streams: dict[str, None] = {"main": None}
        """Streams that were used so far."""
        self.known: dict[str, View] = {}
        """Views of the tensors of microbatches, by name and number."""
        self.joins = 0

    @property
    def first(self) -> bool:
        return self.number == 0

    @property
    def last(self) -> bool:
        return self.number == self.settings.pp - 1

    def program(self) -> Program:
        """1F1B: as many forwards ahead as there are stages behind, then one of each in turn."""
        count = self.settings.microbatches
        warm = min(self.settings.pp - self.number - 1, count)
        for i in range(warm):
            self.exchange(x=i)
            self.forward(i)
            self.exchange(y=i)
        if warm < count:
            self.exchange(x=warm)
        for i in range(count - warm):
            self.forward(warm + i)
            self.exchange(y=warm + i, dy=i)
            self.backward(i)
            self.exchange(dx=i, x=warm + i + 1 if warm + i + 1 < count else None)
        for i in range(count - warm, count):
            self.exchange(dy=i)
            self.backward(i)
            self.exchange(dx=i)
        self.run(self.parts.update, "update", {})
        params = {b.name: b for b in (*self.parts.last_backward.params, *self.parts.update.params)}
        flat = [b for b in params.values() if b.name[0] in "wgsmo" and b.name[1:].isdigit()]
        given = [replace(self.activation, name=f"x.{i}", kind="input") for i in range(count)]
        return Program(
            name=f"stage_{self.number}",
            teams=self.teams,
            ranks=self.ranks,
            params=(*flat, *(given if self.first else ())),
            ops=tuple(self.ops),
            results=(),
        )

    @property
    def activation(self) -> Buffer:
        return next(b for b in self.parts.forward.params if b.name == "x_0")

    def forward(self, i: int) -> None:
        forward = self.parts.forward
        x = View(f"x.{i}")
        results = self.run(forward, f"f{i}", {"x_0": x})
        names = [name for name in self.saved if name != "x_0"]
        self.known[f"y.{i}"] = results[0]
        self.known |= {f"{name}.{i}": view for name, view in zip(names, results[1:], strict=True)}
        self.known[f"x_0.{i}"] = x
        if self.last:  # the loss: half the sum of the squares
            self.known[f"dy.{i}"] = results[0]

    @property
    def saved(self) -> list[str]:
        return [b.name for b in self.parts.backward.params if b.name.rpartition("_")[2].isdigit()]

    def backward(self, i: int) -> None:
        last = i == self.settings.microbatches - 1
        given = {name: self.known[f"{name}.{i}"] for name in self.saved}
        given["dy"] = self.known[f"dy.{i}"]
        program = self.parts.last_backward if last else self.parts.backward
        (self.known[f"dx.{i}"],) = self.run(program, f"b{i}", given)

    def exchange(
        self,
        x: int | None = None,
        y: int | None = None,
        dy: int | None = None,
        dx: int | None = None,
    ) -> None:
        """Messages of microbatches to and from the stages beside this one, at once."""
        ops: list[Send | Recv] = []
        for name, i, peer, sends in (
            ("y", y, self.number + 1, True),
            ("dy", dy, self.number + 1, False),
            ("dx", dx, self.number - 1, True),
            ("x", x, self.number - 1, False),
        ):
            if i is None or not 0 <= peer < self.settings.pp:
                continue
            if sends:
                ops.append(Send(src=self.known[f"{name}.{i}"], peer=peer, team="pp"))
                continue
            buffer = replace(self.activation, name=f"{name}.{i}", kind="fresh")
            self.ops.append(Alloc(buffer=buffer))
            self.known[buffer.name] = View(buffer.name)
            ops.append(Recv(dst=View(buffer.name), peer=peer, team="pp"))
        if ops:
            self.ops.append(Group(ops=tuple(ops)) if len(ops) > 1 else ops[0])

    def run(self, program: Program, name: str, given: Mapping[str, View]) -> list[View]:
        """Adds a run of a Program, which begins when all before it has ended; its results."""
        copy = _Copy(name, program, given)
        self.join(self.streams, "main")
        used = dict.fromkeys(program.streams())
        self.streams |= used
        event = f"begin of {name}"
        self.ops.append(Record(event=event))
        self.ops += [Wait(event=event, stream=one) for one in used if one != "main"]
        self.ops += [copy.op(op) for op in program.ops]
        self.join(used, "main")
        return [copy.view(arg) for arg in program.returned() if isinstance(arg, View)]

    def join(self, streams: Mapping[str, None], to: str) -> None:
        """Lets one stream wait for others."""
        for stream in streams:
            if stream != to:
                self.joins += 1
                event = f"join {self.joins}"
                self.ops += [Record(event=event, stream=stream), Wait(event=event, stream=to)]


class _Copy:
    """The ops of one run of a Program, under names of their own."""

    def __init__(self, name: str, program: Program, given: Mapping[str, View]) -> None:
        self.name, self.kind = name, name.rstrip("0123456789")
        self.views = {**{b.name: View(b.name) for b in program.params}, **given}

    def renamed(self, name: str) -> str:
        return f"{name} of {self.name}"

    def view(self, view: View) -> View:
        there = self.views.get(view.buffer)
        if there is None:
            return View(self.renamed(view.buffer), view.steps)
        return View(there.buffer, (*there.steps, *view.steps))

    def value(self, value: object) -> object:
        if isinstance(value, View):
            return self.view(value)
        if isinstance(value, Buffer):
            storage = None if value.storage is None else f"{self.kind} {value.storage}"
            return replace(value, name=self.renamed(value.name), storage=storage)
        return value

    def op(self, op: Op) -> Op:
        return self.named(map_values(op, self.value))

    def named(self, op: Op) -> Op:
        match op:
            case Free():
                return replace(op, buffer=self.renamed(op.buffer), site=None)
            case Record() | Wait():
                return replace(op, event=self.renamed(op.event), site=None)
            case Notify() | Expect():
                return replace(op, signal=self.renamed(op.signal), site=None)
            case Fused():
                parts = tuple([tuple(map(self.named, part)) for part in op.parts])
                return replace(op, parts=parts, site=None)
            case _:
                return replace(op, site=None)
