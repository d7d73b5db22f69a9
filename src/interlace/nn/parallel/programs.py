"""The Programs of tensor-parallel linear layers: a text for each direction, bound once a class.

    run = programs(group, Layer("reduce_scatter", "bf16", 512, (256,), (False,)), options, device)
    (y,) = run(rows, [x, w])

The number of rows is the named size S, so a bound Program serves all row counts of its class. What
is bound is kept by process group, so that the ranks of a group keep and drop alike whatever other
groups they are in, and is freed with the group.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from interlace.errors import AgreementError
from interlace.frontend.binding import Bound, bind
from interlace.frontend.compiled_graph import Shelf
from interlace.frontend.importing.importer import Imported
from interlace.frontend.teams import as_axes
from interlace.ir import Program, Team, parse
from interlace.options import Options


@dataclass(frozen=True, slots=True)
class Layer:
    """What tells the Programs of one layer from others."""

    collective: str
    """`all_gather` of the rows before the matmuls; `reduce_scatter` or `all_reduce` after."""
    dtype: str
    inner: int
    """Columns of the input on this rank."""
    outer: tuple[int, ...]
    """Columns of each output on this rank."""
    biased: tuple[bool, ...]
    wanted: tuple[bool, ...] | None = None
    """Of the backward pass: the gradients of x, of each weight, and of each bias that it gives;
    None: this is the forward pass."""


class Programs:
    """The bound Programs of one layer and direction: one for each class of row counts."""

    def __init__(
        self, group: dist.ProcessGroup, layer: Layer, options: Options, device: torch.device
    ) -> None:
        self._group = weakref.ref(group)
        self._layer, self._options, self._device = layer, options, device
        self._shelf = Shelf(_name(layer), options.cache_size)

    def __call__(self, rows: int, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """The results for these tensors, with S = `rows`; collective."""
        last = self._shelf.last
        if last is None or last[0] != rows:
            bound = self._shelf.fitting({"S": rows}) or self._bind(rows)
            self._shelf.last = last = (rows, bound)
        return last[1].run(tensors)

    def all(self) -> list[Bound]:
        """What is bound, the most recently used last."""
        return self._shelf.all()

    def close(self) -> None:
        """Frees what is bound."""
        self._shelf.clear()

    def _bind(self, rows: int) -> Bound:
        group = self._group()
        assert group is not None  # the caller holds it
        program = serial(self._layer, tuple(dist.get_process_group_ranks(group)), rows)
        assert program.results is not None
        inputs, results = len(program.params), len(program.results)
        imported = Imported(
            program, tuple(range(inputs)), (), tuple(range(results)), symbols={"S": "S"}
        )
        kind = "forward" if self._layer.wanted is None else "backward"
        try:
            bound = bind(kind, imported, {"tp": group}, self._options, str(self._device))
        except AgreementError as error:
            raise AgreementError(
                f"{program.name} has S = {rows} rows on rank {dist.get_rank()}; all ranks of the "
                "group call it together, with as many rows each (pad a shorter shard), weights of "
                f"one shape and dtype, and the same that needs gradients: {error}"
            ) from error
        self._shelf.put(rows, bound, [group])
        return bound


_programs: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Any, Programs]] = (
    weakref.WeakKeyDictionary()
)


def programs(
    group: dist.ProcessGroup, layer: Layer, options: Options, device: torch.device
) -> Programs:
    """Those of a layer; the least recently used layers of a group go beyond `MOST_LAYERS`."""
    kept = _programs.setdefault(group, {})
    key = layer, options, device
    found = kept.pop(key, None) or Programs(group, *key)
    kept[key] = found
    if len(kept) > MOST_LAYERS:
        kept.pop(next(iter(kept))).close()
    return found


def kept(group: dist.ProcessGroup) -> list[Bound]:
    """What is bound for the layers of a group."""
    return [bound for each in _programs.get(group, {}).values() for bound in each.all()]


MOST_LAYERS = 256
"""Layers (shapes, dtypes, options and directions) of a group whose Programs are kept."""


def serial(layer: Layer, ranks: tuple[int, ...], rows: int) -> Program:
    """The serial Program for `rows` rows on each rank, and the others of their class."""
    make = _forward if layer.wanted is None else _backward
    params, lines, results = make(layer, len(ranks))
    head = ", ".join([f"tp: Team[{len(ranks)}]", f"S: Size[{rows}]", *params])
    body = "".join(f"    {line}\n" for line in [*lines, f"return {', '.join(results)}"])
    teams, shown = as_axes((Team("tp", len(ranks), (ranks,)),), tuple(sorted(ranks)))
    return parse(f"def {_name(layer)}({head}):\n{body}").replace(teams=teams, ranks=shown)


def _name(layer: Layer) -> str:
    kind = "all_gather_linear" if layer.collective == "all_gather" else f"linear_{layer.collective}"
    return kind if layer.wanted is None else f"{kind}_backward"


Text = tuple[list[str], list[str], list[str]]
"""Parameters, ops and results."""


def _forward(layer: Layer, n: int) -> Text:
    dtype, inner = layer.dtype, layer.inner
    gathers, whole = layer.collective == "all_gather", f"{n} * S"
    given = whole if layer.collective == "reduce_scatter" else "S"
    params, lines, results = [f"x: {dtype}[{given}, {inner}]"], [], []
    if gathers:
        lines += _gather("x", dtype, n, inner)
    for i, (outer, biased) in enumerate(zip(layer.outer, layer.biased, strict=True)):
        params.append(f"w{i}: {dtype}[{outer}, {inner}]")
        if biased:
            params.append(f"b{i}: {dtype}[{outer}]")
        if gathers:
            operator = f'"aten.addmm.default", b{i}' if biased else '"aten.mm.default"'
            of = f"{operator}, full, w{i}.permute(1, 0)"
            lines.append(f"main: call({of}, out=(y{i} := {dtype}[{whole}, {outer}]))")
            results.append(f"y{i}")
            continue
        of = f'"aten.mm.default", x, w{i}.permute(1, 0)'
        lines += [
            f"main: call({of}, out=(part := {dtype}[{given}, {outer}]))",
            f"sum = empty({dtype}[S, {outer}])",
            f'main: {layer.collective}(part, sum, reduce="sum", team=tp)',
        ]
        if biased:
            of = f'"aten.add.Tensor", sum, b{i}'
            lines.append(f"main: call({of}, out=(y := {dtype}[S, {outer}]))")
        results.append("y" if biased else "sum")
    return params, lines, results


def _backward(layer: Layer, n: int) -> Text:
    """Of a gather: rows are gathered anew for the weights' gradients. Of a reduce-scatter: the
    rows of `dy` are gathered for all of them."""
    dtype, inner, gathers = layer.dtype, layer.inner, layer.collective == "all_gather"
    assert layer.wanted is not None
    count, (for_x, *rest) = len(layer.outer), layer.wanted
    for_w, for_b, whole = rest[:count], rest[count:], f"{n} * S"
    height = whole if gathers else "S"
    params = [f"dy{i}: {dtype}[{height}, {outer}]" for i, outer in enumerate(layer.outer)]
    lines, results, terms = [], [], []
    if any(for_w):
        params.append(f"x: {dtype}[{'S' if gathers else whole}, {inner}]")
    if for_x:
        params += [f"w{i}: {dtype}[{outer}, {inner}]" for i, outer in enumerate(layer.outer)]
    if not gathers:
        lines += _gather("dy0", dtype, n, layer.outer[0])
    elif any(for_w):
        lines += _gather("x", dtype, n, inner)
    dys = [f"dy{i}" for i in range(count)] if gathers else ["full"]
    if for_x:
        made = f"{dtype}[{whole}, {inner}]"
        for i, dy in enumerate(dys):
            lines.append(f'main: call("aten.mm.default", {dy}, w{i}, out=(p{i} := {made}))')
            terms.append(f"p{i}")
            if i:
                of = f'"aten.add.Tensor", {terms[i - 1]}, p{i}'
                lines.append(f"main: call({of}, out=(s{i} := {made}))")
                terms[i] = f"s{i}"
        if gathers:
            lines += [
                f"dx = empty({dtype}[S, {inner}])",
                f'main: reduce_scatter({terms[-1]}, dx, reduce="sum", team=tp)',
            ]
        results.append("dx" if gathers else terms[-1])
    for i, dy in enumerate(dys):
        if for_w[i]:
            of = f'"aten.mm.default", {dy}.permute(1, 0), {"full" if gathers else "x"}'
            lines.append(f"main: call({of}, out=(dw{i} := {dtype}[{layer.outer[i]}, {inner}]))")
    for i, dy in enumerate(dys):
        if for_b[i]:
            of = f'"aten.sum.dim_IntList", {dy}, [0]'
            lines.append(f"main: call({of}, out=(db{i} := {dtype}[{layer.outer[i]}]))")
    results += [f"dw{i}" for i in range(count) if for_w[i]]
    results += [f"db{i}" for i in range(count) if for_b[i]]
    return params, lines, results


def _gather(name: str, dtype: str, n: int, width: int) -> list[str]:
    return [
        f"full = empty({dtype}[{n} * S, {width}])",
        f"main: all_gather({name}, full, team=tp)",
    ]
