"""A new op: its dataclass is all that the text, the builder, the checks and the passes need.

Beside it an op has a case in the cost model and one in each binder (on hosts and on GPUs), which
refuse an op that they do not know. So does the exhaustive oracle, which shares nothing with them.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest
from tests.fuzzing.oracle import explore

import interlace
from interlace.cost import default_machine, graph, simulate
from interlace.cost.op_times import Cost
from interlace.errors import ParseError, ProgramError, UnsupportedError
from interlace.ir import Index, Op, View, in_order, map_views, parse, validate
from interlace.ir.build import Builder
from interlace.ir.roles import ROLES, Role, form_of, op_words, steps
from interlace.ir.types import NAME, TEAM, written
from interlace.passes.insert_sync import InsertSync
from interlace.passes.plan_memory import PlanMemory
from interlace.verify import check


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerScale(Op):
    """`src` of a peer, scaled, into `dst`."""

    src: View = field(metadata=written(access="read", of_peer=True))
    dst: View | None = field(default=None, metadata=written(positional=True, access="write"))
    peer: Index
    team: str = field(metadata=TEAM)
    by: float | None = None
    label: str = field(default="none", metadata=NAME)
    exact: bool = False


TEXT = """
def f(tp: Team[2], x: f32[4], y: out[f32[4]]):
    full = alloc(f32[4], symmetric=tp)
    main: OP
"""


def test_a_new_op_needs_its_dataclass_alone() -> None:
    with interlace.program("f", team=2) as p:
        y = (p.input("x", "f32", (4,)), p.output("y", "f32", (4,)))[1]
        full = p.alloc("full", "f32", (4,), symmetric=p.tp)
        p.add(PeerScale, src=full, dst=y, peer=p.tp.rank + 1, by=2.5, label="odd name")
        p.add(PeerScale, src=full, peer=1, exact=True)
    lines = str(p.program).splitlines()
    assert lines[2:] == [
        '    main: peer_scale(full, y, peer=tp.rank + 1, by=2.5, label="odd name")',
        "    main: peer_scale(full, peer=1, team=tp, exact=True)",
    ]
    assert parse(str(p.program)) == p.program
    concrete = p.program.instantiate(1)
    assert "peer_scale(full, y, peer=0, team=tp, by=2.5" in str(concrete)
    assert parse(str(concrete)) == concrete
    moved = map_views(p.program.ops[1], lambda view: View(f"new_{view.buffer}"))
    assert isinstance(moved, PeerScale)
    assert (moved.src, moved.dst) == (View("new_full"), View("new_y"))


@pytest.mark.parametrize(
    ("op", "told"),
    [
        ("peer_scale(full, y)", "peer_scale(...) lacks 'peer'"),
        ("peer_scal(full, y, peer=1)", "did you mean 'peer_scale'?"),
        ("peer_scale(full, y, tp.rank)", "takes 2 positional arguments"),
        ("peer_scale(full, y, peer=1, exact=1)", "exact is a flag"),
        ("peer_scale(full, y, peer=2)", "peer 2 of team 'tp' does not exist"),
        ("peer_scale(full, y, peer=1, team=dp)", "no team is named 'dp'"),
        ("peer_scale(x, y, peer=1)", "peers of 'tp' cannot reach it"),
        ("peer_scale(full, y[0:5], peer=1)", "y[0:5] does not exist"),
        ("peer_scale(full, y[0:1].expand(4), peer=1)", "its elements overlap"),
    ],
)
def test_its_mistakes_are_told(op: str, told: str) -> None:
    with pytest.raises((ParseError, ProgramError)) as raised:
        validate(parse(TEXT.replace("OP", op)))
    assert told in str(raised.value)


WAITS = """
def f(tp: Team[2], x: f32[4], y: out[f32[4]]):
    full = alloc(f32[4], symmetric=tp)
    main: copy(x, full)
    main: notify(ready, to=tp.others)
    main: expect(ready, tp.rank + 1)
    main: peer_scale(full, y, peer=tp.rank + 1)
    main: notify(done, to=tp.others)
    main: expect(done, tp.rank + 1)
    main: free(full)
"""


def test_the_verifier_reads_what_it_reads_and_writes() -> None:
    assert check(parse(WAITS)).sound
    early = check(parse(WAITS.replace("    main: expect(ready, tp.rank + 1)\n", "")))
    assert early.kinds() == {"race"}
    (race,) = [finding for finding in early.errors if finding.kind == "race"]
    assert any("reads full of rank" in op.role for op in race.ops if "peer_scale" in op.text)
    assert race.fixed
    with pytest.raises(UnsupportedError, match="the oracle knows no op PeerScale"):
        explore(parse(WAITS), runs=1)


def test_passes_order_it_and_keep_its_buffers() -> None:
    bare = parse(
        "def f(tp: Team[2], x: f32[4], y: out[f32[4]]):\n"
        "    a = alloc(f32[4])\n    full = alloc(f32[4], symmetric=tp)\n"
        "    main: copy(x, full)\n    main: barrier(team=tp)\n"
        "    comm: peer_scale(full, a, peer=tp.rank + 1)\n"
        "    main: copy(a, y)\n    main: barrier(team=tp)\n"
    )
    assert in_order(bare.ops) == [(index, 0) for index in range(len(bare.ops))]
    planned = InsertSync().run(PlanMemory().run(bare))
    words = [line.split("(")[0].strip() for line in str(planned).splitlines()[1:]]
    scale = words.index("comm: peer_scale")
    assert "comm: wait" in words[:scale]
    assert "comm: record" in words[scale:]
    assert check(planned).sound


def test_the_simulator_asks_for_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = default_machine("cuda").replace(issue=())
    with pytest.raises(UnsupportedError, match="the cost model knows no op PeerScale"):
        simulate(parse(WAITS), machine)
    known = graph.op_cost

    def cost_of_all(op: Op, *given: Any) -> Cost:
        return Cost(work_s=1.0) if isinstance(op, PeerScale) else known(op, *given)

    monkeypatch.setattr(graph, "op_cost", cost_of_all)
    assert simulate(parse(WAITS), machine).makespan_s >= 1.0


def test_a_field_without_a_role_is_an_error() -> None:
    @dataclass(frozen=True)
    class Odd:
        speed: complex

    with pytest.raises(TypeError, match=r"Odd\.speed has no role: give its type complex one"):
        form_of(Odd)


@pytest.mark.parametrize("role", dict.fromkeys(ROLES.values()), ids=lambda it: type(it).__name__)
def test_a_role_is_read_as_it_is_written(role: Role) -> None:
    """A role of one value has `read`, one of several arguments writes and reads the whole field."""
    whole = type(role).read_field is not Role.read_field
    assert whole or type(role).read is not Role.read
    assert type(role).__doc__ != Role.__doc__


def test_words_of_ops_and_steps() -> None:
    assert {"copy", "all_gather", "host_sync"} <= set(op_words())
    assert set(steps()) == {
        *("chunk", "slice", "select", "permute", "view", "expand", "cast", "as_strided"),
    }


@pytest.mark.parametrize("word", op_words())
def test_the_builder_states_a_method_for_each_op(word: str) -> None:
    """The stated signature of a generated method has the arguments of the op, in their order."""
    if word == "peer_scale":
        return
    method, form = getattr(Builder, word), op_words()[word]
    assert method.__doc__, word
    if not hasattr(method, "__wrapped__"):  # written by hand
        return
    _, *stated = inspect.signature(method).parameters.values()
    named = [each.name for each in stated if each.kind is not each.VAR_KEYWORD]
    known = [*form.signature.positional, *form.signature.keywords]
    assert [name for name in known if name in named] == named
    required = [each.name for each in stated if each.default is each.empty]
    assert {*form.signature.required} <= {*required}
