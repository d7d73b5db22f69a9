"""Settings of the demo, without torch: the command reads them before it starts the ranks.

TrainingPlan(steps=50, model=ModelConfig(layers=4))
"""

from __future__ import annotations

from dataclasses import dataclass, field

from interlace.errors import TeamError
from interlace.strategies import StrategyName

WAYS = {
    "eager": "eager DTensor",
    "serial": "serial",
    "in_order": "in order",
    "overlapped": "overlapped",
}
"""The ways of training and their titles: eager; the Program as imported; its overlapped ops, one
after another; the same, overlapped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The sizes of the model and of a batch."""

    layers: int = 2
    dim: int = 256
    heads: int = 8
    hidden: int = 768
    vocabulary: int = 256
    sequence: int = 1024
    batch: int = 1
    dtype: str = "f32"
    """Element type of parameters and activations: f32 or bf16."""

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.dim // self.heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys: as many as there are."""
        return self.heads

    def check(self, world: int) -> None:
        """Raises TeamError where the sizes do not divide over that many ranks."""
        for name in ("heads", "hidden", "vocabulary", "sequence"):
            if getattr(self, name) % world:
                raise TeamError(
                    f"the demo's model has {name}={getattr(self, name)}, which {world} ranks do "
                    "not divide: take 1, 2, 4 or 8 ranks"
                )


LARGE = ModelConfig(dim=4096, heads=32, hidden=14336, sequence=4096, dtype="bf16")
"""The model of GPUs: blocks of an 8B model, so that a matmul is worth hiding something under."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingPlan:
    """Steps, model and options of a training."""

    steps: int = 20
    learning_rate: float = 1e-3
    seed: int = 0
    strategy: StrategyName = "auto"
    calibration: str | None = None
    timeout_s: float = 60.0
    device: str = "cpu"
    """`cpu`, or `cuda`: a GPU for each rank."""
    model: ModelConfig = field(default_factory=ModelConfig)

    def ways(self, world: int) -> list[str]:
        """The ways to train. Sums over more than two ranks, and kernels of a GPU, have an order of
        their own: then only the Program in order has the bits of the overlapped one."""
        in_order = world > 2 or self.device == "cuda"
        return [way for way in WAYS if in_order or way != "in_order"]
