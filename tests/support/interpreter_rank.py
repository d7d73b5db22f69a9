"""One rank of the reference interpreter: its memory, and how far each of its streams has come.

Everything that depends on the list alone (which Record a Wait is bound to, the k-th collective of a
team, the k-th message of a pair) is numbered once; `start` begins a run, `issue` plays the host.

    rank = Rank(program, 0, [x, w])
    rank.tensor(View("x"))
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tests.support.torch_ops import DTYPES

from interlace.ir import (
    Alloc,
    Arg,
    Box,
    Buffer,
    Collective,
    Fused,
    Group,
    HostSync,
    Index,
    Op,
    Others,
    Program,
    Recv,
    Send,
    View,
    Wait,
    bindings,
    contiguous_strides,
    in_order,
    spots,
)
from interlace.ir.sizes import number, numbers

TeamKey = tuple[str, tuple[int, ...]]
Part = tuple[int, int]
"""An op of a rank's list, and a member of it if it is a Group or a Fused (else 0)."""


class LifetimeFault(AssertionError):
    """A buffer is used before its Alloc or after its Free."""


@dataclass
class Memory:
    """Bytes, from `base` on."""

    storage: torch.UntypedStorage
    base: int = 0

    def tensor(self, box: Box) -> torch.Tensor:
        """The box as a tensor over these bytes."""
        dtype = DTYPES[box.dtype]
        first = self.base // box.dtype.itemsize + number(box.offset)
        sizes, strides = numbers(box.sizes), numbers(box.strides)
        if not box.numel:
            return torch.empty(sizes, dtype=dtype)
        return torch.empty(0, dtype=dtype).set_(self.storage, first, sizes, strides)


def poisoned(nbytes: int) -> torch.UntypedStorage:
    """Fresh bytes, NaN in every floating point type."""
    storage = torch.UntypedStorage(nbytes)
    poison(storage)
    return storage


def poison(storage: torch.UntypedStorage) -> None:
    """Makes every byte 255."""
    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)


def poison_tensor(tensor: torch.Tensor) -> None:
    """Overwrites every element."""
    bad = torch.full((tensor.numel() * tensor.element_size(),), 255, dtype=torch.uint8)
    if tensor.dtype is torch.bool:
        bad.fill_(1)
    tensor.copy_(bad.view(tensor.dtype).reshape(tensor.shape))


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns True if two tensors hold the same bytes, NaN or not."""
    flat = (tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(*flat)


class Rank:
    """One rank: its concrete Program, its memory and how far each stream has come."""

    def __init__(
        self, program: Program, rank: int, inputs: Sequence[torch.Tensor], one_by_one: bool = False
    ) -> None:
        self.rank, self.program = rank, program.instantiate(rank)
        self.where = program.where(rank)
        self.box = self.program.boxes(rank)
        self.ops, self.buffers = self.program.ops, self.program.buffers()
        self.regions = {region.name: region for region in self.program.regions}
        self.inputs = list(inputs)
        self.run = -1
        self.taken: dict[str, int] = {}
        self.collectives: dict[tuple[TeamKey, str | None, int], int] = {}
        self.collective_key: dict[int, tuple[TeamKey, str | None, int]] = {}
        self.before: dict[int, int] = {}  # the collective that must be done before this one
        self.messages: dict[tuple[type[Op], TeamKey, int, int, int], Part] = {}
        self.message_key: dict[Part, tuple[type[Op], TeamKey, int, int, int]] = {}
        self.bindings = bindings(self.ops)
        self.sequence = in_order(self.ops) if one_by_one else []
        self.takes: dict[int, tuple[object, int]] = {}
        self.counts: dict[object, int] = defaultdict(int)
        self._number()
        self.start()

    def team(self, name: str) -> TeamKey:
        """The instance of the team that this rank is in."""
        return name, self.where.member(name).ranks

    def peers(self, team: str, peer: Index | Others) -> list[int]:
        """Indices in the team that `peer` stands for."""
        member = self.where.member(team)
        if isinstance(peer, Others):
            return [i for i in range(len(member.ranks)) if i != member.index]
        return [self.where.index(peer)]

    def _number(self) -> None:
        counts = self.counts
        latest: dict[object, int] = {}
        for i, op in enumerate(self.ops):
            if isinstance(op, Alloc) and op.buffer.kind == "symmetric":
                slot = op.buffer.storage or op.buffer.name
                key = ("take", slot, op.buffer.team)
                self.takes[i] = (key, counts[key])
                counts[key] += 1
            elif isinstance(op, Collective):
                queue = (self.team(op.team), op.backend)
                self.collective_key[i] = (*queue, counts[queue])
                self.collectives[self.collective_key[i]] = i
                counts[queue] += 1
                if queue in latest:
                    self.before[i] = latest[queue]
                latest[queue] = i
            for part, item in enumerate(op.ops if isinstance(op, Group) else (op,)):
                if isinstance(item, Send | Recv):
                    me, peer = self.where.member(item.team).index, self.peers(item.team, item.peer)
                    pair = (me, peer[0]) if isinstance(item, Send) else (peer[0], me)
                    key = (type(item), self.team(item.team), *pair)
                    self.message_key[i, part] = (*key, counts[key])
                    self.messages[self.message_key[i, part]] = (i, part)
                    counts[key] += 1

        for spot, op in spots(self.ops):
            if isinstance(op, Wait) and spot not in self.bindings:
                raise AssertionError(f"rank {self.rank}: wait({op.event}) before its record")

    def start(self) -> None:
        """Begins the next run: nothing issued, inputs and outputs bound, the rest unbound."""
        self.run += 1
        self.issued = self.position = 0
        self.begun: set[int] = set()
        self.entered: set[int] = set()
        self.queues: dict[str, list[int]] = {stream: [] for stream in self.program.streams()}
        self.done: set[int] = set()
        self.parts_done: set[Part] = set()
        self.memory: dict[str, Memory] = {}
        self.freed: set[str] = set()
        given = iter(self.inputs)
        for buffer in self.program.params:
            box = self.box(View(buffer.name))
            if buffer.kind == "output":
                self.memory[buffer.name] = Memory(poisoned(number(box.hull[1])))
                continue
            tensor = next(given)
            assert tensor.dtype == DTYPES[buffer.dtype], f"{buffer.name}: {tensor.dtype}"
            assert tuple(tensor.shape) == box.sizes, f"{buffer.name}: {tuple(tensor.shape)}"
            self.memory[buffer.name] = Memory(
                tensor.untyped_storage(), int(tensor.storage_offset()) * tensor.element_size()
            )
        self.arena: dict[str, torch.UntypedStorage] = {}
        extents: dict[str, int] = defaultdict(int)
        for buffer in self.buffers.values():
            if buffer.kind == "local":
                name = buffer.storage or buffer.name
                extents[name] = max(extents[name], number(buffer.offset) + self.nbytes(buffer))
        for name, nbytes in extents.items():
            self.arena[name] = poisoned(nbytes)

    @property
    def finished(self) -> bool:
        """True if every op of this run is done."""
        return len(self.done) == len(self.ops)

    def nbytes(self, buffer: Buffer) -> int:
        """Bytes that the buffer spans."""
        return number(self.box(View(buffer.name)).hull[1])

    def take(self, i: int) -> int:
        """The number of a slot's take, counted in list order over all runs."""
        key, number = self.takes[i]
        return self.run * self.counts[key] + number

    def issue(self) -> None:
        """Lets the host go on until a HostSync (in order: any op) that is not done holds it up."""
        if self.sequence:
            while self.position < len(self.sequence) and self.passed(self.sequence[self.position]):
                self.position += 1
            for i, _ in self.sequence[self.position : self.position + 1]:
                self.begin(i)
            return
        while self.issued < len(self.ops):
            last = self.issued - 1
            if last >= 0 and last not in self.done and isinstance(self.ops[last], HostSync):
                return
            self.begin(self.issued)
            self.issued += 1

    def begin(self, i: int) -> None:
        """Issues op `i`, once."""
        op = self.ops[i]
        if i not in self.begun:
            self.begun.add(i)
            if isinstance(op, Alloc) and op.buffer.kind != "symmetric":
                self.declare(op.buffer)
            self.queues[op.stream].append(i)

    def passed(self, spot: Part) -> bool:
        """Returns True if an op, or a member of a Fused, is done."""
        return spot in self.parts_done if self.fused(spot[0]) else spot[0] in self.done

    def fused(self, i: int) -> bool:
        """Returns True if op `i` is a Fused."""
        return isinstance(self.ops[i], Fused)

    def members(self, i: int) -> list[int]:
        """The members of op `i` that may be next, by number; of an op that has none: 0."""
        op = self.ops[i]
        if self.sequence:
            at, number = self.sequence[self.position]
            return [number] if at == i else []
        if not isinstance(op, Fused):
            return [0]
        found, first = list[int](), 0
        for part in op.parts:
            numbers = range(first, first + len(part))
            found += [k for k in numbers if (i, k) not in self.parts_done][:1]
            first += len(part)
        return found

    def declare(self, buffer: Buffer) -> None:
        """Binds a local or fresh buffer at issue."""
        self.freed.discard(buffer.name)
        if buffer.kind == "local":
            self.memory[buffer.name] = Memory(
                self.arena[buffer.storage or buffer.name], number(buffer.offset)
            )
        else:
            self.memory[buffer.name] = Memory(poisoned(self.nbytes(buffer)))

    def at(self, i: int) -> bool:
        """Returns True if op `i` is at the head of its stream and of its team's queue."""
        queue = self.queues[self.ops[i].stream]
        return bool(queue) and queue[0] == i and self.before.get(i, i) in {i, *self.done}

    def finish(self, i: int) -> None:
        """Op `i` is done; its stream goes on."""
        self.done.add(i)
        self.queues[self.ops[i].stream].pop(0)

    def tensor(self, view: View) -> torch.Tensor:
        """The view in this rank's memory; without elements, it touches nothing there."""
        box = self.box(view)
        if not box.numel:
            sizes, strides = numbers(box.sizes), numbers(box.strides)
            return torch.empty_strided(sizes, strides, dtype=DTYPES[box.dtype])
        if view.buffer not in self.memory or view.buffer in self.freed:
            state = "after its free" if view.buffer in self.freed else "before its alloc"
            raise LifetimeFault(f"rank {self.rank} uses {view.buffer} {state}")
        return self.memory[view.buffer].tensor(box)

    def bind(self, buffer: Buffer, value: torch.Tensor) -> None:
        """Gives a fresh buffer storage of the strides it declares, and its contents."""
        box = self.box(View(buffer.name))
        assert tuple(value.shape) == box.sizes, f"{buffer.name}: {tuple(value.shape)}, {box.sizes}"
        assert value.dtype == DTYPES[buffer.dtype], f"{buffer.name}: {value.dtype}"
        strides = numbers(buffer.strides or contiguous_strides(box.sizes))
        bound = torch.empty_strided(numbers(box.sizes), strides, dtype=value.dtype)
        bound.copy_(value)
        self.memory[buffer.name] = Memory(bound.untyped_storage())

    def collect_results(self) -> tuple[object, ...]:
        """Returns the results of this run; views are cloned."""

        def result(arg: Arg) -> object:
            return self.tensor(arg).clone() if isinstance(arg, View) else arg

        return tuple(map(result, self.program.returned()))
