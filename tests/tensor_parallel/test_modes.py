"""What programs do with overlapped layers: checkpoints, FSDP2, autocast, FP8; what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from tests.support.pool import Pool
from tests.tensor_parallel.test_styles import Model, drawn, mesh_of, plan_of, trained
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from interlace.errors import GradientError, InputError
from interlace.float8 import Recipe
from interlace.nn.functional import all_gather_linear
from interlace.optim import GradAccumulator
from interlace.tensor_parallel import OverlapColwise, OverlapColwiseGroup, OverlapRowwise

ROWS: Any = Shard(1)


def differing(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, right in expected.items() if not torch.equal(found[name], right)]


def full_values(model: nn.Module) -> dict[str, Tensor]:
    return {n: getattr(t, "full_tensor", lambda t=t: t)() for n, t in model.state_dict().items()}


def saved(folder: str, seed: int) -> None:
    """Checkpoints of torch's layers are read by ours, and ours by torch's and by a whole model."""
    first, second = Path(folder, "first"), Path(folder, "second")
    kinds = [plan_of("torch sequence"), plan_of("sequence"), plan_of("sequence", group=True)]
    plain, ours, group = (
        parallelize_module(drawn(True, False, seed + i)[0], mesh_of(), plan)
        for i, plan in enumerate(kinds)
    )
    expected = full_values(plain)
    dcp.save(plain.state_dict(), checkpoint_id=first)
    for source, target in ((first, ours), (first, group)):
        state = target.state_dict()
        dcp.load(state, checkpoint_id=source)
        target.load_state_dict(state)
        assert not differing(full_values(target), expected)
    dcp.save(group.state_dict(), checkpoint_id=second)
    for other in (parallelize_module(Model(True, False), mesh_of(), kinds[0]), Model(True, False)):
        state = other.state_dict()
        dcp.load(state, checkpoint_id=second)
        other.load_state_dict(state)
        assert not differing(full_values(other), expected)


def test_checkpoints_move_both_ways(pool: Pool, tmp_path: Path, seed: int) -> None:
    pool(2).run(saved, str(tmp_path), seed)


def modes(seed: int) -> None:
    """What a training loop does with layers, on one rank."""
    whole, batches = drawn(True, True, seed)
    model: Any = parallelize_module(copy.deepcopy(whole), mesh_of(), plan_of("sequence"))
    group: Any = parallelize_module(copy.deepcopy(whole), mesh_of(), plan_of("sequence", True))
    tokens = batches[0]
    logits = model(tokens)
    assert torch.equal(group(tokens), logits), "one gather gives the bits of several"
    assert group.attention.wq._interlace_shared.input is None, "and its outputs are not kept"
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(model(tokens), logits)
            assert torch.equal(group(tokens), logits)

    again = copy.deepcopy(group)
    expected = trained(copy.deepcopy(group), batches)
    assert torch.equal(group(tokens), logits), "a copy has Parameters of its own"
    for part in (again.attention, again.feed_forward):
        own = part.forward
        part.forward = lambda *given, own=own: checkpoint(own, *given, use_reentrant=False)
    assert not differing(trained(again, batches), expected)

    with torch.autocast("cpu", torch.bfloat16):
        half = group(tokens)
        assert half.dtype == whole(tokens).dtype == torch.bfloat16
    torch.testing.assert_close(half.float(), logits, rtol=0.1, atol=0.1)

    weight: Any = model.feed_forward.w1.weight
    with pytest.raises(GradientError, match="cannot hold the gradient"):
        GradAccumulator(weight, torch.zeros(weight.shape))
    accumulator = GradAccumulator(weight)
    for _ in range(2):
        model(tokens).square().sum().backward()
    torch.testing.assert_close(accumulator.grad, weight.grad)
    assert weight.grad.placements == weight.placements
    accumulator.close()


def test_in_training_loops(pool: Pool, seed: int) -> None:
    pool(2).run(modes, seed)


def gathering(recipe: Recipe | None, out: Any) -> None:
    """A column-wise layer of a layout, in FP8 or of a width that the ranks do not share evenly."""
    mesh, rank, ranks = mesh_of(), dist.get_rank(), dist.get_world_size()
    whole = nn.Linear(32, 32 * ranks - (recipe is None))
    x = torch.randn(2, 16 * ranks, 32)
    part: Any = x.chunk(ranks, 1)[rank]
    style = OverlapColwise(
        input_layouts=ROWS, output_layouts=out, use_local_output=False, recipe=recipe
    )
    layer: Any = parallelize_module(copy.deepcopy(whole), mesh, style)
    y: Any = layer(input=part)
    assert y.shape == (2, 16 * ranks, whole.out_features)
    assert y.placements == (Shard(2) if out == Shard(-1) else out,)
    given: Any = DTensor.from_local(x, mesh, [Replicate()])
    assert torch.equal(layer(given).full_tensor(), y.full_tensor())
    own = [t.chunk(ranks)[rank] for t in (whole.weight, whole.bias)]
    right: Any = all_gather_linear(part, *own, group=mesh, dim=1, recipe=recipe)
    assert torch.equal(y.redistribute(placements=[Shard(2)]).to_local(), right)
    if recipe is None:
        (y * y).sum().backward()
        whole(x).square().sum().backward()
        for mine, theirs in ((layer.weight, whole.weight), (layer.bias, whole.bias)):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-3)


def alone(seed: int) -> None:
    """Layers by themselves."""
    torch.manual_seed(seed)
    mesh, rank, ranks = mesh_of(), dist.get_rank(), dist.get_world_size()
    for out in (Shard(-1), Replicate(), ROWS):
        for recipe in (None, Recipe()):
            gathering(recipe, out)
    x, layouts = torch.randn(2, 5, 4 * ranks + 1), {"input_layouts": Replicate()}
    for given in (layouts, {**layouts, "output_layouts": Shard(-1)}, {}):
        style = OverlapRowwise(**given)
        narrow: Any = parallelize_module(nn.Linear(4 * ranks + 1, 6 * ranks), mesh, style)
        right = nn.functional.linear(x, *full_values(narrow).values())
        if "output_layouts" in given:
            right = right.chunk(ranks, -1)[rank]
        y = narrow(x if given else x.chunk(ranks, -1)[rank])
        torch.testing.assert_close(y, right, rtol=1e-5, atol=1e-5)


def test_layouts_are_torchs(pool: Pool, seed: int) -> None:
    pool(3).run(alone, seed)


def under_fsdp(seed: int) -> list[str]:
    """Ranks of 2 x 2: what FSDP2 gives with torch's layers, and with ours."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole, _ = drawn(True, False, seed)
    torch.manual_seed(seed + mesh["dp"].get_local_rank())
    batches = [torch.randint(len(whole.head.weight), (2, 8)) for _ in range(2)]
    found = []
    for plan in (plan_of("torch sequence"), plan_of("sequence", group=True)):
        model: Any = parallelize_module(copy.deepcopy(whole), mesh["tp"], plan)
        for module in (model.attention, model.feed_forward, model):
            fully_shard(module, mesh=mesh["dp"])
        found.append(trained(model, batches))
    theirs, ours = found
    return [
        f"{name}: off by {(ours[name] - right).abs().max()}"
        for name, right in theirs.items()
        if not torch.allclose(ours[name], right, rtol=1e-4, atol=1e-5)
    ]


@pytest.mark.timeout(110)
def test_under_fsdp(pool: Pool, seed: int) -> None:
    for wrong in pool(4).run(under_fsdp, seed, timeout_s=100):
        assert not wrong


def refused() -> None:
    """Errors name the argument, and what it may be."""
    mesh, square = mesh_of(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    recipe, layer = Recipe(), nn.Linear(4, 4)
    other = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "c"))["c"]
    given: Any = DTensor.from_local(torch.ones(2, 4), other, [Replicate()])
    cut: Any = parallelize_module(nn.Linear(4, 4), mesh, OverlapRowwise(output_layouts=Shard(0)))
    embedding = nn.Embedding(4, 4)
    layer.weight = embedding.weight
    parallelize_module(embedding, mesh, OverlapColwise())
    own: Any = type("Own", (nn.Linear,), {"forward": lambda self, x: x})(4, 4)
    attempts: list[tuple[Any, str]] = [
        (lambda: OverlapColwise(output_layouts=Partial()), r"`output_layouts` is Partial.*Shard"),
        (lambda: OverlapColwise(recipe=recipe), "`recipe` .* `input_layouts` is Repl"),
        (lambda: OverlapRowwise(output_layouts=Shard(-1), recipe=recipe), "`output_layouts` is Sh"),
        (lambda: OverlapRowwise(recipe="fp8"), "`recipe` is 'fp8'"),  # type: ignore[arg-type]
        (lambda: OverlapColwiseGroup("wq"), "`names` is 'wq'"),
        (lambda: OverlapColwiseGroup(["a"], input_layouts=Shard(-1)), "`input_layouts` is"),
        (lambda: parallelize_module(layer, square, OverlapColwise()), "mesh has 2 dimensions"),
        (lambda: parallelize_module(nn.Linear(1, 4), mesh, OverlapRowwise()), "without any"),
        (lambda: parallelize_module(nn.ReLU(), mesh, OverlapColwise()), r"activation\.ReLU: nn"),
        (lambda: parallelize_module(own, mesh, OverlapRowwise(recipe=recipe)), "given for a Own"),
        (lambda: parallelize_module(layer, mesh, OverlapColwise()), "`weight` is shared"),
        (
            lambda: parallelize_module(cut, mesh, OverlapColwise()),
            "`weight` of a Linear is a DTensor",
        ),
        (lambda: parallelize_module(layer, mesh, OverlapColwiseGroup(["a"])), "`names` has 'a'"),
        (lambda: cut(torch.ones(3, 2)), "`x` has size 3 in dimension 0, .* multiple of 2"),
        (lambda: cut(given), "`input` lies on"),
    ]
    for attempt, told in attempts:
        with pytest.raises(InputError, match=told):
            attempt()


def test_what_does_not_fit_is_refused(pool: Pool) -> None:
    pool(2).run(refused)


def changed_between(seed: int) -> list[str]:
    """Layers of one input, called by themselves, of which one's Parameters change between."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(seed)
    whole = nn.ModuleDict({name: nn.Linear(16, 8) for name in ("a", "b")})
    x, wrong = torch.randn(4, 16), []

    def new(layer: Any, name: str, value: Any) -> None:
        setattr(layer, name, nn.Parameter(value))

    def data(layer: Any, name: str, value: Any) -> None:
        getattr(layer, name).data = value

    def local(layer: Any, name: str, value: Any) -> None:
        with torch.no_grad():
            getattr(layer, name).to_local().copy_(value.to_local())

    for change in (new, data, local):
        for name in ("weight", "bias"):
            model = copy.deepcopy(whole)
            style = OverlapColwiseGroup(("a", "b"), input_layouts=Replicate())
            parallelize_module(model, mesh, style)
            model["a"](x)
            param = getattr(model["b"], name)
            change(model["b"], name, 2 * param.detach())
            params: Any = model["b"].parameters()
            expected = F.linear(x, *(p.to_local() for p in params))
            if not torch.allclose(model["b"](x), expected):
                wrong.append(f"{change.__name__} {name}")
    return wrong


def test_parameters_that_change_between_layers_of_a_group(pool: Pool, seed: int) -> None:
    assert pool(2).run(changed_between, seed) == [[]] * 2
