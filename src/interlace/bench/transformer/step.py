"""A whole training step of a model on many GPUs, as a set of Programs: one for each stage.

    programs = step_of(StepSettings(model="llama3-70b", tp=8, pp=4, dp=32))      # 1,024 ranks
    report = check(programs)

A rank has a place in three teams: `tp` (tensor and sequence parallelism, within a host), `dp`, and
`pp`. A stage computes microbatches in the order that is called 1F1B. What it does for one of them,
forward or backward, is a Program that the passes lowered by a strategy of theirs, as the compiler
does; the stage's Program has these one after another, as a rank would run them, with the messages
between stages, the reduction of gradients over `dp`, layer by layer under the last backward, and an
optimizer whose shard each rank updates and all gather.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, replace

from interlace.bench.transformer.models import MODELS, LayerDims
from interlace.errors import OptionError
from interlace.ir import (
    Alloc,
    Buffer,
    Call,
    Expect,
    Free,
    Fused,
    Group,
    Notify,
    Op,
    Program,
    Record,
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

LAYERS = {"llama3-8b": 32, "llama3-70b": 80, "tiny": 4}
"""Of the whole models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """What is trained, and on how many ranks."""

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
    """The Programs of all stages, validated for a rank of each place in `tp`."""
    made = [_Stage(settings, stage).program() for stage in range(settings.pp)]
    for program in made:
        validate(program, ranks=program.world[: settings.tp])
    return made


class _Stage:
    """Composes the Program of one stage out of those of its forward and backward."""

    def __init__(self, settings: StepSettings, number: int) -> None:
        self.settings, self.number = settings, number
        per_stage = settings.tp * settings.dp
        self.ranks = tuple(range(number * per_stage, (number + 1) * per_stage))
        teams = (Team("dp", settings.dp), Team("tp", settings.tp))
        text = _Text(MODELS[settings.model], LAYERS[settings.model] // settings.pp, settings)
        options = Options(strategy=settings.strategy)

        def lowered(source: str) -> Program:
            return lower(parse(source).replace(teams=teams, ranks=self.ranks), options)

        self.forward, self.update = lowered(text.forward()), parse(text.update())
        self.backward = lowered(text.backward(last=False))
        self.last_backward = lowered(text.backward(last=True))
        lines = [range(rank, settings.world, per_stage) for rank in range(per_stage)]
        self.teams = (*teams, Team("pp", settings.pp, tuple(map(tuple, lines))))
        self.ops: list[Op] = []
        self.streams: dict[str, None] = {"main": None}
        self.joins = 0

    def program(self) -> Program:
        count = self.settings.microbatches
        warm = min(self.settings.pp - self.number - 1, count)
        first, last = self.number == 0, self.number == self.settings.pp - 1
        for i in range(warm):
            self.messages((f"x{i}", None, None, None), first, last)
            self.run(self.forward, f"f{i}_", self.of(i))
            self.messages((None, f"y{i}", None, None), first, last)
        if warm < count:
            self.messages((f"x{warm}", None, None, None), first, last)
        for i in range(count - warm):
            ahead, more = warm + i, warm + i + 1 < count
            self.run(self.forward, f"f{ahead}_", self.of(ahead))
            self.messages((None, f"y{ahead}", f"dy{i}", None), first, last)
            self.back(i)
            coming = f"x{ahead + 1}" if more else None
            self.messages((coming, None, None, f"dx{i}"), first, last)
        for i in range(count - warm, count):
            self.messages((None, None, f"dy{i}", None), first, last)
            self.back(i)
            self.messages((None, None, None, f"dx{i}"), first, last)
        self.run(self.update, "u_", {})
        params = {b.name: b for one in (self.backward, self.update) for b in one.params}
        kept = [b for b in params.values() if b.name.startswith(("w", "g", "m", "v"))]
        arriving = [b for b in self.forward.params if b.name == "x"]
        params = [*kept, *(replace(b, name=f"x{i}") for b in arriving for i in range(count))]
        return Program(
            name=f"stage_{self.number}",
            teams=self.teams,
            ranks=self.ranks,
            params=tuple(params),
            ops=tuple(self.ops),
            results=(),
        )

    def of(self, i: int) -> dict[str, str]:
        """What the Programs call a microbatch's tensors, and what the stage does."""
        return {"x": f"x{i}", "dy": f"dy{i}"}

    def back(self, i: int) -> None:
        raise NotImplementedError

    def messages(self, *args: object) -> None:
        raise NotImplementedError

    def run(self, *args: object) -> None:
        raise NotImplementedError
