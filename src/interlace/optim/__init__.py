"""What sums, reduces and applies gradients: torch.optim's conventions, and objects for flags.

from interlace.optim import AdamW, GradAccumulator, GradReducer, Muon, muon_groups

optimizer = AdamW(model.parameters(), lr=3e-4, exp_avg_sq_dtype=torch.bfloat16)
optimizer = Muon(muon_groups(model), lr=0.02, adamw={"lr": 3e-4})
"""

from interlace.optim.adamw import Adam, AdamW
from interlace.optim.grad_accumulator import GradAccumulator
from interlace.optim.grad_reducer import GradReducer
from interlace.optim.layer_wise.clipping import clip_grad_norm_
from interlace.optim.layer_wise.optimizer import LayerWise
from interlace.optim.muon.optimizer import Muon
from interlace.optim.muon.routing import muon_groups
from interlace.optim.sharded_layer_wise import ShardedLayerWise

__all__ = [
    "Adam", "AdamW", "GradAccumulator", "GradReducer", "LayerWise", "Muon", "ShardedLayerWise",
    "clip_grad_norm_", "muon_groups",
]  # fmt: skip
