"""Why some nodes can never finish: a short cycle, or an op that waits for what never comes.

Nothing in the model is a choice, so the nodes that cannot finish are the same in every
interleaving. Those behind them are not reported; the ones that hold everything up are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from interlace.verify.build import GraphBuilder
from interlace.verify.graph import HappensBefore, Part
from interlace.verify.report import Finding, OpRef

if TYPE_CHECKING:
    from interlace.verify.explain import Explainer

MAX_CYCLES = 4


class CycleLink(NamedTuple):
    """One link of a cycle: `part` cannot go before `other` has."""

    part: Part
    other: Part

    @property
    def by_stream(self) -> bool:
        """True if the order of a stream says so."""
        (place, item), (there, other) = self
        return place is there and item.stream == other.stream and other.turn <= item.turn


def deadlocks(builder: GraphBuilder, explain: Callable[[], Explainer]) -> list[Finding]:
    """The findings for everything that cannot finish."""
    graph = builder.graph
    stuck = {node for node, clock in enumerate(graph.clocks) if clock is None}
    return [*_never(builder, stuck, explain()), *_cycles(graph, stuck, explain())] if stuck else []


def _never(builder: GraphBuilder, stuck: set[int], explainer: Explainer) -> list[Finding]:
    """The ops that could start, but for something that never comes."""
    graph = builder.graph
    found: dict[tuple[object, int], tuple[str, Part, set[int]]] = {}
    for node, reason in sorted(graph.never.items()):
        if any(before in stuck for before in graph.awaited(node)):
            continue
        part = graph.part[node]
        assert part is not None, "only an op waits for what never comes"
        place = part[0]
        found.setdefault((place.source, part[1].index), (reason, part, set()))[2].add(place.rank)
    findings: list[Finding] = []
    for reason, part, ranks in found.values():
        ref = explainer.ref(part[0], part[1], f"waits for {reason}")
        message = f"an op waits forever, for {reason}"
        words = f"add what line {ref.line} waits for: {reason}; or remove it on every rank"
        on = tuple(sorted(ranks))
        findings.append(Finding("deadlock", message, (ref,), words, "error", on))
    return findings


def _cycles(graph: HappensBefore, stuck: set[int], explainer: Explainer) -> list[Finding]:
    """At most `MAX_CYCLES`."""
    found: dict[frozenset[tuple[object, int]], Finding] = {}
    for steps in _circles(graph, stuck):
        key = frozenset((part[0].source, part[1].index) for part, *_ in steps)
        if key not in found:
            found[key] = _explained(steps, explainer)
        if len(found) >= MAX_CYCLES:
            break
    return [*found.values()]


def _circles(graph: HappensBefore, stuck: set[int]) -> Iterator[list[CycleLink]]:
    """A cycle for each knot of nodes that holds up others, and waits for none: the one that the
    last edges of its nodes make, which lead to peers where any do."""
    step = dict[int, int]()
    for start in sorted(stuck):
        node, first = start, len(step)
        while node not in step and node >= 0:
            step[node] = len(step)
            awaited = graph.awaited(node)
            if graph.part[node] is not None:
                awaited = awaited[::-1]
            node = next((one for one in awaited if one in stuck), -1)
        if node < 0 or step[node] < first:
            continue  # something that never comes, or an earlier cycle
        parts = [part for one in [*step][step[node] :] if (part := graph.part[one]) is not None]
        yield _joined([CycleLink(*pair) for pair in pairwise([*parts, parts[0]])])


def _joined(steps: list[CycleLink]) -> list[CycleLink]:
    """Several links along one stream as one, from where the cycle enters a stream."""
    first = next((i for i in range(len(steps)) if not steps[i - 1].by_stream), 0)
    joined: list[CycleLink] = []
    for step in steps[first:] + steps[:first]:
        if joined and joined[-1].by_stream and step.by_stream:
            joined[-1] = CycleLink(joined[-1].part, step.other)
        else:
            joined.append(step)
    return [step for step in joined if step.part != step.other]


def _explained(steps: list[CycleLink], explainer: Explainer) -> Finding:
    refs: list[OpRef] = []
    for step in steps:
        (place, item), (there, other) = step
        role = f"waits for rank {there.rank}, line {explainer.line(there.source, other.index)}"
        if step.by_stream:
            role += f", which comes earlier on stream {place.source.streams[item.stream]}"
        refs.append(explainer.ref(place, item, role))
    ranks = sorted({ref.rank for ref in refs})
    message = f"rank {ranks[0]} waits for itself, in a circle"
    if len(ranks) > 1:
        listed = f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
        message = f"ranks {listed} wait for each other, in a circle"
    return Finding("deadlock", message, tuple(refs), _advice(steps), "error", tuple(ranks))


def _advice(steps: list[CycleLink]) -> str:
    """The fix in words: which op has to move."""
    takes = [item.ordering.takes for part, other in steps for _, item in (part, other)]
    if any(buffer is not None and buffer.kind == "symmetric" for buffer in takes):
        return "free the buffer that held the slot before this take of it, on every rank"
    return (
        "issue what a peer waits for before what waits for a peer, or put messages into one group"
    )


def launch_order(builder: GraphBuilder, explain: Callable[[], Explainer]) -> list[Finding]:
    """A remark where ranks that run their collectives and messages one after another, as listed,
    would wait for each other: NCCL does so with those of a team; kernels of two teams may hold
    what the other needs.
    """
    graph, stuck = launched_in_a_circle(builder)
    if not stuck:
        return []
    explainer, steps = explain(), next(_circles(graph, stuck), list[CycleLink]())
    launched = [step.other for step in steps if step.part[0] is step.other[0]]
    if not launched:
        return []
    return [
        Finding(
            "launch-order",
            "collectives and messages on streams that may run at once wait for each other if "
            "each rank runs its own one after another, as they are listed: NCCL does so with "
            "those of one team, and those of two teams may need the same multiprocessors",
            tuple(explainer.ref(place, item, "is launched first") for place, item in launched),
            "launch them in one order on all ranks, put messages that belong together into one "
            'group, or name the backend that runs them (backend="peer")',
            "remark",
            tuple(sorted({place.rank for place, _ in launched})),
        )
    ]


def launched_in_a_circle(builder: GraphBuilder) -> tuple[HappensBefore, set[int]]:
    """The graph if each rank ran its collectives and messages one after another, as listed; and
    the nodes that could not finish then."""
    graph, spans = builder.graph, defaultdict[int, list[tuple[int, int]]](list)
    queues = [mine for queue, mine in builder.meetings.queues.items() if _by_nccl(queue[1])]
    ends = [at for both in builder.meetings.channels.values() for end in both for at in end]
    ends = [at for at in ends if _by_nccl(at.item.ordering.messages[0].backend)]
    if (len(queues) < 2 and not ends) or len(graph.order) < len(graph.preds):
        return graph, set()
    ends += [at for members in queues for mine in members.values() for at in mine]
    for at in ends:
        spans[at.place.rank].append((at.begin, at.end))
    blocks = dict(graph.blocks)
    for mine in spans.values():
        for (_, end), (begin, _) in pairwise(sorted(set(mine))):
            blocks[begin] = [*blocks.get(begin, ()), end]
    serial = replace(graph, blocks=blocks)
    return serial, {*range(len(graph.preds))} - {*serial.sequence()}


def _by_nccl(backend: str | None) -> bool:
    return backend in (None, "nccl")
