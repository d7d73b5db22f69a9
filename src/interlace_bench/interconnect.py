"""`interlace bench interconnect`, and what `interlace calibrate` measures by the same ranks.

    report = work(settings, ranks, tell)       # on every rank; rank 0 gets the report

Copies, collectives and the device: rank 0 fits a Machine to what was measured
(`interlace.cost.fit`) and saves it where `auto` looks. `calibrate_work` measures that, whole sites,
or both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from interlace.cost import Sample, default_machine, default_path, fingerprint, fit
from interlace.errors import OptionError
from interlace.launch import Tell
from interlace.passes.strategies.candidates import keeping_sites
from interlace.runtime.machine import gpus_of
from interlace_bench import overlap
from interlace_bench.device import device_samples
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

LONG = 64 << 20
"""Bytes of a copy that tells a link's bandwidth."""
FIXED = tuple(name for name in OURS if name != "auto")
"""The strategies that `auto` chooses among."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterconnectSettings:
    """What is measured. Plain data."""

    least: int = 1 << 10
    most: int = 1 << 30
    collectives_most: int = 1 << 28
    dtypes: tuple[str, ...] = ("bf16",)
    links: bool = True
    collectives: bool = True
    device: bool = True
    calibration: str | None = None
    """Where the calibration file goes; None: where `auto` looks, empty: nowhere."""
    commit: str = ""

    def __post_init__(self) -> None:
        if not 8 <= self.least <= self.most:
            raise OptionError(f"sizes from {self.least} to {self.most} bytes: give 8 <= least")
        check_dtypes(*self.dtypes)


def work(settings: InterconnectSettings, ranks: Ranks, tell: Tell) -> Row | None:
    """Measures all of it; rank 0 fits, saves and gets the report."""
    begun = time.monotonic()
    there, absent = backends(ranks)
    links = len(patterns(ranks)) * 2 * len(engines(ranks)) + 1 if settings.links else 0
    collectives = len(there) * len(ARGUMENTS) if settings.collectives else 0
    device = len(settings.dtypes) + 1 if settings.device else 0
    tell({"event": "total", "total": links + collectives + device, "doing": "starting"})

    def step(doing: str) -> None:
        tell({"event": "step", "doing": doing})

    common = facts(ranks.device.type, settings.commit)
    figures: list[Figure] = []
    if settings.links:
        sizes = sizes_between(settings.least, settings.most)
        figures += measure_links(ranks, sizes, step)
    if settings.collectives:
        most = min(settings.most, settings.collectives_most)
        sizes = sizes_between(settings.least, max(settings.least, most))
        figures += measure_collectives(ranks, sizes, step)
    alone = device_samples(ranks, settings.dtypes, step) if settings.device else []
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
        "device": [asdict(sample) for sample in alone],
        "engine": engine_share(rows),
        "calibration": calibrate(samples, settings, ranks),
        "seconds": time.monotonic() - begun,
    }


def engine_share(rows: list[Row]) -> list[Row]:
    """Of each pattern, how near the copy engine's long copies come to the best that anything does.

    The engine is what schedules copy by; `share` of 1 means that nothing here is faster.
    """
    found: list[Row] = []
    for pattern in dict.fromkeys(row["pattern"] for row in rows if row["pattern"] != "team"):
        long = [
            row
            for row in rows
            if row["pattern"] == pattern and row["nbytes"] >= LONG and not row["error"]
        ]
        ours = max((row["gbs"] for row in long if row["protocol"] == "ce"), default=0.0)
        if ours:
            best = max(long, key=lambda row: row["gbs"])
            by = f"{best['kind']} {best['backend']} {best['protocol']}"
            found.append({"pattern": pattern, "gbs": ours, "share": ours / best["gbs"], "by": by})
    return found


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
    """Fits a machine and saves it; the path, or empty where none was wanted."""
    if settings.calibration == "" or not samples:
        return ""
    where = gpus_of(ranks.device.type)
    path = Path(settings.calibration) if settings.calibration else default_path(where)
    path.parent.mkdir(parents=True, exist_ok=True)
    base = default_machine(ranks.device.type)
    machine = fit(samples, base, name=path.stem, host=fingerprint(where))
    keeping_sites(machine, path).save(path)
    return str(path)


CalibrationSettings = tuple[InterconnectSettings | None, overlap.OverlapSettings | None]
"""What `interlace calibrate` measures: the interconnect, sites, or both."""


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
