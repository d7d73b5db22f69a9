"""The form in which Programs are checked: items, the buffers they touch, and flaws of list order.

source.items[3].touches        # what the op on line 4 reads and writes
source.versions[0].symmetric   # a buffer, from its declaration on
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from interlace.ir.ops import UNORDERED, Collective, Fused, Op, Ordering
from interlace.ir.program import Program
from interlace.ir.types import Buffer, Index, Where
from interlace.verify.accesses.regions import Spot


class Touch(NamedTuple):
    """A read or a write of a view, in this rank's memory or in a peer's."""

    write: bool
    version: int
    spot: Spot
    peer: Index | None
    team: str | None
    root_only: bool
    """Whether only the root of the collective does it."""


@dataclass(slots=True, eq=False)
class Item:
    """An op of a Program; the members of a Group or a Fused are items too, with its index."""

    index: int
    op: Op | None
    """None: the begin of the run (whose index is -1), or the return."""
    stream: int
    """Part k > 0 of a Fused counts as a stream of its own."""
    touches: tuple[Touch, ...] = ()
    version: int = -1
    """The buffer that an Alloc or a Free means."""
    record: int = -1
    """The place of the Record that a Wait sees."""
    members: tuple[Item, ...] = ()
    turn: int = -1
    """When it is issued: of two ops of a stream, the one with the lower turn goes first."""
    place: int = -1
    """Where a frame keeps its node: the index, or for a member of a Fused a number after all."""
    ordering: Ordering = field(init=False)

    def __post_init__(self) -> None:
        self.ordering = UNORDERED if self.op is None else self.op.ordering()

    @property
    def begins_run(self) -> bool:
        """Whether this is no op, but the begin of the run."""
        return self.op is None and self.index < 0

    @property
    def ends_run(self) -> bool:
        """Whether this is no op, but the return."""
        return self.op is None and self.index >= 0

    @property
    def is_group(self) -> bool:
        """Whether its members begin and end together."""
        return bool(self.members and self.ordering.messages)

    @property
    def is_fused(self) -> bool:
        """Whether its members are the parts of a kernel."""
        return isinstance(self.op, Fused)

    def does(self, touch: Touch, where: Where) -> bool:
        """Whether a rank does what a touch of this op says: some only the root does."""
        return not touch.root_only or self.is_root(where)

    def is_root(self, where: Where) -> bool:
        """Whether the rank is the root of this collective."""
        op = self.op
        assert isinstance(op, Collective)
        return op.root is not None and where.index(op.root) == where.member(op.team).index


@dataclass(slots=True, eq=False)
class Version:
    """A buffer from its declaration on: what a name means between an Alloc and the next."""

    buffer: Buffer
    spot: Spot
    """The whole of it."""
    alloc: int = -1
    """The index of the op that declares it; -1 for a parameter."""
    free: int = -1
    shared: bool = False
    """Whether other buffers share its storage."""

    @property
    def symmetric(self) -> bool:
        """Whether peers can reach it."""
        return self.buffer.kind == "symmetric"

    @property
    def registered(self) -> bool:
        """Whether it is memory of the caller's that peers can reach."""
        return self.buffer.registered

    @property
    def storage(self) -> str:
        """The name of its bytes: a slot, an arena storage, or its own."""
        return self.buffer.storage or self.buffer.name


class Flaw(NamedTuple):
    """A fault that list order alone shows, so it is the same on every rank."""

    kind: str
    message: str
    ops: tuple[tuple[Item, str, str], ...]
    """Item, role and buffer of each op."""
    fix: tuple[str | int, ...]
    """Text, and numbers of ops whose line stands there."""


@dataclass(slots=True, eq=False)
class Source:
    """One Program, ready to be placed on its ranks."""

    program: Program
    ranks: tuple[int, ...]
    streams: tuple[str, ...]
    items: list[Item]
    exit: Item
    versions: list[Version]
    flaws: list[Flaw] = field(default_factory=list[Flaw])
    sequence: list[Item] = field(default_factory=list[Item])
    """The items in the order of issue; checked in order, with members of Fuseds on their own."""
    num_places: int = 0
    """Items, the return, the members of Fuseds, and the begin."""
    enter: Item | None = None
    """The begin of the run, where parameters are registered: what their callers do before it."""
