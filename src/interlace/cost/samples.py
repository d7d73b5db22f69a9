"""Samples: single figures that a benchmark measured, from which `fit` makes a Machine.

    samples = [
        Sample(kind="get", backend="peer", protocol="ce", nbytes=1 << 20, ranks=4, seconds=14e-6),
        Sample(kind="all_gather", backend="nccl", nbytes=1 << 24, ranks=4, seconds=83e-6),
        Sample(kind="gemm", dtype="bf16", shape=(8192, 8192, 14336), seconds=2.4e-3),
    ]
    write_samples("interconnect.csv", samples)
    machine = fit(read_samples("interconnect.csv"), default_machine("cuda"))

Kinds that nobody measured may be missing: their figures stay as they are.
"""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from interlace.errors import CalibrationError

TRANSFERS = ("get", "put", "send")
"""Between two ranks."""
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "reduce")
"""Of a team."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured figure."""

    kind: str
    """`get`, `put`, `send` (point to point); a collective's kind as in the IR; `copy` (inside the
    device's memory); `gemm`; `launch` (a kernel that does nothing, one after another); `event`
    (a wait for an event of another stream); `issue` (the host, for the call that `protocol` names:
    `call`, `kernel`, `copy`, `peer`, `collective`, `event` or `signal`)."""
    seconds: float
    """One of them, once warm: the median."""
    backend: str = ""
    """What moved the bytes: `nccl`, `peer`, `gloo`, `ucc`."""
    protocol: str = ""
    """Of point-to-point copies `ce` (copy engine) or `sm` (a kernel)."""
    dtype: str = ""
    """As the IR spells it: `bf16`."""
    nbytes: int = 0
    """Point to point and `copy`: the bytes copied. Collectives: those of the larger of a rank's
    two tensors (what an all-gather makes, what a reduce-scatter takes)."""
    shape: tuple[int, int, int] = (0, 0, 0)
    """M, K and N of a matmul."""
    ranks: int = 0
    """Size of the team; of point-to-point copies, how many ranks took part."""
    concurrent: bool = False
    """Point to point: whether all ranks copied at once."""
    under: str = ""
    """What else ran on the device meanwhile: `gemm` or `copies`; empty: nothing."""

    @property
    def usable(self) -> bool:
        """Whether it tells anything."""
        return 0 < self.seconds < math.inf

    @property
    def link_bytes(self) -> float:
        """The bytes that pass through the busiest rank's link, one way."""
        part = self.nbytes * (self.ranks - 1) / self.ranks if self.ranks > 1 else 0.0
        match self.kind:
            case "get" | "put" | "send" | "copy":
                return self.nbytes
            case "all_reduce":
                return 2 * part
            case "broadcast":
                return self.nbytes if self.ranks > 1 else 0.0
            case _:
                return part


HEADINGS = tuple(field.name for field in fields(Sample))


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


def sample_of(row: Mapping[str, str], where: str) -> Sample:
    """The sample of a row of text."""
    given = {key: value for key, value in row.items() if key in HEADINGS and value}
    try:
        sizes = tuple(map(int, given.get("shape", "0x0x0").split("x")))
        if len(sizes) != 3:
            raise ValueError(f"shape {given['shape']!r} is not MxKxN")
        return Sample(
            kind=given["kind"],
            seconds=float(given["seconds"]),
            backend=given.get("backend", ""),
            protocol=given.get("protocol", ""),
            dtype=given.get("dtype", ""),
            nbytes=int(float(given.get("nbytes", "0"))),
            shape=sizes,
            ranks=int(given.get("ranks", "0")),
            concurrent=given.get("concurrent", "").lower() in ("1", "true"),
            under=given.get("under", ""),
        )
    except (KeyError, ValueError) as error:
        raise CalibrationError(f"{where} is no sample: {error}") from error
