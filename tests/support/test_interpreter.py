"""The interpreter itself: what it computes, and that it shows faults rather than hides them."""

from __future__ import annotations

import pytest
import torch
from tests.support.interpreter import Deadlock, LifetimeFault, run_ranks

from interlace.ir import Program, parse


def program(*lines: str) -> Program:
    body = "\n".join(f"    {line}" for line in lines)
    return parse(f"def f(tp: Team[3], x: f32[2, 2]):\n{body}\n")


def inputs() -> list[list[torch.Tensor]]:
    return [[torch.arange(4.0).view(2, 2) + 10 * rank] for rank in range(3)]


def gathered() -> torch.Tensor:
    return torch.cat([x for (x,) in inputs()])


FULL, RETURN = "full = empty(f32[6, 2])", "return full"
SLOT = "slot = alloc(f32[6, 2], symmetric=tp)"
TAKEN = (FULL, "main: copy(slot, full)", "main: free(slot)", RETURN)


def test_sends_outside_a_group_deadlock() -> None:
    ops = "main: send(x, peer=tp.rank + 1)", "main: recv(full[tp.rank], peer=tp.rank - 1)"
    with pytest.raises(Deadlock, match="rank 2"):
        run_ranks(program(FULL, *ops, RETURN), inputs())


def peer_gather(notify: bool = True) -> Program:
    ops = [SLOT, "main: copy(x, slot[tp.rank])", *["main: notify(ready, to=tp.others)"] * notify]
    for peer in ("tp.rank + 1", "tp.rank + 2"):
        ops += [f"main: expect(ready, {peer})"] * notify
        ops.append(f"main: get(slot[{peer}], peer={peer})")
    return program(*ops, *TAKEN)


@pytest.mark.parametrize("runs", [1, 4])
def test_peers_get_what_was_announced(seed: int, runs: int) -> None:
    for (result,) in run_ranks(peer_gather(), inputs(), seed=seed, runs=runs):
        assert torch.equal(result, gathered())


def test_an_unannounced_get_reads_poison_in_some_interleaving() -> None:
    def bad(seed: int) -> bool:
        results = run_ranks(peer_gather(notify=False), inputs(), seed=seed)
        return any(result.isnan().any() for (result,) in results)

    assert any(bad(seed) for seed in range(50))


def test_use_after_free_is_a_fault() -> None:
    made = program("t = alloc(f32[2, 2])", "main: free(t)", "main: copy(x, t)")
    with pytest.raises(LifetimeFault, match="t after its free"):
        run_ranks(made, inputs())


def test_unordered_streams_read_poison_in_some_interleaving_and_never_in_order() -> None:
    made = program(
        "t = alloc(f32[2, 2])",
        "main: copy(x, t)",
        'side: call("aten.add.Tensor", t, t, out=(y := f32[2, 2]))',
        "return y",
    )
    for (result,), (x,) in zip(run_ranks(made, inputs(), in_order=True), inputs(), strict=True):
        assert torch.equal(result, x + x)
    seen = [run_ranks(made, inputs(), seed=seed)[0][0] for seed in range(40)]
    assert any(result.isnan().all() for result in seen)
    assert any(torch.equal(result, inputs()[0][0] * 2) for result in seen)
