"""Tables of `interlace bench interconnect`: links, and backends side by side.

show_interconnect(report)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from interlace.commands.output import say, table
from interlace.options import BACKENDS

MESSAGES = "get", "put", "send"
"""Kinds that go from one rank to another; all other kinds are collectives."""


def size(count: int) -> str:
    """Bytes as people read them."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count} B"


def show_interconnect(report: dict[str, Any]) -> None:
    """A line for each kind, backend and pattern: the latency, rates by size, the best rate."""
    facts = report["facts"]
    say(f"{report['world']} ranks, {facts['gpu']}, torch {facts['torch']}\n")
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in (row for row in report["rows"] if row["kind"] in MESSAGES):
        key = (row["kind"], row["backend"], row["protocol"], row["pattern"])
        groups.setdefault(key, []).append(row)
    headings = ("kind", "backend", "by", "who", "smallest", "largest", "best", "error")
    lines = [(*key, *_rates(rows)) for key, rows in groups.items()]
    table(headings, lines, title="between ranks")
    headings = ("collective", "who", "size", *BACKENDS, "error")
    say("")
    table(headings, by_backend(report), title="collectives by backend")
    for name, why in report["absent"].items():
        say(f"{name} is absent: {why}")


def by_backend(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The smallest and the largest of each kind of collective, and its time on each backend."""
    found: dict[tuple[str, str], dict[int, dict[str, Mapping[str, Any]]]] = {}
    for row in report["rows"]:
        if row["kind"] not in MESSAGES:
            sizes = found.setdefault((row["kind"], row["pattern"]), {})
            sizes.setdefault(row["nbytes"], {})[row["backend"]] = row
    return [
        (
            *key,
            size(nbytes) if nbytes else "",
            *("absent" if each in report["absent"] else _time(rows.get(each)) for each in BACKENDS),
            "; ".join(f"{each}: {row['error']}" for each, row in rows.items() if row["error"]),
        )
        for key, sizes in found.items()
        for nbytes in sorted({min(sizes), max(sizes)})
        for rows in [sizes[nbytes]]
    ]


def _time(row: Mapping[str, Any] | None) -> str:
    if row is None or row["error"]:
        return "-"
    rate = "" if math.isnan(row["gbs"]) else f", {row['gbs']:.3g} GB/s"
    return f"{row['us']:.0f} us{rate}"


def _rates(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The times of the smallest and the largest, the best rate, the error."""
    good = [row for row in rows if not row["error"]]
    rates = [row for row in good if not math.isnan(row["gbs"])]
    best = max(rates, key=lambda row: row["gbs"], default=None)
    return (
        f"{good[0]['us']:.1f} us" if good else "-",
        f"{rates[-1]['us']:.0f} us" if rates else "-",
        f"{best['gbs']:.2f} GB/s at {size(best['nbytes'])}" if best else "-",
        next((row["error"] for row in rows if row["error"]), ""),
    )
