"""One run of one rank in the happens-before graph: its nodes, and the edges that its list gives.

    FrameBuilder(builder, place, run).run()

What waits for other ranks is noted in the `Builder`, which matches it at the end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from interlace.ir.ops import UNORDERED
from interlace.ir.order import Queue
from interlace.verify.happens_before.graph import Frame, Place, Point
from interlace.verify.happens_before.source import Item

if TYPE_CHECKING:
    from interlace.verify.happens_before.build import Builder


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

    def run(self) -> None:
        self.graph.frames.append(self.frame)
        if self.place.source.enter is not None:
            self.enter(self.place.source.enter)
        for item in self.place.source.sequence:
            if item.is_fused:
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
            point = Point(self.frame, member, begin, end)
            if member.ordering.meets is None:
                meetings.add(where, member.ordering, point)
                continue
            queue, _ = meetings.collective(where, member.ordering.meets, point)
            if queue in self.last:
                graph.preds[begin].append(self.last[queue])
            self.last[queue] = end
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

    def order(self, node: int, item: Item) -> None:
        """Adds the edges and the book-keeping of an op that orders others."""
        ordering, graph, where, run = item.ordering, self.graph, self.place.where, self.frame.run
        point = Point(self.frame, item, node, node)
        if ordering.waits is not None and item.record >= 0:
            graph.preds[node].append(self.frame.nodes[item.record])
        if ordering.holds_host:
            self.host = node
            self.host_seen[item.stream] = node
        if ordering.takes is not None:
            version = self.place.source.versions[item.version]
            if version.symmetric:
                taken = self.builder.meetings.take(where, version.buffer, point, run)
                self.frame.takes[item.version] = taken
        elif ordering.frees is not None:
            if item.version in self.frame.takes:
                self.builder.meetings.free(where, ordering.frees, point, run)
        else:
            self.builder.meetings.add(where, ordering, point, run)

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
