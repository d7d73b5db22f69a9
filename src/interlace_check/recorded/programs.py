"""What is open in a recorded run, as a Program for each rank.

Each communicator is a stream: a process group, and two ranks that exchange messages one by one.
What a rank has not issued, and its peers wait for, stands at the end, behind a host_sync of every
stream on which the rank itself waits: where the host waits for those (as `synchronize()` and
`.item()` do), it issues no more. A deadlock of these Programs is then one of the run.

>>> recorded = programs_of(align(dumps))
>>> print(recorded.programs[0])
>>> recorded.steps[0][3].entry       # the record behind op 3 of Program 0
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from interlace.ir.ops import KINDS as COLLECTIVES
from interlace.ir.ops import Collective, Group, HostSync, Op, Recv, Send
from interlace.ir.program import Program
from interlace.ir.types import Buffer, DType, Team
from interlace.ir.view import View
from interlace_check.recorded.alignment import Aligned, Open, OpenChannel
from interlace_check.recorded.entries import KINDS, Entry, EntryContent, GroupKey

MAX_OPEN = 64
"""Calls of one group, and messages of one channel, that Programs hold at most."""
MAX_ELEMENTS = 1 << 32
"""Elements of a buffer at most: sizes were compared before, and have to fit into 64 bits here."""
DTYPES = {
    **{"Double": DType.f64, "Float": DType.f32, "Half": DType.f16, "BFloat16": DType.bf16},
    **{"Float8_e4m3fn": DType.f8e4m3, "Float8_e5m2": DType.f8e5m2, "Long": DType.i64},
    **{"Int": DType.i32, "Short": DType.i16, "Char": DType.i8, "Byte": DType.u8},
    **{"UInt64": DType.u64, "UInt32": DType.u32, "UInt16": DType.u16, "Bool": DType.bool},
    **{"ComplexFloat": DType.c64, "ComplexDouble": DType.c128},
}


@dataclass(frozen=True, slots=True)
class Step:
    """What an op of a Program stands for."""

    text: str
    entry: Entry | None = None
    """The record; None for a host_sync, and for what the rank did not record."""
    expected: bool = False
    """Whether the rank has not issued it, and peers wait for it."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The Programs of a run, and what each of their ops stands for."""

    programs: tuple[Program, ...]
    steps: tuple[tuple[Step, ...], ...]


def programs_of(aligned: Aligned) -> Recorded:
    """A Program for each rank that takes part in anything open."""
    groups = [found.group for found in aligned.open]
    groups += [found.channel[0] for found in aligned.channels]
    names = _names(dict.fromkeys(groups))
    writers: dict[int, _Writer] = {}
    for group, name in names.items():
        ranks = group.ranks or ()
        for rank in ranks:
            writer = writers.setdefault(rank, _Writer(rank))
            writer.teams[name] = Team(name, len(ranks), (ranks,))
    for found in aligned.open:
        _collectives(found, names[found.group], aligned, writers)
    for channel in aligned.channels:
        _messages(channel, names[channel.channel[0]], writers)
    made = [writers[rank].finished() for rank in sorted(writers)]
    return Recorded(tuple(program for program, _ in made), tuple(steps for _, steps in made))


def _names(groups: Iterable[GroupKey]) -> dict[GroupKey, str]:
    """A team's name for each group: groups that were split may share one."""
    names: dict[GroupKey, str] = {}
    taken: Counter[str] = Counter()
    for group in groups:
        name = str(group)
        taken[name] += 1
        names[group] = name if taken[name] == 1 else f"{name} no. {taken[name]}"
    return names


def _collectives(found: Open, team: str, aligned: Aligned, writers: dict[int, _Writer]) -> None:
    """The group's open collectives, on every member; coalesced ones are one op, the first."""
    issued: dict[int, dict[int, Entry]] = defaultdict(dict)
    for rank in found.group.ranks or ():
        dump = aligned.dumps.get(rank)
        for entry in dump.entries if dump is not None else ():
            one = entry.peer is None and entry.group is found.group
            if one and found.start <= entry.seq <= found.seq:
                issued[entry.seq].setdefault(rank, entry)
    numbers = sorted(issued)
    if len(numbers) > MAX_OPEN:
        numbers = [*numbers[: MAX_OPEN - 1], numbers[-1]]
    for seq in numbers:
        usual = _usual(issued[seq].values())
        for rank in found.group.ranks or ():
            if rank in issued[seq]:
                writers[rank].record(issued[seq][rank], team)
            else:
                missing = seq == found.seq and rank in found.missing
                writers[rank].unrecorded(usual, team, missing)


def _usual(issued: Iterable[Entry]) -> Entry:
    """What most members issued at a number."""
    entries = list(issued)
    content, _ = Counter(entry.content for entry in entries).most_common(1)[0]
    return next(entry for entry in entries if entry.content == content)


def _messages(found: OpenChannel, team: str, writers: dict[int, _Writer]) -> None:
    """The channel's open messages, and the first that one side lacks."""
    _, source, target = found.channel
    both = min(len(found.sends), len(found.recvs), MAX_OPEN)
    for entry in (*found.sends[: both + 1], *found.recvs[: both + 1]):
        writers[entry.rank].record(entry, team)
    if both < MAX_OPEN:
        for entry in found.sends[both : both + 1]:
            writers[target].unrecorded(_other_end(entry), team, True)
        for entry in found.recvs[both : both + 1]:
            writers[source].unrecorded(_other_end(entry), team, True)


def _other_end(entry: Entry) -> Entry:
    """The message as the peer has to issue it."""
    assert entry.peer is not None, "a message has a peer"
    way = "recv" if entry.content.label == "send" else "send"
    return Entry(
        rank=entry.peer,
        record=-1,
        group=entry.group,
        seq=entry.seq,
        name=way,
        content=entry.content._replace(label=way),
        sizes=entry.sizes,
        state="",
        ended=False,
        peer=entry.rank,
        backend=entry.backend,
    )


class _Writer:
    """Writes the Program of one rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.teams: dict[str, Team] = {}
        self.params: list[Buffer] = []
        self.recorded: list[tuple[Entry, str]] = []
        self.assumed: list[tuple[Entry, str]] = []
        self.expected: list[tuple[Entry, str]] = []
        self.ops: list[Op] = []
        self.steps: list[Step] = []

    def record(self, entry: Entry, team: str) -> None:
        self.recorded.append((entry, team))

    def unrecorded(self, entry: Entry, team: str, missing: bool) -> None:
        """What this rank must issue, or must have issued, by what a peer recorded."""
        (self.expected if missing else self.assumed).append((entry, team))

    def finished(self) -> tuple[Program, tuple[Step, ...]]:
        for entry, team in self.assumed:
            self.add(self.op(entry, team, team), Step(f"{entry.text} (not recorded)"))
        for entries, team in self.batches():
            self.issued(entries, team)
        if self.expected:
            waiting = {
                op.stream: step
                for op, step in zip(self.ops, self.steps, strict=True)
                if step.entry is not None and step.entry.may_wait
            }
            for stream, step in waiting.items():
                self.add(HostSync(stream=stream), Step(f"its host may wait for {step.text}"))
        for number, (entry, team) in enumerate(self.expected):
            step = Step(_as_issued_by(entry, self.rank), None, True)
            self.add(self.op(entry, team, f"not issued {number}"), step)
        return Program(
            name=f"rank {self.rank}",
            teams=tuple(self.teams.values()),
            params=tuple(self.params),
            ops=tuple(self.ops),
            results=(),
            ranks=(self.rank,),
        ), tuple(self.steps)

    def batches(self) -> Iterator[tuple[list[Entry], str]]:
        """The records in order, messages that were coalesced together."""
        batches: dict[tuple[str, int], list[Entry]] = {}
        order: list[tuple[list[Entry], str]] = []
        for entry, team in sorted(self.recorded, key=lambda one: one[0].record):
            if entry.batch is None or entry.peer is None:
                order.append(([entry], team))
                continue
            if (team, entry.batch) not in batches:
                order.append((batches.setdefault((team, entry.batch), []), team))
            batches[team, entry.batch].append(entry)
        yield from order

    def issued(self, entries: Sequence[Entry], team: str) -> None:
        first = entries[0]
        step = Step(first.text, first)
        if first.peer is None:
            self.add(self.op(first, team, team), step)
        elif first.batch is None:
            low, high = sorted((first.rank, first.peer))
            self.add(self.op(first, team, f"{team} {low}-{high}"), step)
        else:
            members = tuple(self.message(entry, team, team) for entry in entries)
            self.add(Group(stream=team, ops=members), step)

    def add(self, op: Op, step: Step) -> None:
        self.ops.append(op)
        self.steps.append(step)

    def op(self, entry: Entry, team: str, stream: str) -> Op:
        if entry.peer is not None:
            return self.message(entry, team, stream)
        kind = KINDS.get(entry.content.label, "barrier")
        row = COLLECTIVES[kind]
        src = dst = None
        if row.reads != "none":
            size = self.teams[team].size
            count = size if entry.content.elements is None else entry.content.elements
            count = min(count, MAX_ELEMENTS)
            src = self.buffer(entry.content, count * (size if row.scales == "scatter" else 1))
            dst = self.buffer(entry.content, count * (size if row.scales == "gather" else 1))
        return Collective(
            stream=stream,
            loc=entry.loc,
            kind=kind,
            src=src,
            dst=dst,
            reduce="sum" if row.reduces else None,
            root=0 if row.rooted else None,
            team=team,
            backend=entry.backend,
        )

    def message(self, entry: Entry, team: str, stream: str) -> Send | Recv:
        groups = self.teams[team].groups
        assert entry.peer is not None, "a message has a peer"
        assert groups is not None, "a process group names its ranks"
        peer = groups[0].index(entry.peer)
        view = self.buffer(entry.content, min(entry.content.elements or 0, MAX_ELEMENTS))
        loc, backend = entry.loc, entry.backend
        if entry.content.label == "send":
            return Send(stream=stream, loc=loc, src=view, peer=peer, team=team, backend=backend)
        return Recv(stream=stream, loc=loc, dst=view, peer=peer, team=team, backend=backend)

    def buffer(self, content: EntryContent, count: int) -> View:
        """Memory of one side of an op; no two ops share any, since dumps hold no addresses."""
        name = f"x{len(self.params)}"
        dtype = DTYPES.get(content.dtype, DType.u8)
        self.params.append(Buffer(name, dtype, (count,), "input"))
        return View(name)


def _as_issued_by(entry: Entry, rank: int) -> str:
    return f"{entry.text}, which rank {rank} has not issued"
