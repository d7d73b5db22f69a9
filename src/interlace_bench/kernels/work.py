"""All cases of `interlace bench kernels`, one after another, within the time that is given.

report = work(KernelSettings(only=("cross-entropy",), seconds=30), torch.device("cuda"))
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from interlace.launch import Tell
from interlace_bench.kernels.adam import adam_cases
from interlace_bench.kernels.case import KernelCase, time_case
from interlace_bench.kernels.float8 import float8_cases
from interlace_bench.kernels.grouped import grouped_cases
from interlace_bench.kernels.host import host_cases, team_work
from interlace_bench.kernels.losses import cross_entropy_cases, linear_cases
from interlace_bench.kernels.muon import muon_cases
from interlace_bench.race.ways import RaceSettings, free
from interlace_bench.ranks import Alone, start
from interlace_bench.rows import Row, facts

OPS = ("cross-entropy", "linear-cross-entropy", "adam", "muon", "grouped", "float8", "host")
REST = ("host", "adam", "muon", "grouped", "float8", "linear-cross-entropy", "cross-entropy")
"""The order of what comes after the first case of each."""
MOST_S = 2.0
"""A case is timed for so long at most, set-up apart: more rounds tell no more."""
TEAM_S, TEAM_MOST_S = 10.0, 120.0
"""Seconds that must be left to start and time two processes, and their time-out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSettings(RaceSettings):
    """Ops, at sizes for a GPU or small ones."""

    known = OPS
    seconds: float = 80.0
    """All of it, set-up included; what does not fit is left out and said."""
    small: bool | None = None
    """Sizes for a try-out; by default on a CPU."""
    seed: int = 0


def cases_of(settings: KernelSettings, device: torch.device) -> list[KernelCase]:
    """The cases, those that bars are set for first."""
    small = device.type != "cuda" if settings.small is None else settings.small
    made: dict[str, Callable[[bool], list[KernelCase]]] = {
        "cross-entropy": cross_entropy_cases,
        "linear-cross-entropy": linear_cases,
        "adam": adam_cases,
        "muon": muon_cases,
        "grouped": grouped_cases,
        "float8": float8_cases,
        "host": lambda _: host_cases(device),
    }
    found = {op: made[op](small) for op in OPS if op in settings.only}
    first = [cases[0] for cases in found.values()]
    return [*first, *(case for op in REST if op in found for case in found[op][1:])]


def work(
    settings: KernelSettings, device: torch.device, tell: Tell = lambda event: None
) -> dict[str, Any]:
    """Measures every case on one device."""
    begun = time.monotonic()
    torch.manual_seed(settings.seed)
    ranks, common = Alone(device), facts(device.type, settings.commit)
    cases = cases_of(settings, device)
    tell({"event": "total", "total": len(cases), "doing": "kernels"})
    rows: list[Row] = []
    skipped: list[str] = []
    for index, case in enumerate(cases):
        tell({"event": "step", "doing": str(case)})
        left = settings.seconds - (time.monotonic() - begun)
        if left <= 0:
            skipped.append(str(case))
            continue
        share = min(MOST_S, left / (len(cases) - index))
        found = [{**row, **common} for row in time_case(case, ranks, share, tell)]
        rows += found
        tell({"event": "rows", "rows": found})
        torch.compiler.reset()
        free(ranks)
    if "host" in settings.only and (not ranks.cuda or torch.cuda.device_count() > 1):
        left = settings.seconds - (time.monotonic() - begun)
        if left > TEAM_S:
            kind = device.type
            report = start("kernels", team_work, settings.commit, kind, 2, TEAM_MOST_S, tell)
            found = report["rows"]
            rows += found
            tell({"event": "rows", "rows": found})
        else:
            skipped.append("host Executor.run of a team of 2")
    return {"rows": rows, "skipped": skipped, "facts": common}
