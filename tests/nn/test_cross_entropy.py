"""The cross-entropy on one rank, against fp64: values, gradients, and what it must not do."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.nn.cross_entropy_cases import LAYOUTS, Case, arbitrary, far, laid_out, reference

from interlace.errors import (
    InputError,
    InterlaceError,
    OptionError,
    TargetError,
    UnsupportedError,
)
from interlace.nn import CrossEntropyLoss
from interlace.nn.cross_entropy.loss import Reduction
from interlace.nn.functional import cross_entropy, linear_cross_entropy, raise_pending


def verify(case: Case) -> None:
    """Loss and gradient, twice; the inputs are left as they were."""
    x, y, weight, up = case.draw()
    x = laid_out(x, case.layout).requires_grad_()
    before, version = x.detach().clone(), x._version
    loss = cross_entropy(x, y, weight, **case.options())
    assert loss.dtype == (torch.float64 if case.dtype == torch.float64 else torch.float32)
    wanted, gradient, room, slack = reference(case)
    assert not (wrong := far(loss, wanted, room)), (wrong, case)
    up = up.to(loss.dtype)
    loss.backward(up, retain_graph=True)
    assert x.grad is not None
    first = x.grad.clone()
    assert first.dtype == case.dtype
    assert not (wrong := far(first, gradient, slack)), (wrong, case)
    x.grad = None
    loss.backward(up)
    assert x.grad is not None
    assert torch.equal(x.grad.nan_to_num(nan=9.0), first.nan_to_num(nan=9.0)), "a second backward"
    assert torch.equal(x.detach(), before)
    assert x._version == version
    if case.bad:
        with pytest.raises(TargetError):
            raise_pending()


GRID = list(itertools.product(
    [torch.bfloat16, torch.float16, torch.float32, torch.float64],
    LAYOUTS,
    ["none", "mean", "sum"],
    [0.0, 0.1],
))  # fmt: skip


@pytest.mark.parametrize(("dtype", "layout", "reduction", "smoothing"), GRID)
def test_grid(dtype: torch.dtype, layout: str, reduction: str, smoothing: float, seed: int) -> None:
    for weighted in (False, True):
        verify(Case(seed=seed, dtype=dtype, layout=layout, reduction=reduction,
                    smoothing=smoothing, weighted=weighted))  # fmt: skip


def test_arbitrary(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(150):
        verify(arbitrary(draw, sizes=(draw.choice([1, 2, 37, 256]),)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 3])
def test_128256_classes(dtype: torch.dtype, rows: int, seed: int) -> None:
    for smoothing in (0.0, 0.1):
        verify(Case(seed=seed, batch=(rows,), sizes=(128256,), dtype=dtype, ignored=0.0,
                    smoothing=smoothing, z_loss=1e-4))  # fmt: skip


def test_large_logits_cost_no_bits(seed: int) -> None:
    """All logits near 10,000: the loss is of their differences."""
    for smoothing in (0.0, 0.1):
        verify(Case(seed=seed, sizes=(501,), smoothing=smoothing, offset=10_000.0))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", [(0, 7), (2, 0, 7)])
def test_no_rows(reduction: Reduction, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    loss = cross_entropy(x, torch.zeros(shape[:-1], dtype=torch.int64), reduction=reduction)
    wanted = {"none": (), "mean": math.nan, "sum": 0.0}[reduction]
    if reduction == "none":
        assert loss.shape == shape[:-1]
    else:
        assert loss.item() == pytest.approx(wanted, nan_ok=True)
    loss.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == shape


def test_nothing_counts() -> None:
    """As torch: the mean of no row is NaN, and no gradient is."""
    x = torch.randn(3, 5, requires_grad=True)
    loss = cross_entropy(x, torch.full((3,), -100))
    assert loss.isnan()
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.zeros(3, 5))


def test_ignored_rows_stay_clean() -> None:
    """NaN and infinity in a row that does not count go nowhere; in others, as in torch."""
    x = torch.randn(5, 8)
    x[0], x[1, 3], x[2], x[3, 2] = torch.nan, torch.nan, -torch.inf, torch.inf
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = torch.tensor([-100, 3, 4, 2, 1])
    loss = cross_entropy(ours, y, reduction="none")
    wanted = F.cross_entropy(theirs, y, reduction="none")
    assert torch.equal(loss.isnan(), wanted.isnan())
    loss.sum().backward()
    wanted.sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad[0], torch.zeros(8))
    assert torch.equal(ours.grad[1:].isnan(), theirs.grad[1:].isnan())


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_masked_logits(smoothing: float) -> None:
    """-inf: no probability; as a target, an infinite loss and a finite gradient."""
    x = torch.randn(3, 8)
    x[:, 4:] = -torch.inf
    ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    y = torch.tensor([1, 6, 2])
    loss = cross_entropy(ours, y, reduction="none", label_smoothing=smoothing)
    wanted = F.cross_entropy(theirs, y, reduction="none", label_smoothing=smoothing)
    loss.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-6, atol=1e-6)
    assert ours.grad is not None
    assert theirs.grad is not None
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-6, atol=1e-6)


def test_faults_known_elsewhere(seed: int) -> None:
    """First rows ignored, a scaled loss, sliced logits and labels, gradients of any strides."""
    torch.manual_seed(seed)
    whole, labels = torch.randn(3, 6, 11), torch.randint(0, 11, (3, 6))
    labels[0, :3] = -100
    ours = whole.clone().requires_grad_()
    theirs = whole.double().requires_grad_()
    loss = cross_entropy(ours[:, :-1], labels[:, 1:], reduction="none")
    wanted = F.cross_entropy(theirs[:, :-1].mT, labels[:, 1:], reduction="none")
    up = torch.randn(5, 3).t()
    (3.0 * loss).transpose(0, 1).contiguous().backward(up.t(), retain_graph=True)
    (3.0 * wanted).transpose(0, 1).contiguous().backward(up.t().double(), retain_graph=True)
    loss.backward(up, retain_graph=True)
    wanted.backward(up.double(), retain_graph=True)
    loss.sum().backward()  # its gradient is one number, expanded
    wanted.sum().backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["int", "float", "tensor", "int tensor"])
def test_denominator(kind: str) -> None:
    x, y = torch.randn(4, 9, requires_grad=True), torch.tensor([1, -100, 3, 8])
    by = {"int": 6, "float": 6.0, "tensor": torch.tensor(6.0), "int tensor": torch.tensor([6])}[
        kind
    ]
    total = cross_entropy(x, y, reduction="sum").detach()
    for reduction in ("mean", "sum"):
        loss = cross_entropy(x, y, reduction=reduction, denominator=by)
        assert loss.shape == ()
        assert loss.item() == pytest.approx(total.item() / 6, rel=1e-6)
    loss.backward()
    counted = cross_entropy(x.detach().requires_grad_(), y)
    assert counted.item() == pytest.approx(total.item() / 3, rel=1e-6)


def test_a_target_that_is_no_class() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    y = torch.tensor([1, 5, -100])
    loss = cross_entropy(x, y, reduction="none")
    assert loss.isnan().tolist() == [False, True, False]
    loss.sum().backward()
    assert x.grad is not None
    assert x.grad.isnan().all(1).tolist() == [False, True, False]
    assert not x.grad[[0, 2]].isnan().any()
    with pytest.raises(TargetError, match="row 1 is 5, where there are classes 0 to 4") as caught:
        cross_entropy(x, torch.tensor([0, 0, 0]))
    assert isinstance(caught.value, InterlaceError)
    assert isinstance(caught.value, IndexError)
    assert cross_entropy(x, torch.tensor([0, 0, 0])).isfinite(), "it is told once"
    raise_pending()
    assert cross_entropy(x, torch.tensor([1, 5, 2]), ignore_index=5).isfinite()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"target": torch.zeros(5, dtype=torch.int64)}, "logits are (4, 9)"),
        ({"target": torch.zeros(4)}, "take int64 or int32"),
        ({"logits": torch.zeros(4, 9, dtype=torch.int32)}, "logits are torch.int32"),
        ({"logits": torch.zeros(4, 9, dtype=torch.complex64)}, "logits are torch.complex64"),
        ({"weight": torch.ones(8)}, "weight is (8,)"),
        ({"weight": torch.ones(9, requires_grad=True)}, "detach"),
        ({"reduction": "median"}, "reduction is 'median'"),
        ({"label_smoothing": 1.5}, "label_smoothing is 1.5"),
        ({"denominator": 3, "reduction": "none"}, "a denominator divides the sum"),
        ({"denominator": torch.ones(2)}, "denominator is (2,)"),
        ({"group": "tp"}, "`group` is 'tp'"),
    ],
)
def test_what_does_not_fit(change: dict, told: str) -> None:
    given: dict[str, Any] = {
        "logits": torch.zeros(4, 9),
        "target": torch.zeros(4, dtype=torch.int64),
    } | change
    with pytest.raises(InputError) as caught:
        cross_entropy(**given)
    assert told in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_a_removed_option_is_refused_with_its_replacement() -> None:
    x, y = torch.zeros(4, 9), torch.zeros(4, dtype=torch.int64)
    calls = (
        lambda: cross_entropy(x, y, shard_sizes=[9]),
        lambda: cross_entropy(x, y, check_targets=True),
        lambda: cross_entropy(x, y, softcap=30.0),
        lambda: linear_cross_entropy(x, x, y, shard_sizes=[9]),
        lambda: CrossEntropyLoss(shard_sizes=[9]),
    )
    for call in calls:
        with pytest.raises(
            OptionError, match=r"is no option of .* fix: (leave it out|call raise|give cross)"
        ):
            call()


def test_a_second_derivative_is_an_error() -> None:
    x = torch.randn(2, 5, requires_grad=True)
    (grad,) = torch.autograd.grad(cross_entropy(x, torch.tensor([0, 1])), x, create_graph=True)
    assert torch.equal(grad, torch.autograd.grad(cross_entropy(x, torch.tensor([0, 1])), x)[0])
    with pytest.raises(UnsupportedError, match="differentiated again"):
        grad.sum().backward()


def test_a_target_written_to_is_an_error() -> None:
    x, y = torch.randn(2, 5, requires_grad=True), torch.tensor([0, 1])
    loss = cross_entropy(x, y)
    y.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_loss_can_be_written_to() -> None:
    """What is returned is nothing that backward needs."""
    x = torch.randn(3, 5, requires_grad=True)
    for reduction in ("none", "mean"):
        loss = cross_entropy(x, torch.tensor([0, 1, 2]), reduction=reduction)
        loss.mul_(2.0).sum().backward()


@pytest.mark.parametrize(
    "option",
    [
        {"ignore_index": None},
        {"ignore_index": -100.0},
        {"denominator": "a"},
        {"denominator": [2.0]},
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(option: dict[str, Any]) -> None:
    y = torch.tensor([0, 1])
    with pytest.raises(InputError, match=next(iter(option))):
        cross_entropy(torch.randn(2, 5), y, **option)
    with pytest.raises(InputError, match=next(iter(option))):
        linear_cross_entropy(torch.randn(2, 3), torch.randn(5, 3), y, **option)


def test_in_torch_compile() -> None:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return cross_entropy(x * 2.0, y, label_smoothing=0.1) * 3.0

    x, y = torch.randn(4, 9), torch.tensor([1, 2, -100, 4])
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.compile(step, backend="eager")(ours, y).backward()
    step(theirs, y).backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert torch.equal(ours.grad, theirs.grad)


def test_module() -> None:
    weight = torch.rand(9)
    loss = CrossEntropyLoss(weight, label_smoothing=0.1, z_loss=0.01, ignore_index=3)
    x, y = torch.randn(4, 9), torch.tensor([1, 2, 3, 4])
    options = {"label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": 3}
    assert torch.equal(loss(x, y), cross_entropy(x, y, weight, **options))
    given = cross_entropy(x, y, weight, denominator=5.0, **options)
    assert torch.equal(loss(x, y, denominator=5.0), given)
    assert "weight" in loss.state_dict()
    assert repr(loss).endswith("(ignore_index=3, label_smoothing=0.1, z_loss=0.01)")
    assert loss.options["reduction"] == "mean", "options have their defaults"
    with pytest.raises(TypeError, match="'chunk_size'"):
        CrossEntropyLoss(**{"chunk_size": 3})  # type: ignore[arg-type]
