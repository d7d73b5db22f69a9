"""`interlace bench interconnect`, and the measurements of `interlace calibrate` by the same ranks.

    report = work(settings, ranks, tell)       # on every rank; rank 0 gets the report

Copies and collectives; to calibrate by, the device as well: rank 0 fits a Machine to what was
measured (`interlace.cost.fit`) and saves it. `calibrate_work` measures that, whole sites, or both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from interlace.cost import Sample, default_machine, fingerprint, fit
from interlace.errors import OptionError
from interlace.launch import Tell
from interlace.runtime.machine import gpus_of
from interlace_bench import overlap
from interlace_bench.device import device_samples
from interlace_bench.measured_sites import keeping_sites
from interlace_bench.race.candidates import OURS
from interlace_bench.ranks import Ranks
from interlace_bench.rows import Row, facts
from interlace_bench.sites import SiteCase, check_dtypes
from interlace_bench.transfers import (
    ARGUMENTS,
    Figure,
    backends,
    engines,
    measure_collectives,
    measure_links,
    patterns,
    sizes_between,
)

FIXED = tuple(name for name in OURS if name != "auto")
"""The strategies that `auto` chooses among."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterconnectSettings:
    """Sizes and dtypes to measure, and the file to write. Plain data."""

    least: int = 1 << 10
    most: int = 1 << 30
    collectives_most: int = 1 << 28
    calibration: str = ""
    """Where the calibration file goes; empty: there is none."""
    dtypes: tuple[str, ...] = ("bf16",)
    """Dtypes of the matmuls that calibration measures."""
    commit: str = ""

    def __post_init__(self) -> None:
        if self.most < self.least:
            raise OptionError(f"messages of {self.most} bytes at most: give {self.least} or more")
        check_dtypes(*self.dtypes)


def work(settings: InterconnectSettings, ranks: Ranks, tell: Tell) -> Row | None:
    """Measures all of it; rank 0 fits, saves and gets the report."""
    there, absent = backends(ranks)
    links = len(patterns(ranks)) * 2 * len(engines(ranks)) + 1
    device = len(settings.dtypes) + 1 if settings.calibration else 0
    total = links + len(there) * len(ARGUMENTS) + device
    tell({"event": "total", "total": total, "doing": "starting"})

    def step(doing: str) -> None:
        tell({"event": "step", "doing": doing})

    common = facts(ranks.device.type, settings.commit)
    figures = [*measure_links(ranks, sizes_between(settings.least, settings.most), step)]
    most = min(settings.most, settings.collectives_most)
    figures += measure_collectives(ranks, sizes_between(settings.least, most), step)
    alone = device_samples(ranks, settings.dtypes, step) if settings.calibration else []
    samples = [*alone, *(figure.sample for figure in figures if not figure.error)]
    if ranks.me:
        return None
    rows = [row(figure, common) for figure in figures]
    tell({"event": "rows", "rows": rows})
    return {
        "rows": rows,
        "absent": absent,
        "facts": common,
        "world": ranks.size,
        "calibration": calibrate(samples, settings, ranks) if settings.calibration else "",
    }


def row(figure: Figure, common: dict[str, str]) -> Row:
    """A figure as a row; `world` is the ranks that took part, of a figure inside a host those."""
    shared = ("kind", "backend", "protocol", "pattern", "nbytes")
    return {
        **{name: getattr(figure, name) for name in shared},
        "world": figure.ranks,
        "us": figure.seconds * 1e6,
        "gbs": figure.bandwidth / 1e9,
        "error": figure.error,
        **common,
    }


def calibrate(samples: list[Sample], settings: InterconnectSettings, ranks: Ranks) -> str:
    """Fits a machine and saves it; the path."""
    where, path = gpus_of(ranks.device.type), Path(settings.calibration)
    path.parent.mkdir(parents=True, exist_ok=True)
    base = default_machine(ranks.device.type)
    machine = fit(samples, base, name=path.stem, host=fingerprint(where))
    keeping_sites(machine, path).save(path)
    return str(path)


CalibrationSettings = tuple[InterconnectSettings | None, overlap.OverlapSettings | None]
"""Settings of `interlace calibrate`: for the interconnect, for sites, or for both."""


def calibration_settings(
    *, calibration: str, dtypes: Sequence[str], most: int, cases: Sequence[SiteCase], seconds: float
) -> CalibrationSettings:
    """No `calibration` file, no interconnect; no `cases`, no sites. Whole sites' host times are not
    calibrated by, so few calls are timed."""
    links = InterconnectSettings(
        calibration=calibration, dtypes=tuple(dtypes), most=most, collectives_most=most
    )
    sites = overlap.OverlapSettings(cases=tuple(cases), only=FIXED, seconds=seconds, host_runs=20)
    return (links if calibration else None), (sites if cases else None)


def calibrate_work(given: CalibrationSettings, ranks: Ranks, tell: Tell) -> Row | None:
    """Measures on every rank; rank 0, and the first rank of every other host, get what there is to
    calibrate by: ranks whose files differ would choose different strategies."""
    links, sites = given
    found: Row = {"calibration": "", "rows": [], "skipped": [], "first": not ranks.me}
    if links is not None:
        report = work(links, ranks, tell)
        found["calibration"] = report["calibration"] if report is not None else ""
    if sites is not None:
        report = overlap.work(sites, ranks, tell)
        if report is not None:
            found |= {"rows": report["rows"], "skipped": report["skipped"]}
    if links is not None and ranks.hosts:
        text = Path(found["calibration"]).read_text() if found["calibration"] else ""
        (text, *_) = [note["text"] for note in ranks.exchange({"text": text})]
        if ranks.me and text and any(ranks.me == members[0] for members in ranks.hosts):
            path = str(links.calibration)
            Path(path).write_text(text)
            return found | {"calibration": path}
    return None if ranks.me else found
