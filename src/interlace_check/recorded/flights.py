"""Where the streams of Interlace's own Executors stood, from the flight logs of all ranks.

The Programs are those that ran, so their order is the verifier's. An op that a stream has begun
waits for what comes before it and has not been done; who waits for nothing that another must do
holds up the others.

>>> findings, assumed = stalled(logs, absent=())
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from interlace.errors import InterlaceError, RecordingError
from interlace.ir.checks.validate import validate
from interlace.ir.program import Program
from interlace.ir.text.parser import parse
from interlace.ir.text.printer import print_op
from interlace.verify.accesses.regions import Regions
from interlace.verify.happens_before.build import GraphBuilder
from interlace.verify.happens_before.source import lower
from interlace_check.recorded.entries import ranks_in_words, shown
from interlace_check.recorded.report import RecordedFinding, RecordedOp, fault, unrecorded

NOT_BEGUN, DONE = -1, -2
NUM_SHOWN = 8


@dataclass(frozen=True, slots=True)
class FlightLog:
    """Where the streams of one Executor are: the op begun last and for how long, in seconds."""

    rank: int
    program: Program
    streams: Mapping[str, tuple[int, float]]

    @property
    def under_way(self) -> bool:
        return any(op >= 0 for op, _ in self.streams.values())

    def is_like(self, other: FlightLog) -> bool:
        """Returns True if this may be another rank's part of the same Program."""
        mine, its = self.program, other.program
        return mine.params == its.params and mine.streams() == its.streams()


def flight_log(rank: int, text: str, streams: Mapping[str, tuple[int, float]]) -> FlightLog:
    """A flight log from what its file says. Raises RecordingError."""
    try:
        program = parse(text, file="<flight log>")
        known = validate(program).streams()
    except InterlaceError as error:
        raise RecordingError(shown(str(error))) from None
    for name, (op, _) in streams.items():
        if name not in known or not DONE <= op < len(program.ops):
            raise RecordingError(f"a flight log has a stream {shown(name)!r} at op {op}")
    if program.rank != rank or set(known) != set(streams):
        raise RecordingError("a flight log does not fit its Program")
    return FlightLog(rank, program, streams)


@dataclass(frozen=True, slots=True)
class _Stand:
    """The op that a stream has begun."""

    rank: int
    stream: str
    op: int
    held: float
    waits_for: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    """Ranks of which an op has not been done, and these ops."""


def stalled(
    logs: Sequence[FlightLog], absent: Sequence[int]
) -> tuple[list[RecordedFinding], list[str]]:
    """The Programs that are under way on some rank: who holds up whom."""
    named: dict[str, list[FlightLog]] = defaultdict(list)
    for log in logs:
        named[log.program.name].append(log)
    findings: list[RecordedFinding] = []
    assumed: list[str] = []
    for name, same_name in named.items():
        running = [log for log in same_name if log.under_way]
        if not running:
            continue
        # Programs of one rank may share a name: the last of these counts.
        by_rank = {
            log.rank: log
            for log in sorted(same_name, key=lambda log: (log.under_way, log.is_like(running[0])))
        }
        assumed.append(f"Program {shown(name)}: all ranks are taken to be in the same run of it")
        try:
            findings += _Stalled(name, by_rank, absent).findings()
        except InterlaceError as error:
            raise RecordingError(f"Program {shown(name)}: {shown(str(error))}") from None
    return findings, assumed


class _Stalled:
    """One Program under way."""

    def __init__(self, name: str, logs: Mapping[int, FlightLog], absent: Sequence[int]) -> None:
        self.name, self.logs = name, logs
        self.late: set[int] = set()
        self.absent = [
            rank for rank in absent if any(rank in log.program.world for log in logs.values())
        ]
        regions = Regions()
        sources = [lower(logs[rank].program, regions, number=k) for k, rank in enumerate(logs)]
        builder = GraphBuilder(sources, regions)
        self.graph = builder.build()
        self.begins = set(self.graph.begins.values())
        self.nodes: dict[tuple[int, int], list[int]] = defaultdict(list)
        for node, part in enumerate(self.graph.part):
            if part is not None:
                self.nodes[part[0].rank, part[1].index].append(node)

    def is_done(self, node: int) -> bool:
        part = self.graph.part[node]
        if part is None:
            return all(self.is_done(before) for before in self.graph.awaited(node))
        place, item = part
        log = self.logs[place.rank]
        if place.rank in self.late:
            return False
        if item.op is None:  # the begin or the end of the run
            return item.begins_run
        stands, _ = log.streams[log.program.ops[item.index].stream]
        if stands < 0:
            return stands == DONE
        at = item.index
        return at < stands or (at == stands and node in self.begins)

    def stands(self) -> list[_Stand]:
        """The op that each stream has begun, with what it waits for."""
        found = [
            _Stand(rank, stream, op, held)
            for rank, log in self.logs.items()
            for stream, (op, held) in log.streams.items()
            if op >= 0
        ]
        for stand in found:
            self.waits(stand)
        return found

    def at_rest(self, where: int) -> list[int]:
        """Ranks that are before or behind all that they do in a run."""
        return [
            rank
            for rank, log in self.logs.items()
            if all(op == where for op, _ in log.streams.values())
        ]

    def must_wait(self, stand: _Stand) -> bool:
        """Returns True if an op takes time only where it waits."""
        order = self.logs[stand.rank].program.ops[stand.op].ordering()
        return bool(order.expects or order.meets or order.messages or order.takes)

    def waits(self, stand: _Stand) -> None:
        """Collects the unfinished ops that an op which was begun comes after."""
        todo = list(self.nodes[stand.rank, stand.op])
        seen = set(todo)
        while todo:
            for before in self.graph.awaited(todo.pop()):
                if before in seen:
                    continue
                seen.add(before)
                part = self.graph.part[before]
                if part is None or (part[0].rank, part[1].index) == (stand.rank, stand.op):
                    todo.append(before)
                elif not self.is_done(before):
                    stand.waits_for[part[0].rank].add(part[1].index)

    def findings(self) -> Iterator[RecordedFinding]:
        stands = self.stands()
        idle = self.at_rest(DONE)
        if idle and any(self.must_wait(stand) for stand in stands if not stand.waits_for):
            # Nothing that they did in this run holds anyone up: they are still to begin it.
            self.late |= set(idle)
            stands = self.stands()
        late = sorted({*self.late, *self.at_rest(NOT_BEGUN)})
        free = [stand for stand in stands if not stand.waits_for]
        waiting = [stand for stand in stands if stand.waits_for]
        ranks = sorted({stand.rank for stand in waiting})
        ops = [self.shown(stand) for stand in waiting[:NUM_SHOWN]]
        name = f"Program {shown(self.name)}"
        if late:
            missing, message = late, f"{ranks_in_words(late)} did not begin {name}"
        elif self.absent:
            missing = self.absent
            message = f"{ranks_in_words(missing)} left no flight log of {name}"
        elif free:
            missing = sorted({stand.rank for stand in free})
            verb = "stands" if len(missing) == 1 else "stand"
            message = f"{ranks_in_words(missing)} of {name} {verb} in an op that waits for nothing"
            ops = [*(self.shown(stand) for stand in free[:NUM_SHOWN]), *ops]
        else:
            missing, message = ranks, f"all streams of {name} wait for each other"
        if ranks:
            message += f"; {ranks_in_words(ranks)} wait"
        fix = "look where the host and the device of these ranks are (py-spy dump, their logs)"
        yield fault("stalled", message, ops, fix, ranks, missing)

    def shown(self, stand: _Stand) -> RecordedOp:
        program = self.logs[stand.rank].program
        op = program.ops[stand.op]
        awaited = [
            f"{self.text(rank, min(ops))} of rank {rank}"
            for rank, ops in sorted(stand.waits_for.items())[:2]
        ]
        role = f"op {stand.op}, begun {stand.held:.3g} s ago, waits for "
        role += " and ".join(awaited) or "nothing"
        return unrecorded(stand.rank, shown(print_op(op, program)), role, op.loc.module)

    def text(self, rank: int, index: int) -> str:
        program = self.logs[rank].program
        if not 0 <= index < len(program.ops):
            return "the end of the run"
        return f"`{shown(print_op(program.ops[index], program))}`"
