"""Builds the happens-before graph of a set of Programs.

Note [One run stands for all]
    One run is built. Say that in it every queue is balanced: members of a team issue equally many
    collectives, each channel has as many sends as receives, each slot is taken equally often on
    every rank, and what is taken is freed in the same run. Then nothing of a run is ever matched
    with another run, so every edge stays in its run or leads to a later one: no cycle spans runs,
    and two ops of one run are ordered as they would be in the first. Ops of different runs on one
    rank's own memory are ordered by the end of the earlier run; on a symmetric slot by the Frees
    and the Alloc between them (use outside of which is a finding in itself). So one run shows every
    fault of many. In a set that is not
    balanced, what is not is a fault in itself: a mismatch, a leak, or a rank of which no Program is
    there. (The exhaustive oracle explores several runs, and is compared.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from interlace.errors import TeamError
from interlace.ir.ops import KINDS, UNORDERED
from interlace.ir.order import (
    Awaited,
    Delivery,
    Meetings,
    Queue,
    Retake,
    Signal,
    Slot,
    TeamKey,
)
from interlace.verify.graph import PER_OP, Carrier, HappensBefore, IssuedOp, RankPlace
from interlace.verify.regions import Regions
from interlace.verify.source import Item, LoweredProgram
from interlace.verify.turns import Turns

Members = Mapping[int, IssuedOp]
"""Ops that meet, by rank."""


class _Turned(Meetings[IssuedOp]):
    """Meetings of which some ranks are visited: what another does is read off the one that stands
    for it."""

    def __init__(self, turns: Turns, everywhere: Mapping[int, RankPlace]) -> None:
        super().__init__()
        self.turns, self.everywhere = turns, everywhere

    def first(self, rank: int) -> int:
        return self.turns.first[rank]

    def back(self, rank: int, other: int) -> int:
        return self.turns.back(rank)[other]

    def own(self, team: TeamKey, rank: int) -> TeamKey:
        return self.team(self.everywhere[self.first(rank)].where, team.name)


class GraphBuilder:
    """The graph while it grows, rank by rank, and what the matching checks need to know.

    With `turns`, ranks stand for others, and only those are visited.
    """

    def __init__(
        self, sources: Sequence[LoweredProgram], regions: Regions, turns: Turns | None = None
    ) -> None:
        self.regions = regions
        self.everywhere = {place.rank: place for place in places_of(sources)}
        self.places = [
            self.everywhere[r] for r in (self.everywhere if turns is None else turns.visited)
        ]
        self.ranks = {place.rank for place in self.places}
        self.meetings = Meetings[IssuedOp]() if turns is None else _Turned(turns, self.everywhere)
        chains, num_chains = dict[int, range](), 0
        for rank, place in self.everywhere.items():
            place.chain, end = num_chains, num_chains + len(place.source.streams)
            chains[rank] = range(num_chains, end)
            num_chains = end
        self.graph = HappensBefore(num_chains)
        if turns is not None:
            self.graph.carried = Carrier(turns, chains)
        self.heights = [0] * num_chains
        """Nodes of each chain so far."""

    def build(self) -> HappensBefore:
        """The solved graph of a run: Note [One run stands for all]."""
        self._run()
        self._match()
        self.graph.solve()
        return self.graph

    def _run(self) -> None:
        for place in self.places:
            self.graph.take(PER_OP * place.source.num_places)
            _RunBuilder(self, place).run()

    def slot(self, place: RankPlace, version: int) -> Slot:
        """The slot that a symmetric buffer of a rank takes."""
        return self.meetings.slot(place.where, place.source.versions[version].buffer)

    def members(self, team: TeamKey, rank: int) -> Sequence[int]:
        """The ranks of a team that are in the set, one of which is given."""
        ranks = self.everywhere[rank].where.member(team.name).ranks
        return [each for each in ranks if each in self.everywhere]

    def on(self, at: IssuedOp, rank: int) -> IssuedOp:
        """An op as it is on a rank that its own stands for."""
        return at._replace(place=self.everywhere[rank])

    def of_reader(self, signal: Signal) -> Signal:
        """The signal as the rank that stands for its reader reads it."""
        name, team, writer, reader = signal
        met = self.meetings
        return name, met.own(team, reader), met.back(reader, writer), met.first(reader)

    def _match(self) -> None:
        """Adds the edges between ranks, which need all ops to be known."""
        for queue, _, come, standing in self.meetings.collectives():
            self.regions.spend(8 * len(standing))
            self._meet(queue, come, standing)
        for delivery in self.meetings.deliveries():
            self._deliver(delivery)
        for retake in self.meetings.retakes():
            self._await_frees(retake)
        for awaited in self.meetings.levels():
            self._await_signal(awaited)

    def link(self, node: int, other: int, rank: int) -> None:
        """Puts a node after another, as that is on a rank."""
        if self.meetings.first(rank) == rank:
            self.graph.preds[node].append(other)
        else:
            self.graph.afar.setdefault(node, []).append((other, rank))

    def _meet(self, queue: Queue, come: Members, standing: Members) -> None:
        """A collective: Note [Meetings] in graph.py."""
        graph, team = self.graph, queue[0]
        meeting = graph.add()
        others: list[int] = []
        gives: dict[int, bool] = {}
        for rank, at in standing.items():
            if at.begin not in gives:
                gives[at.begin] = self._has_part(at, False)
            if gives[at.begin]:
                self.link(meeting, at.begin, rank)
            else:
                others.append(at.begin)
        if others:
            graph.blocks[meeting] = others
        some = any(gives.values())
        absent = next((r for r in team.ranks if r not in standing), None)
        for rank, at in come.items():
            if some and self._has_part(at, True):
                graph.preds[at.end].append(meeting)
            else:
                graph.blocks[at.end] = [meeting]
            if absent is not None:
                graph.never[at.end] = self._missing(absent, rank, queue)

    def _has_part(self, at: IssuedOp, write: bool) -> bool:
        """True if a rank gives bytes to a meeting or (`write`) gets some; a barrier does both."""
        op, where = at.item.collective, at.place.where
        if op is not None and KINDS[op.kind].reads == "none":
            return True
        if op is not None and op.sent is not None and not write:
            return False  # its counts may be 0
        touched = [
            self.regions.at(touch.spot, where)
            for touch in at.item.touches
            if touch.write == write and at.item.does(touch, where)
        ]
        return any(not region.empty for region in touched)

    def _deliver(self, delivery: Delivery[IssuedOp]) -> None:
        """A message: a Send with its Recv."""
        graph, (team, sender, receiver) = self.graph, delivery.channel
        send, recv = delivery.send, delivery.recv
        if send is not None and recv is not None:
            if receiver in self.ranks and self._has_part(send, False):
                self.link(recv.end, send.begin, sender)
            elif receiver in self.ranks:
                graph.blocks.setdefault(recv.end, []).append(send.begin)
            if sender in self.ranks:
                graph.blocks.setdefault(send.end, []).append(recv.begin)
            return
        at = send or recv
        assert at is not None
        verb, other = ("receive", receiver) if send else ("send", sender)
        graph.never.setdefault(
            at.end,
            f"rank {other} to {verb} message {delivery.number + 1} of team {team.name} from rank "
            f"{sender} to rank {receiver}, which it never does",
        )

    def _missing(self, absent: int, rank: int, queue: Queue) -> str:
        team, members = queue[0], self.meetings.queues[queue]
        if absent not in self.ranks:
            return f"rank {absent} of team {team.name}, and no Program of the set runs there"
        count, most = (len(members.get(each, ())) for each in (absent, rank))
        return (
            f"rank {absent} to issue a collective of team {team.name}: it issues {count} in a run, "
            f"and this rank {most}"
        )

    def _await_frees(self, retake: Retake[IssuedOp]) -> None:
        """Makes each retake of a slot wait until every rank has freed it."""
        graph, meeting = self.graph, self.graph.add()
        missing: list[int] = []
        for rank, free in retake.frees.items():
            if free is None:
                missing.append(rank)
            else:
                self.link(meeting, free.end, rank)
        for taker in retake.takers:
            graph.preds[taker.end].append(meeting)
            if missing:
                graph.never[taker.end] = (
                    f"rank {missing[-1]} to free take {retake.number - 1} of slot "
                    f"{retake.slot[1]}, which it never does"
                )

    def _await_signal(self, awaited: Awaited[IssuedOp]) -> None:
        node, (name, _, writer, _) = awaited.expect.end, awaited.signal
        if awaited.notify is not None:
            self.link(node, awaited.notify.end, writer)
            return
        raises = f"raises it to {awaited.highest} at most" if awaited.highest else "never raises it"
        self.graph.never[node] = (
            f"rank {writer} to raise signal {name} to {awaited.value}, and it {raises}"
        )


class _RunBuilder:
    """Adds the run of one rank: its nodes, and the edges that its list gives. Ops that wait for
    other ranks go into the `meetings`, which `GraphBuilder` matches at the end.
    """

    def __init__(self, builder: GraphBuilder, place: RankPlace) -> None:
        self.builder = builder
        self.graph = builder.graph
        self.place = place
        source = place.source
        place.nodes = [-1] * source.num_places
        self.tails = [-1] * len(source.streams)
        """The last node of each stream."""
        self.host = -1
        """The last HostSync, and the one that each stream has been put behind."""
        self.host_seen = [-1] * len(source.streams)
        self.last: dict[Queue, int] = {}

    def run(self) -> None:
        source = self.place.source
        self.graph.places.append(self.place)
        for item in source.sequence:
            if item.is_fused:
                self.fused(item)
            else:
                self.issue(item)
        node = self.graph.add()  # the end of the run: after the last op of every stream
        self.put(node, source.exit)
        self.graph.preds[node] += [tail for tail in self.tails[1:] if tail >= 0]

    def issue(self, item: Item) -> int:
        """The node at which an op has ended, on its stream."""
        if item.ordering.meets or item.ordering.messages:
            return self.meet(item)
        node = self.graph.add()
        self.put(node, item)
        if item.ordering is not UNORDERED:
            self.order(node, item)
        return node

    def meet(self, item: Item) -> int:
        """The begin and the end of an op that waits for other ranks; its end."""
        graph, where, meetings = self.graph, self.place.where, self.builder.meetings
        begin, end = graph.add(), graph.add()
        self.put(begin, item)
        self.put(end, item)
        graph.begins[end] = begin
        for member in item.members or (item,):
            point = IssuedOp(self.place, member, begin, end)
            if member.ordering.meets is None:
                meetings.add(where, member.ordering, point)
                continue
            queue, _ = meetings.collective(where, member.ordering.meets, point)
            if queue in self.last:
                graph.preds[begin].append(self.last[queue])
            self.last[queue] = end
        return end

    def put(self, node: int, item: Item) -> None:
        """Places the node after what its stream holds already."""
        graph, stream = self.graph, item.stream
        before, tail = graph.preds[node], self.tails[stream]
        if tail >= 0:
            before.append(tail)
        if self.host_seen[stream] != self.host:
            self.host_seen[stream] = self.host
            if tail != self.host:
                before.append(self.host)
        self.tails[stream] = node
        chain = self.place.chain + stream
        self.builder.heights[chain] += 1
        graph.chain[node], graph.pos[node] = chain, self.builder.heights[chain]
        graph.part[node] = (self.place, item)
        self.place.nodes[item.place] = node

    def order(self, node: int, item: Item) -> None:
        """Adds the edges and the book-keeping of an op that orders others."""
        ordering, where = item.ordering, self.place.where
        meetings, point = self.builder.meetings, IssuedOp(self.place, item, node, node)
        if ordering.waits is not None and item.record >= 0:
            self.graph.preds[node].append(self.place.nodes[item.record])
        if ordering.holds_host:
            self.host = self.host_seen[item.stream] = node
        if ordering.takes is not None:
            version = self.place.source.versions[item.version]
            if version.symmetric:
                taken = meetings.take(where, version.buffer, point)
                self.place.takes[item.version] = taken
        elif ordering.frees is not None:
            if item.version in self.place.takes:
                meetings.free(where, ordering.frees, point)
        else:
            meetings.add(where, ordering, point)

    def fused(self, item: Item) -> None:
        """A start on the stream, the parts beside each other, and an end on the stream.

        A part also awaits the one before, because the kernel may come to it no sooner.
        """
        graph = self.graph
        start, end, last = graph.add(), graph.add(), -1
        self.put(start, item)
        ends: dict[int, int] = {}  # by stream: the last op of its part
        for member in item.members:
            begins = member.stream not in ends
            if begins and member.stream != item.stream:
                self.tails[member.stream], self.host_seen[member.stream] = start, self.host
            node = ends[member.stream] = self.issue(member)
            if begins and last >= 0:
                graph.blocks[node] = [last]
            last = node
        own = self.tails[item.stream]
        graph.preds[end] += [node for node in ends.values() if node != own]
        self.put(end, item)


def places_of(sources: Sequence[LoweredProgram]) -> list[RankPlace]:
    """The ranks of all Programs."""
    places: dict[int, RankPlace] = {}
    for source in sources:
        for where in source.program.wheres(source.ranks):
            first = places.setdefault(where.rank, RankPlace(source, where.rank, where)).source
            if first is not source:
                raise TeamError(
                    f"rank {where.rank} runs both {first.program.name} and {source.program.name}: "
                    f"the Programs of a set must run on different ranks"
                )
    return [*places.values()]
