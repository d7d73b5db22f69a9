"""What runs write of the tensors that they are given: autograd hears of it, as of torch's own ops.

changes = Changes(context, inputs.names)
changes.tell(inputs, out)        # after a run: what was saved of them for a backward is other now
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import increment_version

from interlace.runtime.engine import Context


class Changes:
    """What the runs of a Program change."""

    def __init__(self, context: Context, names: Sequence[str]) -> None:
        """`names` are those of the inputs."""
        known, ops = context.values.registered, context.plan.program.ops
        self.registered = [held.tensor for held in known.values() if held.written]
        """What runs of any rank write."""
        self.buffers = {access.view.buffer for op in ops for access in op.writes()} - {*known}
        """What those of this rank write, but for what is registered."""
        self._inputs = [index for index, name in enumerate(names) if name in self.buffers]
        self.always = bool(self.registered or self._inputs)
        """Whether a run changes something, also where it is given no outputs."""

    def tell(self, inputs: Sequence[torch.Tensor], out: Sequence[torch.Tensor] | None) -> None:
        """Counts a version of each of these tensors; inference mode's have none, and are let be."""
        increment_version(
            [*self.registered, *[inputs[index] for index in self._inputs], *(out or ())]
        )
