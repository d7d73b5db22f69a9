"""form_regions: small calls that follow one another, and share data, become one region.

A chain of pointwise operators costs a launch and a trip through memory each; a region runs as one:

    t0 = aten.mul.Tensor(i0, 2.0); t1 = aten.add.Tensor(t0, i1); return t1

They share what one makes and another reads, and what both read, where that is as large as what they
make: then it is read once. Left alone are matmuls, attention, calls of a site, and calls that draw
random numbers, write in place or have several results, but for norms. A region begins where
communication arrives, so that no call waits for what it does not need of it. The same chain in two
layers is one region.

Note [Calls that move]: a matmul may stand between two calls of a chain, as between silu and the
product with another matmul's result. A call moves down to the small call that first reads what it
makes, if that makes as much and waits for nothing that arrives, and if nothing between changes or
frees what it reads; else up to the small call that makes the last of what it reads, if nobody reads
that later. Neither keeps more memory: of what moves past others one buffer at most takes another's
place, and is as large.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from interlace.ir import (
    Arg,
    AsStrided,
    Buffer,
    Call,
    Cast,
    Chunk,
    Expand,
    Name,
    Node,
    Op,
    Permute,
    Program,
    Region,
    Reshape,
    Select,
    Slice,
    Step,
    View,
)
from interlace.ir.operators import NORMS, is_heavy
from interlace.ir.sizes import Size
from interlace.passes.uses import Uses, used_by


@dataclass(frozen=True)
class FormRegions:
    """Merges runs of small calls into regions."""

    name: ClassVar[str] = "form_regions"

    def run(self, program: Program) -> Program:
        """The same Program, with chains of small calls as calls of regions."""
        former = _Former(program)
        ops: list[Op] = []
        for run, following in former.runs():
            ops += former.form(run)
            if following is not None and following.ordering().frees not in former.inside:
                ops.append(following)
        return program.replace(ops=tuple(ops), regions=tuple(former.regions.values()))


def _small(op: Call) -> bool:
    return (
        op.fn.startswith(("aten.", "prims."))
        and len(op.fresh) == NORMS.get(op.fn, 1)
        and not (op.outs or op.written or op.draws or op.facts.unwritten)
        and op.site is None
        and not (op.fn in NORMS and any(map(_leaves_out, op.args)))
        and not is_heavy(op.fn)
        and _is_fixed((*op.args, *(value for _, value in op.kwargs)))
    )


def _leaves_out(value: Arg) -> bool:
    """True for the mask of a backward that does not compute all its results."""
    return isinstance(value, tuple) and any(item is False for item in value)


def _is_fixed(value: Arg) -> bool:
    """True if it holds no size that differs from run to run: the body of a region has no sizes."""
    return all(map(_is_fixed, value)) if isinstance(value, tuple) else not isinstance(value, Size)


class _Former:
    """Makes regions of runs, each body once."""

    def __init__(self, program: Program) -> None:
        self.buffers = program.buffers()
        self.regions = {region.name: region for region in program.regions}
        self.known = {repr((r.inputs, r.body, r.outputs)): r.name for r in program.regions}
        """Regions by their text: 2 and 2.0 are equal, and mean other things to an operator."""
        calls, self.uses = program.calls(), Uses(program)
        self.small = {i: call for i, call in calls.items() if _small(call)}
        made = self.uses.makers.items()
        self.arrived = {name for name, by in made if not all(i in calls for i in by)}
        """Buffers that communication, or a copy, fills."""
        self.ops = self.moved(program)
        self.inside: set[str | None] = set()
        """Buffers that are none any more: values of a region that nobody else reads."""

    def moved(self, program: Program) -> list[tuple[Op, Call | None]]:
        """The ops, each with itself where it is a small call: small calls beside their neighbours
        in a chain, `Note [Calls that move]`; those at one place stay in their order."""
        if any(op.ordering().records for op in program.ops):  # by hand: streams wait for these
            return [(op, self.small.get(i)) for i, op in enumerate(program.ops)]
        uses, small = self.uses, self.small
        frees = {op.ordering().frees: i for i, op in enumerate(program.ops)}
        place = [*range(len(program.ops))]

        def ending(i: int, before: int) -> set[str]:
            """The buffers that the call reads and nobody from an op on: an input may go, too."""
            read = {view.buffer for view in small[i].views()} - uses.returned
            return {name for name in read if max(uses.users[name]) < before}

        for i, call in reversed(small.items()):  # down
            own, read = call.fresh[0], {view.buffer for view in call.views()}
            users = {j for made in call.fresh for j in uses.users.get(made.name, ())}
            users |= {j for made in call.fresh for j in uses.makers[made.name]}
            first = min(users - {i}, key=lambda j: (place[j], j), default=i)
            if first not in small or place[first] <= i + 1:
                continue
            reader, longer = small[first], ending(i, place[first])
            changes = [j for name in read for j in (*uses.makers.get(name, ()), frees.get(name, i))]
            if (
                reader.stream == call.stream
                and self.alike(own.name, reader.fresh[0])
                and self.arrived.isdisjoint({view.buffer for view in reader.views()})
                and not any(i < j <= place[first] for j in changes)
                and not any(map(self.shared, read))
                and len(longer) <= 1
                and all(self.as_large(name, own) for name in longer)
            ):
                place[i] = place[first]
        for i, call in small.items():  # up
            made = {j for view in call.views() for j in uses.makers.get(view.buffer, ()) if j < i}
            maker = max(made, key=lambda j: (place[j], j), default=i)
            if place[i] != i or maker not in small or place[maker] >= i - 1:
                continue
            own = small[maker].fresh[0]
            alone = own.name in ending(i, i + 1) and self.as_large(own.name, call.fresh[0])
            apart = not any(self.shared(view.buffer) for view in call.views())
            if alone and apart and small[maker].stream == call.stream:
                place[i] = place[maker]
        order = sorted(range(len(place)), key=lambda i: (place[i], i))
        return [(program.ops[i], small.get(i)) for i in order]

    def shared(self, name: str) -> bool:
        """True if what writes a buffer may name another: a peer's copy, or one of its storage."""
        buffer = self.buffers[name]
        return buffer.kind == "symmetric" or buffer.storage is not None

    def as_large(self, name: str, made: Buffer) -> bool:
        return self.buffers[name].dtype == made.dtype and self.alike(name, made)

    def runs(self) -> Iterator[tuple[list[Call], Op | None]]:
        """The list in pieces: small calls that follow one another on one stream, and another op
        behind them."""
        run: list[Call] = []
        made: set[str] = set()
        for op, call in self.ops:
            if call is None or not self.continues(run, made, call):
                yield run, op if call is None else None
                run, made = [], set()
            if call is not None:
                run.append(call)
                made.update(buffer.name for buffer in call.fresh)
        yield run, None

    def continues(self, run: Sequence[Call], made: set[str], call: Call) -> bool:
        """True if a call may go on with a run: it waits for nothing that arrives, but for what the
        first call waits for, and views of what the run has `made` are operators too."""
        if not run or run[-1].stream != call.stream:
            return False
        awaited = {view.buffer for view in run[0].views()}
        views = call.views()
        inside = (step for view in views if view.buffer in made for step in view.steps)
        return all(
            view.buffer in awaited or view.buffer not in self.arrived for view in views
        ) and all(_as_node(step) is not None for step in inside)

    def form(self, calls: Sequence[Call]) -> list[Call]:
        """A run with every group of calls that share data as a region."""
        formed: list[Call] = []
        for group in self.connected(calls):
            call = self.region(group) if len(group) > 1 else None
            formed += [call] if call is not None else group
        return formed

    def connected(self, calls: Sequence[Call]) -> list[list[Call]]:
        """The calls in groups that share no data with one another, each in order."""
        group: dict[object, int] = {}  # of what is made and read: the first call of its group
        made: dict[str, bool] = {}
        """For each result, True if it waits for what arrives: the others are not held up."""
        for i, call in enumerate(calls):
            own = call.fresh[0]
            read = {view.buffer for view in call.views()}
            waits = any(made.get(name, name in self.arrived) for name in read)
            shared: set[object] = {name for name in read if name in made}
            shared |= {(name, waits) for name in read - {*made} if self.alike(name, own)}
            shared |= {buffer.name for buffer in call.fresh}
            made |= dict.fromkeys((buffer.name for buffer in call.fresh), waits)
            joined = {group[name] for name in shared if name in group}
            first = min(joined, default=i)
            if len(joined) > 1:
                group |= {name: first for name, other in group.items() if other in joined}
            group |= dict.fromkeys(shared, first)
        groups: dict[int, list[Call]] = {}
        for call in calls:
            groups.setdefault(group[call.fresh[0].name], []).append(call)
        return [groups[first] for first in sorted(groups)]

    def used(self, name: str) -> int:
        """The number of ops that touch a buffer, and one more if it is returned."""
        users = {*self.uses.users.get(name, ()), *self.uses.makers.get(name, ())}
        return len(users) + (name in self.uses.returned)

    def alike(self, name: str, made: Buffer) -> bool:
        """True if a buffer has as many elements as one that is made."""
        shapes = self.buffers[name].shape, made.shape
        if shapes[0] and shapes[0] == shapes[1]:
            return True
        one, other = ([size for size in shape if isinstance(size, int)] for shape in shapes)
        fixed = (len(one), len(other)) == tuple(map(len, shapes))
        return bool(fixed and one and other) and math.prod(one) == math.prod(other)

    def region(self, calls: list[Call]) -> Call | None:
        """A call of the region of these calls; None where nobody would see what it computes."""
        body = _RegionBody()
        for call in calls:
            body.add(call)
        inside = Counter(name for call in calls for name in used_by((call,)))
        made = [buffer for call in calls for buffer in call.fresh]
        outputs = [buffer for buffer in made if self.used(buffer.name) > inside[buffer.name]]
        if not outputs:
            return None
        self.inside.update(buffer.name for buffer in made if buffer not in outputs)
        names = tuple(body.values[View(buffer.name)] for buffer in outputs)
        parts = (tuple(body.inputs.values()), tuple(body.nodes), names)
        key = repr(parts)
        if key not in self.known:
            number = len(self.regions)
            while f"region_{number}" in self.regions:
                number += 1
            self.known[key] = f"region_{number}"
            self.regions[f"region_{number}"] = Region(f"region_{number}", *parts)
        return Call(
            fn=self.known[key],
            args=tuple(body.inputs),
            fresh=tuple(outputs),
            stream=calls[0].stream,
            loc=calls[0].loc,
        )


@dataclass(slots=True)
class _RegionBody:
    """The body of a region as it grows."""

    inputs: dict[View, str] = field(default_factory=dict[View, str])
    values: dict[View, str] = field(default_factory=dict[View, str])
    nodes: list[Node] = field(default_factory=list[Node])

    def add(self, call: Call) -> None:
        """One more call."""
        args = tuple(map(self.arg, call.args))
        kwargs = tuple((key, self.arg(value)) for key, value in call.kwargs)
        self.node([View(buffer.name) for buffer in call.fresh], call.fn, args, kwargs)

    def node(
        self,
        made: Sequence[View],
        fn: str,
        args: tuple[Arg, ...],
        kwargs: tuple[tuple[str, Arg], ...] = (),
    ) -> str:
        """A new node, for whose results the views stand; gives the name of the first."""
        first = f"t{len(self.nodes)}"
        names = (first, *(f"{first}_{place}" for place in range(1, len(made))))
        self.values |= zip(made, names, strict=True)
        self.nodes.append(Node(names, fn, args, kwargs))
        return first

    def arg(self, value: Arg) -> Arg:
        """An argument as the body spells it."""
        if isinstance(value, tuple):
            return tuple(map(self.arg, value))
        return Name(self.view(value)) if isinstance(value, View) else value

    def view(self, view: View) -> str:
        """The name of a view: of a value inside, taken inside; else an input."""
        if view in self.values:
            return self.values[view]
        if View(view.buffer) not in self.values:
            return self.inputs.setdefault(view, f"i{len(self.inputs)}")
        *steps, last = view.steps
        whole = Name(self.view(View(view.buffer, tuple(steps))))
        made = _as_node(last)
        assert made is not None, "such a view begins another run"
        fn, args = made
        return self.node([view], fn, (whole, *args))


def _as_node(step: Step) -> tuple[str, tuple[Arg, ...]] | None:
    """The operator that takes a step of a view, with its arguments; None where none does."""
    made = _operator(step)
    return made if made is None or _is_fixed(made[1]) else None


def _operator(step: Step) -> tuple[str, tuple[Arg, ...]] | None:
    match step:
        case Slice(dim, int(start), int(stop)):
            return "aten.slice.Tensor", (dim, start, stop)
        case Select(dim, index):
            return "aten.select.int", (dim, index)
        case Permute(dims):
            return "aten.permute.default", (dims,)
        case Reshape(sizes):
            return "aten.view.default", (sizes,)
        case Expand(sizes):
            return "aten.expand.default", (sizes,)
        case Cast(dtype):
            return "aten.view.dtype", (dtype,)
        case AsStrided(sizes, strides, offset):
            return "aten.as_strided.default", (sizes, strides, offset)
        case Chunk() | Slice():
            return None
