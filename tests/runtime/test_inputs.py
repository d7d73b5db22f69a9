"""What a run is given is looked at every time, as closely as the first."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

from interlace.errors import ExecutorError
from interlace.ir import parse
from interlace.runtime.inputs import Given

CPU = torch.device("cpu")
TEXT = """
def f(x: f32[3, 4], z: c64[4], s: f32[4, 3].strides(1, 4), one: f32[1, 1], y: out[f32[3, 4]]):
    main: copy(x, y)
"""


def given() -> Given:
    program = parse(TEXT)
    return Given("f", "input", [b for b in program.params if b.kind == "input"], CPU)


def right() -> list[torch.Tensor]:
    x, z = torch.zeros(3, 4), torch.zeros(4, dtype=torch.complex64)
    return [x, z, torch.zeros(3, 4).t(), torch.zeros(1, 1)]


CHANGES: dict[str, Callable[[list[torch.Tensor]], object]] = {
    "nothing": lambda ts: None,
    "parameter": lambda ts: ts.__setitem__(0, nn.Parameter(ts[0])),
    "gradient": lambda ts: ts[0].requires_grad_(),
    "part": lambda ts: ts.__setitem__(0, torch.zeros(6, 4)[3:]),
    "no tensor": lambda ts: ts.__setitem__(0, 3),  # pyright: ignore
    "fewer": lambda ts: ts.pop(),
    "more": lambda ts: ts.append(torch.zeros(1)),
    "type": lambda ts: ts.__setitem__(0, ts[0].double()),
    "shape": lambda ts: ts.__setitem__(0, torch.zeros(4, 3)),
    "resized": lambda ts: ts[0].resize_(2, 4),
    "other data": lambda ts: setattr(ts[0], "data", torch.zeros(5)),
    "transposed": lambda ts: ts[2].copy_(ts[2]).t_(),
    "dense": lambda ts: ts.__setitem__(2, ts[2].contiguous()),
    "gaps": lambda ts: ts.__setitem__(0, torch.zeros(3, 8)[:, ::2]),
    "conjugated": lambda ts: ts.__setitem__(1, ts[1].conj()),
    "negated": lambda ts: ts.__setitem__(3, torch.zeros(1, 1, dtype=torch.complex64).conj().imag),
    "stride of one": lambda ts: ts.__setitem__(3, ts[3].as_strided((1, 1), (7, 9))),
    "device": lambda ts: ts.__setitem__(0, ts[0].to("meta")),
    "scalar": lambda ts: ts.__setitem__(3, torch.zeros(())),
}


def outcome(checked: Given, tensors: list[torch.Tensor]) -> str:
    try:
        checked.check(tensors)
    except ExecutorError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_seen_by_one_who_knows_the_last(what: str) -> None:
    known, tensors = given(), right()
    assert [outcome(known, tensors) for _ in range(3)] == [""] * 3
    CHANGES[what](tensors)
    assert outcome(known, tensors) == outcome(given(), tensors)
    assert outcome(known, right()) == ""


def test_any_changes_in_a_row(seed: int) -> None:
    chance, known = random.Random(seed), given()
    for _ in range(300):
        tensors = right()
        for what in chance.sample([*CHANGES], chance.randrange(3)):
            try:
                CHANGES[what](tensors)
            except (AttributeError, IndexError, RuntimeError):
                continue  # one before it left nothing to change
        for _ in range(2):
            assert outcome(known, tensors) == outcome(given(), tensors)
