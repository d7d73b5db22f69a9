"""Pipelines as text: parsed, spelled back, run with checks; the errors say how to mend them."""

from __future__ import annotations

import pytest
from tests.passes.samples import KINDS

from interlace.errors import PassError, SoundnessError
from interlace.ir import Program
from interlace.passes import PASSES, Pass, parse_pipeline, run_pipeline, spell
from interlace.passes.decompose import Decompose


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_is_found_by_name(name: str) -> None:
    (made,) = parse_pipeline(name)
    assert isinstance(made, Pass)
    assert made.name == name
    assert spell(made) == name


def test_options_are_read_and_spelled_back() -> None:
    text = "decompose{strategy=peer,transport=put,chunks=3,sites=[1,4]},schedule"
    first, second = parse_pipeline(text)
    assert first == Decompose("peer", "put", 3, (1, 4))
    assert ",".join(map(spell, (first, second))) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("decompos", "no pass named 'decompos'"),
        ("", "no pass in ''"),
        ("decompose{strategy=ring", "is no pipeline"),
        ("decompose}", "is no pipeline"),
        ("decompose{ring}", "no option 'ring'; known are: strategy, transport, chunks, sites"),
        ("decompose{machine=x}", "no option 'machine=x'"),
        ("schedule{a=1}", "no option 'a=1'"),
        ("decompose{strategy=rings}", "no strategy 'rings': one of auto, serial"),
        ("decompose{strategy=peer,transport=push}", "peer has get or put, and not transport=push"),
        ("decompose{chunks=-1}", "-1 chunks"),
        ("find_sites{},decompose{}x", "stand in braces"),
    ],
)
def test_what_is_wrong_is_an_error_that_says_what_is_known(text: str, message: str) -> None:
    with pytest.raises(PassError) as error:
        parse_pipeline(text)
    assert message in str(error.value)


def test_a_site_that_does_not_exist_is_an_error(seed: int) -> None:
    program = KINDS["matmul_all_reduce"](2, "even", "f32", seed).program
    with pytest.raises(PassError, match=r"no sites \[7\]; known are \[1\]"):
        run_pipeline(program, "find_sites,decompose{sites=[7]}")


def test_each_pass_is_shown_with_what_it_made(seed: int) -> None:
    program = KINDS["all_gather_matmul"](2, "even", "f32", seed).program
    seen: list[tuple[str, Program]] = []
    made = run_pipeline(
        program, "find_sites,schedule", on_pass=lambda item, after: seen.append((item.name, after))
    )
    assert [name for name, _ in seen] == ["find_sites", "schedule"]
    assert seen[-1][1] is made


def test_check_refuses_a_pipeline_that_leaves_out_the_events(seed: int) -> None:
    program = KINDS["all_gather_matmul"](2, "even", "f32", seed).program
    text = "find_sites,decompose{strategy=peer},schedule"
    with pytest.raises(SoundnessError):
        run_pipeline(program, text, check=True)
    run_pipeline(program, text + ",insert_sync", check=True)
