"""Overrides of torchtitan's models on two ranks, beside the stock modules; its GraphTrainer."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.exc import Unsupported

pytest.importorskip("torchtitan", reason="needs torchtitan: make test EXTRAS=integrations")
from tests.external.graphs_support import fake_world
from tests.support import titan
from tests.support.pool import Pool
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torchtitan.config.override import derive
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.distributed.utils import get_spmd_context, set_spmd_backend
from torchtitan.experiments.graph_trainer.registry import PASS_PIPELINE_REGISTRY
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import ScaledBiasRowwiseLinear
from torchtitan.protocols.module import Module

import interlace
from interlace.errors import OptionError, SoundnessError, UnsupportedError
from interlace.integrations import torchtitan as integration

pytestmark = [pytest.mark.torchtitan, pytest.mark.timeout(150)]
PIPELINE = ("interlace.integrations.torchtitan.pipeline",)
BACKENDS = ("spmd_types", "partial_dtensor")


def beside_stock(kind: str, backend: str, imports: tuple[Any, ...], checked: bool) -> list[str]:
    """What differs from the stock model's training, on this rank."""
    seed = 5
    stock, dims = titan.build(titan.config_of(kind), backend)
    right = titan.trained(stock, dims, seed, checked=checked)
    config = titan.overridden(titan.config_of(kind), imports)
    model, dims = titan.build(config, backend)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in stock.named_parameters()]
    found = titan.trained(model, dims, seed, checked=checked)
    assert found.keys() == right.keys()
    assert len(right) > 20
    return [
        f"{name}: off by {(found[name] - value).abs().max()}"
        for name, value in right.items()
        if not torch.allclose(found[name], value, rtol=1e-5, atol=2e-6)
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["llama3", "qwen3"])
def test_trains_as_the_stock_model(pool: Pool, kind: str, backend: str) -> None:
    """Losses, gradients and Parameters; fused and separate projections; under torchtitan's check of
    types, where the backend has one."""
    given = kind, backend, titan.OVERRIDES, backend == "spmd_types"
    for wrong in pool(2).run(beside_stock, *given, timeout_s=140):
        assert not wrong


def checkpointed() -> list[bool]:
    """The same losses where what forward computed is computed again in backward."""
    losses = []
    for ac in (None, SelectiveAC.Config(), FullAC.Config()):
        config = titan.overridden(titan.config_of())
        found = titan.trained(*titan.build(config, "partial_dtensor", ac=ac), 5)
        losses.append([found[f"loss {step}"].item() for step in range(3)])
    assert losses[0][0] > losses[0][2] > 0
    return [loss == losses[0] for loss in losses]


def test_activation_checkpointing_changes_no_bit(pool: Pool) -> None:
    assert all(pool(2).run(checkpointed)[0])


def losses_of(options: dict[str, Any]) -> list[float]:
    """Losses with options, which the layers of both kinds have been given."""
    imports = [(name, options) for name in titan.OVERRIDES]
    model, dims = titan.build(titan.overridden(titan.config_of(), imports), "spmd_types")
    given: dict[str, list[Any]] = {"all_gather_linear": [], "linear_reduce_scatter": []}
    with pytest.MonkeyPatch.context() as patch:
        for name, seen in given.items():
            layer = getattr(integration, name)
            patch.setattr(
                integration,
                name,
                lambda *args, layer=layer, seen=seen, **how: (
                    seen.append(how["options"]) or layer(*args, **how)
                ),
            )
        found = titan.trained(model, dims, 3)
    for seen in given.values():
        assert seen == [options] * 12, "of three steps, two layers, attention and feed-forward"
    return [found[f"loss {step}"].item() for step in range(3)]


def test_options_of_an_import_are_those_of_its_layers(pool: Pool) -> None:
    ways = [{"strategy": "ring"}, {"strategy": "pipeline"}, {"overlap": False}]
    ring, pipeline, serial = (pool(2).run(losses_of, way)[0] for way in ways)
    assert ring == pipeline == pytest.approx(serial, rel=1e-6)


def exchanged(backend: str) -> None:
    """State dicts of either are those of the other, names, shapes and values."""
    stock, dims = titan.build(titan.config_of(), backend)
    model, _ = titan.build(titan.overridden(titan.config_of()), backend)
    x, _, given = titan.inputs(dims, 2048, 1)
    context = get_spmd_context(parallel_dims=dims)

    def logits(of: Any) -> torch.Tensor:
        with context(), torch.no_grad():
            return titan.whole(of(x, **given))

    with torch.no_grad():
        for scale, (source, target) in enumerate(((stock, model), (model, stock)), 2):
            for param in source.parameters():
                titan.whole(param).mul_(scale)
            assert not torch.allclose(logits(source), logits(target))
            state = {name: value.detach().clone() for name, value in source.state_dict().items()}
            assert state.keys() == target.state_dict().keys()
            assert "layers.0.attention.qkv_linear.wq.weight" in state
            target.load_state_dict(state, strict=True)
            assert torch.allclose(logits(source), logits(target), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_checkpoints_are_interchangeable(pool: Pool, backend: str) -> None:
    pool(2).run(exchanged, backend)


def without_tp() -> list[bool]:
    """Where TP is off, the bits of the stock module, which the override runs."""
    found = []
    for imports in ((), titan.OVERRIDES):
        model, dims = titan.build(titan.overridden(titan.config_of(), imports), "spmd_types", tp=1)
        found.append(titan.trained(model, dims, 7))
    return [torch.equal(found[0][name], found[1][name]) for name in found[0]]


def test_runs_as_the_stock_module_where_tensor_parallelism_is_off(pool: Pool) -> None:
    assert all(pool(1).run(without_tp)[0])


def with_flex_attention() -> list[torch.Tensor]:
    """Logits without gradients; FlexAttention as it is without Inductor."""
    found = []
    FlexAttention._compiled_flex_attn = staticmethod(flex_attention)
    for imports in ((), titan.OVERRIDES):
        config = titan.overridden(titan.config_of(sdpa=False, layers=1), imports)
        model, dims = titan.build(config, "spmd_types")
        x, _, given = titan.inputs(dims, 2048, 1)
        masks: Any = model._create_flex_attention_mask_for_document
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "torchtitan.models.common.decoder.create_attention_mask",
                create_block_mask,
            )
            given["attention_masks"] = masks(given["positions"], config.first_attention)
        with get_spmd_context(parallel_dims=dims)(), torch.no_grad():
            found.append(model(x, **given))
    return found


def test_flex_attention_of_the_default_backend(pool: Pool) -> None:
    for stock, overlapped in pool(2).run(with_flex_attention, replace=True):
        assert stock.std() > 0.1
        torch.testing.assert_close(overlapped, stock, rtol=1e-5, atol=1e-5)


def compiled(imports: tuple[str, ...]) -> tuple[str, list[float]]:
    """What `explain` says of a block that `--compile.backend interlace` compiles, and losses."""
    config = titan.overridden(titan.config_of(layers=1), imports)
    model, dims = titan.build(config, "spmd_types", compiler="interlace")
    found = titan.trained(model, dims, 2)
    return str(interlace.explain(model.layers)), [found[f"loss {i}"].item() for i in range(3)]


def test_the_backend_finds_sites_that_the_stock_model_hides(pool: Pool) -> None:
    """spmd_types scatters rows in another order where a batch has several sequences."""
    stock, losses = pool(2).run(compiled, (), timeout_s=140)[0]
    overlapped, same = pool(2).run(compiled, titan.OVERRIDES, timeout_s=140)[0]
    why = "the scattered rows are not in the order of the ranks"
    assert stock.count(why) == 4
    assert why not in overlapped
    assert "forward: 4 communications, sound" in overlapped
    assert same == pytest.approx(losses, rel=1e-6)


def refused_by_torchtitan() -> None:
    config = titan.overridden(titan.config_of(layers=1))
    model, dims = titan.build(config, "spmd_types", compiler="aot_eager")
    with pytest.raises(Unsupported, match=r"(?s)all_gather_linear.*of backend='interlace'"):
        titan.trained(model, dims, 1)
    with pytest.raises(ValueError, match="FlexAttention but compile backend 'interlace'"):
        titan.build(titan.config_of(sdpa=False, layers=1), "spmd_types", compiler="interlace")


def test_compilers_that_are_refused(pool: Pool) -> None:
    """By TorchDynamo other backends with the overrides, by torchtitan ours for FlexAttention."""
    pool(2).run(refused_by_torchtitan)


@contextlib.contextmanager
def spmd_backend(name: str) -> Iterator[None]:
    set_spmd_backend(name)
    yield
    set_spmd_backend("spmd_types")


def test_what_is_not_taken_is_refused_before_a_model_is_built() -> None:
    def layer(**settings: Any) -> Any:
        return titan.config_of(**settings).layers[0]

    block = layer()
    with spmd_backend("full_dtensor"), pytest.raises(UnsupportedError, match="give spmd_types or"):
        integration.feed_forward(block.feed_forward)
    for override, name in (("feed_forward", "FeedForward"), ("attention", "GQAttention")):
        part = getattr(layer(sequence_parallel=False), override)
        with pytest.raises(UnsupportedError, match=f"of a {name} is the same on all ranks"):
            getattr(integration, override)(part)
        with pytest.raises(OptionError, match="strategy"):
            getattr(integration, override)(getattr(block, override), strategy="faster")
    for name in ("w1", "w2", "w3"):
        part = layer().feed_forward
        setattr(part, name, derive(getattr(part, name), ScaledBiasRowwiseLinear.Config))
        with pytest.raises(UnsupportedError, match=f"`{name}` is a ScaledBiasRowwiseLinear"):
            integration.feed_forward(part)
    part = layer().attention
    part.wo.bias = True
    with pytest.raises(UnsupportedError, match="`wo` has a bias"):
        integration.attention(part)
    part = layer().attention
    part.qkv_linear = part.wo
    with pytest.raises(UnsupportedError, match="`qkv_linear` is a Linear: QKVLinear and"):
        integration.attention(part)


def test_modules_that_gather_nothing_stay_as_they_are() -> None:
    config = titan.config_of().layers[0].feed_forward
    config.sharding_config = None
    assert integration.feed_forward(config) is config
    assert type(config) is FeedForward.Config


# GraphTrainer


def step_graph(imports: tuple[str, ...]) -> fx.GraphModule:
    """The graph of a whole step, as GraphTrainer traces it."""
    from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer

    model, dims = titan.build(titan.overridden(titan.config_of(layers=1), imports), "spmd_types")
    x, y, given = titan.inputs(dims, 2048, 4)
    loss_of = titan.loss_of(2048)

    def step(x: Any, y: Any, count: Any, given: Any) -> list[Any]:
        loss, _ = loss_of(model(x, **given), y, count)
        return [loss, *torch.autograd.grad(loss, [*model.parameters()])]

    with get_spmd_context(parallel_dims=dims)():
        traced: Any = minimal_fx_tracer(step, module=model)(x, y, torch.tensor(64.0), given)
    names = [str(node.target) for node in traced.gm.graph.nodes]
    assert sum("_reduce_scatter_base_" in name for name in names) >= 4
    return traced.gm


def test_the_checking_pass_takes_the_graph_of_a_step() -> None:
    """Of a backend whose collectives run on the current stream, as NCCL's do."""
    with fake_world(2):
        graph = step_graph(())
        assert integration.interlace_check_pass(graph, []) is graph
        assert str(interlace.check_graph(graph)).startswith("sound (1 ranks, ")


def over_gloo() -> None:
    with pytest.raises(SoundnessError, match="and does not wait for _reduce_scatter_base_"):
        integration.interlace_check_pass(step_graph(()), [])
    with pytest.raises(UnsupportedError, match="GraphTrainer traces this layer"):
        step_graph(titan.OVERRIDES)


def test_the_checking_pass_finds_that_a_graph_over_gloo_waits_for_nothing(pool: Pool) -> None:
    """Such a graph gives NaN, if it is run. And overrides are refused."""
    pool(2).run(over_gloo)


def test_the_checking_pass_refuses_a_race() -> None:
    """The result of a collective is read before it is waited for."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    functional = torch.ops._c10d_functional
    begun = graph.call_function(functional.all_reduce.default, (x, "sum", "0"))
    early = graph.call_function(torch.ops.aten.neg.default, (begun,))
    waited = graph.call_function(functional.wait_tensor.default, (begun,))
    graph.output((early, waited))
    for node in graph.nodes:
        node.meta["val"] = torch.zeros(4)
    with pytest.raises(SoundnessError, match="neg_default reads all_reduce_default"):
        integration.interlace_check_pass(fx.GraphModule({}, graph), [torch.zeros(4)])


def test_the_pipeline_is_registered_by_an_override_that_replaces_nothing() -> None:
    config = titan.config_of()
    kinds = [type(part) for _, part, _, _ in config.traverse(Module.Config)]
    titan.overridden(config, PIPELINE)
    assert kinds == [type(part) for _, part, _, _ in config.traverse(Module.Config)]
    assert PASS_PIPELINE_REGISTRY["interlace"] is integration.interlace_passes


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None or importlib.util.find_spec("datasets") is None,
    reason="GraphTrainer's passes need all that torchtitan requires: pip install torchtitan==0.3.0",
)
def test_the_pipeline_is_the_default_one_after_a_check() -> None:
    from types import SimpleNamespace as Some

    from torchtitan.config import ParallelismConfig
    from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig
    from torchtitan.experiments.graph_trainer.passes import construct_default_graph_passes

    traced: Any = Some(state_fqns=[], num_static_inputs=0, tensor_input_indices=[])
    spec = Some(model=titan.config_of())
    settings = ParallelismConfig(tensor_parallel_degree=2)
    config = Some(model_spec=spec, compile=GraphTrainerCompileConfig(), parallelism=settings)

    def names(passes: list[Any]) -> list[str]:
        return [getattr(p, "func", p).__name__ for p in passes]

    first, *rest = names(PASS_PIPELINE_REGISTRY["interlace"](traced, config))
    assert first == "interlace_check_pass"
    assert rest == names(construct_default_graph_passes(traced, config))
    assert len(rest) > 5
