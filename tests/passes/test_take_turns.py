"""take_turns: puts into a peer come one after another, where it pays, and nothing else changes."""

from __future__ import annotations

import pytest

from interlace.ir import Expect, Notify, Program, Put, RankIndex, parse
from interlace.passes import run_pipeline, take_turns
from interlace.passes.strategies import pieces
from interlace.passes.take_turns import TakeTurns
from interlace.verify import check

LOWER = "find_sites,decompose{{strategy={}}},schedule,plan_memory,insert_sync"
PUTS = ("fused", "peer,protocol=put")


def puts(size: int, step: int, steps: int, awaited: str = "") -> Program:
    """Each rank puts into the same bytes of its peers: a race, unless something orders them."""
    peers = [f"tp.rank + {1 + step * i}" for i in range(steps)]
    sources = [f"tp.rank - {1 + step * i}" for i in range(steps)]
    lines = [
        f"def f(tp: Team[{size}], x: f32[64], y: out[f32[64]]):",
        '    site(1, "matmul_reduce_scatter", strategy="peer", protocol="put")',
        '    slot = alloc(f32[64], symmetric=tp, stream="comm")',
        "    comm: record(taken)",
    ]
    for peer in peers:
        for half in ("0:32", "32:64"):
            lines.append(f"    comm: put(x[{half}], slot[{half}], peer={peer}, site=1)")
        lines += [f"    comm: notify(came, to={peer}, site=1)", awaited]
    lines += ["    comm: record(sent)", "    main: wait(taken)"]
    lines += [f"    main: expect(came, {source}, site=1)" for source in sources]
    lines += ["    main: copy(slot, y)", "    main: wait(sent)", "    main: free(slot)"]
    return parse("\n".join(line for line in lines if line) + "\n")


def scatter(size: int, rows: int, kind: str = "reduce_scatter") -> Program:
    """A matmul, and the reduction of what it makes."""
    kept = rows if kind == "reduce_scatter" else size * rows
    return parse(f"""
def f(tp: Team[{size}], x: bf16[{size * rows}, 8], w: bf16[8, 64], y: out[bf16[{kept}, 64]]):
    t = empty(bf16[{size * rows}, 64])
    main: call("aten.mm.out", x, w, out=t)
    main: {kind}(t, y, reduce="sum", team=tp)
""")


def signals(program: Program, which: type[Notify] | type[Expect]) -> list[tuple[str, int]]:
    """The peers and values of what turns add."""
    return [
        (str(op.peer), op.value)
        for op in program.ops
        if isinstance(op, which) and op.signal.endswith("_turn")
    ]


@pytest.mark.parametrize(("size", "step", "steps"), [(3, 1, 2), (4, 1, 3), (5, 1, 4), (5, 2, 2)])
def test_ranks_that_take_turns_never_meet_at_a_peer(size: int, step: int, steps: int) -> None:
    """What all ranks put into the same bytes is in order then, and was not before."""
    before = puts(size, step, steps)
    assert {finding.kind for finding in check(before).findings} == {"race"}
    after = TakeTurns(least=1).run(before)
    check(after).raise_if_unsound()
    assert parse(str(after)) == after
    assert TakeTurns(least=1).run(after) == after
    kept = [op for op in after.ops if not getattr(op, "signal", "").endswith("_turn")]
    assert kept == list(before.ops)


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("fused", "reduce_scatter"),
        ("fused", "all_reduce"),
        ("peer,protocol=put", "reduce_scatter"),
    ],
)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sites_take_turns(size: int, kind: str, strategy: str) -> None:
    made = run_pipeline(
        scatter(size, 256, kind), LOWER.format(strategy) + ",take_turns{least=1},fuse"
    )
    check(made).raise_if_unsound()
    turns = range(1, size - 1)
    assert signals(made, Notify) == [("tp.rank - 1", value) for value in turns]
    assert signals(made, Expect) == [("tp.rank + 1", value) for value in turns]


@pytest.mark.parametrize("strategy", PUTS)
def test_small_puts_take_none(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank puts 256 rows of 128 bytes into each peer."""
    for least, turns in ((256 * 128, 2), (256 * 128 + 1, 0)):
        monkeypatch.setattr(take_turns, "TURN_BYTES", least)
        pipeline = LOWER.format(strategy) + ",take_turns"
        assert len(signals(run_pipeline(scatter(4, 256), pipeline), Expect)) == turns


@pytest.mark.parametrize("strategy", PUTS)
def test_pieces_travel_in_the_order_in_which_they_are_made(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each peer's rows all before the next one's, so that there are turns to take."""
    for name in ("BESIDE_BYTES", "PIECE_BYTES", "GROUP_ROWS"):
        monkeypatch.setattr(pieces, name, 1)
    made = run_pipeline(
        scatter(4, 512), LOWER.format(strategy) + ",take_turns{least=1}", check=True
    )
    peers = [str(op.peer) for op in made.ops if isinstance(op, Put)]
    assert peers == [f"tp.rank + {k}" for k in (1, 2, 3) for _ in range(4)]
    assert len(signals(made, Expect)) == 2


def test_uneven_rows_count_by_the_rank_that_puts_most() -> None:
    """All ranks decide alike: of 10 rows of 4 bytes rank 0, which keeps one, puts 9."""
    program = parse("""
def f(tp: Team[3], x: f32[10, 4], w: f32[4, 1], y: out[f32[rows[tp.rank], 1]]):
    rows = table(tp, 1, 4, 5)
    t = empty(f32[10, 1])
    main: call("aten.mm.out", x, w, out=t)
    main: reduce_scatter(t, y, reduce="sum", team=tp, splits=rows)
""")
    for least, turns in ((18, 1), (19, 0)):
        pipeline = LOWER.format("peer,protocol=put") + f",take_turns{{least={least}}}"
        made = run_pipeline(program, pipeline, check=True)
        assert len(signals(made, Expect)) == turns


@pytest.mark.parametrize("strategy", PUTS)
def test_a_gather_takes_none(strategy: str) -> None:
    program = parse("""
def f(tp: Team[4], x: bf16[8, 16], w: bf16[16, 8], y: out[bf16[32, 8]]):
    full = empty(bf16[32, 16])
    main: all_gather(x, full, team=tp)
    main: call("aten.mm.out", full, w, out=y)
""")
    made = run_pipeline(program, LOWER.format(strategy) + ",take_turns{least=1},fuse")
    assert not signals(made, Expect)


def test_where_turns_would_wait_for_more_there_are_none() -> None:
    """A stream that awaits peers itself, peers at no one step, and peers that are fixed ranks."""
    own = puts(4, 1, 3, "    comm: expect(other, tp.rank + 1, site=1)")
    odd = parse(str(puts(5, 1, 3)).replace("tp.rank + 3", "tp.rank + 4"))
    fixed = parse(str(puts(4, 1, 3)).replace("peer=tp.rank + 2", "peer=2"))
    for program in (own, odd, fixed):
        assert any(isinstance(op, Put) for op in program.ops)
        assert TakeTurns(least=1).run(program) == program
    assert isinstance(next(op for op in own.ops if isinstance(op, Put)).peer, RankIndex)
