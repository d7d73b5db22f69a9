"""Calibration: the figures of a machine, from measured timelines of Programs that ran on it.

    >>> machine = calibrate([(executor.program, executor.timeline())], default_machine("cpu"))
    >>> machine.save("mine.json")                    # then: Options(calibration="mine.json")

Any run with `trace=True` will do; one with matmuls, copies and collectives of several sizes tells
the most. What the runs do not show keeps the figure of the machine that one starts from. A rank's
span of a collective contains its wait for the others, so the shortest of all ranks counts.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from interlace.cost.location import fingerprint
from interlace.cost.machine import Link, Machine
from interlace.cost.op_times import Boxes, op_cost, op_kind
from interlace.cost.timeline import Timeline
from interlace.errors import CalibrationError
from interlace.ir import Call, Collective, Copy, Get, Program, Put

Sample = tuple[float, float]
"""Predicted work and measured time, in seconds."""


@dataclass(slots=True)
class _Samples:
    """What the runs show, by the figure that it tells of."""

    matmuls: dict[str, list[Sample]] = field(default_factory=dict[str, list[Sample]])
    """By element type."""
    bytes: list[Sample] = field(default_factory=list[Sample])
    transfers: dict[str, list[Sample]] = field(default_factory=dict[str, list[Sample]])
    """By transport."""


def calibrate(
    runs: Iterable[tuple[Program, Timeline]], start: Machine, name: str = "calibrated"
) -> Machine:
    """The machine `start` with the figures that measured runs show, instead of its tables."""
    given, start = start, start.plain
    samples = _Samples()
    for program, timeline in runs:
        _collect(program, timeline, start, samples)
    shown = [*samples.matmuls.values(), samples.bytes, *samples.transfers.values()]
    if not any(shown):
        raise CalibrationError(
            "nothing to calibrate with: the timelines hold no compute and no communication of "
            "their Programs; run with trace=True"
        )
    compute = [sample for kind in (*samples.matmuls.values(), samples.bytes) for sample in kind]
    tiny = [measured for work, measured in compute if work < start.launch_s]
    launch = min(tiny, default=start.launch_s)
    speeds = dict(start.gemm_flops)
    for dtype, found in samples.matmuls.items():
        speeds[dtype] = speeds.get(dtype, speeds["other"]) * _speed(found, launch)
    links = dict(given.links)
    for transport, found in samples.transfers.items():
        links[transport] = _link(found, start.link(transport))
    return start.replace(
        name=name,
        host=fingerprint(),
        launch_s=launch,
        gemm_flops=tuple(speeds.items()),
        memory_bandwidth=start.memory_bandwidth * _speed(samples.bytes, launch),
        gemms=() if samples.matmuls else given.gemms,
        links=tuple(links.items()),
    )


def _collect(program: Program, timeline: Timeline, start: Machine, samples: _Samples) -> None:
    shortest: dict[tuple[int, int], float] = {}  # what meets counts once, for all its ranks
    for span in timeline.spans:
        if 0 <= span.op_index < len(program.ops) and span.rank in program.world:
            op = program.ops[span.op_index]
            if op_kind(op) == span.kind and isinstance(op, Call | Copy | Collective | Put | Get):
                key = (span.op_index, -1 if isinstance(op, Collective) else span.rank)
                shortest[key] = min(span.seconds, shortest.get(key, span.seconds))
    boxes: dict[int, tuple[Boxes, dict[str, int]]] = {}
    for (index, rank), seconds in shortest.items():
        rank = rank if rank >= 0 else timeline.ranks[0]
        if rank not in boxes:
            members = program.where(rank).members
            sizes = {team: len(member.ranks) for team, member in members.items()}
            boxes[rank] = program.boxes(rank), sizes
        box, sizes = boxes[rank]
        op = program.ops[index]
        cost = op_cost(op, box, start, sizes)
        if cost.work_s <= 0 or seconds <= 0:
            continue
        if cost.transport is not None:
            samples.transfers.setdefault(cost.transport, []).append((cost.work_s, seconds))
        elif cost.dtype is not None:
            samples.matmuls.setdefault(str(cost.dtype), []).append((cost.work_s, seconds))
        else:
            samples.bytes.append((cost.work_s, seconds))


def _speed(samples: list[Sample], launch: float) -> float:
    """How much faster the work goes than predicted: the median, of the longer half."""
    longest = sorted(samples)[len(samples) // 2 :]
    rates = [work / (seconds - launch) for work, seconds in longest if seconds > launch]
    return statistics.median(rates) if rates else 1.0


def _link(samples: list[Sample], start: Link) -> Link:
    """Latency and bandwidth that fit best, by least squares of the relative error."""
    points = [(work * start.bandwidth, seconds) for work, seconds in samples]
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    size = sum(w * n for w, (n, _) in zip(weights, points, strict=True)) / total
    spent = sum(w * s for w, (_, s) in zip(weights, points, strict=True)) / total
    spread = sum(w * (n - size) ** 2 for w, (n, _) in zip(weights, points, strict=True))
    if spread > 1e-3 * total * size**2:
        both = sum(w * (n - size) * (s - spent) for w, (n, s) in zip(weights, points, strict=True))
        slope = both / spread
        latency = spent - slope * size
    else:  # one size alone tells one figure
        latency, slope = start.latency_s, (spent - start.latency_s) / size
    if slope <= 0:  # noise hides the bandwidth: all is latency
        return dataclasses.replace(start, latency_s=spent)
    if latency < 0:
        latency, slope = 0.0, spent / size
    return dataclasses.replace(start, latency_s=latency, bandwidth=1 / slope)
