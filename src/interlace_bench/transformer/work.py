"""`interlace bench transformer`: settings, the race, and what its rows tell.

    report = work(TransformerSettings(model="tiny"), ranks, tell)   # on every rank; rank 0 reports

All ways train in turn, in one process group, on the same weights (candidates.py). Of each, rows
tell the stages' times, tokens and FLOP a second of a GPU, what communication costs beyond the
ideal, and memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from interlace.errors import OptionError
from interlace.launch import Tell
from interlace.strategies import StrategyName
from interlace_bench.race.ways import Racer, RaceSettings, close, free, prepare, run_race
from interlace_bench.ranks import Ranks
from interlace_bench.rows import Row, facts
from interlace_bench.timing import race
from interlace_bench.transformer.candidates import FLOAT8, WAYS, Candidates, limit
from interlace_bench.transformer.models import MODELS, flops


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerSettings(RaceSettings):
    """Layers of a model, and the sizes of a batch."""

    known = WAYS
    model: str = "llama3-8b"
    layers: int = 1
    sequence: int = 8192
    batch: int = 1
    dtype: str = "bf16"
    strategy: StrategyName = "auto"
    calibration: str | None = None

    def __post_init__(self) -> None:
        RaceSettings.__post_init__(self)
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


def work(settings: TransformerSettings, ranks: Ranks, tell: Tell) -> Row | None:
    """Races the ways; rank 0 gets the report."""
    tell({"event": "total", "total": len(settings.only) + 1, "doing": "weights"})
    trained = Candidates(settings, ranks)
    racers = run_race(
        settings.only,
        lambda name: _prepared(trained, name),
        lambda runs, sets: race(ranks, runs, sets, settings.seconds),
        tell,
    )
    times = {
        name: slowest(ranks, trained.laps[name].medians() if not racer.problem else NONE)
        for name, racer in racers.items()
    }
    offs = ranks.maximum([racer.off for racer in racers.values()])
    peaks = ranks.maximum([racer.peak_bytes for racer in racers.values()])
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
    torch.compiler.reset()  # while the group of its graphs is there
    free(ranks)
    return None if ranks.me else {"rows": rows, "facts": common}


NONE = [math.nan] * 3


def slowest(ranks: Ranks, mine: list[float]) -> Stages:
    """The stages of the rank whose forward and backward take longest. The others are done sooner,
    and wait for it in the step, where the gradients of norms are summed."""
    every = [Stages(*note["stages"]) for note in ranks.exchange({"stages": mine})]
    return max(every, key=lambda stages: stages.both)


def _prepared(trained: Candidates, name: str) -> Racer:
    """A way, opened, with the most bytes that a step takes beyond weights and moments."""
    ranks = trained.ranks
    free(ranks)
    before = _held(ranks)
    racer = prepare(ranks, trained.way(name), trained.sets, limit(name))
    if not ranks.cuda or racer.opened is None:
        return racer
    free(ranks)
    torch.cuda.reset_peak_memory_stats()
    racer.opened.run(*racer.sets[0])
    torch.cuda.synchronize()
    grown = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    racer.peak_bytes = _held(ranks) + grown - before
    return racer


def _held(ranks: Ranks) -> float:
    """Bytes of this rank's GPU that tensors have, and that others than torch's allocator have."""
    if not ranks.cuda:
        return math.nan
    unused, total = torch.cuda.mem_get_info()
    return total - unused - torch.cuda.memory_reserved() + torch.cuda.memory_allocated()
