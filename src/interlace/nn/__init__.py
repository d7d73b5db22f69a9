"""Layers and losses, each of use without a compiled schedule.

from interlace.nn import CrossEntropyLoss, GroupedLinear

loss = CrossEntropyLoss(label_smoothing=0.1)(logits, target)
"""

from interlace.nn.experts import DroplessExperts
from interlace.nn.grouped.linear import GroupedLinear
from interlace.nn.losses import CrossEntropyLoss, LinearCrossEntropyLoss

__all__ = ["CrossEntropyLoss", "DroplessExperts", "GroupedLinear", "LinearCrossEntropyLoss"]
