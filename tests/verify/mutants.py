"""Damages the schedules that the passes make, one fault at a time, and says what became of each.

    for make in mutants(schedule("gather", "ring", 4)):
        outcome(make(), seed=7)        # "flagged", "refused", "equal" or "another function"

    python -m tests.verify.mutants 7 0 2 3        # seed 7, all mutants, worlds of 2 and 3

Every strategy and site, worlds of 2 to 8: each wait, record, signal, transfer and free dropped,
neighbours swapped, slices shifted by one chunk, frees made early, and a wrong stream, team, element
type, count, peer, root or signal value, on all ranks or on one.

What the checker says is held against the oracle, op by op. What it calls sound is run as well, in
random orders (two runs in a row, memory poisoned): it must give the same bits in each. Whether
these are the bits of the serial schedule is no matter of order, and not the checker's: a slice that
is shifted on all ranks alike makes a schedule for another function, which it computes soundly.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, cast

import torch
from tests.e2e.test_hierarchy import text_of
from tests.fuzzing import compare
from tests.passes.samples import STRATEGIES
from tests.support.interpreter import run_ranks
from tests.support.torch_ops import DTYPES

from interlace.errors import InterlaceError
from interlace.ir import (
    Buffer,
    Collective,
    DType,
    Expect,
    Free,
    Fused,
    Group,
    Index,
    Notify,
    Op,
    Others,
    Program,
    RankIndex,
    Team,
    View,
    parse,
    validate,
)
from interlace.ir.program import map_views
from interlace.ir.view import Chunk, Slice
from interlace.passes import run_pipeline
from interlace.verify import check

SITES = ("gather", "scatter", "reduce", "dispatch", "combine")
HALF = "half"
"""A team of neighbours, beside the schedule's own: the wrong one."""
SHOWN_BY_RUNS = {"mismatch", "in-place", "result", "scale"}
"""Faults that are not the oracle's (semantics.md): tests of their own show them."""


class Mutant(NamedTuple):
    """A schedule with one fault."""

    label: str
    """The change and its place: `drop: op 7, on rank 3`."""
    programs: tuple[Program, ...]
    serial: Program

    @property
    def sort(self) -> str:
        """The sort of change."""
        return self.label.partition(":")[0]

    def __str__(self) -> str:
        return f"{self.label}\n" + "\n".join(map(str, self.programs[:1]))


class Made(NamedTuple):
    """The schedule that the passes make of a site, and the serial Program."""

    program: Program
    serial: Program


@lru_cache(512)
def schedule(kind: str, way: str, world: int) -> Made | None:
    """The schedule of a site; None where the strategy cannot serve it."""
    ranks = [*range(world)]
    text = str(text_of(kind, [4] * world, [ranks])).replace(f".on({ranks})", "")
    if way.startswith(("fused", "exchange")):
        text = text.replace("f32", "bf16")
    serial = parse(text)
    passes = f"find_sites,decompose{{{STRATEGIES[way]}}},schedule,plan_memory,insert_sync,fuse"
    made = run_pipeline(serial, passes)
    return Made(made, serial) if made.sites[0].strategy == way.partition("-")[0] else None


def schedules(worlds: Sequence[int]) -> list[tuple[str, str, int]]:
    """The sites, strategies and worlds of which there is a schedule."""
    every = ((kind, way, world) for kind in SITES for way in STRATEGIES for world in worlds)
    return [one for one in every if schedule(*one) is not None]


# One fault in one op


def turned(index: Index | Others, by: int = 1) -> Index | Others:
    return index if isinstance(index, Others) else index + by


def other_peers(op: Op) -> Iterator[Op]:
    if (peer := getattr(op, "peer", None)) is not None:
        for by in (1, -1):
            yield dataclasses.replace(op, peer=turned(peer, by))  # pyright: ignore[reportCallIssue]
        if isinstance(op, Notify | Expect) and isinstance(peer, Others):
            yield dataclasses.replace(op, peer=RankIndex(op.team, 1))
    if isinstance(op, Collective) and op.root is not None:
        yield dataclasses.replace(op, root=cast("Index", turned(op.root)))


def other_values(op: Op) -> Iterator[Op]:
    if isinstance(op, Notify | Expect):
        yield dataclasses.replace(op, value=op.value + 1)
        if op.value > 1:
            yield dataclasses.replace(op, value=op.value - 1)
    if isinstance(op, Collective) and op.reduce is not None:
        yield dataclasses.replace(op, reduce="max")


def shifted_views(op: Op) -> Iterator[Op]:
    """Each view of the op, each chunk or slice of it: the next one instead."""
    for changed in {view: None for view in _views(op)}:
        for k, step in enumerate(changed.steps):
            if isinstance(step, Chunk):
                new: object = dataclasses.replace(step, index=turned(step.index))
            elif isinstance(step, Slice) and isinstance(step.start, int):
                size = cast("int", step.stop) - step.start
                start = step.start - size if step.start >= size else step.start + size
                new = Slice(step.dim, start, start + size)
            else:
                continue
            steps = (*changed.steps[:k], new, *changed.steps[k + 1 :])
            yield _with_view(op, changed, View(changed.buffer, cast("tuple[Slice, ...]", steps)))


def other_types(op: Op) -> Iterator[Op]:
    """Yields the op with its views as 16-bit integers (as many elements, if that is their size)."""
    if _moves(op):
        yield map_views(op, lambda view: view.cast(DType.i16))


def other_counts(op: Op, sizes: Callable[[View], tuple[int, ...]]) -> Iterator[Op]:
    """Yields the op with each view without its last row."""
    if _moves(op):
        yield map_views(op, lambda view: view.slice(0, 0, max(sizes(view)[0] - 1, 0)))


def _moves(op: Op) -> bool:
    return type(op).__name__ in ("Collective", "Send", "Recv", "Group", "Get", "Put", "Copy")


def _views(op: Op) -> Iterator[View]:
    for access in (*op.reads(), *op.writes()):
        yield access.view


def _with_view(op: Op, old: View, new: View) -> Op:
    return map_views(op, lambda view: new if view == old else view)


def in_members(op: Op, change: Callable[[Op], Iterator[Op]]) -> Iterator[Op]:
    """The op changed, or one of its members."""
    if isinstance(op, Group):
        for k, member in enumerate(op.ops):
            for new in change(member):
                yield dataclasses.replace(op, ops=(*op.ops[:k], new, *op.ops[k + 1 :]))  # type: ignore[arg-type]
    elif isinstance(op, Fused):
        for k, part in enumerate(op.parts):
            for j, member in enumerate(part):
                for new in change(member):
                    parts = (*op.parts[:k], (*part[:j], new, *part[j + 1 :]), *op.parts[k + 1 :])
                    yield dataclasses.replace(op, parts=parts, kernel=None)  # type: ignore[arg-type]
    else:
        yield from change(op)


def without_a_member(op: Op) -> Iterator[Op]:
    if isinstance(op, Group):
        for k in range(len(op.ops)):
            yield dataclasses.replace(op, ops=op.ops[:k] + op.ops[k + 1 :])
    elif isinstance(op, Fused):
        for k, part in enumerate(op.parts):
            for j in range(len(part)):
                parts = (*op.parts[:k], part[:j] + part[j + 1 :], *op.parts[k + 1 :])
                yield dataclasses.replace(op, parts=tuple(filter(None, parts)), kernel=None)


# One fault in a schedule


def damaged(program: Program) -> Iterator[tuple[str, Program]]:
    """The schedule with one fault, on every rank that runs it."""
    ops, where = program.ops, program.where(program.world[0])
    buffers = program.buffers()

    def sizes(view: View) -> tuple[int, ...]:
        return cast("tuple[int, ...]", view.box(buffers[view.buffer], where).sizes)

    teams = (*program.teams, *half_team(program))

    def other_teams(op: Op) -> Iterator[Op]:
        if (own := getattr(op, "team", None)) is not None:
            for team in teams:
                if team.name != own:
                    yield _of_team(op, own, team.name)

    changes: dict[str, Callable[[Op], Iterator[Op]]] = {
        "peer": other_peers,
        "epoch": other_values,
        "slice": shifted_views,
        "dtype": other_types,
        "count": lambda op: other_counts(op, sizes),
        "team": other_teams,
    }
    for i, op in enumerate(ops):
        if not op.declares():
            yield f"drop: op {i}", program.replace(ops=ops[:i] + ops[i + 1 :])
        for new in without_a_member(op):
            yield f"drop: a member of op {i}", program.replace(ops=(*ops[:i], new, *ops[i + 1 :]))
        if i + 1 < len(ops):
            swapped = (*ops[:i], ops[i + 1], op, *ops[i + 2 :])
            yield f"swap: op {i} and the next", program.replace(ops=swapped)
        if isinstance(op, Free):
            first = next(k for k, one in enumerate(ops) if _declares(one, op.buffer))
            for at in range(first + 1, i):
                early = (*ops[:at], op, *ops[at:i], *ops[i + 1 :])
                yield f"early free: op {i} at {at}", program.replace(ops=early)
        for stream in program.streams():
            if stream != op.stream:
                new = dataclasses.replace(op, stream=stream)
                yield (
                    f"stream: op {i} on {stream}",
                    program.replace(ops=(*ops[:i], new, *ops[i + 1 :])),
                )
        for sort, change in changes.items():
            for new in in_members(op, change):
                made = program.replace(ops=(*ops[:i], new, *ops[i + 1 :]))
                if sort == "team":
                    made = made.replace(teams=teams)
                yield f"{sort}: op {i}", made


def half_team(program: Program) -> Iterator[Team]:
    ranks = [*program.world]
    if len(ranks) > 2 and len(ranks) % 2 == 0:
        yield Team(HALF, 2, tuple(zip(ranks[::2], ranks[1::2], strict=True)))


def _of_team(op: Op, own: str, team: str) -> Op:
    """The op in another team, with its peer there."""
    changes: dict[str, object] = {"team": team}
    match getattr(op, "peer", None):
        case RankIndex(team=name, offset=offset) if name == own:
            changes["peer"] = RankIndex(team, offset)
        case Others(team=name) if name == own:
            changes["peer"] = Others(team)
        case _:
            pass
    return dataclasses.replace(op, **changes)  # pyright: ignore[reportArgumentType]


def _declares(op: Op, name: str) -> bool:
    return any(buffer.name == name for buffer in op.declares())


def mutants(made: Made) -> Iterator[Callable[[], Mutant | None]]:
    """Yields makers of the mutants: on all ranks, and on the last alone. None: no valid Program."""
    for label, program in damaged(made.program):
        for alone in (False, True):

            def mutant(
                label: str = label, program: Program = program, alone: bool = alone
            ) -> Mutant | None:
                try:
                    if not alone:
                        return Mutant(label, (program,), made.serial)
                    good, bad = made.program.replace(teams=program.teams), program
                    last = good.world[-1]
                    ranks = [(bad if r == last else good).instantiate(r) for r in good.world]
                    return Mutant(f"{label}, on rank {last}", tuple(ranks), made.serial)
                except InterlaceError:
                    return None

            yield mutant


# What becomes of it


class Outcome(NamedTuple):
    """The checker's verdict, and its confirmation."""

    said: str
    """`refused` (no Program), `flagged`, or if sound: `equal` or `another function`."""
    by: str
    """`oracle`; `rule`: a fault of a kind that the oracle does not decide; `""`: refused."""
    wrong: str = ""
    """The contradiction, where the checker is not confirmed."""


def outcome(mutant: Mutant | None, seed: int, runs: int = 2) -> Outcome:
    """Checks a mutant, and confirms the verdict."""
    if mutant is None:
        return Outcome("refused", "")
    try:
        kinds = check(mutant.programs).kinds()
    except InterlaceError:
        return Outcome("refused", "")
    if not kinds:  # what is no Program is refused before it comes to the checker
        try:
            for program in mutant.programs:
                validate(program)
        except InterlaceError:
            return Outcome("refused", "")
    compared = compare(mutant.programs, runs)
    if compared.disagreements:
        return Outcome("flagged" if kinds else "equal", "oracle", str(compared.disagreements))
    if kinds:
        return Outcome("flagged", "rule" if kinds <= SHOWN_BY_RUNS else "oracle")
    return _sound(mutant, seed)


@dataclasses.dataclass
class Sweep:
    """Many mutants, and their outcomes."""

    seed: int
    schedules: int = 0
    known: int = 0
    """Number of mutants of the schedules that were visited."""
    counts: Counter[tuple[str, str, str]] = dataclasses.field(default_factory=Counter)
    """Mutants by sort of change, the checker's verdict, and its confirmation."""
    wrong: list[str] = dataclasses.field(default_factory=list[str])

    def visit(self, one: tuple[str, str, int], most: int | None) -> None:
        """Tries the mutants of a schedule, at most so many."""
        made = schedule(*one)
        assert made is not None
        rng = random.Random(f"{self.seed} {one}")
        left = [*mutants(made)]
        self.schedules += 1
        self.known += len(left)
        for make in left if most is None else rng.sample(left, min(most, len(left))):
            mutant = make()
            found = outcome(mutant, rng.getrandbits(32))
            self.counts[mutant.sort if mutant else "none", found.said, found.by] += 1
            if found.wrong:
                self.wrong.append(f"{one}, {found.wrong}:\n{mutant}")

    def of(self, *words: str) -> int:
        """Number of mutants that have all of these words."""
        return sum(count for key, count in self.counts.items() if {*words} <= {*key})

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.counts.total():,} of {self.known:,} mutants of "
            f"{self.schedules} schedules: {self.of('flagged', 'oracle'):,} flagged, as by the "
            f"oracle, {self.of('flagged', 'rule'):,} for what is not the oracle's, "
            f"{self.of('refused'):,} refused; sound, as by the oracle and in three runs: "
            f"{self.of('equal'):,} equal to the serial schedule, "
            f"{self.of('another function'):,} of another function; wrong: {len(self.wrong)}"
        )


def inputs_of(program: Program, seed: int) -> list[list[torch.Tensor]]:
    """Small integers, whose sums are exact in whatever order, for each rank."""
    generator = torch.Generator().manual_seed(seed)
    return [
        [_drawn(b, generator) for b in program.params if b.kind == "input"] for _ in program.world
    ]


def _drawn(buffer: Buffer, generator: torch.Generator) -> torch.Tensor:
    shape = cast("tuple[int, ...]", buffer.shape)
    return torch.randint(-1, 2, shape, generator=generator).to(DTYPES[buffer.dtype])


def _sound(mutant: Mutant, seed: int) -> Outcome:
    """Runs in three orders: they must end, and give the same bits."""
    inputs = inputs_of(mutant.serial, seed)
    wanted = run_ranks(mutant.serial, inputs, in_order=True)
    try:
        found = [
            run_ranks(mutant.programs, inputs, seed=seed + k, runs=2 if k else 1) for k in range(3)
        ]
    except AssertionError as error:
        return Outcome("equal", "oracle", f"sound, but a run says {error!r}")
    if not all(same(found[0], other) for other in found[1:]):
        return Outcome("equal", "oracle", "sound, but runs differ")
    return Outcome("equal" if same(found[0], wanted) else "another function", "oracle")


def same(one: Sequence[Sequence[object]], other: Sequence[Sequence[object]]) -> bool:
    """Returns True if all results of all ranks are the same bits."""
    return all(
        bits(cast("torch.Tensor", a)) == bits(cast("torch.Tensor", b))
        for mine, theirs in zip(one, other, strict=True)
        for a, b in zip(mine, theirs, strict=True)
    )


def bits(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes() if x.numel() else b""


if __name__ == "__main__":  # python -m tests.verify.mutants SEED MOST WORLD...
    torch.set_num_threads(1)
    sweep, most = Sweep(int(sys.argv[1])), int(sys.argv[2])
    for one in schedules([*map(int, sys.argv[3:])]):
        sweep.visit(one, most or None)
    print(sweep, *sorted(sweep.counts.items()), *sweep.wrong, sep="\n")
