"""Samples, single figures that a benchmark measured, and `fit`, which makes a Machine of them.

A sample is also a row of `interlace bench interconnect`.

    >>> samples = [Sample(kind="gemm", dtype="bf16", shape=(8192, 8192, 8192), seconds=1.4e-3)]
    >>> fit(samples, default_machine("cuda")).name
    'calibrated'

What no sample tells keeps its figure. Sizes that were measured go into tables; what is between and
beyond them follows the model, moved to fit them.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from interlace.cost.gemm import gemm_seconds
from interlace.cost.machine import (
    Curve,
    GemmTime,
    Link,
    Machine,
    crossings,
    interface_bytes,
    link_bytes,
)
from interlace.errors import CalibrationError
from interlace.ir import DType

HOST_BOUND = 1.3
"""A sample below this multiple of the host's time may measure the host."""
IN_A_RUN = {"call": 2.0, "collective": 2.0}
"""Factors by which the host takes longer for torch's calls amid a run than in a loop of nothing
else. Its calls of the driver take as long in both."""
TRANSFERS = ("get", "put", "send")
"""Between two ranks."""
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all", "reduce")
"""Kinds of transfer among the ranks of a team."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One measured figure."""

    kind: str
    """`get`, `put`, `send` (point to point, all ranks at once); a collective's kind as in the IR;
    `copy` (inside the device's memory); `gemm`; `launch` (a kernel that does nothing, one after
    another); `issue` (the host, for the call that `protocol` names: `call`, `kernel`, `copy`,
    `peer`, `collective`, `event` or `signal`)."""
    seconds: float
    """One of them, once warm: the median, on the slowest rank; NaN where it failed."""
    backend: str = ""
    """Transport that moved the bytes: `nccl`, `peer`, `gloo`, `ucc`."""
    protocol: str = ""
    """`ce` (copy engine) or `cpu`, for one-sided copies."""
    pattern: str = ""
    """Ranks that take part in a transfer: see `interlace_bench.links`."""
    dtype: str = ""
    """As the IR spells it: `bf16`."""
    nbytes: int = 0
    """Point to point and `copy`: the bytes copied. Collectives: those of the larger of a rank's
    two tensors (what an all-gather makes, what a reduce-scatter takes)."""
    shape: tuple[int, int, int] = (0, 0, 0)
    """M, K and N of a matmul."""
    ranks: int = 0
    """Size of the team; of point-to-point copies, how many ranks took part."""
    hosts: int = 1
    """On how many hosts they were, as many on each; of `send`, the ends were on different ones."""
    error: str = ""
    """Reason for which there is no time."""

    @property
    def usable(self) -> bool:
        """True if the measured time is positive and finite."""
        return 0 < self.seconds < math.inf

    @property
    def link_bytes(self) -> float:
        """The bytes that pass through the busiest rank's link, one way."""
        return link_bytes(self.kind, self.nbytes, self.ranks)

    def interface_bytes(self, shared: bool) -> float:
        """Between hosts: the bytes that pass through the busiest network interface, one way."""
        each = self.ranks // self.hosts
        whole = interface_bytes(self.kind, self.nbytes, (each,) * self.hosts, shared)
        return whole * each if self.kind == "send" and shared else whole

    @property
    def row(self) -> dict[str, object]:
        """A transfer as a row; `world` is the ranks that took part: inside a host those there. The
        time of the pattern `all` is that of copies to all others."""
        copies = self.ranks - 1 if self.pattern == "all" else 1
        known = ("kind", "backend", "protocol", "pattern", "nbytes")
        return {
            **{name: getattr(self, name) for name in known},
            "world": self.ranks,
            "us": copies * self.seconds * 1e6,
            "gbs": (self.link_bytes or math.nan) / self.seconds / 1e9,
            "error": self.error,
        }


def fit(
    samples: Iterable[Sample], base: Machine, name: str = "calibrated", host: str = ""
) -> Machine:
    """The machine `base` with the figures that the samples tell; its measured sites go."""
    found: defaultdict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.usable:
            found[sample.kind].append(sample)
    if not found:
        raise CalibrationError("nothing to calibrate with: no sample has a time above zero")
    issuing = _Host(found["issue"])
    launch = _median(found["launch"], base.launch_s)
    if issuing.bounds(launch, "call"):
        launch = min(launch, base.launch_s)
    machine = base.replace(
        name=name,
        host=host,
        launch_s=launch,
        issue=issuing.in_a_run(base),
        memory_bandwidth=_memory(found["copy"], launch, base),
        links=_links(found, base, issuing),
        between=_between(found, base),
        sites=(),
    )
    gemms = [s for s in found["gemm"] if not issuing.bounds(s.seconds, "call")]
    return _gemms(machine, gemms)


class _Host:
    """Tells what a device did from what only its host did.

    Launched one after another, short work takes as long as the host needs to launch it: such a
    sample says at most how long the device takes.
    """

    def __init__(self, samples: Sequence[Sample]) -> None:
        kinds = dict.fromkeys(s.protocol for s in samples if s.protocol)
        self.seconds = {k: _median([s for s in samples if s.protocol == k], 0.0) for k in kinds}

    def in_a_run(self, base: Machine) -> tuple[tuple[str, float], ...]:
        """The host's seconds for each kind of call amid a run. Where `call` was measured, kinds
        without a sample take the base's time, scaled as that of `call`."""
        known = dict(base.issue)
        measured = {kind: IN_A_RUN.get(kind, 1.0) * took for kind, took in self.seconds.items()}
        if known.get("call") and "call" in measured:
            scale = measured["call"] / known["call"]
            known = {kind: scale * seconds for kind, seconds in known.items()}
        return tuple({**known, **measured}.items())

    def bounds(self, seconds: float, what: str) -> bool:
        """Returns True if `seconds` may be the host's own for such a call, as far as is known."""
        return seconds <= HOST_BOUND * self.seconds.get(what, 0.0)


def _median(samples: Sequence[Sample], otherwise: float) -> float:
    return statistics.median([s.seconds for s in samples]) if samples else otherwise


def _memory(samples: Sequence[Sample], launch: float, base: Machine) -> float:
    """Bytes read and written a second, by the larger half of the copies."""
    ordered = sorted(samples, key=lambda s: s.nbytes)[len(samples) // 2 :]
    rates = [2 * s.nbytes / (s.seconds - launch) for s in ordered if s.seconds > launch]
    rates = [rate for rate in rates if rate > 0]
    return statistics.median(rates) if rates else base.memory_bandwidth


# links


def _links(
    found: defaultdict[str, list[Sample]], base: Machine, issuing: _Host
) -> tuple[tuple[str, Link], ...]:
    curves: defaultdict[str, dict[str, Curve]] = defaultdict(dict)
    for kind in (*TRANSFERS, *COLLECTIVES):
        backends = dict.fromkeys(s.backend for s in found[kind])
        for backend in backends:
            rows = [s for s in found[kind] if s.backend == backend and s.hosts == 1]
            known = dict(base.links).get(backend or base.backend)
            rows = [_at_most(s, known, issuing) for s in rows]
            curves[backend or base.backend] |= _curves(kind, rows)
    links = dict(base.links)
    for backend, made in curves.items():
        if made:
            start = links.get(backend, base.link(None))
            links[backend] = _link(start, made)
    return tuple(links.items())


def _between(found: defaultdict[str, list[Sample]], base: Machine) -> tuple[tuple[str, Link], ...]:
    """The links between hosts: seconds of one crossing, by the bytes through an interface."""
    links = dict(base.between)
    rows = [s for kind in ("send", *COLLECTIVES) for s in found[kind] if s.hosts > 1]
    for backend in dict.fromkeys(s.backend or base.backend for s in rows):
        known, made = base.link(backend, between=True), dict[str, Curve]()
        for kind in dict.fromkeys(s.kind for s in rows):
            mine = [s for s in rows if s.kind == kind and (s.backend or base.backend) == backend]
            latency_s = min((s.seconds for s in mine), default=0.0)
            curve = curve_of(
                (
                    s.interface_bytes(known.shared),
                    s.seconds - latency_s * (1 - 1 / crossings(kind, s.hosts)),
                )
                for s in mine
            )
            if curve is not None:
                made[kind] = curve
        links[backend] = _link(known, made)
    return tuple(links.items())


def _at_most(sample: Sample, known: Link | None, issuing: _Host) -> Sample:
    """The sample, or what the base says where that is less and the sample is the host's."""
    what = "collective" if sample.backend != "peer" else "kernel"
    what = "peer" if sample.kind in ("get", "put") else what
    if known is None or not issuing.bounds(sample.seconds, what):
        return sample
    predicted = sum(known.times(sample.kind, sample.link_bytes, sample.ranks))
    return dataclasses.replace(sample, seconds=min(sample.seconds, predicted))


def _curves(kind: str, rows: Sequence[Sample]) -> dict[str, Curve]:
    """The curves of one kind: for each size of team, and the largest team's for others."""
    curves: dict[str, Curve] = {}
    if kind in TRANSFERS:
        curve = curve_of((s.link_bytes, s.seconds) for s in rows)
        return {} if curve is None else {kind: curve}
    for ranks in sorted({s.ranks for s in rows}):
        curve = curve_of((s.link_bytes, s.seconds) for s in rows if s.ranks == ranks)
        if curve is not None:
            curves[f"{kind}@{ranks}"] = curves[kind] = curve
    return curves


def curve_of(measured: Iterable[tuple[float, float]]) -> Curve | None:
    """The curve of some (bytes, seconds); None where nothing was measured.

    Sizes measured more than once count by their median. Where noise lets a larger message be
    quicker than a smaller one, both take the mean.
    """
    found: defaultdict[float, list[float]] = defaultdict(list)
    for nbytes, seconds in measured:
        if nbytes > 0 and 0 < seconds < math.inf:
            found[float(nbytes)].append(seconds)
    blocks: list[tuple[float, list[float]]] = []  # (mean seconds, sizes)
    for size in sorted(found):
        mean, sizes = statistics.median(found[size]), [size]
        while blocks and blocks[-1][0] > mean:
            before, others = blocks.pop()
            mean = (mean * len(sizes) + before * len(others)) / (len(sizes) + len(others))
            sizes = others + sizes
        blocks.append((mean, sizes))
    points = tuple((size, mean) for mean, sizes in blocks for size in sizes)
    return Curve(points) if points else None


def _link(start: Link, curves: dict[str, Curve]) -> Link:
    """The link with these curves, and the two figures that suit kinds without a curve."""
    whole = next((curves[k] for k in ("get", "put", "all_gather") if k in curves), None)
    whole = whole or next(iter(curves.values()))
    kinds = {kind.partition("@")[0] for kind in curves}  # measured for some teams: for all
    kept = {kind: curve for kind, curve in start.curves if kind.partition("@")[0] not in kinds}
    latency, bandwidth = start.latency_s, whole.bandwidth
    if len(whole.points) > 1:
        latency = whole.latency_s
        (low, quick), (high, slow) = whole.points[0], whole.points[-1]
        if slow > quick:
            bandwidth = (high - low) / (slow - quick)
    return dataclasses.replace(
        start,
        latency_s=latency,
        bandwidth=bandwidth,
        curves=tuple(sorted({**kept, **curves}.items())),
    )


# matmuls


def _gemms(machine: Machine, samples: Sequence[Sample]) -> Machine:
    """The machine with a table of the matmuls, and speeds that fit the larger half of them."""
    found: defaultdict[tuple[str, tuple[int, int, int]], list[float]] = defaultdict(list)
    for sample in samples:
        if min(sample.shape) > 0 and sample.dtype in set(DType):
            found[sample.dtype, sample.shape].append(sample.seconds)
    if not found:
        return machine
    bare, speeds = machine.replace(gemms=()), dict(machine.gemm_flops)
    for dtype in dict.fromkeys(dtype for dtype, _ in found):
        shapes = sorted((s for d, s in found if d == dtype), key=math.prod)
        rates: list[float] = []
        for shape in shapes[len(shapes) // 2 :]:
            took = statistics.median(found[dtype, shape]) - machine.launch_s
            if took > 0:
                rates.append(gemm_seconds(bare, DType(dtype), *shape) / took)
        if rates:
            speeds[dtype] = speeds.get(dtype, speeds["other"]) * statistics.median(rates)
    table = tuple(
        GemmTime(dtype=dtype, m=m, k=k, n=n, seconds=statistics.median(seconds))
        for (dtype, (m, k, n)), seconds in sorted(found.items())
    )
    seen = {(time.dtype, time.m, time.k, time.n) for time in table}
    kept = tuple(t for t in machine.gemms if (t.dtype, t.m, t.k, t.n) not in seen)
    return machine.replace(gemm_flops=tuple(speeds.items()), gemms=(*kept, *table))
