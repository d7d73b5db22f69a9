"""Trains a tensor-parallel Llama with Accelerate and with the Trainer of transformers.

    python accelerated.py rank folder name    # a process for each of 2 ranks

Accelerate takes each process for one alone: on CPUs it knows no ranks that share a model. `name` is
what its `dynamo_backend` gets, or "none", where the model is compiled before it is prepared.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from tests.support.hugging_face import VOCABULARY, model_of
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import interlace
from interlace.tensor_parallel import parallelize

STEPS = 3


def accelerated(model: Any, rows: list[Any], backend: str | None) -> tuple[list[float], Any]:
    """The losses of steps with Accelerate, and the model that it prepared."""
    accelerator = Accelerator(cpu=True, dynamo_backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=2))
    losses: list[float] = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def trained(model: Any, rows: list[Any], folder: str, backend: str | None) -> tuple[list[float], Any]:
    """The losses of steps with the Trainer, and the model that it called."""
    options = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=0.1,
        optim="sgd",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        torch_compile_backend=backend,
    )
    trainer = Trainer(model=model, args=options, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.model_wrapped


def main(rank: int, folder: str, name: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    backend = None if name == "none" else name
    torch.manual_seed(0)
    whole = model_of("Llama")
    tokens = torch.randint(VOCABULARY, (2 * STEPS, 7))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    for train in (accelerated, lambda *given: trained(given[0], given[1], folder, given[2])):
        expected, _ = train(copy.deepcopy(whole), rows, None)
        model = copy.deepcopy(whole)
        parallelize(model, mesh)
        if backend is None:
            model.compile(backend="interlace")
        losses, called = train(model, rows, backend)
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
        assert len(losses) == STEPS
        told = str(interlace.explain(called))
        sums = told.count("matmul_all_reduce  model.layers")
        assert sums >= 4, told  # of row-parallel layers, and in backward of column-parallel ones
        print("losses", losses, "overlapped", sums, flush=True)
    interlace.release()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
