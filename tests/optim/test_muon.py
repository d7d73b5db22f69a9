"""Muon beside torch.optim.Muon: the same bits one by one, and what else it can do."""

from __future__ import annotations

import copy
import math
import pickle
import random
from typing import Any

import pytest
import torch
from tests.optim.muon_sets import POLAR_EXPRESS, SETS, SIMPLE
from tests.support.pool import Pool
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from interlace.errors import OptimizerError, OptionError
from interlace.nn import GroupedLinear
from interlace.optim import AdamW, Muon, muon_groups
from interlace.optim.muon.newton_schulz import (
    coefficients,
    flops,
    gram_pays,
    normalize,
    orthogonalize,
)
from interlace.optim.muon.update import matrices

BF16 = torch.bfloat16
ALONE: dict[str, Any] = {"batched": False, "symmetric": False}
"""With torch.optim.Muon's bits."""
SHAPES = [(64, 64), (48, 160), (160, 48), (64, 64), (1, 40), (30, 7)]
FAR = 0.03
"""How far, in the norm, an update in bf16 may be from the one in fp64."""


def params_of(seed: int, shapes: list[Any], dtype: torch.dtype = torch.float32) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in shapes]


def train(optimizer: Any, params: list[Any], seed: int, steps: int = 4, scale: float = 1.0) -> None:
    """Steps with gradients that are the same for all who have the seed."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params:
            grad = scale * torch.randn(param.shape, generator=generator)
            param.grad = grad.to(param.dtype)
        optimizer.step()


def equal(one: list[Any], other: list[Any]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def exact(update: Tensor, steps: int = 5, given: Any = SIMPLE) -> Tensor:
    """The iteration in fp64."""
    x = update.double() / update.double().norm()
    for a, b, c in coefficients(given, steps):
        g = x @ x.mT
        x = a * x + (b * g + c * g @ g) @ x
    return x


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


# -- the arithmetic ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
def test_one_by_one_it_has_torchs_bits(adjust: str | None, dtype: torch.dtype, seed: int) -> None:
    draw = random.Random(seed)
    options = {
        "lr": torch.tensor(0.02) if draw.random() < 0.5 else 0.02,
        "weight_decay": draw.choice([0.0, 0.1]),
        "momentum": draw.choice([0.0, 0.9, 0.95]),
        "nesterov": dtype == BF16 or draw.random() < 0.5,
        "ns_steps": draw.choice([1, 5]),
        "ns_coefficients": draw.choice([(3.4445, -4.7750, 2.0315), (2.0, -1.5, 0.5)]),
        "adjust_lr_fn": adjust,
    }
    ours, theirs = (params_of(seed, SHAPES, dtype) for _ in range(2))
    one, other = Muon(ours, **options, **ALONE), torch.optim.Muon(theirs, **options)
    train(one, ours, seed)
    train(other, theirs, seed)
    assert equal(ours, theirs), options
    buffers = [[o.state[p]["momentum_buffer"] for p in o.state] for o in (one, other)]
    assert equal(*buffers)


def test_its_defaults_are_torchs() -> None:
    theirs = torch.optim.Muon(params_of(0, [(2, 2)])).defaults
    ours = Muon(params_of(0, [(2, 2)])).defaults
    assert theirs.items() <= ours.items()
    added = {"split_sizes", "head_dim", "batched", "symmetric", "gram_variant"}
    assert ours.keys() - theirs.keys() == {*added, "use_muon"}


def test_spectral_unclamped(seed: int) -> None:
    """torch >= 2.15 has it: sqrt(rows / columns), below one as well."""
    shapes = [(8, 32), (32, 8)]
    ours, plain = params_of(seed, shapes), params_of(seed, shapes)
    train(Muon(ours, lr=0.5, adjust_lr_fn="spectral_unclamped", weight_decay=0.0), ours, seed, 1)
    train(Muon(plain, lr=0.5, adjust_lr_fn="original", weight_decay=0.0), plain, seed, 1)
    start = params_of(seed, shapes)
    for one, other, before, share in zip(ours, plain, start, (0.5, 1.0), strict=True):
        torch.testing.assert_close(one - before, share * (other - before), rtol=1e-4, atol=1e-5)


def test_momentum_in_bf16_without_nesterov_is_not_normalised(seed: int) -> None:
    """torch up to 2.13 divides its own buffer by its norm there."""
    (param,) = params_of(seed, [(16, 24)], BF16)
    optimizer = Muon([param], nesterov=False, momentum=0.5, **ALONE)
    wanted = torch.zeros(16, 24, dtype=BF16)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        param.grad = torch.randn(16, 24, generator=generator).to(BF16)
        wanted.lerp_(param.grad, 0.5)
        optimizer.step()
        assert torch.equal(optimizer.state[param]["momentum_buffer"], wanted)


@pytest.mark.parametrize("variant", [{}, {"gram_variant": True}], ids=["batched", "gram"])
def test_batches_and_the_gram_variant_agree_with_fp64(variant: Any, seed: int) -> None:
    shapes = [(24, 96), (96, 24), (24, 96), (40, 40), (3, 24, 96), (24, 200)]
    params = params_of(seed, shapes)
    start = [param.detach().clone() for param in params]
    optimizer = Muon(params, lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, **variant)
    train(optimizer, params, seed, 1)
    for param, before in zip(params, start, strict=True):
        assert param.grad is not None
        moved = (before - param.detach()).reshape(-1, *param.shape[-2:])
        for got, grad in zip(moved, param.grad.reshape(-1, *param.shape[-2:]), strict=True):
            scale = math.sqrt(max(1, grad.shape[0] / grad.shape[1]))
            assert off(got, scale * exact(grad)) < FAR


@pytest.mark.parametrize("name", SETS)
def test_every_set_drives_singular_values_to_one(name: str, seed: int) -> None:
    """Also those far below the norm, in both variants, as far as fp64 does."""
    torch.manual_seed(seed)
    u, v = (torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64))[0] for _ in range(2))
    update = u @ torch.diag(torch.logspace(0, -1.5, 64, dtype=torch.float64)) @ v
    update = torch.cat([update, torch.zeros(64, 192, dtype=torch.float64)], 1)
    triples, steps = SETS[name]
    wanted = exact(update, steps, triples)
    assert 0.5 < torch.linalg.svdvals(wanted).min() <= torch.linalg.svdvals(wanted).max() < 1.5
    for gram_variant in (False, True):
        x = update.to(BF16)
        found = orthogonalize(
            x, coefficients(triples, steps), eps=1e-7, gram_variant=gram_variant, symmetric=False
        )
        assert off(found, wanted) < 0.1, gram_variant


def test_coefficients_by_step() -> None:
    assert coefficients(SIMPLE, 3) == (SIMPLE,) * 3
    assert coefficients(POLAR_EXPRESS, 10) == (*POLAR_EXPRESS, *POLAR_EXPRESS[-1:] * 2)
    assert coefficients([SIMPLE, (2, -1.5, 0.5)], 3)[1:] == ((2.0, -1.5, 0.5),) * 2


def test_the_gram_variant_is_taken_where_it_is_cheaper() -> None:
    assert gram_pays(512, 2048, 5, True)
    assert gram_pays(14336, 4096, 5, True)
    assert not gram_pays(4096, 4096, 5, True)
    plain, cheap = (flops(64, 512, 5, gram_variant=g, symmetric=False) for g in (False, True))
    assert plain == 5 * 2 * 64 * 64 * (2 * 512 + 64)
    assert cheap < plain / 1.5


def test_updates_below_eps_shrink_unless_eps_is_zero(seed: int) -> None:
    """Clipping may scale gradients to less than torch's eps: its update is then nearly none."""
    moved: dict[float, list[Tensor]] = {}
    for eps in (1e-7, 0.0):
        for scale in (1.0, 1e-12, 1e-30):
            params = params_of(seed, [(16, 24), (16, 24), (9, 9)])
            start = [param.detach().clone() for param in params]
            train(Muon(params, eps=eps, weight_decay=0.0), params, seed, 1, scale)
            moved.setdefault(eps, []).extend(
                p.detach() - s for p, s in zip(params, start, strict=True)
            )
    lost, kept = moved[1e-7], moved[0.0]
    assert lost[3].norm() < 0.01 * lost[0].norm()
    for one, other in zip(kept[:6], kept[3:], strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=1e-4)
    zeros = torch.zeros(3, 4, 5, dtype=BF16)
    normalize(zeros, 0.0)
    assert not zeros.any()


WAYS: dict[str, dict[str, Any]] = {
    "alone": ALONE,
    "alone without look ahead": {**ALONE, "nesterov": False},
    "batched": {},
    "gram": {"gram_variant": True},
    "parts": {"head_dim": 8},
}


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_updates_do_not_depend_on_the_size_of_gradients(
    way: str, dtype: torch.dtype, seed: int
) -> None:
    """Powers of two change no bit: not where squares of elements, or their sums, are too large or
    too small for fp32, nor with torch's eps where the norm is above it.
    """
    powers = [-8, -4, 12] if dtype == torch.float16 else [-100, -70, -40, 40, 62, 64, 90, 125]
    for eps in (0.0, 1e-7):
        moved: dict[int, list[Tensor]] = {}
        for power in [0, *(power for power in powers if power > 0 or eps == 0)]:
            params = params_of(seed, [(16, 24), (16, 24), (24, 16), (3, 16, 8)], dtype)
            for param in params:
                param.data.zero_()
            optimizer = Muon(params, eps=eps, lr=1.0, weight_decay=0.0, **WAYS[way])
            train(optimizer, params, seed, 2, 2.0**power)
            moved[power] = [param.detach() for param in params]
        assert all(0.5 < each.float().norm() < 50 for each in moved[0])
        for power, found in moved.items():
            if dtype == torch.float16:  # which rounds what is small itself
                pairs = zip(found, moved[0], strict=True)
                assert all(off(one, other.double()) < FAR for one, other in pairs), (eps, power)
            else:
                assert equal(found, moved[0]), (eps, power)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_what_is_no_number_stays_none(bad: float, seed: int) -> None:
    for options in WAYS.values():
        params = params_of(seed, [(16, 24)])
        params[0].grad = torch.ones(16, 24)
        params[0].grad[3, 5] = bad
        Muon(params, **options).step()
        assert params[0].isnan().any(), options


# -- how parameters are cut ----------------------------------------------------------------------


def separate(seed: int, weight: Tensor, parts: list[Tensor], **options: Any) -> list[Tensor]:
    """What the parts, views of a gradient's shape, become as parameters of their own."""
    params = [nn.Parameter(part.clone()) for part in parts]
    optimizer = Muon(params, **options, **ALONE)
    for param, grad in zip(params, [p.clone() for p in parts], strict=True):
        param.grad = grad.sin()
    optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("batched", [False, True])
def test_parts_are_matrices_of_their_own(batched: bool, seed: int) -> None:
    """Q, K and V, heads of them, and experts: as if each were a parameter."""
    torch.manual_seed(seed)
    cases: list[tuple[tuple[int, ...], dict[str, Any]]] = [
        ((48, 20), {"split_sizes": (24, 12, 12)}),
        ((48, 20), {"split_sizes": (24, 12, 12), "head_dim": 6}),
        ((48, 20), {"head_dim": 8}),
        ((3, 12, 20), {}),
        ((3, 12, 20), {"split_sizes": (8, 4)}),
    ]
    for shape, cut in cases:
        param = nn.Parameter(torch.randn(shape))
        size = cut.get("head_dim")
        sizes = [size] * (48 // size) if size else list(cut.get("split_sizes", shape[-2:-1]))
        stack = param.detach().reshape(-1, *shape[-2:])
        parts = [part for each in stack for part in each.split(sizes)]
        options = {"lr": 0.1, "adjust_lr_fn": "match_rms_adamw"}
        wanted = separate(seed, param, parts, **options)
        param.grad = param.detach().sin()
        Muon([{"params": [param], **cut}], **options, batched=batched, symmetric=False).step()
        stack = param.detach().reshape(-1, *shape[-2:])
        found = [part for each in stack for part in each.split(sizes)]
        for one, other in zip(found, wanted, strict=True):
            if batched:
                torch.testing.assert_close(one, other, rtol=0.02, atol=0.01)
            else:
                assert torch.equal(one, other), (shape, cut)


@pytest.mark.parametrize(
    ("shape", "options", "told"),
    [
        ((5,), {}, "use_muon=False"),
        ((8, 4), {"split_sizes": (4, 2)}, "add up to 6"),
        ((8, 4), {"head_dim": 3}, "not heads of head_dim=3"),
        ((8, 4), {"split_dim": 1}, "fix: leave it out: columns are not cut"),
        ((8, 4), {"lr": -1.0}, "cannot be negative"),
        ((8, 4), {"momentum": -0.5}, "cannot be negative"),
        ((8, 4), {"ns_steps": 100}, "from 1 to 99"),
        ((8, 4), {"ns_coefficients": "polar_express"}, "three numbers"),
        ((8, 4), {"ns_coefficients": (1.0, 2.0)}, "three numbers"),
        ((8, 4), {"adjust_lr_fn": "magic"}, "match_rms_adamw"),
        ((8, 4), {"lr": torch.ones(2)}, "give it one"),
        ((8, 4), {"use_muon": False, "betas": (2.0, 0.9)}, "betas"),
    ],
)
def test_errors_say_what_to_do(shape: Any, options: Any, told: str) -> None:
    with pytest.raises(OptimizerError, match=told):
        Muon([{"params": params_of(0, [shape]), **options}])
    optimizer = Muon(params_of(0, [(2, 2)]))
    with pytest.raises(OptimizerError, match=told):
        optimizer.add_param_group({"params": params_of(1, [shape]), **options})
    assert len(optimizer.param_groups) == 1


def test_a_removed_option_is_refused_with_its_replacement() -> None:
    with pytest.raises(OptionError, match="split_dim is no option of Muon any more"):
        Muon(params_of(0, [(8, 4)]), split_dim=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'split'"):
        Muon(params_of(0, [(8, 4)]), split=1)


def test_gradients_that_are_no_matrices_are_refused() -> None:
    (param,) = params_of(0, [(4, 4)])
    param.grad = torch.eye(4).to_sparse()
    with pytest.raises(OptimizerError, match="dense real"):
        Muon([param]).step()


# -- AdamW beside it -----------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.pos_embed = nn.Parameter(torch.zeros(1, 8, 16))


class Tiny(nn.Module):
    """One of everything that rules tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.attention = Attention()
        self.norm = nn.LayerNorm(16)
        self.patch = nn.Conv1d(16, 16, 3)
        self.experts = GroupedLinear(4, 16, 32, bias=True)
        self.gate = nn.Linear(16, 1, bias=False)
        self.unembed = nn.Linear(16, 50, bias=False)
        self.lm_head = nn.Linear(16, 7, bias=False)


def test_where_parameters_go_and_why() -> None:
    groups = muon_groups(Tiny(), {"*.qkv.weight": {"head_dim": 8, "lr": 0.5}})
    optimizer = Muon(groups, lr=0.02, adamw={"lr": 3e-4})
    first, *lines = optimizer.explain().splitlines()
    assert first == "Muon: 2 parameters, 2,816 elements, AdamW: 11 parameters, 2,848 elements"
    names = dict(Tiny().named_parameters())
    found = {name: line for line in lines for name in line.split() if name in names}
    for name, how, why in (
        ("embed.weight", "AdamW", "embedding: a table"),
        ("attention.qkv.weight", "Muon, 6 of 8x16", "matrix: a weight matrix"),
        ("attention.qkv.bias", "AdamW", "vector: fewer"),
        ("attention.pos_embed", "AdamW", "embedding"),
        ("norm.weight", "AdamW", "vector"),
        ("patch.weight", "AdamW", "convolution"),
        ("experts.weight", "Muon, 4 of 32x16", "experts: a stack"),
        ("experts.bias", "AdamW", "bias: a bias"),
        ("gate.weight", "AdamW", "thin"),
        ("unembed.weight", "AdamW", "head: the output layer"),
        ("lm_head.weight", "AdamW", "head"),
    ):
        assert found[name].startswith(how), found[name]
        assert why in found[name]
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["param_names"]}
    assert rates["attention.qkv.weight"] == 0.5
    assert rates["experts.weight"] == 0.02
    assert rates["norm.weight"] == 3e-4


def test_what_is_asked_for_overrules_and_is_said() -> None:
    model = Tiny()
    model.norm.weight.requires_grad_(False)
    told = Muon(muon_groups(model, {"experts.weight": {"use_muon": False}})).explain()
    assert "requested by 'experts.weight'; else experts" in told
    assert "(frozen)" in told
    params = params_of(0, [(4, 4), (3,)])
    plain = Muon([{"params": params[:1]}, {"params": params[1:], "use_muon": False}]).explain()
    assert "parameter 1  3" in plain
    assert "its group has use_muon=False" in plain


def test_adamw_groups_are_adamw(seed: int) -> None:
    """Their own defaults, options, and bits."""
    shapes = [(7, 5), (9,)]
    options: dict[str, Any] = {"lr": 0.01, "exp_avg_sq_dtype": BF16, "seed": 3}
    ours, others = params_of(seed, shapes, BF16), params_of(seed, shapes, BF16)
    (matrix,) = params_of(seed, [(4, 4)])
    groups = [{"params": [matrix]}, {"params": ours, "use_muon": False}]
    optimizer = Muon(groups, lr=0.3, adamw=options)
    assert optimizer.param_groups[1]["weight_decay"] == 0.01
    other = AdamW(others, **options)
    train(optimizer, ours, seed)
    train(other, others, seed)
    assert equal(ours, others)
    assert matrix not in optimizer.state, "it had no gradient"
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # as schedulers do
    before = [p.clone() for p in ours]
    train(optimizer, ours, seed, 1)
    assert equal(ours, before)


def test_a_closure_and_what_update_costs() -> None:
    params = params_of(0, [(8, 32), (5,)])
    optimizer = Muon([{"params": params[:1]}, {"params": params[1:], "use_muon": False}])

    def loss() -> float:
        optimizer.zero_grad()
        value = torch.stack([param.square().sum() for param in params]).sum()
        value.backward()
        return value.item()

    first, second = optimizer.step(loss), optimizer.step(loss)
    assert second < first
    work = flops(8, 32, 5, gram_variant=False, symmetric=True)
    assert optimizer.update_cost(params[0]) == work + 8 * 32 * 4096
    assert optimizer.update_cost(params[1]) == 5 * 4096
    with pytest.raises(OptimizerError, match="in no group"):
        optimizer.update_cost(torch.ones(2, 2))


# -- checkpoints ---------------------------------------------------------------------------------


def both(seed: int) -> tuple[list[Any], Muon]:
    params = params_of(seed, [(8, 24), (8, 24), (6,)], BF16)
    groups = [{"params": params[:2]}, {"params": params[2:], "use_muon": False}]
    return params, Muon(groups, lr=0.1, adamw={"lr": 0.03})


@pytest.mark.parametrize("way", ["state_dict", "pickle", "copy"])
def test_training_goes_on_bit_for_bit(way: str, seed: int) -> None:
    """Moments of AdamW stay fp32 beside bf16 parameters."""
    params, optimizer = both(seed)
    train(optimizer, params, seed, 2)
    if way == "state_dict":
        others, other = both(seed)
        for mine, its in zip(params, others, strict=True):
            its.data.copy_(mine.data)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        make = copy.deepcopy if way == "copy" else lambda o: pickle.loads(pickle.dumps(o))
        other = make(optimizer)
        others = [param for group in other.param_groups for param in group["params"]]
    assert other.state[others[2]]["exp_avg"].dtype == torch.float32
    train(optimizer, params, seed + 1, 2)
    train(other, others, seed + 1, 2)
    assert equal(params, others)
    other.add_param_group({"params": params_of(seed, [(3,)]), "use_muon": False})
    assert other.param_groups[2]["lr"] == 0.03


@pytest.mark.parametrize("flat", [False, True])
def test_a_distributed_checkpoint_goes_by_names(flat: bool, seed: int) -> None:
    """Groups with different options, flattened too."""

    def made() -> tuple[nn.Module, Muon]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 16), nn.LayerNorm(16)).to(BF16)
        groups = muon_groups(model, {"1.weight": {"head_dim": 8}})
        return model, Muon(groups, adamw={"exp_avg_sq_dtype": BF16})

    def run(model: nn.Module, optimizer: Muon) -> None:
        for at in range(2):
            optimizer.zero_grad()
            model(torch.tensor([at, 3])).float().square().mean().backward()
            optimizer.step()

    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    (model, optimizer), (other_model, other) = made(), made()
    run(model, optimizer)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    other_model.load_state_dict(model.state_dict())
    set_optimizer_state_dict(other_model, other, saved, options=options)
    run(model, optimizer)
    run(other_model, other)
    assert equal(list(model.parameters()), list(other_model.parameters()))


def test_torchs_checkpoint_is_loaded_and_another_kind_is_not(seed: int) -> None:
    ours, theirs = params_of(seed, SHAPES), params_of(seed, SHAPES)
    other = torch.optim.Muon(theirs, lr=0.03)
    train(other, theirs, seed, 2)
    optimizer = Muon(ours, **ALONE)
    for mine, its in zip(ours, theirs, strict=True):
        mine.data.copy_(its.data)
    optimizer.load_state_dict(copy.deepcopy(other.state_dict()))
    assert optimizer.param_groups[0]["lr"] == 0.03
    train(optimizer, ours, seed + 1, 2)
    train(other, theirs, seed + 1, 2)
    assert equal(ours, theirs)
    rest = Muon([{"params": params_of(seed, SHAPES), "use_muon": False}])
    with pytest.raises(OptimizerError, match="use_muon=False here and True"):
        rest.load_state_dict(optimizer.state_dict())


def test_a_momentum_of_another_shape_is_refused(seed: int) -> None:
    (param,) = params_of(seed, [(4, 6)])
    optimizer = Muon([param])
    optimizer.state[param]["momentum_buffer"] = torch.zeros(6, 4)
    param.grad = torch.ones(4, 6)
    with pytest.raises(OptimizerError, match="another model"):
        optimizer.step()


# -- DTensors ------------------------------------------------------------------------------------


def sharded(seed: int) -> bool:
    """Training with whole matrices on each rank has the bits of whole training."""
    mesh = init_device_mesh("cpu", (2,))
    cut = {"head_dim": 4, "adjust_lr_fn": "match_rms_adamw"}
    shapes = [(16, 20), (3, 4, 6), (3, 4, 6)]
    placements = [Shard(0), Replicate(), Shard(0)]
    whole = params_of(seed, shapes)
    parts: list[Any] = [
        nn.Parameter(distribute_tensor(p.detach(), mesh, [placement]))
        for p, placement in zip(params_of(seed, shapes), placements, strict=True)
    ]
    one, other = (
        Muon([{"params": some[:1], **cut}, {"params": some[1:]}], lr=0.1, **ALONE)
        for some in (whole, parts)
    )
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        for a, b, placement in zip(whole, parts, placements, strict=True):
            a.grad = torch.randn(a.shape, generator=generator)
            b.grad = distribute_tensor(a.grad, mesh, [placement])
        one.step()
        other.step()
    full = [DTensor.full_tensor(part) for part in parts]
    sizes = [other.state[part]["momentum_buffer"].to_local().shape for part in parts]
    first = torch.distributed.get_rank() == 0
    assert sizes == [(8, 20), (3, 4, 6), (2 if first else 1, 4, 6)]
    for placement, rows in ((Shard(0), 12), (Shard(1), 12), (Shard(0), 1)):  # 1: one rank has all
        param: Any = nn.Parameter(distribute_tensor(torch.ones(rows, 20), mesh, [placement]))
        param.grad = torch.ones_like(param)
        with pytest.raises(OptimizerError, match=r"Muon needs whole ones. fix: .*LayerWise\("):
            Muon([param]).step()
        before = param.detach().clone()
        Muon([param], lr=0.0).step()  # as torch.distributed.checkpoint makes states
        assert torch.equal(param.to_local(), before.to_local())
    return all(torch.equal(a.detach(), b) for a, b in zip(whole, full, strict=True))


def test_dtensors_have_the_bits_of_whole_parameters(pool: Pool, seed: int) -> None:
    assert pool(2).run(sharded, seed) == [True, True]


def test_matrices_are_views_whatever_the_strides() -> None:
    weight = torch.randn(4, 3, 8, 16).to(memory_format=torch.channels_last)
    group = {"split_sizes": None, "head_dim": None}
    for matrix in matrices(weight, group):
        matrix.zero_()
    assert not weight.any()
