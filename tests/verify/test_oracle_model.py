"""The oracle's machine against slower ones. (test_model.py and test_trial.py hold it to rules.)"""

from __future__ import annotations

import random
from collections.abc import Iterator

from tests.fuzzing.oracle.machine import (
    OracleMachine,
    OracleMemory,
    conflicts,
    explore,
)
from tests.fuzzing.oracle.script import Clause, Script
from tests.fuzzing.sets import random_set

from interlace.ir import Program, parse, print_set


def masks(clauses: list[Clause]) -> list[int]:
    """Clauses as sets of moves, each the bits of an integer."""
    return [sum(1 << move for move in {*clause}) for clause in clauses]


def moves_of(script: Script, strong: bool = False) -> list[tuple[int, list[int]]]:
    """Each move, and what it awaits."""
    found: list[tuple[int, list[int]]] = []
    for act in script.acts:
        begin, end = act.awaits(strong)
        found.append((1 << act.began, masks(begin)))
        found.append((1 << act.ended, masks(end)))
    return found


def following(moves: list[tuple[int, list[int]]], done: int) -> list[int]:
    """The states that one more move leads to."""
    return [
        done | move
        for move, awaited in moves
        if not done & move and all(done & clause for clause in awaited)
    ]


def every_state(script: Script, strong: bool, limit: int) -> tuple[bool, bool] | None:
    """True if it can get stuck, and True if two conflicting acts can be under way at once."""
    pairs = [
        (1 << a.began | 1 << b.began, 1 << a.ended | 1 << b.ended)
        for a, b, _ in conflicts(script.acts)
    ]
    moves = moves_of(script, strong)
    stuck = race = False
    seen, found = {0}, [0]
    while found:
        done = found.pop()
        race = race or any(done & begun == begun and not done & over for begun, over in pairs)
        states = following(moves, done)
        stuck = stuck or (not states and done.bit_count() < len(moves))
        new = set(states) - seen
        seen |= new
        found += new
        if len(seen) > limit:
            return None
    return stuck, race


def small_sets(seed: int, count: int) -> Iterator[list[Program]]:
    rng = random.Random(seed)
    for _ in range(count):
        yield random_set(rng, rng.randint(1, 3))


def test_it_says_what_a_visit_of_every_state_says(seed: int) -> None:
    met = {"compared": 0, "race": 0, "deadlock": 0}
    for number, programs in enumerate(small_sets(seed, 1000)):
        if number >= 250 and min(met.values()) >= 5:  # some seeds draw few deadlocks
            break
        script = Script(programs, 1)
        if len(script.acts) > 26:
            continue
        strong, weak = (every_state(script, strong, 2_000) for strong in (True, False))
        if strong is None or weak is None:
            continue
        verdict = explore(programs, runs=1)
        shown = f"{verdict}\n{print_set(programs)}"
        assert (verdict.deadlock, verdict.race) == (strong[0], weak[1]), shown
        met["compared"] += 1
        met["race"] += verdict.race
        met["deadlock"] += verdict.deadlock
    print(met)
    assert min(met.values()) >= 5, met


def test_what_a_move_needs_is_what_keeps_it_back(seed: int) -> None:
    """Against a machine that holds back each move in turn."""
    two = parse(
        """def f(tp: Team[2], x: f32[4], y: out[f32[4]]):
    main: notify(s, to=tp.others)
    comm: notify(s, to=tp.others, value=2)
    main: expect(s, tp.rank + 1)
    main: copy(x, y)"""
    )
    choices = 0
    for programs in ([two], *small_sets(seed + 2, 40)):
        machine = OracleMachine(Script(programs, 2), strong=False)
        order = machine.go()
        needed = machine.needed(order)
        for held in range(machine.num_moves):
            done = {*machine.go(held)}
            for move in range(machine.num_moves):
                assert (move in done) == (not needed[move] >> held & 1), print_set(programs)
        choices += machine.choice
    assert choices >= 1


def test_memory_is_the_same_in_every_order_of_what_never_races(seed: int) -> None:
    rng = random.Random(seed)
    for programs in small_sets(seed + 1, 60):
        verdict = explore(programs, runs=2)
        if verdict.race:
            continue
        script = Script(programs, 2)
        moves, done, memory = moves_of(script), 0, OracleMemory()
        while states := following(moves, done):
            state = rng.choice(states)
            move = (state ^ done).bit_length() - 1
            done, act = state, script.acts[move // 2]
            (memory.begin if move == act.began else memory.end)(act)
        assert done.bit_count() == len(OracleMachine(script, strong=False).go())
        found = (memory.unwritten, memory.after_free, memory.before_alloc)
        assert found == (verdict.unwritten, verdict.freed, verdict.untaken)
