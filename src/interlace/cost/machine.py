"""Machine: the figures from which op times follow, built in or read from a calibration file.

    >>> default_machine("cpu").replace(lanes=1).save("mine.json")
    >>> Machine.load("mine.json").lanes
    1

Every figure is of one rank. Ranks must choose alike, so all load the same file, or take the same
built-in model, which does not look at the machine it runs on.
"""

from __future__ import annotations

import dataclasses
import math
import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from interlace.errors import CalibrationError
from interlace.ir import DType


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by bytes: the bytes grow from point to point, and the seconds never fall."""

    points: tuple[tuple[float, float], ...]

    @property
    def latency_s(self) -> float:
        """Seconds of the smallest message."""
        return self.points[0][1]

    @property
    def bandwidth(self) -> float:
        """The best rate of a whole message, latency included."""
        return max(nbytes / seconds for nbytes, seconds in self.points)

    def seconds(self, nbytes: float) -> float:
        """The seconds that a message of `nbytes` takes."""
        points = self.points
        after = bisect_left(points, (nbytes, 0.0))
        if after == 0:
            return points[0][1]
        if after < len(points):
            (low, quick), (high, slow) = points[after - 1], points[after]
            part = math.log(nbytes / low) / math.log(high / low)
            return quick * (slow / quick) ** part
        last, longest = points[-1]
        if len(points) == 1:
            return longest * nbytes / last
        before, shorter = points[-2]
        rate = (longest - shorter) / (last - before) or longest / last
        return longest + (nbytes - last) * rate


def link_bytes(kind: str, nbytes: float, ranks: int) -> float:
    """The bytes that pass through the busiest rank's link, one way; `nbytes` are those of a point-
    to-point transfer, or of the larger of a rank's two tensors in a collective."""
    part = nbytes * (ranks - 1) / ranks if ranks > 1 else 0.0
    match kind:
        case "get" | "put" | "send" | "copy":
            return nbytes
        case "barrier":
            return 0.0
        case "all_reduce":
            return 2 * part
        case "broadcast":
            return nbytes if ranks > 1 else 0.0
        case _:
            return part


def interface_bytes(kind: str, nbytes: float, hosts: Sequence[int], shared: bool) -> float:
    """The bytes that pass through the busiest network interface, one way, where a team has so many
    ranks on each of its `hosts`; `nbytes` as in `link_bytes`.

    Ranks of a host stand next to one another. A ring crosses each host's border once, through the
    interface that the ranks share, or evenly through those that they have; so do what a root sends
    to all and what it sums. In an all-to-all each rank sends what is for ranks of other hosts.
    """
    ranks = sum(hosts)
    match kind:
        case "send":
            return nbytes
        case "all_to_all":
            return max((k if shared else 1) * (ranks - k) for k in hosts) * nbytes / ranks
        case "gather" | "scatter":
            return nbytes * (ranks - min(hosts)) / ranks  # the root's interface
        case _:
            whole = nbytes if kind == "reduce" else link_bytes(kind, nbytes, ranks)
            return whole if shared else whole / min(hosts)


def crossings(kind: str, hosts: int) -> int:
    """The number of successive crossings of a collective from host to host: along a ring, or
    (all_reduce, and what goes to or from a root) up and down a tree."""
    match kind:
        case "all_gather" | "reduce_scatter":
            return hosts - 1
        case "all_reduce":
            return 2 * math.ceil(math.log2(hosts))
        case "broadcast" | "reduce" | "barrier":
            return math.ceil(math.log2(hosts))
        case _:
            return 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A transport between ranks: a message of n bytes takes `latency_s + n / bandwidth`."""

    latency_s: float
    """Between hosts: of one crossing."""
    bandwidth: float
    """Bytes a second into (or out of) one rank; of a `shared` one into one host."""
    shared: bool = False
    """Between hosts: whether all ranks of a host share one network interface."""
    lane: float = 0.0
    """Part of a compute lane that a transfer takes: 1 for a core that copies, 0 for an engine."""
    steals: float = 0.0
    """The fraction of compute speed that a transfer costs the rank while it runs,"""
    draws: float = 0.0
    """or, if more, one whose power limit it draws on."""
    curves: tuple[tuple[str, Curve], ...] = ()
    """Measured times, which go before the two figures: seconds by the bytes through a rank's link,
    for each kind of transfer (`get`, `put`, `all_gather`, ...), also as `kind@ranks`; between hosts
    by the bytes through an interface."""

    def times(self, kind: str, nbytes: float, ranks: int = 0) -> tuple[float, float]:
        """The part of a transfer that nothing slows, and the part that others may slow."""
        curves = dict(self.curves)
        curve = curves.get(f"{kind}@{ranks}") or curves.get(kind)
        if curve is None:
            return self.latency_s, nbytes / self.bandwidth
        return curve.latency_s, curve.seconds(nbytes) - curve.latency_s


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmTime:
    """Measured time of a matmul of M x K by K x N, its launch included."""

    dtype: str
    m: int
    k: int
    n: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteKey:
    """The sizes and types of a site, up to the strategy."""

    kind: str
    """As the IR calls it: `all_gather_matmul`, `matmul_reduce_scatter`, `all_to_all_matmul`, ..."""
    dtype: str
    m: int
    k: int
    n: int
    world: int
    graph: bool = False
    """The site ran as a captured graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteTime:
    """One site, one strategy, measured."""

    site: SiteKey
    strategy: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A model of the machine that runs each rank."""

    name: str
    device: str
    """`cpu` or `cuda`."""
    host: str = ""
    """Where it was measured (`fingerprint()`); empty for a built-in model."""
    gemm_flops: tuple[tuple[str, float], ...]
    """Floating point operations a second of a large matmul, by element type (`other`: the rest)."""
    gemm_tile: tuple[int, int] = (1, 1)
    """Rows and columns of the tile that one unit computes,"""
    gemm_tiles: tuple[tuple[int, int, float], ...] = ()
    """other tiles, with their part of that speed,"""
    units: int = 1
    """and how many units compute at once: a matmul takes whole waves of tiles."""
    gemms: tuple[GemmTime, ...] = ()
    """Matmuls that were measured: they go before the model."""
    attention: tuple[float, float] = (1.0, 1.0)
    """Parts of a large matmul's speed that attention has, forward and backward."""
    boost_s: float = 0.0
    """Seconds that the device computes at these speeds after a rest, until its power limit lowers
    its clock,"""
    sustained: float = 1.0
    """and the part of the speeds of matmuls and attention that is left then."""
    memory_bandwidth: float
    """Bytes a second that a pointwise op reads and writes."""
    launch_s: float
    """Seconds that each compute op takes besides its work."""
    issue_s: float
    """Seconds that the host takes to issue an op."""
    issue: tuple[tuple[str, float], ...] = ()
    """The same by what is issued: `call`, `kernel`, `copy`, `peer`, `collective`, `event`,
    `signal`."""
    event_s: float = 0.0
    """Seconds that a stream takes for an event, a signal or a slot."""
    signal_s: float = 0.0
    """Seconds to raise a signal, if longer: kernels around it are not back to back."""
    lanes: int = 1
    """Number of streams of a rank that run at full speed at once; more share that speed."""
    backend: str
    """Transport of collectives that name no backend."""
    links: tuple[tuple[str, Link], ...]
    """Links by transport: `gloo`, `nccl`, and `peer` for one-sided copies."""
    between: tuple[tuple[str, Link], ...] = ()
    """The same between ranks on different hosts, which share no memory; empty: as inside."""
    sites: tuple[SiteTime, ...] = ()
    """Whole sites that were measured, by strategy."""
    captured: bool = False
    """Runs are replays of a captured graph, so that the host issues nothing."""
    kernels: bool = True
    """A GPU, if any, runs the kernels of `fused`; found when asked for, as `captured` is."""
    packed_kernels: bool = True
    """And those of packed rows of FP8, which only some versions of Triton compile."""

    def replace(self, **changes: object) -> Machine:
        """This machine with other `changes` of figures."""
        return dataclasses.replace(self, **changes)  # pyright: ignore[reportArgumentType]

    def measured_site(self, site: SiteKey, strategy: str) -> float | None:
        """The measured seconds of a site with a strategy, if it was measured."""
        times = (t.seconds for t in self.sites if t.strategy == strategy and t.site == site)
        return next(times, None)

    def flops(self, dtype: DType) -> float:
        """The speed of a matmul of that element type."""
        speeds = dict(self.gemm_flops)
        return speeds.get(str(dtype), speeds["other"])

    def link(self, transport: str | None, between: bool = False) -> Link:
        """The link of a transport, inside a host or between hosts; an unknown one is taken to be
        like the default backend."""
        links = dict(self.between if between and self.between else self.links)
        return links.get(transport or self.backend, links[self.backend])

    @property
    def replayed(self) -> Machine:
        """The same where a captured graph is replayed: the host issues nothing."""
        issue = tuple((what, 0.0) for what, _ in self.issue)
        return self.replace(issue=issue, issue_s=0.0, captured=True)

    @property
    def power_limited(self) -> Machine:
        """The same at its power limit, where matmuls and attention run at the sustained speed."""
        change, part = dataclasses.replace, self.sustained
        return self.replace(
            gemm_flops=tuple([(dtype, part * flops) for dtype, flops in self.gemm_flops]),
            gemms=tuple([change(gemm, seconds=gemm.seconds / part) for gemm in self.gemms]),
            links=tuple([(k, change(x, steals=max(x.steals, x.draws))) for k, x in self.links]),
            sustained=1.0,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a calibration file for this host to `path`, whole or not at all."""
        from interlace.cost.machine_file import save

        save(self, path)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, any_host: bool = False, gpus: str | None = None
    ) -> Machine:
        """Reads a calibration file, as `save` and `interlace calibrate` write it.

        Args:
            path: the file.
            any_host: takes a file that was measured elsewhere.
            gpus: what this host has (`4 x NVIDIA H200`); without it a file of GPUs is taken on
                trust.

        Returns:
            The machine.

        Raises:
            CalibrationError: the file is missing, malformed or of another host.
        """
        from interlace.cost.machine_file import load

        return load(path, any_host=any_host, gpus=gpus)


def default_machine(device: str = "cpu") -> Machine:
    """The built-in model of a device: `cpu`, or `cuda` (an H200 with its NVLink peers)."""
    found = {"cpu": CPU, "cuda": H200, "h200": H200}.get(device.split(":")[0])
    if found is None:
        raise CalibrationError(
            f"no built-in model of device {device!r}: use cpu or cuda, or a calibration file"
        )
    return found


CPU = Machine(
    name="cpu",
    device="cpu",
    gemm_flops=(("f32", 60e9), ("f64", 30e9), ("bf16", 60e9), ("other", 10e9)),
    memory_bandwidth=8e9,
    launch_s=8e-6,
    issue_s=4e-6,
    event_s=10e-6,
    lanes=2,
    backend="gloo",
    links=(
        ("gloo", Link(latency_s=150e-6, bandwidth=1.0e9, lane=1.0)),
        ("peer", Link(latency_s=20e-6, bandwidth=4.0e9, lane=1.0)),
    ),
    between=(("gloo", Link(latency_s=200e-6, bandwidth=1.1e9, lane=1.0, shared=True)),),
)
"""A core a rank for compute, and one more to copy with; 10 Gb/s Ethernet between hosts."""


def _curve(kilobytes: tuple[int, ...], microseconds: tuple[float, ...]) -> Curve:
    points = zip(kilobytes, microseconds, strict=True)
    return Curve(tuple((size * 1e3, took * 1e-6) for size, took in points))


SIZES = (6, 100, 800, 3_000, 12_000, 48_000, 192_000, 768_000)
QUAD = (6, 100, 800, 3_000, 12_000, 25_000, 50_000, 100_000, 201_000, 768_000)
NCCL_GATHER = _curve(QUAD, (15, 16, 22, 38, 83, 118, 197, 354, 675, 2390))
"""Four ranks, from 12 MB up as measured: alone (50 MB in interconnect.csv), or what NCCL adds to
matmuls in graphs (`sequential` in overlap.csv)."""
NCCL_SCATTER = _curve(QUAD, (15, 17, 24, 42, 83, 113, 197, 375, 754, 2800))
NCCL_REDUCE = _curve(tuple(2 * size for size in SIZES), (20, 22, 33, 64, 140, 385, 1340, 4900))
PAIR = (2_100, 4_200, 6_300, 12_600, 37_700, 67_100, 134_200)
NCCL_GATHER_2 = _curve((6, *PAIR), (15, 38, 46, 57, 80, 174, 298, 572))
"""Two ranks: what NCCL adds to matmuls in graphs (`sequential` in the rows of overlap.csv)."""
NCCL_SCATTER_2 = _curve((6, *PAIR), (15, 37, 43, 49, 77, 187, 337, 644))
EXCHANGE = _curve(SIZES[:6], (9, 9.5, 12, 20, 52, 190))
"""One kernel in which every rank writes to its peers."""
EXCHANGE_REDUCE = _curve((12, 200, 1_600, 6_000, 24_000), (11, 12, 17, 33, 98))
COPY_SIZES = (4, 256, 1_000, 2_100, 4_200, 8_400, 16_800, 33_600, 134_000)
PUT = _curve(COPY_SIZES, (6, 6.7, 8.8, 11.8, 17, 21.5, 44.6, 90, 365))
"""Small ones with what their signals take to arrive, large ones as in a chain of puts, less what
raising those takes (measured on two GPUs)."""
GET = _curve(COPY_SIZES, (6, 6.7, 8.8, 15.9, 23, 29, 60, 122, 493))
"""A third more from 2 MB up. In graphs on four GPUs sites bound by the link (AG+GEMM 8192,4096,1024
and 8192,4096,1536, GEMM+RS 8192,1024,4096 and 8192,1536,4096) took 248 to 294 us by gets, and 217
to 234 by puts."""

H200 = Machine(
    name="h200",
    device="cuda",
    gemm_flops=(
        ("bf16", 830e12),
        ("f16", 830e12),
        ("f32", 50e12),
        ("f64", 55e12),
        ("f8e4m3", 1500e12),
        ("f8e5m2", 1500e12),
        ("other", 50e12),
    ),
    gemm_tile=(128, 256),
    gemm_tiles=((128, 128, 0.85), (64, 128, 0.65), (64, 64, 0.45)),
    units=132,
    attention=(0.775, 0.678),
    boost_s=30e-3,
    sustained=0.86,
    memory_bandwidth=4.2e12,
    launch_s=3e-6,
    issue_s=18e-6,
    issue=(
        ("call", 33e-6),
        ("kernel", 18e-6),
        ("copy", 4e-6),
        ("peer", 6e-6),
        ("collective", 80e-6),
        ("event", 4e-6),
        ("signal", 3.5e-6),
    ),
    event_s=1e-6,
    signal_s=6e-6,
    lanes=1,
    backend="nccl",
    links=(
        (
            "nccl",
            Link(
                latency_s=15e-6,
                bandwidth=300e9,
                steals=0.7,
                curves=(
                    ("all_gather", NCCL_GATHER),
                    ("all_gather@2", NCCL_GATHER_2),
                    ("reduce_scatter", NCCL_SCATTER),
                    ("reduce_scatter@2", NCCL_SCATTER_2),
                    ("all_reduce", NCCL_REDUCE),
                ),
            ),
        ),
        (
            "peer",
            Link(
                latency_s=11e-6,
                bandwidth=360e9,
                steals=0.1,
                draws=0.3,
                curves=(
                    ("all_gather", EXCHANGE),
                    ("reduce_scatter", EXCHANGE),
                    ("all_reduce", EXCHANGE_REDUCE),
                    ("get", GET),
                    ("get@2", PUT),
                    ("put", PUT),
                ),
            ),
        ),
        ("gloo", Link(latency_s=300e-6, bandwidth=1.0e9)),
    ),
    between=(
        ("nccl", Link(latency_s=25e-6, bandwidth=48e9, steals=0.1)),
        ("gloo", Link(latency_s=300e-6, bandwidth=1.1e9, shared=True)),
    ),
)
"""H200s with 18 NVLinks a pair; between hosts each has an interface of 400 Gb/s, as is published of
such machines. docs/explanation/prediction.md says which rows each figure was fitted to."""
