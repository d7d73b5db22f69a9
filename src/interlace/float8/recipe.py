"""FP8 recipes: formats, whose maximum gives a scale, and how scales are rounded.

Recipe()                                     # a scale for each shard, a power of two
Recipe(scale="team")                         # one scale for all shards of a team
"""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass, field
from typing import Literal, get_args

import torch

from interlace.errors import OptionError, refuse_removed

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = (E4M3, E5M2)
TINY = 1e-37
"""A maximum below it has the greatest scale anyway: as `eps` it changes that of zeros alone."""
Scale = Literal["shard", "team"]
REMOVED = {
    "keep_transposes": "leave it out, and the transpose of a weight is kept where it takes no more "
    "memory than x in bf16",
    "scaling": "leave it out: a tensor has one scale, of a shard or of a team (`scale`). Rows with "
    "a scale each are torchao's, whose compiled graphs are overlapped as they are",
}
"""Options of former releases, and what serves instead."""


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if not any(value is one or (type(value) is type(one) and value == one) for one in allowed):
        raise OptionError(f"{name} is {value!r}: take one of {allowed}")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Formats and scales of FP8: a scale comes from a tensor's own values, not from earlier steps.

    Inputs and weights are E4M3: FP8 GEMMs take E5M2 on one side at most.

    Raises:
        OptionError: a value is none that the option takes.

    Examples:
        >>> Recipe(scale="team").power_of_two
        False
    """

    gradient: torch.dtype = E5M2
    """The format of gradients: E5M2, or E4M3."""
    scale: Scale = "shard"
    """`shard`, each rank's shard by its own maximum, or `team`: all shards by the greatest."""
    power_of_two: bool | None = None
    """Rounds scales down to a power of two, so that scaling itself rounds nothing. The scales of
    shards always are, so that the gradient of a weight is one GEMM over all shards, by exact
    shifts. None: True for `shard`, and False for `team`."""
    eps: float = 0.0
    """A maximum below it counts as this (fp32); where tensors' shards have scales of their own, at
    least TINY, so that a shard of zeros has the greatest scale, and not 1."""
    keep_transposes: InitVar[None] = None
    scaling: InitVar[None] = None
    """Options of a former release: OptionError for any value."""

    _eps: str = field(init=False, repr=False, compare=False)

    @property
    def traced_eps(self) -> float:
        """`eps` for code that TorchDynamo may trace: of a second recipe's float it makes a symbol,
        which an operator of a `Function` cannot take, and of a string a constant."""
        return float(self._eps)

    def __post_init__(self, keep_transposes: object, scaling: object) -> None:
        given = {"keep_transposes": keep_transposes, "scaling": scaling}
        refuse_removed("Recipe", {n: v for n, v in given.items() if v is not None}, REMOVED)
        _one_of("gradient", self.gradient, FORMATS)
        _one_of("scale", self.scale, get_args(Scale))
        if self.power_of_two is None:
            object.__setattr__(self, "power_of_two", self.scale == "shard")
        _one_of("power_of_two", self.power_of_two, (False, True))
        if isinstance(self.eps, bool) or not isinstance(self.eps, int | float):
            raise OptionError(f"eps is {self.eps!r}: take a number")
        if not 0 <= self.eps <= torch.finfo(torch.float32).max or math.isnan(self.eps):
            raise OptionError(f"eps is {self.eps}: take a finite number of fp32, 0 or more")
        own = self.scale == "shard"
        object.__setattr__(self, "eps", max(float(self.eps), TINY if own else 0.0))
        object.__setattr__(self, "_eps", repr(self.eps))
        if own and not self.power_of_two:
            raise OptionError(
                "power_of_two=False with scale='shard': scales of shards are powers of two; leave "
                "it out, or take scale='team'"
            )

    @property
    def forward(self) -> torch.dtype:
        """The format of inputs and weights."""
        return E4M3


def keeps_transposes(rows: int, columns: int, for_x: bool, for_w: bool) -> bool:
    """Returns true where forward makes the transposes of weights [N, K] with their rows, and keeps
    them until backward, so that a weight is read once less.

    That is where x [rows, K] is kept too, for gradients of both, and has no fewer rows than the N
    of all weights sum up to: x and they then take no more memory than x does in bf16.
    """
    return for_x and for_w and not torch.compiler.is_compiling() and rows >= columns
