"""The order of what is open in a recorded run, as a Program for each rank.

Each communicator is a stream: a process group, and two ranks that exchange messages one by one.
What a rank has not issued, and its peers wait for, stands at the end, behind a host_sync of every
stream on which the rank itself waits: where the host waits for those (as `synchronize()` and
`.item()` do), it issues no more. A deadlock of these Programs is then one of the run. A collective
is a barrier, and a message one byte: sizes and kinds were compared before (alignment.py).

>>> ranks = programs_of(align(dumps))
>>> print(ranks[0].program)
>>> ranks[0].origins[3].entry       # the record behind op 3 of Program 0
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from interlace.ir.build.ops import Handle
from interlace.ir.types import Team
from interlace_check.recorded.alignment import Aligned, Open
from interlace_check.recorded.entries import Entry, GroupKey
from interlace_check.tracing import NOWHERE, OriginBuilder

MAX_OPEN = 64
"""Calls of one group, and messages of one channel, that Programs hold at most."""


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """Record or expectation that an op of a Program stands for."""

    text: str
    entry: Entry | None = None
    """The record; None for a host_sync, and for what the rank did not record."""
    expected: bool = False
    """True if the rank has not issued it, and peers wait for it."""


def programs_of(aligned: Aligned) -> list[RecordedProgram]:
    """The Program of each rank that takes part in anything open."""
    names: dict[GroupKey, str] = {}
    taken: Counter[str] = Counter()
    teams: dict[int, list[Team]] = defaultdict(list)
    for group in dict.fromkeys([found.group for found in aligned.open]):
        # Groups that were split apart may share a name.
        name, ranks = str(group), group.ranks or ()
        taken[name] += 1
        names[group] = name if taken[name] == 1 else f"{name} no. {taken[name]}"
        for rank in ranks:
            teams[rank].append(Team(names[group], len(ranks), (ranks,)))
    programs = {rank: RecordedProgram(rank, teams[rank]) for rank in sorted(teams)}
    for found in aligned.open:
        if found.messages is None:
            _collectives(found, names[found.group], aligned, programs)
        else:
            _messages(*found.messages, names[found.group], programs)
    for program in programs.values():
        program.write()
    return list(programs.values())


def _collectives(
    found: Open, team: str, aligned: Aligned, programs: dict[int, RecordedProgram]
) -> None:
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
            program = programs[rank]
            if rank in issued[seq]:
                program.recorded.append((issued[seq][rank], team))
            elif seq == found.seq and rank in found.missing:
                program.expected.append((usual, team))
            else:
                program.assumed.append((usual, team))


def _usual(issued: Iterable[Entry]) -> Entry:
    """The call that most members issued at a number."""
    entries = list(issued)
    content, _ = Counter(entry.content for entry in entries).most_common(1)[0]
    return next(entry for entry in entries if entry.content == content)


def _messages(
    sends: Sequence[Entry],
    recvs: Sequence[Entry],
    team: str,
    programs: dict[int, RecordedProgram],
) -> None:
    """The channel's open messages, and the first that one side lacks."""
    both = min(len(sends), len(recvs), MAX_OPEN)
    for entry in (*sends[: both + 1], *recvs[: both + 1]):
        programs[entry.rank].recorded.append((entry, team))
    for ends in (sends, recvs) if both < MAX_OPEN else ():
        for entry in ends[both : both + 1]:
            assert entry.peer is not None, "a message has a peer"
            way = "recv" if entry.is_send else "send"
            content = entry.content._replace(label=way)
            other = replace(
                entry, rank=entry.peer, peer=entry.rank, name=way, content=content, loc=NOWHERE
            )
            programs[entry.peer].expected.append((other, team))


class RecordedProgram(OriginBuilder[RecordedStep]):
    """The Program of one rank."""

    def __init__(self, rank: int, teams: Sequence[Team]) -> None:
        super().__init__(f"rank {rank}", teams, (rank,), nothing=RecordedStep(""))
        self.rank = rank
        self.groups = {team.name: team.groups for team in teams}
        self.recorded: list[tuple[Entry, str]] = []
        """Ops that the rank recorded, each with its team."""
        self.assumed: list[tuple[Entry, str]] = []
        """Ops that it must have issued, by what a peer recorded."""
        self.expected: list[tuple[Entry, str]] = []
        """Ops that it has not issued, and that a peer waits for."""

    def write(self) -> None:
        """All ops of the rank."""
        for entry, team in self.assumed:
            self.issue(entry, team, team, RecordedStep(f"{entry.text} (not recorded)"))
        batches: dict[tuple[str, int], list[Entry]] = {}
        order: list[tuple[list[Entry], str]] = []
        for entry, team in sorted(self.recorded, key=lambda one: one[0].record):
            key = None if entry.batch is None or entry.peer is None else (team, entry.batch)
            if key in batches:
                batches[key].append(entry)
                continue
            order.append(([entry], team))
            if key is not None:
                batches[key] = order[-1][0]
        for entries, team in order:
            self.record_of(entries, team)
        if self.expected:
            waiting = {
                op.stream: step
                for op, step in zip(self.ops, self.origins, strict=True)
                if step.entry is not None and step.entry.may_wait
            }
            for stream, step in waiting.items():
                self.at(stream, RecordedStep(f"its host may wait for {step.text}"))
                self.host_sync()
        for number, (entry, team) in enumerate(self.expected):
            text = f"{entry.text}, which rank {self.rank} has not issued"
            self.issue(entry, team, f"not issued {number}", RecordedStep(text, None, True))

    def record_of(self, entries: Sequence[Entry], team: str) -> None:
        """One record, or the messages of one batch."""
        first = entries[0]
        step = RecordedStep(first.text, first)
        if first.peer is None:
            self.issue(first, team, team, step)
        elif first.batch is None:
            low, high = sorted((first.rank, first.peer))
            self.issue(first, team, f"{team} {low}-{high}", step)
        else:
            self.at(team, step, first.loc)
            with self.group():
                for entry in entries:
                    self.message(entry, team)

    def issue(self, entry: Entry, team: str, stream: str, step: RecordedStep) -> None:
        self.at(stream, step, entry.loc)
        if entry.peer is None:
            self.barrier(team=team, backend=entry.backend)
        else:
            self.message(entry, team)

    def message(self, entry: Entry, team: str) -> None:
        groups = self.groups[team]
        assert entry.peer is not None, "a message has a peer"
        assert groups is not None, "a process group names its ranks"
        peer = groups[0].index(entry.peer)
        if entry.is_send:
            self.send(self.byte(), peer, team=team, backend=entry.backend)
        else:
            self.recv(self.byte(), peer, team=team, backend=entry.backend)

    def byte(self) -> Handle:
        """Memory of a message; no two ops share any, since dumps hold no addresses."""
        return self.input(f"x{len(self.params)}", "u8", (1,))
