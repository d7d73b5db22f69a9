"""The reference semantics of Programs: all ranks of a set, in one process, on torch tensors.

Every step picks one of the ops that may run now, by a seeded generator: over many seeds that is any
legal interleaving of all ranks and streams. Memory is poisoned (NaN) before it is first written and
after it is given back, so that an unordered access shows as NaN; nothing enabled is a `Deadlock`.

    outputs = run_ranks(program, [[x0, w0], [x1, w1]], seed=7)     # outputs[rank][i]
    twin = run_ranks(program, inputs, in_order=True)               # one op after another

A collective, or a message with its receipt, is one step of all who meet; the parts of a Fused go
beside each other, a member at a time.
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
    poisoned,
)
from tests.support.torch_ops import collect, compute

from interlace.ir import (
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

    def __init__(self, ranks: list[Rank]) -> None:
        self.ranks = {rank.rank: rank for rank in ranks}
        self.slots: dict[tuple[str, TeamKey], Slot] = {}
        self.signals: dict[tuple[str, TeamKey, int, int], tuple[int, int]] = {}
        sizes: dict[tuple[str, TeamKey], int] = defaultdict(int)
        for rank in ranks:
            for buffer in rank.buffers.values():
                if buffer.kind == "symmetric":
                    key = self.slot_key(rank, buffer)
                    sizes[key] = max(sizes[key], buffer.offset + rank.nbytes(buffer))
        for key, nbytes in sizes.items():
            members = key[1][1]
            self.slots[key] = Slot({(r, c): poisoned(nbytes) for r in members for c in (0, 1)})

    @staticmethod
    def slot_key(rank: Rank, buffer: Buffer) -> tuple[str, TeamKey]:
        """The slot of the pool that the buffer takes."""
        assert buffer.team is not None, f"{buffer.name} is symmetric in no team"
        return buffer.storage or buffer.name, rank.team(buffer.team)

    def enabled(self) -> list[tuple[Rank, int, int]]:
        """What may run now: (rank, op, member); a meeting stands at its first member."""
        found: list[tuple[Rank, int, int]] = []
        for rank in self.ranks.values():
            for queue in rank.queues.values():
                if queue and rank.at(queue[0]):
                    for part in rank.members(queue[0]):
                        if self.ready(rank, queue[0], part):
                            found.append((rank, queue[0], part))
        return found

    def ready(self, rank: Rank, i: int, part: int) -> bool:
        """Whether an op at the head of its stream may run."""
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
            case Collective():
                meeting = self.meeting(rank, i)
                first = meeting[0][0].rank == rank.rank
                return first and all(r.run == rank.run and r.at(j) for r, j in meeting)
            case Send() | Recv():
                return isinstance(op, Send) and self.receiver(rank, (i, 0)) is not None
            case Group():
                item = op.ops[part]
                return isinstance(item, Send) and self.receiver(rank, (i, part)) is not None
            case _:
                return True

    def meeting(self, rank: Rank, i: int) -> list[tuple[Rank, int]]:
        """The members of a collective, in the order of the team, and where each lists it."""
        key = rank.collective_key[i]
        found: list[tuple[Rank, int]] = []
        for member in key[0][1]:
            other = self.ranks[member]
            if key not in other.collectives:
                raise Deadlock(f"rank {member} never joins {rank.ops[i]} of rank {rank.rank}")
            found.append((other, other.collectives[key]))
        return found

    def receiver(self, rank: Rank, part: Part) -> tuple[Rank, Part] | None:
        """The Recv that meets this Send, if it stands ready."""
        if part in rank.parts_done:
            return None
        key = rank.message_key[part]
        other = self.ranks[key[1][1][key[3]]]
        match_ = other.messages.get((Recv, *key[1:]))
        if match_ is None or other.run != rank.run or not other.at(match_[0]):
            return None
        return None if match_ in other.parts_done else (other, match_)

    def step(self, rank: Rank, i: int, part: int) -> None:
        """Runs one enabled op."""
        op = rank.ops[i]
        if isinstance(op, Send | Group):
            self.transfer(rank, (i, part))
            return
        if isinstance(op, Collective):
            meeting = self.meeting(rank, i)
            self.collective(meeting)
            for member, j in meeting:
                member.finish(j)
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
                rank.memory[buffer.name] = Memory(storage, buffer.offset)
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
        """A view of what a peer shares, symmetric or registered, with this rank's indices."""
        buffer = rank.buffers[view.buffer]
        if buffer.registered:
            owner = self.ranks[rank.team(team)[1][rank.where.index(peer)]]
            if owner.run != rank.run or owner.finished:
                raise LifetimeFault(f"rank {rank.rank} reaches {view.buffer} out of a run there")
            return owner.memory[view.buffer].tensor(rank.box(view))
        assert buffer.kind == "symmetric", f"{view.buffer} is not symmetric"
        rank.tensor(view)  # must be taken here
        key = self.slot_key(rank, buffer)
        other = rank.team(team)[1][rank.where.index(peer)]
        storage = self.slots[key].copies[other, rank.taken[view.buffer] % 2]
        return Memory(storage, buffer.offset).tensor(rank.box(view))

    def transfer(self, rank: Rank, part: Part) -> None:
        """A Send with its Recv."""
        found = self.receiver(rank, part)
        assert found is not None
        other, match_ = found
        send, recv = _item(rank, part), _item(other, match_)
        assert isinstance(send, Send)
        assert isinstance(recv, Recv)
        other.tensor(recv.dst).copy_(rank.tensor(send.src))
        for who, at in ((rank, part), (other, match_)):
            who.parts_done.add(at)
            op = who.ops[at[0]]
            size = len(op.ops) if isinstance(op, Group) else 1
            if all((at[0], k) in who.parts_done for k in range(size)):
                who.finish(at[0])

    def collective(self, meeting: list[tuple[Rank, int]]) -> None:
        """One collective of all its members."""
        ops: list[Collective] = []
        srcs: list[torch.Tensor | None] = []
        dsts: list[torch.Tensor | None] = []
        for rank, i in meeting:
            op = rank.ops[i]
            assert isinstance(op, Collective)
            mine = (op.kind, op.reduce, op.root, op.splits)
            first = ops[0] if ops else op
            agreed = (first.kind, first.reduce, first.root, first.splits)
            assert mine == agreed, f"rank {rank.rank} calls {mine} where another calls {agreed}"
            ops.append(op)
            srcs.append(None if op.src is None else rank.tensor(op.src))
            dsts.append(None if op.dst is None else rank.tensor(op.dst))
        where, splits = meeting[0][0].where, ops[0].splits
        table = None if splits is None else where.table(splits).values
        root = where.index(ops[0].root) if ops[0].root is not None else 0
        for src in srcs:
            assert src is None or src.is_contiguous(), f"{ops[0]} takes a strided source"
        for dst in dsts:
            assert dst is None or dst.is_contiguous(), f"{ops[0]} fills a strided destination"
        collect(ops, srcs, dsts, root, table)

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
    if isinstance(op, Fused):
        return op.members[part[1]]
    return op.ops[part[1]] if isinstance(op, Group) else op


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
    machine = Machine(ranks)
    rng = random.Random(seed) if seed is not None else None
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
