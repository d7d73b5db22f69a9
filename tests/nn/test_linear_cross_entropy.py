"""The cross-entropy of a linear layer in chunks, on one rank and over a cut vocabulary."""

from __future__ import annotations

import itertools
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.support.pool import Pool
from torch.utils._python_dispatch import TorchDispatchMode

from interlace.errors import InputError, TargetError, UnsupportedError
from interlace.nn import LinearCrossEntropyLoss
from interlace.nn.cross_entropy import linear_loss
from interlace.nn.cross_entropy.chunks import Chunks
from interlace.nn.cross_entropy.linear_loss import default_size
from interlace.nn.cross_entropy.loss import Reduction
from interlace.nn.functional import cross_entropy, linear_cross_entropy, raise_pending

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def drawn(seed: int, rows: int, inner: int, classes: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """hidden, weight, bias, target and class weights."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, inner, generator=generator).to(dtype)
    weight = (torch.randn(classes, inner, generator=generator) * inner**-0.5).to(dtype)
    bias = torch.randn(classes, generator=generator).to(dtype)
    target = torch.randint(0, classes, (rows,), generator=generator)
    target[torch.rand(rows, generator=generator) < 0.2] = -100
    return hidden, weight, bias, target, torch.rand(classes, generator=generator) + 0.5


def leaves(*tensors: torch.Tensor | None) -> tuple[Any, ...]:
    return tuple(None if t is None else t.detach().clone().requires_grad_() for t in tensors)


def unfused(
    parts: Parts, target: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What torch computes, in fp64; the logits; what probabilities add to their gradient."""
    hidden, weight, bias = parts
    logits = t = F.linear(hidden, weight, bias)
    logits.retain_grad()
    z_loss = options.pop("z_loss", 0.0)
    by, reduction = options.pop("denominator", None), options.pop("reduction")
    class_weight = options.pop("class_weight", None)
    class_weight = None if class_weight is None else class_weight.double()
    rows = F.cross_entropy(t, target, class_weight, reduction="none", **options)
    lse = t.logsumexp(-1)
    rows = rows + z_loss * lse**2 * (target != -100)
    largest = (1.5 + 2 * z_loss * lse.abs()) * (target != -100)  # class weights are under 1.5
    largest = (torch.softmax(t, -1) * largest[:, None]).detach()
    if reduction == "none":
        return rows, logits, largest
    if reduction == "mean" and by is None:
        counted = target != -100
        by = counted.sum()
        if class_weight is not None:
            by = (class_weight[target.clamp(min=0)] * counted).sum()
    by = 1.0 if by is None else by
    return rows.sum() / by, logits, largest / by


def rooms(
    parts: Parts, logits: torch.Tensor, p: torch.Tensor, dtype: torch.dtype, more: int
) -> tuple[torch.Tensor, ...]:
    """How far off each element of the gradients may be.

    Each is a sum of products with elements of the logits' gradient, off by the rounding of the
    logits (which moves probabilities by twice the largest logit's) and of itself; `more` roundings
    of partial sums of that type, and a few of the result.
    """
    assert logits.grad is not None
    size = logits.detach().abs().amax(-1, keepdim=True)
    unit = torch.finfo(dtype).eps / 2
    terms = logits.grad.abs() * (6 + 4 * size + more) + p * (2 + 4 * size)
    terms = unit * terms + torch.finfo(dtype).smallest_normal * unit
    if dtype != torch.float64:  # what is computed in float32
        terms = terms + 2.0**-24 * 16 * (p + logits.grad.abs())
    hidden, weight = parts[0].detach().abs(), parts[1].detach().abs()
    return terms @ weight, terms.t() @ hidden, terms.sum(0)


def compare(found: Parts, wanted: Parts, room: tuple[torch.Tensor, ...]) -> list[str]:
    """What is off by more than it may be."""
    wrong = []
    for name, a, b, allowed in zip(("hidden", "weight", "bias"), found, wanted, room, strict=True):
        if a is None or b is None:
            continue
        error = (a.double() - b).abs()
        if bool((error > allowed).any()) or bool(a.isnan().any()):
            wrong.append(f"{name}: {(error / allowed).max():.3g} times what is allowed")
    return wrong


def options_of(draw: random.Random, reduction: Reduction) -> dict[str, Any]:
    found: dict[str, Any] = {
        "reduction": reduction,
        "label_smoothing": draw.choice([0.0, 0.1]),
        "z_loss": draw.choice([0.0, 0.01]),
    }
    if reduction != "none":
        found["denominator"] = draw.choice([None, 7.5])
    return found


def check(seed: int, dtype: torch.dtype, reduction: Reduction, chunk: int | None) -> None:
    draw = random.Random(seed)
    hidden, weight, bias, target, class_weight = drawn(seed, 23, 16, 41, dtype)
    bias = bias if draw.random() < 0.5 else None
    options = options_of(draw, reduction)
    if draw.random() < 0.5:
        options["class_weight"] = class_weight
    parts, exact = leaves(hidden, weight, bias), leaves(
        hidden.double(), weight.double(), None if bias is None else bias.double()
    )  # fmt: skip
    accumulate = draw.choice([None, dtype])
    loss = linear_cross_entropy(
        parts[0], parts[1], target, parts[2],
        chunk_size=chunk, accumulate_dtype=accumulate, **options,
    )  # fmt: skip
    wanted, logits, p = unfused(exact, target, **options)
    eps = max(torch.finfo(dtype).eps, 2.0**-22) * 8
    torch.testing.assert_close(loss.double(), wanted, rtol=eps, atol=eps)
    up = torch.randn(loss.shape, generator=torch.Generator().manual_seed(seed))
    wanted.backward(up.double())
    more = 23 if accumulate == dtype else 0  # a rounding a chunk
    room = rooms(exact, logits, p * up.abs().view(-1, 1), dtype, more)
    for _ in range(2):
        for part in parts:
            if part is not None:
                part.grad = None
        loss.backward(up.to(loss.dtype), retain_graph=True)
        grads = tuple(None if p is None else p.grad for p in parts)
        theirs = tuple(None if p is None else p.grad for p in exact)
        assert all(grad is None or grad.dtype == dtype for grad in grads)
        wrong = compare(grads, theirs, room)  # pyright: ignore[reportArgumentType]
        assert not wrong, (wrong, options, accumulate, bias)


@pytest.mark.parametrize("chunk", [None, 1, 5, 23, 100])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str
)
def test_as_unfused(dtype: torch.dtype, reduction: Reduction, chunk: int | None, seed: int) -> None:
    for number in range(3):
        check(seed + number, dtype, reduction, chunk)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_one_chunk_has_the_bits_of_the_unfused(
    dtype: torch.dtype, reduction: Reduction, seed: int
) -> None:
    """What the loss is divided by is known before: the gradients are rounded in the same places."""
    hidden, weight, bias, target, _ = drawn(seed, 23, 16, 41, dtype)
    fused, plain = leaves(hidden, weight, bias), leaves(hidden, weight, bias)
    for denominator in (None, 7.5, torch.tensor(3.0)):
        options: dict[str, Any] = {"reduction": reduction, "denominator": denominator}
        loss = linear_cross_entropy(fused[0], fused[1], target, fused[2], chunk_size=23, **options)
        logits = torch.addmm(plain[2], plain[0], plain[1].t())
        wanted = cross_entropy(logits, target, **options)
        assert torch.equal(loss, wanted)
        grads = torch.autograd.grad(loss, fused)
        expected = torch.autograd.grad(wanted, plain)
        assert [torch.equal(a, b) for a, b in zip(grads[:2], expected, strict=False)] == [True] * 2


@pytest.mark.parametrize("frozen", list(itertools.product([True, False], repeat=3)), ids=str)
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_frozen_parts_have_no_gradient(
    frozen: tuple[bool, ...], reduction: Reduction, seed: int
) -> None:
    hidden, weight, bias, target, _ = drawn(seed, 9, 8, 11, torch.float32)
    every, some = leaves(hidden, weight, bias), leaves(hidden, weight, bias)
    for part, is_frozen in zip(some, frozen, strict=True):
        part.requires_grad_(not is_frozen)
    losses = [
        linear_cross_entropy(h, w, target, b, reduction=reduction, chunk_size=4)
        for h, w, b in (every, some)
    ]
    assert torch.equal(*losses)
    losses[0].sum().backward()
    if all(frozen):
        assert not losses[1].requires_grad
        return
    losses[1].sum().backward()
    for a, b, is_frozen in zip(every, some, frozen, strict=True):
        assert (b.grad is None) if is_frozen else torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_no_rows(reduction: Reduction) -> None:
    parts = leaves(torch.randn(0, 4), torch.randn(6, 4))
    target = torch.zeros(0, dtype=torch.int64)
    loss = linear_cross_entropy(parts[0], parts[1], target, reduction=reduction)
    assert loss.shape == ((0,) if reduction == "none" else ())
    loss.sum().backward()
    assert [p.grad.shape for p in parts] == [(0, 4), (6, 4)]
    assert not parts[1].grad.any()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_nothing_counts(reduction: Reduction, seed: int) -> None:
    """As unfused: the mean of no row is NaN, and no gradient is."""
    hidden, weight, bias, target, _ = drawn(seed, 9, 8, 11, torch.float32)
    parts = leaves(hidden, weight, bias)
    loss = linear_cross_entropy(
        parts[0], parts[1], target.fill_(-100), parts[2], reduction=reduction, chunk_size=4
    )
    assert bool(loss.isnan().all()) == (reduction == "mean")
    loss.sum().backward()
    assert all(torch.equal(part.grad, torch.zeros_like(part)) for part in parts)


def test_no_gradient_is_computed_for_nobody(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    hidden, weight, bias, target, _ = drawn(seed, 9, 8, 11, torch.float32)
    parts, wanted = leaves(hidden, weight, bias), []
    real = Chunks.forward
    monkeypatch.setattr(
        Chunks, "forward", lambda self, *args: (wanted.append(args[1]), real(self, *args))[1]
    )
    with torch.no_grad():
        loss = linear_cross_entropy(parts[0], parts[1], target, parts[2])
    assert torch.equal(loss, linear_cross_entropy(parts[0], parts[1], target, parts[2]))
    assert [grads is None for grads in wanted] == [True, False]


def chunks_of_uneven_classes() -> float:
    """How far the loss of 10 classes on one rank and 3 on the other is from that of all, where each
    rank's own classes would have chunks of its own."""
    generator = torch.Generator().manual_seed(7)
    sizes, rank = (10, 3), dist.get_rank()
    hidden, weight = (torch.randn(n, 4, generator=generator) for n in (2800, 13))
    target = torch.randint(0, 13, (2800,), generator=generator)
    whole, own = cross_entropy(hidden @ weight.t(), target), weight.split(sizes)[rank]
    with mock.patch.object(linear_loss, "AT_ONCE", 2560):
        assert default_size(2800, sizes[0]) != default_size(2800, sizes[1])
        loss = linear_cross_entropy(hidden, own, target, group=dist.group.WORLD)
    return (loss - whole).abs().item()


def test_ranks_with_uneven_classes_have_chunks_alike(pool: Pool) -> None:
    assert max(pool(2).run(chunks_of_uneven_classes)) < 1e-5


def test_float16_sums_do_not_overflow() -> None:
    """A frequent class in many rows: only divided by their number is its gradient a float16."""
    hidden, target = torch.full((2048, 4), 100.0).half(), torch.zeros(2048, dtype=torch.int64)
    parts = leaves(torch.zeros(6, 4).half(), torch.zeros(6).half())
    linear_cross_entropy(hidden, parts[0], target, parts[1], chunk_size=512).backward()
    p = torch.tensor([1 / 6 - 1, *[1 / 6] * 5])
    torch.testing.assert_close(parts[0].grad.float(), 100 * p[:, None].expand(6, 4), rtol=2e-3,
                               atol=0.0)  # fmt: skip
    torch.testing.assert_close(parts[1].grad.float(), p, rtol=2e-3, atol=0.0)


def test_hidden_of_more_dimensions_and_autocast(seed: int) -> None:
    hidden, weight, bias, target, _ = drawn(seed, 12, 8, 11, torch.float32)
    parts = leaves(hidden.view(3, 4, 8), weight, bias)
    loss = linear_cross_entropy(parts[0][:, :-1], parts[1], target.view(3, 4)[:, 1:], parts[2],
                                reduction="none")  # fmt: skip
    assert loss.shape == (3, 3)
    rows = hidden.view(3, 4, 8)[:, :-1].reshape(-1, 8)
    wanted = cross_entropy(
        F.linear(rows, weight, bias), target.view(3, 4)[:, 1:].reshape(-1), reduction="none"
    )
    torch.testing.assert_close(loss.reshape(-1), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(parts[0], parts[1], target.view(3, 4))
    loss.backward()
    assert parts[1].grad.dtype == torch.float32
    same = linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), target)
    assert torch.equal(loss, same)
    with torch.autocast("cpu", torch.bfloat16):  # which leaves float64 as it is
        loss = linear_cross_entropy(hidden.double(), weight.double(), target)
    assert torch.equal(loss, linear_cross_entropy(hidden.double(), weight.double(), target))


def test_errors() -> None:
    hidden, weight, target = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 5, 1])
    with pytest.raises(InputError, match="take one type"):
        linear_cross_entropy(hidden.bfloat16(), weight, target)
    with pytest.raises(InputError, match=r"the weight is \(classes, in\)"):
        linear_cross_entropy(hidden, weight.t(), target)
    with pytest.raises(InputError, match="targets are"):
        linear_cross_entropy(hidden, weight, target[:2])
    with pytest.raises(InputError, match="one for each class"):
        linear_cross_entropy(hidden, weight, target, torch.zeros(4))
    with pytest.raises(InputError, match="there are 5 classes"):
        linear_cross_entropy(hidden, weight, target, class_weight=torch.ones(4))
    with pytest.raises(InputError, match="chunk_size is 0"):
        linear_cross_entropy(hidden, weight, target, chunk_size=0)
    assert linear_cross_entropy(hidden, weight, target, chunk_size=2).isnan()
    with pytest.raises(TargetError, match="row 1 is 5, where there are classes 0 to 4"):
        raise_pending()
    assert linear_cross_entropy(hidden, weight, target, chunk_size=1).isnan()
    with pytest.raises(TargetError, match="row 1 is 5"):  # of all rows, not of its chunk
        raise_pending()
    weight.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, target.clamp(max=4))
    (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(UnsupportedError, match="differentiated again"):
        grad.sum().backward()


def test_module() -> None:
    hidden, weight, target = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([0, 4, 1])
    loss = LinearCrossEntropyLoss(label_smoothing=0.1, chunk_size=2)
    wanted = linear_cross_entropy(hidden, weight, target, label_smoothing=0.1, chunk_size=2)
    assert torch.equal(loss(hidden, weight, target), wanted)


def test_chunks_are_small_and_gemms_are_not() -> None:
    assert default_size(8192, 128256) == 1152
    assert default_size(100, 128256) == 256
    assert default_size(1 << 14, 128256) == 1536
    assert default_size(1 << 20, 128256) == 1536
    assert default_size(1 << 20, 32000) == 6144
    assert default_size(8, 0) >= 1


class Largest(TorchDispatchMode):
    """The largest tensor that an operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.untyped_storage().nbytes() // tensor.itemsize)
        return out


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_logits_are_never_whole(reduction: Reduction, seed: int) -> None:
    rows, inner, classes, chunk = 256, 8, 512, 32
    hidden, weight, _, target, _ = drawn(seed, rows, inner, classes, torch.float32)
    parts = leaves(hidden, weight)
    with Largest() as largest:
        loss = linear_cross_entropy(
            parts[0], parts[1], target, reduction=reduction, chunk_size=chunk
        )
        loss.sum().backward()
    assert chunk * classes <= largest.numel < rows * classes / 4


# -- several ranks ---------------------------------------------------------------------------------


def cut(seed: int, sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """What is wrong on this rank; the bits of the loss and gradients, with and without overlap."""
    rank, wrong, bits = dist.get_rank(), [], []
    hidden, weight, bias, target, class_weight = drawn(seed, 23, 16, sum(sizes), dtype)
    own = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    for reduction in ("none", "mean", "sum"):
        draw = random.Random(f"{seed}{reduction}")
        options = options_of(draw, reduction)
        if draw.random() < 0.5:
            options["class_weight"] = class_weight
        exact = leaves(hidden.double(), weight.double(), bias.double())
        wanted, logits, p = unfused(exact, target, **options)
        up = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(seed))
        wanted.backward(up.double())
        whole = rooms(exact, logits, p * up.abs().view(-1, 1), dtype, len(sizes))
        room = (whole[0], whole[1][own], whole[2][own])
        theirs = (exact[0].grad, exact[1].grad[own], exact[2].grad[own])
        if "class_weight" in options:
            options["class_weight"] = class_weight[own]
        results = []
        for overlap in (True, False):
            parts = leaves(hidden, weight[own], bias[own])
            loss = linear_cross_entropy(
                parts[0], parts[1], target, parts[2], chunk_size=5, overlap=overlap,
                group=dist.group.WORLD, **options,
            )  # fmt: skip
            loss.backward(up.to(loss.dtype))
            found = tuple(part.grad for part in parts)
            results.append((loss.detach(), *found))
            eps = max(torch.finfo(dtype).eps, 2.0**-22) * 8
            if not torch.allclose(loss.double(), wanted, rtol=eps, atol=eps):
                wrong.append(f"the loss is {loss}, not {wanted}")
            wrong += compare(found, theirs, room)
        for a, b in zip(*results, strict=True):
            if not torch.equal(a, b):
                wrong.append("overlapped is not in order, bit for bit")
        bits += [t.double().tolist() for t in (results[0][0], results[0][1])]
    return wrong, bits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", [(20, 20), (40, 1), (7, 0, 30), (10, 11, 3, 1)], ids=str)
def test_cut(pool: Pool, sizes: tuple[int, ...], dtype: torch.dtype, seed: int) -> None:
    found = pool(len(sizes)).run(cut, seed, sizes, dtype)
    assert not any(wrong for wrong, _ in found), found
    assert all(bits == found[0][1] for _, bits in found), "loss and hidden's gradient"
