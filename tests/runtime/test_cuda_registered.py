"""Registered parameters on CUDA, without a GPU: what is issued, with which addresses, and when."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from tests.runtime.cuda_sites import runs_of
from tests.support.fake_cuda import Fake, fake_engine
from tests.support.fake_device import Entry, simulate
from tests.support.registered import REGISTERED, ROWS, TEXTS, K, N

from interlace.errors import ExecutorError
from interlace.ir import parse
from interlace.options import Options
from interlace.runtime.cuda.graphs.warm_up import warm_up

WORLD = 3
SHAPES = {"gather_matmul": (ROWS, K), "gather_put": (WORLD * ROWS, K), "update": (WORLD * ROWS, K)}
ROW = K * 4
"""Bytes of a row."""

pytestmark = pytest.mark.timeout(60)


def given_to(kind: str, mine: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The inputs and outputs of a run."""
    if kind == "gather_matmul":
        return [mine, torch.zeros(K, N)], [torch.zeros(WORLD * ROWS, N)]
    other = torch.ones(ROWS, K)
    return ([other], [mine]) if kind == "gather_put" else ([mine, other], [])


@contextlib.contextmanager
def engines(
    kind: str, in_order: bool = False, tensors: list[torch.Tensor] | None = None
) -> Iterator[tuple[list[Fake], list[torch.Tensor]]]:
    """An engine for each rank, and the registered tensor of each."""
    tensors = tensors or [torch.zeros(SHAPES[kind]) for _ in range(WORLD)]
    program = parse(TEXTS[kind](WORLD))
    with contextlib.ExitStack() as stack:
        facts: Any = {
            "options": Options(in_order=in_order),
            "registered": {REGISTERED[kind]: tensors},
        }
        made = [fake_engine(program, rank, **facts) for rank in range(WORLD)]
        fakes = [stack.enter_context(each) for each in made]
        yield fakes, tensors


def copies(fake: Fake) -> list[tuple[int, int, int]]:
    """Destination, source and bytes of every copy."""
    return [entry[2:] for entry in fake.log if entry[0] == "copy"]


def test_a_get_reads_the_peers_own_tensor() -> None:
    with engines("gather_matmul") as (fakes, tensors):
        fakes[1].run(*given_to("gather_matmul", tensors[1]))
        sources = {src: nbytes for _, src, nbytes in copies(fakes[1])}
        assert sources == {tensors[2].data_ptr(): ROWS * ROW, tensors[0].data_ptr(): ROWS * ROW}


def test_a_put_writes_the_peers_own_tensor() -> None:
    with engines("gather_put") as (fakes, tensors):
        inputs, outputs = given_to("gather_put", tensors[1])
        fakes[1].run(inputs, outputs)
        (x,), skip = inputs, 1 * ROWS * ROW
        wanted = {(t.data_ptr() + skip, x.data_ptr(), ROWS * ROW) for t in tensors}
        assert set(copies(fakes[1])) == wanted, "into all three, at this rank's rows"


def test_a_put_out_of_a_registered_input_and_into_the_same() -> None:
    with engines("update") as (fakes, tensors):
        fakes[2].run(*given_to("update", tensors[2]))
        skip = 2 * ROWS * ROW
        wanted = {
            (tensors[peer].data_ptr() + skip, tensors[2].data_ptr() + skip, ROWS * ROW)
            for peer in (0, 1)
        }
        assert set(copies(fakes[2])) == wanted
        assert tensors[2][2 * ROWS :].eq(1).all(), "the call is done in place"


@pytest.mark.parametrize("in_order", [False, True], ids=["overlapped", "in-order"])
@pytest.mark.parametrize("kind", TEXTS)
def test_peers_touch_it_only_in_its_ranks_own_run(kind: str, in_order: bool, seed: int) -> None:
    """Simulated, with ranks and streams far apart: what rank r does in run n to memory of rank p
    comes after p has ended run n - 1, and before it has ended run n."""
    with engines(kind, in_order=in_order) as (fakes, tensors):
        pairs = zip(fakes, tensors, strict=True)
        logs = [runs_of(fake, *given_to(kind, mine), 5) for fake, mine in pairs]
        seen: list[int] = []

        def look(rank: int, run: int, entry: Entry, over: Callable[[int], int]) -> None:
            touched = entry[2:4] if entry[0] == "copy" else ()
            for peer, theirs in enumerate(tensors):
                start, end = theirs.data_ptr(), theirs.data_ptr() + theirs.numel() * 4
                if peer != rank and any(start <= address < end for address in touched):
                    seen.append(run)
                    assert over(peer) == run - 1

        for number in range(5):
            assert not simulate(logs, random.Random(seed + number), look)
        assert len(seen) == 5 * 5 * WORLD * (WORLD - 1)


def test_another_tensor_is_refused_before_anything_is_issued() -> None:
    with engines("gather_put") as (fakes, tensors):
        inputs, outputs = given_to("gather_put", tensors[0])
        fakes[0].run(inputs, outputs)
        with pytest.raises(ExecutorError, match=r"output 0 \('y'\) of gather_put is registered"):
            fakes[0].run(inputs, [outputs[0].clone()])
        assert not fakes[0].log
        fakes[0].run(inputs, None)  # the registered one is filled in
        assert any(dst == tensors[0].data_ptr() for dst, _, _ in copies(fakes[0]))


def test_the_run_before_a_capture_leaves_what_is_registered_as_it_was() -> None:
    with engines("update") as (fakes, tensors):
        tensors[0].fill_(5.0)
        ran: list[torch.Tensor] = []

        def note() -> None:
            ran.append(tensors[0].clone())

        settled = mock.patch.object(fakes[0].engine, "synchronize", side_effect=note)
        with settled, mock.patch.object(torch.cuda, "current_stream"):
            warm_up(fakes[0].engine, [])
        assert len(copies(fakes[0])) == WORLD - 1, "it ran"
        (mine,) = ran
        assert mine[:ROWS].eq(5.0).all(), "what is added is zero"
        assert tensors[0].eq(5.0).all()


@pytest.mark.parametrize("where", ["uses", "synchronize"])
def test_a_run_before_a_capture_that_fails_leaves_it_as_it_was_too(where: str) -> None:
    with engines("update") as (fakes, tensors):
        tensors[0].fill_(5.0).requires_grad_()  # as a Parameter is
        engine = fakes[0].engine

        def fail() -> None:
            with torch.no_grad():
                tensors[0][0, 0] = 1.0
            raise ExecutorError("as planned")

        stopped = mock.patch.object(engine, where, side_effect=fail)
        settled = mock.patch.object(engine.watched, "settle")
        with stopped, settled as settle, mock.patch.object(torch.cuda, "current_stream") as stream:
            with pytest.raises(ExecutorError, match="as planned"):
                warm_up(fakes[0].engine, [])
            settle.assert_called_once()
            stream.return_value.synchronize.assert_called_once()
        assert tensors[0].eq(5.0).all()
        assert not fakes[0].engine.warm


def test_nobody_waits_for_a_run_before_a_capture_that_never_ends() -> None:
    with engines("update") as (fakes, _):
        engine = fakes[0].engine
        stopped = mock.patch.object(engine, "synchronize", side_effect=ExecutorError("as planned"))
        settled = mock.patch.object(engine.watched, "settle")
        ended = mock.patch.object(engine.driver, "done", return_value=False)
        stream = mock.patch.object(torch.cuda, "current_stream")
        with stopped, settled, ended, stream as current:
            with pytest.raises(ExecutorError, match="as planned"):
                warm_up(fakes[0].engine, [])
            current.return_value.synchronize.assert_not_called()


def test_autograd_sees_that_a_run_wrote_what_is_registered() -> None:
    with engines("gather_put") as (fakes, tensors):
        inputs, outputs = given_to("gather_put", tensors[0])
        scale = torch.ones((), requires_grad=True)
        fakes[0].run(inputs, outputs)
        product = scale * tensors[0]
        fakes[0].run(inputs, outputs)  # in a GPU's memory, which torch does not see written
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
        known = tensors[0]._version
        with pytest.raises(ExecutorError):
            fakes[0].run(inputs, [outputs[0].clone()])
        assert tensors[0]._version == known, "nothing was issued"
    with engines("gather_matmul") as (fakes, tensors):
        known = tensors[0]._version
        fakes[0].run(*given_to("gather_matmul", tensors[0]))
        assert tensors[0]._version == known, "it is read alone"


def test_what_is_registered_may_be_a_tensor_of_inference() -> None:
    with torch.inference_mode(), engines("update") as (fakes, tensors):
        pass
    assert tensors[0].is_inference()
    with engines("update", tensors=tensors) as (fakes, _):
        fakes[0].run(*given_to("update", tensors[0]))
        with mock.patch.object(torch.cuda, "current_stream"):
            warm_up(fakes[0].engine, [])
        assert tensors[0][:ROWS].eq(1).all()
