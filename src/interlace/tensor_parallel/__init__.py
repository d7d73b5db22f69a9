"""Tensor-parallel styles and models whose communication runs under their matmuls.

from interlace.tensor_parallel import OverlapColwise, OverlapRowwise

parallelize_module(block, mesh, {"w1": OverlapColwise(), "w2": OverlapRowwise()})
"""

from interlace.tensor_parallel.group import OverlapColwiseGroup
from interlace.tensor_parallel.plans import Parallelized, parallelize
from interlace.tensor_parallel.styles import OverlapColwise, OverlapRowwise

__all__ = ["OverlapColwise", "OverlapColwiseGroup", "OverlapRowwise", "Parallelized", "parallelize"]
