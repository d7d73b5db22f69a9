"""What sums, reduces and applies gradients.

from interlace.optim import GradAccumulator, GradReducer
"""

from interlace.optim.grad_accumulator import GradAccumulator
from interlace.optim.grad_reducer import GradReducer

__all__ = ["GradAccumulator", "GradReducer"]
