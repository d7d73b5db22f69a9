"""The fix of a fault: one for each kind, as edits of the ops, proved before it is printed.

    fix = fixes.race(pairs)            # edits; none where only words help
    edited = apply(programs, fix)      # the Programs with every edit made
    describe(programs, fix)            # "after line 2 add `main: record(e1)`, before line 4 ..."

A fix need not be right, only likely. It is proved when someone reads it: the Programs are checked
with it, and only where the finding is gone is it printed. Else the finding says in words what has
to change.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import NamedTuple

from interlace.errors import InterlaceError
from interlace.ir.ops import Expect, Free, Group, Notify, Op, Record, Recv, Send, Wait
from interlace.ir.program import Program, spots
from interlace.ir.text.printer import print_lines, print_op
from interlace.ir.types import Index, Others, RankIndex
from interlace.verify.graph import Part
from interlace.verify.report import Edit, Finding, Fix, Report
from interlace.verify.source import Flaw, LoweredProgram
from interlace.verify.sweep import ByteAccess

MAX_WORK = 200_000
"""Work of the proofs of one Report at most, in ops that are checked: some seconds. The fixes of so
many findings are proved, from the first on; what follows is told in words."""

RankPair = tuple[int, int]


class OpPlace(NamedTuple):
    """An op of a Program, its begin (-1) or its return, with its stream."""

    program: int
    at: int
    stream: str


class Fixes:
    """Builds the fixes for faults of one set of Programs."""

    def __init__(self, sources: Sequence[LoweredProgram]) -> None:
        self.sources = sources

    def names(self, letter: str) -> Iterator[str]:
        """Names that no event, signal or buffer of the set has."""
        taken = self._taken
        return (name for name in (f"{letter}{n}" for n in itertools.count(1)) if name not in taken)

    @cached_property
    def _taken(self) -> set[str]:
        programs = [source.program for source in self.sources]
        taken = {name for program in programs for name in program.buffers()}
        for ordering in [op.ordering() for program in programs for _, op in spots(program.ops)]:
            taken |= {name for name in (ordering.records, ordering.waits) if name}
            levels = (ordering.raises, ordering.expects)
            taken |= {level.signal for level in levels if level is not None}
        return taken

    # Races: an event on one rank, signals between ranks

    def race(self, pairs: Sequence[tuple[ByteAccess, ByteAccess]]) -> Fix:
        """Orders two accesses, of which the first had better come first."""
        first, second = pairs[0]
        if first.free and first.item.ordering.frees is not None:
            return self.free_later(first.place.source, first.item.version)
        if second.free and second.item.ordering.takes is not None:
            return self.alloc_sooner(second.place.source, second.item.version)
        one, two = (_place(e.place.source, e.item.index) for e in (first, second))
        ranks = {(a.place.rank, b.place.rank) for a, b in pairs}
        cross = {(a, b) for a, b in ranks if a != b}
        event = self._event(one, two) if len(cross) < len(ranks) else ()
        signals = self._signals(one, two, cross) if cross else ()
        complete = bool(event) == (len(cross) < len(ranks)) and bool(signals) == bool(cross)
        return (*event, *signals) if complete else ()

    def _event(self, one: OpPlace, two: OpPlace) -> Fix:
        """One op before another that is listed later, by a recorded or a new event."""
        if one.program != two.program or one.at >= two.at or one.stream == two.stream:
            return ()
        last: dict[str, str] = {}
        for op in self.sources[one.program].program.ops[max(one.at, 0) : two.at]:
            for member in op.steps:
                if (event := member.ordering().records) is not None:
                    last[event] = op.stream
        recorded = next((name for name, stream in last.items() if stream == one.stream), None)
        event = recorded or next(self.names("e"))
        wait = _before(two, Wait(event=event, stream=two.stream))
        return (wait,) if recorded else (_after(one, Record(event=event, stream=one.stream)), wait)

    def _signals(self, one: OpPlace, two: OpPlace, ranks: set[RankPair]) -> Fix:
        """Signals from the ranks of one op to those of the other, in the team that takes fewest."""
        source, sink = self.sources[one.program].program, self.sources[two.program].program
        teams = _shared_teams(source, sink, ranks)
        if not teams:
            return ()
        team, offsets = min(teams, key=lambda pair: len(pair[1]))
        ends: list[tuple[Index | Others, Index | Others]]
        ends = [(RankIndex(team, k), RankIndex(team, -k)) for k in offsets]
        if source.rank is not None:
            ((a, b),) = ranks
            member = source.where(a).member(team)
            ends = [(member.ranks.index(b), member.index)]
        elif 1 < len(offsets) == source.team(team).size - 1:
            ends = [(Others(team), Others(team))]
        edits: list[Edit] = []
        for name, (to, of) in zip(self.names("s"), ends, strict=False):
            notify = Notify(signal=name, peer=to, team=team, stream=one.stream)
            expect = Expect(signal=name, peer=of, team=team, stream=two.stream)
            edits += [_after(one, notify), _before(two, expect)]
        return tuple(edits)

    # Lifetimes, and other faults of the list

    def flaw(self, source: LoweredProgram, flaw: Flaw) -> Fix:
        """For a fault of the list order alone."""
        k, items = source.number, [item for item, _, _ in flaw.ops]
        match flaw.kind:
            case "leak":
                return self.free_later(source, items[0].version)
            case "double-free" | "bad-free":
                return (Edit(k, index=items[-1].index),)
            case "use-before-alloc":
                number = next(n for n, v in enumerate(source.versions) if v.alloc == items[1].index)
                return self.alloc_sooner(source, number)
            case "event" if len(items) > 1 and items[0].op is source.program.ops[items[0].index]:
                return (Edit(k, index=items[1].index, anchor=items[0].index),)
            case _:
                return ()

    def free_later(self, source: LoweredProgram, number: int) -> Fix:
        """A Free after all uses, by list order and by events; added where there is none."""
        version, ops, k = source.versions[number], source.program.ops, source.number
        if version.alloc < 0 or any(touch.version == number for touch in source.exit.touches):
            return ()
        uses = {ops[i].stream: i for i in source.uses(number) or [version.alloc]}
        last = max(uses.values())
        stream = ops[version.free if version.free >= 0 else last].stream
        edits: list[Edit] = []
        others = [(other, use) for other, use in uses.items() if other != stream]
        for event, (other, use) in zip(self.names("e"), others, strict=False):
            edits += [
                Edit(k, Record(event=event, stream=other), anchor=use, after=True),
                Edit(k, Wait(event=event, stream=stream), anchor=last, after=True),
            ]
        if version.free >= 0:
            return (*edits, Edit(k, index=version.free, anchor=last, after=True))
        free = Free(buffer=version.buffer.name, stream=stream)
        return (*edits, Edit(k, free, anchor=last, after=True))

    def alloc_sooner(self, source: LoweredProgram, number: int) -> Fix:
        """An Alloc before the first use, by list order and by an event."""
        version, ops, k = source.versions[number], source.program.ops, source.number
        uses = source.uses(number)
        if not uses or version.alloc < 0 or uses[0] > version.alloc:
            return ()
        at, own, other = uses[0], ops[version.alloc].stream, ops[uses[0]].stream
        alloc = Edit(k, index=version.alloc, anchor=at)
        if own == other:
            return (alloc,)
        event = next(self.names("e"))
        record = Edit(k, Record(event=event, stream=own), anchor=at)
        return alloc, record, Edit(k, Wait(event=event, stream=other), anchor=at)

    # Deadlocks

    def cycle(self, links: Iterable[tuple[Part, Part]]) -> Fix:
        """Opens a cycle of waits: of each pair, on one rank, the first op waits for the second."""
        for (place, item), (_, other) in links:
            source = place.source
            low, high = sorted((item.index, other.index))
            if 0 <= low < high < len(source.program.ops):
                return _grouped(source, low, high) or (Edit(source.number, index=high, anchor=low),)
        return ()

    def never(self, part: Part) -> Fix:
        """For an op that waits for what never comes: the Notify that an Expect lacks, where the
        writer has written; a message without its other end is taken out."""
        (place, item), op = part, part[1].op
        source, where = place.source, place.where
        if item.ordering.messages and not item.members:
            return (Edit(source.number, index=item.index),)
        if not isinstance(op, Expect):
            return ()
        member = where.member(op.team)
        to: Index | Others = Others(op.team)
        writers = {*member.ranks} - {place.rank}
        if not isinstance(op.peer, Others):
            writers = {member.ranks[where.index(op.peer)]}
            if source.program.rank is not None:
                to = member.index
            elif isinstance(op.peer, RankIndex) and op.peer.team == op.team:
                to = RankIndex(op.team, -op.peer.offset)
        sources = [one for one in self.sources if writers & {*one.ranks}]
        ops = sources[0].program.ops if len(sources) == 1 else ()
        if not ops or (source.program.rank is not None and sources == [source]):
            return ()
        at = max((i for i in range(len(ops)) if _writes_to_team(sources[0], i)), default=-1)
        at = at if at >= 0 else len(ops) - 1
        notify = Notify(
            signal=op.signal, peer=to, team=op.team, value=op.value, stream=ops[at].stream
        )
        return (Edit(sources[0].number, notify, anchor=at, after=True),)


def _place(source: LoweredProgram, index: int) -> OpPlace:
    ops = source.program.ops
    op = ops[index] if 0 <= index < len(ops) else None
    stream = op.stream if op is not None else source.streams[0].partition(", part")[0]
    return OpPlace(source.number, index, stream)


def _after(place: OpPlace, op: Op) -> Edit:
    """Adds an op right after another, or at the begin."""
    return Edit(place.program, op, anchor=max(place.at, 0), after=place.at >= 0)


def _before(place: OpPlace, op: Op) -> Edit:
    """Adds an op right before another, or at the end."""
    return Edit(place.program, op, anchor=max(place.at, 0))


def _shared_teams(
    source: Program, sink: Program, ranks: set[RankPair]
) -> list[tuple[str, list[int]]]:
    """The teams that hold each of the pairs, with the distances in them."""
    if (source.rank is None) != (sink.rank is None):
        return []
    shared = {team.name for team in sink.teams}
    teams: list[tuple[str, list[int]]] = []
    for team in source.teams:
        offsets: set[int] = set()
        for a, b in ranks:
            member = source.where(a).members.get(team.name)
            if team.name not in shared or member is None or b not in member.ranks:
                break
            offsets.add((member.ranks.index(b) - member.index) % len(member.ranks))
        else:
            near = {k if 2 * k <= team.size else k - team.size for k in offsets}
            teams.append((team.name, sorted(near, key=abs)))
    return teams


def _grouped(source: LoweredProgram, low: int, high: int) -> Fix:
    """Two messages as one group."""
    members: list[Send | Recv] = []
    for op in (first := source.program.ops[low], source.program.ops[high]):
        if isinstance(op, Group):
            members += op.ops
        elif isinstance(op, Send | Recv):
            members.append(op)
        else:
            return ()
    both = tuple(dataclasses.replace(one, stream=first.stream) for one in members)
    group = Group(ops=both, stream=first.stream, site=first.site, loc=first.loc)
    return Edit(source.number, group, index=low), Edit(source.number, index=high)


def _writes_to_team(source: LoweredProgram, index: int) -> bool:
    """Returns True if an op writes a buffer that peers read."""
    item = source.items[index]
    return any(
        touch.write and source.versions[touch.version].buffer.team is not None
        for one in (item, *item.members)
        for touch in one.touches
    )


# Edits: applied exactly, and described line by line


class Edited(NamedTuple):
    """Programs with a fix applied."""

    programs: tuple[Program, ...]
    origins: tuple[tuple[int | None, ...], ...]
    """For each Program, the index that each op (and the return) had before; None: it is new."""


def apply(programs: Sequence[Program], fix: Iterable[Edit]) -> Edited:
    """The Programs with every edit made."""
    edits = list(fix)
    pairs = [_edited(p, [e for e in edits if e.program == k]) for k, p in enumerate(programs)]
    return Edited(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))


def _edited(program: Program, edits: list[Edit]) -> tuple[Program, tuple[int | None, ...]]:
    ops, count = program.ops, len(program.ops)
    stays: list[Op | None] = list(ops)
    around = defaultdict[tuple[int, bool], list[tuple[Op, int | None]]](list)
    for edit in edits:
        if edit.index is not None:
            stays[edit.index] = edit.op if edit.anchor is None else None
        if edit.anchor is None:
            continue
        op = edit.op if edit.op is not None else ops[edit.index or 0]
        if edit.index is None and ops:
            op = dataclasses.replace(op, loc=ops[min(edit.anchor, count - 1)].loc)
        around[edit.anchor, edit.after].append((op, edit.index))
    placed: list[tuple[Op, int | None]] = []
    for i in range(count + 1):
        op = stays[i] if i < count else None
        placed += [*around[i, False], *([] if op is None else [(op, i)]), *around[i, True]]
    return program.replace(ops=tuple(op for op, _ in placed)), (*(i for _, i in placed), count)


def describe(programs: Sequence[Program], fix: Fix) -> str:
    """The fix in words, line by line, complete."""
    said: list[str] = []
    last: Edit | None = None
    lines_of = {k: line_numbers(programs[k]) for k in {edit.program for edit in fix}}
    for edit in fix:
        program, lines = programs[edit.program], lines_of[edit.program]
        on = _on_ranks(programs, program)
        text = "" if edit.op is None else f"`{print_op(edit.op, program)}`"
        where = ""
        if edit.anchor is not None:
            where = f"{'after' if edit.after else 'before'} line {lines[edit.anchor]}{on}"
            if edit.anchor == len(program.ops):
                where = f"at the end{on}"
        if edit.index is None:
            if last is not None and last == dataclasses.replace(edit, op=last.op):
                said[-1] += f" then {text}"
            else:
                said.append(f"{where} add {text}")
        elif edit.anchor is not None:
            said.append(f"move line {lines[edit.index]} {where}")
        elif edit.op is not None:
            said.append(f"replace line {lines[edit.index]}{on} by {text}")
        else:
            said.append(f"remove line {lines[edit.index]}{on}")
        last = edit
    return ", ".join(said)


def _on_ranks(programs: Sequence[Program], program: Program) -> str:
    """The ranks that run a Program of a set; nothing where there is one Program."""
    if len(programs) == 1:
        return ""
    ranks = program.world if program.rank is None else (program.rank,)
    if len(ranks) > 4 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f" on ranks {ranks[0]} to {ranks[-1]}"
    return f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def line_numbers(program: Program) -> list[int]:
    """The line of every op and of the return: in the file, or in the printed text of a Program
    that is no file's as it stands (passes that move and divide ops leave each its line)."""
    known = [
        op.loc.text or (op.loc.file, 0 if op.loc.module else op.loc.line) for op in program.ops
    ]
    lines = [line for _, line in known]
    if known and len({file for file, _ in known}) == 1 and lines[0]:
        if all(one < two for one, two in itertools.pairwise(lines)):
            return [*lines, lines[-1] + 1]
    firsts: dict[int, int] = {}
    end = 0
    for end, line in enumerate(print_lines(program), 1):
        family, index = line.tag
        if family == "op":
            firsts.setdefault(index, end)
    return [*(firsts[i] for i in range(len(program.ops))), end + (program.results is None)]


# Proofs

Key = tuple[str, frozenset[tuple[int, int | None]]]
"""The subject of a finding: its kind, and its ops by Program and index."""


def with_fixes(
    report: Report, programs: Sequence[Program], again: Callable[..., Report], work: int
) -> Report:
    """The Report with errors that prove their fix when it is read. `again` checks Programs as the
    Report's own were checked, which is as much `work` as checking so many ops."""
    prover = _Prover(tuple(programs), report, again)
    findings = list(report.findings)
    for i, one in enumerate(findings):
        proved = None
        if one.propose is not None and (i + 1) * work <= MAX_WORK:
            proved = cache(partial(prover.prove, one, one.propose))
        findings[i] = dataclasses.replace(one, propose=None, proved=proved)
    return dataclasses.replace(report, findings=tuple(findings))


@dataclass
class _Prover:
    programs: tuple[Program, ...]
    report: Report
    again: Callable[..., Report]

    def prove(self, finding: Finding, propose: Callable[[], Fix]) -> tuple[str, Fix]:
        """The fix in words and as edits, if it is one; else the words of the finding alone."""
        fix = propose()
        if not fix:
            return finding.words, ()
        edited = apply(self.programs, fix)
        try:
            after = self.again(edited.programs)
            keeps_order = not self.ends_in_order or self._ends_in_order(edited.programs)
        except InterlaceError:
            return finding.words, ()
        own, before = _key(finding), frozenset(map(_key, self.report.errors))
        keys = {_key(one, edited.origins): one.kind for one in after.errors}
        fresh = keys.keys() - before
        if finding.kind == "deadlock":  # once it is gone, other faults may show behind it
            ops = own[1] | {(edit.program, edit.index) for edit in fix}
            opens = all(isinstance(edit.op, Notify) and edit.index is None for edit in fix)
            stuck = () if opens else ("deadlock",)  # a new Notify makes nothing wait
            better = all(key[0] not in stuck and not key[1] & ops for key in fresh)
        else:
            fewer = _num_errors(after) < _num_errors(self.report)
            better = fewer and {key[0] for key in fresh} <= self.report.kinds()
        if own in keys or not better or not keeps_order:
            return finding.words, ()
        kinds = ", ".join(dict.fromkeys(kind for key, kind in keys.items() if key in fresh))
        more = f", then check again: other faults show then ({kinds})" if kinds else ""
        return describe(self.programs, fix) + more, fix

    @cached_property
    def ends_in_order(self) -> bool:
        """True if no deadlock occurs where each rank runs one op after another, as listed."""
        return self._ends_in_order(self.programs)

    def _ends_in_order(self, programs: Sequence[Program]) -> bool:
        return "deadlock" not in self.again(programs, in_order=True).kinds()


def _num_errors(report: Report) -> int:
    return len(report.errors) + report.num_left_out


def _key(finding: Finding, origins: Sequence[Sequence[int | None]] | None = None) -> Key:
    """The subject of a finding; of edited Programs, in terms of those before."""
    ops: set[tuple[int, int | None]] = set()
    for program, index in [op.at for op in finding.ops]:
        begin = index < 0  # of the run, before the first op
        ops.add((program, index if origins is None or begin else origins[program][index]))
    return finding.kind, frozenset(ops)
