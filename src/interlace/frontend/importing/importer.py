"""An AOT graph as a serial Program: one stream, one op per node, views as steps.

    imported = import_graph(gm, name="forward", teams=teams)
    print(imported.program)
    results = executor.run(imported.completed([args[place] for place in imported.inputs]))
    outputs = [results[place] for place in imported.places]      # with `others` behind them

Compute nodes become Calls that make their own results; aten view operators become steps of Views
and cost nothing; functional collectives become Collectives into fresh buffers, and `wait_tensor`
vanishes (a serial Program needs no wait). `normalise.py` rewrites what has several spellings to
one, `inplace.py` puts updates of inputs back in place. What cannot be lowered is an
`UnsupportedError`.
"""

from __future__ import annotations

import keyword
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from interlace.errors import ProgramError, SizeError, UnsupportedError
from interlace.frontend.calling.arguments import Fixed, Imported, Opaque
from interlace.frontend.importing.collectives import COLLECTIVES, refuse
from interlace.frontend.importing.inplace import InPlace
from interlace.frontend.importing.nodes import (
    Values,
    awaited,
    bound,
    complete,
    describe,
    draws_random_numbers,
    flatten,
    is_mutable,
    is_read_unwritten,
    is_view,
    live_nodes,
    location,
    made,
    origin,
    output_nodes,
    parameter_name,
    shown_by,
)
from interlace.frontend.importing.normalise import NORMALISERS
from interlace.frontend.importing.symbols import size_class, size_of, sizes_of
from interlace.frontend.importing.types import (
    NOWHERE,
    Args,
    buffer_like,
    device_of,
    dtype_of,
    on_host,
    same_layout,
    scalar_word,
)
from interlace.frontend.importing.views import (
    RESHAPES,
    RULES,
    SPLITS,
    adjacent,
    empty,
    extend,
    shorten,
    strided,
)
from interlace.frontend.teams import Teams
from interlace.ir import (
    Alloc,
    Arg,
    Box,
    Buffer,
    Call,
    Copy,
    DType,
    Free,
    Loc,
    Op,
    Program,
    Reshape,
    Team,
    View,
    views_in,
)
from interlace.ir.sizes import Int, Size, deciding
from interlace.runtime.inputs import may_be_lazy
from interlace.runtime.values import whole
from interlace.torch_private import OpOverload, unset_fake_temporarily

Value = Any
"""Value of a node: a View, a scalar, None, an `Opaque`, or a tuple of these."""


Normaliser = Callable[["Importer", fx.Node, Args], Value]
"""Makes a value of a node and its bound arguments."""


TAKEN = {"rng", "main", "comm", "inf", "nan", *(str(dtype) for dtype in DType)}
"""Words that mean something else in a Program's text."""


class Importer:
    """Walks a graph once, in order; normalisers call its methods."""

    def __init__(
        self,
        gm: fx.GraphModule,
        name: str,
        teams: Teams,
        values: Values | None = None,
        labels: Sequence[str] = (),
        given_up: Collection[int] = (),
    ) -> None:
        self.gm = gm
        self.given_up = given_up
        self.program_name = name
        self.teams = teams
        self.recorded = values
        self.labels = labels
        self.device = self._main_device()
        self.buffers: dict[str, Buffer] = {}
        self.ops: list[Op] = []
        self.loc = Loc()
        self.host: set[str] = set()
        """Buffers that stay on the CPU in a graph on a GPU."""
        self._names: dict[str, int] = dict.fromkeys(TAKEN, 0)
        self.converted: dict[fx.Node, Value] = {}
        self.params: list[Buffer] = []
        self.inputs: list[int] = []
        self.constants: list[torch.Tensor] = []
        self.constant_params: list[Buffer] = []
        self.in_place = InPlace(self)
        self.leaving = shown_by(output_nodes(gm.graph))
        """Nodes that the output holds, or a view of them: they must not share with another."""

    def may_share(self, node: fx.Node, views: Sequence[View]) -> bool:
        """Returns True if a node that copies `views` may be a view of them instead."""
        written = self.in_place.updates
        return node not in self.leaving and all(view.buffer not in written for view in views)

    def run(self) -> Imported:
        """The Program of the whole graph."""
        live = live_nodes(self.gm.graph)
        outputs: list[Value] = []
        for position, node in enumerate(self.gm.graph.find_nodes(op="placeholder")):
            self.loc = location(node)
            self.converted[node] = self._parameter(node, position)
        self.in_place.plan()
        for node in self.gm.graph.nodes:
            self.loc = location(node)
            if node.op == "output":
                outputs = [self._output(item) for item in flatten(node.args[0])]
            elif node in live and node not in self.converted:
                self.converted[node] = self._convert(node)
        results = [value for value in outputs if not isinstance(value, Opaque | Fixed)]
        index = iter(range(len(results)))
        places = [value if isinstance(value, Opaque | Fixed) else next(index) for value in outputs]
        teams, ranks = self.teams.used()
        changed = {access.view.buffer for op in self.ops for access in op.writes()}
        handed = {view.buffer for view in views_in(tuple(results))}
        pairs = zip(self.params, self.inputs, strict=True)
        last = [b.name for b, position in pairs if position in self.given_up]
        given_up = [name for name in last if name not in changed | handed]
        program = Program(
            name=self.program_name,
            teams=teams,
            params=(*self.params, *self.constant_params),
            ops=(*self.ops, *[Free(buffer=name, stream="main") for name in given_up]),
            results=tuple(results),
            ranks=ranks,
        )
        self._check_host(program)
        waits = awaited(self.gm.graph)
        lazy = [may_be_lazy(whole(b)) and b.name not in changed for b in program.params]
        return Imported(
            program,
            tuple(self.inputs),
            tuple(self.constants),
            tuple(places),
            frozenset(self.host),
            lazy=tuple(index for index, may in enumerate(lazy) if may),
            awaited=tuple(i for i, at in enumerate(self.inputs) if at in waits),
        )

    def _check_host(self, program: Program) -> None:
        """Nothing but torch's operators touches what stays on the CPU of a graph on a GPU."""
        calls = program.calls()
        for index, op in enumerate(program.ops):
            if self.host and index not in calls:
                views = [access.view for access in (*op.reads(), *op.writes())]
                found = [view.buffer for view in views if view.buffer in self.host]
                if found:
                    raise UnsupportedError(
                        f"{found[0]} is on the CPU, and {type(op).__name__.lower()}"
                        f"{f' in {op.loc}' if str(op.loc) else ''} would move it between ranks in a"
                        f" graph on {self.device.type}: move it to that device first, or out of "
                        "the compiled function"
                    )

    def _output(self, item: object) -> Value:
        value = self.arg(item)
        plain = value is None or isinstance(value, View | Opaque | bool | int | float | Size)
        return value if plain else Fixed(getattr(value, "real_obj", value))

    def value(self, node: Any) -> Value:
        """The fake value that tracing recorded for a node."""
        return self.recorded[node] if self.recorded is not None else node.meta.get("val")

    def arg(self, value: object) -> Value:
        """An argument of a node as a Program spells it."""
        if isinstance(value, fx.Node):
            if value not in self.converted:  # a number, as InPlace reads it before all else
                number = self.value(value)
                if isinstance(number, torch.SymInt | int):
                    return size_of(number)
            return self.converted[value]
        if isinstance(value, list | tuple):
            return tuple(self.arg(item) for item in value)
        if isinstance(value, torch.SymInt):
            return size_of(value)
        return scalar_word(value, self.device)

    def view(self, value: object) -> View:
        """An argument that must be a tensor."""
        found = self.arg(value)
        assert isinstance(found, View), f"{value} is {found}, not a tensor"
        return found

    def team(self, node: fx.Node, group: Any) -> Team:
        """The team that a process group, or its name, stands for."""
        return self.teams.team(self.value(group) if isinstance(group, fx.Node) else group)

    def unsupported(self, node: fx.Node, why: str, fix: str) -> UnsupportedError:
        """The error for a node that cannot be lowered."""
        return UnsupportedError(f"{describe(node)} cannot be lowered: {why}. {fix}")

    def call_like(
        self,
        node: fx.Node,
        fn: str,
        args: Iterable[object],
        kwargs: Mapping[str, object],
        value: object,
    ) -> Value:
        """A Call with results like the fake `value`, in which None and numbers stay as they are."""
        fresh: list[Buffer] = []

        def declare(item: object) -> Value:
            if isinstance(item, torch.Tensor):
                base = node.name if not fresh else f"{node.name}_{len(fresh)}"
                fresh.append(buffer_like(self.name(base), item, "fresh"))
                return self.declare(fresh[-1], item)
            if isinstance(item, torch.SymInt):
                return size_of(item)
            return tuple(map(declare, item)) if isinstance(item, list | tuple) else item

        result = declare(value)
        self._call(node, fn, args, kwargs, fresh=tuple(fresh))
        return result

    def _call(
        self,
        node: fx.Node,
        fn: str,
        args: Iterable[object],
        kwargs: Mapping[str, object],
        **results: Any,
    ) -> None:
        given = tuple(map(self.arg, args))
        named = tuple((key, self.arg(item)) for key, item in kwargs.items())
        for item in flatten((given, tuple(value for _, value in named))):
            if isinstance(item, Opaque | torch.nn.Module):
                raise self.unsupported(
                    node,
                    "an argument is neither a tensor nor a number",
                    "Move it out of the compiled function (torch.compiler.disable)",
                )
        rng = draws_random_numbers(node)
        self.emit(Call(fn=fn, args=given, kwargs=named, rng=rng, loc=self.loc, **results))

    def _main_device(self) -> torch.device:
        nodes = [node for node in self.gm.graph.nodes if node.op != "output"]
        values = [item for node in nodes for item in flatten(self.value(node))]
        return torch.device(torch.device(device_of(values)).type)

    def _parameter(self, node: fx.Node, position: int) -> Value:
        value = self.value(node)
        if isinstance(value, torch.Tensor):
            buffer = buffer_like(self.name(parameter_name(node, self.labels)), value, "input")
            self.inputs.append(position)
            self.params.append(buffer)
            return self.declare(buffer, value)
        if isinstance(value, torch.SymInt):
            return size_of(value)
        if isinstance(value, torch.SymFloat | torch.SymBool):
            raise SizeError(f"{self.program_name} takes {value}, which is no size")
        return value if isinstance(value, bool | int | float | None) else Opaque(position)

    def _constant(self, node: fx.Node) -> Value:
        tensor: object = self.gm
        for part in str(node.target).split("."):
            tensor = getattr(tensor, part)
        if not isinstance(tensor, torch.Tensor):
            return tensor  # the body of a higher-order operator, refused where it is used
        if tensor.ndim == 0:
            result = buffer_like(self.name(node.name), tensor, "fresh")
            kwargs = {"dtype": result.dtype, "device": scalar_word(tensor.device, self.device)}
            self.declare(result, tensor)
            return self.call("aten.full.default", ((), tensor.item()), result, kwargs)
        buffer = buffer_like(self.name("constant"), tensor, "input")
        self.constants.append(tensor)
        self.constant_params.append(buffer)
        return self.declare(buffer, tensor)

    def _convert(self, node: fx.Node) -> Value:
        if node.op == "get_attr":
            return self._constant(node)
        if node.op != "call_function":
            raise self.unsupported(node, f"a {node.op} node", "Trace with AOTAutograd or make_fx")
        if node in self.in_place.places:
            return self.in_place.write(node)
        value = self.value(node)
        if isinstance(value, torch.SymInt):
            return size_of(value)
        if isinstance(value, torch.SymFloat | torch.SymBool):
            raise SizeError(f"{describe(node)} makes {value}, which is no size")
        if isinstance(value, bool | int | float):
            return value
        if node.target is operator.getitem:
            return self.arg(node.args[0])[node.args[1]]
        name = str(node.target)
        if name in SAME_DTYPES:
            self._refuse_mixed(node)
        normaliser = NORMALISERS.get(name) or COLLECTIVES.get(name)
        if normaliser is None and name.startswith("_c10d_functional"):
            normaliser = refuse
        if normaliser is not None:
            return normaliser(self, node, bound(node))
        if not isinstance(node.target, OpOverload):
            raise self.unsupported(node, *_opaque(node, name))
        if name in SPLITS:
            return self.split(node, self.view(node.args[0]))
        if name in RULES or is_view(node):
            return self._view(node, self.view(node.args[0]))
        if is_mutable(node):
            return self._mutation(node)
        result = self.call_like(node, name, node.args, node.kwargs, made(node, value))
        if isinstance(result, View) and is_read_unwritten(node):
            fn, target = "aten.zero_.default", (result,)  # a sound Program reads what was written
            self.emit(Call(fn=fn, args=target, outs=target, mutates=True, loc=self.loc))
        return result

    def _refuse_mixed(self, node: fx.Node) -> None:
        """Eager refuses operands of several dtypes; a trace on fake tensors does not."""
        operands = map(self.value, node.all_input_nodes)
        dtypes = dict.fromkeys(str(x.dtype) for x in operands if isinstance(x, torch.Tensor))
        if len(dtypes) > 1:
            raise self.unsupported(
                node,
                f"its operands must have the same dtype, as in eager: they are {', '.join(dtypes)}",
                "Cast one (x.to(weight.dtype), or module.to(x.dtype)), or use torch.autocast",
            )

    def _view(self, node: fx.Node, source: View) -> View:
        """The view of `source` that a node is; of a copy, where it must be."""
        found = self.viewed_by(node, source)
        if found is None and str(node.target) in RESHAPES:
            return self.reshaped(source, sizes_of(self.value(node).shape))
        if found is None:  # it is laid out otherwise than it was traced
            copy = self.copied_like(f"{source.buffer}_copy", source, self.value(node.args[0]))
            found = self.viewed_by(node, copy)
        assert found is not None, f"{describe(node)} is no view of {source}"
        return found

    def viewed_by(self, node: fx.Node, source: View) -> View | None:
        """The view of `source` that a node is; None where that needs a copy."""
        name, args, value = str(node.target), bound(node), self.value(node)
        buffer, box, like = self.buffers[source.buffer], self.box(source), self.value(args[0])
        if not box.numel:
            same = box.dtype == dtype_of(value.dtype)
            found = self.viewed(source, sizes_of(value.shape)) if same else None
            return found or empty(source, buffer, value)
        if name == "aten.as_strided.default":
            self.check_storage(node)
        rule, as_traced = RULES.get(name), same_layout(box, like)
        if rule is not None:
            steps = rule([None, *map(self.arg, args[1:])], box, value)
            by_strides = as_traced and name not in RESHAPES
            found = extend(source, buffer, steps, value, by_strides)
            if found is not None or not by_strides:
                return found
        return extend(source, buffer, strided(box, like, value), value) if as_traced else None

    def check_storage(self, node: fx.Node) -> None:
        """Refuses an `as_strided` of what may be an input that was written before: it counts in the
        storage of the input, and in the graph in that of a copy, which is laid out otherwise."""
        own, counts = self.value(made := origin(node.args[0])), bound(node)[-1] is not None
        for target in self.in_place.targets if made.op != "placeholder" else ():
            like = self.value(target)
            plain = own.is_contiguous() and like.is_contiguous()
            if like.nbytes == own.nbytes and (not plain or (counts and like.storage_offset())):
                why = "it counts in the storage of an input that is written, and is a part of that"
                fix = "Index the input instead, or give the function a contiguous clone of it"
                raise self.unsupported(node, why, fix)

    def split(self, node: fx.Node, source: View) -> tuple[View, ...]:
        """The views of `source` that a node is."""
        name, args, parts = str(node.target), bound(node), self.value(node)
        dim = self.arg(args[SPLITS[name]]) % len(self.sizes(source))
        strides = same_layout(self.box(source), self.value(args[0]))
        start, found = 0, []
        for i, part in enumerate(parts):
            if name == "aten.unbind.int":
                piece = View("").select(dim, i)
            else:
                stop = start + size_of(part.shape[dim])
                piece = View("").slice(dim, start, stop)
                start = stop
            view = extend(source, self.buffers[source.buffer], piece.steps, part, strides)
            assert view is not None, f"{describe(node)}: part {i} of {source} is not {piece}"
            found.append(view)
        return tuple(found)

    def _mutation(self, node: fx.Node) -> Value:
        args, schema = bound(node), node.target._schema  # pyright: ignore
        infos = [argument.alias_info for argument in schema.arguments]
        written = [arg for arg, info in zip(args, infos, strict=True) if info and info.is_write]
        views: list[Value] = [view for arg in written for view in flatten(self.arg(arg))]
        if str(node.target) == "aten.copy_.default":
            self.copy_into(self.view(args[1]), views[0])
            return views[0]
        fresh = [result for result in schema.returns if result.alias_info is None]
        if fresh or not all(isinstance(view, View) for view in views):
            raise self.unsupported(
                node,
                "it writes an argument and makes new results at once",
                "Wrap it in a custom operator that does one of the two",
            )
        self._call(node, str(node.target), node.args, node.kwargs, outs=tuple(views), mutates=True)
        return views[0] if len(views) == 1 else tuple(views)

    # -- names, buffers and ops of the Program ----------------------------------------------------

    def name(self, wanted: str) -> str:
        """`wanted` as an identifier that nothing else has."""
        base = "".join(c if c.isalnum() and c.isascii() else "_" for c in wanted) or "value"
        if base[0].isdigit() or keyword.iskeyword(base):
            base = f"v_{base}"
        found = base
        while found in self._names:
            self._names[base] = self._names.get(base, 0) + 1
            found = f"{base}_{self._names[base]}"
        self._names[found] = 0
        return found

    def reserve(self, names: Iterable[str]) -> None:
        """Names that no buffer has."""
        self._names.update(dict.fromkeys(names, 0))

    def box(self, view: View) -> Box:
        """The box of a view."""
        return view.box(self.buffers[view.buffer], NOWHERE)

    def sizes(self, view: View) -> tuple[Int, ...]:
        """The sizes of a view."""
        return self.box(view).sizes

    def fresh(self, name: str, dtype: DType, sizes: tuple[Int, ...]) -> Buffer:
        """A contiguous buffer for a result, not yet declared."""
        return Buffer(self.name(name), dtype, sizes, "fresh")

    def declare(self, buffer: Buffer, like: torch.Tensor | None = None) -> View:
        """Notes a buffer that an op (or the Program's header) declares; it is where `like` is."""
        self.buffers[buffer.name] = buffer
        if like is not None and on_host(like, self.device):
            self.host.add(buffer.name)
        return View(buffer.name)

    def emit(self, op: Op) -> None:
        """Appends an op."""
        self.ops.append(op)

    def call(
        self,
        fn: str,
        args: tuple[Arg, ...],
        result: Buffer,
        kwargs: Mapping[str, Arg] | None = None,
    ) -> View:
        """A Call that makes one result."""
        view = self.declare(result)
        given = [view.buffer for arg in args for view in views_in(arg)]
        if given and self.host.issuperset(given):
            self.host.add(result.name)
        pairs = tuple((kwargs or {}).items())
        self.emit(Call(fn=fn, args=args, kwargs=pairs, fresh=(result,), loc=self.loc))
        return view

    def empty(self, name: str, dtype: DType, sizes: tuple[Int, ...]) -> View:
        """A fresh buffer for a collective or a copy to fill."""
        buffer = self.fresh(name, dtype, sizes)
        self.emit(Alloc(buffer=buffer, loc=self.loc))
        return self.declare(buffer)

    def joined(self, views: Sequence[View], dim: int, sizes: tuple[Int, ...]) -> View | None:
        """The views one after another along `dim`, where they are neighbours in memory."""
        if math.prod(sizes[:dim]) != 1 or not math.prod(sizes):
            return None
        filled = [view for view in views if self.box(view).numel]
        return adjacent(filled, self.buffers[filled[0].buffer], sizes)

    def concatenated(
        self, views: Sequence[View], dim: int, sizes: tuple[Int, ...], name: str
    ) -> View:
        """The views one after another along `dim`: a view where they are neighbours in memory."""
        found = self.joined(views, dim, sizes)
        if found is not None:
            return found
        result = self.fresh(name, self.box(views[0]).dtype, sizes)
        return self.call("aten.cat.default", (tuple(views), dim), result)

    def copied(self, view: View) -> View:
        """A contiguous copy."""
        box = self.box(view)
        result = self.fresh(f"{view.buffer}_copy", box.dtype, box.sizes)
        return self.call(
            "aten.clone.default", (view,), result, {"memory_format": "@contiguous_format"}
        )

    def copied_like(self, name: str, view: View, like: torch.Tensor) -> View:
        """A copy in the shape, layout and element type of `like`."""
        buffer = buffer_like(self.name(name), like, "fresh")
        self.emit(Alloc(buffer=buffer, loc=self.loc))
        self.copy_into(view, self.declare(buffer, like))
        return View(buffer.name)

    def contiguous(self, view: View) -> View:
        """The view, or a contiguous copy of it."""
        return view if self.box(view).contiguous else self.copied(view)

    def viewed(self, view: View, sizes: tuple[Int, ...]) -> View | None:
        """The view with other sizes, or None where that needs a copy."""
        buffer = self.buffers[view.buffer]
        longer = view.then(Reshape(sizes))
        try:
            return shorten(longer, buffer, longer.box(buffer, NOWHERE))
        except ProgramError:
            return None

    def reshaped(self, view: View, sizes: tuple[Int, ...]) -> View:
        """The view with other sizes; of a contiguous copy where it must be."""
        found = self.viewed(view, sizes) or self.viewed(self.copied(view), sizes)
        assert found is not None, f"{view} of {self.sizes(view)} has no sizes {sizes}"
        return found

    def copy_into(self, src: View, dst: View) -> None:
        """Writes `src` (expanded) into `dst`; nothing where they are the same box."""
        target = self.box(dst)
        if src.buffer == dst.buffer:
            if self.box(src) == target:
                return
            if self.box(src).overlaps(target):
                src = self.copied(src)
        if self.sizes(src) != target.sizes:
            src = src.expand(*target.sizes)
        if self.host.isdisjoint((src.buffer, dst.buffer)):
            self.emit(Copy(src=src, dst=dst, loc=self.loc))
        else:
            fn = "aten.copy_.default"
            self.emit(Call(fn=fn, args=(dst, src), outs=(dst,), mutates=True, loc=self.loc))


SAME_DTYPES = {f"aten.{name}.default" for name in ("mm", "addmm", "mv", "addmv", "dot", "linear")}
"""Operators that eager refuses to call with operands of several dtypes, and a trace does not."""


def _opaque(node: fx.Node, name: str) -> tuple[str, str]:
    """Returns a description of a node that is no plain operator, and a remedy."""
    if name == "with_effects":
        return (
            f"it calls {node.args[1]} for its effect, as collectives of torch.distributed that "
            "write into a tensor do",
            "Write it with a functional collective (torch.distributed._functional_collectives), or "
            'use torch.compile(..., backend="interlace"), which makes it one',
        )
    return (
        "it holds another graph, calls back into Python, or takes a device mesh apart",
        "Move it out of the compiled function (torch.compiler.disable), write it with plain "
        'operators, or take the parts of a mesh once (tp = mesh["tp"]) for all models',
    )


def import_graph(
    gm: fx.GraphModule,
    *,
    name: str = "main",
    teams: Teams | None = None,
    values: Values | None = None,
    labels: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    given_up: Collection[int] = (),
) -> Imported:
    """The serial Program of an AOT graph.

    `values` gives each node's (fake) value; without it they are read from `meta["val"]`. `sizes`
    has the value of each symbol in them: the Program is then for a class of sizes with these among
    them. `teams` names the process groups; None takes those of torch.distributed.
    `labels` are the user's names of the arguments, by position, before AOTAutograd. The caller
    gives up the arguments at the positions `given_up`, as AOTAutograd does in backward: the Program
    frees each, which the pass plan_memory moves to its last use.
    """
    values = complete(gm) if values is None else values
    # Compilers are called in a mode where no tensor is real.
    with unset_fake_temporarily(), deciding(size_class(sizes or {})) as known:
        importer = Importer(gm, name, teams or Teams.of_torch(), values, labels, given_up)
        importer.reserve(f"s{number}" for number in range(len(known.values)))
        imported = importer.run()
        if not known.values:
            return imported
        program, symbols = imported.program.replace(sizes=known.size_class()).numbered()
        return replace(imported, program=program, symbols=symbols)
