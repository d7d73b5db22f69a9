"""The measurements of `interlace calibrate`, and the machine that they make.

    report = calibrate_work(settings, ranks, tell)       # on every rank; rank 0 gets the report

Copies and collectives, the device and whole sites: rank 0 fits a Machine to what was measured
(`interlace_bench.calibration.fit`) and saves it.
"""

from __future__ import annotations

from pathlib import Path

from interlace.cost import default_machine, fingerprint
from interlace.launch import Tell
from interlace.runtime.machine import gpus_of
from interlace_bench import overlap
from interlace_bench.calibration.device import device_samples
from interlace_bench.calibration.fit import fit
from interlace_bench.links import measured
from interlace_bench.ranks import Ranks
from interlace_bench.rows import Row
from interlace_bench.settings import CalibrationSettings
from interlace_bench.shapes import check_dtypes


def calibrate_work(settings: CalibrationSettings, ranks: Ranks, tell: Tell) -> Row | None:
    """Measures on every rank, fits a machine and saves it; rank 0, and the first rank of every
    other host, get what there is to calibrate by: ranks whose files differ would choose different
    strategies."""
    check_dtypes(settings.dtypes)
    samples, path = measured(settings.links, ranks, tell), Path(settings.file)
    samples += device_samples(ranks, settings.dtypes, tell)
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
