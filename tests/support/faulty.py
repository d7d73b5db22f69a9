"""Runs a script of examples/ in which a rank fails at a point of a step; under torchrun.

    torchrun ... tests/support/faulty.py PHASE:COUNT:FAULT,PHASE:COUNT:FAULT pretrain.py ...

The first fault is that of the job's first attempt, the second that of its second, and so on. It
strikes when its rank comes to that phase for the COUNT-th time in that attempt: rank 1, in `commit`
(a checkpoint that is whole gets its name) and `log` rank 0. Faults are those of `FAULTS`.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem

EXAMPLES = Path(__file__).parents[2] / "examples"


def limit_files(size: int) -> None:
    """Has all writes behind that many bytes of a file fail, as on a disk that is full."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


FAULTS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "oom": lambda: torch.empty(1 << 56, dtype=torch.uint8),  # the allocator refuses it
    "interrupt": lambda: os.kill(os.getppid(), signal.SIGINT),  # what Ctrl-C sends to torchrun
    "disk": lambda: limit_files(100),
}


def before(
    owner: Any, name: str, strike: Callable[[], None], wanted: Callable[[], bool] = lambda: True
) -> None:
    """Has a function strike each time before it runs, if it is wanted then."""
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def run(*args: Any, **kwargs: Any) -> Any:
        if wanted():
            strike()
        return plain(*args, **kwargs)

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


def unlimited_after(module: Any) -> None:
    """Ends the limit with the run: torchrun reads a file in which `record` writes the error."""
    plain = module.run

    def run(*args: Any) -> None:
        try:
            plain(*args)
        finally:
            limit_files(resource.RLIM_INFINITY)

    module.run = run


def in_save(module: Any, strike: Callable[[], None]) -> None:
    """Strikes once in a save, when this rank has written ten of its tensors."""
    items = itertools.count()

    def begin() -> None:
        nonlocal items
        items = itertools.count()

    before(module, "save", begin)
    before(filesystem, "_write_item", strike, lambda: next(items) == 10)


def main() -> None:
    where, script, *rest = sys.argv[1:]
    sys.argv = [script, *rest]
    sys.path.insert(0, str(EXAMPLES))
    module: Any = importlib.import_module(Path(script).stem)
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    numbers = itertools.count(1)
    phase, count, fault = [*where.split(","), *["none:0:none"] * (attempt + 1)][attempt].split(":")

    def strike() -> None:
        if next(numbers) == int(count):
            print(f"fault: {fault} in {phase}", flush=True)
            FAULTS[fault]()

    if os.environ["RANK"] == ("0" if phase in ("commit", "log") else "1"):
        match phase:
            case "data":
                before(module, "micro_batches", strike, torch.is_grad_enabled)
            case "forward":
                before(module, "linear_cross_entropy", strike, torch.is_grad_enabled)
            case "backward":
                in_backward(strike)
            case "optimizer":
                before(module.AdamW, "step", strike)
            case "save":
                in_save(module, strike)
            case "commit":
                before(filesystem.FileSystem, "rename", strike)
            case "log":
                before(module, "memory_mb", strike)
            case "evaluation":
                before(module, "linear_cross_entropy", strike, lambda: not torch.is_grad_enabled())
            case _:
                assert phase == "none", phase
    unlimited_after(module)
    torch._dynamo.config.recompile_limit = 3  # a length, then any, and without gradients
    module.main()


if __name__ == "__main__":
    main()
