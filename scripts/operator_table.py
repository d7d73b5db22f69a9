"""Writes src/interlace/ir/operators.txt: what each operator of torch writes, draws and fills.

    python scripts/operator_table.py            # the rows of the torch here, over what is there
    python scripts/operator_table.py --check    # ends with code 1 where the table is out of date

Rows of operators that this torch does not have stay: the table is for several versions of torch.
"""

from __future__ import annotations

import sys

import torch

import interlace.float8.operators
import interlace.frontend.importing.lowerings  # noqa: F401  (they register operators)
from interlace.ir.operator_facts import TABLE, Facts, spelt, table
from interlace.runtime.calling.effects import effects

SPACES = ("aten", "prims", "interlace")
HEAD = """\
# Operators and what they do, by interlace/ir/operator_facts.py. Written by
# scripts/operator_table.py from the schemas and tags of torch: do not edit.
"""


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
    now = text({**(table() if before else {}), **installed()})
    if now == before:
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{TABLE} is out of date: run scripts/operator_table.py", file=sys.stderr)
        return 1
    TABLE.write_text(now)
    return 0


if __name__ == "__main__":
    sys.exit(main())
