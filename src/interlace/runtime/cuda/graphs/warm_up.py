"""The run before the first capture: op by op, with zeros, on the thread that will capture, it sets
up what cannot be in a capture.

What it writes of registered parameters is put back, also where it fails, and so are the generators
of random numbers: runs draw what they would without graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from interlace.comm import TeamComm
from interlace.runtime.cuda.graphs.capture_thread import capture_thread
from interlace.runtime.cuda.graphs.captured import may_draw

if TYPE_CHECKING:
    from interlace.runtime.cuda.engine import CudaEngine


def warm_up(engine: CudaEngine, teams: Sequence[TeamComm]) -> None:
    """Runs on all ranks of the teams together; where one fails, the others hear of it."""
    tag = engine.context.label.tag
    places = [(team, f"{team.topic}/{tag:x}/{team.resets}/warm-up") for team in teams]
    with ExitStack() as meetings:
        for team, place in places:
            meetings.enter_context(team.board.attending([place]))
        _run_once(engine)
    try:
        for team, place in places:
            team.board.exchange(place, {}, engine.context.time_out_s)
    except BaseException as error:
        engine.watched.fail(error)  # a reset then gives it another place
        raise


def _run_once(engine: CudaEngine) -> None:
    """A run with zeros, to its end, that leaves what is registered as it was."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    devices = [engine.device] if engine.device.type == "cuda" else []
    draws, inputs = may_draw(engine.context.plan.program), engine.context.inputs
    try:
        with torch.inference_mode():  # they may be leaves that want a gradient, or inference's
            kept += [(tensor, tensor.clone()) for tensor in engine.changes.registered]
        with torch.random.fork_rng(devices, enabled=draws, device_type="cuda"):
            zeros = inputs.zeros(engine.changes.buffers)
            capture_thread(engine.device).run(lambda: engine.issue(zeros, None))
            engine.synchronize()
    except BaseException as error:
        engine.watched.fail(error)  # peers wait for this rank in their runs
        if kept:  # peers are let go of; what the streams still do, they do before the copies
            engine.watched.settle()
        raise
    finally:
        with torch.inference_mode():
            for tensor, before in kept:
                tensor.copy_(before)
        if kept and engine.watched.idle:  # else it failed, and may never end: nobody waits for it
            torch.cuda.current_stream(engine.device).synchronize()
