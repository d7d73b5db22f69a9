"""Losses as functions, for logits on one rank or cut over a group; linear layers over a group."""

from interlace.nn.cross_entropy.linear_loss import linear_cross_entropy
from interlace.nn.cross_entropy.loss import cross_entropy, raise_pending
from interlace.nn.parallel.linear import (
    all_gather_linear,
    linear_all_reduce,
    linear_reduce_scatter,
    replicated_linear,
)

__all__ = [
    "all_gather_linear",
    "cross_entropy",
    "linear_all_reduce",
    "linear_cross_entropy",
    "linear_reduce_scatter",
    "raise_pending",
    "replicated_linear",
]
