"""The page reference/ops.md, from the dataclasses themselves.

The words are the classes' own docstrings, so the page cannot say something else than the code.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable

from markdown_table import table

import interlace.ir as ir
from interlace.ir.ops import REDUCTIONS
from interlace.ir.text.printer import print_op
from interlace.verify.in_place import BACKENDS, COLLECTIVES

TP = ir.Team("tp", 4)
NEXT, PREVIOUS = ir.RankIndex("tp", 1), ir.RankIndex("tp", -1)
X, Y, W = ir.View("x"), ir.View("y"), ir.View("w")
FULL = ir.View("full")
HERE = Y.chunk(NEXT, 4)
BUFFER = ir.Buffer("full", ir.DType.bf16, (8192, 8192), "symmetric", "tp")
SEND = ir.Send(src=X, peer=NEXT, team="tp", stream="comm")
RECV = ir.Recv(dst=Y, peer=PREVIOUS, team="tp", stream="comm")

FAMILIES: dict[str, tuple[ir.Op, ...]] = {
    "Compute": (
        ir.Call(fn="aten.mm.out", args=(FULL.chunk(TP.rank, 4), W), outs=(Y.chunk(TP.rank, 4),)),
        ir.Copy(src=X, dst=FULL.chunk(TP.rank, 4)),
        ir.Fused(
            parts=(
                (ir.Call(fn="aten.mm.out", args=(X, W), outs=(Y.chunk(TP.rank, 4),)),),
                (
                    ir.Expect(signal="arrived", peer=NEXT, team="tp"),
                    ir.Call(fn="aten.mm.out", args=(FULL.chunk(NEXT, 4), W), outs=(HERE,)),
                ),
            ),
            kernel=ir.FusedKernel(kind="gather_matmul"),
        ),
    ),
    "Memory": (ir.Alloc(buffer=BUFFER), ir.Free(buffer="full")),
    "Order": (
        ir.Record(event="e1", stream="comm"),
        ir.Wait(event="e1"),
        ir.HostSync(stream="comm"),
    ),
    "Team": (
        ir.Collective(kind="all_gather", src=X, dst=FULL, team="tp", stream="comm"),
        SEND,
        RECV,
        ir.Group(ops=(SEND, RECV), stream="comm"),
    ),
    "One-sided": (
        ir.Put(src=X, dst=FULL.chunk(TP.rank, 4), peer=NEXT, team="tp", stream="comm"),
        ir.Get(src=FULL.chunk(NEXT, 4), peer=NEXT, team="tp", stream="comm"),
        ir.Notify(signal="ready", peer=TP.others, team="tp"),
        ir.Expect(signal="ready", peer=NEXT, team="tp", stream="comm"),
    ),
}
"""Every op, once, as an example."""

HEAD = """# Ops

<!-- Written by docs/generate from the dataclasses. Change those, then run `make docs`. -->

Each op is one effect. Its [text](text.md) begins with the stream that it runs on:

```python
comm: get(full[tp.rank + 1], peer=tp.rank + 1, site=1)
```

In Python it is a frozen dataclass of `interlace.ir`. All have `stream`, `site` (the communication
that they serve) and `loc` (the module and source line that they come from). `reads()` and
`writes()` give what an op touches; the verifier, the memory planner, the simulator and the trace
know an op by these and by its place in the order. How an op orders others is in
[What a schedule means](../explanation/semantics.md).
"""

IN_PLACE = """## In place

An op reads and writes in no order that a schedule may count on. So what it writes shares no bytes
with what else it reads or writes, but in these forms (`interlace check` refuses the rest):

- a `copy` of a view to just the same view;
- a call of a pointwise operator (`interlace.ir.operators`), or of a region of such alone, that
  writes just the view of an operand: the same bytes, element type, sizes and strides;
- an argument that a call writes in place, by its operator or by `mutates`: the view that is passed,
  and what else is passed shares no bytes with it (but as above, for a pointwise operator);
- a collective in the form that stands here, on a backend that stands here. Where none is named,
  it may run on any, so all must.

Matmuls, reductions, index operators, all-to-alls, puts, gets and messages to oneself never work in
place. Two members of a `fused` or a `group` are not one op: they race.
"""


def ops_page() -> str:
    """The text of reference/ops.md."""
    parts = [HEAD]
    for family, ops in FAMILIES.items():
        parts.append(f"## {family}\n")
        parts += [section(op) for op in ops]
    parts.append("## Kernels of a fused op\n")
    parts.append(doc(ir.FusedKernel) + "\n")
    parts.append("## Kinds of collective\n")
    parts.append(
        "One row of data each (`interlace.ir.KINDS`), for a team of `n` ranks. Reductions: "
        + ", ".join(f"`{name}`" for name in REDUCTIONS)
        + ".\n"
    )
    parts.append(kinds())
    parts.append(IN_PLACE)
    parts.append(in_place())
    parts.append("## Steps of a view\n")
    steps = (
        ir.Chunk,
        ir.Slice,
        ir.Select,
        ir.Permute,
        ir.Reshape,
        ir.Expand,
        ir.Cast,
        ir.AsStrided,
    )
    parts.append(table(("step", "fields", "what"), (step_row(step) for step in steps)))
    parts.append("## Element types\n")
    parts.append(table(("name", "bytes"), ((f"`{t.value}`", str(t.itemsize)) for t in ir.DType)))
    return "\n".join(parts)


def section(op: ir.Op) -> str:
    """One op: what it is, how it is written, its fields."""
    kind = type(op)
    example = print_op(op, ir.Program(teams=(TP,)))
    common = {field.name for field in dataclasses.fields(ir.Op)}
    rows = [
        (f"`{field.name}`", f"`{field.type}`", default(field))
        for field in dataclasses.fields(kind)
        if field.name not in common
    ]
    parts = [f"### {kind.__name__}\n", doc(kind), f"\n```python\n{example}\n```\n"]
    parts += [f"Reads {touched(op.reads())}; writes {touched(op.writes())}.\n"]
    if rows:
        parts.append(table(("field", "type", "default"), rows))
    return "\n".join(parts)


def touched(accesses: Iterable[ir.Access]) -> str:
    """What the example reads or writes, in words."""
    names = dict.fromkeys(
        f"`{access.view.buffer}`" + ("" if access.peer is None else " of a peer")
        for access in accesses
    )
    return ", ".join(names) or "nothing"


def default(field: dataclasses.Field[object]) -> str:
    """A field's default as the page shows it."""
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    return "required"


def kinds() -> str:
    """The table of collectives."""
    scales = {"gather": "`dst` is n times `src`", "scatter": "`src` is n times `dst`", "": "equal"}
    return table(
        ("kind", "who reads `src`", "who writes `dst`", "sizes", "reduces", "root"),
        (
            (
                f"`{name}`",
                kind.reads,
                kind.writes,
                scales[kind.scales] if kind.reads != "none" else "none",
                "yes" if kind.reduces else "no",
                "yes" if kind.rooted else "no",
            )
            for name, kind in ir.KINDS.items()
        ),
    )


def in_place() -> str:
    """The table of collectives in place."""
    forms = {
        "same": "`dst` is `src`",
        "gather": "`src` is this rank's own part of `dst`",
        "scatter": "`dst` is this rank's own part of `src`",
    }
    return table(
        ("kind", "form in place", "backends"),
        (
            (
                f"`{kind}`",
                forms[form if form == "same" else ir.KINDS[kind].scales],
                "all" if backends == BACKENDS else ", ".join(f"`{name}`" for name in backends),
            )
            for kind, (form, backends) in COLLECTIVES.items()
        ),
    )


def step_row(step: type) -> tuple[str, str, str]:
    """One step of a view as a row."""
    fields = ", ".join(f"`{f.name}: {f.type}`" for f in dataclasses.fields(step))
    return f"`{step.__name__}`", fields, doc(step).replace("\n", " ")


def doc(kind: type) -> str:
    """A class's docstring as Markdown, in which a page's name is a link to it."""
    text = inspect.getdoc(kind)
    assert text, f"{kind.__name__} says nothing about itself"
    return text.replace("semantics.md", "[What a schedule means](../explanation/semantics.md)")
