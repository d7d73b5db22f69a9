"""What Adam keeps: how many bytes, of which dtype; and that saving and loading change nothing."""

from __future__ import annotations

import copy
import io
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from interlace.errors import OptimizerError
from interlace.optim import Adam, AdamW
from interlace.optim.adam.arithmetic import join

BF16, FP32 = torch.bfloat16, torch.float32
BOTH: dict[str, Any] = {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16}


def drawn(seed: int, dtype: torch.dtype = BF16, count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(50, 7 + i, generator=generator).to(dtype).requires_grad_() for i in range(count)
    ]


def train(optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Steps whose gradients depend on the step and the parameter alone."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for step in steps:
        for i, param in enumerate(params):
            generator = torch.Generator().manual_seed(1000 * step + i)
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def saved(optimizer: torch.optim.Optimizer) -> Any:
    """The state as it comes from a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def whole_of(param: Tensor, state: dict[str, Tensor]) -> Tensor:
    """The master of a bf16 parameter and its remainder."""
    return join(param.detach(), state["remainder"].view(torch.int16))


def same(one: Tensor, other: Tensor) -> bool:
    """Equal bits: a remainder may look like a NaN."""
    word = {2: torch.int16, 4: torch.int32}[one.itemsize]
    return one.dtype == other.dtype and torch.equal(
        one.detach().view(word), other.detach().view(word)
    )


def bytes_of(optimizer: torch.optim.Optimizer) -> int:
    tensors = (t for state in optimizer.state.values() for t in state.values() if t.dim())
    return sum(t.nbytes for t in tensors)


@pytest.mark.parametrize(
    ("dtype", "options", "each"),
    [
        (FP32, {}, 8),
        (FP32, BOTH, 4),
        (FP32, {"exp_avg_sq_dtype": BF16}, 6),
        (FP32, {**BOTH, "master_weights": "fp32"}, 4),
        (BF16, {"master_weights": "fp32"}, 12),
        (BF16, {"master_weights": "remainder"}, 10),
        (BF16, {**BOTH, "master_weights": "fp32"}, 8),
        (BF16, {**BOTH, "master_weights": "remainder"}, 6),
        (BF16, BOTH, 4),
    ],
)
def test_bytes_of_an_element(dtype: torch.dtype, options: dict[str, Any], each: int) -> None:
    """bf16 moments halve the state; the figures are those of Note [Bytes]."""
    params = drawn(0, dtype)
    optimizer = AdamW(params, **options)
    train(optimizer, range(2))
    assert bytes_of(optimizer) == each * sum(p.numel() for p in params)


GRID = list(itertools.product([FP32, BF16], [FP32, BF16], [None, "fp32", "remainder"]))


@pytest.mark.parametrize(("m", "v", "master"), GRID)
def test_a_resumed_run_goes_on_bit_for_bit(
    m: torch.dtype, v: torch.dtype, master: str | None, seed: int
) -> None:
    """Through a file, with stochastic rounding on, and a parameter of its own step."""
    options = {"exp_avg_dtype": m, "exp_avg_sq_dtype": v, "master_weights": master}
    params = [*drawn(seed), *drawn(seed, FP32, 1)]
    straight = AdamW(params, lr=0.01, seed=seed, **options)
    train(straight, range(3))
    late = [torch.ones(5, dtype=BF16, requires_grad=True)]
    straight.add_param_group({"params": late, "weight_decay": 0.5})
    train(straight, range(3, 5))

    others = [p.detach().clone().requires_grad_() for p in [*params, *late]]
    resumed = AdamW([{"params": others[:-1]}, {"params": others[-1:]}], **options)
    loaded = saved(straight)
    for state, first in zip(loaded["state"].values(), straight.state.values(), strict=True):
        assert {k: t.dtype for k, t in state.items()} == {k: t.dtype for k, t in first.items()}
    resumed.load_state_dict(loaded)
    for optimizer in (straight, resumed):
        train(optimizer, range(5, 9))
    for param, other in zip([*params, *late], others, strict=True):
        assert torch.equal(param, other)
        mine, its = straight.state[param], resumed.state[other]
        assert mine.keys() == its.keys()
        assert all(same(mine[name], its[name]) for name in mine)


class Made(TorchDispatchMode):
    """Writes down the dtype of every large tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        fresh = {id(t) for t in tree_leaves(args) if isinstance(t, Tensor)}
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.numel() > 300 and id(tensor) not in fresh:
                if tensor.data_ptr() not in {t.data_ptr() for t in tree_leaves(args)
                                             if isinstance(t, Tensor)}:  # fmt: skip
                    self.dtypes.append(tensor.dtype)
        return made


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_loading_and_saving_make_no_fp32_copies(dtype: torch.dtype, seed: int) -> None:
    """What fits is taken as it is: torch's loader would cast it to the parameter's dtype."""
    first = AdamW(drawn(seed, dtype), **BOTH, master_weights="remainder")
    train(first, range(2))
    second = AdamW(drawn(seed, dtype), **BOTH, master_weights="remainder")
    loaded = saved(first)
    with Made() as made:
        second.load_state_dict(loaded)
        state = second.state_dict()["state"]
        assert state[0]["exp_avg"] is loaded["state"][0]["exp_avg"]
        assert not made.dtypes
        _ = loaded["state"][0]["exp_avg"] + 1
        assert made.dtypes == [BF16], "the probe sees what is made"
    for number, values in state.items():
        assert values["exp_avg"].dtype == values["exp_avg_sq"].dtype == BF16, number


@pytest.mark.parametrize("pair", [(AdamW, torch.optim.AdamW), (Adam, torch.optim.Adam)])
@pytest.mark.parametrize("their_options", [{}, {"foreach": True}, {"fused": True}])
def test_from_torch_and_back(pair: Any, their_options: dict[str, Any], seed: int) -> None:
    """A run that changes optimizers twice is, but for rounding, the run that never does."""
    ours_kind, torch_kind = pair
    steady, moving = drawn(seed, FP32), drawn(seed, FP32)
    reference = torch_kind(steady, lr=0.01, weight_decay=0.1, **their_options)
    theirs = torch_kind(moving, lr=0.01, weight_decay=0.1, **their_options)
    train(reference, range(3))
    train(theirs, range(3))
    ours = ours_kind(moving, lr=99.0, seed=5)
    ours.load_state_dict(saved(theirs))
    group = ours.param_groups[0]
    assert (group["lr"], group["seed"], group["foreach"], group["fused"]) == (0.01, 5, None, None)
    train(reference, range(3, 6))
    train(ours, range(3, 6))
    back = torch_kind(moving, lr=99.0, **their_options)
    back.load_state_dict(saved(ours))
    train(reference, range(6, 9))
    train(back, range(6, 9))
    for param, other in zip(steady, moving, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-5, atol=1e-6)
        assert set(reference.state[param]) == set(back.state[other])


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("master", [None, "fp32", "remainder"])
def test_torch_takes_low_precision_states(
    dtype: torch.dtype, master: str | None, seed: int
) -> None:
    """And we take fp32 ones into bf16: rounded to nearest, whatever the parameter's dtype."""
    params = drawn(seed, dtype)
    ours = AdamW(params, **BOTH, master_weights=master)
    train(ours, range(2))
    theirs = torch.optim.AdamW(params)
    theirs.load_state_dict(saved(ours))
    train(theirs, range(2, 4))
    wide = torch.optim.AdamW(drawn(seed, FP32))
    train(wide, range(2))
    narrow = AdamW(drawn(seed, dtype), **BOTH, master_weights=master)
    narrow.load_state_dict(saved(wide))
    for one, other in zip(narrow.state.values(), wide.state.values(), strict=True):
        assert torch.equal(one["exp_avg"], other["exp_avg"].bfloat16())
    precise = AdamW(drawn(seed, BF16))
    precise.load_state_dict(saved(wide))
    for one, other in zip(precise.state.values(), wide.state.values(), strict=True):
        assert torch.equal(one["exp_avg"], other["exp_avg"]), "not cut to the parameter's dtype"
    train(narrow, range(2, 4))


@pytest.mark.parametrize(("m", "v"), [(FP32, FP32), (BF16, BF16)])
def test_parameter_and_remainder_are_the_master(m: torch.dtype, v: torch.dtype, seed: int) -> None:
    """The same masters bit for bit, and each parameter within half a step of its master."""
    whole, halves = drawn(seed), drawn(seed)
    options = {"lr": 1e-3, "exp_avg_dtype": m, "exp_avg_sq_dtype": v, "seed": seed}
    by_master = AdamW(whole, master_weights="fp32", **options)
    by_remainder = AdamW(halves, master_weights="remainder", **options)
    for optimizer in (by_master, by_remainder):
        train(optimizer, range(20))
    for param, half in zip(whole, halves, strict=True):
        master = by_master.state[param]["master"]
        assert torch.equal(param, master.bfloat16())
        assert torch.equal(whole_of(half, by_remainder.state[half]), master)
        above = torch.nextafter(half.detach(), torch.tensor(float("inf"), dtype=BF16))
        below = torch.nextafter(half.detach(), torch.tensor(-float("inf"), dtype=BF16))
        miss = (half.detach().double() - master.double()).abs()
        assert bool((miss <= (above.double() - half.detach().double()) / 2 + 0).logical_or(
            miss <= (half.detach().double() - below.double()) / 2).all())  # fmt: skip


def test_extremes_survive_the_split() -> None:
    """NaN stays NaN (its carry would make it zero), infinities and the largest numbers stay."""
    from interlace.optim.adam.arithmetic import split

    nan = torch.tensor([0x7FFFFFFF, -1, 0x7F800001]).to(torch.int32).view(FP32)
    rest = [float("inf"), -float("inf"), 3.4028234e38, -3.4028234e38, 0.0, -0.0, 1e-45, 1.00390625]
    master = torch.cat([nan, torch.tensor(rest)])
    p, remainder = torch.zeros(len(master), dtype=BF16), torch.zeros(len(master), dtype=torch.int16)
    split(master, p, remainder)
    assert bool(p[:3].isnan().all())
    back = join(p, remainder)
    assert bool(back[:3].isnan().all())
    assert torch.equal(back[3:].view(torch.int32), master[3:].view(torch.int32))


@pytest.mark.parametrize(
    ("before", "after"), [(None, "fp32"), (None, "remainder"), ("fp32", None), ("remainder", None)]
)
def test_masters_start_and_end(before: str | None, after: str | None, seed: int) -> None:
    """A checkpoint without masters starts them, and one with masters goes on without."""
    params = drawn(seed)
    first = AdamW(params, lr=1e-3, master_weights=before)
    train(first, range(5))
    others = [p.detach().clone().requires_grad_() for p in params]
    second = AdamW(others, lr=1e-3, master_weights=after)
    second.load_state_dict(saved(first))
    second.param_groups[0].update(lr=0.0)  # a step that moves nothing makes the states ready
    train(second, range(5, 6))
    for other, param in zip(others, params, strict=True):
        state, got = second.state[other], other.detach().float()
        if after is not None:
            got = state["master"] if after == "fp32" else whole_of(other, state)
        assert torch.equal(got, param.detach().float())
        names = {"fp32": {"master"}, "remainder": {"remainder"}}.get(after or "", set())
        assert set(state) == {"step", "exp_avg", "exp_avg_sq", *names}


@pytest.mark.parametrize(("before", "after"), [("fp32", "remainder"), ("remainder", "fp32")])
def test_the_other_kind_of_master_is_refused(before: str, after: str, seed: int) -> None:
    first = AdamW(drawn(seed), master_weights=before)
    train(first, range(1))
    second = AdamW(drawn(seed), master_weights=after)
    second.load_state_dict(saved(first))
    kind = f"master_weights='{before}'"
    told = f"{kind} keeps it.* fix: load the checkpoint with {kind}"
    with pytest.raises(OptimizerError, match=told):
        train(second, range(1))


def test_storage_stays_and_hyperparameters_come(seed: int) -> None:
    first = AdamW(drawn(seed), lr=0.5, betas=(0.5, 0.6), seed=9, fused=True)
    train(first, range(1))
    second = AdamW(drawn(seed), **BOTH, stochastic_rounding=False, master_weights="fp32")
    second.load_state_dict(saved(first))
    group = second.param_groups[0]
    assert (group["lr"], group["betas"], group["seed"]) == (0.5, (0.5, 0.6), 9)
    assert (group["exp_avg_dtype"], group["master_weights"]) == (BF16, "fp32")
    assert (group["stochastic_rounding"], group["fused"]) == (False, None)


def test_a_state_of_greatest_moments_is_refused(seed: int) -> None:
    theirs = torch.optim.AdamW(drawn(seed), amsgrad=True)
    train(theirs, range(1))
    with pytest.raises(OptimizerError, match=r"amsgrad=True: .* fix: torch.optim's"):
        AdamW(drawn(seed)).load_state_dict(saved(theirs))


def test_hooks_of_loading_see_what_torchs_do(seed: int) -> None:
    """A pre-hook may change what is loaded, and a post-hook finds it there."""
    first = AdamW(drawn(seed))
    train(first, range(2))
    second = AdamW(drawn(seed))
    seen: list[int] = []

    def double(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        changed = copy.deepcopy(given)
        changed["state"][0]["exp_avg"].fill_(7.0)
        return changed

    second.register_load_state_dict_pre_hook(double)
    second.register_load_state_dict_post_hook(lambda o: seen.append(len(o.state)))
    second.load_state_dict(first.state_dict())
    second.load_state_dict(first.state_dict())
    assert seen == [3, 3]
    assert bool((next(iter(second.state.values()))["exp_avg"] == 7.0).all())


def test_a_remainder_that_was_cast_is_refused(seed: int) -> None:
    """Its bits are gone: better no master than a wrong one."""
    first = AdamW(drawn(seed), master_weights="remainder")
    train(first, range(1))
    loaded = saved(first)
    loaded["state"][1]["remainder"] = loaded["state"][1]["remainder"].float()
    second = AdamW(drawn(seed), master_weights="remainder")
    second.load_state_dict(loaded)
    with pytest.raises(OptimizerError, match="lost in a cast"):
        train(second, range(1))


def test_a_checkpoint_of_another_model_is_refused(seed: int) -> None:
    first = AdamW(drawn(seed))
    train(first, range(1))
    with pytest.raises(ValueError, match="group"):
        AdamW(drawn(seed)[:2]).load_state_dict(saved(first))
    turned = AdamW(drawn(seed)[::-1])
    turned.load_state_dict(saved(first))
    with pytest.raises(OptimizerError, match="another order"):
        train(turned, range(1))


# -- what a user writes into a bf16 parameter between steps, beside the remainder of its master ----


WRITES: dict[str, Any] = {
    "zero": lambda p: p.zero_(),
    "negative zero": lambda p: p.zero_().neg_(),
    "clamp": lambda p: p.clamp_(min=0),
    "inf": lambda p: p.fill_(torch.inf),
    "-inf": lambda p: p.fill_(-torch.inf),
    "numbers": lambda p: p.copy_(torch.randn(p.shape)),
}


@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_stays(write: str, seed: int) -> None:
    """To within a rounding: no parameter makes a NaN together with an old remainder."""
    torch.manual_seed(seed)
    (param,) = drawn(seed, count=1)
    optimizer = AdamW([param], lr=1e-3, weight_decay=0.0, master_weights="remainder")
    train(optimizer, range(3))
    with torch.no_grad():
        WRITES[write](param)
    written = param.detach().clone()
    state = optimizer.state[param]
    assert not whole_of(param, state).isnan().any()
    state["exp_avg"].zero_()
    param.grad = torch.zeros_like(param)
    optimizer.step()  # which moves nothing
    assert torch.equal(param, written)
    train(optimizer, range(2))
    assert not param.isnan().any()
    assert torch.equal(param.isinf(), written.isinf())


def test_a_module_that_is_rolled_back_to_zeros_trains_on(seed: int) -> None:
    """A bias as it was made is 0, beside the remainders of the steps since."""
    layer = torch.nn.LayerNorm(512, dtype=BF16)
    start = copy.deepcopy(layer.state_dict())
    optimizer = AdamW(layer.parameters(), master_weights="remainder")
    train(optimizer, range(seed, seed + 3))
    layer.load_state_dict(start)
    assert not layer.bias.any()
    train(optimizer, range(seed, seed + 2))
    assert not any(param.isnan().any() for param in layer.parameters())
    assert bool((layer.bias != 0).any())


# -- `decoupled_weight_decay` in groups and in torch's checkpoints: the class's, or an error -------


def stepped(optimizer: Any) -> list[float]:
    (tensor,) = optimizer.param_groups[0]["params"]
    tensor.grad = torch.ones(2)
    optimizer.step()
    return tensor.tolist()


def pair() -> Tensor:
    return torch.ones(2, requires_grad=True)


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_a_group_has_the_decay_of_its_class_or_is_refused(kind: Any, decoupled: bool) -> None:
    group: Any = {"params": [pair()], "decoupled_weight_decay": decoupled}
    if decoupled == (kind is AdamW):
        theirs = torch.optim.Adam([{**group, "params": [pair()]}], lr=0.1, weight_decay=0.5)
        ours = stepped(kind([group], lr=0.1, weight_decay=0.5))
        assert ours == pytest.approx(stepped(theirs), rel=1e-6)
        return
    with pytest.raises(OptimizerError, match="decays so"):
        kind([group], weight_decay=0.5)
    optimizer = kind([pair()], lr=0.1, weight_decay=0.5)
    with pytest.raises(OptimizerError, match="decays so"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("theirs", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("kind", [Adam, AdamW])
def test_a_checkpoint_keeps_its_kind_of_decay(kind: Any, theirs: Any) -> None:
    """It is torch's that goes on, or nothing is loaded."""
    source = theirs([pair()], lr=0.1, weight_decay=0.5)
    stepped(source)
    given = copy.deepcopy(source.state_dict())
    own = source.param_groups[0]["params"][0].detach().clone().requires_grad_()
    optimizer = kind([own], lr=0.7)
    if kind.__name__ != theirs.__name__:
        with pytest.raises(OptimizerError, match="decays so"):
            optimizer.load_state_dict(given)
        assert (optimizer.param_groups[0]["lr"], len(optimizer.state)) == (0.7, 0)
        return
    optimizer.load_state_dict(given)
    assert stepped(optimizer) == pytest.approx(stepped(source), rel=1e-6)
