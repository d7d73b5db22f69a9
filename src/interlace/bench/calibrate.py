"""What `interlace calibrate` measures: the interconnect, whole sites, or both, by the same ranks.

given = settings(calibration="/tmp/new.json", cases=cases, seconds=240)
report = run("calibrate", given, device="auto", world=None, time_out_s=580)
report["calibration"], report["rows"]        # a file that was written, and rows of sites
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from interlace.bench import interconnect, overlap
from interlace.bench.candidates import OURS
from interlace.bench.ranks import Ranks
from interlace.bench.rows import Row
from interlace.bench.sites import Case

FIXED = tuple(name for name in OURS if name != "auto")
"""The strategies that `auto` chooses among."""
CPU_CASES = (
    *(("ag_gemm", 256, 256, 512), ("ag_gemm", 1024, 256, 768), ("ag_gemm", 2048, 512, 2048)),
    *(("gemm_rs", 256, 512, 256), ("gemm_rs", 1024, 768, 256), ("gemm_rs", 2048, 2048, 512)),
    *(("gemm_ar", 256, 256, 256), ("gemm_ar", 1024, 512, 512)),
)
"""Sites for a CPU, where the presets would take too long or tell too little."""
HOST_RUNS = 20
"""Nothing is calibrated by the host's time of whole sites."""


def settings(
    *,
    calibration: str = "",
    dtypes: Sequence[str] = ("bf16",),
    most: int = 1 << 28,
    cases: Sequence[Case] = (),
    seconds: float = 120.0,
) -> dict[str, Any]:
    """Plain data: no `calibration` file, no interconnect; no `cases`, no sites."""
    links = overlap_of = None
    if calibration:
        links = interconnect.Settings(
            calibration=calibration, dtypes=tuple(dtypes), most=most, collectives_most=most
        ).to_json()
    if cases:
        overlap_of = overlap.Settings(
            cases=tuple((c.op, c.m, c.k, c.n, c.dtype) for c in cases),
            only=FIXED,
            seconds=seconds,
            host_runs=HOST_RUNS,
        ).to_json()
    return {"interconnect": links, "overlap": overlap_of}


def work(given: dict[str, Any], ranks: Ranks, tell: Callable[[dict[str, Any]], None]) -> Row | None:
    """Measures on every rank; rank 0 gets what there is to calibrate by."""
    found: Row = {"calibration": "", "rows": [], "skipped": []}
    if given["interconnect"] is not None:
        told = interconnect.Settings.from_json(given["interconnect"])
        report = interconnect.work(told, ranks, tell)
        found["calibration"] = report["calibration"] if report is not None else ""
    if given["overlap"] is not None:
        report = overlap.work(overlap.Settings.from_json(given["overlap"]), ranks, tell)
        if report is not None:
            found |= {"rows": report["rows"], "skipped": report["skipped"]}
    return None if ranks.me else found
