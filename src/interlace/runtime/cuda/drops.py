"""Lets go of tensors of a run while streams still read them: releases.py, Note [Whose memory].

drops = Drops(program, values, lanes, device)
thunk = drops.drop("h", lane_of)             # lane_of(index, op): the stream of an op
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from interlace.ir import Op, Program
from interlace.runtime.cuda.lanes import Lane, Thunk
from interlace.runtime.releases import homes
from interlace.runtime.values import Values


class Drops:
    """The tensors of a run, and the streams that use them."""

    def __init__(
        self, program: Program, values: Values, lanes: Mapping[str, Lane], device: torch.device
    ) -> None:
        self._values, self._lanes, self._device = values, lanes, device
        self._ops, self._homes = program.ops, homes(program)
        self._users: dict[str, list[int]] = {}
        for index, op in enumerate(program.ops):
            for access in (*op.reads(), *op.writes()):
                self._users.setdefault(access.view.buffer, []).append(index)

    def drop(self, name: str, lane_of: Callable[[int, Op], Lane]) -> Thunk:
        """Gives the memory back to its stream, once the others have done with it."""
        items, places, device = self._values.items, self._values.family(name), self._device
        home = self._lanes[self._homes[name]]
        users = [lane_of(index, self._ops[index]) for index in self._users.get(name, ())]
        others = {id(lane): lane for lane in users if lane is not home}
        streams = [lane.stream for lane in others.values()]

        def run() -> None:
            for stream in streams:
                items[places[0]].record_stream(stream or torch.cuda.current_stream(device))
            for place in places:
                items[place] = None

        return run
