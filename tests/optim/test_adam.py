"""AdamW and Adam against torch.optim: the numbers, the conventions, and what is refused."""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from interlace import InterlaceError
from interlace.errors import OptimizerError
from interlace.optim import Adam, AdamW

PAIRS = [(AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam)]
ULP = 2.0**-24
"""Half a unit in the last place of 1: what one rounding moves a number by, relatively."""


def drawn(shapes: list[tuple[int, ...]], seed: int, **options: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator).to(**options).requires_grad_() for s in shapes]


def copies(params: list[Tensor]) -> list[Tensor]:
    return [p.detach().clone(memory_format=torch.preserve_format).requires_grad_() for p in params]


def give(params: list[Tensor], others: list[Tensor], generator: torch.Generator) -> None:
    for param, other in zip(params, others, strict=True):
        param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        other.grad = param.grad.to(other.dtype, copy=True)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].__name__)
@pytest.mark.parametrize(
    ("maximize", "decay", "betas"),
    list(itertools.product([False, True], [0.0, 0.1], [(0.9, 0.999), (0.3, 0.6)])),
)
def test_a_step_is_torchs(pair: Any, maximize: bool, decay: float, betas: Any, seed: int) -> None:
    """Step after step from equal states: at most the roundings that the two do apart."""
    ours_kind, torch_kind = pair
    options = {"lr": 0.02, "weight_decay": decay, "betas": betas, "maximize": maximize}
    params = drawn([(33, 17), (1000,), ()], seed)
    others = copies(params)
    ours, theirs = ours_kind(params, **options), torch_kind(others, **options)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(5):
        give(params, others, generator)
        before = [(p.detach().clone(), ours.state[p].get("exp_avg", 0 * p.detach()).clone())
                  for p in params]  # fmt: skip
        ours.step()
        theirs.step()
        for param, other, (p, m) in zip(params, others, before, strict=True):
            mine, its = ours.state[param], theirs.state[other]
            assert float(mine["step"]) == float(its["step"])
            size = param.grad.abs() + 2 * m.abs() + decay * p.abs()  # pyright: ignore
            # Moments: up to six roundings each side, of terms no larger than these.
            assert bool(((mine["exp_avg"] - its["exp_avg"]).abs() <= 8 * ULP * size).all())
            room = 16 * ULP * its["exp_avg_sq"] + 1e-37
            if not decay or ours_kind is AdamW:  # else g is a sum, whose rounding v squares
                assert bool(((mine["exp_avg_sq"] - its["exp_avg_sq"]).abs() <= room).all())
            # The update is m * lr / root, so it inherits m's error and its own dozen roundings.
            correct = 1 - betas[0] ** float(mine["step"])
            root = its["exp_avg_sq"].sqrt()
            root = root / (1 - betas[1] ** float(mine["step"])) ** 0.5 + 1e-8
            room = 4 * ULP * p.abs() + 0.02 / correct / root * 24 * ULP * size
            assert bool(((param - other).abs() <= room).all())
        theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
        for param, other in zip(params, others, strict=True):
            other.data.copy_(param.data)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[0].__name__)
def test_arguments_are_torchs_and_then_ours(pair: Any) -> None:
    """Positional arguments and defaults alike, so the import is all that changes."""
    mine, its = (inspect.signature(kind).parameters for kind in pair)
    its = {name: p for name, p in its.items() if name != "decoupled_weight_decay"}
    more = [name for name in mine if name not in its]
    assert more == [
        "exp_avg_dtype", "exp_avg_sq_dtype", "master_weights", "stochastic_rounding", "seed",
    ]  # fmt: skip
    for name, parameter in its.items():
        assert mine[name].kind == parameter.kind, name
        assert mine[name].default == parameter.default, name


def test_parameters_count_their_own_steps(seed: int) -> None:
    """A parameter that had no gradient for some steps is corrected by its own count."""
    params = drawn([(8,), (0,), (5, 3)], seed)
    others = copies(params)
    ours, theirs = AdamW(params, lr=0.1), torch.optim.AdamW(others, lr=0.1)
    generator = torch.Generator().manual_seed(seed)
    for step in range(8):
        give(params, others, generator)
        for i in range(3):
            if step % 3 == i:
                params[i].grad = others[i].grad = None
        ours.step()
        theirs.step()
    counts = [float(ours.state[p]["step"]) for p in params]
    assert counts == [float(theirs.state[p]["step"]) for p in others] == [5.0, 5.0, 6.0]
    for param, other in zip(params, others, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6)
    anew = copies(params)
    fresh = AdamW(anew, lr=0.1)
    fresh.load_state_dict(copy.deepcopy(ours.state_dict()))
    give(params, anew, generator)
    for optimizer in (ours, fresh):
        optimizer.step()
    assert [float(fresh.state[p]["step"]) for p in anew] == [count + 1 for count in counts]
    assert all(map(torch.equal, params, anew))


def test_an_optimizer_of_empty_parameters_steps() -> None:
    param = torch.zeros(0, 4, requires_grad=True)
    param.grad = torch.zeros(0, 4)
    optimizer = AdamW([param])
    for _ in range(3):
        optimizer.step()
    assert float(optimizer.state[param]["step"]) == 3
    AdamW([param]).step()  # and none with a gradient
    param.grad = None
    AdamW([param]).step()


def strided(kind: str, seed: int) -> tuple[Tensor, Tensor]:
    """A parameter with unusual strides, and its gradient's layout likewise unusual."""
    base = torch.randn(6, 4, 5, 3, generator=torch.Generator().manual_seed(seed))
    grad = torch.randn(6, 4, 5, 3)
    if kind == "channels_last":
        return base.to(memory_format=torch.channels_last), grad
    if kind == "transposed":
        return base.permute(3, 1, 0, 2), grad.permute(3, 1, 0, 2).contiguous()
    if kind == "gradient_expanded":
        return base, grad[:1, :1].expand(6, 4, 5, 3)
    return base, grad.to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    "kind", ["channels_last", "transposed", "gradient_expanded", "gradient_strided"]
)
@pytest.mark.parametrize("master", [None, "remainder"])
def test_strides_do_not_matter(kind: str, master: str | None, seed: int) -> None:
    """The same values in a contiguous parameter give the same values."""
    param, grad = strided(kind, seed)
    whole = param.detach() if master is None else param.detach().bfloat16()
    whole.requires_grad_()
    plain = whole.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    options = {"lr": 0.1, "master_weights": master, "stochastic_rounding": False}
    ours, other = AdamW([whole], **options), AdamW([plain], **options)
    for _ in range(3):
        whole.grad, plain.grad = grad.to(whole.dtype), grad.to(whole.dtype).contiguous()
        ours.step()
        other.step()
    assert torch.equal(whole, plain)
    assert torch.equal(ours.state[whole]["exp_avg"], other.state[plain]["exp_avg"])
    assert whole.stride() != plain.stride() or "gradient" in kind


REFUSED: dict[str, dict[str, Any]] = {
    "lr=-1": {"lr": -1.0},
    "betas": {"betas": (0.9, 1.0)},
    "eps": {"eps": -1e-8},
    "weight_decay": {"weight_decay": -0.1},
    "foreach": {"foreach": True},
    "amsgrad": {"amsgrad": True},
    "capturable": {"capturable": True},
    "differentiable": {"differentiable": True},
    "exp_avg_dtype": {"exp_avg_dtype": torch.float16},
    "exp_avg_sq_dtype": {"exp_avg_sq_dtype": torch.float64},
    "master_weights": {"master_weights": "fp16"},
    "seed": {"seed": 0.5},
    "elements": {"lr": torch.ones(2)},
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_option_that_cannot_be_is_refused(name: str) -> None:
    """At once, by a ValueError as in torch; also in a group that is added later."""
    param = torch.zeros(3, requires_grad=True)
    with pytest.raises(OptimizerError, match=name):
        AdamW([param], **REFUSED[name])
    good = AdamW([param])
    with pytest.raises(ValueError, match=name):
        good.add_param_group({"params": [torch.zeros(2, requires_grad=True)], **REFUSED[name]})
    assert len(good.param_groups) == 1
    assert issubclass(OptimizerError, InterlaceError)


def test_a_parameter_that_cannot_be_served_is_refused() -> None:
    for param, told in (
        (torch.zeros(3, dtype=torch.float64), "float64"),
        (torch.zeros(3, dtype=torch.complex64), "complex64"),
        (torch.zeros(1).expand(4), "from end to end"),
        (torch.zeros(4, 6)[:, ::2], "from end to end"),
    ):
        with pytest.raises(OptimizerError, match=told):
            AdamW([param.requires_grad_()])
    half = torch.zeros(3, dtype=torch.float16, requires_grad=True)
    with pytest.raises(OptimizerError, match="upper half"):
        AdamW([half], master_weights="remainder")
    embedding = nn.Embedding(10, 3, sparse=True)
    optimizer = AdamW(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(OptimizerError, match="SparseAdam"):
        optimizer.step()
    dense = nn.Embedding(10, 3)
    optimizer = AdamW(dense.parameters())
    dense(torch.tensor([1])).sum().backward()
    optimizer.step()
    dense.weight.grad = torch.zeros(10, 3).to_sparse()  # sparse only later
    with pytest.raises(OptimizerError, match="SparseAdam"):
        optimizer.step()


def test_parameters_that_share_memory_are_refused() -> None:
    """One launch would write them twice, in no order."""
    flat = torch.zeros(10)
    for first, second in ((flat[:6], flat[5:]), (flat, flat.view(2, 5))):
        params = [first.detach().requires_grad_(), second.detach().requires_grad_()]
        for param in params:
            param.grad = torch.ones_like(param)
        with pytest.raises(OptimizerError, match="share memory"):
            AdamW(params).step()
    params = [flat[:5].detach().requires_grad_(), flat[5:].detach().requires_grad_()]
    for param in params:
        param.grad = torch.ones_like(param)
    AdamW(params, lr=1.0).step()
    assert bool((flat < 0).all()), "neighbours in one buffer are no overlap"


def test_hooks_closures_schedulers_and_groups(seed: int) -> None:
    """torch.optim's conventions, by what they do."""
    params = drawn([(4,), (3,)], seed)
    optimizer = AdamW([{"params": params[:1], "lr": 0.5}], lr=0.1)
    optimizer.add_param_group({"params": params[1:], "exp_avg_dtype": torch.bfloat16})
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def closure() -> float:
        called.append("closure")
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = sum((p.square().sum() for p in params), torch.zeros(()))
        loss.backward()
        return loss.item()

    first = optimizer.step(closure)
    scheduler.step()
    assert optimizer.step(closure) < first
    assert called == ["before", "closure", "after"] * 2
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.05]
    kept = [optimizer.state[p]["exp_avg"].dtype for p in params]
    assert kept == [torch.float32, torch.bfloat16]
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


def test_what_moves_between_steps_is_followed(seed: int) -> None:
    """Gradients, parameters and states that are replaced or offloaded; options that change."""
    params = drawn([(40,), (7, 3)], seed)
    others = copies(params)
    ours, theirs = AdamW(params, lr=0.1), torch.optim.AdamW(others, lr=0.1)
    generator = torch.Generator().manual_seed(seed)

    def both() -> None:
        give(params, others, generator)
        ours.step()
        theirs.step()
        for param, other in zip(params, others, strict=True):
            torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6)

    both()
    for param in params:
        param.data = param.data.clone()
    both()
    state = ours.state[params[0]]
    state["exp_avg"] = state["exp_avg"].clone()  # as who offloads and brings back
    state["exp_avg_sq"].data = state["exp_avg_sq"].data.clone()
    state["step"] = torch.tensor(float(state["step"]))
    both()
    state["step"].fill_(30.0)
    theirs.state[others[0]]["step"].fill_(30.0)
    both()
    for optimizer in (ours, theirs):
        optimizer.param_groups[0]["lr"] = torch.tensor(0.3)
        optimizer.param_groups[0]["betas"] = (0.5, 0.9)
    both()
    ours.param_groups[0]["exp_avg_sq_dtype"] = torch.bfloat16
    give(params, others, generator)
    ours.step()
    assert ours.state[params[1]]["exp_avg_sq"].dtype == torch.bfloat16


def test_a_copy_is_an_optimizer_of_its_own(seed: int) -> None:
    model = nn.Linear(4, 3)
    optimizer = AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    reference_model, reference = copy.deepcopy((model, optimizer))
    for copied, param in zip(reference_model.parameters(), model.parameters(), strict=True):
        copied.grad = param.grad
    optimizer.step()
    assert float(reference.state[reference_model.weight]["step"]) == 1
    reference.step()
    assert torch.equal(reference_model.weight, model.weight)


@pytest.mark.parametrize("fused", [None, True])
def test_grad_scaler(fused: bool | None, seed: int) -> None:
    """Loss scaling changes nothing, and a step with an overflow is skipped and not counted."""
    params = drawn([(50,)], seed)
    others = copies(params)
    ours = AdamW(params, lr=0.1, fused=fused)
    plain = AdamW(others, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
    for step in range(4):
        give(params, others, torch.Generator().manual_seed(step))
        assert params[0].grad is not None
        params[0].grad.mul_(float("inf") if step == 1 else scaler.get_scale())
        scaler.scale(torch.ones(1))
        scaler.step(ours)
        scaler.update()
        if step != 1:
            plain.step()
    assert torch.equal(params[0], others[0])
    assert float(ours.state[params[0]]["step"]) == 3


@pytest.mark.kernels
def test_the_host_work_does_not_grow_with_the_parameters(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing moved, as much Python runs for 300 parameters as for 30."""
    from interlace.optim.adam import plan as adam_plan
    from interlace.optim.adam import table as adam_table

    launched: list[int] = []

    class Launched:
        def launch(self, stream: int, grid: int, args: tuple[Any, ...]) -> None:
            launched.append(grid)

    monkeypatch.setattr(adam_table, "kernel_of", lambda *_, **__: Launched())
    monkeypatch.setattr(adam_plan, "served", lambda device: True)
    counts: list[int] = []
    for number in (30, 300):
        params = drawn([(8, 8)] * number, seed)
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer = AdamW(params)
        optimizer.step()
        for param in params:
            param.grad = torch.ones_like(param)  # moved
        launched.clear()
        calls = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count)
        optimizer.step()
        sys.setprofile(None)
        assert launched == [number], "one launch, a block for each"
        counts.append(calls)
    assert counts[0] == counts[1]
