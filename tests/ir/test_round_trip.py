"""`parse(str(p)) == p`: for Programs with anything in them, and for sensible ones."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tests.fuzzing.draw import well_formed
from tests.support.arbitrary_programs import Arbitrary

from interlace.ir import Loc, Op, Remark, parse, parse_set, print_set, validate
from interlace.ir.text.printer import print_behavior
from interlace.strategies import REPLACED


def test_anything_that_a_program_can_hold(seed: int) -> None:
    """Also types, and not only values: 1, 1.0 and True are equal to Python but not to torch."""
    draw = Arbitrary(random.Random(seed))
    for _ in range(1500):
        program = draw.program()
        text = str(program)
        read = parse(text)
        assert read == program, text
        assert str(read) == text
        assert [op.loc.module for op in read.ops] == [op.loc.module for op in program.ops]
        assert repr(read.results) == repr(program.results)
        assert repr(read.regions) == repr(program.regions)
    programs = tuple(draw.program() for _ in range(5))
    assert parse_set(print_set(programs)) == programs


def test_well_formed_programs(seed: int) -> None:
    """Random programs survive print and parse, and stay well formed; concrete ones too."""
    rng = random.Random(seed)
    kinds: set[str] = set()
    for _ in range(400):
        program = well_formed(rng, rng.randint(2, 20))
        text = str(program)
        read = parse(text)
        assert read == program, text
        assert str(read) == text
        validate(read, text)
        kinds |= {type(op).__name__ for op in program.ops}
    ours = [op for op in Op.__subclasses__() if op.__module__ == Op.__module__]
    assert kinds == {op.__name__ for op in ours}


def test_texts_of_behavior(seed: int) -> None:
    """Sites, remarks and locations are no part of them, and every op is."""
    rng = random.Random(seed)
    for _ in range(100):
        program = well_formed(rng, rng.randint(2, 12))
        marked = [replace(op, site=7, loc=Loc("layers.0", "a.py", 3)) for op in program.ops]
        other = program.replace(ops=tuple(marked), remarks=(Remark("schedule", "why"),))
        printed: dict[int, str] = {}
        text = print_behavior(program, printed)
        assert print_behavior(other, {}) == text
        for i in range(len(program.ops)):
            fewer = program.replace(ops=(*program.ops[:i], *program.ops[i + 1 :]))
            assert print_behavior(fewer, printed) == print_behavior(fewer, {}) != text


def test_programs_of_one_rank(seed: int) -> None:
    """What `instantiate` gives is a Program like any other."""
    rng = random.Random(seed)
    for _ in range(60):
        program = well_formed(rng, 12)
        concrete = program.instantiate(rng.choice(program.world))
        assert "rank +" not in str(concrete)
        assert parse(str(concrete)) == validate(concrete)


@pytest.mark.parametrize(("gone", "now"), REPLACED.items())
def test_a_strategy_that_went_is_read_as_the_one_that_stands_for_it(gone: str, now: str) -> None:
    program = parse(f'def p(x: f32[4]):\n    site(1, "all_gather", strategy="{gone}")\n')
    assert [site.strategy for site in program.sites] == [now]
    (remark,) = program.remarks
    assert (remark.site, gone in remark.text, now in remark.text) == (1, True, True)
    assert parse(str(program)) == program
