"""The golden files: hand-written schedules that parse, validate and print back as written."""

from __future__ import annotations

from pathlib import Path

import pytest

from interlace.ir import KINDS, Op, parse_set, print_set, validate
from interlace.ir.roles import op_words

GOLDEN = {path.stem: path for path in sorted((Path(__file__).parents[1] / "golden").glob("*.ilc"))}


def without_comments(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if line[0] != "#").lstrip("\n")


@pytest.mark.parametrize("name", GOLDEN)
def test_prints_back_as_written(name: str) -> None:
    text = GOLDEN[name].read_text()
    programs = parse_set(text, file=GOLDEN[name].name)
    assert print_set(programs) == without_comments(text)
    assert parse_set(print_set(programs)) == programs


@pytest.mark.parametrize("name", GOLDEN)
def test_is_well_formed_on_every_rank(name: str) -> None:
    text = GOLDEN[name].read_text()
    for program in parse_set(text, file=GOLDEN[name].name):
        validate(program, text)
        for rank in program.world:
            concrete = program.instantiate(rank)
            validate(concrete)
            assert parse_set(str(concrete)) == (concrete,)


@pytest.mark.parametrize("name", GOLDEN)
def test_lines_fit(name: str) -> None:
    assert max(map(len, GOLDEN[name].read_text().splitlines())) <= 120


def test_every_form_has_every_form() -> None:
    text = GOLDEN["every_form"].read_text()
    (program,) = parse_set(text)
    assert {type(op).__name__ for op in program.ops} == {
        op.__name__ for op in Op.__subclasses__() if op.__module__ == Op.__module__
    }
    ours = [word for word, form in op_words().items() if form.kind.__module__ == Op.__module__]
    assert not [name for name in {*ours, "alloc", "empty"} if f" {name}(" not in text]
    assert set(KINDS) <= set(op_words())


def test_ops_know_their_line() -> None:
    text = GOLDEN["two_stages"].read_text()
    lines = text.splitlines()
    for program in parse_set(text, file="two_stages.ilc"):
        assert program.ops
        for op in program.ops:
            assert op.loc.file == "two_stages.ilc"
            word = type(op).__name__.lower()
            assert {"collective": "all_reduce"}.get(word, word) in lines[op.loc.line - 1]
