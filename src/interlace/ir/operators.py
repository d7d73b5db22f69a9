"""Properties of aten operators: the one table that checks, passes, costs and binders ask.

    >>> operator_of("aten.addmm.default").lhs, operator_of("aten.gelu.default").into
    (1, 'aten.gelu.out')

To teach Interlace an operator, add a row. A call of any other name is opaque: it is run as it is,
costs the bytes that it touches, and is never cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    "addmm": Operator(kind="matmul", into="aten.addmm.out", lhs=1, rows=(0,), cut=True),
    "addmm_": Operator(kind="matmul", lhs=1),
    "bmm": Operator(kind="matmul", into="aten.bmm.out", batched=True, cut=True),
    "baddbmm": Operator(
        kind="matmul", into="aten.baddbmm.out", lhs=1, rows=(0,), batched=True, cut=True
    ),
    "_scaled_mm": Operator(
        kind="matmul", into="aten._scaled_mm.out", rows=(2,), scaled=True, cut=True
    ),
    "float8_mm": Operator(
        kind="matmul", into="interlace.float8_mm.out", scaled=True, blocks=2, cut=True
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
        *("aten.slice.Tensor", "aten.narrow.default"),
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
"""Operators by namespace, name and overload. Their writes and random draws are in
operator_facts.py; nothing here draws."""

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


def by_data(fn: str) -> str:
    """Words added to the refusal of an operator whose rows are decided by data; else empty."""
    rows = (row for name, row in BY_NAME.items() if fn.startswith(name))
    return next((row.why for row in rows if row.kind == "indexed"), "")


def effect(fn: str) -> str:
    """An operator's effect beyond its arguments, by name alone; empty: it has none."""
    row = BY_NAME.get(fn)
    return row.why if row is not None and row.kind == "effect" else ""
