"""Layers and losses that are used on their own, compiled or not.

from interlace.nn import GroupedLinear
"""

from interlace.nn.grouped_linear import GroupedLinear

__all__ = ["GroupedLinear"]
