"""Measured sites from the rows of `interlace bench overlap`: for the table that `auto` asks first.

    times = site_times(csv.DictReader(file))
    machine = with_sites(machine, times)

Rows of other libraries, of `auto` and with an error tell nothing here. Where rows come from several
GPUs, those of the last row's count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from interlace.cost import SiteKey, SiteTime
from interlace.errors import CalibrationError
from interlace.passes.sites.recognise import SITE_KINDS
from interlace.passes.strategies.pieces import DEFAULT_SLICES

KINDS = {
    "ag_gemm": SITE_KINDS["all_gather"],
    "gemm_rs": SITE_KINDS["reduce_scatter"],
    "gemm_ar": SITE_KINDS["all_reduce"],
}
LABELS = {
    **{name: name for name in ("serial", "fused", "exchange", "shift", "ring", "broadcast")},
    **{"get": "peer/get", "put": "peer/put", "peer/get": "peer/get", "peer/put": "peer/put"},
}
"""A strategy's name in rows, and as `auto` knows it."""


def site_times(rows: Iterable[Mapping[str, Any]]) -> list[SiteTime]:
    """What the rows tell of our fixed strategies."""
    listed = list(rows)
    gpu = _text(listed[-1], "gpu") if listed else ""
    found = [_site_time(row) for row in listed if _text(row, "gpu") == gpu]
    return [time for time in found if time is not None]


def gpu_of(rows: Iterable[Mapping[str, Any]]) -> tuple[str, int]:
    """The GPU of the last row (on CPUs, their name), and the largest team there."""
    listed = list(rows)
    gpu = _text(listed[-1], "gpu") if listed else ""
    worlds = [int(row["world"]) for row in listed if _text(row, "gpu") == gpu and row.get("world")]
    return gpu, max(worlds, default=0)


def _site_time(row: Mapping[str, Any]) -> SiteTime | None:
    label, op = _label(row), _text(row, "op")
    if label is None or op not in KINDS or _text(row, "error"):
        return None
    try:
        # Of few rounds the median may be that of a busy host; the least is not.
        seconds = float(row.get("least_us") or row["median_us"] or "nan") * 1e-6
        m, k, n, world = (int(row[name]) for name in ("m", "k", "n", "world"))
    except (KeyError, TypeError, ValueError) as error:
        raise CalibrationError(
            f"a row of sites needs op, m, k, n, dtype, world, strategy, mode and median_us: {error}"
        ) from error
    if not 0 < seconds < math.inf or min(m, k, n, world) < 1:
        return None
    site = SiteKey(
        kind=KINDS[op],
        dtype=_text(row, "dtype"),
        m=m,
        k=k,
        n=n,
        world=world,
        graph=_text(row, "mode") == "graph",
    )
    return SiteTime(site=site, strategy=label, seconds=seconds)


def _label(row: Mapping[str, Any]) -> str | None:
    name = _text(row, "strategy")
    if name == "pipeline":
        return f"pipeline x{_text(row, 'chunks') or DEFAULT_SLICES}"
    return LABELS.get(name)


def _text(row: Mapping[str, Any], name: str) -> str:
    return str(row.get(name) or "")
