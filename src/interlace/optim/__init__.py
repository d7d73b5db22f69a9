"""Summing, reducing and applying gradients: torch.optim's conventions, and objects for flags.

from interlace.optim import AdamW, GradAccumulator, LayerWise, Muon, muon_groups

optimizer = AdamW(model.parameters(), lr=3e-4, exp_avg_sq_dtype=torch.bfloat16)
optimizer = Muon(muon_groups(model), lr=0.02, adamw={"lr": 3e-4})
"""

from interlace.errors import OptionError
from interlace.optim.adamw import Adam, AdamW
from interlace.optim.grad_accumulator import GradAccumulator
from interlace.optim.layer_wise.optimizer import LayerWise, clip_grad_norm_
from interlace.optim.muon.optimizer import Muon
from interlace.optim.muon.routing import muon_groups

__all__ = [
    "Adam", "AdamW", "GradAccumulator", "LayerWise", "Muon", "clip_grad_norm_", "muon_groups",
]  # fmt: skip

REMOVED = {
    "ShardedLayerWise": "LayerWise(optimizer, module, mesh), where mesh is the dimension of "
    "fully_shard's mesh that shards",
    "GradReducer": "LayerWise(optimizer, module, mesh), which sums gradients in fp32 and reduces "
    "them under the backward",
}


def __getattr__(name: str) -> object:
    """Raises OptionError for a class of a former release."""
    if name in REMOVED:
        raise OptionError(f"{name} is a part of LayerWise now. fix: {REMOVED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
