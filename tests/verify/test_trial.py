"""A trial of the check by schedules that were written from the documents alone.

tests/golden/rules.txt has some for each rule of semantics.md. The other tests are for what such a
trial found: a verdict, a message or a bound that was wrong.
"""

from __future__ import annotations

import random
import re
import time
from itertools import product

import pytest
from tests.fuzzing import compare
from tests.verify.mutated_texts import mutated, texts
from tests.verify.schedules import GOLDEN

from interlace.errors import InterlaceError, ParseError, ProgramError
from interlace.ir import Program, parse, parse_set, validate
from interlace.verify import Report, check

PARTS = re.split(r"^=== ([\w-]+): (.*)\n", (GOLDEN / "rules.txt").read_text(), flags=re.MULTILINE)
TWO_RANKS = """def a(tp: Team[[0, 1]], x: f32[4], y: out[f32[4]]):
    ranks(0)
    full = alloc(f32[4], symmetric=tp)
    t = alloc(f32[8])
    u = alloc(f32[8])
    main: call("aten.zeros.out", (8,), out=t)
{0}    main: copy(full, y)
    main: free(full)


def b(tp: Team[[0, 1]], x: f32[4], y: out[f32[4]]):
    ranks(1)
    full = alloc(f32[4], symmetric=tp)
    t = alloc(f32[8])
    u = alloc(f32[8])
    main: call("aten.zeros.out", (8,), out=t)
    main: put(x, full, peer=0)
{1}    main: copy(x, y)
    main: free(full)
"""
"""Rank 1 puts into the slot that rank 0 reads: sound where what is between orders the two."""


def written_out(text: str) -> str:
    """The schedules of a rule that gives only what is between the put and the read."""
    ops = r"((?:    .*\n)*)"
    match = re.match(f"both ranks\n{ops}|rank 0\n{ops}rank 1\n{ops}", text)
    if match is None:
        return text
    both, *each = match.groups()
    return TWO_RANKS.format(*(each if both is None else (both, both)))


RULES = {
    name: (kind, written_out(text)) for kind, name, text in zip(*[iter(PARTS[1:])] * 3, strict=True)
}


def parsed(text: str) -> list[Program]:
    programs = parse_set(text, file="trial")
    for program in programs:
        validate(program)
    return list(programs)


def kinds(report: Report) -> set[str]:
    return {finding.kind for finding in report.findings}


@pytest.mark.parametrize("name", RULES)
def test_each_rule_is_kept_to_the_letter(name: str) -> None:
    kind, text = RULES[name]
    text = text.partition("\n## ")[0]
    if kind == "refused":
        with pytest.raises(InterlaceError):
            check(parsed(text))
        return
    programs = parsed(text)
    report = check(programs)
    assert kind in kinds(report) or (kind == "sound" and not report.findings), str(report)
    assert kinds(check(programs, fold=False)) == kinds(report)
    if _is_small(programs):
        assert not compare(programs, runs=2).disagreements


def _is_small(programs: list[Program]) -> bool:
    """Returns True if the exhaustive oracle can explore it."""
    num_ops = sum(len(p.ops) * (len(p.world) if p.rank is None else 1) for p in programs)
    return num_ops <= 24 and not any(program.sizes.sizes for program in programs)


def test_there_are_sound_and_unsound_schedules_for_the_rules() -> None:
    counts = [kind for kind, _ in RULES.values()]
    assert counts.count("sound") > 100
    assert len(counts) - counts.count("sound") > 100


def test_a_call_that_fills_one_view_twice_is_refused() -> None:
    text = """
def p(tp: Team[2], x: f32[1, 4], y: out[f32[1]]):
    main: call("aten.aminmax.out", x, dim=1, out=(y, y))
"""
    (finding,) = check(parsed(text)).findings
    assert finding.kind == "in-place"
    assert "writes y and y, twice the same bytes" in finding.message


# Sizes that change


def test_a_class_of_sizes_leaves_out_what_a_division_leaves_a_remainder_of() -> None:
    text = """
def p(tp: Team[2], S: Size[8], x: f32[S], y: out[f32[S]]):
    assume(S >= 4)
    main: copy(x[0:S // 2], y[0:S // 2])
    main: copy(x[S // 2:S], y[S // 2:S])
"""
    (program,) = parsed(text)
    assert parse(str(program)) == program
    sizes = check(program).sizes
    assert "S % 2 == 0" in str(sizes)
    assert [S for S in range(10) if sizes.holds({"S": S})] == [4, 6, 8]


def sized(rng: random.Random) -> str:
    """A random Program of two named sizes, on two streams."""
    bounds = ["0", "S", "2 * S", "S // 2", "T", "S + T", "S + 2", "2 * T", "8", "12", "4 * S + 16"]
    body: list[str] = []
    for number in range(rng.randint(2, 4)):
        low, high = rng.sample(bounds, 2)
        of, to = rng.choice([("x", "t"), ("x", "t"), ("t", f"u{number}")])
        if to != "t":
            body.insert(0, f"{to} = alloc(f32[4 * S + 4 * T + 16])")
        stream = rng.choice(["main", "side"])
        body.append(f"{stream}: copy({of}[{low}:{high}], {to}[{low}:{high}])")
        if rng.random() < 0.5:
            body += [f"{stream}: record(e)", f"{rng.choice(['main', 'side'])}: wait(e)"]
    shape = "f32[4 * S + 4 * T + 16]"
    head = f"def p(tp: Team[2], S: Size[{rng.choice([4, 6, 8, 12])}], T: Size[{rng.randint(2, 9)}]"
    lines = [f"{head}, x: {shape}, t: {shape}):", "    assume(S >= 1, T >= 1)"]
    return "\n".join([*lines, *(f"    {line}" for line in body)]) + "\n"


def test_what_is_sound_for_a_class_is_sound_for_each_size_of_it(seed: int) -> None:
    rng, found = random.Random(seed), 0
    while found < 6:
        text = sized(rng)
        try:
            (program,) = parsed(text)
        except InterlaceError:
            continue  # a view that does not exist for the sizes in the head
        report = check(program)
        if not report.sound:
            assert not check(program.at(program.sizes.values)).sound, text
            continue
        found += 1
        members = [
            values
            for S, T in product(range(1, 14, 3), range(1, 10, 2))
            if report.sizes.holds(values := {"S": S, "T": T})
        ]
        for values in [program.sizes.values, *members]:
            at = program.at(values)
            validate(at)
            assert check(at).sound, (text, values)


@pytest.mark.parametrize("size", ["7 // 2", "S // 0", "S // -2", "S // 2"])
def test_a_division_that_leaves_a_remainder_is_named(size: str) -> None:
    with pytest.raises(ParseError, match=r"divide|whole number"):
        parse_set(f"def p(tp: Team[2], S: Size[7], x: f32[{size}]):\n    return x\n")


# Messages


def test_a_team_of_the_same_name_and_other_ranks_is_named() -> None:
    report = check(parsed(RULES["team order differs between programs"][1]))
    assert "rank 1 issues 0, where the ranks of a are [1, 0]" in str(report)


def test_messages_that_disagree_on_all_ranks_are_one_finding() -> None:
    text = """
def p(tp: Team[8], x: f32[4], y: out[f32[2]]):
    main: group(send(x, peer=tp.rank + 1), recv(y, peer=tp.rank - 1))
"""
    report = check(parsed(text))
    assert [finding.kind for finding in report.findings] == ["mismatch"]


def test_a_hint_says_that_there_is_nothing_to_choose_from() -> None:
    with pytest.raises(ProgramError, match="tables are: none"):
        parsed("def p(tp: Team[2], x: f32[4]):\n    main: all_gather(x, x, splits=rows, team=tp)\n")


def test_of_a_storm_of_faults_few_fixes_are_proved() -> None:
    storm = "".join(f"    s{stream}: copy(x, y)\n" for stream in range(100))
    report = check(parsed(f"def p(tp: Team[2], x: f32[4], y: out[f32[4]]):\n{storm}"))
    assert report.num_left_out > 4_000
    assert [finding for finding in report.errors if finding.fixed] == [*report.errors[:1]]
    assert all(finding.fix for finding in report.errors)


# Many ranks, and texts that are no schedule


def test_signals_between_all_of_65536_ranks_are_refused_at_once() -> None:
    text = """
def p(tp: Team[65536], x: f32[4], y: out[f32[4]]):
    full = alloc(f32[4], symmetric=tp)
    main: copy(x, full)
    main: notify(ready, to=tp.others)
    main: expect(ready, tp.others)
    main: broadcast(x, y, root=0, team=tp)
    main: free(full)
"""
    began = time.process_time()
    programs = parsed(text)
    with pytest.raises(ProgramError, match="pairs of ranks"):
        check(programs)
    assert time.process_time() - began < 20  # less than a second; it was an hour


def try_texts(seed: int, count: int) -> None:
    """Reads, validates and checks mutated texts: each has a verdict or a typed error, and soon."""
    rng, originals = random.Random(seed), texts()
    for _ in range(count):
        text = mutated(rng, originals)
        began = time.process_time()
        try:
            report = check(parsed(text))
            assert report.sound == str(report).startswith("sound"), text
        except InterlaceError:
            pass
        assert time.process_time() - began < 10, text


def test_a_damaged_file_gives_a_typed_error_or_a_verdict(seed: int) -> None:
    try_texts(seed, 600)
