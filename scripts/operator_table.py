"""Writes src/interlace/ir/operators.txt: what each operator of torch writes, draws and fills.

    python scripts/operator_table.py            # the rows of the torch here, over what is there
    python scripts/operator_table.py --check    # ends with code 1 where the table is out of date
    python scripts/operator_table.py FILE ...   # and those of other versions of torch

Rows of operators that this torch does not have stay: the table is for several versions of torch.
Where versions differ, an operator writes and draws what it does in any. A FILE has a line for each
operator of a version, `SCHEMA <tab> TAG,TAG`, as that version's own torchgen gives them:

    for f in parse_native_yaml(native_functions, tags).native_functions:
        print(f"{f.namespace}::{f.func}", ",".join(sorted(f.tags)), sep="\\t")
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import interlace.float8.operators
import interlace.frontend.importing.normalise  # noqa: F401  (they register operators)
from interlace.ir.operators import TABLE, Facts, table, usual
from interlace.runtime.calling.effects import effects, effects_by

SPACES = ("aten", "prims", "interlace")
HEAD = """\
# Operators and what they do, as interlace/ir/operators.py says. Do not edit: written by
# scripts/operator_table.py from the schemas and tags of torch 2.13.0, 2.11.0 and 2.15.0.
"""


def spelt(name: str, overload: str, facts: Facts) -> str:
    """An overload's word in the table."""
    plain, parts = usual(name, overload), [overload]
    if facts.writes != plain.writes:
        parts.append("w" + ",".join(f"{place}={word}" for place, word in facts.writes))
    if facts.outs != plain.outs:
        parts.append("o=" + ",".join(facts.outs))
    if facts.draws:
        parts.append("d" if facts.unless is None else "d{}={}".format(*facts.unless))
    marks = {"u": facts.unwritten, "s": facts.shape_only, "m": facts.remakes}
    return ":".join([*parts, *(mark for mark, holds in marks.items() if holds)])


def installed() -> dict[str, Facts]:
    """The rows of all operators that torch has here."""
    found: dict[str, Facts] = {}
    for full in torch._C._dispatch_get_all_op_names():
        space, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        if space in SPACES:
            op = getattr(getattr(getattr(torch.ops, space), name), overload or "default")
            found[f"{space}.{name}.{overload or 'default'}"] = effects(op)
    return found


def listed(path: str) -> dict[str, Facts]:
    """The rows of another version of torch, of a file of schemas and tags."""
    found: dict[str, Facts] = {}
    for line in Path(path).read_text().splitlines():
        text, _, tags = line.partition("\t")
        try:
            schema = torch._C.parse_schema(text)
        except RuntimeError:  # a type that is gone: a Dimname
            continue
        full = f"{schema.name.replace('::', '.')}.{schema.overload_name or 'default'}"
        found[full] = effects_by(schema, tags.split(","))
    return found


def merged(one: Facts, other: Facts) -> Facts:
    """What an operator does in either of two versions."""
    return Facts(
        writes=tuple(dict.fromkeys((*one.writes, *other.writes))),
        outs=one.outs,
        draws=one.draws or other.draws,
        unless=one.unless if one.draws and other.draws else one.unless or other.unless,
        unwritten=one.unwritten or other.unwritten,
        shape_only=one.shape_only and other.shape_only,
        remakes=one.remakes or other.remakes,
    )


def text(rows: dict[str, Facts]) -> str:
    """The table: a line for each operator."""
    lines: dict[str, list[str]] = {}
    for full, facts in sorted(rows.items()):
        name, _, overload = full.rpartition(".")
        lines.setdefault(name, []).append(spelt(name.partition(".")[2], overload, facts))
    return HEAD + "".join(f"{name} {' '.join(words)}\n" for name, words in lines.items())


def main() -> int:
    """Writes the table, or checks it."""
    before = TABLE.read_text() if TABLE.exists() else ""
    rows = {**(table() if before else {}), **installed()}
    for path in (word for word in sys.argv[1:] if not word.startswith("--")):
        for full, facts in listed(path).items():
            rows[full] = merged(rows[full], facts) if full in rows else facts
    now = text(rows)
    if now == before:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{TABLE} is out of date: run scripts/operator_table.py", file=sys.stderr)
        return 1
    TABLE.write_text(now)
    return 0


if __name__ == "__main__":
    sys.exit(main())
