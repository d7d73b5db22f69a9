"""`interlace bench interconnect`, and the measurements of `interlace calibrate` by the same ranks.

    report = work(settings, ranks, tell)       # on every rank; rank 0 gets the report

Copies and collectives; to calibrate by, the device and whole sites as well: rank 0 fits a Machine
to what was measured (`interlace_bench.fit`) and saves it.
"""

from __future__ import annotations

import functools
from pathlib import Path

from interlace.cost import default_machine, fingerprint
from interlace.errors import OptionError
from interlace.launch import Tell
from interlace.runtime.machine import gpus_of
from interlace_bench import overlap
from interlace_bench.device import device_samples
from interlace_bench.fit import Sample, fit
from interlace_bench.links import (
    backends,
    measure_collectives,
    measure_links,
    sizes_between,
)
from interlace_bench.ranks import Ranks
from interlace_bench.rows import Row, facts
from interlace_bench.settings import CalibrationSettings, InterconnectSettings, nbytes
from interlace_bench.shapes import check_dtypes

LEAST, COLLECTIVES_MOST = 1 << 10, 1 << 28


def work(settings: InterconnectSettings, ranks: Ranks, tell: Tell) -> Row | None:
    """Measures all of it; rank 0 gets the report."""
    samples, absent = measured(settings, ranks, tell), backends(ranks)[1]
    if ranks.me:
        return None
    common = facts(ranks.device.type, settings.commit)
    rows: list[Row] = [{**sample.row, **common} for sample in samples]
    tell({"event": "rows", "rows": rows})
    largest = {row["kind"]: row["nbytes"] for row in rows}  # sizes grow
    shown = [row for row in rows if row["nbytes"] == largest[row["kind"]]]
    found = {"rows": rows, "shown": shown, "absent": absent, "facts": common}
    return {**found, "headline": f", {ranks.size} ranks"}


def measured(settings: InterconnectSettings, ranks: Ranks, tell: Tell) -> list[Sample]:
    """The samples of links and collectives, alike on all ranks."""
    most = nbytes(settings.most or ("1GiB" if ranks.cuda else "16MiB"))
    if most < LEAST:
        raise OptionError(f"messages of {most} bytes at most: give {LEAST} or more")

    step = functools.partial(_step, tell)
    sizes, shorter = (sizes_between(LEAST, each) for each in (most, min(most, COLLECTIVES_MOST)))
    return [*measure_links(ranks, sizes, step), *measure_collectives(ranks, shorter, step)]


def calibrate_work(settings: CalibrationSettings, ranks: Ranks, tell: Tell) -> Row | None:
    """Measures on every rank, fits a machine and saves it; rank 0, and the first rank of every
    other host, get what there is to calibrate by: ranks whose files differ would choose different
    strategies."""
    check_dtypes(settings.dtypes)
    samples, path = measured(settings.links, ranks, tell), Path(settings.file)
    samples += device_samples(ranks, settings.dtypes, functools.partial(_step, tell))
    if not ranks.me:
        gpus, base = gpus_of(ranks.device.type), default_machine(ranks.device.type)
        path.parent.mkdir(parents=True, exist_ok=True)
        fit(samples, base, name=path.stem, host=fingerprint(gpus)).save(path)
    if ranks.hosts:
        (text, *_) = [
            note["text"] for note in ranks.exchange({"text": "" if ranks.me else path.read_text()})
        ]
        if ranks.me and any(ranks.me == members[0] for members in ranks.hosts):
            path.write_text(text)
            return {"rows": [], "skipped": [], "first": False}
    sites = None if settings.sites is None else overlap.work(settings.sites, ranks, tell)
    found = {"rows": [], "skipped": []} if sites is None else sites
    return None if ranks.me else {**found, "first": True}


def _step(tell: Tell, doing: str) -> None:
    tell({"event": "step", "doing": doing})
