"""Sends, receipts and Groups: a rendezvous each, and no member of a Group blocks another."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.runtime.programs import executor_of, inputs_of
from tests.support.interpreter import run_ranks
from tests.support.pool import Pool

from interlace.ir import Op, Program, parse, parse_set
from interlace.options import Backend
from interlace.runtime import Executor
from interlace.runtime.prepare.plan import message_backend

BACKENDS = ["gloo", "peer"]

# Rank 0's send must go on before its recv can: rank 2 sends only after it heard from rank 1.
CHAIN = """
def start(tp: Team[[0, 1, 2]], x: f32[4]):
    ranks(0)
    y = empty(f32[4])
    main: group(recv(y, peer=2), send(x, peer=1))
    return y


def middle(tp: Team[[0, 1, 2]], x: f32[4]):
    ranks(1)
    y = empty(f32[4])
    main: recv(y, peer=0, team=tp)
    main: send(y, peer=2, team=tp)
    return y


def last(tp: Team[[0, 1, 2]], x: f32[4]):
    ranks(2)
    y = empty(f32[4])
    main: recv(y, peer=1, team=tp)
    main: send(y, peer=0, team=tp)
    return y
"""

# Two messages of one pair whose streams run in the opposite order, of strided and of empty views.
CROSSED = """
def crossed(tp: Team[2], x: f32[3, 4]):
    a = empty(f32[4, 3])
    b = empty(f32[3, 2])
    none = empty(f32[0, 4])
    main: group(send(x.permute(1, 0), peer=tp.rank + 1), recv(a, peer=tp.rank + 1))
    side: group(recv(b, peer=tp.rank + 1), send(x.slice(1, 1, 3), peer=tp.rank + 1))
    main: group(send(x.slice(0, 3, 3), peer=tp.rank + 1), recv(none, peer=tp.rank + 1))
    return a, b, none
"""

# From a rank to itself, of a strided view.
OWN = """
def own(tp: Team[2], x: f32[4, 3]):
    y = empty(f32[3, 4])
    main: group(recv(y, peer=tp.rank), send(x.permute(1, 0), peer=tp.rank))
    return y
"""

SYNCED = """
def synced(x: f32[4]):
    t = alloc(f32[4])
    y = empty(f32[4])
    side: copy(x, t)
    side: host_sync()
    main: call("aten.mul.out", t, t, out=y)
    return y
"""


def own_program(text: str) -> Program:
    programs = parse_set(text)
    return next(program for program in programs if dist.get_rank() in program.world)


def run(text: str, backend: Backend, seed: int) -> tuple[torch.Tensor, ...]:
    program = own_program(text)
    with executor_of(program, transport=backend, timeout_s=10.0).prepare() as executor:
        for turn in range(20):
            found = executor.run(inputs_of(program, dist.get_rank(), seed + turn))
        return found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("text", "world"), [(CHAIN, 3), (CROSSED, 2), (OWN, 2)], ids=["chain", "crossed", "own"]
)
def test_messages_arrive(pool: Pool, text: str, world: int, backend: str, seed: int) -> None:
    programs = parse_set(text)
    owner = {rank: program for program in programs for rank in program.world}
    inputs = [inputs_of(owner[rank], rank, seed + 19) for rank in range(world)]
    results = pool(world).run(run, text, backend, seed)
    for got, wanted in zip(results, run_ranks(programs, inputs, in_order=True), strict=True):
        for one, other in zip(got, wanted, strict=True):
            assert isinstance(other, torch.Tensor)
            assert torch.equal(one, other)


def test_ops_listed_after_a_host_sync_wait_for_it() -> None:
    import time

    def before(rank: int, index: int, op: Op) -> None:
        if op.stream == "side":
            time.sleep(0.02)

    with Executor(parse(SYNCED), before_op=before).prepare() as executor:
        for turn in range(5):
            x = torch.full((4,), float(turn))
            assert torch.equal(executor.run([x])[0], x * x)


def test_messages_go_by_nccl_or_gloo() -> None:
    """Of what UCC has under way, nothing can be told that nobody waits any longer."""
    ways = {name: message_backend(name) for name in ("gloo", "nccl", "ucc", "peer")}
    assert ways == {"gloo": "gloo", "nccl": "nccl", "ucc": "gloo", "peer": "gloo"}
