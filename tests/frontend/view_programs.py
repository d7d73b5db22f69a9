"""Random functions that write and read views of their inputs, and the comparison with eager.

source, inputs = drawn(lambda n: rng.randrange(n))     # any choice of one in n
differences(source, inputs)                            # "" where results and inputs are eager's

A function is text. Each line is drawn for tensors that a run of the lines before it made, so that
it is one that eager runs, and one whose result does not depend on the order in which eager goes
through elements: nothing is written that shares memory with itself, or with what is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.support.captured import capture
from torch.distributed._functional_collectives import all_reduce

from interlace.errors import ProgramError, UnsupportedError
from interlace.frontend import backend
from interlace.verify import check

Draw = Callable[[int], int]

INPUTS: dict[str, Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]]] = {
    "whole": lambda m, s: (m[:24].clone().view(4, 6), m[30:54].clone().view(6, 4)),
    "parts": lambda m, s: (m[3 + s : 27 + s].view(4, 6), m.clone()[5 + s : 29 + s].view(6, 4)),
    "neighbours": lambda m, s: (m[3 + s : 27 + s].view(4, 6), m[27 + s : 51 + s].view(6, 4)),
    "columns": lambda m, s: (m[:40].view(4, 10)[:, 2 + s : 8 + s], m[40:64].view(4, 6).t()),
    "transposed": lambda m, s: (m[:24].clone().view(6, 4).t(), m[30:54].clone().view(4, 6).t()),
    "stepped": lambda m, s: (m[s : 48 + s].view(4, 12)[:, ::2], m[52:58].view(6, 1).expand(6, 4)),
    "overlapping": lambda m, s: (m[3:27].view(4, 6), m[9:33].view(6, 4)),
    "crossed": lambda m, s: (m[:36].view(6, 6)[1:5], m[:36].view(6, 6).t()[:, :4]),
    "same": lambda m, s: (t := m[:24].clone().view(4, 6), t),
    "and its transpose": lambda m, s: (t := m[:24].clone().view(4, 6), t.t()),
}
"""Layouts of the two inputs in 64 numbers, by name; `s` moves some of them."""


def inputs_of(kind: str, shift: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The arguments of a call, and tensors that show all memory of theirs."""
    x, y = INPUTS[kind](torch.arange(72.0), shift)
    shown = [torch.empty(0).set_(t.untyped_storage()) for t in (x, y)]
    return [x, y, torch.arange(100.0, 172.0)], shown


def _bytes(t: torch.Tensor) -> list[int]:
    """Where the elements of a tensor begin, each once for every time that it is there."""
    places = torch.arange(t.untyped_storage().nbytes() // t.element_size())
    where = places.as_strided(t.shape, t.stride(), t.storage_offset()).flatten() * t.element_size()
    return (where + t.untyped_storage().data_ptr()).tolist()


VIEWS = [
    *(
        "{v}.t()",
        "{v}.transpose(0, -1)",
        "{v}.movedim(0, -1)",
        "{v}.unsqueeze({i})",
        "{v}.detach()",
    ),
    *("{v}[{i}]", "{v}[{i}:]", "{v}[{i}:{j}]", "{v}[..., {i}:{j}]", "{v}[::2]", "{v}[..., {i}::2]"),
    *("{v}.view(-1)", "{v}.view(-1, 2)", "{v}.view(2, -1, 2)", "{v}.reshape(-1)", "{v}.squeeze()"),
    *("{v}.split(2)[{i}]", "{v}.unbind()[{i}]", "{v}.chunk(2, -1)[{k}]", "{v}.diagonal()"),
    *("{v}.diagonal({k})", "{v}.view(torch.int32)", "{v}.view(torch.float32)", "{v}.permute(1, 0)"),
    *("{v}.expand(2, *{v}.shape)", "{v}.unfold(0, 2, {j})", "{v}.flatten()", "{v}.view(4, 6)"),
    *("{v}.as_strided((2, 3), (3, 1), {o})", "{v}.as_strided((2, 2), (1, 2))", "{v}.view(6, 4)"),
    *("{v}[{i}:{i}].view(torch.int64)", "{v}[{i}, {j}:]", "{v}.select(-1, {i})", "{v}[..., None]"),
]
WRITES = [
    *("{v}.fill_({i})", "{v}.zero_()", "{v}.add_({j})", "{v}.mul_(2)", "{v}.copy_({like})"),
    *("{v}.copy_({w})", "{v}.add_({w})", "{v}[{index}] = {i}", "{v}[{index}] = {rows}"),
    *("{v}.index_copy_(0, {index}, {rows})", "{v}.index_fill_(0, {index}, {j})", "{v}[{i}] = {j}"),
    *("{v}.index_add_(0, {index}, {rows})", "{v}.masked_fill_({v} > {o}, {j})", "{v}[{i}:] = {j}"),
    *("{v}.scatter_(0, torch.zeros_like({v}, dtype=torch.int64)[:1], {j})", "{v}[..., {i}] = {j}"),
    *("{v}.index_put_((None, {index}), {j} + 0 * {v}[:, :2])", "{v}[1:] = {v}[:-1].clone()"),
]
READS = [
    *("{v} * 2", "{v}.clone()", "{v}.amax()", "{v} + {w}", "torch.cat([{v}, {v}])", "{v}.relu()"),
    *("{v}[{index}]", "torch.index_copy({v}, 0, {index}, {rows})", "{v}.contiguous()", "{v} @ {w}"),
    *(
        "torch.select_scatter({v}, {v}[{i}] * 2, 0, {j}) * 1",
        "torch.flip({v}, (0,))",
        "reduced({v})",
    ),
    *("torch.as_strided_scatter({v}.clone(), {v}.flatten()[:2], (2,), (2,), {o})", "{v}.tril()"),
    *("torch.slice_scatter({v}, {v}[1:] + 1, 0, 0, -1) * 1", "{v}.to(torch.float64)", "{v}.mT"),
]


def drawn(draw: Draw) -> tuple[str, str]:
    """The lines of a random function of x, y and k, and the kind of its inputs."""
    kind = [*INPUTS][draw(len(INPUTS))]
    args, _ = inputs_of(kind, 0)
    env: dict[str, Any] = {**_globals(), **dict(zip("xyk", args, strict=True)), "o": []}
    lines = list[str]()
    for number in range(3 + draw(10)):
        table = (VIEWS, WRITES, READS)[(0, 0, 1, 1, 2)[draw(5)]]
        names = [name for name, value in env.items() if torch.is_tensor(value) and name != "k"]
        recent = names[-4:] if draw(2) else names
        v, w = recent[draw(len(recent))], names[draw(len(names))]
        line = _line(draw, table, env, v, w)
        if table is not WRITES:
            line = f"v{number} = {line}" if draw(4) else f"o.append({line})"
        try:
            exec(line, env)
        except (RuntimeError, IndexError, TypeError, ValueError):
            continue
        lines.append(line)
    names = [n for n, value in env.items() if n[0] == "v" and torch.is_tensor(value)]
    for name in [name for name in names if draw(2)] or ["x"]:
        lines.append(f"o.append({name}{' * 1' if draw(4) else ''})")
    return "\n    ".join(["def f(x, y, k):", "o = []", *lines, "return o"]), kind


def _line(draw: Draw, table: list[str], env: dict[str, Any], v: str, w: str) -> str:
    template, size = table[draw(len(table))], env[v].shape[0] if env[v].ndim else 1
    i, k = draw(3), draw(2)
    first = draw(max(size, 1))
    index = f"torch.tensor([{first}, {(first + 1) % max(size, 1)}])" if size > 1 else "[0]"
    kind = ".int()" if env[v].dtype == torch.int32 else ""
    count, rows = env[v].numel(), env[v].numel() // max(size, 1) * min(size, 2)
    rest = [min(size, 2), *env[v].shape[1:]]
    if table is WRITES:
        own = _bytes(env[v])
        if len({*own}) < len(own):
            return "raise ValueError"
        if {*own} & {*_bytes(env[w])} and own != _bytes(env[w]):
            w = f"{w}.clone()"
    like = f"k[{i}:{i + count}].view({list(env[v].shape)}){kind}"
    part = f"k[{k}:{k + rows}].view({rest}){kind}"
    return template.format(
        v=v, w=w, i=i, j=i + 1 + draw(2), k=k, o=draw(12), index=index, like=like, rows=part
    )


def _globals() -> dict[str, Any]:
    group = dist.group.WORLD if dist.is_initialized() else None

    def reduced(x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x, "sum", group) * 1 if group is not None else x * 1

    return {"torch": torch, "reduced": reduced}


def _called(fn: Callable[..., Any], kind: str) -> list[torch.Tensor]:
    """Results of two calls on one input and of a third on another, and all memory, after them."""
    args, shown = inputs_of(kind, 0)
    moved, others = inputs_of(kind, 1)
    results = [*fn(*args), *fn(*args), *fn(*moved)]
    return [*results, *args, *moved, *shown, *others]


def _same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    facts = (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
    return facts and torch.equal(mine.nan_to_num(), theirs.nan_to_num())


def call_by_torch(source: str, kind: str) -> None:
    """Calls what torch's own backend compiles: a process may end by it."""
    env = _globals()
    exec(source, env)
    with torch.no_grad():
        _called(torch.compile(env["f"], backend="aot_eager"), kind)


def differences(source: str, kind: str) -> str:
    """Differences of a compiled function from eager; empty: none. `torch: ...` where torch's own
    backend differs, too; `refused: ...` where Interlace says that it cannot follow."""
    env = _globals()
    exec(source, env)
    torch.compiler.reset()
    # torch flushes the processor's caches to time its guards: half of what a small function takes.
    unmeasured = mock.patch("torch._dynamo.guards.profile_guard_manager", return_value=0.0)
    with torch.no_grad(), unmeasured:
        try:
            expected = _called(env["f"], kind)
        except RuntimeError as refusal:  # of memory that begins elsewhere
            return f"torch: {refusal}"
        try:
            with capture() as captured:
                found = _called(torch.compile(env["f"], backend=backend), kind)
            wrong = [
                i for i, pair in enumerate(zip(found, expected, strict=True)) if not _same(*pair)
            ]
            error: Exception | None = None
            for bound in captured.bound:
                check(bound.program).raise_if_unsound()
        except (UnsupportedError, ProgramError) as refusal:
            strange = "as_strided" in source or "unfold" in source  # elements may share memory
            return f"refused: {refusal}" if strange else f"{source}\n{refusal}"
        except Exception as raised:
            wrong, error = [], raised
            captured = None
        if not wrong and error is None:
            return ""
        torch.compiler.reset()
        try:
            theirs = _called(torch.compile(env["f"], backend="aot_eager"), kind)
            if not all(map(_same, theirs, expected)):
                return "torch: it differs from eager by itself"
        except Exception as raised:
            return f"torch: {raised}"
    programs = "\n".join(map(str, captured.programs)) if captured is not None else ""
    return f"{kind}: {wrong} {error!r}\n{source}\n{programs}"
