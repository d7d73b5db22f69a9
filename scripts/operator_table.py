"""Writes src/interlace/ir/operators.txt: what each operator of torch writes, draws and fills.

    python scripts/operator_table.py            # the rows of the torch here, over what is there
    python scripts/operator_table.py --check    # ends with code 1 where the table is out of date
    python scripts/operator_table.py FILE ...   # and those of other versions of torch

The lists have what schemas and tags leave out. Rows of operators that this torch does not have
stay: the table is for several versions of torch. Where versions differ, an operator writes and
draws what it does in any. A FILE has a line for each operator of a version,
`SCHEMA <tab> TAG,TAG`, as that version's own torchgen gives them:

    for f in parse_native_yaml(native_functions, tags).native_functions:
        print(f"{f.namespace}::{f.func}", ",".join(sorted(f.tags)), sep="\\t")
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

import interlace.float8.operators
import interlace.frontend.importing.normalise
import interlace.nn.experts  # noqa: F401  (they register operators)
from interlace.ir.operators import TABLE, Facts, table, usual
from interlace.runtime.calling.effects import effects_by

_STATISTICS = frozenset(
    {
        *("batch_norm", "native_batch_norm", "instance_norm", "_batch_norm_impl_index"),
        *("cudnn_batch_norm", "miopen_batch_norm", "batch_norm_update_stats"),
        *("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts"),
    }
)
"""Operators that update running_mean and running_var in training; their schemas do not say so."""
_REMADE = frozenset(
    {
        *("set_data", "retain_grad", "record_stream", "rename_", "requires_grad_"),
        *("_backward", "_coalesced_", "_resize_output_", "resize_as_sparse_"),
        *("sparse_resize_", "sparse_resize_and_clear_", "resize", "swapaxes_", "squeeze_"),
    }
)
"""Operators that change what an argument is, beside those with torch's tag `inplace_view`."""
_UNFILLED = frozenset({"_ctc_loss.out", "_ctc_loss.Tensor_out", "fft_ihfft2.out", "fft_ihfftn.out"})
"""Overloads that leave some of the memory that they are given as it was, for some arguments."""
_UNWRITTEN = re.compile(r"(new_|_)?empty(_|$)")
_SHAPE_ONLY = re.compile(
    r"(full|zeros|ones|empty|rand|randn|randint)_like|new_(full|zeros|ones|empty|empty_strided)"
    r"|(_foreach_)?(zero|copy)_?|fill_?|normal_functional"
    r"|(normal|random|uniform|exponential|geometric|cauchy|log_normal)_"
    r"|(random|uniform|exponential|geometric|cauchy|log_normal)|copy_to"
)
_PROBABILITY_GIVEN = re.compile(r"bernoulli(_\.|\.(p|Tensor))")
_DRAWS = frozenset({"interlace::get_rng_state", "interlace::set_rng_state"})
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


def known(schema: torch._C.FunctionSchema, tags: Collection[str]) -> Facts:
    """The row of an operator: by its schema and tags, and by the lists of what these leave out."""
    facts = effects_by(schema, tags)
    space, _, name = schema.name.partition("::")
    if schema.name in _DRAWS:
        facts = replace(facts, draws=True)
    if space not in ("aten", "prims"):
        return facts
    whole, writes = f"{name}.{schema.overload_name}", [*facts.writes]
    if name in _STATISTICS:
        running = ("running_mean", "running_var")
        places = enumerate(schema.arguments)
        writes += [(place, arg.name) for place, arg in places if arg.name in running]
    shape_only = _SHAPE_ONLY.fullmatch(name) or _PROBABILITY_GIVEN.match(whole)
    return replace(
        facts,
        writes=tuple(writes),
        unwritten=_UNWRITTEN.match(name) is not None or whole in _UNFILLED,
        shape_only=shape_only is not None,
        remakes=facts.remakes or name in _REMADE,
    )


def installed() -> dict[str, Facts]:
    """The rows of all operators that torch has here."""
    found: dict[str, Facts] = {}
    for full in torch._C._dispatch_get_all_op_names():
        space, _, rest = full.partition("::")
        name, _, overload = rest.partition(".")
        if space in SPACES:
            op = getattr(getattr(getattr(torch.ops, space), name), overload or "default")
            tags = {tag.name for tag in op.tags}
            found[f"{space}.{name}.{overload or 'default'}"] = known(op._schema, tags)
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
        found[full] = known(schema, tags.split(","))
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
