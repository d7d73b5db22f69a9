"""Mirror teams: one process is one rank of N, and its peers are itself (interlace_bench/mirror.py).

It runs a schedule for N ranks as each of them would, but for the link. Everything follows from two
places. What the rank leaves on a board under its own number it leaves under all others too: so
set-up finds the notes of all ranks, and maps the rank's own memory as each peer's. And a process
group whose collectives and messages come back: every peer gives what the rank gives. What ops of a
Program reach in a peer's memory is in ir/mirror.py.
"""

from __future__ import annotations

import torch.distributed as dist


class MirrorGroup(dist.ProcessGroup):
    """A process group of one process: what a rank gives, each of its peers gives too."""

    def as_backend(self, library: str) -> MirrorGroup:
        """A group like it, in the place of a backend of torch."""
        raise NotImplementedError


def seen_by(me: int, member: int, size: int) -> int:
    """As which of its peers a member of a mirror team hears this one: the op by which this rank
    reaches the member is the one by which that rank reaches this one."""
    return (2 * me - member) % size
