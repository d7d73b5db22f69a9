"""Records of one rank: its process groups, and an Entry for each op that it issued.

The names are those of torch's flight recorder. An Entry keeps what its peers must agree on, what
its rank waited for, and what a person needs to find it: the record number and the source line.

>>> entry.text
'all_reduce [4, 3] Float, number 41 of group 0 (default_pg)'
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from interlace.ir.ops import Loc

LABELS = {
    **dict.fromkeys(("_all_gather_base", "all_gather_single", "all_gather"), "all_gather"),
    "all_gather_into_tensor": "all_gather",
    **dict.fromkeys(("_reduce_scatter_base", "reduce_scatter_single"), "reduce_scatter"),
    "reduce_scatter_tensor": "reduce_scatter",
    "_broadcast_oop": "broadcast",
    "_reduce_oop": "reduce",
    **dict.fromkeys(("all_to_all_single", "alltoall", "alltoall_base"), "all_to_all"),
    **dict.fromkeys(("all_to_all_v_single", "all_to_allv"), "all_to_all"),
}
"""Recorded names that are one and the same call for the library beneath, by another spelling."""
INPUTS = ("all_gather", "all_reduce", "gather", "reduce", "allreduce_coalesced", "send")
"""Labels whose members must have inputs of one size."""
INPUTS += ("all_gather_into_tensor_coalesced",)
OUTPUTS = ("reduce_scatter", "broadcast", "scatter", "recv", "reduce_scatter_tensor_coalesced")
"""Labels whose members must have outputs of one size."""
NOWHERE = Loc()
SHOWN = 120
"""Characters that a message shows of a name or a list from a dump."""


class GroupKey(NamedTuple):
    """A process group: groups that were split apart may share a name, and not their ranks."""

    name: str
    desc: str
    ranks: tuple[int, ...] | None
    """Global ranks, in the group's order; None where the dump does not say."""

    def __str__(self) -> str:
        said = self.desc not in ("", "undefined")
        return shown(self.name) + (f" ({shown(self.desc)})" if said else "")


class EntryContent(NamedTuple):
    """Properties of an op that its peers must agree on."""

    label: str
    elements: int | None
    """None where sizes may differ between the ranks, or were not recorded."""
    dtype: str


@dataclass(slots=True)
class Entry:
    """One record of one rank."""

    rank: int
    record: int
    group: GroupKey
    seq: int
    """Its number among the collectives of the group, or among the messages of the rank there."""
    name: str
    """As recorded, without the backend and the ranks."""
    content: EntryContent
    sizes: tuple[tuple[int, ...], ...]
    """Sizes of the inputs; of the outputs where the peers must agree on these."""
    state: str
    ended: bool
    """Recorded as ended."""
    retired: bool = False
    """The library's own watchdog has seen that it ended, or that its time was over. An op that the
    host is still about to launch is recorded as completed, and not as retired."""
    loc: Loc = NOWHERE
    """The source line that issued it, where the dump holds stacks."""
    peer: int | None = None
    """The other rank of a message, counted globally."""
    backend: str | None = None
    """`gloo`; None for those that run on GPUs in the order in which they are launched."""
    moved: tuple[int, int] | None = None
    """Elements that an all-to-all sends and receives: over all ranks, the sums must be equal."""
    batch: int | None = None
    """The record of the marker that ends the coalesced calls that it belongs to."""

    @property
    def is_message(self) -> bool:
        return self.peer is not None

    @property
    def is_send(self) -> bool:
        return self.content.label == "send"

    @property
    def may_wait(self) -> bool:
        """True if its rank may wait in it. (gloo records nothing as completed.)"""
        return self.state != "completed" or not self.retired

    @property
    def text(self) -> str:
        """The op in the run's words."""
        sizes = shown(", ".join(str(list(one)) for one in self.sizes))
        words = [word for word in (shown(self.name), sizes, self.content.dtype) if word]
        if self.peer is None:
            return f"{' '.join(words)}, number {self.seq} of group {self.group}"
        way = "to" if self.is_send else "from"
        return f"{' '.join(words)} {way} rank {self.peer}, message {self.seq} of group {self.group}"


class IssuedCall(NamedTuple):
    """Ops that a rank issued at one number of a group: one, or several that were coalesced."""

    entries: tuple[Entry, ...]

    @property
    def first(self) -> Entry:
        return self.entries[0]

    @property
    def contents(self) -> tuple[EntryContent, ...]:
        return tuple(entry.content for entry in self.entries)

    @property
    def ended(self) -> bool:
        return all(entry.ended for entry in self.entries)

    @property
    def text(self) -> str:
        more = len(self.entries) - 1
        return self.first.text + (f" (and {more} more, coalesced with it)" if more else "")


class CoalescedEntries:
    """The entries of a rank in order, in which coalesced ones know the marker that ends them.

    The recorder follows the marker alone, so its members have its state. A marker whose members
    were not recorded stands for them.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._open: dict[tuple[str, bool], list[Entry]] = {}
        """The collectives, and the messages, of the latest number of each group."""
        self._last: dict[str, bool] = {}
        """True for each group whose last entry is a message."""

    def add(self, entry: Entry) -> None:
        """The next entry; no marker."""
        p2p = entry.is_message
        members = self._open.setdefault((entry.group.name, p2p), [])
        if members and members[0].seq != entry.seq:
            members.clear()
        members.append(entry)
        self._last[entry.group.name] = p2p
        self.entries.append(entry)

    def end(self, marker: Entry, p2p_seq: int, begins: bool) -> None:
        """A marker, whose `seq` is that of the collectives: recorders write it as a collective
        even where it ends messages alone, and then with the number of the collective before.

        Where a dump does not begin with the first record, it may begin within a batch. What is left
        of that is no call: its peers issued more.
        """
        name = marker.group.name
        p2p = self._last.get(name, False)
        calls, messages = (self._open.get((name, kind), []) for kind in (False, True))
        calls = [one for one in calls if one.seq == marker.seq]
        messages = [one for one in messages if p2p and one.seq == p2p_seq]
        if messages:  # a collective before them, unless its state shows that it is one of them
            calls = [one for one in calls if one.state == "scheduled"]
        for member in (*calls, *messages):
            member.batch = marker.record
            member.state, member.ended = marker.state, marker.ended
            member.retired = marker.retired
        if not calls and not messages and (begins or name in self._last):
            self.add(marker)
        if calls and not begins and marker.ended and self.entries[0] is calls[0]:
            left_over = set(map(id, calls))
            self.entries = [one for one in self.entries if id(one) not in left_over]
        self._open[name, False], self._open[name, True] = [], []


def is_marker(name: str) -> bool:
    """Returns True if a record ends coalesced calls and is no call itself."""
    return name == "coalesced" or (name.endswith("_coalesced") and name[0].isupper())


@dataclass(frozen=True)
class Dump:
    """Dump of one rank: its records, and where its host was."""

    rank: int
    file: str
    entries: tuple[Entry, ...]
    groups: tuple[GroupKey, ...]
    begins: bool
    """True if the first record is the first op of the run: nothing is missing before it."""
    gaps: bool
    """True if records are missing in between: the dump was asked for active ops alone."""
    host: Loc = NOWHERE
    """Where the rank's main thread was, if the dump says so."""

    @cached_property
    def last(self) -> Entry | None:
        """Last op that the rank issued."""
        return self.entries[-1] if self.entries else None


def elements(sizes: tuple[tuple[int, ...], ...]) -> int | None:
    """Elements of all tensors of a call; None where none were recorded."""
    return sum(map(math.prod, sizes)) if sizes else None


def shown(text: str) -> str:
    """A text of a dump, at a length that a message can bear."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Ranks in words, with runs of them as `0 to 7`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    said = [str(a) if a == b else f"{a} and {b}" if b == a + 1 else f"{a} to {b}" for a, b in runs]
    if len(said) > 12:
        said = [*said[:12], "..."]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(said)}"
