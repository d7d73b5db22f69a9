"""Operators that compute each element for itself, with broadcasting, as a table.

    >>> POINTWISE["aten.gelu.default"], is_pointwise("aten.add_.Tensor")
    ('aten.gelu.out', True)

They can be cut into chunks of any kind, and may write over an operand that is just the result's
view: an element is read before it is written, and by nobody else.
"""

from __future__ import annotations

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
"""Each with the overload that writes into given memory."""


def is_pointwise(fn: str) -> bool:
    """Whether a call of this name is one of `POINTWISE`, in any of its three forms."""
    name, _, overload = fn.rpartition(".")
    return fn in POINTWISE or fn in _INTO or f"{name.removesuffix('_')}.{overload}" in POINTWISE


_INTO = frozenset(POINTWISE.values())
