"""What sums, reduces and applies gradients: torch.optim's conventions, and objects for flags.

from interlace.optim import AdamW, GradAccumulator, GradReducer

optimizer = AdamW(model.parameters(), lr=3e-4, exp_avg_sq_dtype=torch.bfloat16)
"""

from interlace.optim.adamw import Adam, AdamW
from interlace.optim.grad_accumulator import GradAccumulator
from interlace.optim.grad_reducer import GradReducer
from interlace.optim.layer_wise import LayerWise

__all__ = ["Adam", "AdamW", "GradAccumulator", "GradReducer", "LayerWise"]
