"""Losses as functions, for logits on one rank or cut over a group.

from interlace.nn.functional import cross_entropy, linear_cross_entropy

loss = cross_entropy(logits, target, group=tp)
loss = linear_cross_entropy(hidden, head.weight, target, group=tp)    # no logits are ever held
"""

from interlace.nn.cross_entropy.linear_loss import linear_cross_entropy
from interlace.nn.cross_entropy.loss import cross_entropy, raise_pending

__all__ = ["cross_entropy", "linear_cross_entropy", "raise_pending"]
