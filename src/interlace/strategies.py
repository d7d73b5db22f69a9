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
    """What a rank does at step k = 1 .. W-1: offsets from its own rank."""

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
    """How a site is overlapped.

    `fused` is `peer` with puts, of which the pass `fuse` then puts a matmul's chunks in one kernel;
    `exchange` and `copies` are serial, but the collective of one is the backend `peer`, and that of
    the other is one-sided copies. To add a strategy that moves bytes as another does, add a row;
    another way of travelling is a method of Gather and of Scatter in passes/strategies besides.
    Nothing else asks for a strategy's name or transport: whatever differs is a field here.
    """

    name: str
    cut: str
    transport: str
    """`collectives`, `messages` (Send and Recv), or `get` or `put` (one-sided copies)."""
    reduces: str
    gather: Path | None = None
    scatter: Path | None = None
    accumulates: bool = False
    """Whether a partial result picks up each rank's part on its way, instead of all at the end."""
    alone: str = ""
    """Why it cannot serve an all-to-all, each chunk of which is for one rank; empty: it can."""
    peers: bool = False
    """Whether it reaches into the memory of the peers."""
    kernel: bool = False
    """Whether it needs a kernel on a GPU."""
    outdone: bool = False
    """Whether peer memory leaves no use for it on GPUs that have that."""
    amid: bool = False
    """Whether it gains only amid computation that is not the site's: `auto` looks at it there."""
    on_gpus: bool = False
    """Whether it is looked at on GPUs alone, where another row of its name serves as well."""
    protocol: str | None = None
    """What tells rows of one name apart: in labels, and in the sites of a Program."""
    fuses: bool = False
    """Whether one kernel takes or makes all chunks of a matmul, in pieces if they are large."""
    instead: tuple[str, str | None] | None = None
    """The row that is taken where its kernel cannot serve a site."""
    adds: bool = True
    """Whether it adds up partial results itself, and so serves sums alone."""
    copies: bool = False
    """Whether a whole collective becomes copies between the ranks' memories."""

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
        """Whether it is cut into slices of every rank's rows."""
        return self.cut == "slices"

    @property
    def whole(self) -> bool:
        """Whether its collective stays in one piece."""
        return self.cut == "whole"

    @property
    def puts(self) -> bool:
        """Whether a rank writes into its peers' slots."""
        return self.transport == "put"

    @property
    def fetched(self) -> bool:
        """Whether what is for a peer is made where that peer fetches it from."""
        return self.transport == "get"


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
"""By name and, where rows share one, protocol."""


def names() -> tuple[str, ...]:
    """What a site can be given: a row, `serial`, or the fastest of all."""
    return "auto", "serial", *dict.fromkeys(name for name, _ in STRATEGIES)


def rows_of(name: str, transport: str | None = None) -> tuple[Strategy, ...]:
    """The rows of that name, of which one is taken for each site; none for `serial`.

    `transport` leaves those that move bytes so, where some do.
    """
    rows = tuple([row for row in STRATEGIES.values() if row.name == name])
    return tuple([row for row in rows if row.transport == transport]) or rows


def row_of(name: str, protocol: str | None) -> Strategy | None:
    """The row of a site of a Program; None for `serial`, and where a text names no strategy."""
    return STRATEGIES.get((name, protocol))


REPLACED = {"hierarchical": "ring", "shift": "ring", "broadcast": "pipeline"}
"""Strategies that went, and what stands for each: errors name it, and files are read so."""
