"""A pipeline schedule as data: the order of each rank, and where stages live.

    >>> order = PipelineOrder.of([["0F0", "0SEND_F0"], ["1RECV_F0", "1F0"]])
    >>> order.has_messages
    True

`PipelineOrder` has the cells of a file, `Layout` the rank of each stage.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from interlace.errors import ParseError
from interlace_check.pipelining.actions import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Action,
    parse_action,
)

NEEDS = {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}
"""Message that a computation awaits, where the stage before it is on another rank."""
Key = tuple[str, int, int | None]
"""Kind, stage and microbatch."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An action and where it stands: `index` counts a rank's cells from 0, as torch's logs do."""

    rank: int
    index: int
    action: Action

    def __str__(self) -> str:
        return f"rank {self.rank} action {self.index} `{self.action}`"

    @property
    def key(self) -> Key:
        """Kind, stage and microbatch."""
        return self.action.kind, self.action.stage, self.action.microbatch


@dataclass(frozen=True, slots=True)
class PipelineOrder:
    """The cells of each rank, in order; None is a step in which the rank waits."""

    cells: tuple[tuple[Action | None, ...], ...]
    num_stages: int | None = None
    """Stages that there must be, where known."""
    num_microbatches: int | None = None

    @classmethod
    def of(
        cls, rows: Iterable[Iterable[object]], file: str = "", **known: int | None
    ) -> PipelineOrder:
        """The order from tokens, or from anything that prints as one, such as torch's actions.

        Raises ParseError, which names file (if there is one), rank, action, token and fix.
        """
        cells: list[tuple[Action | None, ...]] = []
        for row in rows:
            if isinstance(row, str) or not isinstance(row, Iterable):
                raise ParseError(
                    f"rank {len(cells)}: its actions are a {type(row).__name__}; fix: give a list "
                    "with one token for each action, such as ['0F0', '0B0']"
                )
            cells.append(tuple([_cell(cell, file, len(cells), k) for k, cell in enumerate(row)]))
        return cls(tuple(cells), **known)  # type: ignore[arg-type]

    @property
    def has_messages(self) -> bool:
        """True if some rank sends or receives: torch has added the messages."""
        kinds = {cell.kind for row in self.cells for cell in row if cell is not None}
        return not kinds.isdisjoint((*SENDS, *RECEIVES))

    def placed(self, rank: int) -> Iterator[Placed]:
        """Yields the actions of a rank, with the parts of an `OVERLAP_F_B` one after another."""
        for index, cell in enumerate(self.cells[rank]):
            if cell is not None:
                for leaf in cell.leaves():
                    yield Placed(rank, index, leaf)


def _cell(cell: object, file: str, rank: int, index: int) -> Action | None:
    try:
        return None if cell is None else parse_action(str(cell))
    except ParseError as error:
        place = f"{file}, rank {rank}" if file else f"rank {rank}"
        shown = str(cell).strip()[:60]
        raise ParseError(f"{place} action {index} {shown!r}: {error}") from None


@dataclass(frozen=True, slots=True)
class Layout:
    """Which rank computes each stage, inferred from who does."""

    rank_of: dict[int, int]
    num_ranks: int

    @classmethod
    def of(cls, order: PipelineOrder) -> Layout:
        """The rank of a stage is the one with most of its computations."""
        counts: dict[int, Counter[int]] = defaultdict(Counter)
        for rank in range(len(order.cells)):
            for placed in order.placed(rank):
                if placed.action.kind in COMPUTE:
                    counts[placed.action.stage][rank] += 1
        rank_of = {stage: ranks.most_common(1)[0][0] for stage, ranks in counts.items()}
        return cls(rank_of, len(order.cells))

    @property
    def last_stage(self) -> int:
        """The last stage of the pipeline."""
        return max(self.rank_of, default=0)

    def source(self, action: Action) -> Key | None:
        """The computation whose result an F, B or I takes (as a kind of SENDS), or None."""
        if action.kind == "F" and action.stage > 0:
            return "SEND_F", action.stage - 1, action.microbatch
        if action.kind in ("B", "I") and action.stage < self.last_stage:
            return "SEND_B", action.stage + 1, action.microbatch
        return None

    def peer(self, action: Action) -> int | None:
        """The rank at the other end of a message, or None where no stage stands there."""
        step = 1 if action.kind in ("SEND_F", "RECV_B") else -1
        return self.rank_of.get(action.stage + step)

    def other_end(self, action: Action) -> Action:
        """The receive of a send, or the send of a receive."""
        way, _, direction = action.kind.partition("_")
        step = 1 if (way == "SEND") == (direction == "F") else -1
        kind = f"{'RECV' if way == 'SEND' else 'SEND'}_{direction}"
        return Action(kind, action.stage + step, action.microbatch)
