"""The interpreter itself: what it computes, and that it shows faults rather than hides them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.interpreter import Deadlock, LifetimeFault, run_ranks

from interlace.ir import (
    Alloc,
    Buffer,
    Call,
    Collective,
    Copy,
    DType,
    Expect,
    Free,
    Get,
    Group,
    Notify,
    Op,
    Program,
    Put,
    RankIndex,
    Record,
    Recv,
    Send,
    Team,
    View,
    Wait,
)

TP = Team("tp", 3)
X = Buffer("x", DType.f32, (2, 2), "input")
FULL = Buffer("full", DType.f32, (6, 2), "fresh")
SLOT = Buffer("slot", DType.f32, (6, 2), "symmetric", "tp")


def program(*ops: Op, **fields: Any) -> Program:
    fields.setdefault("results", (View("full"),))
    return Program(teams=(TP,), params=(X,), ops=ops, **fields)


def inputs() -> list[list[torch.Tensor]]:
    return [[torch.arange(4.0).view(2, 2) + 10 * rank] for rank in range(3)]


def gathered() -> torch.Tensor:
    return torch.cat([x for (x,) in inputs()])


ME, NEXT, PREVIOUS = RankIndex("tp"), RankIndex("tp", 1), RankIndex("tp", -1)


def mine(name: str, index: RankIndex = ME) -> View:
    return View(name).chunk(index, 3)


def test_a_collective_gathers_in_team_order() -> None:
    ops = (
        Alloc(buffer=FULL),
        Collective(kind="all_gather", team="tp", src=View("x"), dst=View("full")),
    )
    for (result,) in run_ranks(program(*ops), inputs()):
        assert torch.equal(result, gathered())


def test_a_ring_of_sends_gathers(seed: int) -> None:
    ops: list[Op] = [Alloc(buffer=FULL), Copy(src=View("x"), dst=mine("full"))]
    for k in range(2):
        send = Send(src=mine("full", ME - k), peer=NEXT, team="tp")
        recv = Recv(dst=mine("full", ME - k - 1), peer=PREVIOUS, team="tp")
        ops.append(Group(ops=(send, recv), stream="comm"))
    events = [Record(event="e"), Wait(event="e", stream="comm")]
    for (result,) in run_ranks(program(*ops[:2], *events, *ops[2:]), inputs(), seed=seed):
        assert torch.equal(result, gathered())


def test_sends_outside_a_group_deadlock() -> None:
    ops = (
        Alloc(buffer=FULL),
        Send(src=View("x"), peer=NEXT, team="tp"),
        Recv(dst=mine("full"), peer=PREVIOUS, team="tp"),
    )
    with pytest.raises(Deadlock, match="rank 2"):
        run_ranks(program(*ops), inputs())


def peer_gather(notify: bool = True) -> Program:
    ops: list[Op] = [Alloc(buffer=SLOT), Copy(src=View("x"), dst=mine("slot"))]
    if notify:
        ops.append(Notify(signal="ready", peer=TP.others, team="tp"))
    for k in (1, 2):
        if notify:
            ops.append(Expect(signal="ready", peer=ME + k, team="tp"))
        ops.append(Get(src=mine("slot", ME + k), peer=ME + k, team="tp"))
    ops += [Alloc(buffer=FULL), Copy(src=View("slot"), dst=View("full")), Free(buffer="slot")]
    return program(*ops)


@pytest.mark.parametrize("runs", [1, 4])
def test_peers_get_what_was_announced(seed: int, runs: int) -> None:
    for (result,) in run_ranks(peer_gather(), inputs(), seed=seed, runs=runs):
        assert torch.equal(result, gathered())


def test_an_unannounced_get_reads_poison_in_some_interleaving() -> None:
    def bad(seed: int) -> bool:
        results = run_ranks(peer_gather(notify=False), inputs(), seed=seed)
        return any(result.isnan().any() for (result,) in results)

    assert any(bad(seed) for seed in range(50))


def test_puts_arrive(seed: int) -> None:
    ops: list[Op] = [Alloc(buffer=SLOT)]
    for k in (0, 1, 2):
        ops.append(Put(src=View("x"), dst=mine("slot"), peer=ME + k, team="tp"))
    ops += [Notify(signal="put", peer=TP.others, team="tp")]
    ops += [Expect(signal="put", peer=TP.others, team="tp"), Alloc(buffer=FULL)]
    ops += [Copy(src=View("slot"), dst=View("full")), Free(buffer="slot")]
    for (result,) in run_ranks(program(*ops), inputs(), seed=seed, runs=3):
        assert torch.equal(result, gathered())


def test_use_after_free_is_a_fault() -> None:
    local = Buffer("t", DType.f32, (2, 2))
    ops = (Alloc(buffer=local), Free(buffer="t"), Copy(src=View("x"), dst=View("t")))
    with pytest.raises(LifetimeFault, match="t after its free"):
        run_ranks(program(*ops, results=()), inputs())


def test_unordered_streams_read_poison_in_some_interleaving_and_never_in_order() -> None:
    local = Buffer("t", DType.f32, (2, 2))
    twice = Call(
        fn="aten.add.Tensor",
        args=(View("t"), View("t")),
        fresh=(Buffer("y", DType.f32, (2, 2), "fresh"),),
        stream="side",
    )
    made = program(
        Alloc(buffer=local), Copy(src=View("x"), dst=View("t")), twice, results=(View("y"),)
    )
    for (result,), (x,) in zip(run_ranks(made, inputs(), in_order=True), inputs(), strict=True):
        assert torch.equal(result, x + x)
    seen = [run_ranks(made, inputs(), seed=seed)[0][0] for seed in range(40)]
    assert any(result.isnan().all() for result in seen)
    assert any(torch.equal(result, inputs()[0][0] * 2) for result in seen)
