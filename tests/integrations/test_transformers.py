"""Models that transformers distributes with overlapped layers, on 2 processes, beside the whole."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import itertools
import logging
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support.hugging_face import (
    FAMILIES,
    MORE_FAMILIES,
    PLANS,
    VOCABULARY,
    differing,
    model_of,
)
from tests.support.pool import Pool
from torch import nn
from torch._dynamo.exc import TorchRuntimeError
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import interlace
from interlace.errors import InputError, UnsupportedError
from interlace.float8 import Recipe
from interlace.frontend.backend import backend
from interlace.tensor_parallel import parallelize, styles

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")),
    reason="from_pretrained distributes models where accelerate is installed",
)
GENERATED = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}


def loaded(folder: str, whole: Any, plan: dict[str, str] | str = "auto") -> Any:
    """A model that the first rank saves, and all ranks load in parts."""
    importlib.import_module("interlace.integrations.transformers")
    if dist.get_rank() == 0:
        whole.save_pretrained(folder)
    dist.barrier()
    ranks = dist.get_world_size()
    return type(whole).from_pretrained(folder, tp_plan=plan, tp_size=ranks).train()


def step(model: Any, tokens: torch.Tensor, sums: int = 0) -> dict[str, Any]:
    """The loss and the gradients of a step, in which so many layers overlap their sums."""
    original = styles.linear_all_reduce
    with mock.patch.object(styles, "linear_all_reduce", wraps=original) as overlapped:
        loss = model(input_ids=tokens, labels=tokens).loss
    assert overlapped.call_count == sums, f"{overlapped.call_count} layers overlap, not {sums}"
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss, **grads}


def like_whole(kind: str, folder: str, seed: int) -> list[str]:
    """Differences between the whole model and both ways of distributing it, on this rank."""
    torch.manual_seed(seed)
    whole = model_of(kind, vocab_size=VOCABULARY + 1)  # 5.17 gathers equal parts alone
    for param in whole.parameters():  # some begin as zeros
        param.data.add_(torch.randn_like(param), alpha=0.1)
    tokens = torch.randint(VOCABULARY, (2, 7))
    plan = whole.tp_plan
    sums = sum(
        isinstance(module, nn.Linear)
        and plan.get(re.sub(r"\.\d+\b", ".*", name), "").startswith("rowwise")
        for name, module in whole.named_modules()
    )
    given, added = copy.deepcopy(whole), PLANS.get(kind, {})
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    parallelize(given, mesh, plan | added)
    models = {"loaded": loaded(folder, whole, added or "auto"), "parallelized": given}
    expected = step(whole, tokens)
    text = whole.generate(tokens, **GENERATED)
    wrong: list[str] = []
    for way, model in models.items():
        found = step(model, tokens, sums)
        wrong += [f"{way}: {each}" for each in differing(found, expected)]
        if not torch.equal(model.generate(tokens, **GENERATED), text):
            wrong.append(f"{way}: generate")
    return wrong


@pytest.mark.parametrize(
    "kind", [*FAMILIES, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE_FAMILIES)]
)
def test_a_family_trains_and_generates_as_the_whole_model(
    pool: Pool, kind: str, tmp_path: Path, seed: int
) -> None:
    for wrong in pool(2).run(like_whole, kind, str(tmp_path), seed, timeout_s=100):
        assert not wrong


def used(folder: str, seed: int) -> list[str]:
    """Differences of a loaded Llama: one layer quantized, compiled as one graph, and saved."""
    torch.manual_seed(seed)
    whole = model_of("Llama", num_hidden_layers=1, vocab_size=VOCABULARY + 1)  # as above
    tokens = torch.randint(VOCABULARY, (2, 7))
    expected = step(whole, tokens)
    model = loaded(folder, whole)
    model.model.layers[0].mlp.down_proj._hf_quantized_needs_local_tp = True  # torchao's mark
    wrong = differing(step(model, tokens, sums=1), expected)
    model.zero_grad()
    del model.model.layers[0].mlp.down_proj._hf_quantized_needs_local_tp
    compiled: Any = torch.compile(model, backend="interlace", fullgraph=True)
    compiled(input_ids=tokens, labels=tokens).loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    wrong += differing(grads, {name: expected[name] for name in grads})
    assert str(interlace.explain(compiled)).count("matmul_all_reduce  model.layers.0") >= 2
    model.save_pretrained(f"{folder}/saved")
    saved = type(whole).from_pretrained(f"{folder}/saved").state_dict()
    return wrong + differing(saved, whole.state_dict())


@pytest.mark.timeout(150)
def test_a_loaded_model_is_compiled_and_saved(pool: Pool, tmp_path: Path, seed: int) -> None:
    for wrong in pool(2).run(used, str(tmp_path), seed, timeout_s=140):
        assert not wrong


GREEDY: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
STATIC = GREEDY | {"cache_implementation": "static", "max_cache_len": 32}


def graphs_of(model: Any, whole: Any, prompts: list[torch.Tensor], given: Any) -> list[int]:
    """How many graphs each call of `generate` compiles; its tokens are those of the whole model."""
    counts = [len(backend.graphs)]
    for tokens in prompts:
        text = model.generate(tokens, **given)
        assert torch.equal(text, whole.generate(tokens, **GREEDY))
        counts.append(len(backend.graphs))
    return [after - before for before, after in itertools.pairwise(counts)]


GRAPHS = {"wrapper": [0, 0], "in place": [2, 0], "by transformers": [1, 0], "growing": [3, 0]}
"""How many graphs two calls of `generate` compile, by how the model is compiled."""


def generated(folder: str, seed: int, ways: list[str]) -> dict[str, list[int]]:
    """The same as found, for some of them."""
    torch.manual_seed(seed)
    whole = model_of("Llama", num_hidden_layers=1, vocab_size=VOCABULARY + 1)
    tokens = [torch.randint(1, VOCABULARY, (2, 7))] * 2
    model = loaded(folder, whole.eval()).eval()
    configs: Any = importlib.import_module("transformers")
    steps = configs.CompileConfig(backend="interlace", mode=None)
    steps._compile_all_devices = True  # as on GPUs
    counts: dict[str, list[int]] = {}
    for way in ways:
        torch.compiler.reset()  # else lengths are symbols from the start
        compiled: Any = torch.compile(model, backend="interlace") if way == "wrapper" else model
        if way in ("in place", "growing"):
            model.compile(backend="interlace")
            steps.backend = "eager"  # not taken: the steps are compiled in place
        given = GREEDY if way == "growing" else STATIC
        if way in ("in place", "by transformers"):
            given = given | {"compile_config": steps}
        counts[way] = graphs_of(compiled, whole, tokens, given)
    torch.compiler.reset()
    return counts


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "ways",
    [
        ["wrapper", "in place"],
        pytest.param(["by transformers", "growing"], marks=pytest.mark.slow),
    ],
    ids=", ".join,
)
def test_generate_compiles_what_is_compiled_in_place(
    pool: Pool, tmp_path: Path, seed: int, ways: list[str]
) -> None:
    """As the page says: the prefill and the steps, once."""
    for counts in pool(2).run(generated, str(tmp_path), seed, ways, timeout_s=190):
        assert counts == {way: GRAPHS[way] for way in ways}


def lengths(seed: int) -> tuple[list[int], str]:
    """How many graphs prompts of three lengths compile where the head is whole; what happens to
    the second one where the plan cuts it."""
    torch.manual_seed(seed)
    whole = model_of("Llama", num_hidden_layers=1).eval()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    prompts = [torch.randint(1, VOCABULARY, (2, size)) for size in (7, 9, 12)]
    model, cut = copy.deepcopy(whole), copy.deepcopy(whole)
    plan = {name: word for name, word in whole.tp_plan.items() if name != "lm_head"}
    parallelize(model, mesh, plan)
    parallelize(cut, mesh)
    model.compile(backend="interlace")
    counts = graphs_of(model, whole, prompts, STATIC)
    torch.compiler.reset()
    cut.compile(backend="eager")
    cut.generate(prompts[0], **STATIC)
    with pytest.raises(TorchRuntimeError) as failed:
        cut.generate(prompts[1], **STATIC)
    torch.compiler.reset()
    return counts, str(failed.value)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_prompts_of_many_lengths_share_a_prefill(pool: Pool, seed: int) -> None:
    for counts, failed in pool(2).run(lengths, seed, timeout_s=290):
        assert counts == [2, 1, 0]
        assert "unhashable type: non-nested SymInt" in failed


def summed(seed: int) -> list[str]:
    """Differences where a plan has "all_reduce": Inkling's, with two words put right."""
    torch.manual_seed(seed)
    whole = model_of("Inkling")
    for param in whole.parameters():
        torch.nn.init.normal_(param, std=0.2)
    model = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with pytest.raises(
        InputError, match=r"embed_tokens: the plan names a .*InklingNormedEmbedding"
    ):
        parallelize(model, mesh)
    plan = model.tp_plan | {"model.layers.*.mlp.experts.gate_up_proj": "packed_colwise"}
    parallelize(model, mesh, plan | {"model.embed_tokens": "replicate"})
    tokens = torch.randint(VOCABULARY, (2, 7))
    return differing(step(model, tokens, sums=2), step(whole, tokens))


def test_outputs_that_a_plan_sums_are_those_of_the_whole_model(pool: Pool, seed: int) -> None:
    for wrong in pool(2).run(summed, seed):
        assert not wrong


def each_word() -> dict[str, str]:
    """For each word of the installed release, why a layer of Llama does not take it, or nothing."""
    plans: Any = importlib.import_module("transformers.distributed.tensor_parallel")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    told: dict[str, str] = {}
    for word in plans.ALL_PARALLEL_STYLES:
        model = model_of("Llama")
        try:
            done = parallelize(model, mesh, {"model.layers.0.mlp.down_proj": word})
        except (InputError, UnsupportedError) as error:
            told[word] = str(error)
        else:
            told[word] = "" if [*done.applied.values()] == [word] else "not applied"
        changed = any(isinstance(p, DTensor) for p in model.parameters())
        assert changed == (told[word] == "")
    return told


def test_every_word_of_the_release_is_taken_or_refused(pool: Pool) -> None:
    told, _ = pool(2).run(each_word)
    taken = {word for word, why in told.items() if not why}
    assert {"colwise", "rowwise", "colwise_gather_output", "rowwise_split_input"} <= taken
    refused = {word: why for word, why in told.items() if why}
    assert {"packed_colwise", "sequence_parallel", "all_reduce"} <= refused.keys()
    for word, why in refused.items():
        assert "model.layers.0.mlp.down_proj" in why, word
        assert "plan" in why, word


def sizes() -> list[str]:
    """Messages of layers that do not overlap, and of sizes that FP8 does not take."""
    socket: Any = importlib.import_module("interlace.integrations.transformers")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plans = socket.ALL_PARALLEL_STYLES
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    socket.log.addHandler(handler)
    try:
        assert socket.register(recipe=Recipe()) == ("rowwise", "rowwise_split_input", "rowwise_rep")
        plans["rowwise"].validate_param(nn.Linear(21, 8), "weight", mesh, "a.down")
        plans["rowwise"].validate_param(nn.Linear(32, 16), "weight", mesh, "b.down")
        with pytest.raises(
            InputError, match=r"c\.down\.weight: `recipe` is given for a layer of 20"
        ):
            plans["rowwise"].validate_param(nn.Linear(20, 8), "weight", mesh, "c.down.weight")
    finally:
        socket.log.removeHandler(handler)
        socket.register()
    return told


def test_layers_that_do_not_overlap_are_named(pool: Pool) -> None:
    for told in pool(2).run(sizes):
        assert told == ["a.down does not overlap: 2 ranks have unequal parts of its 21 features"]


def test_a_release_without_such_plans_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.distributed.tensor_parallel", None)
    monkeypatch.delitem(sys.modules, "interlace.integrations.transformers", raising=False)
    with pytest.raises(UnsupportedError, match=r"install transformers 5\.17 or newer"):
        importlib.import_module("interlace.integrations.transformers")
