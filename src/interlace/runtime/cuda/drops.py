"""Lets go of tensors of a run while streams still read them: releases.py, Note [Whose memory].

drops = Drops(program, values, lanes, device)
thunk = drops.drop("h", lane)
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from interlace.ir import Program
from interlace.runtime.cuda.lanes import Lane, Thunk
from interlace.runtime.releases import homes
from interlace.runtime.values import Values


class Drops:
    """The tensors of a run, and the streams that use them."""

    def __init__(
        self, program: Program, values: Values, lanes: Mapping[str, Lane], device: torch.device
    ) -> None:
        self._values, self._lanes, self._device = values, lanes, device
        self._homes = homes(program)
        self._users: dict[str, dict[str, None]] = {}
        for op in program.ops:
            for access in (*op.reads(), *op.writes()):
                self._users.setdefault(access.view.buffer, {})[op.stream] = None

    def drop(self, name: str, lane: Lane) -> Thunk:
        """Gives the memory back to its stream, once the others have done with it.

        Where `lane`, on which it is let go, is that stream, it stands behind all uses already.
        """
        items, places, device = self._values.items, self._values.family(name), self._device
        home = self._lanes[self._homes[name]]
        users = [self._lanes[stream] for stream in self._users.get(name, ())]
        others = {id(user): user for user in users if user is not home}
        streams = [other.stream for other in others.values()] if lane is not home else []

        def run() -> None:
            tensor = items[places[0]]
            if tensor is not None:  # None: its Call left it out
                for stream in streams:
                    tensor.record_stream(stream or torch.cuda.current_stream(device))
            for place in places:
                items[place] = None

        return run
