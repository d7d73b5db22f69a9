"""Copies between ranks: one-sided, by copy engine and by kernels, and messages of the backend.

    best = best_copy(ranks)                     # bytes a second, all ranks copying at once
    for figure in measure_links(ranks, sizes, tell):
        print(figure.pattern, figure.protocol, figure.nbytes, figure.bandwidth)

Patterns: `0>1` is one ordered pair, rank 0 at work and rank 1 the other end; `ring` is every rank
with the next; `all` is every rank with every other, one after another.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from interlace.bench.peer_memory import PeerMemory
from interlace.bench.ranks import Ranks
from interlace.bench.timing import burst, describe
from interlace.cost.samples import Sample

ROOF_BYTES = 64 << 20
"""The roof's copies are at least that long,"""
ROOF_SIZES = (64 << 20, 256 << 20)
BURST_S = 2e-3
REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One measured transfer."""

    kind: str
    """`get`, `put`, `send` or a collective's kind."""
    backend: str
    protocol: str = ""
    """`ce`, `sm` or `cpu`."""
    pattern: str
    """Who takes part; see above. Collectives: `team`."""
    nbytes: int
    """Bytes of one copy, or of a collective's larger tensor."""
    ranks: int
    seconds: float
    """Of one transfer, the slowest rank's; NaN where it failed."""
    moved: float
    """Bytes that went into (or out of) one rank meanwhile."""
    error: str = ""

    @property
    def bandwidth(self) -> float:
        """Bytes a second into (or out of) one rank."""
        return self.moved / self.seconds if self.seconds > 0 else math.nan

    @property
    def sample(self) -> Sample:
        """The same for `interlace.cost.fit`."""
        count = self.ranks
        each = self.seconds / (count - 1) if self.pattern == "all" else self.seconds
        return Sample(
            kind=self.kind,
            seconds=each,
            backend=self.backend,
            protocol="ce" if self.protocol == "cpu" else self.protocol,
            nbytes=self.nbytes,
            ranks=count if self.pattern in ("ring", "all", "team") else 2,
            concurrent=self.pattern in ("ring", "all"),
        )


def sizes_between(least: int, most: int, factor: int = 4) -> list[int]:
    """Sizes that grow by `factor`."""
    steps = int(math.log(most / least, factor) + 1e-9)
    sizes = [least * factor**i for i in range(steps + 1)]
    return sizes if sizes[-1] == most else [*sizes, most]


def engines(ranks: Ranks) -> tuple[str, ...]:
    """The ways to copy that there are."""
    return ("ce", "sm") if ranks.cuda else ("cpu",)


def patterns(ranks: Ranks) -> list[tuple[str, list[int]]]:
    """Each pattern with the peers that this rank works with."""
    me, size = ranks.me, ranks.size
    pairs = [
        (f"{a}>{b}", [b] if me == a else []) for a in range(size) for b in range(size) if a != b
    ]
    others = [(me + k) % size for k in range(1, size)]
    return [*pairs, ("ring", others[:1]), *([("all", others)] if size > 2 else [])]


def timed(ranks: Ranks, run: Callable[[], Any] | None, guess: float) -> float:
    """Seconds of one launch: the median of a few bursts, of each the slowest rank."""
    launches = min(100, max(2, round(BURST_S / guess)))
    bursts = [burst(ranks, run, [()], launches)[0] for _ in range(REPEATS)]
    return statistics.median(ranks.maximum(bursts))


def measure_links(
    ranks: Ranks, sizes: Sequence[int], step: Callable[[str], None]
) -> Iterator[Figure]:
    """Every pattern, both directions, every engine, every size; then messages of the backend."""
    memory = PeerMemory(ranks, max(sizes))
    for pattern, peers in patterns(ranks):
        for kind in ("get", "put"):
            for engine in engines(ranks):
                step(f"{kind} {engine} {pattern}")
                for nbytes in sizes:
                    yield _copy(ranks, memory, kind, engine, pattern, peers, nbytes)
    step("send")
    for nbytes in sizes:
        yield _message(ranks, nbytes)


def _copy(
    ranks: Ranks,
    memory: PeerMemory,
    kind: str,
    engine: str,
    pattern: str,
    peers: list[int],
    nbytes: int,
) -> Figure:
    mine = memory.private

    def run() -> None:
        for peer in peers:
            dst, src = (mine, memory.theirs[peer]) if kind == "get" else (memory.theirs[peer], mine)
            memory.copy(engine, dst, src, nbytes)

    count = ranks.size - 1 if pattern == "all" else 1
    guess = count * (1e-5 + nbytes / (2e11 if ranks.cuda else 3e9))
    return Figure(
        **{"kind": kind, "backend": "peer", "protocol": engine, "pattern": pattern},
        **{"nbytes": nbytes, "ranks": ranks.size, "moved": float(count * nbytes)},
        seconds=timed(ranks, run if peers else None, guess),
    )


def _message(ranks: Ranks, nbytes: int) -> Figure:
    """Every rank sends to the next and receives from the one before."""
    backend = "nccl" if ranks.cuda else "gloo"
    out = torch.zeros(nbytes, dtype=torch.uint8, device=ranks.device)
    into = torch.zeros_like(out)
    to, source = (ranks.me + 1) % ranks.size, (ranks.me - 1) % ranks.size

    def run() -> None:
        ops = [dist.P2POp(dist.isend, out, to), dist.P2POp(dist.irecv, into, source)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    fixed: dict[str, Any] = {"kind": "send", "backend": backend, "pattern": "ring"}
    fixed |= {"nbytes": nbytes, "ranks": ranks.size, "moved": float(nbytes)}
    guess = (4e-5 + nbytes / 2e11) if ranks.cuda else (2e-4 + nbytes / 1e9)
    return attempt(ranks, fixed, lambda: timed(ranks, run, guess))


def attempt(ranks: Ranks, fixed: dict[str, Any], measure: Callable[[], float]) -> Figure:
    """A Figure, with the error where the measurement raised on some rank."""
    problem, seconds = None, math.nan
    try:
        seconds = measure()
    except Exception as error:
        problem = describe(error, ranks)
    problem = ranks.agree(problem)
    return Figure(**fixed, seconds=math.nan if problem else seconds, error=problem or "")


@dataclass(frozen=True, slots=True)
class Roof:
    """The best rate of a long copy with all ranks copying, bytes a second."""

    bandwidth: float
    how: str


def best_copy(ranks: Ranks, sizes: Sequence[int] = ROOF_SIZES) -> Roof:
    """The link's roof: long copies by copy engine, get and put, to the next rank and to all."""
    memory = PeerMemory(ranks, max(sizes))
    engine = engines(ranks)[0]
    found = [
        _copy(ranks, memory, kind, engine, pattern, peers, nbytes)
        for pattern, peers in patterns(ranks)
        if ">" not in pattern
        for kind in ("get", "put")
        for nbytes in sizes
    ]
    best = max(found, key=lambda figure: figure.bandwidth)
    return Roof(best.bandwidth, f"{best.kind} {best.protocol} {best.pattern} {best.nbytes >> 20}M")
