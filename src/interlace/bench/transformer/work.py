"""`interlace bench transformer`: settings, the race, and what its rows tell.

    report = work(TransformerSettings(model="tiny"), ranks, tell)   # on every rank; rank 0 reports

All ways train in turn, in one process group, on the same weights (candidates.py). Of each, rows tell
the stages' times, tokens and FLOP a second, what communication costs beyond the ideal, and memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from interlace.bench.race.ways import Racer, close, free, prepare, time_ways
from interlace.bench.ranks import Ranks
from interlace.bench.rows import Row, facts
from interlace.bench.timing import LAUNCHES, race
from interlace.bench.transformer.candidates import LIMIT, OURS, WAYS, Candidates
from interlace.bench.transformer.models import MODELS, flops
from interlace.cost import Timeline
from interlace.errors import OptionError
from interlace.frontend.binding import Bound
from interlace.ir import Site
from interlace.launch import Tell
from interlace.trace import Run, write_perfetto

DTYPES = ("bf16", "f32")
TRACED = 3
"""Steps of which the last is what a trace shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerSettings:
    """What is run."""

    model: str = "llama3-8b"
    layers: int = 1
    sequence: int = 8192
    batch: int = 1
    dtype: str = "bf16"
    only: tuple[str, ...] = WAYS
    seconds: float = 60.0
    strategy: str = "auto"
    calibration: str | None = None
    profile: str = ""
    """The file of the trace; empty: none."""
    commit: str = ""

    def __post_init__(self) -> None:
        choices = {"--model": MODELS, "--dtype": DTYPES}
        given = [("--model", self.model), ("--dtype", self.dtype)]
        for option, value in (*given, *(("--only", way) for way in self.only)):
            known = choices.get(option, WAYS)
            if value not in known:
                raise OptionError(f"{option} {value}: choose from {', '.join(known)}")
        if min(self.layers, self.sequence, self.batch) < 1:
            raise OptionError("--layers, --sequence and --batch must be >= 1")


@dataclass(frozen=True, slots=True)
class Stages:
    """Seconds of the stages of a training step."""

    forward: float
    backward: float
    step: float

    @property
    def both(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def rows_of(settings: TransformerSettings, world: int, times: Mapping[str, Stages]) -> list[Row]:
    """The columns that follow from the times of the ways."""
    dims, nan = MODELS[settings.model], Stages(math.nan, math.nan, math.nan)
    sizes = {"layers": settings.layers, "batch": settings.batch, "sequence": settings.sequence}
    tokens, work = settings.batch * settings.sequence / world, 3 * flops(dims, **sizes) / world
    ideal = times.get("ideal", nan).both
    base = [time.both for way, time in times.items() if way.startswith(("inductor", "serial"))]
    best = min((each for each in base if not math.isnan(each)), default=math.nan)
    return [
        {
            "model": settings.model,
            **sizes,
            "dtype": settings.dtype,
            "way": way,
            "forward_ms": time.forward * 1e3,
            "backward_ms": time.backward * 1e3,
            "step_ms": time.step * 1e3,
            "tokens_s": tokens / (time.both + time.step),
            "tflops": work / time.both / 1e12,
            "exposed_ms": (time.both - ideal) * 1e3,
            "exposed_share": (time.both - ideal) / time.both,
            "speedup": best / time.both,
        }
        for way, time in times.items()
    ]


def site_row(way: str, direction: str, site: Site) -> Row:
    """A site as plain data."""
    return {"way": way, "direction": direction, **asdict(site)}


def work(settings: TransformerSettings, ranks: Ranks, tell: Tell) -> Row | None:
    """Races the ways; rank 0 gets the report."""
    tell({"event": "total", "total": len(settings.only) + 1, "doing": "weights"})
    trained = Candidates(settings, ranks)
    racers: dict[str, Racer] = {}
    memory: dict[str, float] = {}
    for name in settings.only:
        tell({"event": "step", "doing": f"{name}: compiling"})
        racers[name], memory[name] = _prepared(trained, name)
    tell({"event": "step", "doing": "timing"})
    launches = 3, LAUNCHES[1]
    time_ways(
        racers.values(),
        lambda runs, sets: race(ranks, runs, sets, settings.seconds, launches=launches),
    )
    times = {
        name: Stages(*ranks.maximum(trained.laps[name].medians() if not racer.problem else NONE))
        for name, racer in racers.items()
    }
    offs = ranks.maximum([racer.off for racer in racers.values()])
    peaks = ranks.maximum(list(memory.values()))
    found = zip(rows_of(settings, ranks.size, times), racers.values(), peaks, offs, strict=True)
    common = facts(ranks.device.type, settings.commit)
    rows: list[Row] = [
        {
            **row,
            **racer.columns("median_us", "p90_us", "host_us"),
            "peak_bytes": peak,
            "off": off,
            **racer.columns("rounds", "sm_mhz", "error"),
            "how": "measured",
            "world": ranks.size,
            **common,
        }
        for row, racer, peak, off in found
    ]
    tell({"event": "rows", "rows": rows})
    ours = {name: bound for name, bound in trained.bound.items() if not racers[name].problem}
    sites = [
        site_row(name, each.kind, site)
        for name, bound in ours.items()
        for each in bound
        for site in each.program.sites
    ]
    close(racers.values())
    if settings.profile:
        tell({"event": "doing", "doing": "tracing"})
        runs = [run for name in ours for run in _traced(trained, name)]
        if not ranks.me:
            write_perfetto(runs, Path(settings.profile))
    torch.compiler.reset()  # while the group of its graphs is there
    free(ranks)
    return None if ranks.me else {"rows": rows, "sites": sites, "facts": common}


NONE = [math.nan] * 3


def _prepared(trained: Candidates, name: str) -> tuple[Racer, float]:
    """A way, opened, and the bytes that a step takes at most beyond weights and moments."""
    ranks = trained.ranks
    free(ranks)
    before = _held(ranks)
    racer = prepare(ranks, trained.way(name), trained.sets, LIMIT)
    if not ranks.cuda or racer.opened is None:
        return racer, math.nan
    free(ranks)
    torch.cuda.reset_peak_memory_stats()
    racer.opened.run(*racer.sets[0])
    torch.cuda.synchronize()
    grown = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    return racer, _held(ranks) + grown - before


def _held(ranks: Ranks) -> float:
    """Bytes of this rank's GPU that tensors have, and that others than torch's allocator have."""
    if not ranks.cuda:
        return math.nan
    unused, total = torch.cuda.mem_get_info()
    return total - unused - torch.cuda.memory_reserved() + torch.cuda.memory_allocated()


def _traced(trained: Candidates, name: str) -> list[Run]:
    """How all ranks ran the Programs of a way of ours, in the last of some steps."""
    ranks = trained.ranks
    torch.compiler.reset()
    racer = prepare(ranks, trained.way(name, trace=True), trained.sets, LIMIT)
    if racer.opened is None:
        return []
    for _ in range(TRACED):
        racer.opened.run(*racer.sets[0])
    bound: Sequence[Bound] = [b for b in trained.bound[name] if b.executor.options.trace]
    texts = [each.executor.timeline().to_json() for each in bound]
    told = ranks.exchange({"timelines": texts})
    runs: list[Run] = []
    for place, each in enumerate(bound):
        parts = [Timeline.from_json(note["timelines"][place]) for note in told]
        spans = tuple(span for part in parts for span in part.spans)
        title = f"{name}: {each.program.name}"
        runs.append(Run((each.program,), None, Timeline(spans, title, "measured"), title))
    return runs
