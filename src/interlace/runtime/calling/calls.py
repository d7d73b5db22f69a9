"""Calls: from the name of an operator and the places of its arguments to one bound function.

    run = bind_call(op, values, regions={}, device=torch.device("cpu"))
    run()                    # torch.ops.aten.mm.out(a, b, out=y), whatever a, b and y are this time

A Call without `fresh` and without an `out` form is computed and copied into its `outs`; results
that the Program declares with other strides than torch gives are copied into those strides.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from interlace.comm.collectives import reduce_into
from interlace.errors import ExecutorError, ProgramError
from interlace.ir import Arg, Box, Buffer, Call, Region, View
from interlace.ir.sizes import Size, named, numbers
from interlace.kernels import KERNELS
from interlace.runtime.calling import regions as region_calls
from interlace.runtime.calling.effects import apart, confirm, fills_list, may_share
from interlace.runtime.calling.operators import Operator, decode, resolve
from interlace.runtime.prepare.plan import Plan
from interlace.runtime.values import DTYPES, ValueTable, alike, whole

Thunk = Callable[[], object]
Outputs = tuple[Any, ...]
"""Results of a run: a tensor, a number, a word or a tuple of these for each."""
Read = Callable[[], Sequence[Any]]


def in_turn(runs: Sequence[Thunk]) -> Thunk:
    """One function that calls these."""
    if len(runs) == 1:
        return runs[0]

    def run() -> None:
        for each in runs:
            each()

    return run


QUICK: Mapping[str, Operator] = MappingProxyType(
    {
        "aten.mm.out": torch.mm,
        "aten.addmm.out": torch.addmm,
        "aten.addmm_.default": torch.Tensor.addmm_,
        "aten.bmm.out": torch.bmm,
        "aten.add.out": torch.add,
        "aten.mm.default": torch.mm,
        "aten.add.Tensor": torch.add,
        "aten.mul.Tensor": torch.mul,
        "aten.clone.default": torch.clone,
    }
)
"""The same operators by torch's own bindings, which cost the host 0.5 to 2 microseconds less."""


def reader(args: Sequence[Arg], values: ValueTable, device: torch.device) -> Read:
    """A function that gives the arguments of a run."""
    specs = [_spec(arg, values, device) for arg in args]
    items = values.items
    if any(isinstance(spec, list) for spec in specs):
        return lambda: [_take(spec, items) for spec in specs]
    return _by_place([spec for spec in specs if isinstance(spec, int)], items)


def _differs(arg: Arg) -> bool:
    """True if an argument may be another one in each run."""
    return any(map(_differs, arg)) if isinstance(arg, tuple) else isinstance(arg, View | Size)


def _by_place(places: Sequence[int], items: list[Any]) -> Results:
    if not places:
        return lambda: ()
    if len(places) == 1:
        (only,) = places
        return lambda: (items[only],)
    getter = operator.itemgetter(*places)
    return lambda: getter(items)


Places = int | list["Places"]


def _spec(arg: Arg, values: ValueTable, device: torch.device) -> Places:
    if isinstance(arg, View):
        return values.own(arg)
    if isinstance(arg, Size):
        return values.numbers((arg,), operator.itemgetter(0))
    if isinstance(arg, tuple) and any(isinstance(item, Size) for item in arg):
        sizes = [item for item in arg if isinstance(item, int | Size)]
        if len(sizes) == len(arg):
            return values.numbers(sizes, list)
    if isinstance(arg, tuple):
        return [_spec(item, values, device) for item in arg]
    return values.constant(decode(arg, device))


def _take(spec: Places, items: list[Any]) -> Any:
    return [_take(item, items) for item in spec] if isinstance(spec, list) else items[spec]


def bind_call(
    op: Call,
    values: ValueTable,
    regions: Mapping[str, Region],
    device: torch.device,
    compile_regions: bool = False,
) -> Thunk:
    region = regions.get(op.fn)
    confirm(op, region)
    if region is not None:
        run, shares = _region(op, region, values, device, compile_regions)
        read = reader(op.args, values, device)
        if op.fresh and not shares:
            return _fresh_region(op, run, read, values)
        return _placed(op, shares, lambda: run([*read()]), values)
    fn = resolve(op.fn)
    shares = may_share(fn)
    quick = QUICK.get(op.fn, fn)
    if op.fn == "interlace.sum_slots" and device.type == "cpu" and not op.fresh:
        quick = reduce_into  # as the collectives of `peer` do: without a look at the device
    call = _invoke(quick, op, values, device)
    if op.fresh or op.mutates or not op.outs:
        return _placed(op, shares, call, values)
    out_names = _out_names(fn)
    quickly = out_names and op.fn in QUICK and not op.kwargs
    if quickly and all(isinstance(arg, View) for arg in op.args):
        return quick_call(op, QUICK[op.fn], values)
    if out_names:
        listed = fills_list(fn)
        if not listed and len(out_names) != len(op.outs):
            raise ProgramError(f"{op.fn} fills {len(out_names)} outputs, not {len(op.outs)}")
        return _into(op, call, out_names, listed, values)
    return _copied(op, False, call, values)


def _placed(op: Call, shares: bool, call: Operator, values: ValueTable) -> Thunk:
    """A call whose results, if it has some, are the Call's."""
    if op.fresh:
        return _fresh(op, shares, call, values)
    return call if op.mutates or not op.outs else _copied(op, shares, call, values)


def _invoke(fn: Operator, op: Call, values: ValueTable, device: torch.device) -> Operator:
    """The operator with the arguments of a run; it is called with the outputs that it fills."""
    read = reader(op.args, values, device)
    names, given = [name for name, _ in op.kwargs], [value for _, value in op.kwargs]
    read_named = reader(given, values, device)
    if any(map(_differs, given)):
        return lambda **outs: fn(*read(), **dict(zip(names, read_named(), strict=True)), **outs)
    if names:
        fn = partial(fn, **dict(zip(names, read_named(), strict=True)))
    return lambda **outs: fn(*read(), **outs)


def _region(
    op: Call, region: Region, values: ValueTable, device: torch.device, compile_regions: bool
) -> tuple[region_calls.Run, bool]:
    views = op.views()
    touched = {view.buffer for view in views} | {buffer.name for buffer in op.fresh}
    boxes = [values.box(view) for view in views]
    if not compile_regions or not values.host.isdisjoint(touched):
        return region_calls.eager(region, device)
    sizes = [size for box in boxes for size in (*box.sizes, *box.strides) if isinstance(size, Size)]
    if not sizes:
        fixed = [(numbers(b.sizes), numbers(b.strides), DTYPES[b.dtype]) for b in boxes]
        return region_calls.inductor(region, tuple(fixed), device)
    names = sorted(frozenset[str]().union(*(size.names for size in sizes)))
    layouts = tuple([(box.sizes, box.strides, DTYPES[box.dtype]) for box in boxes])
    run_at = region_calls.inductor_by_size(region, tuple(names), layouts, device)
    held = values.sizes.sized([named(name) for name in names], run_at)
    return lambda args: held.now(args), False


def _out_names(fn: Operator) -> tuple[str, ...]:
    """The keyword arguments by which an operator takes what it fills."""
    schema = getattr(fn, "_schema", None)
    if schema is not None:
        return tuple(argument.name for argument in schema.arguments if argument.is_out)
    return ("out",) if fn in KERNELS.values() else ()


def _into(
    op: Call, call: Callable[..., None], names: Sequence[str], listed: bool, values: ValueTable
) -> Thunk:
    """A call that fills its outputs, by keyword or (`listed`) as one list; one that would resize
    them is an error, not a surprise."""
    items, places = values.items, [values.own(view) for view in op.outs]
    wanted = [values.sizes.sized(values.box(view).sizes, tuple) for view in op.outs]
    if len(places) == 1 and not listed:
        (name,), (place,), (only,) = names, places, wanted

        def run_one() -> None:
            out = items[place]
            call(**{name: out})
            if out.shape != only.now:
                raise resized(op, out.shape, only.now)

        return run_one

    def run() -> None:
        outs = [items[place] for place in places]
        call(**({names[0]: outs} if listed else dict(zip(names, outs, strict=True))))
        for out, size in zip(outs, wanted, strict=True):
            if out.shape != size.now:
                raise resized(op, out.shape, size.now)

    return run


def _copied(op: Call, shares: bool, call: Operator, values: ValueTable) -> Thunk:
    items, outs = values.items, [values.own(view) for view in op.outs]
    places = dict.fromkeys(map(values.own, op.views())) if shares else {}

    def run() -> None:
        results = _flat(call())
        if shares:
            results = apart(results, [items[place] for place in places])
        if len(results) != len(outs):
            raise ExecutorError(f"{op.fn} gives {len(results)} tensors, not {len(outs)}")
        for place, result in zip(outs, results, strict=True):
            out = items[place]
            if out.shape != result.shape:
                raise resized(op, result.shape, out.shape)
            out.copy_(result)

    return run


def _flat(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, tuple | list):
        return [tensor for item in result for tensor in _flat(item)]
    return []


def _fresh(op: Call, shares: bool, call: Operator, values: ValueTable) -> Thunk:
    """A call that makes its own outputs; they never share memory with its arguments."""
    made = [_Made(buffer, values) for buffer in op.fresh]
    if len(made) == 1 and not shares:
        (one,) = made
        dtype, bind = one.dtype, one.bind

        def run_one() -> None:
            result = call()
            if not isinstance(result, torch.Tensor):
                (result,) = _flat(result)
            if result.stride() != one.strides or result.shape != one.sizes or result.dtype != dtype:
                result = one.as_declared(op, result)
            bind(result)

        return run_one
    items, places = values.items, dict.fromkeys(map(values.own, op.views()))

    def run() -> None:
        given = call()
        results: Sequence[torch.Tensor | None] = _flat(given)
        if len(results) != len(made):
            results = _filled(op, made, given, results)
        results = apart(results, [items[place] for place in places])
        for each, result in zip(made, results, strict=True):
            if result is not None:
                each.bind(each.as_declared(op, result))

    return run


def _fresh_region(op: Call, call: region_calls.Run, read: Read, values: ValueTable) -> Thunk:
    """A region that makes its own outputs, apart from its arguments: what they are is the same in
    all runs of the same sizes."""
    made = [_Made(buffer, values) for buffer in op.fresh]

    def run() -> None:
        results = call([*read()])
        if len(results) != len(made):
            raise ExecutorError(f"{op.fn} gives {len(results)} tensors, not {len(made)}")
        for each, result in zip(made, results, strict=True):
            if not each.exact:
                result = each.as_declared(op, result)
            each.bind(result)

    return run


class _Made:
    """A buffer that a call makes, as the Program declares it."""

    def __init__(self, buffer: Buffer, values: ValueTable) -> None:
        box = whole(buffer)
        self.name, self.dtype, self.device = buffer.name, DTYPES[box.dtype], values.device
        self.bind = partial(values.bind, buffer.name)
        self.used = buffer.name in values.used
        self.sizes: tuple[int, ...] = ()
        self.strides: tuple[int, ...] = ()
        self.exact = False
        """True once a result of these sizes came with the declared strides."""
        values.sizes.follow_box(box, self._size)

    def _size(self, box: Box) -> None:
        self.sizes, self.strides, self.exact = numbers(box.sizes), numbers(box.strides), False

    def fits(self, result: torch.Tensor) -> bool:
        return result.dtype == self.dtype and result.shape == self.sizes

    def zeros(self) -> torch.Tensor:
        facts = {"dtype": self.dtype, "device": self.device}
        return torch.empty_strided(self.sizes, self.strides, **facts).zero_()

    def as_declared(self, op: Call, result: torch.Tensor) -> torch.Tensor:
        """The result with the strides that the Program's views count on."""
        if not self.fits(result):
            raise ExecutorError(
                f"{op.fn} gives {result.dtype} of shape {list(result.shape)}, but the Program "
                f"declares {self.name} as {self.dtype} of shape {list(self.sizes)}"
            )
        if result.stride() == self.strides or result.numel() == 0:
            self.exact = True
            return result
        if alike(result, self.strides):
            return result.as_strided(self.sizes, self.strides)
        facts = {"dtype": self.dtype, "device": result.device}
        return torch.empty_strided(self.sizes, self.strides, **facts).copy_(result)


def _filled(
    op: Call, made: Sequence[_Made], given: Any, results: Sequence[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    """The results, with zeros for those that an operator left out and None for what nobody uses."""
    placed: Sequence[Any] = [item for item in given if item is None or torch.is_tensor(item)]
    by_place = len(placed) == len(made)
    left, found = iter(placed if by_place else results), list[torch.Tensor | None]()
    here = next(left, None)
    for each in made:
        fits = here is not None and each.fits(here)
        found.append(here if fits else each.zeros() if each.used else None)
        if by_place or fits:
            here = next(left, None)
    if here is not None or not results:
        raise ExecutorError(f"{op.fn} gives {len(results)} tensors, not {len(made)}")
    return found


def quick_call(op: Call, fn: Operator, values: ValueTable) -> Thunk:
    """A call of one of `QUICK`, of tensors alone: the shape of its result is compared once."""
    items, (view,) = values.items, op.outs
    first, second, *third = map(values.own, op.views())
    out, wanted, known = values.own(view), (), False

    def expect(sizes: tuple[int, ...]) -> None:
        nonlocal wanted, known
        wanted, known = sizes, False

    def check() -> None:
        nonlocal known
        if items[out].shape != wanted:
            raise resized(op, items[out].shape, wanted)
        known = True

    values.sizes.follow(values.box(view).sizes, expect)

    def run_two() -> None:
        fn(items[first], items[second], out=items[out])
        if not known:
            check()

    def run_three() -> None:
        fn(items[first], items[second], items[third[0]], out=items[out])
        if not known:
            check()

    return run_three if third else run_two


def resized(op: Call, got: Sequence[int], wanted: Sequence[int]) -> ExecutorError:
    return ExecutorError(
        f"{op.fn} gives a result of shape {list(got)}, but the Program has {list(wanted)} for it"
    )


Results = Callable[[], Outputs]


def reader_of(returned: Sequence[Arg], plan: Plan, values: ValueTable) -> Results:
    """A function that reads the results of the run under way."""
    reads = [_result(arg, plan, values) for arg in returned]
    items = values.items
    places = [read for read in reads if isinstance(read, int)]
    if len(places) == len(reads):
        return _by_place(places, items)
    return lambda: tuple([items[read] if isinstance(read, int) else read() for read in reads])


def _result(arg: Arg, plan: Plan, values: ValueTable) -> int | Callable[[], Any]:
    """A place in the table, or what gives a result that is not there."""
    if isinstance(arg, View):
        kind = plan.buffers[arg.buffer].kind
        if kind not in ("input", "output", "fresh"):
            raise ProgramError(
                f"{plan.program.name} returns the {kind} buffer {arg.buffer!r}, whose storage "
                "the next run reuses: return a fresh buffer or an output"
            )
        return values.own(arg)
    if isinstance(arg, tuple):
        return reader_of(arg, plan, values)
    if isinstance(arg, Size):
        return values.numbers((arg,), operator.itemgetter(0))
    value = decode(arg, values.device)
    return lambda: value
