"""GroupedLinear: the bits of a loop of Linears, and what may not go wrong with groups and buffers.

The CPU runs the loop here; tests/gpu/test_grouped.py compares the kernels with it.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from interlace.errors import GradientError, GroupError, OptionError, UnsupportedError
from interlace.float8 import Recipe
from interlace.nn import GroupedLinear
from interlace.nn.grouped.linear import dense_rows, grouped_linear_ops
from interlace.optim import GradAccumulator

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
SIZES = {
    "mixed": ([5, 0, 17, 8], 30),
    "padded": ([5, 0, 17, 8], 41),
    "first and last empty": ([0, 9, 2, 0], 11),
    "one group has all": ([0, 0, 12, 0], 12),
    "all empty, all padding": ([0, 0, 0, 0], 7),
    "no rows": ([0, 0, 0, 0], 0),
}


class Loop(nn.Module):
    """The reference: a Linear for each group, with the same weights."""

    def __init__(self, layer: GroupedLinear) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        for group in range(layer.num_groups):
            linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
            linear = linear.to(layer.weight.dtype)
            linear.weight.data.copy_(layer.weight.data[group])
            if layer.bias is not None:
                linear.bias.data.copy_(layer.bias.data[group])
            self.layers.append(linear)

    def forward(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        parts = x.split([*sizes, x.shape[0] - sum(sizes)])
        made = [linear(part) for linear, part in zip(self.layers, parts, strict=False)]
        return torch.cat([*made, parts[-1].new_zeros(len(parts[-1]), made[0].shape[1])])

    def grads(self, name: str) -> torch.Tensor:
        found = [getattr(linear, name).grad for linear in self.layers]
        return torch.stack(found)


def pair(seed: int, dtype: torch.dtype = torch.float32, bias: bool = True) -> tuple:
    torch.manual_seed(seed)
    layer = GroupedLinear(4, 24, 40, bias, dtype=dtype)
    return layer, Loop(layer)


def rows(tokens: int, dtype: torch.dtype = torch.float32) -> Any:
    return torch.randn(tokens, 24, dtype=dtype)


def equal(found: torch.Tensor | None, wanted: torch.Tensor | None) -> bool:
    assert found is not None
    assert wanted is not None
    return found.dtype == wanted.dtype and torch.equal(found, wanted)


@pytest.mark.parametrize("given", ["list", "int32", "int64"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SIZES)
def test_has_the_bits_of_a_loop_of_linears(
    name: str, dtype: torch.dtype, bias: bool, given: str, seed: int
) -> None:
    sizes, tokens = SIZES[name]
    layer, loop = pair(seed, dtype, bias)
    mine, theirs = (rows(tokens, dtype).requires_grad_() for _ in range(2))
    theirs.data.copy_(mine.data)
    group_sizes = sizes if given == "list" else torch.tensor(sizes, dtype=getattr(torch, given))
    y, wanted = layer(mine, group_sizes), loop(theirs, sizes)
    dy = torch.randn_like(y)
    dy[sum(sizes) :] = float("nan")  # what comes back for padding must reach nothing
    y.backward(dy)
    wanted.backward(dy)
    assert equal(y, wanted)
    assert not mine.grad[sum(sizes) :].any()
    assert equal(mine.grad[: sum(sizes)], theirs.grad[: sum(sizes)])
    assert equal(layer.weight.grad, loop.grads("weight"))
    if bias:
        assert equal(layer.bias.grad, loop.grads("bias"))


def test_begins_as_that_many_linears(seed: int) -> None:
    torch.manual_seed(seed)
    layer = GroupedLinear(3, 8, 16)
    torch.manual_seed(seed)
    for group in range(3):
        linear = nn.Linear(8, 16)
        assert layer.bias is not None
        assert equal(layer.weight[group], linear.weight)
        assert equal(layer.bias[group], linear.bias)


def test_rows_of_any_strides(seed: int) -> None:
    layer, loop = pair(seed)
    sizes = [3, 4, 0, 5]
    x = torch.randn(24, 12).t()
    assert not x.is_contiguous()
    y = layer(x, sizes)
    assert equal(y, loop(x.contiguous(), sizes))
    y.sum().backward()  # a gradient of strides 0
    loop(x.contiguous(), sizes).sum().backward()
    assert equal(layer.weight.grad, loop.grads("weight"))


@pytest.mark.parametrize(
    ("x", "sizes", "told"),
    [
        (torch.zeros(4, 24), [1, 1, 1], "3 group sizes for 4 groups"),
        (torch.zeros(4, 24), [1, 1, 1, 2], "ask for 5 rows, and there are 4"),
        (torch.zeros(4, 24), [1, -1, 1, 2], "whole numbers"),
        (torch.zeros(4, 24), [1, 1.0, 1, 1], "whole numbers"),
        (torch.zeros(0, 24), torch.tensor([0, 0, 2, 1]), "ask for 3 rows, and there are 0"),
        (torch.zeros(4, 24), torch.ones(4), "int32 or int64"),
        (torch.zeros(4, 24), torch.ones(3, dtype=torch.int32), r"shape \[4\]"),
        (torch.zeros(4, 23), [1, 1, 1, 1], r"give \[tokens, 24\]"),
        (torch.zeros(1, 4, 24), [1, 1, 1, 1], r"give \[tokens, 24\]"),
        (torch.zeros(4, 24, dtype=torch.bfloat16), [1, 1, 1, 1], "cast one, or use autocast"),
        (torch.zeros(4, 24, device="meta"), [1, 1, 1, 1], "x is on meta"),
    ],
)
def test_says_what_does_not_fit(x: torch.Tensor, sizes: object, told: str) -> None:
    layer = GroupedLinear(4, 24, 40)
    with pytest.raises(GroupError, match=told) as caught:
        layer(x, sizes)
    assert isinstance(caught.value, ValueError)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(GroupError, match="from 1 up"):
        GroupedLinear(0, 4, 4)
    with pytest.raises(OptionError, match=r"recipe.*fix: leave it out"):
        GroupedLinear(2, 16, 16, recipe=Recipe())  # type: ignore[arg-type]


def test_says_how_it_multiplies() -> None:
    layer = GroupedLinear(2, 8, 8)
    assert layer.explain(torch.zeros(3, 8)).startswith("by loop: the device is cpu")


# -- gradients into a buffer ----------------------------------------------------------------------


def test_sum_of_micro_batches_is_exact_and_in_place(seed: int) -> None:
    """The buffer of another type has the fp32 sum, in order, of fp32 products."""
    layer, _ = pair(seed, torch.bfloat16, bias=False)
    main = torch.randn(layer.weight.shape)
    wanted, address = main.clone(), main.data_ptr()
    _held = GradAccumulator(layer.weight, main)
    for sizes in ([4, 3, 0, 9], [0, 0, 16, 0], [1, 2, 3, 4]):
        x = rows(16, torch.bfloat16)
        y = layer(x, sizes)
        dy = torch.randn_like(y)
        y.backward(dy)
        start = 0
        for group, size in enumerate(sizes):
            part = slice(start, start + size)
            wanted[group] += dy[part].float().t() @ x[part].float()
            start += size
    assert torch.equal(main, wanted)
    assert main.data_ptr() == address
    assert layer.weight.grad is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_in_grad_has_the_bits_of_autograd(dtype: torch.dtype, seed: int) -> None:
    layer, loop = pair(seed, dtype)
    _held = GradAccumulator(layer.weight)
    addresses = set()
    for sizes in ([4, 3, 0, 9], [0, 0, 16, 0], [1, 2, 3, 4]):
        x = rows(16, dtype)
        layer(x, sizes).square().sum().backward()
        loop(x, sizes).square().sum().backward()
        addresses.add(layer.weight.grad.data_ptr())
    assert equal(layer.weight.grad, loop.grads("weight"))
    assert len(addresses) == 1


def backward(kind: str, layer: GroupedLinear, x: torch.Tensor) -> None:
    """A backward of some course; each brings twice the gradient of one use, exactly."""
    sizes = [4, 3, 0, 9]

    def use() -> torch.Tensor:
        return layer(x, sizes).sum()

    match kind:
        case "tied":
            (use() + use()).backward()
        case "retain_graph":
            loss = use()
            loss.backward(retain_graph=True)
            loss.backward()
        case "two backwards":
            use().backward()
            use().backward()
        case "checkpoint" | "reentrant checkpoint":
            for _ in range(2):
                reentrant = kind == "reentrant checkpoint"
                y = checkpoint(layer, x, sizes, use_reentrant=reentrant)
                assert y is not None
                y.sum().backward()
        case "reentrant, tied":
            ys = [checkpoint(layer, x, sizes, use_reentrant=True) for _ in range(2)]
            assert ys[0] is not None
            (ys[0].sum() + ys[1].sum()).backward()
        case "also used otherwise":
            parts = list(zip(x.split(sizes), layer.weight.unbind(), strict=True))
            other = sum((part @ weight.t()).sum() for part, weight in parts)
            (use() + other).backward()
        case _:
            raise AssertionError(kind)


COURSES = (
    *("tied", "retain_graph", "two backwards", "checkpoint", "reentrant checkpoint"),
    *("reentrant, tied", "also used otherwise"),
)


@pytest.mark.parametrize("where", ["grad", "fresh grad", "buffer"])
@pytest.mark.parametrize("kind", COURSES)
def test_every_course_of_backward(kind: str, where: str, seed: int) -> None:
    """With whole numbers, so that sums are exact in any order."""
    torch.manual_seed(seed)
    layer = GroupedLinear(4, 24, 40, bias=False)
    x = torch.randint(-4, 5, (16, 24)).float().requires_grad_()
    backward(kind, layer, x)
    wanted = layer.weight.grad
    assert wanted is not None
    assert wanted.any()
    layer.weight.grad = torch.zeros_like(wanted) if where == "grad" else None
    buffer = torch.zeros_like(wanted) if where == "buffer" else None
    ready = []
    accumulator = GradAccumulator(layer.weight, buffer, on_ready=ready.append)
    backward(kind, layer, x)
    assert equal(accumulator.grad, wanted)
    assert 1 <= len(ready) <= 2
    assert layer.weight.grad is (None if where == "buffer" else accumulator.grad)


@pytest.mark.parametrize("attached", [False, True])
def test_autograd_grad_gives_it_and_sums_nothing(attached: bool, seed: int) -> None:
    layer, loop = pair(seed)
    main = torch.zeros_like(layer.weight)
    if attached:
        _held = GradAccumulator(layer.weight, main)
    x, sizes = rows(16).requires_grad_(), [4, 3, 0, 9]
    dw, dx = torch.autograd.grad(layer(x, sizes).sum(), [layer.weight, x])
    loop(x, sizes).sum().backward()
    assert equal(dw, loop.grads("weight"))
    assert equal(dx, x.grad)
    (dx,) = torch.autograd.grad(layer(x, sizes).sum(), [x])
    layer(x, sizes).sum().backward(inputs=[x])
    assert not main.any()
    assert layer.weight.grad is None
    layer(x, sizes).sum().backward(inputs=[layer.weight])
    assert equal(main if attached else layer.weight.grad, dw)


def test_a_hook_on_the_parameter_still_sees_its_gradient(seed: int) -> None:
    layer, _ = pair(seed)
    main, seen = torch.zeros_like(layer.weight), []
    _held = GradAccumulator(layer.weight, main)
    handle = layer.weight.register_hook(lambda grad: seen.append(grad.clone()))
    layer(rows(4), [4, 0, 0, 0]).sum().backward()
    assert len(seen) == 1
    assert equal(main, seen[0])
    handle.remove()
    layer(rows(4), [4, 0, 0, 0]).sum().backward()
    assert len(seen) == 1


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_leaves_the_gradient_with_the_original(inside: bool, seed: int) -> None:
    """The cast copy owns nothing: the fp32 weight's buffer has the fp32 product of bf16 rows."""
    layer, _ = pair(seed)
    main = torch.zeros_like(layer.weight)
    accumulator = GradAccumulator(layer.weight, main)
    x = rows(9).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x, [0, 9, 0, 0])
    assert y.dtype == torch.bfloat16
    dy = torch.randn_like(y)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
        y.backward(dy)
    assert torch.equal(main[1], dy.float().t() @ x.detach().bfloat16().float())
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert layer.bias.grad.dtype == torch.float32
    accumulator.close()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x, [0, 9, 0, 0]).backward(dy)
    assert layer.weight.grad.dtype == torch.float32
    assert torch.equal(layer.weight.grad, main.bfloat16().float())


@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
def test_frozen_parameters_get_nothing(frozen: str, seed: int) -> None:
    layer, loop = pair(seed)
    x, sizes = rows(16).requires_grad_(), [4, 3, 0, 9]
    for name in ("weight", "bias"):
        getattr(layer, name).requires_grad_(frozen not in (name, "both"))
    layer(x, sizes).sum().backward()
    wanted = x.grad
    x.grad = None
    loop(x, sizes).sum().backward()
    assert equal(x.grad, wanted)
    for name in ("weight", "bias"):
        param = getattr(layer, name)
        assert (param.grad is not None) == param.requires_grad
    if frozen != "bias":
        with pytest.raises(GradientError, match="frozen Parameters need no accumulator"):
            GradAccumulator(layer.weight)


def test_a_weight_changed_between_is_an_error(seed: int) -> None:
    layer, _ = pair(seed)
    y = layer(rows(4).requires_grad_(), [4, 0, 0, 0])
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_weight_may_change_if_no_gradient_needs_it(seed: int) -> None:
    """As for a Linear: rows that need no gradient leave the weight out of backward."""
    layer, loop = pair(seed)
    x, sizes = rows(8), [4, 0, 1, 3]
    y = layer(x, sizes)
    with torch.no_grad():
        layer.weight.mul_(2)
    y.sum().backward()
    loop(x, sizes).sum().backward()
    assert equal(layer.weight.grad, loop.grads("weight"))


def test_a_copy_is_not_attached_and_keeps_no_state_of_it(seed: int) -> None:
    layer, _ = pair(seed)
    main = torch.zeros_like(layer.weight)
    _held = GradAccumulator(layer.weight, main)
    reference = copy.deepcopy(layer)
    assert sorted(reference.state_dict()) == ["bias", "weight"]
    reference(rows(4), [4, 0, 0, 0]).sum().backward()
    assert not main.any()
    assert reference.weight.grad is not None


@pytest.mark.parametrize("attached", [False, True])
def test_runs_inside_a_compiled_model(attached: bool, seed: int) -> None:
    layer, loop = pair(seed)
    if attached:
        _held = GradAccumulator(layer.weight)
    model = torch.compile(nn.Sequential(nn.Linear(24, 24)), backend="aot_eager")
    run = torch.compile(lambda x, sizes: layer(x * 2, sizes) + 1, backend="aot_eager")
    x = model(rows(16))
    sizes = torch.tensor([4, 3, 0, 9])
    y = run(x, sizes)
    y.sum().backward()
    wanted = loop(x.detach() * 2, sizes.tolist()) + 1
    wanted.sum().backward()
    assert equal(y, wanted)
    assert equal(layer.weight.grad, loop.grads("weight"))


def test_in_bf16_a_compiler_sees_one_graph(seed: int) -> None:
    """Sizes are data of it, and are cut off at the rows."""
    layer, loop = pair(seed, torch.bfloat16)
    run = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = rows(16, torch.bfloat16)
    for sizes, cut in (([4, 3, 0, 9], [4, 3, 0, 9]), ([4, 3, 0, 90], [4, 3, 0, 9])):
        torch.testing.assert_close(run(x, torch.tensor(sizes)), loop(x, cut), rtol=0.02, atol=0.02)


def test_a_single_row_of_odd_stride_is_made_regular(seed: int) -> None:
    """It is contiguous to torch, and still its stride is none that the kernels take."""
    row = torch.randn(1, 101)[:, :96]
    assert row.is_contiguous()
    assert row.stride(0) == 101
    dense = dense_rows(row, row.dtype)
    assert dense.stride() == (96, 1)
    assert torch.equal(dense, row)
    regular = torch.randn(5, 96)
    assert dense_rows(regular, regular.dtype) is regular


@pytest.mark.parametrize("sizes", [[5, 0, 9, 200], [5, 90, 9, 2], [21, 0, 0, 0]])
def test_operators_for_compilers_stay_inside_the_rows(
    sizes: list[int], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that ask for too much are cut off before torch's kernel, which trusts them."""
    layer, loop = pair(seed)
    x, told, real = rows(21), [], torch._grouped_mm

    def spy(*args: Any, offs: torch.Tensor) -> torch.Tensor:
        told.append(offs.tolist())
        return real(*args, offs=offs)

    monkeypatch.setattr("interlace.nn.grouped.linear.grouped_mm", spy)
    y = grouped_linear_ops(x, layer.weight, layer.bias, torch.tensor(sizes), torch.float32)
    ends = [min(sum(sizes[: group + 1]), 21) for group in range(4)]
    assert told == [ends]
    cut = [end - start for start, end in pairwise([0, *ends])]
    torch.testing.assert_close(y, loop(x, cut), rtol=1e-5, atol=1e-5)


def test_operators_for_compilers_agree(seed: int) -> None:
    """What is traced on a GPU: padding and its gradient are 0 there too, whatever they held."""
    layer, loop = pair(seed)
    sizes = random.Random(seed).choice([[5, 0, 9, 2], [0, 16, 0, 0]])
    mine, theirs = (rows(21).requires_grad_() for _ in range(2))
    theirs.data.copy_(mine.data)
    mine.data[16:] = float("nan")
    ends = torch.tensor(sizes, dtype=torch.int32)
    y = grouped_linear_ops(mine, layer.weight, layer.bias, ends, torch.float32)
    wanted = loop(theirs, sizes)
    dy = torch.randn_like(y)
    y.backward(dy)
    wanted.backward(dy)
    tight: dict[str, Any] = {
        "rtol": 1e-5,
        "atol": 1e-5,
    }  # sums of 24 to 40 terms near 1, in another order
    torch.testing.assert_close(y, wanted, **tight)
    torch.testing.assert_close(
        mine.grad, torch.cat([theirs.grad[:16], theirs.grad[16:] * 0]), **tight
    )
    torch.testing.assert_close(layer.weight.grad, loop.grads("weight"), **tight)
    torch.testing.assert_close(layer.bias.grad, loop.grads("bias"), **tight)


@pytest.mark.parametrize("of", ["x", "weight", "bias"])
def test_a_gradient_penalty_is_refused(of: str, seed: int) -> None:
    """Its term would give no gradient, silently; a graph of the gradient alone does no harm."""
    layer, _ = pair(seed)
    x, sizes = rows(9).requires_grad_(), [3, 0, 4, 0]
    leaf = {"x": x, "weight": layer.weight, "bias": layer.bias}[of]
    y = layer(x, sizes)
    (grad,) = torch.autograd.grad(y.sum(), leaf, create_graph=True)
    (plain,) = torch.autograd.grad(layer(x, sizes).sum(), leaf)
    assert torch.equal(grad, plain)
    assert (grad.requires_grad, plain.requires_grad) == (True, False)
    with pytest.raises(UnsupportedError, match="differentiated again"):
        (y.square().mean() + grad.square().sum()).backward()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_a_penalty_of_an_accumulated_gradient_is_refused(seed: int) -> None:
    layer, _ = pair(seed)
    layer.weight.grad = torch.zeros_like(layer.weight)
    _held = GradAccumulator(layer.weight)
    y = layer(rows(9), [3, 0, 4, 0]).square().mean()
    (grad,) = torch.autograd.grad(y, layer.weight, retain_graph=True)
    y.backward(create_graph=True)
    assert torch.equal(layer.weight.grad, grad)
    with pytest.raises(UnsupportedError, match="differentiated again"):
        layer.weight.grad.square().sum().backward()
    layer.weight.grad = None  # the cycle that torch warns of
