"""The account of a measured run: which ops, waits and gaps its milliseconds went to.

    lines = account(program, executor.timeline())          # they add up to the run's makespan
    for row in account_rows(lines):
        print(row)
    lines = beyond(lines, {"matmuls": 3.1e-3}, alone)      # and over a run without communication

At each moment something computes, or else something communicates (it is exposed), or else nothing
runs: the stream of the op that runs next then waits for a signal or a slot, or its host is late (a
launch). Where it waits for an event, the stream that is to record it is asked in turn; an event
that is recorded counts as itself. A moment in which matmuls compute is theirs: what is done beside
them costs nothing. Other ops that compute at the same moment share it.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from interlace.cost.op_times import at_hand, matmul_shape
from interlace.cost.timeline import Span, Timeline
from interlace.errors import InputError
from interlace.ir import Copy, Program, bindings
from interlace.ir.operators import MATMUL_NAMES, base_of, is_attention
from interlace.ir.program import calls_in
from interlace.trace.figures import milliseconds

CHANGES = {
    "exposed communication": "the site: its strategy, its chunks",
    "idle, event": "the op that records it: its place in the schedule",
    "idle, signal": "the peers: what they do before they notify",
    "idle, slot": "the peers: what reads the slot last",
    "idle, launch": "the host: graph=True, or fewer ops",
    "matmuls slower than alone": "what runs beside it, or its layout",
    "matmuls in chunks": "the sites' strategy: fewer or larger chunks",
    "matmuls": "",
    "attention": "",
    "copies": "the site: a strategy without slots",
    "sums": "the site: fewer parts",
    "elementwise": 'regions="inductor"; what stands between calls of a region',
    "boundaries": "fewer graphs: explain(model, why=True); graph=True",
    "recording": "",
    "rest": "",
}
"""Parts of an account, in the order in which they are shown, and where to change each."""
HEADINGS = ("part", "ms", "what, and where to change it", "module", "ops")
OpId = tuple[str, int]
"""The name of a Program, and an op's place in it."""


@dataclass(frozen=True, slots=True)
class AccountLine:
    """Seconds of a run that have one reason."""

    part: str
    """A name of `CHANGES`."""
    what: str
    """The site, the kernel, or what waited for what."""
    module: str = ""
    seconds: float = 0.0
    ops: tuple[OpId, ...] = ()

    @property
    def layer(self) -> str:
        """The path of the layer that the module is, or is in: up to its first number."""
        found = re.match(r"(?:.*?\.)??\d+(?=\.|$)", self.module)
        return found.group() if found else ""


def account(program: Program, timeline: Timeline) -> list[AccountLine]:
    """The lines of a rank's measured run, which add up to its makespan, the longest first.

    Args:
        program: the Program that ran.
        timeline: its spans on one rank, as `Executor.timeline` gives them.

    Raises:
        InputError: the timeline is of several ranks.
    """
    if len(timeline.ranks) > 1:
        raise InputError(
            f"an account is of one rank, and this timeline of {len(timeline.ranks)}. fix: give "
            "timeline.of(rank=0)"
        )
    reasons = _Reasons(program, timeline)
    return divided(timeline.spans, reasons.of_busy, reasons.of_idle)


def divided(
    spans: Sequence[Span],
    of_busy: Callable[[Span], AccountLine],
    of_idle: Callable[[float], AccountLine],
) -> list[AccountLine]:
    """The time from the first start to the last end, by the lines that the functions give for a
    span that runs, and for a moment at which nothing does."""
    edges = sorted({edge for span in spans for edge in (span.start_s, span.end_s)})
    starts, ends = defaultdict[float, list[int]](list), defaultdict[float, list[int]](list)
    for number, span in enumerate(spans):
        starts[span.start_s].append(number)
        ends[span.end_s].append(number)
    seconds = defaultdict[tuple[str, str, str], float](float)
    ops = defaultdict[tuple[str, str, str], dict[OpId, None]](dict)
    active: dict[str, set[int]] = {"compute": set(), "comm": set()}
    for start, end in pairwise(edges):
        for number in ends[start]:
            active.get(spans[number].kind, set()).discard(number)
        for number in starts[start]:
            if spans[number].end_s > start:  # else its end is behind us already
                active.get(spans[number].kind, set()).add(number)
        busy = active["compute"] or active["comm"]
        reasons = [of_busy(spans[number]) for number in busy] or [of_idle((start + end) / 2)]
        reasons = [reason for reason in reasons if reason.part == "matmuls"] or reasons
        for reason in reasons:
            key = reason.part, reason.what, reason.module
            seconds[key] += (end - start) / len(reasons)
            ops[key] |= dict.fromkeys(reason.ops)
    found = [AccountLine(*key, taken, tuple(ops[key])) for key, taken in seconds.items()]
    return sorted(found, key=lambda line: -line.seconds)


class _Reasons:
    """Names of what ran in a run of a Program, and of what was waited for."""

    def __init__(self, program: Program, timeline: Timeline) -> None:
        self.program, self.records = program, bindings(program.ops)
        self.sites = {site.id: site for site in program.sites}
        rank = (timeline.ranks or (0,))[0]
        self.box = at_hand(program.boxes(rank))
        self.streams: dict[str, list[Span]] = {}
        for span in sorted(timeline.spans, key=lambda span: span.start_s):
            self.streams.setdefault(span.stream, []).append(span)
        busy = [span for span in timeline.spans if span.kind in ("compute", "comm")]
        self.busy = sorted(busy, key=lambda span: span.start_s)
        self.ends = {span.op_index: span.end_s for span in timeline.spans}
        self.known: dict[int, AccountLine] = {}

    def of_busy(self, span: Span) -> AccountLine:
        """A line for what an op does."""
        index = span.op_index
        if index not in self.known:
            self.known[index] = self._line(index, *self._named(span))
        return self.known[index]

    def _line(self, index: int, part: str, what: str, module: str = "") -> AccountLine:
        op = self.program.ops[index]
        site = self.sites.get(op.site or 0)
        module = module or op.loc.module or (site.module if site else "")
        return AccountLine(part, what, module, ops=((self.program.name, index),))

    def _named(self, span: Span) -> tuple[str, ...]:
        op, site = self.program.ops[span.op_index], self.sites.get(span.site or 0)
        if span.kind == "comm":
            if site is None:
                return "exposed communication", span.name
            return (
                "exposed communication",
                f"site {site.id} {site.kind} {site.strategy}",
                site.module,
            )
        if isinstance(op, Copy):
            return "copies", "copy"
        calls = list(calls_in((op,)))
        for call in calls:
            if base_of(call.fn) in MATMUL_NAMES:
                shape = matmul_shape(call, self.box)
                sizes = shape and f" {shape.rows}x{shape.inner}x{shape.columns}"
                return "matmuls", f"{span.name}{sizes or ''}"
        if any(is_attention(call.fn) for call in calls):
            return "attention", span.name
        return "elementwise" if op.site is None else "sums", span.name

    def of_idle(self, at: float) -> AccountLine:
        """A line for what was awaited at a moment at which nothing ran."""
        place = bisect_right(self.busy, at, key=lambda span: span.start_s)
        follower = (self.busy[place:] or self.busy[-1:] or [None])[0]
        stream = follower.stream if follower else next(iter(self.streams))
        waiter = follower.name if follower else "the end"
        passed = set[str]()
        while stream not in passed:
            passed.add(stream)
            spans = self.streams.get(stream, [])
            place = bisect_right(spans, at, key=lambda span: span.start_s) - 1
            if place < 0 or spans[place].end_s <= at:
                break  # its host has not come to the next op
            index = spans[place].op_index
            ordering, wait = self.program.ops[index].ordering(), f"{waiter} < {spans[place].name}"
            if ordering.expects or ordering.meets or ordering.messages:
                return self._line(index, "idle, signal", wait)
            if ordering.takes is not None and ordering.takes.team is not None:
                return self._line(index, "idle, slot", wait)
            if (index, 0) not in self.records:
                break
            record = self.records[index, 0][0]
            stream = self.program.ops[record].stream
            if self.ends.get(record, at) < at:  # it is recorded: the wait takes that long to end
                return self._line(index, "idle, event", f"{wait} of op {record}")
        spans = self.streams.get(stream, [])
        place = bisect_right(spans, at, key=lambda span: span.start_s)
        late = (spans[place:] or spans[-1:])[0].op_index if spans else 0
        return self._line(late, "idle, launch", "before an op")


# -- over a run without communication ------------------------------------------------------------


def beyond(
    lines: Iterable[AccountLine],
    ideal: Mapping[str, float],
    alone: Mapping[OpId, float] | None = None,
) -> list[AccountLine]:
    """The lines of a run over one without communication: they add up to the difference of both.

    Args:
        lines: the account of the run.
        ideal: seconds of the other run by part, `boundaries` with all in which nothing ran.
        alone: seconds that matmuls take when nothing runs beside them; a matmul that it lacks is
            taken to be as fast as alone.

    Returns:
        Of a matmul the time over that alone, and in one line what all of them take alone over
        those of the other run. Of other computation, and of matmuls without `alone`, each line's
        share of the difference.
    """
    lines, known, left = list(lines), alone or {}, dict(ideal)
    sums, chunks = totals(lines), -left.pop("matmuls", 0.0) if known else 0.0
    found: list[AccountLine] = []
    for line in lines:
        seconds, part = line.seconds, line.part
        if part == "matmuls" and known:
            times = [known[op] for op in line.ops if op in known]
            usual = sum(times) if len(times) == len(line.ops) else seconds
            chunks, seconds, part = chunks + usual, seconds - usual, "matmuls slower than alone"
        elif part != "boundaries" and part in left and part in sums:
            seconds *= 1 - left[part] / sums[part]
        found.append(replace(line, part=part, seconds=seconds))
    found.append(AccountLine("matmuls in chunks", "all, alone, over whole ones", seconds=chunks))
    for part, seconds in left.items():
        if part == "boundaries" or part not in sums:
            found.append(AccountLine(part, "the same without communication", seconds=-seconds))
    return sorted((line for line in found if line.seconds), key=lambda line: -abs(line.seconds))


def totals(lines: Iterable[AccountLine]) -> dict[str, float]:
    """The seconds of each part, in the order of `CHANGES`."""
    seconds = dict.fromkeys(CHANGES, 0.0)
    for line in lines:
        seconds[line.part] += line.seconds
    return {part: taken for part, taken in seconds.items() if taken}


def account_rows(lines: Sequence[AccountLine], most: int = 24) -> list[tuple[str, ...]]:
    """Cells that `HEADINGS` names: each part with its total, and below it its longest lines, of all
    parts together at most so many; what is left of a part is one line."""
    shown = sorted(lines, key=lambda line: -abs(line.seconds))[:most]
    rows: list[tuple[str, ...]] = []
    for part, seconds in totals(lines).items():
        rows.append((part, milliseconds(seconds), CHANGES[part], "", ""))
        own = [line for line in shown if line.part == part]
        for line in own:
            rows.append(("", milliseconds(line.seconds), line.what, line.module, ids(line)))
        rest = seconds - sum(line.seconds for line in own)
        if own and (count := sum(line.part == part for line in lines) - len(own)):
            rows.append(("", milliseconds(rest), f"{count} more", "", ""))
    return rows


def ids(line: AccountLine, most: int = 4) -> str:
    """The ops of a line, such as `backward 12, 15`; of many the first ones."""
    by_program: dict[str, list[str]] = {}
    for name, index in line.ops[:most]:
        by_program.setdefault(name, []).append(str(index))
    text = "; ".join(f"{name} {', '.join(found)}" for name, found in by_program.items())
    return f"{text}, ..." if len(line.ops) > most else text
