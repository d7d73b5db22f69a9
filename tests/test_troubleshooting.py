"""Every message that docs/how-to/troubleshooting.md quotes is one that a user sees: provoked here.

A line of the page's text blocks must be in one of the messages, but for numbers; `...` stands for
any text.
"""

from __future__ import annotations

import io
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.pool import Pool
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import interlace
from interlace.options import Options

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "troubleshooting.md"
TIMEOUT_S = 20.0


def mlp(mesh: DeviceMesh) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    plan = {
        "0": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(output_layouts=Shard(0)),
    }
    return parallelize_module(model, mesh, plan)


class B(nn.Module):
    """Its graph breaks between two sites."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.parts = mlp(mesh)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, act, last = self.parts.children()
        h = act(first(x))
        torch._dynamo.graph_break()
        return last(h)


class Keep(nn.Module):
    """It keeps what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.box = nn.Linear(64, 64), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.box.append(self.linear(x))
        return self.box[-1]


def compiled(model: nn.Module, *, dynamic: bool | None = None, **options: Any) -> Any:
    options = {"timeout_s": TIMEOUT_S, **options}
    return torch.compile(model, backend="interlace", dynamic=dynamic, options=options)


def message(call: Callable[[], object]) -> str:
    """What a call raises, with its type's name, or what it returns."""
    try:
        return str(call())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Recompiled(logging.Handler):
    """What TorchDynamo logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def of_sizes(mesh: DeviceMesh, x: torch.Tensor) -> list[str]:
    """Messages of many sizes, with limits of two in place of eight."""
    handler, logger = Recompiled(), logging.getLogger("torch._dynamo.convert_frame")
    logger.addHandler(handler)
    found: list[str] = []
    with torch._dynamo.config.patch(recompile_limit=2):
        model = compiled(mlp(mesh), dynamic=False)
        for rows in (2, 4, 6):
            model(x[:rows])
        torch.compiler.reset()
        whole = torch.compile(mlp(mesh), backend="interlace", dynamic=False, fullgraph=True)
        found.append(message(lambda: [whole(x[:rows]) for rows in (2, 4, 6)]))
    logger.removeHandler(handler)
    torch.compiler.reset()
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        small = interlace.compile(mlp(mesh), mesh=mesh, options={"cache_size": 2})
        for rows in (2, 4, 6):
            small(x[:rows])
        small.close()
    return [*found, *handler.lines, *(f"CacheWarning: {w.message}" for w in caught)]


def of_schedules(mesh: DeviceMesh, x: torch.Tensor) -> list[str]:
    """Messages of an edited schedule, and of one for other sizes."""
    model = compiled(mlp(mesh), strategy="peer")
    model(x)
    if dist.get_rank() == 0:
        shutil.rmtree("mine", ignore_errors=True)
        for name in interlace.export(model, "mine"):
            path = Path(name)
            if "serial" not in path.name:
                lines = path.read_text().splitlines(keepends=True)
                first = next(n for n, line in enumerate(lines) if "main: wait(e1" in line)
                path.write_text("".join(lines[:first] + lines[first + 1 :]))
    dist.barrier()
    found: list[str] = []
    for rows in (64, 32):
        torch.compiler.reset()
        found.append(message(lambda: compiled(mlp(mesh), schedules="mine")(x[:rows])))  # noqa: B023
        interlace.reset()
    return found


def of_ranks(mesh: DeviceMesh, x: torch.Tensor) -> list[str]:
    """Messages of ranks that do not come, fail or disagree."""
    rank, found = dist.get_rank(), list[str]()
    late = compiled(mlp(mesh), timeout_s=3.0)
    if rank == 0:
        found.append(message(lambda: late(x)))
    dist.barrier()
    interlace.reset()
    torch.compiler.reset()
    model = compiled(mlp(mesh))
    model(x)
    if rank == 0:
        found.append(message(lambda: model(x)))
    interlace.reset()
    torch.compiler.reset()
    strategy = ("peer", "ring")[rank]
    found.append(message(lambda: compiled(mlp(mesh), strategy=strategy)(x)))
    interlace.reset()
    torch.compiler.reset()
    found.append(message(lambda: compiled(mlp(mesh))(x[: 32 + 2 * rank])))
    interlace.reset()
    torch.compiler.reset()
    return found


def messages(folder: str) -> list[str]:
    """What a user of two ranks sees, on rank 0 (and of a small mesh on rank 1)."""
    before = os.getcwd()
    os.chdir(folder)
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = torch.randn(64, 64)
    model = mlp(mesh)
    found = of_ranks(mesh, x) + of_schedules(mesh, x) + of_sizes(mesh, x)
    call = compiled(model)
    plain = compiled(nn.Linear(64, 64))
    broken = compiled(B(mesh))
    sharded = nn.Sequential(nn.Linear(64, 64))
    fully_shard(sharded, mesh=mesh)
    found += [
        message(lambda: init_device_mesh("cpu", (4,))),
        message(lambda: torch.compile(model, backend="interlac")(x)),  # pyright: ignore
        message(lambda: Options.from_dict({"strateg": "ring"})),
        message(lambda: Options.from_dict({"chunks": 4})),
        message(lambda: Options.from_dict({"strategy": "broadcast"})),
        message(lambda: compiled(model, transport="nccl")(x)),
        message(lambda: compiled(model, graph=True)(x)),
        message(lambda: compiled(model, memory=1)(x)),
        message(lambda: interlace.explain(call, why=True)),
        message(lambda: (plain(x), interlace.explain(plain, why=True))[1]),
        message(lambda: (broken(x), interlace.explain(broken, why=True))[1]),
        message(lambda: torch.save(call, io.BytesIO())),
        message(lambda: model.load_state_dict(call.state_dict())),
        message(lambda: interlace.compile(lambda x: x, x, mesh=mesh)),  # pyright: ignore
        message(lambda: interlace.compile(sharded, x, mesh=mesh)(x)),
        message(lambda: interlace.compile(Keep(), x, mesh=mesh)(x)),
    ]
    alone = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    if dist.get_rank() == 1:
        found = [message(lambda: mlp(alone)(x))]
    os.chdir(before)
    interlace.reset()
    torch.compiler.reset()
    return found


def plain(text: str) -> str:
    """A message on one line, without numbers, digests and places of files."""
    text = re.sub(r"\b[0-9a-f]{8}\b|\d+(\.\d+)?", "#", text)
    return " ".join(text.split())


def test_quoted_messages_are_real(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    seen = [message(lambda: dist.init_process_group("gloo"))]
    for rank in pool(2).run(messages, str(tmp_path), timeout_s=110.0):
        seen += rank
    seen = [plain(text) for text in seen]
    quoted = re.findall(r"^```text\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(quoted) > 20
    for line in "".join(quoted).splitlines():
        pattern = ".*".join(re.escape(plain(part)) for part in line.split("..."))
        assert any(re.search(pattern, text) for text in seen), "\n".join([line, "", *seen])
