"""Runs: what traces and pages are made of, and how their files are written.

runs = [Run((forward,), predicted, measured, "forward"), Run((backward,), measured=timeline)]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from interlace.cost.timeline import Timeline
from interlace.ir import Program


@dataclass(frozen=True, slots=True)
class Run:
    """A Program (or a set of them), how it was predicted to run and how it ran."""

    programs: tuple[Program, ...] = ()
    predicted: Timeline | None = None
    measured: Timeline | None = None
    name: str = ""

    @property
    def timelines(self) -> list[Timeline]:
        """The timelines there are, predicted first."""
        return [timeline for timeline in (self.predicted, self.measured) if timeline is not None]


def all_programs(runs: Sequence[Run]) -> list[Program]:
    """The Programs of all runs, in the order in which the page numbers them."""
    return [program for run in runs for program in run.programs]


def as_set(program: Program | Sequence[Program] | None) -> tuple[Program, ...]:
    """A Program, a set of them, or none, as a tuple."""
    if program is None:
        return ()
    return (program,) if isinstance(program, Program) else tuple(program)


def title(timeline: Timeline, run: str = "") -> str:
    """What a timeline of a run is called."""
    if run:
        return f"{run} · {timeline.source}"
    return f"{timeline.source} · {timeline.name}" if timeline.name else timeline.source


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file beside its place and moves it there, so that nobody reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        part.write_bytes(data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
