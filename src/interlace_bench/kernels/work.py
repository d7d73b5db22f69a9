"""All cases of `interlace bench kernels`, one after another, within the time that is given.

report = work(KernelSettings(only="cross-entropy", seconds=30), ranks, tell)
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from interlace.launch import Tell
from interlace_bench.kernels.adam import adam_cases
from interlace_bench.kernels.case import KernelCase, time_case
from interlace_bench.kernels.float8 import float8_cases
from interlace_bench.kernels.grouped import grouped_cases
from interlace_bench.kernels.host import host_cases, team_cases
from interlace_bench.kernels.losses import cross_entropy_cases, linear_cases
from interlace_bench.kernels.muon import muon_cases
from interlace_bench.race import RacePlan, benchmark
from interlace_bench.ranks import Ranks
from interlace_bench.rows import Row
from interlace_bench.settings import KERNELS, KernelSettings

MOST_S = 2.0
"""A case is timed for so long at most, set-up apart: more rounds tell no more."""


CASES: dict[str, Callable[[bool], list[KernelCase]]] = {
    "cross-entropy": cross_entropy_cases,
    "linear-cross-entropy": linear_cases,
    "adam": adam_cases,
    "muon": muon_cases,
    "grouped": grouped_cases,
    "float8": float8_cases,
    "host": lambda small: host_cases(),
}


def cases_of(settings: KernelSettings, device: torch.device) -> list[KernelCase]:
    """The cases of the ops that are asked for."""
    small = device.type != "cuda" if settings.small is None else settings.small
    return [case for op in KERNELS if op in settings.names for case in CASES[op](small)]


@benchmark
def work(settings: KernelSettings, ranks: Ranks, tell: Tell) -> RacePlan:
    """Every case, and of a team what its host takes."""
    torch.manual_seed(0)

    def timed(case: KernelCase, share: float) -> list[Row]:
        found = time_case(case, ranks, share, tell)
        torch.compiler.reset()
        return found

    cases = cases_of(settings, ranks.device)
    if "host" in settings.names and ranks.size > 1:
        cases += team_cases(ranks)
    return RacePlan(
        cases={str(case): functools.partial(timed, case) for case in cases},
        seconds=settings.seconds,
        most_s=MOST_S,
    )
