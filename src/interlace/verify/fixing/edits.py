"""Changes of the ops of Programs, as data: applied to the letter, and told line by line.

edited = apply(programs, fix).programs
describe(programs, fix)     # "after line 2 add `main: record(e1)`, before line 4 add ..."
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from interlace.ir.ops import Op
from interlace.ir.program import Program
from interlace.ir.text.printer import print_lines, print_op


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of one Program: an op is added, moved, replaced or removed.

    `index` is the op that leaves its place (None: an op is added), `op` what is written instead of
    it (None: itself). It goes right after or right before the op `anchor`, which stays where it
    is; without one it goes where `index` stood, and without `op` nowhere. The op `len(ops)` is the
    end of the Program. Of several that go to one place, the first told comes first.
    """

    program: int
    """The place of the Program in its set."""
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
    """The Programs with every edit made, to the letter."""
    edits: dict[int, list[Edit]] = {}
    for edit in fix:
        edits.setdefault(edit.program, []).append(edit)
    pairs = [_edited(program, edits.get(k, [])) for k, program in enumerate(programs)]
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
        around = places.get((i, False), []), places.get((i, True), [])
        if op is None and any(around):
            raise Unfit("an op that leaves its place is no anchor")
        found += around[0]
        found += [] if op is None else [(op, i)]
        found += around[1]
    found += places.get((count, False), [])
    return program.replace(ops=tuple(op for op, _ in found)), (*(i for _, i in found), count)


def describe(programs: Sequence[Program], fix: Fix) -> str:
    """The fix in words that say all of it, line by line."""
    said: list[str] = []
    for k, edit in enumerate(fix):
        program = programs[edit.program]
        lines = line_numbers(program)
        on = _whose(programs, program)
        text = "" if edit.op is None else f"`{print_op(edit.op, program)}`"
        where = ""
        if edit.anchor is not None:
            where = f"{'after' if edit.after else 'before'} line {lines[edit.anchor]}"
            where = "at the end" if edit.anchor == len(program.ops) else where
        if edit.index is None:
            last = fix[k - 1]
            if k and (last.program, last.anchor, last.after, last.index) == (
                edit.program, edit.anchor, edit.after, None
            ):  # fmt: skip
                said[-1] += f" then {text}"
            else:
                said.append(f"{where}{on} add {text}")
        elif edit.anchor is not None:
            where = where.replace("at the end", "to the end")
            as_ = f" as {text}" if text else ""
            said.append(f"move line {lines[edit.index]} {where}{on}{as_}")
        elif edit.op is not None:
            said.append(f"replace line {lines[edit.index]}{on} by {text}")
        else:
            said.append(f"remove line {lines[edit.index]}{on}")
    return ", ".join(said)


def _whose(programs: Sequence[Program], program: Program) -> str:
    """Which Program of a set a line is of; nothing where there is one."""
    if len(programs) == 1:
        return ""
    ranks = program.world if program.rank is None else (program.rank,)
    if len(ranks) > 4 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f" on ranks {ranks[0]} to {ranks[-1]}"
    return f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def line_numbers(program: Program) -> list[int]:
    """For every op and the return: its line in the file, or in the printed text."""
    if program.ops and all(op.loc.file and op.loc.line and not op.loc.module for op in program.ops):
        lines = [op.loc.line for op in program.ops]
        return [*lines, lines[-1] + 1]
    found: dict[int, int] = {}
    end = 0
    for number, line in enumerate(print_lines(program), 1):
        end = number
        if line.tag[0] == "op":
            found.setdefault(line.tag[1], number)
    return [*(found[i] for i in range(len(program.ops))), end + (program.results is None)]
