"""Operators of PyTorch: what each is, what it does to memory, and which a schedule may call.

    >>> operator_of("aten.addmm.default").lhs, operator_of("aten.gelu.default").into
    (1, 'aten.gelu.out')
    >>> facts_of("aten.add_.Tensor").writes, facts_of("aten.rand.default").draws
    (((0, 'self'),), True)
    >>> refusal("operator.call")
    "'operator.call' is no operator: Python's own functions are not reached from a schedule"

To teach Interlace an operator, add a row to `OPERATORS`: the one table that checks, passes, costs
and binders ask. A call of any other name is opaque: it is run as it is, costs the bytes that it
touches, and is never cut.

What an operator writes in place, draws and leaves unwritten is in `operators.txt`: a line for each
operator with all its overloads, written by `scripts/operator_table.py` from torch's own schemas and
tags, so that nothing here needs torch. A word is an overload and, after colons, where it differs
from what its name says:

    w3=running_mean     writes argument 3, which is called so, in place
    o=values,indices    the keywords of the memory that it fills
    d                   draws random numbers; d4=dropout_p: unless that argument is 0
    u                   leaves the memory of its results unwritten
    s                   of its first argument it takes the shape alone
    m                   changes an argument's shape, strides or memory: no schedule may call it

By its name, an operator that ends in one underscore writes argument 0, `self`, and an overload that
ends in `out` fills the keyword `out`.

A name in a schedule is data from a file, so it is looked up, never walked. Operators outside
PyTorch's own namespaces are refused unless the caller names them: a schedule from a file is not
trusted, and an operator of another library may read files or foreign memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeVar

T = TypeVar("T")
Kind = Literal["matmul", "pointwise", "cast", "reduction", "movement", "indexed", "effect"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """Properties of an operator."""

    kind: Kind
    """`matmul`: multiplies matrices. `pointwise`: computes each element for itself, with
    broadcasting, and may write over an operand that is just the result's view. `cast`: the same
    into another element type; a Copy does it. `reduction`: over the dimensions of the second
    argument. `movement`: elements of its arguments in another place. `indexed`: data decide where
    an element lies. `effect`: reaches beyond its arguments."""
    into: str = ""
    """The overload that writes into given memory."""
    lhs: int = 0
    """Matmul: index of the argument with the rows of the result; the right factor is the next."""
    rows: tuple[int, ...] = ()
    """Arguments that may have one row for each row of the result (else they are passed whole)."""
    batched: bool = False
    """Each of several stacks of rows is multiplied by a matrix of its own."""
    cut: bool = False
    """Row i of the result needs row i of the operand alone, so that rows may come in chunks."""
    scaled: bool = False
    """The element type of the result differs from that of the factors."""
    bias: int | None = None
    """Matmul of the kernels: index of the bias that it adds."""
    blocks: int | None = None
    """Scaled matmul: index of the argument that counts the equal blocks of rows with one scale
    each; if that is 0, each row has its own."""
    why: str = ""
    """Why it cannot be cut (`indexed`) or may not be called (`effect`)."""

    @property
    def fusable(self) -> bool:
        """True if the kernels of the strategy `fused` compute it."""
        return self.cut and not self.batched and (not self.scaled or self.blocks is not None)


MATMUL_NAMES = {
    "mm": Operator(kind="matmul", into="aten.mm.out", cut=True),
    "addmm": Operator(kind="matmul", into="aten.addmm.out", lhs=1, rows=(0,), bias=0, cut=True),
    "addmm_": Operator(kind="matmul", lhs=1),
    "bmm": Operator(kind="matmul", into="aten.bmm.out", batched=True, cut=True),
    "baddbmm": Operator(
        kind="matmul", into="aten.baddbmm.out", lhs=1, rows=(0,), bias=0, batched=True, cut=True
    ),
    "_scaled_mm": Operator(
        kind="matmul", into="aten._scaled_mm.out", rows=(2,), scaled=True, cut=True
    ),
    "float8_mm": Operator(
        kind="matmul", into="interlace.float8_mm.out", scaled=True, bias=3, blocks=2, cut=True
    ),
    "_grouped_mm": Operator(kind="matmul", batched=True),
    "matmul": Operator(kind="matmul"),
    "linear": Operator(kind="matmul"),
}
"""Operators that multiply matrices, by name without namespace and overload."""

_UNARY = (
    *("abs", "ceil", "cos", "erf", "exp", "expm1", "floor", "gelu", "hardswish", "leaky_relu"),
    *("log", "log1p", "log2", "mish", "neg", "reciprocal", "relu", "round", "rsqrt", "sigmoid"),
    *("sign", "silu", "sin", "sqrt", "square", "tan", "tanh", "trunc"),
)
_BACKWARD = (
    *("gelu_backward", "silu_backward", "sigmoid_backward", "tanh_backward"),
    *("threshold_backward", "leaky_relu_backward"),
)
POINTWISE = {
    **{f"aten.{name}.default": f"aten.{name}.out" for name in _UNARY},
    **{f"aten.{name}.default": f"aten.{name}.grad_input" for name in _BACKWARD},
    **{f"aten.{name}.Tensor": f"aten.{name}.out" for name in ("add", "sub", "mul", "div")},
    **{f"aten.{name}.Scalar": f"aten.{name}.Scalar_out" for name in ("add", "sub", "mul", "div")},
    "aten.clamp.default": "aten.clamp.out",
    "aten.maximum.default": "aten.maximum.out",
    "aten.minimum.default": "aten.minimum.out",
    "aten.pow.Tensor_Scalar": "aten.pow.Tensor_Scalar_out",
    "aten.pow.Tensor_Tensor": "aten.pow.Tensor_Tensor_out",
    "aten.where.self": "aten.where.self_out",
}
"""Pointwise operators, each with the overload that writes into given memory."""

_OTHERS: dict[Kind, tuple[str, ...]] = {
    "cast": ("aten._to_copy.default", "prims.convert_element_type.default"),
    "reduction": (
        *("aten.sum.dim_IntList", "aten.mean.dim", "aten.amax.default", "aten.amin.default"),
        *("aten.prod.dim_int", "aten.argmax.default"),
    ),
    "movement": (
        *("aten.cat.default", "aten.constant_pad_nd.default"),
        *("aten.clone.default", "aten.contiguous.default", "aten.alias.default"),
        *("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default"),
    ),
}

OPERATORS: dict[str, Operator] = {
    **{
        f"{row.into.partition('.')[0]}.{name}.default": row
        for name, row in MATMUL_NAMES.items()
        if row.cut
    },
    **{row.into: row for row in MATMUL_NAMES.values() if row.cut},
    **{fn: Operator(kind="pointwise", into=into) for fn, into in POINTWISE.items()},
    **{fn: Operator(kind=kind) for kind, names in _OTHERS.items() for fn in names},
}
"""Operators by namespace, name and overload; none of them draws."""

_PERMUTED = " (it puts rows in an order that is data: no chunk's place is known beforehand)"
_NO_BOUNDS = "it makes a view without a look at where its memory ends"
BY_NAME: dict[str, Operator] = {
    **{
        f"aten.{name}": Operator(kind="indexed", why=_PERMUTED)
        for name in ("index", "gather", "take", "scatter")
    },
    "aten._grouped_mm": Operator(kind="indexed", why=" whose groups have sizes known beforehand"),
    **{
        f"aten.{name}": Operator(kind="effect", why=_NO_BOUNDS)
        for name in (
            *("_reshape_alias", "_reshape_alias_copy", "set_", "set"),
            *("_nested_view_from_buffer", "_nested_view_from_buffer_copy"),
        )
    },
    "aten.from_file": Operator(
        kind="effect", why="it maps a file into memory, and may make or change it"
    ),
    "aten.save": Operator(kind="effect", why="it writes a file"),
    "aten._print": Operator(kind="effect", why="it writes to the terminal"),
}
"""Refused operators, by namespace and name (for `indexed`, a prefix of the name)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScales:
    """Use of packed FP8 rows, which carry their scale (Note [Packed rows] in float8/data.py)."""

    quantizes: bool = False
    """The call makes such rows by one maximum, its argument 1; if that is None, each by its own."""
    moves: bool = False
    """It only moves rows: those of its operands, one operand after another."""
    cut: tuple[int, ...] = ()
    """Arguments that it takes in equal blocks of rows with one scale each; argument 2 counts the
    blocks, and if that is 0, each row has its own."""
    whole: tuple[int, ...] = ()
    """Arguments whose transpose is one such block."""


ROW_SCALES: dict[str, RowScales] = {
    "float8_mm": RowScales(cut=(0,), whole=(1,)),
    "float8_turn": RowScales(cut=(0, 1)),
    **dict.fromkeys(("float8_rows", "float8_across", "float8_pair"), RowScales(quantizes=True)),
    **dict.fromkeys(
        ("cat", "clone", "contiguous", "alias", "view", "reshape", "_unsafe_view"),
        RowScales(moves=True),
    ),
}
"""Calls that make, move or multiply packed FP8 rows, by name without namespace and overload."""
NO_ROWS = RowScales()

_POINTWISE_INTO = frozenset(POINTWISE.values())


def operator_of(fn: str) -> Operator | None:
    """The properties of the operator that a Call names; None for one without a row."""
    return OPERATORS.get(fn)


def matmul_of(fn: str) -> Operator | None:
    """A matrix product whose rows can be cut, of one stack or of several; None for another call."""
    found = OPERATORS.get(fn)
    return found if found is not None and found.kind == "matmul" else None


def is_kind(fn: str, *kinds: Kind) -> bool:
    """True if a call of this name is of one of these kinds."""
    found = OPERATORS.get(fn)
    return found is not None and found.kind in kinds


def is_pointwise(fn: str) -> bool:
    """True if a call of this name is one of `POINTWISE`, in any of its three forms."""
    name, _, overload = fn.rpartition(".")
    return (
        fn in POINTWISE
        or fn in _POINTWISE_INTO
        or f"{name.removesuffix('_')}.{overload}" in POINTWISE
    )


def base_of(fn: str) -> str:
    """The operator's name without its namespace and overload."""
    parts = fn.split(".")
    return parts[1] if len(parts) > 1 else fn


def is_attention(fn: str) -> bool:
    """True if a call of this name computes attention."""
    return "attention" in base_of(fn)


def is_heavy(fn: str) -> bool:
    """True if a call takes as long as a communication may: a matmul, convolution or attention."""
    base = base_of(fn)
    return base in MATMUL_NAMES or base == "convolution" or "attention" in base


NORMS = MappingProxyType(
    {
        "aten._fused_rms_norm.default": 2,
        "aten._fused_rms_norm_backward.default": 2,
        "aten.native_layer_norm.default": 3,
        "aten.native_layer_norm_backward.default": 3,
    }
)
"""Norms, with the number of tensors that each gives: Inductor fuses them with their neighbours."""


def is_weight_cast(fn: str) -> bool:
    """True if a call casts a whole weight into FP8 for the gradient of its layer's input."""
    return base_of(fn) == "float8_across"


def by_data(fn: str) -> str:
    """Words added to the refusal of an operator whose rows are decided by data; else empty."""
    rows = (row for name, row in BY_NAME.items() if fn.startswith(name))
    return next((row.why for row in rows if row.kind == "indexed"), "")


def effect(fn: str) -> str:
    """An operator's effect beyond its arguments, by name alone; empty: it has none."""
    row = BY_NAME.get(fn)
    return row.why if row is not None and row.kind == "effect" else ""


# What an operator does to memory

TABLE = Path(__file__).with_name("operators.txt")
_TEXT = TABLE.read_text()
"""Read when this is imported: later a process may have no file descriptor left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Effects of a call of an operator, beside reading its arguments and making its results."""

    writes: tuple[tuple[int, str], ...] = ()
    """Arguments written in place, by place and name."""
    outs: tuple[str, ...] = ()
    """Keywords of the memory that it fills."""
    draws: bool = False
    unless: tuple[int, str] | None = None
    """An argument that is 0 where nothing is drawn."""
    unwritten: bool = False
    """The memory of its results holds whatever was there before."""
    shape_only: bool = False
    """The elements of its first argument do not matter: it fills it, or takes its shape."""
    remakes: bool = False
    """An argument has another shape, other strides or other memory afterwards."""

    def written(self, args: Sequence[T], kwargs: Sequence[tuple[str, T]]) -> list[T]:
        """The arguments of a call that it writes in place."""
        found = [_argument(each, args, kwargs) for each in self.writes]
        return [arg for arg in found if arg is not None]

    def drawn(self, args: Sequence[object], kwargs: Sequence[tuple[str, object]]) -> bool:
        """True if a call with these arguments draws random numbers."""
        if self.unless is None:
            return self.draws
        return self.draws and bool(_argument(self.unless, args, kwargs))


def _argument(
    which: tuple[int, str], args: Sequence[T], kwargs: Sequence[tuple[str, T]]
) -> T | None:
    place, name = which
    if place < len(args):
        return args[place]
    return next((arg for key, arg in kwargs if key == name), None)


NOTHING = Facts()


def usual(name: str, overload: str) -> Facts:
    """Facts that follow from an operator's name alone."""
    in_place = name.endswith("_") and not name.endswith("__")
    return Facts(
        writes=((0, "self"),) if in_place else (),
        outs=("out",) if overload.endswith("out") else (),
    )


def _read(name: str, word: str) -> tuple[str, Facts]:
    overload, *parts = word.split(":")
    facts, marks = usual(name, overload), {part[0]: part[1:] for part in parts}
    outs = marks.get("o")
    return overload, Facts(
        writes=_places(marks["w"]) if "w" in marks else facts.writes,
        outs=facts.outs if outs is None else tuple([each for each in outs[1:].split(",") if each]),
        draws="d" in marks,
        unless=next(iter(_places(marks.get("d", ""))), None),
        unwritten="u" in marks,
        shape_only="s" in marks,
        remakes="m" in marks,
    )


def _places(text: str) -> tuple[tuple[int, str], ...]:
    """The arguments in `3=running_mean,4=running_var`, by place and name."""
    pairs = [item.partition("=") for item in text.split(",") if item]
    return tuple([(int(place), name) for place, _, name in pairs])


@cache
def _lines() -> Mapping[str, str]:
    lines = (line.partition(" ") for line in _TEXT.splitlines())
    return {name: words for name, _, words in lines if not name.startswith("#")}


@lru_cache(1024)
def _overloads(name: str) -> Mapping[str, Facts]:
    """The overloads of an operator, by namespace and name."""
    return dict(_read(name, word) for word in _lines().get(name, "").split())


def table() -> dict[str, Facts]:
    """All rows, by full name."""
    return {f"{op}.{over}": row for op in _lines() for over, row in _overloads(op).items()}


@lru_cache(4096)
def facts_of(fn: str) -> Facts | None:
    """The table's facts about the operator of that name; None if it is not in the table."""
    name, _, overload = fn.rpartition(".")
    if "." not in name:  # aten.relu is its default overload
        name, overload = fn, "default"
    return _overloads(name).get(overload)


# What a schedule may call

FIX = "name an operator of PyTorch as namespace.operator.overload, such as aten.mm.out, or a region"

FUNCTIONS = ("interlace.sum_slots",)
"""Functions of ours that are no operators of the dispatcher."""

WORDS = (
    *("@device", "@strided", "@contiguous_format", "@preserve_format"),
    *("@channels_last", "@channels_last_3d"),
)
"""Arguments that stand for a value of torch: the device of the run, a layout, a memory format."""

KNOWN_NAMESPACES = ("aten", "prims", "interlace")
"""Namespaces whose operators are meant to touch their arguments and results alone (those known not
to are refused by name). Others, torch's own too, reach files (debugprims), other ranks (c10d) or
foreign memory (inductor)."""

_NO_NAMESPACES = {
    "operator": "Python's own functions are not reached from a schedule",
    "prim": "TorchScript's own functions are not reached from a schedule",
    "higher_order": "an operator that takes functions cannot stand in a schedule",
    **dict.fromkeys(
        ("import_module", "load_library", "loaded_libraries"),
        "libraries are loaded by your own code, never by a schedule",
    ),
}

_REMAKES = "it changes an argument's shape, strides or memory, which views count on"
_PART = r"[A-Za-z_][A-Za-z0-9_]*"
_NAME = re.compile(rf"({_PART})\.({_PART})(?:\.({_PART}))?")
_SPECIAL = frozenset(
    f"__{name}__"
    for word in ("and", "or", "xor", "lshift", "rshift")
    for name in (word, f"i{word}")
)
"""Operators of aten that are named as methods of Python are."""


def split(fn: str) -> tuple[str, str, str] | None:
    """Namespace, operator and overload of a name; None if it has not that form."""
    match = _NAME.fullmatch(fn)
    return None if match is None else (match[1], match[2], match[3] or "default")


@lru_cache(4096)
def refusal(fn: str) -> str | None:
    """Why a Call may not name this; None if it may."""
    if fn in FUNCTIONS:
        return None
    parts = split(fn)
    if parts is None:
        return f"{fn!r} is no name of an operator"
    space, name, overload = parts
    if space in _NO_NAMESPACES:
        return f"{fn!r} is no operator: {_NO_NAMESPACES[space]}"
    for part in (space, overload, *(() if name in _SPECIAL else (name,))):
        if part.startswith("__"):
            return f"{fn!r} is no operator: {part} is an attribute of Python's"
    facts = facts_of(fn)
    why = _REMAKES if facts is not None and facts.remakes else effect(f"{space}.{name}")
    return f"a schedule may not call {fn!r}: {why}" if why else None


def is_known(fn: str) -> bool:
    """True if an operator is of a namespace that any schedule may call."""
    return fn.partition(".")[0] in KNOWN_NAMESPACES
