"""Kinds of collective: a row of data each.

>>> KINDS["all_gather"].scales, KINDS["broadcast"].rooted
('gather', True)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CollectiveKind:
    """A kind of collective: who reads and writes, and whether it reduces or has a root."""

    reads: str = "all"  # all | root | none: who reads `src`
    writes: str = "all"  # who writes `dst`
    reduces: bool = False
    rooted: bool = False
    scales: str = ""  # "gather": dst is size * src; "scatter": src is size * dst; "": equal


KINDS: dict[str, CollectiveKind] = {
    "all_gather": CollectiveKind(scales="gather"),
    "reduce_scatter": CollectiveKind(reduces=True, scales="scatter"),
    "all_reduce": CollectiveKind(reduces=True),
    "broadcast": CollectiveKind(reads="root", rooted=True),
    "all_to_all": CollectiveKind(),
    "gather": CollectiveKind(writes="root", rooted=True, scales="gather"),
    "scatter": CollectiveKind(reads="root", rooted=True, scales="scatter"),
    "reduce": CollectiveKind(writes="root", reduces=True, rooted=True),
    "barrier": CollectiveKind(reads="none", writes="none"),
}
"""The kinds of collective: one row of data each."""

REDUCTIONS = ("sum", "avg", "prod", "min", "max")
