"""The strategies, as rows of data that one decomposer reads.

A row says how a site is cut (`ranks`: one chunk for each rank's rows; `slices`: a slice of every
rank's rows; `whole`: not at all), what moves the bytes, and, for chunks of ranks, which chunk a
rank handles at step k and with whom. An `Offset` gives an offset from the rank, counted modulo the
team:

    >>> STRATEGIES["peer", "get"].gather.chunk.at(2)      # at step 2, the rows of rank + 2
    2

Gathers take the local rows first, at step 0; scatters compute the rank's own rows last, after step
W - 1 (large ones of `fused` in pieces, some of them among those of step W - 1). An all-reduce is a
scatter, then a gather, and a long one of `fused` both for each of several slabs of rows. An
all-to-all goes the way of a gather before matmuls, and of a scatter after them, and each chunk to
its owner directly.
`reduces` states the order in which a scatter adds the W partial results of a row, which is all that
can make it differ from the serial collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StrategyName = Literal[
    "auto", "serial", "pipeline",
    "ring", "peer", "fused", "exchange", "copies",
]  # fmt: skip
"""The names of the rows below, and what `Options.strategy` takes beside them, for type checkers."""


@dataclass(frozen=True, slots=True)
class Offset:
    """The offset `first + step * k` at step k."""

    first: int
    step: int = 0

    def at(self, k: int) -> int:
        """The offset at step `k`."""
        return self.first + self.step * k


@dataclass(frozen=True, slots=True)
class Path:
    """Chunks and peers of a rank at step k = 1 .. W-1, as offsets from its own rank."""

    chunk: Offset
    """Whose rows arrive (gather), or are computed and leave (scatter)."""
    to: Offset
    """Who gets what leaves."""
    source: Offset
    """Who sends what arrives."""
    sent: Offset = Offset(0)
    """Gather: whose rows leave."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """A way to overlap a site: one row of the table.

    `fused` is `peer` with puts, of which the pass `fuse` then puts a matmul's chunks in one kernel;
    `exchange` and `copies` are serial, but `exchange` runs its collective on the backend `peer`,
    and `copies` does it as one-sided copies. To add a strategy that moves bytes as another does,
    add a row; a new primitive also needs a case of each class of passes/strategies/transfers.py.
    Whatever else differs is a field here.
    """

    name: str
    cut: str
    primitive: str
    """Communication that it is made of: `collectives`, `messages` (Send and Recv), or `get` or
    `put` (one-sided copies)."""
    reduces: str
    gather: Path | None = None
    scatter: Path | None = None
    accumulates: bool = False
    """A partial result accumulates each rank's part on its way, instead of all at the end."""
    alone: str = ""
    """Why it cannot serve an all-to-all, each chunk of which is for one rank; empty: it can."""
    peers: bool = False
    """It accesses the memory of peers."""
    kernel: bool = False
    """It needs a kernel on a GPU."""
    outdone: bool = False
    """It has no use on GPUs that have peer memory."""
    amid: bool = False
    """It gains only amid computation that is not the site's: `auto` considers it there."""
    on_gpus: bool = False
    """It is considered on GPUs alone if another row of its name can serve as well."""
    protocol: str | None = None
    """Distinguishes rows of one name, in labels and in the sites of a Program."""
    fuses: bool = False
    """One kernel takes or makes all chunks of a matmul, in pieces if they are large."""
    instead: tuple[str, str | None] | None = None
    """The row that is taken where its kernel cannot serve a site."""
    adds: bool = True
    """It adds partial results itself, and so serves sums alone."""
    copies: bool = False
    """A whole collective becomes copies between the ranks' memories."""

    @property
    def key(self) -> tuple[str, str | None]:
        """Its place in the table."""
        return self.name, self.protocol

    @property
    def label(self) -> str:
        """Its name in tables of measured times: `fused`, `peer/put`."""
        return f"{self.name}/{self.protocol}" if self.protocol else self.name

    @property
    def sliced(self) -> bool:
        """True if a site is cut into slices of every rank's rows."""
        return self.cut == "slices"

    @property
    def whole(self) -> bool:
        """True if its collective stays in one piece."""
        return self.cut == "whole"

    @property
    def puts(self) -> bool:
        """True if a rank writes into its peers' slots."""
        return self.primitive == "put"

    @property
    def fetched(self) -> bool:
        """True if data for a peer is computed in the memory from which that peer fetches it."""
        return self.primitive == "get"


NEAR_FIRST = Path(chunk=Offset(0, 1), to=Offset(0, -1), source=Offset(0, 1))
"""Gather: at step k take the rows of rank + k, give my own to rank - k."""
OWNERS = Path(chunk=Offset(0, 1), to=Offset(0, 1), source=Offset(0, -1))
"""Scatter: at step k compute the rows of rank + k and give them to it."""
NEIGHBOURS = Path(chunk=Offset(0, -1), to=Offset(1), source=Offset(-1), sent=Offset(1, -1))
"""Gather: at step k hand on what came at k - 1. Scatter: add my part to what came, hand it on."""

_RANK_ORDER = "in the order of the ranks, in fp32, rounded once"
_BACKEND = "as the backend's collective does"
_SLICES = "slices of what each rank gets lie apart in an all-to-all, which takes one stretch"
_KERNEL = "its kernel does no all-to-alls"

STRATEGIES: dict[tuple[str, str | None], Strategy] = {
    row.key: row
    for row in (
        Strategy("pipeline", "slices", "collectives", _BACKEND, alone=_SLICES, adds=False),
        Strategy(
            "ring",
            "ranks",
            "messages",
            "rows of rank c: c+1, c+2, ..., c, rounded to the element type after each",
            NEIGHBOURS,
            NEIGHBOURS,
            accumulates=True,
            outdone=True,
        ),
        *(
            Strategy(
                "peer",
                "ranks",
                way,
                _RANK_ORDER,
                NEAR_FIRST,
                OWNERS,
                peers=True,
                on_gpus=way == "put",
                protocol=way,
            )
            for way in ("get", "put")
        ),
        Strategy(
            "fused",
            "ranks",
            "put",
            _RANK_ORDER,
            NEAR_FIRST,
            OWNERS,
            alone=_KERNEL,
            peers=True,
            kernel=True,
            fuses=True,
            instead=("peer", "put"),
        ),
        Strategy(
            "exchange", "whole", "collectives", _RANK_ORDER, peers=True, kernel=True, adds=False
        ),
        Strategy("copies", "whole", "put", _RANK_ORDER, peers=True, amid=True, copies=True),
    )
}
"""All strategies, by name and protocol; the protocol is None unless rows share a name."""


def names() -> tuple[str, ...]:
    """Strategies that a site can be given: `auto` (the fastest), `serial`, or a row's name."""
    return "auto", "serial", *dict.fromkeys(name for name, _ in STRATEGIES)


def rows_of(name: str, protocol: str | None = None) -> tuple[Strategy, ...]:
    """The rows of that name, of which one is taken for each site; none for `serial`.

    `protocol` leaves the one that has it, where one does.
    """
    rows = tuple([row for row in STRATEGIES.values() if row.name == name])
    return tuple([row for row in rows if row.protocol == protocol]) or rows


def row_of(name: str, protocol: str | None) -> Strategy | None:
    """The row of a site of a Program; None for `serial`, and where a text names no strategy."""
    return STRATEGIES.get((name, protocol))


REPLACED = {"hierarchical": "ring", "shift": "ring", "broadcast": "pipeline"}
"""Strategies that went, and what stands for each: errors name it, and files are read so."""
