"""Tensor-parallel styles and models whose communication runs under their matmuls.

from interlace.tensor_parallel import OverlapColwise, OverlapRowwise, parallelize

parallelize_module(block, mesh, {"w1": OverlapColwise(), "w2": OverlapRowwise()})
parallelize(block, mesh, plan)    # of torch's styles, as it is
"""

from interlace.tensor_parallel.group import OverlapColwiseGroup
from interlace.tensor_parallel.plans import Parallelized, parallelize
from interlace.tensor_parallel.styles import OverlapColwise, OverlapRowwise

__all__ = ["OverlapColwise", "OverlapColwiseGroup", "OverlapRowwise", "Parallelized", "parallelize"]
