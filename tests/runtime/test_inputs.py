"""What runs accept without a closer look; of tensors on GPUs fake ones are looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from interlace.errors import ExecutorError
from interlace.ir import parse
from interlace.runtime.inputs import Parameters

HERE = torch.device("cuda", 0)
KINDS = {
    "dense": "f32[4, 6]",
    "transposed": "f32[4, 6].strides(1, 4)",
    "of one": "f32[1, 6].strides(99, 2)",
    "complex": "c64[3]",
    "scalar": "f32[()]",
    "host": "u8[16]",
    "none": "f32[0, 6].strides(1, 4)",
}

Make = Callable[[str], torch.Tensor]
GOOD: dict[str, list[Make]] = {
    "dense": [lambda at: torch.empty(4, 6, device=at)],
    "transposed": [lambda at: torch.empty(6, 4, device=at).t()],
    "of one": [
        lambda at: torch.empty(1, 12, device=at).as_strided((1, 6), (12, 2)),
        lambda at: torch.empty(1, 12, device=at).as_strided((1, 6), (99, 2)),
    ],
    "complex": [lambda at: torch.empty(3, dtype=torch.complex64, device=at)],
    "scalar": [lambda at: torch.empty((), device=at), lambda at: torch.empty(())],
    "host": [
        lambda at: torch.empty(16, dtype=torch.uint8, device=at),
        lambda at: torch.empty(16, dtype=torch.uint8),
    ],
    "none": [lambda at: torch.empty(0, 6, device=at)],
}
BAD: dict[str, list[Make]] = {
    "dense": [
        lambda at: torch.empty(4, 6),
        lambda at: torch.empty(4, 6, device="cuda:1"),
        lambda at: torch.empty(4, 6, device="meta"),
        lambda at: torch.empty(4, 6, device=at, dtype=torch.float64),
        lambda at: torch.empty(4, 7, device=at),
        lambda at: torch.empty(6, 4, device=at).t(),
        lambda at: torch.empty(24, device=at),
    ],
    "transposed": [
        lambda at: torch.empty(4, 6, device=at),
        lambda at: torch.empty(6, 4).t(),
    ],
    "of one": [lambda at: torch.empty(1, 6, device=at)],
    "complex": [lambda at: torch.empty(3, dtype=torch.complex64, device=at).conj()],
    "scalar": [lambda at: torch.empty((), device="cuda:1"), lambda at: torch.empty(1, device=at)],
    "host": [lambda at: torch.empty(16, dtype=torch.uint8, device="cuda:1")],
    "none": [lambda at: torch.empty(1, 6, device=at)],
}


def given(*kinds: str) -> Parameters:
    lines = ", ".join(f"a{i}: {KINDS[kind]}" for i, kind in enumerate(kinds))
    program = parse(f"def f({lines}):\n    return {'a0' if kinds else ''}".rstrip())
    host = frozenset(f"a{i}" for i, kind in enumerate(kinds) if kind == "host")
    with mock.patch.object(torch._C, "_cuda_getDevice", create=True):  # CPU builds have none
        return Parameters("f", "input", program.params, HERE, host)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_program_was_made_for_needs_no_closer_look(kind: str) -> None:
    looked = given(kind, kind)
    with FakeTensorMode():
        for first in GOOD[kind]:
            for second in GOOD[kind]:
                pair = [first("cuda:0"), second("cuda:0")]
                assert looked.fit(pair)
                looked.check(pair)
        right = GOOD[kind][0]("cuda:0")
        for make in BAD[kind]:
            for pair in ([make("cuda:0"), right], [right, make("cuda:0")]):
                assert not looked.fit(pair)
                assert looked.addresses(pair) is False
                with pytest.raises(ExecutorError):
                    looked.check(pair)


@pytest.mark.parametrize(
    "wrong", [[], [None], [torch.zeros(4, 6).tolist()], {"a0": 1}, 5, [torch.zeros(4, 6)] * 2]
)
def test_what_is_no_such_list_is_none(wrong: Any) -> None:
    looked = given("dense")
    assert not looked.fit(wrong)
    assert looked.addresses(wrong) is False


def test_zeros_lie_in_one_place_but_for_what_is_written() -> None:
    kinds = ["dense", "transposed", "of one", "complex", "scalar", "none", "dense"]
    lines = ", ".join(f"a{i}: {KINDS[kind]}" for i, kind in enumerate(kinds))
    looked = Parameters(
        "f", "input", parse(f"def f({lines}):\n    return a0").params, torch.device("cpu")
    )
    made = looked.zeros({"a0", "a4"})
    assert looked.fit(made)
    assert not any(tensor.any() for tensor in made)
    storages = [tensor.untyped_storage().data_ptr() for tensor in made]
    assert len(set(storages)) == 3
    assert len({storages[i] for i in (1, 2, 3, 5, 6)}) == 1
    assert made[1].untyped_storage().nbytes() == 4 * 6 * 4
    apart = looked.zeros(looked.names)
    assert looked.fit(apart)
    full = [t.untyped_storage().data_ptr() for t in apart if t.numel()]
    assert len(set(full)) == len(full)


def test_addresses_are_those_of_the_tensors_in_order() -> None:
    program = parse(f"def f(a: {KINDS['dense']}, b: {KINDS['dense']}):\n    return a")
    looked = Parameters("f", "input", program.params, torch.device("cpu"))
    a, b = torch.zeros(4, 6), torch.zeros(8, 6)[4:]
    assert looked.addresses((b, a)) == (b.data_ptr(), a.data_ptr())
    assert looked.addresses([a]) is False
    nobody = Parameters("f", "output", [], torch.device("cpu"))
    assert nobody.addresses([]) == ()
    assert nobody.fit(())
    assert nobody.addresses([a]) is False
