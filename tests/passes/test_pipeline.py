"""Pipelines as text, which passes the options ask for, and Programs that are no serial ones."""

from __future__ import annotations

import pytest
from tests.passes.samples import KINDS

from interlace.errors import PassError, SoundnessError
from interlace.ir import parse
from interlace.options import Options, Regions
from interlace.passes import PASSES, Pass, lower, parse_pipeline, run_pipeline, spell
from interlace.passes.decompose import Decompose
from interlace.passes.pipeline import lowering


@pytest.mark.parametrize("name", PASSES)
def test_every_pass_is_found_by_name(name: str) -> None:
    (made,) = parse_pipeline(name)
    assert isinstance(made, Pass)
    assert made.name == name
    assert spell(made) == name


def test_options_are_read_and_spelled_back() -> None:
    text = "decompose{strategy=peer,protocol=put,chunks=3,sites=[1,4]},schedule"
    first, second = parse_pipeline(text)
    assert first == Decompose("peer", "put", 3, (1, 4))
    assert ",".join(map(spell, (first, second))) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("decompos", "no pass named 'decompos': did you mean 'decompose'? choose from find_sites"),
        ("", "no pass in ''"),
        ("decompose{strategy=ring", "is no pipeline"),
        ("decompose}", "is no pipeline"),
        ("decompose{ring}", "no option 'ring': choose from strategy, protocol, chunks, sites"),
        ("decompose{machine=x}", "no option 'machine=x'"),
        ("schedule{a=1}", "no option 'a=1'"),
        ("fuse{a=1}", "no option 'a=1': it has none"),
        ("decompose{chunk=2}", "no option 'chunk=2': did you mean 'chunks'?"),
        ("decompose{chunks=a}", "decompose: chunks=a: give a value of type int"),
        ("decompose{sites=1}", "decompose: sites=1: give a value of type tuple[int, ...] | None"),
        ("decompose{strategy=[ring]}", "decompose: strategy=[ring]: give a value of type str"),
        ("decompose{chunks=f(1)}", "'f(1)' is no value"),
        ("decompose{strategy=rings}", "'rings': did you mean 'ring'? choose from auto, serial"),
        ("place_resharding{position=befor}", "did you mean 'before'? choose from auto"),
        ("decompose{strategy=peer,protocol=push}", "peer has get or put, and not protocol=push"),
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


def test_check_refuses_a_pipeline_that_leaves_out_the_events(seed: int) -> None:
    program = KINDS["all_gather_matmul"](2, "even", "f32", seed).program
    text = "find_sites,decompose{strategy=peer},schedule"
    with pytest.raises(SoundnessError):
        run_pipeline(program, text, check=True)
    run_pipeline(program, text + ",insert_sync", check=True)


# which passes the options ask for, and Programs that are no serial ones


MESSAGES = """
def f(tp: Team[2], x: f32[4], y: out[f32[4]], w: f32[8, 4], z: out[f32[16, 4]]):
    main: recv(y, peer=tp.rank + 1)
    comm: send(x, peer=tp.rank + 1)
    main: all_gather(w, z, team=tp)
"""
"""On one stream both ranks would wait for the other's message."""


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("regions", ["auto", "eager", "inductor"])
def test_regions_are_formed_where_they_are_compiled(regions: Regions, overlap: bool) -> None:
    names = [item.name for item in lowering(Options(regions=regions, overlap=overlap))]
    assert ("form_regions" in names) == (regions == "inductor")
    assert names[0] == "find_sites"
    assert names[-1] == ("fuse" if overlap else "insert_sync")
    assert ("schedule" in names) == overlap


@pytest.mark.parametrize("overlap", [True, False])
def test_what_is_written_by_hand_is_left(overlap: bool) -> None:
    source = parse(MESSAGES)
    made = lower(source, Options(overlap=overlap))
    assert made.ops == source.ops
    (remark,) = made.remarks
    assert remark.text == "left as written: it has messages, signals or one-sided copies by hand"


def test_passes_refuse_peers_by_number() -> None:
    op = "notify(done, to=0)"
    program = parse(f"def f(tp: Team[2], x: f32[4], y: out[f32[4]]):\n    main: {op}\n")
    with pytest.raises(PassError, match="names a rank by number"):
        run_pipeline(program, "schedule")
