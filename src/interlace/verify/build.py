"""Builds the happens-before graph of a set of Programs.

Note [One run stands for all]
    Say that in one run every queue is balanced: members of a team issue equally many collectives,
    each channel has as many sends as receives, each slot is taken equally often on every rank, and
    what is taken is freed in the same run. Then nothing of a run is ever matched with another run,
    so every edge stays in its run or leads to a later one: no cycle spans runs, and two ops of one
    run are ordered as they would be in the first. Ops of different runs on one rank's own memory
    are ordered by the end of the earlier run; on a symmetric slot by the Frees and the Alloc
    between them (use outside of which is a finding in itself); on a registered parameter, which
    peers reach too, by the begin and the end of its owner's run, both of which stand for all that
    its caller may do. So the first run shows every fault, and it alone is unrolled; a set that is
    not balanced is unrolled in full. The tests compare the two.
"""

from __future__ import annotations

from collections.abc import Sequence

from interlace.errors import ProgramError, TeamError
from interlace.ir.ops import KINDS, Collective
from interlace.verify.frames import FrameBuilder
from interlace.verify.graph import Frame, Graph, Meeting, Place, TeamKey
from interlace.verify.regions import Regions
from interlace.verify.source import Item, Source

Queue = tuple[TeamKey, str | None]
"""The collectives of one team and backend."""
Channel = tuple[TeamKey, int, int]
"""The messages of one team from one global rank to another."""
Slot = tuple[TeamKey, str]
"""A slot of a team's pool."""
Signal = tuple[str, TeamKey, int, int]
"""A signal: name, team, writer, reader."""


class Builder:
    """The graph while it grows, run by run, and what the matching checks need to know about it."""

    def __init__(self, sources: Sequence[Source], regions: Regions) -> None:
        self.graph = Graph()
        self.regions = regions
        self.places = _places(sources)
        self.ranks = {place.rank for place in self.places}
        self.queues: dict[Queue, dict[int, list[Meeting]]] = {}
        self.channels: dict[Channel, tuple[list[Meeting], list[Meeting]]] = {}
        self.allocs: dict[Slot, dict[int, list[tuple[Frame, Item, int]]]] = {}
        self.frees: dict[tuple[Slot, int, int], int] = {}
        self.raised: dict[tuple[Signal, int], list[tuple[int, int, Frame, Item]]] = {}
        self.awaited: list[tuple[Signal, int, int, int, Frame, Item]] = []
        self.num_runs = 0
        num_chains = 0
        for place in self.places:
            num_chains += len(place.source.streams)
        self.graph.num_chains = num_chains
        self.heights = [0] * num_chains
        self.exits: dict[int, int] = {}
        self._teams: dict[tuple[int, str], TeamKey] = {}
        self._instances: dict[tuple[str, int], list[TeamKey]] = {}  # by name and first rank

    def build(self, runs: int, unroll: bool = False) -> Graph:
        """The solved graph of `runs` runs, or of one where one stands for all."""
        self._run()
        if unroll or not self._balanced():
            for _ in range(runs - 1):
                self._run()
        self._match()
        self.graph.solve()
        return self.graph

    def _run(self) -> None:
        for place in self.places:
            FrameBuilder(self, place, self.num_runs).run()
        self.num_runs += 1

    def _balanced(self) -> bool:
        for (team, _), members in self.queues.items():
            if len({len(members.get(rank, ())) for rank in team.ranks}) > 1:
                return False
        for sends, receives in self.channels.values():
            if len(sends) != len(receives):
                return False
        for (team, name), members in self.allocs.items():
            if len({len(members.get(rank, ())) for rank in team.ranks}) > 1:
                return False
            for rank, taken in members.items():
                if any(((team, name), n, rank) not in self.frees for n in range(len(taken))):
                    return False
        return True

    def team(self, place: Place, name: str) -> TeamKey:
        """The instance of a team that a rank is in."""
        key = self._teams.get((place.rank, name))
        if key is None:
            ranks = place.where.member(name).ranks
            known = self._instances.setdefault((name, ranks[0]), [])
            key = next((k for k in known if k.ranks is ranks or k.ranks == ranks), None)
            if key is None:
                key = TeamKey(name, ranks)
                known.append(key)
            self._teams[place.rank, name] = key
        return key

    def slot(self, place: Place, version: int) -> Slot:
        """The slot that a symmetric buffer of a rank takes; of what is registered, its name."""
        buffer = place.source.versions[version].buffer
        if buffer.team is None:
            raise ProgramError(
                f"{place.source.program.name}: the symmetric buffer {buffer.name} has no team"
            )
        return self.team(place, buffer.team), buffer.storage or buffer.name

    def _match(self) -> None:
        """Adds the edges between ranks that wait for the whole to be known."""
        for queue, members in self.queues.items():
            for k in range(max(map(len, members.values()))):
                self._meet(queue, k, members)
        for channel, (sends, receives) in self.channels.items():
            self._deliver(channel, sends, receives)
        for slot, members in self.allocs.items():
            for n in range(max(map(len, members.values())) - 2):
                takers = [taken[n + 2][2] for taken in members.values() if len(taken) > n + 2]
                self._await_frees(slot, n, takers)
        for signal, run, value, node, _, _ in self.awaited:
            self._await_signal(signal, run, value, node)

    def _meet(self, queue: Queue, k: int, members: dict[int, list[Meeting]]) -> None:
        """The k-th collective of a queue: Note [Meetings] in graph.py."""
        graph, team = self.graph, queue[0]
        come = [issued[k] for issued in members.values() if len(issued) > k]
        meeting = graph.add()
        others: list[int] = []
        for at in come:
            (graph.preds[meeting] if self._has_part(at, False) else others).append(at.begin)
        if others:
            graph.blocks[meeting] = others
        contributors = set(graph.preds[meeting])
        missing = [rank for rank in team.ranks if len(members.get(rank, ())) <= k]
        for at in come:
            if contributors and self._has_part(at, True):
                graph.preds[at.end].append(meeting)
                if at.begin in contributors:
                    graph.after_meeting.add(at.end)
            else:
                graph.blocks[at.end] = [meeting]
            if missing:
                absent = missing[0]
                pair = (absent, at.frame.place.rank)
                issued = [len(members.get(rank, ())) // self.num_runs for rank in pair]
                graph.never[at.end] = self._missing(absent, team, *issued)

    def _has_part(self, at: Meeting, write: bool) -> bool:
        """Whether a rank gives bytes to what it meets others in, or (`write`) gets some; a barrier
        is both."""
        op = at.item.op
        if isinstance(op, Collective) and KINDS[op.kind].reads == "none":
            return True
        where = at.frame.place.where
        for touch in at.item.touches:
            if touch.write == write and at.item.does(touch, where):
                region = self.regions.at(touch.spot, where)
                if region.lo < region.hi:
                    return True
        return False

    def _deliver(self, channel: Channel, sends: list[Meeting], receives: list[Meeting]) -> None:
        """The messages of a channel: the k-th Send with the k-th Recv."""
        graph, (team, sender, receiver) = self.graph, channel
        for send, receive in zip(sends, receives, strict=False):
            if self._has_part(send, False):
                graph.preds[receive.end].append(send.begin)
            else:
                graph.blocks.setdefault(receive.end, []).append(send.begin)
            graph.blocks.setdefault(send.end, []).append(receive.begin)
        met = min(len(sends), len(receives))
        for k, at in enumerate((*sends[met:], *receives[met:]), met):
            verb, other = ("receive", receiver) if at in sends else ("send", sender)
            graph.never.setdefault(
                at.end,
                f"rank {other} to {verb} message {k + 1} of team {team.name} from rank {sender} "
                f"to rank {receiver}, which it never does",
            )

    def _missing(self, rank: int, team: TeamKey, count: int, most: int) -> str:
        if rank not in self.ranks:
            return f"rank {rank} of team {team.name}, and no Program of the set runs there"
        return (
            f"rank {rank} to issue a collective of team {team.name}: it issues {count} in a run, "
            f"and this rank {most}"
        )

    def _await_frees(self, slot: Slot, take: int, takers: list[int]) -> None:
        """What every rank has to free before any takes the slot again."""
        found = {rank: self.frees.get((slot, take, rank)) for rank in slot[0].ranks}
        meeting = self.graph.add()
        self.graph.preds[meeting] = [free for free in found.values() if free is not None]
        missing = [rank for rank, free in found.items() if free is None]
        for node in takers:
            self.graph.preds[node].append(meeting)
            if missing:
                self.graph.never[node] = (
                    f"rank {missing[-1]} to free take {take + 1} of slot {slot[1]}, which it never "
                    "does"
                )

    def _await_signal(self, signal: Signal, run: int, value: int, node: int) -> None:
        raised = self.raised.get((signal, run), [])
        for reached, source, _, _ in raised:
            if reached >= value:
                self.graph.preds[node].append(source)
                return
        best = max((reached for reached, _, _, _ in raised), default=0)
        what = f"raises it to {best} at most" if raised else "never raises it"
        self.graph.never[node] = (
            f"rank {signal[2]} to raise signal {signal[0]} to {value}, and it {what}"
        )


def _places(sources: Sequence[Source]) -> list[Place]:
    places: list[Place] = []
    chain = 0
    seen: dict[int, Source] = {}
    for source in sources:
        for where in source.program.wheres(source.ranks):
            rank = where.rank
            if rank in seen:
                raise TeamError(
                    f"rank {rank} runs both {seen[rank].program.name} and {source.program.name}: "
                    f"the Programs of a set must run on different ranks"
                )
            seen[rank] = source
            places.append(Place(source, rank, where, chain))
            chain += len(source.streams)
    return places
