"""Ctrl-C at random moments on one of the ranks that train, again and again.

    for trials in ranks.run(campaign, "compiled", seed, 20):     # of each rank
        assert not [wrong for trial in trials if (wrong := trial.wrong())]

In a trial all ranks step until a SIGINT, at a moment drawn anew, stops one of them; all call
`interlace.reset()`, and the next step must give the right values. Delays are from the signal to the
`except` clause, by the monotonic clock of that process.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tests.frontend.models import feed_forward
from torch.distributed.tensor import DTensor, Shard

import interlace
from interlace.nn.functional import all_gather_linear, linear_reduce_scatter

LIMIT_S = 15.0
"""The time-out of every run: who waits for it instead of stopping is seen by that."""
WAYS = ("eager", "compiled", "ring", "auto")
Step = Callable[[], list[torch.Tensor]]


@dataclass
class Trial:
    """Outcome of one interrupt on one rank: its error, after how long; the reset; the values."""

    way: str
    victim: bool
    error: str
    text: str
    seconds: float
    reset_s: float
    equal: bool

    def wrong(self, within_s: float = 1.0) -> str:
        """Describes what went wrong; empty where nothing did."""
        if self.victim and self.error != "KeyboardInterrupt":
            return f"{self.error} in place of KeyboardInterrupt: {self.text}"
        if not self.victim and self.error not in ("PeerError", "AgreementError"):
            return f"a peer got {self.error}: {self.text}"
        if self.victim and self.seconds > within_s:
            return f"KeyboardInterrupt {self.seconds:.2f} s after the signal"
        if self.reset_s > 2 * within_s:
            return f"reset() took {self.reset_s:.2f} s"
        return "" if self.equal else "wrong values after the reset"


def functional_step(seed: int, **options: Any) -> Step:
    """Two eager layers, forward and backward."""
    world, rank, group = dist.get_world_size(), dist.get_rank(), dist.group.WORLD
    draw = torch.Generator().manual_seed(seed)
    x = torch.randint(-4, 5, (12, 32), generator=draw).float()
    up, down = (
        torch.randint(-4, 5, shape, generator=draw).float() for shape in ((96, 32), (32, 96))
    )
    mine = x.chunk(world)[rank].clone().requires_grad_()
    up, down = up.chunk(world)[rank].clone(), down.chunk(world, 1)[rank].clone()
    weights = [up.requires_grad_(), down.requires_grad_()]
    settings = {"group": group, "options": {"timeout_s": LIMIT_S, **options}}

    def step() -> list[torch.Tensor]:
        hidden = all_gather_linear(mine, up, **settings)
        y = linear_reduce_scatter(hidden, down, **settings)
        return [y.detach(), *torch.autograd.grad(y.sum(), [mine, *weights])]

    return step


def compiled_step(seed: int, **options: Any) -> Step:
    model = feed_forward(24, Shard(0), Shard(0))  # 96 hidden features, for 2 or 3 ranks
    torch.manual_seed(seed)
    backend = {"backend": "interlace", "options": {"timeout_s": LIMIT_S, **options}}
    compiled: Any = torch.compile(model, **backend)
    x = torch.randn(12, 24).chunk(dist.get_world_size())[dist.get_rank()].clone()

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        y = compiled(x)
        y.square().sum().backward()
        grads: list[Any] = [p.grad for p in model.parameters()]
        return [t.to_local() if isinstance(t, DTensor) else t for t in (y.detach(), *grads)]

    return step


MAKERS: dict[str, Callable[[int], Step]] = {
    "eager": partial(functional_step, strategy="pipeline"),
    "compiled": compiled_step,
    "ring": partial(functional_step, strategy="ring"),
    "auto": partial(functional_step, strategy="auto"),
}


def campaign(way: str, seed: int, trials: int) -> list[Trial]:
    """On each rank: this many trials of one way."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    hook, sys.unraisablehook = sys.unraisablehook, _lost
    try:
        step = MAKERS[way](seed)
        wanted = [tensor.clone() for tensor in step()]
        for _ in range(3):
            step()
        draw = random.Random(seed)
        return [_trial(way, step, wanted, draw) for _ in range(trials)]
    finally:
        signal.signal(signal.SIGINT, handler)
        sys.unraisablehook = hook


_swallowed: list[str] = []


def _lost(event: Any) -> None:
    """Keeps what became of an exception that nobody could catch."""
    _swallowed.append(f"{event.err_msg}: {event.exc_value!r} in {event.object!r}")


def _trial(way: str, step: Step, wanted: list[torch.Tensor], draw: random.Random) -> Trial:
    victim, delay = draw.randrange(dist.get_world_size()), draw.uniform(0.0, 0.06)
    victim, sent = victim == dist.get_rank(), [0.0]

    def interrupt() -> None:
        time.sleep(delay)
        sent[0] = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    begun, error, text = time.monotonic(), "", ""
    try:
        if victim:
            threading.Thread(target=interrupt, daemon=True).start()
        while time.monotonic() < begun + 2 * LIMIT_S:
            step()
    except (KeyboardInterrupt, Exception) as caught:
        error, text = type(caught).__name__, str(caught)
    ended = time.monotonic()
    text += "".join(_swallowed)
    _swallowed.clear()
    interlace.reset()
    reset_s = time.monotonic() - ended
    equal = all(map(torch.equal, step(), wanted))
    dist.barrier()  # else the next interrupt would end this step of a peer
    return Trial(way, victim, error, text, ended - (sent[0] or begun), reset_s, equal)
