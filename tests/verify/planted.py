"""Faults to plant in the checker, and for each a small set of Programs that shows it.

python -m tests.verify.planted 7           # finds a set for each with seed 7, and writes the files

Each stands for a rule of semantics.md that the checker would lack. The campaign has to find all of
them; the sets that it found are in tests/golden/fuzz, made small.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fuzzing import campaign as campaigns
from tests.verify.schedules import GOLDEN

from interlace.ir.order import Meetings
from interlace.ir.sizes import greatest, least
from interlace.verify.build import GraphBuilder, _RunBuilder
from interlace.verify.graph import HappensBefore
from interlace.verify.regions import ByteRegion, Regions
from interlace.verify.source import Item, _Lowering
from interlace.verify.sweep import Cell, Content, Sweep

FOLDER = GOLDEN / "fuzz"
ORDER, BIND = _RunBuilder.order, _Lowering.bind
RESOLVE, MEET = Regions._resolve, GraphBuilder._meet
HAS_PART = GraphBuilder._has_part


def always(*_: object) -> bool:
    return True


def never(*_: object) -> bool:
    return False


def nothing(*_: object) -> None:
    return None


def without_blocks(self: HappensBefore, node: int) -> list[int]:
    return [*self.preds[node], *(other for other, _ in self.afar.get(node, ()))]


def host_goes_on(self: _RunBuilder, node: int, item: Item) -> None:
    ORDER(self, node, item)
    self.host = -1
    self.host_seen = [-1] * len(self.host_seen)


def first_record(self: _Lowering, item: Item) -> None:
    known = self.records.get(item.ordering.records or "", -1)
    BIND(self, item)
    if known >= 0:
        self.records[item.ordering.records or ""] = known


def last_raise(self: Meetings[Any], signal: Any, value: int) -> tuple[Any, int]:
    raised = self.raised.get(signal, ())
    enough = [source for reached, source in raised if reached >= value]
    return enough[-1] if enough else None, max((v for v, _ in raised), default=0)


def by_hull(self: Sweep, one: Any, other: Any) -> bool:
    return one.lo < other.hi and other.lo < one.hi


def as_it_is(self: Regions, spot: Any, where: Any) -> ByteRegion:
    found = RESOLVE(self, spot, where)
    if not found.strided:
        return found
    lo, hi = found.exact.hull
    return ByteRegion(
        found.exact, found.exact, lo, hi, least(lo), greatest(hi), False, False, False
    )


def not_in_turn(self: GraphBuilder, queue: Any, come: Any, standing: Any) -> None:
    for at in come.values():
        issued = self.meetings.queues[queue][at.place.rank]
        k = issued.index(at)
        before = issued[k - 1].end if k else -1
        if before in self.graph.preds[at.begin][1:]:
            self.graph.preds[at.begin].remove(before)
    MEET(self, queue, come, standing)


def counts_as_well(self: GraphBuilder, at: Any, write: bool) -> bool:
    op = at.item.collective
    return (op is not None and op.sent is not None) or HAS_PART(self, at, write)


PLANTED: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "everyone contributes and needs": (GraphBuilder, "_has_part", always),
    "nobody contributes": (GraphBuilder, "_has_part", never),
    "counts are never 0": (GraphBuilder, "_has_part", counts_as_well),
    "no slot comes back": (GraphBuilder, "_await_frees", nothing),
    "messages order nothing": (GraphBuilder, "_deliver", nothing),
    "collectives do not queue": (GraphBuilder, "_meet", not_in_turn),
    "nothing blocks": (HappensBefore, "awaited", without_blocks),
    "the host does not wait": (_RunBuilder, "order", host_goes_on),
    "an event stays where it was first": (_Lowering, "bind", first_record),
    "the last notify counts": (Meetings, "first_raise", last_raise),
    "boxes meet as hulls do": (Sweep, "_meet", by_hull),
    "as_strided is what it is": (Regions, "_resolve", as_it_is),
    "what others write is no loss": (Content, "lose", nothing),
    "what is written is written": (Content, "holds", always),
    "any write covers": (Cell, "covers", always),
    "all do what the root does": (Item, "does", always),
}
"""Faults by the wrong rule that the checker then follows: the place, and its replacement."""


@contextlib.contextmanager
def planted(name: str) -> Iterator[None]:
    """Within it, the checker has the fault."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*PLANTED[name])
        yield


def path_of(name: str) -> Path:
    return FOLDER / f"{name.replace(' ', '_')}.ilc"


def search(name: str, first_seed: int, seeds: int = 80) -> str:
    """The text of the smallest of the sets that show it, of the first seed by which any does."""
    with planted(name), pytest.MonkeyPatch.context() as patch:
        patch.setattr(campaigns, "SLOWEST", 3)
        for seed in range(first_seed, first_seed + seeds):
            share = 1.0 if "counts" in name else campaigns.COUNTED
            done = campaigns.run(campaigns.Plan(250, seed, counts=share))
            if done.found:
                best = min(done.found, key=lambda one: one.num_ops)
                print(f"{name}: {done.counts.total()} by seed {seed}, {best.num_ops} ops")
                return f"# planted: {name}\n{best.text}"
    return ""


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for fault in sys.argv[2:] or PLANTED:
        if text := search(fault, int(sys.argv[1])):
            path_of(fault).write_text(text)
        else:
            print("not found:", fault)
