"""Measured sites, from rows of `interlace bench overlap` into a machine's calibration.

    >>> with_sites(machine, site_times(rows)).sites[0].strategy
    'serial'

Rows of other libraries, of `auto`, or with an error are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from interlace.cost import Machine, SiteKey, SiteTime
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
    "pipeline": f"pipeline x{DEFAULT_SLICES}",
}
"""Labels of strategies, by their names in rows."""


def site_times(rows: Iterable[Mapping[str, Any]]) -> list[SiteTime]:
    """Times of Interlace's fixed strategies in the rows."""
    return [time for time in map(_site_time, rows) if time is not None]


def _site_time(row: Mapping[str, Any]) -> SiteTime | None:
    label = LABELS.get(row["strategy"])
    if label is None or row.get("error"):
        return None
    # Of few rounds the median may be that of a busy host; the least is not.
    seconds = float(row.get("least_us") or row["median_us"] or "nan") * 1e-6
    if not 0 < seconds < math.inf:
        return None
    m, k, n, world = (int(row[name]) for name in ("m", "k", "n", "world"))
    kind, graph = KINDS[row["op"]], row["mode"] == "graph"
    site = SiteKey(kind=kind, dtype=row["dtype"], m=m, k=k, n=n, world=world, graph=graph)
    return SiteTime(site=site, strategy=label, seconds=seconds)
