"""FP8 by current scaling: quantise a tensor by its own maximum, multiply what was quantised.

    x8 = quantize(x, E4M3, transpose=True)      # amax, scale, cast, and the transpose for wgrad
    w8 = quantize(weight, E4M3, transpose=True)
    y = matmul(x8, w8, torch.bfloat16)          # x @ weight.T

recipe.py    which formats, whose maximum, how a scale is rounded
rule.py      amax, scale and cast in plain torch: the reference, and the CPU's path
kernel.py    the same as Triton kernels
data.py      rows that carry their scale;  quantization.py: makes them
products.py  GEMMs of such rows, and the weight gradient over shards
operators.py all of it as operators of a schedule
linear.py    linear layers, and a model's own turned into them
"""

from interlace.errors import OptionError
from interlace.float8.data import Float8Data
from interlace.float8.linear import Float8Linear, convert_to_float8, kept_weights, linear
from interlace.float8.products import matmul, wgrad
from interlace.float8.quantization import amax_of, quantize
from interlace.float8.recipe import E4M3, E5M2, REMOVED, Recipe

__all__ = [
    "E4M3",
    "E5M2",
    "Float8Data",
    "Float8Linear",
    "Recipe",
    "amax_of",
    "convert_to_float8",
    "kept_weights",
    "linear",
    "matmul",
    "quantize",
    "wgrad",
]


def __getattr__(name: str) -> object:
    """Raises OptionError for the row-wise recipe of a former release."""
    if name == "ROW_WISE":
        raise OptionError(f"ROW_WISE is no recipe any more. fix: Recipe(): {REMOVED['scaling']}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
