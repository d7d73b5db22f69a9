"""Losses as functions, for logits on one rank or cut over a group; linear layers over a group.

from interlace.nn.functional import all_gather_linear, cross_entropy, linear_cross_entropy

loss = cross_entropy(logits, target, group=tp)
loss = linear_cross_entropy(hidden, head.weight, target, group=tp)    # no logits are ever held
gate, up = all_gather_linear(x, [w_gate, w_up], group=tp)    # overlapped, backward as well
"""

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
