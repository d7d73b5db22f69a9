"""The slow twin of `check`: a machine that does what semantics.md says, in every order.

It knows no graph and no clocks. Its state is which moves are done; script.py says what each
move awaits. Two conflicting acts race if both can be under way in one and the same state. A state
where nothing can go, and not all is done, is a deadlock. For races the machine is the weak one,
where nothing waits for more than it has to; for deadlocks a second machine, the strong one.

    verdict = explore(program, runs=2)
    assert verdict.race == ("race" in check(program, runs=2).kinds())

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
    which.) So one run for each act that conflicts with another answers it for all orders.

    What a read finds: without a race, it is the same in every order, and one order tells.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from interlace.ir.ops import Alloc, Free
from interlace.ir.program import Program
from interlace.verify.oracle.script import Act, Key, OracleTouch, Script


@dataclass(frozen=True, slots=True)
class OracleVerdict:
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
    """States where the machine stopped."""
    complete: bool = True
    """False: there were more such states than the limit, and no race was found in those seen."""


def explore(
    programs: Program | Sequence[Program], *, runs: int = 2, limit: int = 100_000
) -> OracleVerdict:
    """Decides `runs` unjoined runs, or stops after `limit` states."""
    programs = [programs] if isinstance(programs, Program) else programs
    strong = OracleMachine(Script(programs, runs, strong=True))
    deadlock = len(strong.go()) < strong.num_moves
    script = Script(programs, runs, strong=False)
    machine = OracleMachine(script)
    order = machine.go()
    reached, complete, race = dict[Act, frozenset[int]](), True, False
    for pair in conflicts(script.acts):
        if len(reached) > limit:
            complete = False
            break
        for act in pair:
            if act not in reached:
                reached[act] = frozenset(machine.go(held=act.ended))
        first, second = pair
        race = second.began in reached[first] and first.began in reached[second]
        if race:
            break
    states = len(reached) + 2
    if race or not complete:
        return OracleVerdict(deadlock, race, num_states=states, complete=complete)
    found = OracleMemory()
    for move in order:
        act = script.acts[move // 2]
        if move == act.began:
            found.begin(act)
        else:
            found.end(act)
    return OracleVerdict(
        deadlock, race, found.uninitialized, found.after_free, found.before_alloc, states
    )


def conflicts(acts: Sequence[Act]) -> Iterator[tuple[Act, Act]]:
    """Every two acts that touch the same bytes, at least one of them to write."""
    touches: defaultdict[Key, list[tuple[Act, OracleTouch]]] = defaultdict(list)
    for act in acts:
        for touch in act.touches:
            touches[touch.memory].append((act, touch))
    seen: set[tuple[Act, Act]] = set()
    for found in touches.values():
        for (act, touch), (other, another) in combinations(found, 2):
            pair = (act, other)
            if act is not other and pair not in seen and touch.conflicts(another):
                seen.add(pair)
                yield pair


class OracleMachine:
    """Goes on until nothing can."""

    def __init__(self, script: Script) -> None:
        self.num_moves = 2 * len(script.acts)
        self.clauses: list[int] = []
        """The move that awaits each clause."""
        self.counts = [0] * self.num_moves
        """How many clauses each move awaits."""
        self.helps: list[list[int]] = [[] for _ in range(self.num_moves)]
        """The clauses that hold once a move is done."""
        for act in script.acts:
            for move, clauses in ((act.began, act.begin), (act.ended, [*act.end, (act.began,)])):
                self.counts[move] = len(clauses)
                for clause in clauses:
                    for other in clause:
                        self.helps[other].append(len(self.clauses))
                    self.clauses.append(move)

    def go(self, held: int = -1) -> list[int]:
        """The moves that are done in the end, in an order, where one move is held back."""
        counts, holds = list(self.counts), bytearray(len(self.clauses))
        able = [move for move, count in enumerate(counts) if count == 0]
        done: list[int] = []
        while able:
            move = able.pop()
            if move == held:
                continue
            done.append(move)
            for clause in self.helps[move]:
                if not holds[clause]:
                    holds[clause] = 1
                    counts[self.clauses[clause]] -= 1
                    if counts[self.clauses[clause]] == 0:
                        able.append(self.clauses[clause])
        return done


class OracleMemory:
    """What memory holds, and what was taken and freed, along one order."""

    def __init__(self) -> None:
        self.uninitialized = self.after_free = self.before_alloc = False
        self.held: defaultdict[Key, dict[Key, int]] = defaultdict(dict)
        """The bytes of each memory that were last written through each name."""
        self.taken: set[Key] = set()
        self.freed: set[Key] = set()

    def begin(self, act: Act) -> None:
        """Reads what an act reads, and looks at whether what it uses is there."""
        for touch in act.touches:
            if touch.memory[0] == "life":
                self.look(act, touch)
            elif not touch.write:
                given = -1 if touch.name == ("input",) else 0
                held = self.held[touch.memory].get(touch.name, given)
                self.uninitialized = self.uninitialized or touch.bytes & ~held != 0

    def look(self, act: Act, touch: OracleTouch) -> None:
        if isinstance(act.op, Alloc):
            return
        self.after_free = self.after_free or touch.memory in self.freed
        slot = touch.name == ("symmetric",)  # no stream has to get to the Alloc of others
        self.before_alloc = self.before_alloc or (slot and touch.memory not in self.taken)

    def end(self, act: Act) -> None:
        """Writes what an act writes."""
        for touch in act.empties:
            self.held[touch.memory][touch.name] = 0
        for touch in act.touches:
            if touch.memory[0] == "life":
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
