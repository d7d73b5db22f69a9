"""Changes of the ops of Programs, as data: applied exactly, described line by line, and proved.

    edited = apply(programs, fix).programs
    describe(programs, fix)     # "after line 2 add `main: record(e1)`, before line 4 add ..."

The fix of a finding (fixes.py) is proved when someone reads it: the Programs are checked with it,
and only where the finding is gone is it printed. Else the finding says in words what has to change.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import NamedTuple

from interlace.errors import InterlaceError
from interlace.ir.ops import Notify, Op
from interlace.ir.program import Program
from interlace.ir.text.printer import print_lines, print_op
from interlace.verify.report import Finding, Report

MAX_WORK = 200_000
"""Work of the proofs of one Report at most, in ops that are checked: some seconds. The fixes of so
many findings are proved, from the first on; what follows is told in words."""


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of one Program: an op is added, moved, replaced or removed.

    `index` is the op that leaves its place (None: an op is added) and `op` what is written instead
    (None: itself). It goes right after or right before the op `anchor`; without an anchor it goes
    where `index` stood, and without `op` nowhere. Op `len(ops)` is the end of the Program. Edits
    with the same anchor keep their order.
    """

    program: int
    """The index of the Program in its set."""
    op: Op | None = None
    index: int | None = None
    anchor: int | None = None
    after: bool = False


Fix = tuple[Edit, ...]


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
        side, where = "after" if edit.after else "before", ""
        if edit.anchor is not None:
            end = "at the end" if edit.index is None else "to the end"
            at_end = edit.anchor == len(program.ops)
            where = f"{end if at_end else f'{side} line {lines[edit.anchor]}'}{on}"
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


def line_numbers(program: Program, texts: dict[int, str] | None = None) -> list[int]:
    """The line of every op and of the return: in the file, or in the printed text of a Program
    that is no file's as it stands (passes that move and divide ops leave each its line). Of what is
    printed for this, `texts` gets the ops of one line, by index."""
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
        if family != "op":
            continue
        first = firsts.setdefault(index, end) == end
        if texts is not None and first:
            texts[index] = line.text.strip()
        elif texts is not None:  # as one line it is another
            texts.pop(index, None)
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
    findings: list[Finding] = []
    for number, finding in enumerate(report.findings, 1):
        fix = finding.propose() if finding.propose and number * work <= MAX_WORK else ()
        proved = cache(partial(prover.prove, finding, fix)) if fix else None
        findings.append(dataclasses.replace(finding, propose=None, proved=proved))
    return dataclasses.replace(report, findings=tuple(findings))


@dataclass
class _Prover:
    programs: tuple[Program, ...]
    report: Report
    again: Callable[..., Report]

    def prove(self, finding: Finding, fix: Fix) -> tuple[str, Fix]:
        """The fix in words and as edits, if it is one; else the words of the finding alone."""
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
