"""Changes of the ops of Programs, as data: applied exactly, and described line by line.

edited = apply(programs, fix).programs
describe(programs, fix)     # "after line 2 add `main: record(e1)`, before line 4 add ..."
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from interlace.ir.ops import Op
from interlace.ir.program import Program
from interlace.ir.text.printer import print_lines, print_op


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of one Program: an op is added, moved, replaced or removed.

    `index` is the op that leaves its place (None: an op is added) and `op` what is written instead
    (None: itself). It goes right after or right before the op `anchor`, which stays where it is;
    without an anchor it goes where `index` stood, and without `op` nowhere. Op `len(ops)` is the
    end of the Program. Edits with the same anchor keep their order.
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


class Unfit(Exception):
    """Edits that cannot be applied together."""


def apply(programs: Sequence[Program], fix: Iterable[Edit]) -> Edited:
    """The Programs with every edit made."""
    edits = list(fix)
    pairs = [_edited(p, [e for e in edits if e.program == k]) for k, p in enumerate(programs)]
    return Edited(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs))


def _edited(program: Program, edits: list[Edit]) -> tuple[Program, tuple[int | None, ...]]:
    ops, count = program.ops, len(program.ops)
    if not edits:
        return program, tuple(range(count + 1))
    places: dict[tuple[int, bool], list[tuple[Op, int | None]]] = {}
    stays: list[Op | None] = list(ops)
    for edit in edits:
        if edit.index is not None:
            if stays[edit.index] is not ops[edit.index]:
                raise Unfit("one op cannot leave its place twice")
            stays[edit.index] = edit.op if edit.anchor is None else None
        if edit.anchor is None:
            continue
        op = edit.op if edit.op is not None else ops[edit.index or 0]
        if edit.index is None and ops:
            op = dataclasses.replace(op, loc=ops[min(edit.anchor, count - 1)].loc)
        places.setdefault((edit.anchor, edit.after), []).append((op, edit.index))
    found: list[tuple[Op, int | None]] = []
    for i, op in enumerate(stays):
        before, after = places.get((i, False), []), places.get((i, True), [])
        if op is None and (before or after):
            raise Unfit("an op that leaves its place is no anchor")
        found += [*before, *([] if op is None else [(op, i)]), *after]
    found += places.get((count, False), [])
    return program.replace(ops=tuple(op for op, _ in found)), (*(i for _, i in found), count)


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
            said.append(f"move line {lines[edit.index]} {where}{text and f' as {text}'}")
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
    found: dict[int, int] = {}
    end = 0
    for end, line in enumerate(print_lines(program), 1):
        family, index = line.tag
        if family != "op":
            continue
        first = found.setdefault(index, end) == end
        if texts is not None and first:
            texts[index] = line.text.strip()
        elif texts is not None:  # as one line it is another
            texts.pop(index, None)
    return [*(found[i] for i in range(len(program.ops))), end + (program.results is None)]
