"""The slow twin of `check`: runs a small set of Programs in every order that there is.

It knows no graph and no clocks. It is a machine: ranks with streams, each stream a queue, each op
either able to go now or not; and it visits every state that the machine can reach. Two conflicting
accesses that are able to go in one and the same state race; a state where nothing can go, and not
all is done, is a deadlock. With nothing but the ops in common with the checker, it is what the
checker is tested against. The parts of a Fused run beside each other; whether it can get stuck is
asked of a second machine, in which they run one after another.

    verdict = explore(program, runs=2)
    assert verdict.race == ("race" in check(program, runs=2).kinds())

The number of states grows as fast as it sounds: a dozen ops per rank, two or three ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from interlace.ir.ops import (
    Alloc,
    Collective,
    Expect,
    Fused,
    Group,
    Notify,
    Recv,
    Send,
    Wait,
)
from interlace.ir.program import Program
from interlace.verify.oracle_script import (
    End,
    Key,
    Ledger,
    Life,
    Rank,
    Script,
    Touch,
    peers_of,
    team_of,
)

Progress = tuple[tuple[tuple[int, int], ...], ...]
"""For each rank and stream: ops done, and which members of the group at its head are done."""
Raised = tuple[object, int]
"""A signal and its value."""
State = tuple[Progress, frozenset[Raised]]
Move = tuple[End, ...]
"""What happens at once, on one rank or on several."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What can happen."""

    deadlock: bool
    race: bool
    uninitialized: bool = False
    """Told of programs that never race: then it is the same in every order."""
    use_after_free: bool = False
    """Likewise."""
    use_before_alloc: bool = False
    """Likewise: a use, or a Free, before the slot is taken."""
    num_states: int = 0
    complete: bool = True
    """False: there were more states than the limit, and not all were seen."""


def explore(
    programs: Program | Sequence[Program], *, runs: int = 2, limit: int = 100_000
) -> Verdict:
    """Visits every state of `runs` unjoined runs, or `limit` of them."""
    together = [programs] if isinstance(programs, Program) else list(programs)
    verdict = _Machine(together, runs).explore(limit)
    if not any(isinstance(op, Fused) for program in together for op in program.ops):
        return verdict
    begun_in_order = _Machine(together, runs, beside=False).explore(limit)
    return dataclasses.replace(
        verdict,
        deadlock=begun_in_order.deadlock,
        complete=verdict.complete and begun_in_order.complete,
    )


class _Machine:
    def __init__(self, programs: list[Program], runs: int, beside: bool = True) -> None:
        self.ranks: list[Rank] = []
        self.ledger = Ledger()
        self.number: dict[int, int] = {}
        self.conflicts: dict[tuple[Move, Move], bool] = {}
        for program in programs:
            for rank in program.world if program.rank is None else (program.rank,):
                self.number[rank] = len(self.ranks)
                self.ranks.append(Rank(rank, program.where(rank)))
                concrete, number = program.instantiate(rank), self.number[rank]
                Script(self.ledger, number, self.ranks[-1], concrete, runs, beside).write()
        self.call_of = {
            (rank, position): (key, k)
            for key, members in self.ledger.calls.items()
            for rank, positions in members.items()
            for k, position in enumerate(positions)
        }
        self.mail_of = {
            end: (key, k)
            for key, ends in self.ledger.mail.items()
            for side in ends
            for k, end in enumerate(side)
        }

    def explore(self, limit: int) -> Verdict:
        """Every reachable state."""
        start: State = (
            tuple(tuple((0, 0) for _ in rank.lanes) for rank in self.ranks),
            frozenset(),
        )
        seen: set[State] = {start}
        stack: list[State] = [start]
        deadlock = race = False
        while stack:
            state = stack.pop()
            moves = self.moves(state)
            if not moves and not self.done(state):
                deadlock = True
            race = race or self.races(moves)
            for move in moves:
                after = self.after(state, move)
                if after not in seen:
                    if len(seen) >= limit:
                        return Verdict(deadlock, race, num_states=len(seen), complete=False)
                    seen.add(after)
                    stack.append(after)
        if race:
            return Verdict(deadlock, race, num_states=len(seen))
        unwritten, freed, early = self.once(start)
        return Verdict(deadlock, race, unwritten, freed, early, len(seen))

    def done(self, state: State) -> bool:
        """Whether every stream has done everything."""
        return all(
            done == len(lane)
            for rank, streams in zip(self.ranks, state[0], strict=True)
            for lane, (done, _) in zip(rank.lanes.values(), streams, strict=True)
        )

    def passed(self, state: State, number: int, position: int) -> bool:
        """Whether an op is done."""
        lane, place = self.ranks[number].spot[position]
        return state[0][number][lane][0] > place

    def at_head(self, state: State, number: int, position: int) -> bool:
        """Whether an op is issued and the next of its stream."""
        rank = self.ranks[number]
        lane, place = rank.spot[position]
        return state[0][number][lane][0] == place and all(
            self.passed(state, number, gate) for gate in rank.gates[position]
        )

    def moves(self, state: State) -> list[Move]:
        """Everything that can happen next."""
        found: dict[Move, None] = {}
        for number, rank in enumerate(self.ranks):
            for lane, (done, mask) in zip(rank.lanes.values(), state[0][number], strict=True):
                if done < len(lane) and self.at_head(state, number, lane[done]):
                    for move in self.at(state, number, lane[done], mask):
                        found[move] = None
        return list(found)

    def at(self, state: State, number: int, position: int, mask: int) -> Iterator[Move]:
        """The moves that an op at the head of a stream can take part in now."""
        rank = self.ranks[number]
        op, run = rank.script[position]
        match op:
            case Collective():
                yield from self.meeting(state, number, position)
            case Send() | Recv():
                yield from self.message(state, (number, position, -1))
            case Group():
                for i in range(len(op.ops)):
                    if not mask >> i & 1:
                        yield from self.message(state, (number, position, i))
            case Wait() if position in rank.events:
                if self.passed(state, number, rank.events[position]):
                    yield ((number, position, -1),)
            case Expect():
                raised = dict(state[1])
                team, peers = team_of(rank, op.team), peers_of(rank, op.team, op.peer)
                keys = [(op.signal, team, peer, rank.rank, run) for peer in peers]
                if all(raised.get(key, 0) >= op.value for key in keys):
                    yield ((number, position, -1),)
            case Alloc() if op.buffer.kind == "symmetric":
                slot, take = self.take(rank, position)
                if take < 2 or all(self.freed(state, slot, take - 2, peer) for peer in slot[1][1]):
                    yield ((number, position, -1),)
            case _:
                yield ((number, position, -1),)

    def take(self, rank: Rank, position: int) -> tuple[Key, int]:
        """The slot and the number of the take that an Alloc is."""
        (touch,) = rank.touches[position, -1]
        return rank.takes[touch.life]

    def freed(self, state: State, slot: Key, take: int, peer: int) -> bool:
        """Whether a rank has freed a take."""
        end = self.ledger.frees.get((slot, take, peer))
        return end is not None and self.passed(state, *end)

    def meeting(self, state: State, number: int, position: int) -> Iterator[Move]:
        """A collective, if every member is there and done with the one before."""
        key, k = self.call_of[number, position]
        move: list[tuple[int, int, int]] = []
        for rank in key[1][1]:
            other = self.number.get(rank, -1)
            issued = self.ledger.calls[key].get(other, [])
            if k >= len(issued) or not self.at_head(state, other, issued[k]):
                return
            if k and not self.passed(state, other, issued[k - 1]):
                return
            move.append((other, issued[k], -1))
        yield tuple(move)

    def message(self, state: State, end: tuple[int, int, int]) -> Iterator[Move]:
        """A send with its receive, if both are there."""
        key, k = self.mail_of[end]
        sends, receives = self.ledger.mail[key]
        if k >= len(sends) or k >= len(receives):
            return
        move = (sends[k], receives[k])
        for number, position, member in move:
            if not self.at_head(state, number, position):
                return
            lane, _ = self.ranks[number].spot[position]
            if member >= 0 and state[0][number][lane][1] >> member & 1:
                return
        yield move

    def after(self, state: State, move: Move) -> State:
        """The state after a move."""
        progress = [list(streams) for streams in state[0]]
        raised = dict(state[1])
        for number, position, member in move:
            rank = self.ranks[number]
            lane, _ = rank.spot[position]
            done, mask = progress[number][lane]
            op, run = rank.script[position]
            if isinstance(op, Group):
                mask |= 1 << member
                full = mask == (1 << len(op.ops)) - 1
                progress[number][lane] = (done + 1, 0) if full else (done, mask)
                continue
            progress[number][lane] = (done + 1, 0)
            if isinstance(op, Notify):
                for peer in peers_of(rank, op.team, op.peer):
                    key = (op.signal, team_of(rank, op.team), rank.rank, peer, run)
                    raised[key] = max(op.value, raised.get(key, 0))
        return tuple(map(tuple, progress)), frozenset(raised.items())

    def touched(self, move: Move) -> list[Touch]:
        """What a move reads and writes, reads first."""
        found = [t for n, p, m in move for t in self.ranks[n].touches.get((p, m), [])]
        return sorted(found, key=lambda touch: touch.write)

    def races(self, moves: list[Move]) -> bool:
        """Whether two of these moves must be ordered, and are not."""
        for i, one in enumerate(moves):
            for other in moves[:i]:
                found = self.conflicts.get((one, other))
                if found is None:
                    found = self.conflicts[one, other] = any(
                        mine.conflicts(theirs)
                        for mine in self.touched(one)
                        for theirs in self.touched(other)
                    )
                if found:
                    return True
        return False

    def once(self, state: State) -> tuple[bool, bool, bool]:
        """One run to the end: whether it reads what was not written, uses what is freed, or uses or
        frees what is not yet taken."""
        held: dict[tuple[tuple[object, ...], int], object] = {}
        ended: set[Life] = set()
        begun: set[Life] = set()
        takes = {life for rank in self.ranks for life in rank.takes}
        inputs = {owner for rank in self.ranks for owner in rank.inputs}
        unwritten = freed = early = False
        while moves := self.moves(state):
            for touch in self.touched(moves[0]):
                if touch.whole_life:
                    op, _ = self.ranks[moves[0][0][0]].script[moves[0][0][1]]
                    (begun if isinstance(op, Alloc) else ended).add(touch.life)
                    early = early or (touch.life in takes and touch.life not in begun)
                    continue
                if not touch.bytes:
                    continue
                freed = freed or touch.life in ended
                early = early or (touch.life in takes and touch.life not in begun)
                for byte in touch.exact:
                    if touch.write:
                        held[touch.home, byte] = touch.owner
                    elif touch.owner not in inputs:
                        unwritten = unwritten or held.get((touch.home, byte)) != touch.owner
            state = self.after(state, moves[0])
        return unwritten, freed, early
