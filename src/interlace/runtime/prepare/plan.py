"""Static facts of one rank's Program, found before anything is allocated.

Which Record a Wait means, which ops follow a HostSync, the number of each collective and message,
and what the rank needs of its teams: found once, in list order, by every kind of executor alike.

    plan = Plan(program, program.instantiate(rank), backend_of)
    plan.waits[7, 0]         # the spot of the Record that op 7 waits for

Note [Whose memory]
    A tensor's memory goes back at once to the stream that it was allocated on, whose next ops may
    be given it. Another stream that still reads it must be made known to the allocator. Allocs are
    made before a run, on the caller's stream; what a Call gives is made on the Call's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from interlace import ir
from interlace.comm import Contacts, Demand, Spec, staged_nbytes
from interlace.errors import ProgramError, UnsupportedError
from interlace.ir.lifetimes import released_after
from interlace.ir.ops import MessageEnd
from interlace.ir.sizes import greatest, number, numbers
from interlace.runtime.values import DTYPES, nbytes

Transfer = ir.Collective | ir.Send | ir.Recv
BackendOf = Callable[[str, str | None], str]
"""The backend that an op of a team uses, given the one that the op asks for."""


@dataclass(frozen=True, slots=True)
class QueuePlace:
    """A collective's place in its team's queue: its backend, and its number from 1 in the run."""

    team: str
    backend: str
    number: int


@dataclass(frozen=True, slots=True)
class Message:
    """A Send to (or a Recv from) a member of the team: the `nth` of the pair in this direction."""

    backend: str
    """Empty for a message to itself, for which gloo has no connection."""
    member: int
    nth: int


def message_backend(name: str) -> str:
    """The backend of messages, given that of collectives: NCCL's own, else gloo."""
    return name if name == "nccl" else "gloo"


class Plan:
    """The static facts of one rank's Program, by the index of its ops. What is set aside for a run
    is as much as any sizes of its class need."""

    def __init__(self, source: ir.Program, program: ir.Program, backend_of: BackendOf) -> None:
        """`program` was instantiated from `source` for its rank."""
        assert program.rank is not None
        self.program, self.rank = program, program.rank
        self.buffers: Mapping[str, ir.Buffer] = program.buffers()
        self.where = program.where(self.rank)
        self.box = program.boxes(self.rank)
        self.alike = source.rank is None
        """True if all ranks have this list; False if each has its own."""
        self.waits = ir.bindings(program.ops)
        self.syncs: dict[int, tuple[int, ...]] = {}
        """The HostSyncs that an op of another stream has to wait for."""
        self.specs: dict[int, Spec] = {}
        self.turns: dict[int, QueuePlace] = {}
        self.messages: dict[tuple[int, int], Message] = {}
        """Messages by op and by member of a Group (0 outside of one)."""
        self.takes: dict[str, str] = {}
        """The symmetric buffers in the order in which they take their slots, with their teams."""
        self.slots: dict[str, dict[str, int]] = {}
        """Bytes of each slot, by team."""
        self._merging = merging(source)
        self._host_syncs: list[tuple[int, str]] = []
        self._seen: dict[str, int] = {}
        self._numbers: dict[tuple[str, str], int] = {}
        self._signals: dict[str, dict[str, None]] = {}
        self._sends: dict[str, list[Message]] = {}
        self._recvs: dict[str, list[Message]] = {}
        self._stages: dict[str, int] = {}
        for index, op in enumerate(program.ops):
            self._add(index, op, backend_of)
        collectives = program.collectives()
        for index, op in enumerate(program.ops):
            if op.ordering().meets is not None and index not in collectives:
                raise UnsupportedError(
                    f"op {index} ({type(op).__name__}) meets peers, and nothing says how: add "
                    "a case to the plan and to the devices' binders"
                )
        for index, op in collectives.items():
            self._collective(index, op, backend_of(op.team, op.backend))
        self.known_counts = self._known_counts()
        """Exchanges whose counts an earlier one has read, by index, with the index of that."""
        for spot, op in ir.spots(program.ops):
            event = op.ordering().waits
            if event is not None and spot not in self.waits:
                raise ProgramError(f"op {spot[0]} waits for event {event!r}, never recorded")
        self.demands: Mapping[str, Demand] = {
            team.name: Demand(
                tuple(self._signals.get(team.name, ())), self._stages.get(team.name, 0)
            )
            for team in program.teams
            if team.name in self.where.members
        }

    def members(self, team: str, peer: ir.Index | ir.Others) -> tuple[int, ...]:
        member = self.where.member(team)
        if isinstance(peer, ir.Others):
            return tuple(i for i in range(len(member.ranks)) if i != member.index)
        return (self.where.index(peer),)

    def shares(self, team: str) -> str:
        """Which memory this rank has to share with its peers on the team, if any."""
        if team in self.takes.values():
            return "has symmetric buffers"
        if self.demands[team].signals:
            return "has signals"
        if any(turn.team == team and turn.backend == "peer" for turn in self.turns.values()):
            return "has collectives of the backend 'peer'"
        return ""

    def contacts(self, team: str) -> Contacts:
        """Whom this rank meets on a team by a backend of torch."""
        ends = (
            tuple(dict.fromkeys(m.member for m in listed.get(team, ()) if m.backend))
            for listed in (self._recvs, self._sends)
        )
        turns = self.turns.values()
        gathers = any(turn.team == team and turn.backend != "peer" for turn in turns)
        return Contacts(gathers, *ends)

    def slot_of(self, buffer: str) -> str:
        return self.buffers[buffer].storage or buffer

    def _add(self, index: int, op: ir.Op, backend_of: BackendOf) -> None:
        order = op.ordering()
        self._sync(index, op.stream, order.holds_host)
        for member in op.steps:
            if (expects := member.ordering().expects) is not None:
                self._signals.setdefault(expects.team, {})[expects.signal] = None
        if order.takes is not None and order.takes.team is not None:
            self._take(order.takes, order.takes.team)
        for part, end in enumerate(order.messages):
            self._message(index, part, end, backend_of(end.team, end.backend))

    def _sync(self, index: int, stream: str, holds_host: bool) -> None:
        """The HostSyncs of other streams that this op is the first of its stream after."""
        seen = self._seen.get(stream, 0)
        due = [at for at, other in self._host_syncs[seen:] if other != stream]
        if due:
            self.syncs[index] = tuple(due)
        if holds_host:
            self._host_syncs.append((index, stream))
        self._seen[stream] = len(self._host_syncs)

    def _take(self, buffer: ir.Buffer, team: str) -> None:
        if buffer.name in self.takes:
            raise ProgramError(
                f"the symmetric buffer {buffer.name!r} is allocated twice: give the second "
                "one a name of its own (and the same storage, to share the slot)"
            )
        self.takes[buffer.name] = team
        sizes = self.slots.setdefault(team, {})
        slot, size = buffer.storage or buffer.name, buffer.offset + nbytes(buffer)
        sizes[slot] = max(sizes.get(slot, 0), size)

    def _collective(self, index: int, op: ir.Collective, backend: str) -> None:
        number = self._numbers.get((op.team, backend), 0) + 1
        self._numbers[op.team, backend] = number
        self.turns[index] = QueuePlace(op.team, backend, number)
        spec = collective_spec(op, self.where, self.box)
        self.specs[index] = spec = replace(spec, merges=index in self._merging)
        if backend == "peer":
            self._stages[op.team] = max(self._stages.get(op.team, 0), staged_nbytes(largest(spec)))

    def _known_counts(self) -> dict[int, int]:
        """Exchanges of the same counts, the same on all ranks: whole buffers of one list of ops."""
        found, read = dict[int, int](), dict[tuple[str, str, frozenset[ir.View]], int]()
        for index, op in enumerate(self.program.ops):
            sent, received = (
                (op.sent, op.received) if isinstance(op, ir.Collective) else (None, None)
            )
            if sent is not None and received is not None and not (sent.steps or received.steps):
                turn, both = self.turns[index], frozenset((sent, received))
                first = read.setdefault((turn.team, turn.backend, both), index)
                if first != index and turn.backend != "peer":
                    found[index] = first
            names = {access.view.buffer for access in op.writes()}
            for key in [key for key in read if not names.isdisjoint(v.buffer for v in key[2])]:
                del read[key]
        return found if self.alike and not self.slots else {}  # a peer may write in a slot

    def _message(self, index: int, part: int, end: MessageEnd, backend: str) -> None:
        member, backend = self.where.index(end.peer), message_backend(backend)
        if backend == "gloo" and member == self.where.member(end.team).index:
            backend = ""
        mine = (self._sends if end.sends else self._recvs).setdefault(end.team, [])
        mine.append(Message(backend, member, sum(message.member == member for message in mine)))
        self.messages[index, part] = mine[-1]


def with_backends(program: ir.Program, backend_of: BackendOf, teams: Collection[str]) -> ir.Program:
    """The Program as it is to be proved: each backend is a queue. Where ops that leave the backend
    open and ops that name it use the same one, the open ones are given its name."""
    ops, asked = [*program.ops], dict[tuple[str, str], set[str | None]]()
    for index, op in transfers(program, teams):
        if op.ordering().meets is not None:
            name = backend_of(op.team, op.backend)
            ops[index] = replace(op, backend=name)
            asked.setdefault((op.team, name), set()).add(op.backend)
    if all(len(names) == 1 for names in asked.values()):
        return program
    return program.replace(ops=tuple(ops))


def transfers(program: ir.Program, teams: Collection[str]) -> Iterator[tuple[int, Transfer]]:
    """The collectives and messages of these teams, each with the index of its op."""
    for index, op in enumerate(program.ops):
        for item in op.transfers:
            if isinstance(item, Transfer) and item.team in teams:
                yield index, item


def backends_of(
    program: ir.Program, backend_of: BackendOf, teams: Collection[str]
) -> list[list[str]]:
    """For each of the teams, the backends of torch that a Program's ops there need."""
    found: dict[str, set[str]] = {team: set() for team in teams}
    for _, op in transfers(program, teams):
        name = backend_of(op.team, op.backend)
        found[op.team].add(message_backend(name) if op.ordering().messages else name)
    return [sorted(names - {"peer"}) for names in found.values()]


def own_backends(plan: Plan) -> set[str]:
    used = {turn.backend for turn in plan.turns.values()}
    return (used | {message.backend for message in plan.messages.values()}) - {"peer", ""}


def merging(source: ir.Program) -> frozenset[int]:
    """The uneven all-to-alls whose parts are cut on the destination's side; where a rank's own part
    is the mean of all, only the other ranks tell."""
    found: set[int] = set()
    for index, op in source.collectives().items():
        if op.kind != "all_to_all" or op.splits is None:
            continue
        ranks = source.world if source.rank is None else (source.rank,)
        for rank in ranks:
            box, where = source.boxes(rank), source.where(rank)
            if op.team not in where.members or op.src is None or op.dst is None:
                continue
            src, dst = box(op.src).sizes[0], box(op.dst).sizes[0]
            rows = where.table(op.splits).values
            if src != dst and dst == sum(rows):
                found.add(index)
            if src == dst and source.rank is not None and len(set(rows)) > 1:
                raise ProgramError(
                    f"op {index}: rank {rank}'s part of this all_to_all is the mean of {rows}, so "
                    "its own Program does not say which side holds the parts of all ranks: write "
                    "one Program for all ranks"
                )
    return frozenset(found)


def collective_spec(op: ir.Collective, where: ir.Where, box: Callable[[ir.View], ir.Box]) -> Spec:
    """A collective as the transports take it: the elements of each rank's part."""
    member, kind = where.member(op.team), ir.KINDS[op.kind]
    size = len(member.ranks)
    root = where.index(op.root) if op.root is not None else 0
    if op.kind == "barrier":
        return Spec(op.kind, size, member.index, (), DTYPES[ir.DType.u8])
    view = op.dst if op.src is None else op.src  # a counted one has both
    assert view is not None, f"{op.kind} has neither a source nor a destination"
    counted = op.sent is not None
    split = (kind.scales or op.kind == "all_to_all") and not counted
    parts = _parts(op, where, box, size) if split else (number(box(view).numel),)
    dtype = DTYPES[box(view).dtype]
    return Spec(op.kind, size, member.index, parts, dtype, op.reduce, root, counted=counted)


def _parts(
    op: ir.Collective, where: ir.Where, box: Callable[[ir.View], ir.Box], size: int
) -> tuple[int, ...]:
    """Elements of each rank's part, from the side that this rank has."""
    gathers = ir.KINDS[op.kind].scales == "gather"
    whole, part = (op.dst, op.src) if gathers else (op.src, op.dst)
    view = part if whole is None else whole
    assert view is not None
    if op.splits is None:
        return (number(box(view).numel) // (1 if whole is None else size),) * size
    row = math.prod(numbers(box(view).sizes[1:]))
    return tuple(n * row for n in numbers(where.table(op.splits).values))


def largest(spec: Spec) -> Spec:
    """A collective of the most elements for any sizes of the class."""
    return replace(spec, parts=tuple(map(greatest, spec.parts)))


def listed(
    program: ir.Program, one_by_one: bool
) -> Iterator[tuple[int, ir.Op, int | None, Sequence[str]]]:
    """The ops as an engine binds them, with the fresh buffers that are released after each; with
    `one_by_one` (the option `in_order`) their `steps` by number, else None."""
    leaving = released_after(program)
    spots = ir.in_order(program.ops) if one_by_one else [(i, 0) for i in range(len(program.ops))]
    for index, member in spots:
        op = program.ops[index]
        last = not one_by_one or member == len(op.steps) - 1
        yield index, op, member if one_by_one else None, leaving.get(index, ()) if last else ()
