"""`interlace bench transformer`: settings, the race, and what its rows tell.

    report = work(TransformerSettings(model="tiny"), ranks, tell)   # on every rank; rank 0 reports

All ways train in turn, in one process group, on the same weights (candidates.py). Of each, rows
tell the stages' times, tokens and FLOP a second of a GPU, what communication costs beyond the
ideal, and memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from interlace.commands.explain import strategy_of
from interlace.cost import Timeline
from interlace.errors import OptionError
from interlace.ir import Program
from interlace.launch import Tell
from interlace.strategies import StrategyName
from interlace.trace import Run, write_page, write_perfetto
from interlace.trace.figures import SiteFigures, site_figures
from interlace_bench.race.ways import Racer, close, free, prepare, time_ways
from interlace_bench.ranks import Ranks
from interlace_bench.rows import Row, facts
from interlace_bench.timing import race
from interlace_bench.transformer.candidates import FLOAT8, OURS, WAYS, Candidates, limit
from interlace_bench.transformer.models import MODELS, flops

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
    strategy: StrategyName = "auto"
    calibration: str | None = None
    profile: str = ""
    """The file of the trace or the page; empty: none."""
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
    ideals = {way: nan if way in FLOAT8 else times.get("ideal", nan) for way in times}
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
            "exposed_ms": (time.both - ideals[way].both) * 1e3,
            "exposed_share": (time.both - ideals[way].both) / time.both,
            "speedup": best / time.both,
        }
        for way, time in times.items()
    ]


def site_rows(way: str, program: Program, timeline: Timeline) -> list[Row]:
    """The sites of a Program with what their communication took on the timeline's first rank, and
    what of that no computation hid. What a fused kernel does within counts as computation."""
    rank, found = timeline.ranks[0], site_figures(timeline)
    rows: list[Row] = []
    for site in program.sites:
        took = found.get((rank, site.id), SiteFigures(0.0, 0.0, 0.0))
        told = {"comm_ms": took.comm_s * 1e3, "exposed_ms": took.exposed_s * 1e3}
        row = {"way": way, "program": program.name, "how": strategy_of(site), **asdict(site)}
        rows.append({**row, **told})
    return rows


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
    time_ways(racers.values(), lambda runs, sets: race(ranks, runs, sets, settings.seconds))
    times = {
        name: slowest(ranks, trained.laps[name].medians() if not racer.problem else NONE)
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
    close(racers.values())
    runs: dict[str, list[Run]] = {}
    for name in OURS:
        if name in racers and not racers[name].problem:
            tell({"event": "doing", "doing": f"{name}: tracing"})
            runs[name] = _traced(trained, name)
    torch.compiler.reset()  # while the group of its graphs is there
    free(ranks)
    if ranks.me:
        return None
    return {"rows": rows, "sites": told_of(runs, settings, common), "facts": common}


def told_of(
    runs: Mapping[str, Sequence[Run]], settings: TransformerSettings, common: Mapping[str, object]
) -> list[Row]:
    """The sites of the runs of ours; the runs go to a page or a trace, if one is wanted."""
    profile = settings.profile
    if profile.endswith(".html"):
        tokens = ("tokens", str(settings.batch * settings.sequence))
        told = [(name, str(common[name])) for name in ("gpu", "commit", "torch")]
        title = f"{settings.model}, layers: {settings.layers}"
        write_page(_beside_serial(runs), profile, title, [tokens, *told])
    elif profile:
        write_perfetto([run for each in runs.values() for run in each], Path(profile))
    return [
        row
        for way in OURS
        for run in runs.get(way, ())
        for row in site_rows(way, run.programs[0], run.timelines[0])
    ]


def _beside_serial(runs: Mapping[str, Sequence[Run]]) -> list[Run]:
    """The runs of ours, each beside the serial one of its graph where that was predicted."""
    plain = [replace(run, label="serial") for run in runs.get("serial", ())]
    return [
        replace(run, before=before)
        for way in OURS
        for run, before in itertools.zip_longest(runs.get(way, ()), plain if way in runs else ())
    ]


NONE = [math.nan] * 3


def slowest(ranks: Ranks, mine: list[float]) -> Stages:
    """The stages of the rank whose forward and backward take longest. The others are done sooner,
    and wait for it in the step, where the gradients of norms are summed."""
    every = [Stages(*note["stages"]) for note in ranks.exchange({"stages": mine})]
    return max(every, key=lambda stages: stages.both)


def _prepared(trained: Candidates, name: str) -> tuple[Racer, float]:
    """A way, opened, and the bytes that a step takes at most beyond weights and moments."""
    ranks = trained.ranks
    free(ranks)
    before = _held(ranks)
    racer = prepare(ranks, trained.way(name), trained.sets, limit(name))
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
    racer = prepare(ranks, trained.way(name, trace=True), trained.sets, limit(name))
    if racer.opened is None:
        return []
    for _ in range(TRACED):
        racer.opened.run(*racer.sets[0])
    bound = [b for b in trained.bound[name] if b.executor.options.trace]
    texts = [each.executor.timeline().to_json() for each in bound]
    told = ranks.exchange({"timelines": texts})
    runs: list[Run] = []
    for place, each in enumerate(bound):
        parts = [Timeline.from_json(note["timelines"][place]) for note in told]
        spans = tuple(span for part in parts for span in part.spans)
        title = f"{name}: {each.program.name}"
        runs.append(Run((each.program,), None, Timeline(spans, title, "measured"), title))
    return runs
