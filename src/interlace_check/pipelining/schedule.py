"""A pipeline schedule as data: the order of each rank, where stages live, and what a rank issues.

    >>> order = PipelineOrder.of([["0F0", "0SEND_F0"], ["1RECV_F0", "1F0"]])
    >>> order.has_messages
    True

Three forms, one after another: the cells of a file (`PipelineOrder`), the place of each stage
(`Layout`), and the steps that torch's runtime takes (`Step`): compute, issue messages, await them.
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
    WAITS,
    Action,
    parse_action,
)

NEEDS = {"F": "RECV_F", "B": "RECV_B", "I": "RECV_B"}
"""Message that a computation awaits, where the stage before it is on another rank."""
Key = tuple[str, int, int | None]
"""Kind, stage and microbatch."""


@dataclass(frozen=True, slots=True)
class Placed:
    """An action and where it stands: `index` counts a rank's cells from 0, as torch's logs do.

    `index` is None for a message that is not in the schedule as given, but that torch adds to it.
    """

    rank: int
    index: int | None
    action: Action

    def __str__(self) -> str:
        where = "" if self.index is None else f" action {self.index}"
        return f"rank {self.rank}{where} `{self.action}`{' (added)' if self.index is None else ''}"

    @property
    def key(self) -> Key:
        """Kind, stage and microbatch."""
        return self.action.kind, self.action.stage, self.action.microbatch


@dataclass(frozen=True, slots=True)
class PipelineOrder:
    """The cells of each rank, in order; None is a step in which the rank waits."""

    cells: tuple[tuple[Action | None, ...], ...]
    remarks: tuple[str, ...] = ()
    num_stages: int | None = None
    """Stages that there must be, where known."""
    num_microbatches: int | None = None
    plans: tuple[tuple[Step, ...], ...] = ()
    """The steps of each rank, where they do not follow from the cells; `form` names what they are
    of."""
    form: str = ""

    @classmethod
    def of_plans(cls, plans: Iterable[Iterable[Step]], form: str) -> PipelineOrder:
        """The order of ranks whose steps are known."""
        steps = tuple([tuple(plan) for plan in plans])
        cells = [
            tuple([p.action for step in plan if step.what != "await" for p in step.actions])
            for plan in steps
        ]
        return cls(tuple(cells), plans=steps, form=form)

    @classmethod
    def of(cls, rows: Iterable[Iterable[object]], **known: int | None) -> PipelineOrder:
        """The order from tokens, or from anything that prints as one, such as torch's actions.

        Raises ParseError, which names rank, action, token and fix.
        """
        cells: list[tuple[Action | None, ...]] = []
        for row in rows:
            if isinstance(row, str) or not isinstance(row, Iterable):
                raise ParseError(
                    f"rank {len(cells)}: its actions are a {type(row).__name__}; fix: give a list "
                    "with one token for each action, such as ['0F0', '0B0']"
                )
            cells.append(tuple([_cell(cell, len(cells), k) for k, cell in enumerate(row)]))
        return cls(tuple(cells), **known)  # type: ignore[arg-type]

    @property
    def has_messages(self) -> bool:
        """True if any rank sends or receives."""
        kinds = {*SENDS, *RECEIVES}
        return any(cell is not None and cell.kind in kinds for row in self.cells for cell in row)

    @property
    def is_lowered(self) -> bool:
        """True if torch has added its messages or, on a single rank, other actions."""
        if len(self.cells) > 1:
            return self.has_messages
        every = (placed for rank in range(len(self.cells)) for placed in self.placed(rank))
        return any(placed.action.kind not in COMPUTE for placed in every)

    def placed(self, rank: int) -> Iterator[Placed]:
        """Yields the actions of a rank, with the parts of an `OVERLAP_F_B` one after another."""
        for index, cell in enumerate(self.cells[rank]):
            if cell is not None:
                for leaf in cell.leaves():
                    yield Placed(rank, index, leaf)


def _cell(cell: object, rank: int, index: int) -> Action | None:
    try:
        return None if cell is None else parse_action(str(cell))
    except ParseError as error:
        raise ParseError(f"rank {rank} action {index} {str(cell)[:60]!r}: {error}") from None


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


@dataclass(frozen=True, slots=True)
class Step:
    """One step of torch's runtime on a rank: `compute`, `issue` messages, or `await` them.

    Messages that are issued together, with sends and receives among them, are one batch.
    """

    what: str
    actions: tuple[Placed, ...]


def plan_of(sequences: Iterable[Iterable[Placed]]) -> list[list[Step]]:
    """The steps of `_PipelineScheduleRuntime`: each message is issued by itself; a computation
    awaits its receive; a WAIT_SEND its send; what is left is awaited at the end of the step."""
    return [list(_steps(sequence)) for sequence in sequences]


def _steps(sequence: Iterable[Placed]) -> Iterator[Step]:
    pending: dict[Key, Placed] = {}
    for placed in sequence:
        kind, stage, microbatch = placed.key
        if kind in SENDS or kind in RECEIVES:
            pending[placed.key] = placed
            yield Step("issue", (placed,))
        elif kind in WAITS:
            send = pending.pop((kind.removeprefix("WAIT_"), stage, microbatch), None)
            if send is not None:
                yield Step("await", (send,))
        elif kind in COMPUTE:
            receive = pending.pop((NEEDS.get(kind, ""), stage, microbatch), None)
            if receive is not None:
                yield Step("await", (receive,))
            yield Step("compute", (placed,))


def messages(plan: Iterable[Step]) -> Iterator[Step]:
    """The steps that issue messages."""
    return (step for step in plan if step.what == "issue")
