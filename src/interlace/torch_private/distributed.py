"""Private names of DTensor and of functional collectives, which load DTensor."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import torch
from torch._C._autograd import DeviceType as DeviceType
from torch._C._distributed_c10d import _SymmetricMemory
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor as AsyncCollectiveTensor,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.distributed.tensor._utils import (
    compute_local_shape_and_global_offset as compute_local_shape_and_global_offset,
)
from torch.distributed.tensor.placement_types import _StridedShard

CHECKPOINT_PREFIX: str = _CHECKPOINT_PREFIX
"""Part that `checkpoint_wrapper` puts into the names of Parameters."""
StridedShard = _StridedShard
"""Placement of a weight that FSDP2 shards and tensor parallelism sharded before."""
functional = torch.ops._c10d_functional
"""Operators of functional collectives, by which a traced layer communicates."""
SymmetricMemory = _SymmetricMemory
"""Memory that torch shares between GPUs, which a benchmark measures beside our own."""
