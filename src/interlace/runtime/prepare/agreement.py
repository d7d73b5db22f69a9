"""Before ranks run a Program together they agree on it, through the store and within a time-out.

Each rank posts what it prepares and reads what the others do: its team mates, their team mates, and
so on. Equal hashes agree. So do equal skeletons: Programs that differ only in scalars of Calls (a
vocabulary's offset on each rank, say), or in the part that Calls read of an input that nothing
writes. Others are verified as a set, as a pipeline's stages are.

    agreement = agree_and_prove(program, rank, teams, timeout_s=60)
    agreement.tag                # 64 bits that name what all of these ranks prepared together

A rank that does not come is named, which also tells a recompilation on one rank alone.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import compress
from typing import TypeVar

import torch.distributed as dist

from interlace.comm import TeamComm, attending
from interlace.comm.rendezvous.board import Board, Note, meet, named
from interlace.errors import (
    AgreementError,
    ProgramError,
    SoundnessError,
    TeamError,
)
from interlace.ir import Arg, Call, Loc, Name, Node, Program, View, parse, print_program
from interlace.ir.text.printer import print_behavior
from interlace.options import Options
from interlace.verify import Report, check

LATER_S = 0.5
"""Seconds that another rank may have begun later than this one: one that waits for a rank of
another team then gives up first, and its verdict names that rank."""

Step = TypeVar("Step", Call, Node)
ALIKE = {"in_order": ("in order", "on its streams"), "graph": ("in CUDA graphs", "op by op")}
"""Options that all ranks have alike, with what a rank does where they are set, and where not."""


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests by which ranks compare their Programs."""

    text: str
    """Digest of the behavior: see `print_behavior`."""
    skeleton: str

    @classmethod
    def of(cls, program: Program) -> Digests:
        """The digests of a Program."""
        printed: dict[int, str] = {}
        return cls(*(digest(print_behavior(p, printed)) for p in (program, skeleton(program))))


@dataclass(frozen=True, slots=True)
class Proof:
    """The verifier's report of one text."""

    of: Digests
    report: Report


@dataclass(frozen=True, slots=True)
class Agreement:
    """Result of what a component of ranks prepared together."""

    tag: int
    proof: Proof
    """Proof of this rank's Program; or of the Programs of all ranks as a set, if they differ."""
    texts: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Programs that differ, each as text with the ranks that run it."""
    backends: tuple[tuple[str, ...], ...] = ()
    """For each of the teams, the backends of torch that one of its ranks needs: all have them."""
    proof_s: float = field(default=0.0, compare=False)
    """Seconds that the proof took here."""

    @property
    def report(self) -> Report:
        """The verifier's report."""
        return self.proof.report

    def tag_at(self, met: Sequence[bool], sizes: tuple[int, ...]) -> int:
        """The tag of runs with these values of the named sizes, by those that ranks `met` in."""
        same = tuple(compress(sizes, met))
        return int(digest(f"{self.tag} {same}")[:16], 16) if same else self.tag

    def programs(self, own: Program, rank: int) -> tuple[Program, ...]:
        """The Programs of all ranks; `own`, which names its sites, is what `rank` runs."""
        if not self.texts:
            return (own,)
        found: list[Program] = []
        for text, ranks in self.texts:
            found += for_ranks(own if rank in ranks else parse(text), ranks)
        return tuple(found)


@lru_cache(maxsize=256)
def verdict(program: Program, in_order: bool) -> Report:
    return check(program, in_order=in_order)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def essence(program: Program) -> Program:
    """A Program without its sites, remarks and source lines: what is left is its behavior."""
    ops = tuple(replace(op, loc=Loc(), site=None) for op in program.ops)
    return program.replace(ops=ops, sites=(), remarks=())


def skeleton(program: Program) -> Program:
    """A Program without the scalars of its Calls, and without what no access can race for: which
    part a Call reads of an input that nothing writes."""
    written = {access.view.buffer for op in program.ops for access in op.writes()}
    inputs = {b.name for b in program.params if b.kind == "input" and b.team is None} - written

    def bare(arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return tuple(map(bare, arg))
        if isinstance(arg, View):
            return View(arg.buffer) if arg.buffer in inputs else arg
        return arg if isinstance(arg, Name) else None

    def strip(call: Step) -> Step:
        args = tuple(map(bare, call.args))
        kwargs = tuple([(key, bare(value)) for key, value in call.kwargs])
        same = args == call.args and kwargs == call.kwargs
        return call if same else replace(call, args=args, kwargs=kwargs)

    ops = tuple(strip(op) if isinstance(op, Call) else op for op in program.ops)
    regions = tuple(replace(r, body=tuple(map(strip, r.body))) for r in program.regions)
    return program.replace(ops=ops, regions=regions)


def agree_and_prove(
    program: Program,
    rank: int,
    teams: Sequence[TeamComm],
    timeout_s: float,
    backends: Sequence[Sequence[str]] = (),
    options: Options | None = None,
    known: Proof | None = None,
) -> Agreement:
    """Agrees with every rank that is joined to this one by teams, and proves what they run: with
    the option `in_order`, the twin that runs one op after another. `backends` has those that this
    rank's Program needs, for each of the teams. A `known` proof, of this text, is not repeated."""
    options = options or Options()
    in_order = options.in_order
    of = Digests.of(program) if known is None else known.of
    mine: Note = {
        "step": "prepare Program",
        "rank": rank,
        "name": program.name,
        "hash": of.text,
        "skeleton": of.skeleton,
        "backends": {},
        **{name: getattr(options, name) for name in ALIKE},
    }
    if not teams:
        begun = time.perf_counter()
        proof = known or _proof(program, of, in_order)
        return Agreement(int(of.text[:16], 16), proof, proof_s=time.perf_counter() - begun)
    for team, needs in zip(teams, backends or [()] * len(teams), strict=True):
        mine["backends"][team.key] = list(needs)
    board, me = teams[0].board, teams[0].rank
    entries = gather(mine, teams, timeout_s)
    _check_options(entries)
    begun, texts = time.perf_counter(), ()
    if len({entry["skeleton"] for entry in entries.values()}) > 1:
        text = print_program(essence(program))
        report, texts = _verify_set(board, entries, me, text, timeout_s)
        proof = Proof(of, report)
    else:
        proof = known or _proof(program, of, in_order)
    proof_s = time.perf_counter() - begun
    parts = sorted((entry["rank"], entry["hash"]) for entry in entries.values())
    # With where it was prepared: two Executors of equal Programs must not take each other's data.
    tag = int(digest(repr((parts, _places(entries.values()))))[:16], 16)
    used = [
        {name for entry in entries.values() for name in entry["backends"].get(team.key, ())}
        for team in teams
    ]
    backends_of_all = tuple(tuple(sorted(names)) for names in used)
    return Agreement(tag, proof, texts, backends_of_all, proof_s)


def gather(mine: Note, teams: Sequence[TeamComm], timeout_s: float) -> dict[int, Note]:
    """The notes of all ranks that teams join to this one, by global rank; each has the name of the
    Program that it is about, and what the rank is to do with it (`step`), the same on all of them.
    All of these ranks get them, or none."""
    meet(teams, doing(mine), timeout_s)
    left: list[str] = []
    board, me = teams[0].board, teams[0].rank
    mine["teams"] = []
    for team in teams:
        before = team.num_prepared
        team.num_prepared = team.board.round(f"{team.topic}/prepare", before)
        team.board.limit_s = timeout_s
        rounds = range(before, team.num_prepared) if team.me == 0 else ()
        left += [f"{team.topic}/prepare/{number}/verdict" for number in rounds]
        place = f"{team.topic}/prepare/{team.num_prepared}"
        mine["teams"].append([place, list(team.ranks), team.name, team.num_prepared])
    places = [place for place, *_ in mine["teams"]]
    board.announce()
    for place in places:
        board.post(f"{place}/{me}", mine)
    with attending(zip(teams, places, strict=True)) as look:
        entries = _collect(board, me, mine, timeout_s, look)
    board.forget(entries, [*left, *(f"{place}/{me}" for place in places), text_topic(me, mine)])
    if len({entry["step"] for entry in entries.values()}) > 1:
        steps = [f"rank {rank} to {doing(entry)}" for rank, entry in sorted(entries.items())]
        raise AgreementError(
            f"ranks meet to do different things: {', '.join(steps)}. Every rank must compile and "
            "prepare the same Programs in the same order"
        )
    return entries


def doing(note: Note) -> str:
    """The step that a rank comes to a meeting for, in words."""
    return f"{note['step']} {note['name']!r}"


def numbers_of_ranks(team: TeamComm, number: int, what: str, timeout_s: float) -> tuple[int, ...]:
    """The numbers that all ranks tell of `what`, by shared memory where there is some."""
    if team.shares_memory:
        with team.lock:
            return team.control.exchange(number, timeout_s, what)
    entries = gather({"step": "call", "name": what, "number": number}, [team], timeout_s)
    return tuple(entries[rank]["number"] for rank in team.ranks)


def _proof(program: Program, of: Digests, in_order: bool) -> Proof:
    report = verdict(program, in_order)
    report.raise_if_unsound()
    return Proof(of, report)


def _check_options(entries: Mapping[int, Note]) -> None:
    """Options that decide what ranks set up and run together are the same on all of them; those of
    one Program go by the same backends."""
    for option, (how, otherwise) in ALIKE.items():
        ways = {entry[option]: rank for rank, entry in sorted(entries.items(), reverse=True)}
        if len(ways) > 1:
            raise AgreementError(
                f"rank {ways[True]} would run {entries[ways[True]]['name']!r} {how}, and rank "
                f"{ways[False]} {otherwise}: give all ranks the same option `{option}`"
            )
    known: dict[tuple[str, str], tuple[int, list[str]]] = {}
    for rank, entry in sorted(entries.items()):
        for place, names in entry["backends"].items():
            other, theirs = known.setdefault((place, entry["hash"]), (rank, names))
            if names != theirs:
                raise AgreementError(
                    f"rank {other} would run {entry['name']!r} by {_listed(theirs)}, and rank "
                    f"{rank} by {_listed(names)}: give all ranks the same `transport`, and their "
                    "groups the same backends"
                )


def _listed(names: Sequence[str]) -> str:
    return " and ".join(names) or "peer"


def _collect(
    board: Board, me: int, mine: Note, timeout_s: float, look: Callable[[], object] = lambda: None
) -> dict[int, Note]:
    """The entries of all ranks that teams join to this one, by global rank; all of these ranks get
    them, or none (Note [All or none] in board.py): a rank that sees everybody asks for the verdicts
    of all teams, one that gives up decides those of its own."""
    own, found = _places([mine]), {me: mine}
    with board.attending(own):
        while wanted := _unknown(found):
            topics = {rank: f"{place}/{rank}" for rank, (place, _, _) in wanted.items()}
            came = board.collect(topics, timeout_s + LATER_S, own, look)
            missing = [rank for rank in wanted if rank not in came]
            if missing:
                _, team, number = wanted[missing[0]]
                of_team = f" of team {team}" if team else ""
                what = f"{doing(mine)} (number {number}{of_team})"
                why = board.absence(missing, found, what, timeout_s)
                # One that is over ended the wait. If its verdict raises nothing, all are there by
                # now, and the other teams' may not be given up.
                for place in [p for p in own if board.is_over(p)] or own:
                    board.decide(place, why)
            found.update(came)
        for place in _places(found.values()):
            board.decide(place)
    return found


def _places(entries: Iterable[Note]) -> list[str]:
    """Where these ranks prepare: a meeting for each of their teams."""
    return sorted({place for entry in entries for place, *_ in entry["teams"]})


def _unknown(found: Mapping[int, Note]) -> dict[int, tuple[str, str, int]]:
    """Ranks that entries name and that are not known yet, with where to read of them."""
    return {
        rank: (place, team, number)
        for entry in found.values()
        for place, ranks, team, number in entry["teams"]
        for rank in ranks
        if rank not in found
    }


def _verify_set(
    board: Board, entries: Mapping[int, Note], me: int, text: str, timeout_s: float
) -> tuple[Report, tuple[tuple[str, tuple[int, ...]], ...]]:
    """Proves different Programs as a set: the report, and the texts with their ranks."""
    notes = texts_of(board, entries, me, text, timeout_s)
    ranks = {key: ranks_of(entries, key) for key in sorted(notes)}
    try:
        taken = Counter(entry["rank"] for entry in entries.values())
        for rank in (rank for rank, count in taken.items() if count > 1):
            raise ProgramError(f"rank {rank} of the Programs is prepared by more than one process")
        parsed = {key: parse(text) for key, text in notes.items()}
        report = check(
            [p for key in ranks for p in for_ranks(parsed[key], ranks[key])],
            in_order=entries[me]["in_order"],
        )
        report.raise_if_unsound()
    except (SoundnessError, ProgramError) as error:
        raise AgreementError(
            "\n".join(
                [
                    "ranks prepare Programs that do not go together:",
                    *(f"  {_holders(entries, key)}" for key in ranks),
                    f"{error}",
                    "Every rank must prepare the same Programs in the same order, or those of one "
                    "set; look for code that depends on the rank, or for inputs whose shapes "
                    "differ between ranks",
                ]
            )
        ) from None
    return report, tuple((notes[key], of) for key, of in ranks.items())


def texts_of(
    board: Board, entries: Mapping[int, Note], me: int, text: str, timeout_s: float
) -> dict[str, str]:
    """The texts behind the hashes of the ranks' notes."""
    board.post(text_topic(me, entries[me]), {"text": text})
    holders = {entry["hash"]: rank for rank, entry in entries.items()}
    topics = {rank: text_topic(rank, entries[rank]) for rank in holders.values()}
    found = board.collect(topics, timeout_s)
    if silent := sorted(topics.keys() - found.keys()):
        place = entries[me]["teams"][0][0]
        raise AgreementError(f"{named(silent)} did not tell its Program ({place})")
    return {key: found[rank]["text"] for key, rank in holders.items()}


def text_topic(rank: int, entry: Note) -> str:
    """Topic of a text that a rank tells the others of a meeting."""
    return f"{entry['teams'][0][0]}/text/{rank}"


def ranks_of(entries: Mapping[int, Note], key: str) -> tuple[int, ...]:
    return tuple(sorted(entry["rank"] for entry in entries.values() if entry["hash"] == key))


def for_ranks(program: Program, ranks: tuple[int, ...]) -> list[Program]:
    """The Program for these of its ranks: itself where they are all that it has."""
    whole = program.rank is None and ranks == tuple(sorted(program.world))
    return [program] if whole else [program.instantiate(rank) for rank in ranks]


def _holders(entries: Mapping[int, Note], key: str) -> str:
    """The ranks that have one Program, and its name."""
    alike = [rank for rank in sorted(entries) if entries[rank]["hash"] == key]
    return f"{named(alike)}, {entries[alike[0]]['name']!r}"


def program_rank(program: Program, groups: Mapping[str, dist.ProcessGroup]) -> int:
    """The rank of a Program at which each of its teams has this process where its group has it.

    A Program counts its ranks from 0, whatever the global ranks of its groups: one tensor-parallel
    Program of two ranks serves every replica of a data-parallel job.
    """
    known = {team.name for team in program.teams}
    stray = [name for name in groups if name not in known]
    if stray:
        raise TeamError(
            f"{program.name} has no team named {stray[0]!r}: its teams are {sorted(known)}"
        )
    real = dist.ProcessGroup  # new_group gives other ranks a placeholder
    mine = {name: group for name, group in groups.items() if isinstance(group, real)}
    ranks = program.world if program.rank is None else (program.rank,)
    fits = [rank for rank in ranks if _fits(program, rank, mine)]
    if len(fits) == 1:
        return fits[0]
    me = dist.get_rank() if dist.is_initialized() else 0
    if me in fits:
        return me
    have = ", ".join(f"{n} (rank {g.rank()} of {g.size()})" for n, g in mine.items()) or "none"
    wants = ", ".join(f"{team.name}[{team.size}]" for team in program.teams) or "none"
    if not fits:
        raise TeamError(
            f"no rank of {program.name} fits this process: the Program's teams are {wants}, the "
            f"process groups given are {have}. Give one group for each team, as in "
            "groups={'tp': mesh.get_group('tp')}, with as many ranks as the team has"
        )
    raise TeamError(
        f"ranks {fits} of {program.name} would all fit this process (teams {wants}, groups "
        f"{have}): instantiate the Program for the rank that this process is"
    )


def _fits(program: Program, rank: int, groups: Mapping[str, dist.ProcessGroup]) -> bool:
    members = program.where(rank).members
    return set(members) == set(groups) and all(
        (groups[name].rank(), groups[name].size()) == (member.index, len(member.ranks))
        for name, member in members.items()
    )
