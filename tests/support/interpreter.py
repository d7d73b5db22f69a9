"""The reference semantics of Programs: all ranks of a set, in one process, on torch tensors.

Every step picks one of the ops that may run now, by a seeded generator: over many seeds that is any
legal interleaving of all ranks and streams. Memory is poisoned (NaN) before it is first written and
after it is given back, so that an unordered access shows as NaN; nothing enabled is a `Deadlock`.

    outputs = run_ranks(program, [[x0, w0], [x1, w1]], seed=7)     # outputs[rank][i]
    twin = run_ranks(program, inputs, in_order=True)               # one op after another

An op that meets other ranks (a collective, a message, a group) is two steps of each rank, its begin
and its end. At the begin the rank's source is taken and its destination poisoned; at the end it has
its result, and its source must be unchanged. With a seed that is drawn, ranks wait for no more than
semantics.md promises, else for all they meet. The parts of a Fused go beside each other, a
member at a time.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.support.interpreter_rank import (
    LifetimeFault,
    Memory,
    Part,
    Rank,
    TeamKey,
    poison,
    poison_tensor,
    poisoned,
    same_bytes,
)
from tests.support.torch_ops import collect, compute

from interlace.ir import (
    KINDS,
    Alloc,
    Box,
    Buffer,
    Call,
    Collective,
    Copy,
    DType,
    Expect,
    Free,
    Fused,
    Get,
    Group,
    Index,
    Notify,
    Op,
    Program,
    Put,
    Recv,
    Send,
    View,
    Wait,
)
from interlace.ir.sizes import number, numbers

__all__ = ["Deadlock", "LifetimeFault", "run_ranks"]


class Deadlock(AssertionError):
    """No rank can go on; the message shows where each of them stands."""


@dataclass
class Slot:
    """A symmetric slot: two copies on each member, used in turn, and who gave back which take."""

    copies: dict[tuple[int, int], torch.UntypedStorage]
    freed: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))


class Machine:
    """All ranks, and what they share: slots and signals."""

    def __init__(self, ranks: list[Rank], patient: bool = True) -> None:
        """`patient`: ranks wait for all whom they meet, and not only for whom they need."""
        self.ranks = {rank.rank: rank for rank in ranks}
        self.patient = patient
        self.given: dict[object, torch.Tensor | None] = {}
        """Contribution of each rank to each collective and message that it has begun, by run."""
        self.sent: dict[object, list[int]] = {}
        """The rows that each rank sends to each, where counts are data, by run and collective."""
        self.intact: dict[tuple[int, int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        """Sources of the ops under way, each with its contents at the begin."""
        self.slots: dict[tuple[str, TeamKey], Slot] = {}
        self.signals: dict[tuple[str, TeamKey, int, int], tuple[int, int]] = {}
        sizes: dict[tuple[str, TeamKey], int] = defaultdict(int)
        for rank in ranks:
            for buffer in rank.buffers.values():
                if buffer.kind == "symmetric":
                    key = self.slot_key(rank, buffer)
                    sizes[key] = max(sizes[key], number(buffer.offset) + rank.nbytes(buffer))
        for key, nbytes in sizes.items():
            members = key[1][1]
            self.slots[key] = Slot({(r, c): poisoned(nbytes) for r in members for c in (0, 1)})

    @staticmethod
    def slot_key(rank: Rank, buffer: Buffer) -> tuple[str, TeamKey]:
        """The slot of the pool that the buffer takes."""
        assert buffer.team is not None, f"{buffer.name} is symmetric in no team"
        return buffer.storage or buffer.name, rank.team(buffer.team)

    def enabled(self) -> list[tuple[Rank, int, int]]:
        """Lists what may run now, as (rank, op, member)."""
        found: list[tuple[Rank, int, int]] = []
        for rank in self.ranks.values():
            for queue in rank.queues.values():
                if queue and rank.at(queue[0]):
                    for part in rank.members(queue[0]):
                        if self.ready(rank, queue[0], part):
                            found.append((rank, queue[0], part))
        return found

    def ready(self, rank: Rank, i: int, part: int) -> bool:
        """Returns True if an op at the head of its stream may run."""
        op = _item(rank, (i, part)) if rank.fused(i) else rank.ops[i]
        match op:
            case Wait():
                return rank.passed(rank.bindings[i, part])
            case Alloc(buffer=buffer) if buffer.kind == "symmetric":
                key = self.slot_key(rank, buffer)
                slot, take = self.slots[key], rank.take(i)
                return take < 2 or slot.freed[take - 2] == set(key[1][1])
            case Expect():
                team, me = rank.team(op.team), rank.where.member(op.team).index
                due = (rank.run, op.value)
                return all(
                    self.signals.get((op.signal, team, peer, me), (-1, 0)) >= due
                    for peer in rank.peers(op.team, op.peer)
                )
            case Collective() | Send() | Recv() | Group():
                return i not in rank.entered or self.may_end(rank, i)
            case _:
                return True

    def may_end(self, rank: Rank, i: int) -> bool:
        """Returns True if all ranks that an op has to wait for have begun it."""
        op = rank.ops[i]
        if isinstance(op, Collective):
            key = (rank.run, rank.collective_key[i])
            return all((*key, member) in self.given for member in self.awaited(rank, op, i))
        for part, item in enumerate(op.ops if isinstance(op, Group) else (op,)):
            _, *pair = rank.message_key[i, part]
            other = Send if isinstance(item, Recv) else Recv
            empty = isinstance(item, Recv) and rank.tensor(item.dst).numel() == 0
            if self.patient or (isinstance(item, Recv) and not empty):
                if (rank.run, other, *pair) not in self.given:
                    return False
        return True

    def awaited(self, rank: Rank, op: Collective, i: int) -> Sequence[int]:
        """The members whose begin a rank's end of a collective comes after."""
        members = rank.collective_key[i][0][1]
        if op.received is not None and not self.patient:
            rows = rank.tensor(op.received).tolist()
            return [member for member, count in zip(members, rows, strict=True) if count]
        if self.patient or op.root is None:
            return members
        root = members[rank.where.index(op.root)]
        if KINDS[op.kind].reads == "root":
            return [root]
        return members if rank.rank == root else []

    def enter(self, rank: Rank, i: int) -> None:
        """The begin of an op that meets others."""
        rank.entered.add(i)
        op = rank.ops[i]
        items = op.ops if isinstance(op, Group) else (op,)
        held: list[tuple[torch.Tensor, torch.Tensor]] = []

        def take(src: View | None) -> torch.Tensor | None:
            if src is None:
                return None
            source = rank.tensor(src)
            held.append((source, source.clone()))
            return held[-1][1].reshape(-1)

        places: list[View] = []
        for part, item in enumerate(items):
            if isinstance(item, Collective):
                self.check_members(rank, item, i)
                gives = self.has_part(rank, item, KINDS[item.kind].reads)
                key = (rank.run, rank.collective_key[i], rank.rank)
                self.given[key] = take(item.src) if gives else None
                if item.sent is not None:
                    self.sent[key] = rank.tensor(item.sent).tolist()
                if item.dst is not None and self.has_part(rank, item, KINDS[item.kind].writes):
                    places.append(item.dst)
                continue
            assert isinstance(item, Send | Recv)
            key = (rank.run, *rank.message_key[i, part])
            self.given[key] = take(item.src) if isinstance(item, Send) else None
            places += [item.dst] if isinstance(item, Recv) else []
        for place in places:
            poison_tensor(rank.tensor(place))
        # What its own destination covers is in place: nobody else may tell.
        self.intact[rank.rank, rank.run, i] = [pair for pair in held if same_bytes(*pair)]

    def check_members(self, rank: Rank, op: Collective, i: int) -> None:
        """All members must come, with the same collective."""
        key = rank.collective_key[i]
        for view in (op.src, op.dst):
            assert view is None or rank.tensor(view).is_contiguous(), f"{op} takes strided memory"
        for member in key[0][1]:
            other = self.ranks[member]
            if key not in other.collectives:
                raise Deadlock(f"rank {member} never joins {op} of rank {rank.rank}")
            theirs = other.ops[other.collectives[key]]
            assert isinstance(theirs, Collective)
            mine, wanted = (
                (each.kind, each.reduce, each.root, each.splits) for each in (op, theirs)
            )
            assert mine == wanted, f"rank {rank.rank} calls {mine} where another calls {wanted}"

    def has_part(self, rank: Rank, op: Collective, who: str) -> bool:
        """Returns True if `who` (`root` or `all`) includes this rank."""
        if who == "root":
            assert op.root is not None
            return rank.where.index(op.root) == rank.where.member(op.team).index
        return who == "all"

    def end(self, rank: Rank, i: int) -> None:
        """The end of an op that meets others: this rank has what it gets."""
        for src, was in self.intact.pop((rank.rank, rank.run, i)):
            if not same_bytes(src, was):
                raise LifetimeFault(f"rank {rank.rank}: the source of {rank.ops[i]} was written")
        op = rank.ops[i]
        for part, item in enumerate(op.ops if isinstance(op, Group) else (op,)):
            if isinstance(item, Recv):
                dst = rank.tensor(item.dst)
                if dst.numel():
                    sent = self.given[rank.run, Send, *rank.message_key[i, part][1:]]
                    assert sent is not None
                    dst.copy_(sent.reshape(dst.shape))
            elif isinstance(item, Collective) and item.dst is not None:
                if self.has_part(rank, item, KINDS[item.kind].writes):
                    self.receive(rank, item, i)
        rank.finish(i)

    def receive(self, rank: Rank, op: Collective, i: int) -> None:
        """Writes a collective's result on one rank."""
        key, where = rank.collective_key[i], rank.where
        given = [self.given.get((rank.run, key, member)) for member in key[0][1]]
        table = None if op.splits is None else numbers(where.table(op.splits).values)
        root = where.index(op.root) if op.root is not None else 0
        assert op.dst is not None
        dst = rank.tensor(op.dst)
        if op.received is not None:
            width = dst.stride(0)
            me, value = where.member(op.team).index, dst.new_zeros(dst.numel())
            place = 0
            for j, member in enumerate(key[0][1]):
                count = int(rank.tensor(op.received)[j])
                if not count:
                    continue
                sent, source = self.sent[rank.run, key, member], given[j]
                assert source is not None
                assert sent[me] == count
                start = sum(sent[:me]) * width
                value[place : place + count * width] = source[start : start + count * width]
                place += count * width
            dst.copy_(value.reshape(dst.shape))
            return
        value = collect(op, given, where.member(op.team).index, root, table)
        assert dst.numel() == value.numel(), f"{op}: {value.numel()} elements for {dst.shape}"
        dst.copy_(value.reshape(dst.shape))

    def step(self, rank: Rank, i: int, part: int) -> None:
        """Runs one enabled op."""
        op = rank.ops[i]
        if isinstance(op, Collective | Send | Recv | Group):
            (self.end if i in rank.entered else self.enter)(rank, i)
            return
        if isinstance(op, Fused):
            self.perform(rank, op.members[part], i)
            rank.parts_done.add((i, part))
            if all((i, k) in rank.parts_done for k in range(len(op.members))):
                rank.finish(i)
            return
        self.perform(rank, op, i)
        rank.finish(i)

    def perform(self, rank: Rank, op: Op, i: int) -> None:
        """The effect of an op that meets no other rank's."""
        match op:
            case Call():
                compute(op, rank.regions, rank.tensor, rank.bind)
            case Copy():
                rank.tensor(op.dst).copy_(rank.tensor(op.src))
            case Put():
                self.remote(rank, op.dst, op.team, op.peer).copy_(rank.tensor(op.src))
            case Get():
                rank.tensor(op.target).copy_(self.remote(rank, op.src, op.team, op.peer))
            case Notify():
                team, me = rank.team(op.team), rank.where.member(op.team).index
                for peer in rank.peers(op.team, op.peer):
                    key = (op.signal, team, me, peer)
                    assert self.signals.get(key, (-1, 0)) < (rank.run, op.value), f"{op} shrinks"
                    self.signals[key] = (rank.run, op.value)
            case Alloc(buffer=buffer) if buffer.kind == "symmetric":
                slot, take = self.slots[self.slot_key(rank, buffer)], rank.take(i)
                rank.taken[buffer.name] = take
                rank.freed.discard(buffer.name)
                storage = slot.copies[rank.rank, take % 2]
                rank.memory[buffer.name] = Memory(storage, number(buffer.offset))
            case Free():
                self.free(rank, op.buffer)
            case _:
                pass

    def free(self, rank: Rank, name: str) -> None:
        """Gives a buffer back; poisons it as soon as no rank may still use it."""
        buffer = rank.buffers[name]
        if name not in rank.memory or name in rank.freed:
            raise LifetimeFault(f"rank {rank.rank} frees {name}, which it does not hold")
        rank.freed.add(name)
        if buffer.kind == "symmetric":
            key = self.slot_key(rank, buffer)
            slot, take = self.slots[key], rank.taken[name]
            slot.freed[take].add(rank.rank)
            if slot.freed[take] == set(key[1][1]):
                for member in key[1][1]:
                    poison(slot.copies[member, take % 2])
        elif buffer.kind == "local":
            every_byte = Box(0, (rank.nbytes(buffer),), (1,), DType.u8)
            rank.memory[name].tensor(every_byte).fill_(255)

    def remote(self, rank: Rank, view: View, team: str, peer: Index) -> torch.Tensor:
        """A view of a peer's symmetric buffer, with this rank's indices."""
        buffer = rank.buffers[view.buffer]
        assert buffer.kind == "symmetric", f"{view.buffer} is not symmetric"
        rank.tensor(view)  # must be taken here
        key = self.slot_key(rank, buffer)
        other = rank.team(team)[1][rank.where.index(peer)]
        storage = self.slots[key].copies[other, rank.taken[view.buffer] % 2]
        return Memory(storage, number(buffer.offset)).tensor(rank.box(view))

    def stuck(self) -> Deadlock:
        """Where every rank stands."""
        lines = [
            f"  rank {rank.rank}, {stream}: {rank.ops[queue[0]] if queue else 'done'}"
            for rank in self.ranks.values()
            for stream, queue in rank.queues.items()
        ]
        return Deadlock("\n".join(["no rank can go on:", *lines]))


def _item(rank: Rank, part: Part) -> Op:
    op = rank.ops[part[0]]
    return op.members[part[1]] if isinstance(op, Fused) else op


def run_ranks(
    programs: Program | Iterable[Program],
    inputs_per_rank: Sequence[Sequence[torch.Tensor]],
    seed: int | None = None,
    in_order: bool = False,
    runs: int = 1,
) -> list[tuple[Any, ...]]:
    """Runs every rank of a set of Programs and gives what each returned, in order of the ranks.

    `inputs_per_rank` has the tensors for the input parameters of each rank. `seed` picks the
    interleaving (None: the first op that may run); `in_order` ignores streams; `runs` repeats the
    set without joining the ranks in between.
    """
    listed = [programs] if isinstance(programs, Program) else list(programs)
    owner = {rank: p for p in listed for rank in (p.world if p.rank is None else (p.rank,))}
    ranks = [
        Rank(owner[rank], rank, inputs, in_order)
        for rank, inputs in zip(sorted(owner), inputs_per_rank, strict=True)
    ]
    rng = random.Random(seed) if seed is not None else None
    machine = Machine(ranks, patient=rng is None or rng.random() < 0.5)
    while True:
        for rank in ranks:
            if rank.finished and rank.run + 1 < runs:
                rank.start()
            rank.issue()
        if all(rank.finished for rank in ranks):
            return [rank.collect_results() for rank in ranks]
        choices = machine.enabled()
        if not choices:
            raise machine.stuck()
        machine.step(*(choices[0] if rng is None else rng.choice(choices)))
