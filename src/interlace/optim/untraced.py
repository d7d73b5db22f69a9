"""Functions that torch.compile leaves out of its graphs: few launches have nothing to trace.

@eager
def step(self): ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def eager(function: Callable[P, T]) -> Callable[P, T]:
    """The function as it is, where torch.compile breaks its graph: what it does is one kernel."""
    disabled: Any = torch.compiler.disable(function)
    return disabled
