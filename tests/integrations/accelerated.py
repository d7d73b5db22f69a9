"""Trains a tensor-parallel Llama with Accelerate and with the Trainer of transformers.

    python accelerated.py rank folder name    # a process for each of 2 ranks

Accelerate takes each process for one alone: on CPUs it knows no ranks that share a model. `name` is
what its `dynamo_backend` gets, or "none", where the model is compiled before it is prepared.
"""

from __future__ import annotations

import copy
import importlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from tests.support.hugging_face import VOCABULARY, model_of
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import interlace
from interlace.tensor_parallel import parallelize

accelerate: Any = importlib.import_module("accelerate")
STEPS = 3


def plain(model: Any, rows: Any) -> list[float]:
    """The losses of steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    for batch in DataLoader(rows, batch_size=2):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def accelerated(model: Any, rows: Any, _: str, backend: str | None) -> list[float]:
    """The losses of the same steps with Accelerate."""
    accelerator = accelerate.Accelerator(cpu=True, dynamo_backend=backend)
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
    return losses


def trained(model: Any, rows: Any, folder: str, backend: str | None) -> list[float]:
    """The losses of the same steps with the Trainer."""
    options = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        torch_compile_backend=backend,
    )
    trainer = Trainer(model=model, args=options, train_dataset=rows)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main(rank: int, folder: str, name: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    backend = None if name == "none" else name
    torch.manual_seed(0)
    whole = model_of("Llama", num_hidden_layers=1)
    tokens = torch.randint(VOCABULARY, (7,))
    rows: Any = [{"input_ids": tokens, "labels": tokens}] * (2 * STEPS)
    expected = plain(copy.deepcopy(whole), rows)
    for train in (accelerated, trained):
        model = copy.deepcopy(whole)
        parallelize(model, mesh)
        if backend is None:
            model.compile(backend="interlace")
        losses = train(model, rows, folder, backend)
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
        sums = str(interlace.explain(model)).count("matmul_all_reduce  model.layers")
        assert sums >= 2, "no graph was compiled"
        print(f"{train.__name__}: {len(losses)} steps, {sums} sums overlap", flush=True)
    interlace.release()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
