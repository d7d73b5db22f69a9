"""The ops: one frozen dataclass for each effect, with what it reads and what it writes.

`reads()` and `writes()` give `Access`es, from the fields whose metadata says so; an access with a
`peer` touches that rank's copy of a symmetric buffer. `ordering()` says what the op waits for,
raises, meets and takes. The verifier, the memory planner, the simulator and the trace know an op by
these and its stream, so a new op needs nothing from them.

    >>> op = Get(src=View("full").chunk(RankIndex("tp", 1), 4), peer=RankIndex("tp", 1), team="tp")
    >>> [access.peer for access in op.reads()], [access.peer for access in op.writes()]
    ([RankIndex(team='tp', offset=1)], [None])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache, wraps
from typing import ClassVar, Literal, TypeVar

from interlace.ir.operators import NOTHING, Facts, facts_of
from interlace.ir.sizes import Size
from interlace.ir.types import COMMON, NAME, TEAM, Buffer, DType, Index, Others, Written, written
from interlace.ir.view import View

RNG = View("rng")
"""The implicit buffer that ops read and write when they draw random numbers."""


@dataclass(frozen=True, slots=True)
class Loc:
    """Where an op comes from: source file, line and module path; any may be empty."""

    module: str = ""
    file: str = ""
    line: int = 0
    text: tuple[str, int] | None = field(default=None, compare=False)
    """File and line of the schedule's text that the op was parsed from, if it was."""

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.file else ""
        return f"{self.module} ({place})" if self.module and place else self.module or place


@dataclass(frozen=True, slots=True)
class Name:
    """A value of a region's body, where it stands as an argument."""

    name: str


Scalar = int | float | bool | str | complex | None
Arg = View | Name | DType | Scalar | Size | tuple["Arg", ...]


@dataclass(frozen=True, slots=True)
class Access:
    """A view that an op reads or writes, in this rank's memory or in a peer's."""

    view: View
    peer: Index | None = None
    team: str | None = None
    contents: bool = True
    """Bytes are read or written: not only a shape taken, or memory given unwritten."""


@dataclass(frozen=True, slots=True)
class SignalLevel:
    """State of a signal: `signal` between this rank and `peer` of `team` is at `value` or above."""

    signal: str
    team: str
    peer: Index | Others
    value: int


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """One end of a message between this rank and `peer` of `team`."""

    team: str
    peer: Index
    sends: bool
    backend: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordering:
    """Constraints of an op on the order of others; semantics.md states what follows from them."""

    records: str | None = None
    """An event that stands at this op from here on."""
    waits: str | None = None
    """An event: what recorded it last comes before this op."""
    raises: SignalLevel | None = None
    expects: SignalLevel | None = None
    meets: tuple[str, str | None] | None = None
    """Team and backend of a collective: the k-th of each rank belong together."""
    messages: tuple[MessageEnd, ...] = ()
    """They begin and end together."""
    takes: Buffer | None = None
    frees: str | None = None
    holds_host: bool = False
    """The host issues nothing before this op is done."""

    @property
    def meets_peers(self) -> bool:
        """True if ranks wait for one another here: in a collective, a message or a signal."""
        return bool(self.meets or self.messages or self.raises or self.expects)


UNORDERED = Ordering()
"""The ordering of most ops: they follow their stream, and nothing else."""


class _Answers:
    """Place for what an op has answered: a pass asks each of thousands of ops again and again."""

    __slots__ = ("_ordering", "_reads", "_writes")


Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


def once(method: Callable[[Asked], Answer]) -> Callable[[Asked], Answer]:
    """The method, which works its answer out once for each object: one that has a place for it."""
    place = f"_{method.__name__}"

    @wraps(method)
    def answer(op: Asked) -> Answer:
        try:
            return getattr(op, place)
        except AttributeError:
            found = method(op)
            object.__setattr__(op, place, found)
            return found

    return answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Op(_Answers):
    """Base of all ops: the stream it runs on, the site it serves and where it comes from."""

    one_sided: ClassVar[bool] = False
    """It moves bytes between ranks by itself, while the peer does something else."""
    stream: str = field(default="main", metadata=COMMON)
    site: int | None = field(default=None, metadata=COMMON)
    loc: Loc = field(default=Loc(), compare=False, metadata=COMMON)

    @once
    def reads(self) -> tuple[Access, ...]:
        """The views that the op reads: its fields of that role, and what its members read."""
        return _accesses(self, "read")

    @once
    def writes(self) -> tuple[Access, ...]:
        """The views that the op writes."""
        return _accesses(self, "write")

    def declares(self) -> tuple[Buffer, ...]:
        """The buffers that are known from here on."""
        return ()

    def ordering(self) -> Ordering:
        """The constraints of the op on the order of others."""
        return UNORDERED

    @property
    def members(self) -> tuple[Op, ...]:
        """The ops that it holds."""
        return ()

    @property
    def steps(self) -> tuple[Op, ...]:
        """The ops that run one after another: the members of a Fused, else the op itself."""
        return (self,)

    @property
    def transfers(self) -> tuple[Op, ...]:
        """The ops that begin and end together: the messages of a Group, else the op itself."""
        return (self,)


def _accesses(op: Op, how: Literal["read", "write"]) -> tuple[Access, ...]:
    """The accesses of an op's own fields, then those of its members."""
    own, of_peers = _fields_of_access(type(op), how)
    found = [Access(view) for view in map(op.__getattribute__, own) if view is not None]
    for name in of_peers:
        peer, team = op.__getattribute__("peer"), op.__getattribute__("team")
        found.append(Access(op.__getattribute__(name), peer, team))
    for member in op.members:
        found += member.reads() if how == "read" else member.writes()
    return tuple(found)


@cache
def _fields_of_access(kind: type[Op], how: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The fields of such an access: views of the rank's own memory, and of a peer's."""
    written = [(each.name, each.metadata.get("written", Written())) for each in fields(kind)]
    found = [(name, row.of_peer) for name, row in written if row.access == how]
    own, of_peers = ([name for name, remote in found if remote is which] for which in (False, True))
    return tuple(own), tuple(of_peers)


def views_in(arg: Arg) -> tuple[View, ...]:
    """The views in an argument, however deep."""
    if isinstance(arg, View):
        return (arg,)
    if isinstance(arg, tuple):
        return tuple([view for item in arg for view in views_in(item)])
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Op):
    """Compute: `fn` (an aten overload, a kernel or a region of the Program), `args` into `outs`.

    With `fresh` the call makes its own outputs: it declares these buffers and binds them to what it
    returns (they do not stand in `outs`); else `outs` are preallocated views that it fills.
    What the operator writes in place, draws and leaves unwritten is in the table of operators;
    `mutates` (with those arguments in `outs`) and `rng` add to it, for operators it does not know.
    """

    fn: str
    args: tuple[Arg, ...] = field(default=(), metadata=written(rest=True))
    kwargs: tuple[tuple[str, Arg], ...] = field(default=(), metadata=written("keywords"))
    outs: tuple[View, ...] = field(default=(), metadata=written("outs", always=True, keyword="out"))
    fresh: tuple[Buffer, ...] = field(default=(), metadata=written("fresh", keyword="out"))
    mutates: bool = False
    rng: bool = False

    def views(self) -> tuple[View, ...]:
        """The views among the arguments, in order."""
        found = views_in(self.args)
        return found + views_in(tuple([arg for _, arg in self.kwargs])) if self.kwargs else found

    @property
    def facts(self) -> Facts:
        """Facts about its operator; `NOTHING` if the table of operators lacks it."""
        return facts_of(self.fn) or NOTHING

    @property
    def draws(self) -> bool:
        """True if it draws random numbers."""
        return self.rng or self.facts.drawn(self.args, self.kwargs)

    @property
    def written(self) -> tuple[View, ...]:
        """The arguments that it writes in place."""
        found = views_in(tuple(self.facts.written(self.args, self.kwargs)))
        return (*found, *self.outs) if self.mutates else found

    @once
    def reads(self) -> tuple[Access, ...]:
        facts, found = self.facts, tuple(map(Access, self.views()))
        if facts.shape_only:
            first = views_in(self.args[:1])
            found = (*(Access(view, contents=False) for view in first), *found[len(first) :])
        return (*found, Access(RNG)) if self.rng or (facts.draws and self.draws) else found

    @once
    def writes(self) -> tuple[Access, ...]:
        facts = self.facts
        made = (*self.outs, *[View(buffer.name) for buffer in self.fresh])
        views = dict.fromkeys(made, not facts.unwritten)
        if facts.writes or self.mutates:
            views |= dict.fromkeys(self.written, True)
        found = tuple([Access(view, contents=there) for view, there in views.items()])
        return (*found, Access(RNG)) if self.rng or (facts.draws and self.draws) else found

    def declares(self) -> tuple[Buffer, ...]:
        return self.fresh


READ, WRITE = written(access="read"), written(access="write")
"""A view in this rank's memory."""
PEER = written(named=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy(Op):
    """`src` into `dst`, converting the element type if they differ."""

    src: View = field(metadata=READ)
    dst: View = field(metadata=WRITE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Alloc(Op):
    """Declares a buffer and gives it storage.

    For a symmetric buffer this takes a slot of the team's pool: `stream` waits until every peer has
    released the slot's previous use. Other kinds take effect when the op is issued.
    """

    buffer: Buffer = field(metadata=written("declaration"))

    def declares(self) -> tuple[Buffer, ...]:
        return (self.buffer,)

    @once
    def ordering(self) -> Ordering:
        return Ordering(takes=self.buffer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Free(Op):
    """Gives a buffer's storage back once `stream` gets here; a symmetric one tells every peer.

    An input's storage is the caller's: its Free says that the Executor holds it no longer.
    """

    buffer: str = field(metadata=NAME)

    @once
    def ordering(self) -> Ordering:
        return Ordering(frees=self.buffer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record(Op):
    """The event now stands at this point of the stream."""

    event: str = field(metadata=NAME)

    @once
    def ordering(self) -> Ordering:
        return Ordering(records=self.event)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait(Op):
    """The stream waits for the point where the event was last recorded before this op is issued."""

    event: str = field(metadata=NAME)

    @once
    def ordering(self) -> Ordering:
        return Ordering(waits=self.event)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSync(Op):
    """The host waits for the stream before it issues anything more."""

    @once
    def ordering(self) -> Ordering:
        return Ordering(holds_host=True)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective(Op):
    """All ranks of `team` take part, each from when its stream gets here until it has what it gets.

    A rank's end comes after the begin of every rank whose contribution it needs, and says nothing
    of what other ranks have (semantics.md).

    `src` and `dst` are contiguous boxes split along dimension 0: into even parts, or by the table
    `splits`. A broadcast writes `dst` on every rank and reads `src` on the root alone. Some kinds
    work in place. What a kind does not read (`src`) or write (`dst`) on this rank may be None.

    The parts of an `all_to_all` may be data: `sent` and `received` hold, as one i64 for each rank,
    the rows that go there and come from there. They follow one another from row 0; further rows of
    `src` are not sent, and those of `dst` become zero.
    """

    kind: str = field(metadata=written(words=KINDS))
    src: View | None = field(default=None, metadata=written(positional=True, access="read"))
    dst: View | None = field(default=None, metadata=written(positional=True, access="write"))
    reduce: str | None = None
    root: Index | None = None
    splits: str | None = field(default=None, metadata=written("table"))
    sent: View | None = field(default=None, metadata=written(access="read"))
    received: View | None = field(default=None, metadata=written(access="read"))
    team: str = field(metadata=TEAM)
    backend: str | None = None

    @once
    def ordering(self) -> Ordering:
        return Ordering(meets=(self.team, self.backend))


@dataclass(frozen=True, slots=True, kw_only=True)
class Send(Op):
    """`src` to rank `peer` of `team`, matched in order with that rank's Recv.

    It may be buffered, and it may wait for the Recv: nothing may lean on the one or the other.
    """

    src: View = field(metadata=READ)
    peer: Index = field(metadata=PEER)
    team: str = field(metadata=TEAM)
    backend: str | None = None

    @once
    def ordering(self) -> Ordering:
        return Ordering(messages=(MessageEnd(self.team, self.peer, True, self.backend),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recv(Op):
    """Into `dst` from rank `peer` of `team`, after that rank's Send has begun."""

    dst: View = field(metadata=WRITE)
    peer: Index = field(metadata=PEER)
    team: str = field(metadata=TEAM)
    backend: str | None = None

    @once
    def ordering(self) -> Ordering:
        return Ordering(messages=(MessageEnd(self.team, self.peer, False, self.backend),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group(Op):
    """Sends and receives that begin together, none blocking another, and end with the last."""

    ops: tuple[Send | Recv, ...] = field(
        metadata=written("member", rest=True, holds=Send | Recv, holding="sends and receives")
    )

    @property
    def members(self) -> tuple[Send | Recv, ...]:
        return self.ops

    @property
    def transfers(self) -> tuple[Send | Recv, ...]:
        return self.ops

    @once
    def ordering(self) -> Ordering:
        return Ordering(messages=tuple(end for op in self.ops for end in op.ordering().messages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Put(Op):
    """`src` of this rank into `dst` of rank `peer`, of a symmetric buffer."""

    one_sided: ClassVar[bool] = True
    src: View = field(metadata=READ)
    dst: View = field(metadata=written(access="write", of_peer=True))
    peer: Index = field(metadata=PEER)
    team: str = field(metadata=TEAM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Get(Op):
    """`src` of rank `peer`, of a symmetric buffer, into `dst` here, or `src`."""

    one_sided: ClassVar[bool] = True
    src: View = field(metadata=written(access="read", of_peer=True))
    dst: View | None = field(default=None, metadata=written(positional=True))
    peer: Index
    team: str = field(metadata=TEAM)

    @property
    def target(self) -> View:
        """Where the bytes go on this rank."""
        return self.dst if self.dst is not None else self.src

    @once
    def writes(self) -> tuple[Access, ...]:
        return (Access(self.target),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Notify(Op):
    """Raises `signal` on `peer` to `value`, counted from the start of the run.

    A signal belongs to (name, team, writer, reader): one writer, and its values only grow.
    Everything before a Notify in its stream, here and in a peer's memory, happens before the Expect
    it satisfies.
    """

    signal: str = field(metadata=NAME)
    peer: Index | Others = field(metadata=written(named=True, keyword="to"))
    team: str = field(metadata=TEAM)
    value: int = 1

    @once
    def ordering(self) -> Ordering:
        return Ordering(raises=SignalLevel(self.signal, self.team, self.peer, self.value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Expect(Op):
    """The stream waits until `signal`, raised by `peer`, has reached `value`."""

    signal: str = field(metadata=NAME)
    peer: Index | Others
    team: str = field(metadata=TEAM)
    value: int = 1

    @once
    def ordering(self) -> Ordering:
        return Ordering(expects=SignalLevel(self.signal, self.team, self.peer, self.value))


FusedMember = Call | Wait | Expect | Record | Notify
"""Ops that may stand in a part of a Fused; its Calls fill preallocated views."""
_PART = "calls, waits, expects, records and notifies"


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedKernel:
    """The kernel that does the parts of a Fused op at once.

    `gather_matmul` multiplies the rank's own rows, then those of rank + 1, rank + 2, ..., each in
    `pieces` ranges, as they arrive: in bf16, in f16, or in FP8 (packed rows, a multiple of 128 with
    one scale a range). Each range awaits a value of one signal, 1 more than the range before it.
    `scatter_matmul` multiplies the rows of rank + 1, rank + 2, ... in `pieces` ranges each, and
    last the rank's own rows, in `own` ranges: in one; in `pieces` as well; or in one more, where
    the last piece is made in halves. Or (`own` = 0) it goes range by range, the same range of every
    rank before the next.
    """

    kind: str = field(metadata=written(words=("gather_matmul", "scatter_matmul")))
    pieces: int = 1
    own: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Fused(Op):
    """Several parts of a computation, done by one `kernel` where the op names one.

    Without a kernel, and on devices that have none, members run one after another. A kernel's parts
    must be what it does: `interlace.ir.kernels`.

    A part holds calls, waits, expects, records and notifies; a copy is a call (`aten.clone.out`).
    The parts start when the stream gets here, and the op ends when all of them ended. Inside a part
    the members go in order; parts are not ordered, but are begun in the order listed, so that one
    may only wait for what no later one has to do first. A Record stands at its place in its part.
    """

    parts: tuple[tuple[FusedMember, ...], ...] = field(
        metadata=written("part", rest=True, holds=FusedMember, holding=_PART)
    )
    kernel: FusedKernel | None = field(default=None, metadata=written("kernel"))

    @property
    def members(self) -> tuple[FusedMember, ...]:
        """The members of all parts, one after another."""
        return tuple(member for part in self.parts for member in part)

    @property
    def steps(self) -> tuple[FusedMember, ...]:
        return self.members


def kinds_of_op() -> list[type[Op]]:
    """Every class of ops; of the two that `slots` makes of each, the one that has them."""
    return list({kind.__name__: kind for kind in Op.__subclasses__()}.values())
