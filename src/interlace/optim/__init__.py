"""Optimizers that keep torch.optim's conventions, with low-precision states and one launch a step.

optimizer = interlace.optim.AdamW(model.parameters(), lr=3e-4, exp_avg_sq_dtype=torch.bfloat16)
"""

from interlace.optim.adamw import Adam, AdamW

__all__ = ["Adam", "AdamW"]
