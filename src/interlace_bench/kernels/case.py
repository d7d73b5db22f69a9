"""One op at one size, computed by several variants that are timed in turn.

    case = KernelCase(op="adam", shape="1.40e9 all f32", dtype="f32", does="step", build=build)
    rows = time_case(case, ranks, seconds=3.0)

A variant that is not installed, cannot serve or computes something wrong becomes a row with the
reason and no time. Where bytes bound the op, a copy from device to device takes turns with them:
its rate, in the same minute on the same warm device, is what theirs is a share of.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from interlace.errors import UnsupportedError
from interlace.launch import Tell
from interlace_bench.race import (
    LAUNCHES,
    Opened,
    Racer,
    Run,
    Sets,
    Variant,
    race,
    race_hosts,
    run_race,
    worst,
)
from interlace_bench.ranks import Ranks
from interlace_bench.rows import Row

OURS = "interlace"
"""The name of our variant; others of ours begin with it."""
COPY = "copy"
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 22}
"""Size of what is copied: twice as many bytes move."""
CHECKED = 16
"""Rows of results that are compared."""
BOTH, FORWARD = "forward+backward", "forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """A computation in words, the function that builds its variants, and how they are timed."""

    op: str
    shape: str
    dtype: str
    does: str
    build: Callable[[torch.device], Sequence[Variant]]
    nbytes: int = 0
    """Bytes that must move, where they bound the op."""
    flops: int = 0
    limit: float = 1.0
    """Largest deviation that a variant may have."""
    launches: tuple[int, int] = (3, LAUNCHES[1])
    ahead: int = 0
    """Launches by which the host is ahead of the device."""
    host: bool = False
    """The host's time is measured, not the device's."""

    def __str__(self) -> str:
        return f"{self.op} {self.shape} {self.dtype} {self.does}"


def checked(
    makers: Mapping[str, Callable[[], Run]], off: Callable[[Any], float], sets: Sets = ((),)
) -> list[Variant]:
    """Variants by name, each right where its first result, of the first inputs, is not far `off`. A
    maker returns what launches, or raises."""

    def opened(make: Callable[[], Run]) -> Opened:
        run = make()
        return Opened(run, lambda: off(run(*sets[0])))

    made = {name: functools.partial(opened, make) for name, make in makers.items()}
    return [Variant(name, each, sets=sets) for name, each in made.items()]


def needed(module: str, package: str, device: torch.device) -> Any:
    """A rival's module; raises `UnsupportedError` where it is not installed or there is no GPU."""
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        told = str(error).splitlines()[0]
        raise UnsupportedError(f"{package} is not installed ({told})") from error
    if device.type != "cuda":
        raise UnsupportedError(f"{package} runs on GPUs")
    return found


def unit(dtype: torch.dtype) -> float:
    """Unit of `off`: one rounding of a 16-bit type, or 128 of a 32-bit type (sums differ)."""
    return torch.finfo(dtype).eps * (1 if dtype.itemsize == 2 else 128)


def relative(found: Tensor, known: Tensor) -> float:
    """Deviation by root mean square, relative to the reference."""
    return float((found.to(known.dtype) - known).norm() / known.norm().clamp_min(1e-30))


def against(plain: Run, inputs: Sequence[Any]) -> Callable[[Sequence[Tensor]], float]:
    """Deviation of results from those of torch in wider numbers (fp32; of fp32 fp64): the furthest,
    in units of `unit`; of each the first rows are compared."""
    dtype = inputs[0].dtype
    kind = torch.float32 if dtype.itemsize == 2 else torch.float64
    wide = [
        x.detach().to(kind).requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for x in inputs
    ]
    known = [x[:CHECKED].clone() if x.ndim else x for x in plain(*wide)]

    def off(found: Sequence[Tensor]) -> float:
        pairs = zip(found, known, strict=True)
        far = [relative(a[: len(b)] if b.ndim else a, b) for a, b in pairs]
        return worst(far) / unit(dtype)

    return off


def time_case(
    case: KernelCase, ranks: Ranks, seconds: float, tell: Tell = lambda event: None
) -> list[Row]:
    """Builds, checks and times all variants of a case; a row for each."""
    variants = [replace(variant, limit=case.limit) for variant in case.build(ranks.device)]
    variants += [_copy(ranks.device)] if case.nbytes else []

    def timer(ready: list[Racer]) -> None:
        if case.host:
            race_hosts(ranks, ready, seconds)
            for racer in ready:
                racer.rounds = racer.host
        else:
            race(ranks, ready, seconds, launches=case.launches, ahead=case.ahead)

    def measure(racer: Racer) -> None:
        """Measures what a call allocates beyond what was there, of that what it returns, and what
        is kept from call to call."""
        given, opened = racer.variant.sets[0], racer.opened
        racer.run(*given)
        most, kept = peak_and_kept(racer.run, given, ranks)
        state = opened.state() if opened is not None else 0
        racer.figures.update(peak_bytes=most, kept_bytes=kept, state_bytes=state)

    racers = run_race(ranks, variants, timer, tell, f"{case}: ", measure)
    return _rows(case, racers, ranks)


def peak_and_kept(run: Run, inputs: Sequence[Any], ranks: Ranks) -> tuple[float, float]:
    """Bytes of one call beyond those allocated before: at most, and in what it returns."""
    if not ranks.cuda:
        return math.nan, math.nan
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = run(*inputs)
    torch.cuda.synchronize()
    most, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    del result
    return most - before, after - before


def _copy(device: torch.device) -> Variant:
    def make() -> Opened:
        source = torch.empty(COPY_BYTES[device.type], dtype=torch.uint8, device=device).random_()
        target = torch.empty_like(source)

        def off() -> float:
            target.copy_(source)
            return 0.0 if torch.equal(source, target) else math.inf

        return Opened(lambda: target.copy_(source), off)

    return Variant(COPY, make)


def _rows(case: KernelCase, racers: Mapping[str, Racer], ranks: Ranks) -> list[Row]:
    copied = 2 * COPY_BYTES[ranks.device.type]
    copy_rate = copied / (racers[COPY].median if COPY in racers else math.nan)
    torch_s = racers["torch"].median if "torch" in racers else math.nan
    rows: list[Row] = []
    for name, racer in racers.items():
        nbytes = copied if name == COPY else case.nbytes or math.nan
        rows.append(
            {
                **{"op": case.op, "shape": case.shape, "dtype": case.dtype, "does": case.does},
                "device": ranks.device.type,
                "way": name,
                "bytes": nbytes,
                "gbs": nbytes / racer.median / 1e9,
                "copy_gbs": copy_rate / 1e9,
                "share": nbytes / racer.median / copy_rate,
                "tflops": (case.flops or math.nan) / racer.median / 1e12,
                "speedup_torch": torch_s / racer.median,
                **racer.row,
            }
        )
    return rows
