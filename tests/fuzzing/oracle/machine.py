"""The slow twin of `check`: a machine that executes semantics.md, in every order.

It knows no clocks and walks no schedule. Its state is which moves are done; script.py says what
each move awaits. Two conflicting acts race if both can be under way in one and the same state. A
state where nothing can go, and not all is done, is a deadlock. For races the machine is the weak
one, where nothing waits for more than it has to; for deadlocks the strong one.

    verdict = explore(program, runs=2)
    assert verdict.race == ("race" in check(program).kinds())

Why it need not visit every state
    A move that can go can still go after any other move: nothing takes its place. So the moves
    that can be reached while some are held back are reached by going on until nothing is left,
    in whatever order.

    Deadlock: whatever the order, the machine stops in one and the same state.

    Race: acts A and B can be under way together if and only if B begins though A's end is held
    back, and A begins though B's end is. That it is necessary is plain. It suffices: an order that
    reaches B's begin without A's end has, up to there, not B's end either; so with both ends held
    back B begins, likewise A, and in the state where that stops both have begun and neither has
    ended. (So it is where a signal may be raised by one of several, and no chain of edges says
    which.)

    A move is never done without another if the other is that move, or is missed by all moves of
    one of the clauses that it awaits. The largest sets of which this holds say, for every move at
    once, what can be held back: `OracleMachine.needed` finds them, and the tests compare them with
    a machine that does hold back each move in turn, and both with a visit of every state.

    What a read finds: without a race, it is the same in every order, and one order tells.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tests.fuzzing.oracle.script import Act, Clause, Key, OracleTouch, Place, Script, Storage

from interlace.ir.ops import Alloc, Free
from interlace.ir.program import Program

Use = tuple[Place, Storage]
"""An op of a rank, and the memory that it touches."""
Race = tuple[Place, Place, Storage]


@dataclass(frozen=True, slots=True)
class OracleVerdict:
    """The faults that can occur in some order.

    Faults of reads and of lifetimes are reported for memory that nothing races for: there they are
    the same in every order.
    """

    stuck: frozenset[Place]
    """The ops that may wait forever, and the ops behind them."""
    races: frozenset[Race]
    """Two ops, each way round, and the memory that they race for."""
    unwritten: frozenset[Use]
    freed: frozenset[Use]
    untaken: frozenset[Use]
    """Uses, and Frees, before the slot is taken."""
    signal: bool
    """A signal whose values do not grow in every order."""
    listed: frozenset[str]
    """Faults that the lists alone show: `event`, `leak`, `double-free`, `bad-free`."""
    num_moves: int

    @property
    def deadlock(self) -> bool:
        """True if an op may wait forever."""
        return bool(self.stuck)

    @property
    def race(self) -> bool:
        """True if two accesses of the same bytes, one of them a write, have no order."""
        return bool(self.races)

    @property
    def uninitialized(self) -> bool:
        """True if a read finds bytes that nothing wrote."""
        return bool(self.unwritten)

    @property
    def use_after_free(self) -> bool:
        """True if something is used once it is freed."""
        return bool(self.freed)

    @property
    def use_before_alloc(self) -> bool:
        """True if something is used, or freed, before its slot is taken."""
        return bool(self.untaken)


def explore(
    programs: Program | Sequence[Program], *, runs: int = 2, counts: random.Random | None = None
) -> OracleVerdict:
    """Decides `runs` unjoined runs; `counts` draws the counts that are data."""
    script = Script([programs] if isinstance(programs, Program) else programs, runs, counts)
    weak = OracleMachine(script, strong=False)
    order = OracleMachine(script, strong=True).go()
    stuck = frozenset[Place]()
    if len(order) < weak.num_moves:
        done = {*order}
        stuck = frozenset(act.place for act in script.acts if act.ended not in done)
        order = weak.go()  # else what awaits all is one of the orders of what awaits less
    needed = weak.needed(order)
    signal = any(
        other <= value or not needed[then.began] >> first.ended & 1
        for raised in script.raised.values()
        for (value, first), (other, then) in pairwise(raised)
    )
    races, raced = set[Race](), set[Key]()
    begun = [script.acts[move // 2] for move in order if not move % 2]
    for one, other, touch in conflicts(begun, needed):
        races.add((one.place, other.place, touch.storage))
        races.add((other.place, one.place, touch.storage))
        raced.add(touch.memory)
    found = OracleMemory(raced)
    for move in order:
        act = script.acts[move // 2]
        if move == act.began:
            found.begin(act)
        else:
            found.end(act)
    return OracleVerdict(
        stuck,
        frozenset(races),
        frozenset(found.unwritten),
        frozenset(found.after_free),
        frozenset(found.before_alloc),
        signal,
        frozenset(script.faults),
        weak.num_moves,
    )


def conflicts(
    begun: Sequence[Act], needed: Sequence[int] | None = None
) -> Iterator[tuple[Act, Act, OracleTouch]]:
    """Every two acts that touch the same bytes, at least one of them to write, and what one of the
    two does there. `begun` has the acts in an order in which they can begin: so none of them needs
    the end of a later one to begin; with `needed`, those are left out that need the earlier end.
    """
    writes: defaultdict[Key, int] = defaultdict(int)
    touched: defaultdict[Key, int] = defaultdict(int)
    """Ends of the acts so far that write each memory, or touch it, as bits."""
    before: defaultdict[Key, list[tuple[Act, OracleTouch]]] = defaultdict(list)
    for act in begun:
        known = 0 if needed is None else needed[act.began]
        for touch in act.touches:
            memory = touch.memory
            beside = (touched if touch.write else writes)[memory] & ~known
            if not beside:
                continue
            for other, another in before[memory]:
                if beside >> other.ended & 1 and touch.conflicts(another):
                    yield other, act, touch
        end = 1 << act.ended
        for touch in act.touches:
            touched[touch.memory] |= end
            if touch.write:
                writes[touch.memory] |= end
            before[touch.memory].append((act, touch))


class OracleMachine:
    """Goes on until nothing can."""

    def __init__(self, script: Script, *, strong: bool) -> None:
        self.awaits: list[list[Clause]] = []
        """Clauses that must hold, by move."""
        for act in script.acts:
            self.awaits += act.awaits(strong)
        self.num_moves = len(self.awaits)
        self.choice = any(len(raised) > 1 for raised in script.raised.values())
        """A move may await one of several."""

    def go(self, held: int = -1) -> list[int]:
        """The moves that are done in the end, in an order, where one move is held back."""
        counts = [len(clauses) for clauses in self.awaits]
        helps: list[list[int]] = [[] for _ in self.awaits]
        choices: defaultdict[int, list[list[int]]] = defaultdict(list)
        for move, clauses in enumerate(self.awaits):
            for clause in clauses:
                if len(clause) == 1:
                    helps[clause[0]].append(move)
                    continue
                holds = [move]  # emptied once the clause holds
                for other in clause:
                    choices[other].append(holds)
        able = [move for move, count in enumerate(counts) if count == 0]
        done: list[int] = []
        while able:
            move = able.pop()
            if move == held:
                continue
            done.append(move)
            helped = helps[move]
            if move in choices:
                helped += [holds.pop() for holds in choices[move] if holds]
            for other in helped:
                counts[other] -= 1
                if counts[other] == 0:
                    able.append(other)
        return done

    def needed(self, order: Sequence[int]) -> list[int]:
        """For each move the bits of those without which it is never done, itself among them: all of
        them where it is never done at all. `order` has the moves that are done in the end."""
        every = (1 << self.num_moves) - 1
        found = [every] * self.num_moves
        changed = True
        while changed:
            changed = False
            for move in order:
                bits = 1 << move
                for clause in self.awaits[move]:
                    missed = found[clause[0]]
                    for other in clause[1:]:
                        missed &= found[other]
                    bits |= missed
                if bits != found[move]:
                    found[move] = bits
                    changed = self.choice  # of one each, all were known
        return found


class OracleMemory:
    """Contents of memory, and the slots taken and memory freed, along one order."""

    def __init__(self, raced: Container[Key] = ()) -> None:
        self.raced = raced
        """Memories without reports, since another order may differ there."""
        self.unwritten, self.after_free, self.before_alloc = set[Use](), set[Use](), set[Use]()
        self.held: defaultdict[Key, dict[Key, int]] = defaultdict(dict)
        """The bytes of each memory that were last written through each name."""
        self.taken: set[Key] = set()
        self.freed: set[Key] = set()

    def begin(self, act: Act) -> None:
        """Does an act's reads, and checks that the memory it uses is there."""
        for touch in act.touches:
            if touch.memory in self.raced:
                continue
            if touch.life:
                self.look(act, touch)
            elif not touch.write:
                given = -1 if touch.name == ("input",) else 0
                held = self.held[touch.memory].get(touch.name, given)
                if touch.bytes & ~held:
                    self.unwritten.add((act.place, touch.storage))

    def look(self, act: Act, touch: OracleTouch) -> None:
        if isinstance(act.op, Alloc):
            return
        if touch.memory in self.freed:
            self.after_free.add((act.place, touch.storage))
        slot = touch.name == ("symmetric",)  # no stream has to get to the Alloc of others
        if slot and touch.memory not in self.taken:
            self.before_alloc.add((act.place, touch.storage))

    def end(self, act: Act) -> None:
        """Does an act's writes."""
        for touch in act.empties:
            self.held[touch.memory][touch.name] = 0
        for touch in act.touches:
            if touch.life:
                if isinstance(act.op, Alloc):
                    self.taken.add(touch.memory)
                elif isinstance(act.op, Free):
                    self.freed.add(touch.memory)
            elif touch.write and not touch.marks:
                names = self.held[touch.memory]
                for name in names.keys() - {touch.name}:
                    names[name] &= ~touch.hull
                given = -1 if touch.name == ("input",) else 0
                names[touch.name] = names.get(touch.name, given) | touch.bytes
