"""Measured sites, from rows of `interlace bench overlap` into a machine's calibration.

    >>> with_sites(machine, site_times(rows)).sites[0].strategy
    'serial'

Rows of other libraries, of `auto`, with an error, or of another GPU than the last row's are left
out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from interlace.cost import Machine, SiteKey, SiteTime
from interlace.errors import CalibrationError
from interlace.passes.sites.recognise import SITE_KINDS
from interlace.passes.strategies.choose import SERIAL, label_of
from interlace.passes.strategies.pieces import DEFAULT_SLICES
from interlace.strategies import STRATEGIES


def with_sites(machine: Machine, times: Iterable[SiteTime]) -> Machine:
    """The machine with these measured sites; of several times of one site and strategy the last
    counts."""
    found = {(time.site, time.strategy): time for time in (*machine.sites, *times)}
    return machine.replace(sites=tuple(found.values()))


KINDS = {
    "ag_gemm": SITE_KINDS["all_gather"],
    "gemm_rs": SITE_KINDS["reduce_scatter"],
    "gemm_ar": SITE_KINDS["all_reduce"],
}
_FIXED = [label_of(row) for row in STRATEGIES.values() if not row.sliced]
LABELS = {
    **{label: label for label in (SERIAL, *_FIXED)},
    **{label.removeprefix("peer/"): label for label in _FIXED},
}
"""Labels of strategies, by their names in rows."""


def site_times(rows: Iterable[Mapping[str, Any]]) -> list[SiteTime]:
    """Times of Interlace's fixed strategies in the rows."""
    _, listed = _of_last_gpu(rows)
    return [time for time in map(_site_time, listed) if time is not None]


def gpu_of(rows: Iterable[Mapping[str, Any]]) -> tuple[str, int]:
    """The GPU of the last row (on CPUs, their name), and the largest team there."""
    gpu, listed = _of_last_gpu(rows)
    return gpu, max([int(row["world"]) for row in listed if row.get("world")], default=0)


def _of_last_gpu(rows: Iterable[Mapping[str, Any]]) -> tuple[str, list[Mapping[str, Any]]]:
    listed = list(rows)
    gpu = _text(listed[-1], "gpu") if listed else ""
    return gpu, [row for row in listed if _text(row, "gpu") == gpu]


def _site_time(row: Mapping[str, Any]) -> SiteTime | None:
    label, op = _label(row), _text(row, "op")
    if label is None or op not in KINDS or _text(row, "error"):
        return None
    try:
        # Of few rounds the median may be that of a busy host; the least is not.
        seconds = float(row.get("least_us") or row["median_us"] or "nan") * 1e-6
        m, k, n, world = sizes = [int(row[name]) for name in ("m", "k", "n", "world")]
    except (KeyError, TypeError, ValueError) as error:
        raise CalibrationError(
            f"a row of sites needs op, m, k, n, dtype, world, strategy, mode and median_us: {error}"
        ) from error
    if not 0 < seconds < math.inf or min(sizes) < 1:
        return None
    dtype, graph = _text(row, "dtype"), _text(row, "mode") == "graph"
    site = SiteKey(kind=KINDS[op], dtype=dtype, m=m, k=k, n=n, world=world, graph=graph)
    return SiteTime(site=site, strategy=label, seconds=seconds)


def _label(row: Mapping[str, Any]) -> str | None:
    name = _text(row, "strategy")
    if name == "pipeline":
        return f"pipeline x{_text(row, 'chunks') or DEFAULT_SLICES}"
    return LABELS.get(name)


def _text(row: Mapping[str, Any], name: str) -> str:
    return str(row.get(name) or "")
