"""What becomes of each communication, as text: strategy, reason, predicted gain, and the verdict.

>>> print(explain(compiled.bound))
forward: 2 communications, sound
  1  all_gather_matmul      layers.0.mlp.up    peer/get x4   1.31x   ...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from interlace.frontend.binding import Bound
from interlace.ir import Site


def explain(bound: Iterable[Bound]) -> str:
    """The sites and remarks of bound Programs, one Program after another."""
    return "\n\n".join(map(_one, bound))


def _one(bound: Bound) -> str:
    program = bound.program
    count = len(program.sites)
    verdict = "sound" if bound.report.sound else "unsound"
    plural = "" if count == 1 else "s"
    lines = [f"{bound.kind}: {count} communication{plural}, {verdict}"]
    lines += _columns([_row(site) for site in program.sites])
    for remark in program.remarks:
        place = "" if remark.site is None else f" (site {remark.site})"
        lines.append(f"  {remark.pass_name}{place}: {remark.text}")
    return "\n".join(lines)


def _row(site: Site) -> tuple[str, ...]:
    how = f"{site.strategy}/{site.protocol}" if site.protocol else site.strategy
    how = f"{how} x{site.chunks}" if site.chunks else how
    gain = ""
    if site.serial_ms and site.predicted_ms:
        gain = f"{site.serial_ms / site.predicted_ms:.2f}x"
    return str(site.id), site.kind, site.module or "-", how, gain, site.reason


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
