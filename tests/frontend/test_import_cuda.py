"""Graphs of a GPU, traced on fake tensors: no GPU is needed to import them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.frontend.tracing import run
from torch._prims import rng_prims
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from interlace.errors import UnsupportedError
from interlace.frontend import Imported, Teams, import_graph
from interlace.frontend.importing.types import device_of
from interlace.ir import Call, Copy, Permute

GPU = "cuda:0"


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    """Makes fake tensors; on CUDA too."""
    with FakeTensorMode() as mode:
        yield mode


def imported(fn: Callable[..., Any], *args: torch.Tensor) -> Imported:
    """`fn` as a serial Program; nothing runs."""
    return import_graph(make_fx(fn)(*args), teams=Teams.of({}))


def calls(imported: Imported) -> list[Call]:
    return [op for op in imported.program.ops if isinstance(op, Call)]


def tensor(*sizes: int) -> torch.Tensor:
    return torch.empty(sizes, dtype=torch.bfloat16, device=GPU)


def test_the_one_device_of_a_graph(mode: FakeTensorMode) -> None:
    x, scalar = torch.empty(2, device="cuda:1"), torch.empty(())
    assert device_of([scalar, x, 3, None]) == "cuda:1"
    assert device_of([scalar]) == "cpu"
    with pytest.raises(UnsupportedError, match="cuda:0 and cuda:1: a compiled function runs on"):
        device_of([x, torch.empty(2, device=GPU)])


@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["no-dropout", "dropout"])
@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_attention(mode: FakeTensorMode, kind: str, dropout: float) -> None:
    """Several results, some None or numbers, one of no elements, and a generator's state."""
    aten = torch.ops.aten

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        if kind == "flash":
            return aten._scaled_dot_product_flash_attention(q, k, v, dropout, True)
        op = getattr(aten, f"_scaled_dot_product_{kind}_attention")
        return op(q, k, v, None, True, dropout, True)

    def backward(dy: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        if kind == "efficient":
            y, lse, seed, offset = forward(q, k, v)
            fn, mask = aten._scaled_dot_product_efficient_attention_backward, [True] * 3 + [False]
            return fn(dy, q, k, v, None, y, lse, seed, offset, dropout, mask, True)
        y, lse, cq, ck, mq, mk, seed, offset, _ = forward(q, k, v)
        if kind == "flash":
            fn = aten._scaled_dot_product_flash_attention_backward
            return fn(dy, q, k, v, y, lse, cq, ck, mq, mk, dropout, True, seed, offset)
        fn = aten._scaled_dot_product_cudnn_attention_backward
        return fn(dy, q, k, v, y, lse, seed, offset, None, cq, ck, mq, mk, dropout, True)

    found = imported(backward, *(tensor(1, 8, 128, 64) for _ in range(4)))
    first, second = (op for op in calls(found) if "attention" in op.fn)
    assert first.rng == (dropout > 0)
    shapes = [buffer.shape for buffer in first.fresh]
    assert shapes[0] == (1, 8, 128, 64)
    assert ((0,) in shapes) == (kind == "flash"), "the mask for debugging, of no elements"
    assert [buffer.shape for buffer in second.fresh] == [(1, 8, 128, 64)] * 3
    assert found.host == frozenset(), "tracing has every result on the GPU"


def test_a_cpu_scalar_among_cuda_tensors(mode: FakeTensorMode) -> None:
    found = imported(lambda x, s: x * s + s, tensor(4, 8), torch.empty(()))
    (name,) = found.host
    assert name in {buffer.name for buffer in found.program.params}


def test_what_goes_to_the_cpu_stays_there(mode: FakeTensorMode) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x.sum().cpu() + 1).clone()

    found = imported(fn, tensor(4))
    result = found.program.returned()[0]
    assert result.buffer in found.host  # pyright: ignore
    assert not any(isinstance(op, Copy) for op in found.program.ops)


def test_an_update_of_a_cpu_tensor_is_torchs_own_copy(mode: FakeTensorMode) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.ops.aten.copy_.default(x, y)

    found = imported(fn, torch.empty(4), tensor(4))
    (op,) = calls(found)
    assert (op.fn, op.mutates) == ("aten.copy_.default", True)


def test_a_collective_of_a_cpu_tensor_is_refused(mode: FakeTensorMode) -> None:
    def fn(x: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = torch.ops._c10d_functional.all_reduce.default(count, "sum", "g")
        return x * 2, torch.ops._c10d_functional.wait_tensor.default(total)

    gm = make_fx(fn)(torch.empty(4, device=GPU), torch.empty(3))
    with pytest.raises(UnsupportedError, match=r"is on the CPU.*graph on cuda: move it"):
        import_graph(gm, teams=Teams.of({"g": ("tp", ((0, 1),))}))


def test_a_mask_is_applied_without_counting_it(mode: FakeTensorMode) -> None:
    def fn(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        zero = torch.zeros((), dtype=x.dtype, device=x.device)
        return torch.ops.aten.index_put.default(x, [mask], zero)

    mask = torch.empty(2, 4, dtype=torch.bool, device=GPU)
    names = [op.fn for op in calls(imported(fn, tensor(2, 4, 8), mask))]
    assert names[-1] == "aten.where.self"
    assert not any("index_put" in name for name in names)


def test_weights_are_transposed_views(mode: FakeTensorMode) -> None:
    found = imported(lambda w, x: torch.tanh(x @ w.t()) @ w, tensor(16, 8), tensor(4, 8))
    assert [op.fn for op in calls(found)] == [f"aten.{n}.default" for n in ("mm", "tanh", "mm")]
    steps = [view.steps for op in calls(found) for view in op.views()]
    assert (Permute((1, 0)),) in steps


def test_dropout_that_is_done_again_saves_a_state_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, mode: FakeTensorMode
) -> None:
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: torch.zeros(16, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *_: None)
    hops, dropout = rng_prims, torch.ops.aten.native_dropout.default

    def fn(x: torch.Tensor) -> Any:
        state, (y, _) = hops.run_and_save_rng_state(dropout, x, 0.5, True)
        return y, hops.run_with_rng_state(state, dropout, x, 0.5, True)[0], state

    found = imported(fn, tensor(4, 8))
    names = [op.fn.removeprefix("interlace.").removeprefix("aten.") for op in calls(found)]
    save, restore, draw = (
        f"{name}.default" for name in ("get_rng_state", "set_rng_state", "native_dropout")
    )
    assert names == [save, draw, save, restore, draw, restore]
    states = {b.name for op in calls(found) if "get_rng" in op.fn for b in op.fresh}
    assert states == found.host
    assert all(op.rng for op in calls(found))


@pytest.mark.parametrize("shape", [(2,), (2, 3), (3,)], ids=["rows", "both", "columns"])
def test_a_masked_update_gives_the_bits_of_index_put(shape: tuple[int, ...], seed: int) -> None:
    torch.manual_seed(seed)
    x, mask = torch.randn(2, 3, 4), torch.rand(shape) < 0.5
    indices = [None, mask] if shape == (3,) else [mask]

    def fn(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        given = [None, mask] if shape == (3,) else [mask]
        return torch.ops.aten.index_put.default(x, given, torch.tensor(-2.5))

    graph = make_fx(fn)(x, mask)
    found = import_graph(graph, teams=Teams.of({}))
    assert "aten.where.self" in [op.fn for op in calls(found)]
    (result,) = run(found, [x, mask])
    assert torch.equal(result, torch.ops.aten.index_put.default(x, indices, torch.tensor(-2.5)))


def test_a_fake_state_is_not_set() -> None:
    before, mode = torch.get_rng_state(), FakeTensorMode()
    with mode:
        state = torch.empty(before.shape, dtype=torch.uint8)
    with mode, pytest.raises(RuntimeError, match="set_rng_state"):
        torch.ops.interlace.set_rng_state(state, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
