"""The staging area of a team's exchanges: memory that peers push into, flags, and own words.

side.ensure_area(topic, nbytes, flag_nbytes, words_nbytes, stop_at, time_out_s)  # all ranks
area = side.the_area
area.stages, area.flags            # every member's addresses, as mapped here
area.words                         # this rank's own
"""

from __future__ import annotations

from dataclasses import dataclass

from interlace.comm.cuda.access import WordAccess
from interlace.comm.cuda.memory import PeerMemory

ALIGN = 256


@dataclass(frozen=True, slots=True)
class Area:
    """One area on every rank; exchanges of a team use it one after another."""

    memory: PeerMemory
    stage_nbytes: int
    flag_nbytes: int
    words_nbytes: int
    stop_at: int
    """Where among the words a 1 ends a call that waits."""

    @property
    def stages(self) -> list[int]:
        """Every member's staging memory."""
        return list(self.memory.bases)

    @property
    def flags(self) -> list[int]:
        """Every member's flags."""
        return [base + self.stage_nbytes for base in self.memory.bases]

    @property
    def words(self) -> int:
        """This rank's words."""
        return self.memory.bases[self.memory.me] + self.stage_nbytes + self.flag_nbytes

    def stop(self, access: WordAccess) -> None:
        """Ends the call under way, with results that nobody may use."""
        access.fill(self.words + self.stop_at, 1, 1)

    def reset(self) -> None:
        """As if never used; a barrier of all ranks stands around it."""
        count = (self.flag_nbytes + self.words_nbytes) // 4
        self.memory.driver.fill(self.words - self.flag_nbytes, 0, count)


def area_nbytes(stage_nbytes: int) -> int:
    """The staging memory that is made for exchanges of so many bytes: some room to spare."""
    size = 8 << 20
    while size < stage_nbytes:
        size *= 2
    return size
