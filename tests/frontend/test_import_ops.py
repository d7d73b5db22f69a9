"""Every kind of node that the import knows: the Program gives what the graph gives, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.frontend.tracing import agrees, graphs, imported

from interlace.errors import UnsupportedError
from interlace.frontend import import_graph
from interlace.ir import Call, parse, print_program, validate


def t(*sizes: int, seed: int = 0, grad: bool = True) -> torch.Tensor:
    """A reproducible leaf tensor."""
    generator = torch.Generator().manual_seed(seed + sum(sizes))
    return torch.randn(*sizes, generator=generator).requires_grad_(grad)


def index(*values: int) -> torch.Tensor:
    """Positions."""
    return torch.tensor(values)


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "view": (lambda x: x.view(4, 6).view(2, 12) * 2, (t(4, 6),)),
    "reshape_that_copies": (lambda x: x.t().reshape(3, 8) + 1, (t(4, 6),)),
    "transpose": (lambda x: x.transpose(0, 2).relu(), (t(2, 3, 4),)),
    "permute_twice": (lambda x: x.permute(2, 0, 1).permute(1, 2, 0) * 3, (t(2, 3, 4),)),
    "expand": (lambda x: x.unsqueeze(1).expand(3, 5, 4) * 2, (t(3, 4),)),
    "squeeze": (lambda x: x.squeeze(1) + x.squeeze(), (t(3, 1, 4),)),
    "slice": (lambda x: x[1:3, -2:] * 2, (t(4, 6),)),
    "slice_with_step": (lambda x: x[::2] * 2, (t(5, 3),)),
    "select": (lambda x: x[-1] * x[:, 2].sum(), (t(4, 6),)),
    "split": (lambda x: torch.cat([p * i for i, p in enumerate(x.split(2, 1))]), (t(4, 6),)),
    "split_uneven": (lambda x: [p * 2 for p in x.split([1, 3, 2], 0)], (t(6, 2),)),
    "chunk_and_unbind": (
        lambda x: [p.t() + q for p in x.chunk(2) for q in x.unbind(1)[:1]],
        (t(2, 2),),
    ),
    "cat_of_neighbours": (lambda x: torch.cat(x[None].split(2, 1), 0) * 2, (t(4, 3),)),
    "cat_apart": (lambda x, y: torch.cat([x, y, x], 1), (t(2, 3), t(2, 4))),
    "as_strided": (lambda x: torch.as_strided(x * 2, (2, 2), (4, 1), 1) + 1, (t(4, 4),)),
    "diagonal": (lambda x: x.diagonal() * 2, (t(4, 4),)),
    "unfold": (lambda x: x.unfold(0, 3, 1) * 2, (t(6),)),
    "clone_returned": (lambda x: (x.clone(), x.detach().clone()), (t(3, 3),)),
    "cast": (lambda x: x.to(torch.bfloat16).float() + x.double(), (t(3, 5),)),
    "view_dtype": (lambda x: x.detach().view(torch.int32) + 1, (t(3, 5),)),
    "complex": (
        lambda x, y: torch.view_as_real(torch.view_as_complex(x) * torch.view_as_complex(y)),
        (t(3, 2), t(3, 2, seed=1)),
    ),
    "conj": (lambda x: torch.view_as_real(torch.view_as_complex(x).conj() * 2), (t(3, 2),)),
    "linear": (F.linear, (t(5, 4), t(3, 4))),
    "linear_bias": (F.linear, (t(5, 4), t(3, 4), t(3))),
    "linear_3d": (F.linear, (t(2, 5, 4), t(3, 4), t(3))),
    "matmul_3d": (torch.matmul, (t(2, 5, 4), t(4, 3))),
    "matmul_batched": (torch.matmul, (t(2, 5, 4), t(2, 4, 3))),
    "bmm_shared": (lambda x, w: torch.bmm(x, w.expand(2, 4, 3)), (t(2, 5, 4), t(4, 3))),
    "addmm_scaled": (lambda b, x, w: torch.addmm(b, x, w, beta=0.5), (t(3), t(5, 4), t(4, 3))),
    "einsum": (lambda x, w: torch.einsum("bik,kj->bij", x, w), (t(2, 3, 4), t(4, 5))),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), (t(4, 6), t(6), t(6, seed=3))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w), (t(4, 6), t(6))),
    "softmax_masked": (
        lambda x: x.masked_fill(torch.ones(4, 4).triu(1).bool(), -torch.inf).softmax(-1),
        (t(4, 4),),
    ),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (t(1, 2, 4, 8), t(1, 2, 4, 8, seed=1), t(1, 2, 4, 8, seed=2)),
    ),
    "cross_entropy": (lambda x: F.cross_entropy(x, torch.arange(4)), (t(4, 7),)),
    "embedding": (lambda w: F.embedding(torch.tensor([[1, 2], [0, 2]]), w), (t(5, 3),)),
    "topk": (lambda x: torch.topk(x, 2).values, (t(3, 5),)),
    "max_with_index": (lambda x: x.max(1).values, (t(3, 5),)),
    "sort": (lambda x: x.sort(0).values, (t(4, 3),)),
    "arange_and_full": (lambda x: x + torch.arange(3) + torch.full((3,), 2.0), (t(2, 3),)),
    "constant": (lambda x: x * torch.tensor([1.0, 2.0, 3.0]), (t(2, 3),)),
    "constant_0d": (lambda x: x * torch.tensor(3.0), (t(2, 3),)),
    "index": (lambda x: x[index(2, 0, 1)] * x[:, index(1, 1)].sum(), (t(3, 2),)),
    "index_put": (lambda x: (x * 1).index_put((index(0, 2),), torch.ones(2, 2)), (t(3, 2),)),
    "scatter_add": (
        lambda x: torch.zeros(3, 2).scatter_add(0, index(0, 2)[:, None], x),
        (t(2, 1),),
    ),
    "pad": (lambda x: F.pad(x, (0, 1, 1, 0)) * 2, (t(2, 3),)),
    "where_and_clamp": (lambda x: torch.where(x > 0, x.clamp(max=1), x * 0.1), (t(4, 4),)),
    "convolution": (lambda x, w: F.conv1d(x, w), (t(1, 2, 8), t(3, 2, 3))),
    "batch_norm": (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        (t(4, 3), t(3), t(3, seed=1)),
    ),
    "empty_tensor": (lambda x: torch.cat([x, x[:0]]) * 2, (t(3, 2),)),
    "no_rows": (lambda x, w: F.linear(x, w).relu(), (t(0, 4), t(3, 4))),
    "scalar_result": (lambda x: (x.sum(), x.mean() * 2), (t(3, 3),)),
    "none_and_view_results": (lambda x: (x.t(), (x * 2).t(), x * 2), (t(3, 4),)),
    "dropout": (lambda x: F.dropout(x, 0.4) * 2, (t(16, 16),)),
    "bernoulli": (lambda x: torch.rand_like(x) * torch.randn(4) + x, (t(3, 4),)),
    "attention_dropout": (
        lambda q, k: F.scaled_dot_product_attention(q, k, q, dropout_p=0.3),
        (t(1, 1, 4, 8), t(1, 1, 4, 8, seed=1)),
    ),
}

RESPELT = ("einsum", "attention_dropout", "bmm_shared")
"""Cases with a `bmm` that becomes `mm`, whose sums round in another order."""


@pytest.mark.parametrize("name", CASES)
def test_program_agrees_with_graph(name: str) -> None:
    fn, args = CASES[name]
    found = graphs(fn, *(arg.detach().clone().requires_grad_(arg.requires_grad) for arg in args))
    assert found
    for graph in found:
        mine = imported(graph)
        validate(mine.program)
        assert parse(print_program(mine.program)) == mine.program
        agrees(graph, mine, exact=name not in RESPELT)


@pytest.mark.parametrize(
    ("name", "fns"),
    {
        "linear": ["aten.mm.default"],
        "linear_bias": ["aten.addmm.default"],
        "linear_3d": ["aten.addmm.default"],
        "matmul_3d": ["aten.mm.default"],
        "bmm_shared": ["aten.mm.default"],
        "cat_of_neighbours": ["aten.mul.Tensor"],
        "permute_twice": ["aten.mul.Tensor"],
    }.items(),
)
def test_one_spelling(name: str, fns: list[str]) -> None:
    fn, args = CASES[name]
    forward = graphs(fn, *(arg.detach().clone().requires_grad_() for arg in args))[0]
    program = import_graph(forward.gm).program
    assert [op.fn for op in program.ops if isinstance(op, Call)] == fns


def test_random_ops_are_marked() -> None:
    forward = graphs(*_flat("dropout"))[0]
    calls = [op for op in import_graph(forward.gm).program.ops if isinstance(op, Call)]
    drawing = [op.fn for op in calls if op.rng]
    assert drawing
    assert all("bernoulli" in fn or "rand" in fn or "dropout" in fn for fn in drawing)


def test_attention_without_dropout_draws_nothing() -> None:
    forward = graphs(*_flat("attention"))[0]
    calls = [op for op in import_graph(forward.gm).program.ops if isinstance(op, Call)]
    assert any("attention" in op.fn for op in calls)
    assert not any(op.rng for op in calls)


def _flat(name: str) -> tuple[Any, ...]:
    fn, args = CASES[name]
    return fn, *(arg.detach().clone().requires_grad_() for arg in args)


def test_unknown_element_type_is_refused_by_name() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(lambda x: x.to(torch.float8_e4m3fnuz), tracing_mode="fake")(torch.ones(3))
    with pytest.raises(UnsupportedError, match="float8_e4m3fnuz"):
        import_graph(gm)
