"""Triton's interpreter in a process of its own: `python -m tests.kernels.<script> <seed> <rounds>`.

    from tests.support.interpreting import run

    if __name__ == "__main__":
        run(check, other)              # each `rounds` times, with a Random of the seed

Triton reads TRITON_INTERPRET when a kernel is defined, which test_interpreted.py sets.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from triton.runtime import interpreter

patch_tensor: Any = interpreter._patch_lang_tensor  # pyright: ignore[reportAttributeAccessIssue]


def patch_index(tensor: Any, *scope: Any) -> None:
    """Lets loop bounds be tensors with NumPy 2.4, where an array of one element is no int."""
    patch_tensor(tensor, *scope)
    index = lambda self: int(self.handle.data.item())  # noqa: E731
    if scope:
        scope[0].set_attr(tensor, "__index__", index)
    else:
        tensor.__index__ = index


interpreter._patch_lang_tensor = patch_index  # pyright: ignore[reportAttributeAccessIssue]


def run(
    *checks: Callable[[random.Random], None], once: Callable[[random.Random], None] | None = None
) -> None:
    """Runs checks as the command line says, and says that all is right."""
    seed, rounds = map(int, sys.argv[1:])
    draw = random.Random(seed)
    random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    if once is not None:
        once(draw)
    for check in checks:
        for _ in range(rounds):
            check(draw)
    print("all right")
