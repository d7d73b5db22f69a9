"""Outputs of a function: tensors, which AOTAutograd returns, and all else, which stays the same.

    outputs, tensors = Outputs.of({"y": y, "steps": 3})
    outputs.join(tensors)                 # the dictionary again

What is no tensor is fixed when the function is traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

_TENSOR = object()
"""Where a tensor stands among outputs."""


@dataclass(slots=True)
class Outputs:
    """How outputs hang together: their tree, and those that are no tensors."""

    tree: pytree.TreeSpec
    fixed: list[Any]

    @classmethod
    def of(cls, result: Any) -> tuple[Outputs, tuple[torch.Tensor, ...]]:
        """A result taken apart into what is the same in every call and its tensors."""
        leaves, tree = pytree.tree_flatten(result)
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        return cls(tree, [_TENSOR if isinstance(x, torch.Tensor) else x for x in leaves]), tensors

    def join(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The result with these tensors."""
        if self.tree.is_leaf():
            return tensors[0] if self.fixed[0] is _TENSOR else self.fixed[0]
        rest = iter(tensors)
        leaves = [next(rest) if leaf is _TENSOR else leaf for leaf in self.fixed]
        return pytree.tree_unflatten(leaves, self.tree)
