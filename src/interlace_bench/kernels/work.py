"""All cases of `interlace bench kernels`, one after another, within the time that is given.

report = measure(KernelSettings(only="cross-entropy", seconds=30), print)
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from interlace.launch import Report, Tell
from interlace_bench.kernels.adam import adam_cases
from interlace_bench.kernels.case import KernelCase, time_case
from interlace_bench.kernels.float8 import float8_cases
from interlace_bench.kernels.grouped import grouped_cases
from interlace_bench.kernels.host import host_cases, team_work
from interlace_bench.kernels.losses import cross_entropy_cases, linear_cases
from interlace_bench.kernels.muon import muon_cases
from interlace_bench.race import run_cases
from interlace_bench.ranks import Alone, pick_device, start
from interlace_bench.rows import Row, facts
from interlace_bench.settings import KERNELS, KernelSettings

REST = ("host", "adam", "muon", "grouped", "float8", "linear-cross-entropy", "cross-entropy")
"""The order of what comes after the first case of each."""
MOST_S = 2.0
"""A case is timed for so long at most, set-up apart: more rounds tell no more."""
TEAM_S = 10.0
"""Seconds that must be left to start and time two processes."""


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
        "host": lambda _: host_cases(),
    }
    found = {op: made[op](small) for op in KERNELS if op in settings.names}
    first = [cases[0] for cases in found.values()]
    return [*first, *(case for op in REST if op in found for case in found[op][1:])]


def measure(settings: KernelSettings, tell: Tell) -> Report:
    """Measures every case on one device, and what the host takes in a team of two."""
    begun = time.monotonic()
    device = torch.device(pick_device(settings.device))
    torch.manual_seed(0)
    ranks, common = Alone(device), facts(device.type, settings.commit)

    def timed(case: KernelCase, share: float) -> list[Row]:
        found = [row | common for row in time_case(case, ranks, share, tell)]
        torch.compiler.reset()
        return found

    def team(share: float) -> list[Row]:
        return start(team_work, settings, device.type, 2, tell)["rows"]

    cases = {str(case): functools.partial(timed, case) for case in cases_of(settings, device)}
    rows, skipped = run_cases(ranks, cases, settings.seconds, tell, MOST_S)
    if "host" in settings.names and (not ranks.cuda or torch.cuda.device_count() > 1):
        left = settings.seconds - (time.monotonic() - begun)
        name = "host Executor.run of a team of 2"
        found, late = run_cases(ranks, {name: team}, left, tell, kept_s=TEAM_S)
        rows, skipped = rows + found, skipped + late
    said = f", Triton {common['triton'] or 'absent'}"
    return {"rows": rows, "skipped": skipped, "facts": common, "headline": said}
