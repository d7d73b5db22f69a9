"""Files of measured samples, as `interlace calibrate --from` reads them."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable
from pathlib import Path

from interlace_bench.fit import HEADINGS, Sample, sample_of


def write_samples(path: str | os.PathLike[str], samples: Iterable[Sample]) -> None:
    """Writes samples as CSV, a row each."""
    with Path(path).open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(HEADINGS)
        for sample in samples:
            row = {name: getattr(sample, name) for name in HEADINGS}
            row["shape"] = "x".join(map(str, sample.shape))
            row["concurrent"] = int(sample.concurrent)
            row["seconds"] = repr(sample.seconds)
            writer.writerow(row.values())


def read_samples(path: str | os.PathLike[str]) -> list[Sample]:
    """The samples of a CSV file; columns that it does not have keep their defaults."""
    with Path(path).open(newline="") as file:
        return [
            sample_of(row, f"{path}, line {i + 2}") for i, row in enumerate(csv.DictReader(file))
        ]
