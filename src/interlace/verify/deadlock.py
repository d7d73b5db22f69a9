"""Why some nodes can never finish: a shortest cycle, or an op that waits for what never comes.

Nothing in the model is a choice, so the nodes that cannot finish are the same in every
interleaving. Those behind them are not reported; the ones that hold everything up are.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from interlace.ir.ops import Recv, Send
from interlace.ir.text.printer import print_op
from interlace.verify.explain import Explainer
from interlace.verify.fixing.proposals import cycle, never, segments
from interlace.verify.happens_before.build import GraphBuilder
from interlace.verify.happens_before.graph import HappensBefore, Part
from interlace.verify.happens_before.source import Item
from interlace.verify.report import Finding, OpRef

MAX_CYCLES = 4
SEARCH_BUDGET = 50_000
"""Steps taken at most in search of a shorter cycle: in a large knot, a short one has to do."""

STREAM = "stream"
MEETS = "meets"


class CycleLink(NamedTuple):
    """One link of a cycle: `part` cannot go before `other` has."""

    part: Part
    other: Part
    why: str
    """`STREAM` for the order of a stream, `MEETS` for another rank, else the reason in words."""


def deadlocks(builder: GraphBuilder, explainer: Explainer) -> list[Finding]:
    """The findings for everything that cannot finish."""
    graph = builder.graph
    stuck = {node for node, clock in enumerate(graph.clocks) if clock is None}
    if not stuck:
        return []
    return [*_never(graph, stuck, explainer), *_cycles(graph, stuck, explainer)]


def _never(graph: HappensBefore, stuck: set[int], explainer: Explainer) -> list[Finding]:
    """The ops that could start, but for something that never comes."""
    found: dict[tuple[object, ...], tuple[str, list[OpRef], set[int], Part]] = {}
    for node, reason in sorted(graph.never.items()):
        if any(before in stuck for before in graph.awaited(node)):
            continue
        part = graph.part[node]
        assert part is not None, "only an op waits for what never comes"
        frame, item = part
        key = frame.place.source, item.index
        if key not in found:
            refs = [explainer.ref(frame.place, item, f"waits for {reason}")]
            found[key] = (reason, refs, set(), part)
        found[key][2].add(frame.place.rank)
    return [
        Finding(
            "deadlock",
            f"an op waits forever, for {reason}",
            tuple(refs),
            f"add what line {refs[0].line} waits for: {reason}; or remove it on every rank",
            "error",
            tuple(sorted(ranks)),
            never(explainer.edges, part),
        )
        for reason, refs, ranks, part in found.values()
    ]


def _cycles(graph: HappensBefore, stuck: set[int], explainer: Explainer) -> list[Finding]:
    found: dict[frozenset[tuple[object, int]], tuple[bool, Finding]] = {}
    for steps in circles(graph, stuck):
        key = frozenset((part[0].place.source, part[1].index) for part, *_ in steps)
        spans_runs = len({part[0].run for part, _, _ in steps}) > 1
        if key not in found:
            found[key] = spans_runs, _tell(steps, explainer)
        if len(found) >= MAX_CYCLES:
            break
    return [finding for _, finding in sorted(found.values(), key=lambda pair: pair[0])]


def circles(graph: HappensBefore, stuck: set[int]) -> Iterator[list[CycleLink]]:
    """A shortest cycle of each knot of what cannot finish."""
    for knot in _knots(graph, stuck):
        yield _shortest_cycle(graph, knot)


def _knots(graph: HappensBefore, stuck: set[int]) -> list[list[int]]:
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
        work = [(root, iter(graph.awaited(root)))]
        while work:
            node, rest = work[-1]
            for other in rest:
                if other not in stuck:
                    continue
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    on_stack.add(other)
                    work.append((other, iter(graph.awaited(other))))
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
                    if len(knot) > 1 or node in graph.awaited(node):
                        knots.append(knot)
    return knots


def _shortest_cycle(graph: HappensBefore, knot: list[int]) -> list[CycleLink]:
    """A cycle with the fewest links from one stream to another."""
    inside = set(knot)
    best: tuple[int, list[CycleLink]] | None = None
    budget = SEARCH_BUDGET
    for node in sorted(knot):
        if graph.part[node] is None:
            continue
        if best is not None and budget <= 0:
            break
        limit = best[0] if best else 1 << 60
        found, spent = _cycle_through(graph, node, inside, limit)
        best, budget = found or best, budget - spent
    assert best is not None
    return _joined(best[1])


def _cycle_through(
    graph: HappensBefore, start: int, inside: set[int], limit: int
) -> tuple[tuple[int, list[CycleLink]] | None, int]:
    """The cheapest cycle through a node with its cost, if that is below the limit, and how many
    steps it took to find out."""
    came_from: dict[int, tuple[int, CycleLink]] = {}
    cost = {start: 0}
    queue = deque([start])
    done: set[int] = set()
    spent = 0
    best: tuple[int, list[CycleLink]] | None = None
    while queue:
        node = queue.popleft()
        if node in done or cost[node] >= limit:
            continue
        done.add(node)
        for other, step in _links(graph, node, inside):
            spent += 1
            reached = cost[node] + (step.why != STREAM)
            if other == start:
                if reached < limit:
                    path, back = [step], node
                    while back != start:
                        back, link = came_from[back]
                        path.append(link)
                    best, limit = (reached, path[::-1]), reached
            elif reached < cost.get(other, limit):
                cost[other] = reached
                came_from[other] = node, step
                if step.why == STREAM:
                    queue.appendleft(other)
                else:
                    queue.append(other)
    return best, spent


def _links(graph: HappensBefore, node: int, inside: set[int]) -> Iterator[tuple[int, CycleLink]]:
    """What a node waits for; what it meets, through the meeting."""
    part = graph.part[node]
    assert part is not None
    for before in set(graph.awaited(node)):
        if before not in inside:
            continue
        other = graph.part[before]
        if other is not None:
            yield before, CycleLink(part, other, _why(part, other))
            continue
        for begin in graph.awaited(before):
            member = graph.part[begin]
            if begin not in inside or member is None:
                continue
            if part[1].ordering.takes:
                yield begin, CycleLink(part, member, _why(part, member))
            elif member[0] is not part[0]:
                yield begin, CycleLink(part, member, MEETS)


def _joined(steps: list[CycleLink]) -> list[CycleLink]:
    """Several links along one stream as one, from where the cycle enters a stream."""
    first = next((i for i in range(len(steps)) if steps[i - 1].why != STREAM), 0)
    joined: list[CycleLink] = []
    for step in steps[first:] + steps[:first]:
        if joined and joined[-1].why == step.why == STREAM:
            joined[-1] = CycleLink(joined[-1].part, step.other, STREAM)
        else:
            joined.append(step)
    return [step for step in joined if step.part != step.other]


def _tell(steps: list[CycleLink], explainer: Explainer) -> Finding:
    refs: list[OpRef] = []
    for part, other, why in steps:
        line = explainer.line(other[0].place.source, other[1].index)
        if why == STREAM:
            name = part[0].place.source.streams[part[1].stream]
            why = f"it comes earlier on stream {name}"
        elif why == MEETS:
            why = f"it cannot end before rank {other[0].place.rank} is there"
        refs.append(
            explainer.ref(
                part[0].place, part[1], f"waits for rank {other[0].place.rank}, line {line}: {why}"
            )
        )
    ranks = sorted({ref.rank for ref in refs})
    who = f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {_listed(ranks)} wait"
    whom = "itself" if len(ranks) == 1 else "each other"
    message = f"{who} for {whom}, in a circle"
    fixes = cycle(explainer.edges, [(part, other) for part, other, _ in steps])
    words = _advice(steps, explainer)
    return Finding("deadlock", message, tuple(refs), words, "error", tuple(ranks), fixes)


def _listed(ranks: list[int]) -> str:
    return f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _why(part: Part, earlier: Part) -> str:
    """Why an op waits for another."""
    (frame, item), (other_frame, other) = part, earlier
    here, there = item.ordering, other.ordering
    if frame is other_frame and item.turn < other.turn and here.messages and there.messages:
        return MEETS  # of one rank with itself
    if frame.place is not other_frame.place:
        if here.expects and there.raises:
            return "its notify raises the signal"
        return "the slot comes back with its free" if here.takes else MEETS
    if frame is not other_frame:
        if here.takes and there.frees is not None:
            return "the slot comes back with its free"
        return "the run before has to end" if other.ends_run else _queued(item, other)
    if item is other:
        return STREAM  # the end of an op after its begin
    same = item.index == other.index
    members = same and not any(one.is_group or one.is_fused for one in (item, other))
    if item.stream == other.stream and other.turn < item.turn and (members or not same):
        return STREAM
    if here.waits is not None and item.record == other.place:
        return "the event is recorded there"
    if there.holds_host and other.turn < item.turn:
        return "the host issues nothing more until that stream has come there"
    if here.takes and there.frees is not None:
        return "the slot comes back with its free"
    if item.ends_run:
        return "the run ends after it"
    if other.begins_run:
        return "the run begins before it"
    if members:
        return "the parts of a fused op are begun in the order listed"
    if same:
        return "it is part of the same op"
    return _queued(item, other)


def _queued(item: Item, before: Item) -> str:
    here, there = item.ordering.meets, before.ordering.meets
    if here and there and here[0] == there[0]:
        return f"collectives of team {here[0]} run in the order in which they are issued"
    return ""


def _advice(steps: list[CycleLink], explainer: Explainer) -> str:
    """Which op has to move, where no edit is known to open the circle."""
    links = [(part, other) for part, other, why in steps if why != MEETS]
    if any(item.ordering.takes for link in links for _, item in link):
        return "free the buffer that held the slot before this take of it, on every rank"
    said: list[str] = []
    for (frame, item), (_, other) in segments(links):
        line, first = (explainer.line(frame.place.source, one.index) for one in (item, other))
        if item.index != other.index:
            one, two = f"line {line}", f"line {first}"
        elif item.op is not None and other.op is not None:
            program = frame.place.source.program
            texts = (print_op(op, program).partition(": ")[2] for op in (item.op, other.op))
            one, two = (f"`{text}` of line {line}" for text in texts)
        else:
            continue
        said.append(
            f"{one}, which a peer waits for, comes only after {two}, which waits for a peer"
        )
    if not said:
        return "let an op of the circle go before what it waits for"
    return f"{'; '.join(dict.fromkeys(said))}: issue first what a peer waits for"


def launch_order(builder: GraphBuilder, explainer: Explainer) -> list[Finding]:
    """A remark where ranks would wait for each other if each ran its collectives and messages one
    after another, in the order of its list. NCCL does so with those of a team; of two teams, each
    kernel may hold what the other needs."""
    graph, spans = builder.graph, defaultdict[int, dict[int, int]](dict)
    queues = {
        queue: members for queue, members in builder.meetings.queues.items() if _by_nccl(queue[1])
    }
    ends = [at for both in builder.meetings.channels.values() for end in both for at in end]
    ends = [at for at in ends if isinstance(op := at.item.op, Send | Recv) and _by_nccl(op.backend)]
    if (len(queues) < 2 and not ends) or len(graph.order) < len(graph.preds):
        return []
    ends += [at for members in queues.values() for mine in members.values() for at in mine]
    for at in ends:
        spans[at.frame.place.rank][at.begin] = at.end
    blocks = dict(graph.blocks)
    for mine in spans.values():
        for (_, end), (begin, _) in pairwise(sorted(mine.items())):
            blocks[begin] = [*blocks.get(begin, ()), end]
    serial = replace(graph, blocks=blocks)
    stuck = {*range(len(graph.preds))} - {*serial.sequence()}
    for steps in circles(serial, stuck):
        launched = [step for step in steps if step.part[0].place is step.other[0].place]
        ranks = sorted({step.part[0].place.rank for step in launched})
        ops = [
            explainer.ref(step.other[0].place, step.other[1], "is launched first")
            for step in launched
        ]
        return [
            Finding(
                "launch-order",
                "collectives and messages on streams that may run at once wait for each other if "
                "each rank runs its own one after another, as they are listed: NCCL does so with "
                "those of one team, and those of two teams may need the same multiprocessors",
                tuple(ops),
                "launch them in one order on all ranks, put messages that belong together into one "
                'group, or name the backend that runs them (backend="peer")',
                "remark",
                tuple(ranks),
            )
        ]
    return []


def _by_nccl(backend: str | None) -> bool:
    return backend in (None, "nccl")
