"""Why some nodes can never finish: a shortest cycle, or an op that waits for what never comes.

Nothing in the model is a choice, so the nodes that cannot finish are the same in every
interleaving. Those behind them are not reported; the ones that hold everything up are.
"""

from __future__ import annotations

from collections import deque

from interlace.ir.ops import Collective, Recv, Send
from interlace.verify.build import Builder
from interlace.verify.explain import Explainer
from interlace.verify.graph import Graph, Part
from interlace.verify.report import Finding, OpRef
from interlace.verify.source import Code, Item

MAX_CYCLES = 4
SEARCH_BUDGET = 2_000_000
"""Nodes visited at most in search of the shortest cycle; large knots end with a short one."""

Step = tuple[int, int, Part, Part, str]
"""An edge of a cycle: the nodes, the part of each that it joins, and why."""


def deadlocks(builder: Builder, explainer: Explainer) -> list[Finding]:
    """The findings for everything that cannot finish."""
    graph = builder.graph
    stuck = {node for node, clock in enumerate(graph.clocks) if clock is None}
    if not stuck:
        return []
    return [*_never(graph, stuck, explainer), *_cycles(graph, stuck, explainer)]


def _never(graph: Graph, stuck: set[int], explainer: Explainer) -> list[Finding]:
    """The ops that could start, but for something that never comes."""
    found: dict[tuple[object, ...], tuple[str, list[OpRef], set[int]]] = {}
    for node, reason in sorted(graph.never.items()):
        if any(before in stuck for before in graph.preds[node]):
            continue
        parts = graph.parts[node]
        key = tuple((frame.place.source, item.index) for frame, item in parts[:1])
        if key not in found:
            refs = [explainer.ref(f, item, f"waits for {reason}") for f, item in parts[:4]]
            found[key] = (reason, refs, set())
        found[key][2].update(frame.place.rank for frame, _ in parts)
    return [
        Finding(
            "deadlock",
            f"an op waits for something that never comes: {reason}",
            tuple(refs),
            "add what it waits for on that rank, or take this op out on every rank",
            ranks=tuple(sorted(ranks)),
        )
        for reason, refs, ranks in found.values()
    ]


def _cycles(graph: Graph, stuck: set[int], explainer: Explainer) -> list[Finding]:
    found: dict[frozenset[tuple[object, int]], Finding] = {}
    for knot in _knots(graph, stuck):
        cycle = _shortest_cycle(graph, knot)
        key = frozenset(
            (frame.place.source, item.index) for node in cycle for frame, item in graph.parts[node]
        )
        if key not in found:
            found[key] = _tell(graph, cycle, explainer)
        if len(found) >= MAX_CYCLES:
            break
    return list(found.values())


def _knots(graph: Graph, stuck: set[int]) -> list[list[int]]:
    """The strongly connected components with a cycle, those that hold up others first."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    knots: list[list[int]] = []
    for root in sorted(stuck):
        if root in index:
            continue
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        work = [(root, iter(graph.preds[root]))]
        while work:
            node, rest = work[-1]
            for other in rest:
                if other not in stuck:
                    continue
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    on_stack.add(other)
                    work.append((other, iter(graph.preds[other])))
                    break
                if other in on_stack:
                    low[node] = min(low[node], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    cut = stack.index(node)
                    knot = stack[cut:]
                    del stack[cut:]
                    on_stack.difference_update(knot)
                    if len(knot) > 1 or node in graph.preds[node]:
                        knots.append(knot)
    return knots


def _weight(graph: Graph, node: int) -> int:
    """Ops that order nothing but their stream do not make a cycle longer."""
    parts = graph.parts[node]
    return 0 if len(parts) == 1 and parts[0][1].code is Code.PLAIN else 1


def _shortest_cycle(graph: Graph, knot: list[int]) -> list[int]:
    """A shortest cycle in a knot, as nodes each of which waits for the next."""
    inside = set(knot)
    starts = [node for node in sorted(knot) if _weight(graph, node)]
    best: list[int] | None = None
    for start in starts[: max(1, SEARCH_BUDGET // len(knot))]:
        cycle = _cycle_through(graph, start, inside)
        if best is None or _length(graph, cycle) < _length(graph, best):
            best = cycle
    assert best is not None
    return best


def _length(graph: Graph, cycle: list[int]) -> tuple[int, int]:
    return sum(_weight(graph, node) for node in cycle), len(cycle)


def _cycle_through(graph: Graph, start: int, inside: set[int]) -> list[int]:
    came_from: dict[int, int] = {}
    cost = {start: 0}
    queue = deque([start])
    done: set[int] = set()
    while queue:
        node = queue.popleft()
        if node in done:
            continue
        done.add(node)
        for other in graph.preds[node]:
            if other == start:
                path = [node]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                return path[::-1]
            if other in inside:
                reached = cost[node] + _weight(graph, other)
                if reached < cost.get(other, 1 << 60):
                    cost[other] = reached
                    came_from[other] = node
                    if _weight(graph, other):
                        queue.append(other)
                    else:
                        queue.appendleft(other)
    raise AssertionError("a knot has a cycle through each of its nodes")


def _tell(graph: Graph, cycle: list[int], explainer: Explainer) -> Finding:
    steps = _merge([
        _edge(graph, node, cycle[(i + 1) % len(cycle)]) for i, node in enumerate(cycle)
    ])  # fmt: skip
    refs: list[OpRef] = []
    for i, (_, _, part, other, why) in enumerate(steps):
        arrived = steps[i - 1][3]
        if arrived[0].place is not part[0].place:
            refs.append(explainer.ref(*arrived, f"meets rank {part[0].place.rank}"))
        line = explainer.line(other[0].place.source, other[1].index)
        refs.append(
            explainer.ref(*part, f"waits for rank {other[0].place.rank}, line {line}: {why}")
        )
    ranks = sorted({ref.rank for ref in refs})
    who = f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {_listed(ranks)} wait"
    whom = "itself" if len(ranks) == 1 else "each other"
    return Finding(
        "deadlock", f"{who} for {whom}, in a circle", tuple(refs), _fix(steps), ranks=tuple(ranks)
    )


def _listed(ranks: list[int]) -> str:
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _merge(steps: list[Step]) -> list[Step]:
    """Several steps along one stream as one."""
    for i, step in enumerate(steps):  # begin where the cycle leaves a stream
        if step[4] != steps[i - 1][4] or step[2][0].place is not steps[i - 1][3][0].place:
            steps = steps[i:] + steps[:i]
            break
    merged: list[Step] = []
    for step in steps:
        last = merged[-1] if merged else None
        if last and last[4] == step[4] == _stream_order(step[2]) and last[3][0] is step[2][0]:
            merged[-1] = (last[0], step[1], last[2], step[3], last[4])
        else:
            merged.append(step)
    return merged


def _stream_order(part: Part) -> str:
    frame, item = part
    return f"it comes earlier on stream {frame.place.source.streams[item.stream]}"


def _edge(graph: Graph, node: int, before: int) -> Step:
    """Why `node` waits for `before`."""
    pairs = [
        (part, other)
        for part in graph.parts[node]
        for other in graph.parts[before]
        if part[0].place is other[0].place
    ]
    for part, other in pairs:
        if part[0] is other[0] and part[1].stream == other[1].stream:
            if other[1].index < part[1].index:
                return node, before, part, other, _stream_order(part)
    for part, other in pairs:
        return node, before, part, other, _why(part[1], other[1], part[0] is other[0])
    part, other = graph.parts[node][0], graph.parts[before][0]
    return node, before, part, other, _why(part[1], other[1], False)


def _why(item: Item, other: Item, same_run: bool) -> str:
    op, earlier = item.op, other.op
    if item.code is Code.EXPECT:
        return "its notify raises the signal"
    if item.code is Code.ALLOC and other.code is Code.FREE:
        return "the slot comes back with its free"
    if other.code is Code.EXIT or not same_run:
        return "the run before has to end"
    if item.code is Code.WAIT and item.record == other.index:
        return "the event is recorded there"
    if other.code is Code.HOST_SYNC:
        return "the host issues nothing more until that stream has come there"
    if isinstance(op, Collective) and isinstance(earlier, Collective) and op.team == earlier.team:
        return f"collectives of team {op.team} run in the order in which they are issued"
    if item.code is Code.EXIT:
        return "the run ends after it"
    return "it is part of the same group" if item.index == other.index else "it comes earlier"


def _fix(steps: list[Step]) -> str:
    items = [part[1] for step in steps for part in step[2:4]]
    if any(item.code is Code.ALLOC for item in items):
        return "free the buffer that held the slot before this take of it, on every rank"
    if any(isinstance(item.op, Collective) for item in items):
        return "issue the collectives, and what they wait for, in the same order on every rank"
    if any(isinstance(item.op, Send | Recv) for item in items):
        return "put the sends and receives that face each other into one group on each rank"
    if any(item.code is Code.EXPECT for item in items):
        return "raise the signal before the op that waits for it, or on another stream"
    return "move one of these ops, so that the circle opens"
