"""One run of one rank in the happens-before graph: its nodes, and the edges that its list gives.

    FrameBuilder(builder, place, run).run()

What waits for other ranks is noted in the `Builder`, which matches it at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlace.errors import TeamError
from interlace.ir.ops import Collective, Expect, Notify, Recv, Send
from interlace.ir.types import Index, Others
from interlace.verify.graph import Frame, Meeting, Place, TeamKey
from interlace.verify.source import Code, Item

if TYPE_CHECKING:
    from interlace.verify.build import Builder, Queue


class FrameBuilder:
    """Adds one run of one rank."""

    def __init__(self, builder: Builder, place: Place, run: int) -> None:
        self.builder = builder
        self.graph = builder.graph
        self.place = place
        source = place.source
        self.frame = Frame(place, run, [-1] * source.num_places)
        entry = builder.exits.get(place.rank, -1)
        self.tails = [entry] * len(source.streams)
        self.host = -1
        self.host_seen = [-1] * len(source.streams)
        self.last: dict[Queue, int] = {}
        self.entry = entry
        self.fresh: dict[str, int] = {}

    def run(self) -> None:
        self.graph.frames.append(self.frame)
        if self.place.source.enter is not None:
            self.enter(self.place.source.enter)
        for item in self.place.source.sequence:
            if item.code is Code.GROUP:
                self.messages(item, item.members)
            elif item.code is Code.FUSED:
                self.fused(item)
            else:
                self.issue(item)
        self.leave()

    def enter(self, item: Item) -> None:
        """The begin of the run: before the first op of every stream."""
        node = self.graph.add()
        self.put(node, item)
        self.tails = [node] * len(self.tails)

    def issue(self, item: Item) -> int:
        """The node at which an op has ended, on its stream."""
        if item.code is Code.COLLECTIVE:
            return self.collective(item)
        if item.code in (Code.SEND, Code.RECV):
            return self.messages(item, (item,))
        node = self.graph.add()
        self.put(node, item)
        if item.code is not Code.PLAIN:
            self.meaning(node, item)
        return node

    def span(self, item: Item) -> tuple[int, int]:
        """The begin and the end of an op that waits for other ranks."""
        begin, end = self.graph.add(), self.graph.add()
        self.put(begin, item)
        self.put(end, item)
        self.graph.begins[end] = begin
        return begin, end

    def collective(self, item: Item) -> int:
        op, builder = item.op, self.builder
        assert isinstance(op, Collective)
        begin, end = self.span(item)
        queue = (builder.team(self.place, op.team), op.backend)
        if queue in self.last:
            self.graph.preds[begin].append(self.last[queue])
        self.last[queue] = end
        mine = builder.queues.setdefault(queue, {}).setdefault(self.place.rank, [])
        mine.append(Meeting(self.frame, item, begin, end))
        return end

    def messages(self, item: Item, members: tuple[Item, ...]) -> int:
        """Sends and receives that begin together and end together."""
        begin, end = self.span(item)
        for member in members:
            op = member.op
            assert isinstance(op, Send | Recv)
            team = self.builder.team(self.place, op.team)
            peer, sends = self.global_rank(op.peer, team), isinstance(op, Send)
            channel = (team, self.place.rank, peer) if sends else (team, peer, self.place.rank)
            ends = self.builder.channels.setdefault(channel, ([], []))[0 if sends else 1]
            ends.append(Meeting(self.frame, member, begin, end))
        return end

    def put(self, node: int, item: Item) -> None:
        """Places the node behind what its stream holds already."""
        graph, stream = self.graph, item.stream
        before = graph.preds[node]
        if self.tails[stream] >= 0:
            before.append(self.tails[stream])
        if self.host_seen[stream] != self.host:
            self.host_seen[stream] = self.host
            if self.tails[stream] != self.host:
                before.append(self.host)
        self.tails[stream] = node
        chain = self.place.chain + stream
        position = self.builder.heights[chain] = self.builder.heights[chain] + 1
        graph.chain[node], graph.pos[node] = chain, position
        graph.part[node] = (self.frame, item)
        self.frame.nodes[item.place] = node

    def meaning(self, node: int, item: Item) -> None:
        """Adds the edges and the book-keeping of an op that orders others."""
        code, graph, builder = item.code, self.graph, self.builder
        if code is Code.WAIT:
            if item.record >= 0:
                graph.preds[node].append(self.frame.nodes[item.record])
        elif code is Code.HOST_SYNC:
            self.host = node
            self.host_seen[item.stream] = node
        elif code is Code.ALLOC:
            self.alloc(node, item)
        elif code is Code.FREE:
            version = item.version
            if version in self.frame.takes:
                slot = builder.slot(self.place, version)
                builder.frees[slot, self.frame.takes[version], self.place.rank] = node
        elif code is Code.NOTIFY or code is Code.EXPECT:
            self.signal(node, item)

    def alloc(self, node: int, item: Item) -> None:
        if self.place.source.versions[item.version].symmetric:
            slot = self.builder.slot(self.place, item.version)
            taken = self.builder.allocs.setdefault(slot, {}).setdefault(self.place.rank, [])
            self.frame.takes[item.version] = len(taken)
            taken.append((self.frame, item, node))

    def signal(self, node: int, item: Item) -> None:
        op = item.op
        assert isinstance(op, Notify | Expect)
        rank, run, builder = self.place.rank, self.frame.run, self.builder
        team = builder.team(self.place, op.team)
        if isinstance(op.peer, Others):
            peers = [peer for peer in team.ranks if peer != rank]
        else:
            peers = [self.global_rank(op.peer, team)]
        for peer in peers:
            if isinstance(op, Notify):
                raised = builder.raised.setdefault(((op.signal, team, rank, peer), run), [])
                raised.append((op.value, node, self.frame, item))
            else:
                signal = (op.signal, team, peer, rank)
                builder.awaited.append((signal, run, op.value, node, self.frame, item))

    def global_rank(self, index: Index, team: TeamKey) -> int:
        i = self.place.where.index(index)
        if not 0 <= i < len(team.ranks):
            raise TeamError(f"team {team.name} has {len(team.ranks)} ranks, and no rank {i}")
        return team.ranks[i]

    def fused(self, item: Item) -> None:
        """A start on the stream, the parts beside each other, and an end on the stream.

        A part also awaits the one before, not as an order of what they touch but because the kernel
        may come to it no sooner.
        """
        graph = self.graph
        start, end, last = graph.add(), graph.add(), -1
        self.put(start, item)
        ends: dict[int, int] = {}  # by stream: what its part did last
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

    def leave(self) -> None:
        """The end of the run: after the last op of every stream."""
        leave, graph = self.place.source.exit, self.graph
        node = graph.add()
        self.put(node, leave)
        graph.preds[node] += [tail for tail in self.tails[1:] if tail >= 0]
        self.builder.exits[self.place.rank] = node
