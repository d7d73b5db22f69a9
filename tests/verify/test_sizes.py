"""The proof for a class of sizes agrees with the proofs for its sizes: random Programs, in which
every buffer has one dimension of the size S more."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from tests.fuzzing.draw import Draw

from interlace.errors import InterlaceError
from interlace.ir import (
    AsStrided,
    Buffer,
    Call,
    Cast,
    Copy,
    Expand,
    Get,
    Permute,
    Program,
    Put,
    Reshape,
    Step,
    View,
    parse,
)
from interlace.ir.program import map_values
from interlace.ir.sizes import Int, NamedSize, SizeClass, divided, named
from interlace.verify import check

S = named("S")
LARGEST = 100


class Unfit(Exception):
    """A Program that has no such twin."""


def wider(program: Program, rng: random.Random) -> Program:
    """The Program with one dimension of size S more at the end of each buffer; some copies and
    calls touch one half of it alone."""
    value = rng.choice([8, 12, 20])
    dims: dict[str, int] = {}

    def buffer(old: Buffer) -> Buffer:
        if old.dtype.itemsize > 8:
            raise Unfit
        dims[old.name] = len(old.shape)
        strides = None if old.strides is None else (*(s * S for s in old.strides), 1)
        return dataclasses.replace(
            old, shape=(*old.shape, S), strides=strides, offset=old.offset * LARGEST
        )

    def step(old: Step, rank: int) -> tuple[Step, int]:
        match old:
            case Cast():
                raise Unfit
            case Permute(order):
                return Permute((*order, len(order))), rank
            case Reshape(sizes) | Expand(sizes):
                return type(old)((*sizes, S)), len(sizes)
            case AsStrided(sizes, strides, offset):
                told = (*sizes, S), (*(s * S for s in strides), 1), offset * S
                return AsStrided(*told), len(sizes)
            case _:
                return old, rank - (type(old).__name__ == "Select")

    def change(half: tuple[Int, Int] | None) -> Any:
        def value_of(old: object) -> object:
            if isinstance(old, Buffer):
                return buffer(old)
            if not isinstance(old, View):
                return old
            view, rank = View(old.buffer), dims[old.buffer]
            for each in old.steps:
                made, rank = step(each, rank)
                view = view.then(made)
            return view if half is None else view.slice(rank, *half)

        return value_of

    middle = divided(S, 2)
    halves: list[tuple[Int, Int]] = [(0, middle), (middle, S)]
    params = tuple(map(buffer, program.params))
    ops = []
    for op in program.ops:
        partly = isinstance(op, Copy | Put | Get) and rng.random() < 0.25
        plain = isinstance(op, Call) and not op.fresh and rng.random() < 0.25
        half = rng.choice(halves) if partly or plain else None
        ops.append(map_values(op, change(half)))
    return program.replace(
        sizes=SizeClass((NamedSize("S", value, high=LARGEST, modulus=2),)),
        params=params,
        ops=tuple(ops),
        results=None,
        regions=(),
    )


@pytest.mark.timeout(300)
def test_no_class_is_sound_with_a_member_that_is_not(seed: int) -> None:
    compare(seed, pairs=60)


def compare(seed: int, pairs: int) -> None:
    """So many pairs of a class that is sound and one of its sizes."""
    rng = random.Random(seed)
    compared = 0
    while compared < pairs:
        program = Draw(rng).program(rng.randint(3, 7))
        if not check(program).sound:
            continue
        try:
            program = wider(program, rng)
            report = check(program)
        except (Unfit, InterlaceError):
            continue
        sizes = [size for size in range(2, 100) if report.sizes.holds({"S": size})]
        assert program.sizes.values["S"] in sizes
        if not report.sound:
            assert not check(program.at(program.sizes.values)).sound
            continue
        assert len(sizes) > 1, f"no class\n{program}\n{report}"
        for size in rng.sample(sizes, min(4, len(sizes))):
            own = check(program.at({"S": size}))
            assert own.sound, f"S = {size}\n{program}\n{report}\n{own}"
            compared += 1


HEADS = """
def f(S: Size[8], x: f32[4 * S, 128], y: out[f32[2, 4, 2 * S, 16]]):
    rows = alloc(f32[4 * S, 128])
    main: copy(x[0:2 * S, :], rows[0:2 * S, :])
    main: copy(x[2 * S:4 * S, :], rows[2 * S:4 * S, :])
    main: copy(rows.view(2, 2 * S, 4, 32).permute(0, 2, 1, 3)[:, :, :, 0:16], y)
"""


def test_halves_of_heads_of_rows_that_were_written_in_chunks() -> None:
    report = check(parse(HEADS))
    assert report.sound
    assert not report.single, report.single
    missing = HEADS.replace("    main: copy(x[2 * S:4 * S, :], rows[2 * S:4 * S, :])\n", "")
    assert not check(parse(missing)).sound


EMPTY = """
def f(S: Size[8], x: f32[4, S], y: out[f32[4, S]]):
    main: copy(x, y)
    side: copy(x[2:4][0:0], y[2:4][0:0])
"""


def test_what_is_empty_for_all_sizes_begins_anywhere() -> None:
    report = check(parse(EMPTY))
    assert report.sound
    assert not report.single, report.single
    assert not check(parse(EMPTY.replace("0:0", "0:1"))).sound
