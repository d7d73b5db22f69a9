"""Runs a script of examples/ in which one rank fails at a point of a step; under torchrun.

    torchrun ... tests/support/faulty.py PHASE:COUNT:FAULT pretrain.py ...

Rank 1 fails when it comes to that phase for the COUNT-th time, and only in the first attempt of the
job. Phases: forward, backward, optimizer. Faults: those of `FAULTS`.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


FAULTS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
}


def after(owner: Any, name: str, strike: Callable[[], None], wanted: Callable[[], bool]) -> None:
    """Has a function strike each time that it has run, if it is wanted then."""
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = plain(*args, **kwargs)
        if wanted():
            strike()
        return result

    setattr(owner, name, run)


def in_backward(strike: Callable[[], None]) -> None:
    """Strikes in a backward, when the loss has its gradient and the blocks have none."""
    plain = torch.Tensor.backward

    def run(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        assert self.grad_fn is not None
        loss, _ = self.grad_fn.next_functions[0]
        assert loss is not None
        assert loss.name() == "LinearCrossEntropyBackward"
        loss.register_hook(lambda *_: strike())
        plain(self, *args, **kwargs)

    torch.Tensor.backward = run  # pyright: ignore[reportAttributeAccessIssue]


def main() -> None:
    where, script, *rest = sys.argv[1:]
    phase, count, fault = where.split(":")
    sys.argv = [script, *rest]
    sys.path.insert(0, str(EXAMPLES))
    module: Any = importlib.import_module(Path(script).stem)
    numbers = itertools.count(1)

    def strike() -> None:
        if next(numbers) == int(count):
            print(f"fault: {fault} in {phase}", flush=True)
            FAULTS[fault]()

    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        if phase == "backward":
            in_backward(strike)
        else:
            owner, name, wanted = {
                "forward": (module.Model, "forward", torch.is_grad_enabled),
                "optimizer": (module.interlace.optim.AdamW, "step", lambda: True),
            }[phase]
            after(owner, name, strike, wanted)
    module.main()


if __name__ == "__main__":
    main()
