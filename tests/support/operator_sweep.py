"""Operators of torch through texts that declare nothing, held against eager.

    sweep().otherwise         # what runs otherwise

A case is *equal* where the text that says nothing of what the operator writes or draws runs, and
its results, what it leaves in its arguments and the state of the random numbers have eager's bits,
and no result lies in an argument's memory; *refused* where a typed error says why; else it is
*otherwise*, which none may be.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.support.operator_cases import Case, cases, copied, tensors

import interlace
from interlace.errors import InterlaceError
from interlace.ir import parse
from interlace.runtime import Executor
from interlace.runtime.values import DTYPES

NAMES = {dtype: str(name) for name, dtype in DTYPES.items()}
WORDS = {
    torch.strided: "@strided",
    torch.contiguous_format: "@contiguous_format",
    torch.preserve_format: "@preserve_format",
    torch.channels_last: "@channels_last",
    torch.channels_last_3d: "@channels_last_3d",
}


class Unspelt(Exception):
    """A case that no text can say; the message is why."""


class Unfit(Exception):
    """No case: eager itself raises, or differs from run to run."""


def _overlaps(tensor: torch.Tensor) -> bool:
    """Returns True if elements may share memory, as they never do in memory of its own."""
    return torch._debug_has_internal_overlap(tensor) != 0


def _type(tensor: torch.Tensor, result: bool = False) -> str:
    if tensor.dtype not in NAMES:
        raise Unspelt(f"no element type for {tensor.dtype}")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
        raise Unspelt("a tensor that is not strided")
    found = f"{NAMES[tensor.dtype]}[{', '.join(map(str, tensor.shape)) or '()'}]"
    if tensor.is_contiguous() or not tensor.numel() or (result and _overlaps(tensor)):
        return found
    return f"{found}.strides({', '.join(map(str, tensor.stride()))})"


def _arg(value: Any, names: dict[int, str]) -> str:
    if isinstance(value, torch.Tensor):
        return names[id(value)]
    if isinstance(value, list | tuple):
        items = [_arg(item, names) for item in value]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if isinstance(value, torch.dtype):
        if value not in NAMES:
            raise Unspelt(f"no element type for {value}")
        return NAMES[value]
    if isinstance(value, torch.device):
        return '"@device"'
    if isinstance(value, torch.layout | torch.memory_format):
        if value not in WORDS:
            raise Unspelt(f"no word for {value}")
        return f'"{WORDS[value]}"'
    if value is None or isinstance(value, bool | int | str):
        return repr(value)
    if isinstance(value, float | complex):
        return f"{value!r}" if value == value else "nan"
    raise Unspelt(f"an argument is a {type(value).__name__}")


def _copies(case: Case) -> tuple[Any, ...]:
    return copied((case.args, case.kwargs))


@dataclass
class Eager:
    """Eager's outcome of a case."""

    given: list[torch.Tensor]
    results: list[torch.Tensor]
    state: torch.Tensor


def _eager(case: Case, fill: int = 0) -> Eager:
    args, kwargs = _copies(case)
    given = _distinct((args, kwargs))
    outs = _outs(case, fill) if case.form == "out" else {}
    torch.manual_seed(7)
    with torch.no_grad():
        found = case.op(*args, **kwargs, **outs)
    if case.form == "out":
        results = tensors(outs)
    else:
        results = tensors(found)
        if case.form == "in place":
            results = [r for r in results if not any(r is g for g in given)]
    return Eager(given, results, torch.get_rng_state())


def _outs(case: Case, fill: int) -> dict[str, Any]:
    """Memory of the sizes and types that the operator without `out=` gives, full of a number."""
    schema = case.op._schema
    places = [a for a in schema.arguments if a.is_out]
    args, kwargs = _copies(case)
    torch.manual_seed(7)
    with torch.no_grad():
        for made in _functional(case):
            try:
                results = tensors(made(*args, **kwargs))
                break
            except Exception:
                continue
        else:
            raise Unfit("nothing says what it fills")
    if "List" in str(places[0].type):
        return {places[0].name: [torch.full_like(item, fill) for item in results]}
    if len(results) != len(places):
        raise Unfit("nothing says what it fills")
    return {
        place.name: torch.full_like(item, fill) for place, item in zip(places, results, strict=True)
    }


def _functional(case: Case) -> list[Any]:
    schema = case.op._schema
    packet = getattr(getattr(torch.ops, case.op.namespace), schema.name.partition("::")[2])
    wanted = [(a.name, str(a.type)) for a in schema.arguments if not a.is_out]
    found = [getattr(packet, overload) for overload in packet.overloads()]
    return [op for op in found if [(a.name, str(a.type)) for a in op._schema.arguments] == wanted]


def _distinct(value: Any) -> list[torch.Tensor]:
    return list({id(tensor): tensor for tensor in tensors(value)}.values())


def text_of(case: Case, eager: Eager) -> tuple[str, list[torch.Tensor]]:
    """The case as a schedule that declares nothing, and its inputs."""
    args, kwargs = _copies(case)
    inputs = _distinct((args, kwargs))
    names = {id(tensor): f"x{i}" for i, tensor in enumerate(inputs)}
    given = [_arg(arg, names) for arg in args]
    given += [f"{key}={_arg(value, names)}" for key, value in kwargs.items()]
    head, body = [f"x{i}: {_type(tensor)}" for i, tensor in enumerate(inputs)], []
    results = [f"y{i}" for i in range(len(eager.results))]
    if case.form == "out":
        body += [f"y{i} = empty({_type(t)})" for i, t in enumerate(eager.results)]
        given.append(f"out=({', '.join(results)},)")
    elif results:
        made = [f"y{i} := {_type(t, True)}" for i, t in enumerate(eager.results)]
        given.append("out=(" + "".join(f"({m}), " if len(made) > 1 else m for m in made) + ")")
    body.append(f'main: call("{case.fn}", {", ".join(given)})')
    if results:
        body.append(f"return {', '.join(results)}")
    lines = "\n".join(f"    {line}" for line in body)
    return f"def f({', '.join(head)}):\n{lines}\n", inputs


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = (
        one.detach().resolve_conj().resolve_neg(),
        other.detach().resolve_conj().resolve_neg(),
    )
    if one.dtype.is_complex:
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    if one.dtype.is_floating_point:
        both = one.isnan() & other.isnan()
        one, other = one.masked_fill(both, 0), other.masked_fill(both, 0)
        if not torch.equal(torch.signbit(one), torch.signbit(other)):
            return False
    return torch.equal(one, other)


def _differs(one: Eager, other: Eager) -> str:
    if len(one.results) != len(other.results):
        return "number of results"
    for i, pair in enumerate(zip(one.results, other.results, strict=True)):
        if not _same(*pair):
            return f"result {i}"
    for i, pair in enumerate(zip(one.given, other.given, strict=True)):
        if not _same(*pair):
            return f"argument {i} afterwards"
    return "" if torch.equal(one.state, other.state) else "state of the random numbers"


def attempt(case: Case) -> tuple[str, str]:
    """`equal`, `refused` or `otherwise`, with the reason; `unfit` is no case."""
    try:
        eager, again = _eager(case), _eager(case, fill=1)
    except (Exception, Unfit) as error:
        return "unfit", f"{type(error).__name__}: {error}"
    try:
        text, inputs = text_of(case, eager)
    except Unspelt as error:
        return "refused", str(error)
    try:
        program = parse(text)
        program = parse(str(program))
        report = interlace.check([program])
        if not report.sound:
            kinds = [finding.kind for finding in report.findings if finding.level != "remark"]
            return "refused", f"unsound: {', '.join(sorted({*kinds}))}"
        with Executor(program).prepare() as executor:
            torch.manual_seed(7)
            results = tensors(list(executor.run(inputs)))
            state = torch.get_rng_state()
    except InterlaceError as error:
        return "refused", f"{type(error).__name__}: {_reason(str(error))}"
    except Exception as error:
        return "otherwise", f"untyped {type(error).__name__}: {str(error)[:200]}"
    ran = Eager(inputs, results, state)
    if why := _differs(ran, eager):
        if case.form != "out" and _differs(again, eager):
            return "unfit", "eager differs from run to run"
        return "otherwise", why
    if case.form == "out" and _differs(again, eager):
        return "otherwise", "it leaves memory that it fills as it was"
    memory = {tensor.untyped_storage()._cdata for tensor in inputs}
    if any(r.numel() and r.untyped_storage()._cdata in memory for r in results):
        return "otherwise", "a result lies in an argument's memory"
    return "equal", ""


def _reason(message: str) -> str:
    line = message.split("\n")[0]
    line = re.sub(r"^f, line \d+, from <text>:\d+: ", "", line)
    line = re.sub(r"'?(aten|prims)\.[\w.]+'?", "OP", line)
    return re.sub(r"\d+", "N", line)[:110]


@dataclass
class Tally:
    """Outcomes of all cases."""

    by_op: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The outcomes of an overload's cases."""
    refused: set[str] = field(default_factory=set[str])
    """Reasons of refusals."""
    otherwise: list[str] = field(default_factory=list[str])

    @property
    def running(self) -> list[str]:
        """Overloads of which at least one case runs, and none otherwise."""
        return [fn for fn, of in self.by_op.items() if "equal" in of and "otherwise" not in of]


def sweep(seed: int = 0) -> Tally:
    """Tries all cases."""
    tally = Tally()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in cases(seed):
            outcome, reason = attempt(case)
            if outcome != "unfit":
                tally.by_op[case.fn].add(outcome)
            if outcome == "refused":
                tally.refused.add(reason)
            if outcome == "otherwise":
                tally.otherwise.append(f"{case.fn} ({case.info}): {reason}")
    return tally
