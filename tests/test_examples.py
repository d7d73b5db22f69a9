"""The example scripts, on real processes, and the notebook."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import os
import random
import runpy
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.support.pool import Pool
from torch.distributed.device_mesh import init_device_mesh
from typer.testing import CliRunner

from interlace.cli import app
from interlace.frontend.backend import backend

EXAMPLES = Path(__file__).parents[1] / "examples"
ENVIRON = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
SAME_LOSS = "of plain torch"
"""Told by scripts that compare their losses with plain torch's, and fail where these differ."""


def example(
    script: str, ranks: int, options: dict[str, Any], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """The script under torchrun."""
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), str(EXAMPLES / script), *given),
        ],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, **ENVIRON},
    )


@pytest.mark.timeout(150)
@pytest.mark.slow  # tests/nn and tests/tensor_parallel have its parts
def test_llama_trains_alike_in_every_way(tmp_path: Path) -> None:
    """Two ranks of tensor parallelism under FSDP2's two: the losses of the unparallelised model."""
    losses = tmp_path / "losses.csv"
    sizes = {"steps": 4, "batch": 4, "sequence": 32, "dim": 64, "layers": 1, "csv": losses}
    done = example("train_llama.py", 4, sizes, 140)
    assert done.returncode == 0, done.stderr
    with losses.open() as file:
        rows = list(csv.DictReader(file))
    assert [row.pop("step") for row in rows] == ["1", "2", "3", "4", "held out"]
    steps = [{way: float(loss) for way, loss in row.items()} for row in rows]
    for step in steps:
        assert step["overlapped"] == pytest.approx(step["single"], rel=2e-3)
        assert step["plain"] == pytest.approx(step["single"], rel=2e-3)
        assert step["fp8"] == pytest.approx(step["single"], rel=1e-2)
    assert steps[-1]["overlapped"] < steps[0]["overlapped"]
    assert done.stdout.count("text held out") == 4


@pytest.mark.slow
@pytest.mark.timeout(100)
def test_muon_trains_alike_with_owners() -> None:
    """The losses of Muon on every rank; with gathers under the forward the same in print."""
    sizes = {"steps": 6, "batch": 4, "sequence": 32, "dim": 64, "layers": 1}
    ways = {"ways": "muon,synchronous,overlapped", "bucket_bytes": 65536}
    done = example("train_muon.py", 2, sizes | ways, 90)
    assert done.returncode == 0, done.stderr
    rows = map(str.split, done.stdout.splitlines())
    losses = {way: (first, last) for way, _, first, _, last, *_ in rows}
    assert losses["synchronous"] == losses["overlapped"]
    assert float(losses["muon"][1]) == pytest.approx(float(losses["overlapped"][1]), rel=2e-3)
    assert float(losses["overlapped"][1]) < float(losses["overlapped"][0])


QUICK: dict[str, tuple[int, list[str]]] = {
    "tensor_parallel_llama": (2, ["layers.0.feed_forward.w2  peer/get", SAME_LOSS]),
    "mixture_of_experts": (2, ["graph 1 of 1", "matmul_all_to_all  down", SAME_LOSS]),
    "pipeline": (2, ["the pair: sound", "deadlock", "equal those of autograd"]),
    "pipeline_llama": (4, ["hidden in each graph", SAME_LOSS, "the same bits"]),
}
SLOW: dict[str, tuple[int, list[str]]] = {
    "decode": (2, ["matmul_all_reduce  layers.1.down", SAME_LOSS]),
    "hugging_face": (2, ["lm_head: colwise", "of the whole model", "generated"]),
}
TORCHTITAN = {"torchtitan_llama": (2, ["overlapped", "losses differ from stock torchtitan's by"])}
"""By script: ranks, and what rank 0 prints among other things."""


def run_script(script: str, port: int, *options: str) -> str:
    """The printed text of a script on a rank whose environment is as under torchrun."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    dist.destroy_process_group()
    os.environ.update(
        ENVIRON,
        **{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        **{"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"},
    )
    sys.path.insert(0, str(EXAMPLES))
    with (
        mock.patch.object(sys, "argv", [script, *options]),
        redirect_stdout(io.StringIO()) as printed,
    ):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
        *(pytest.param(name, marks=pytest.mark.torchtitan) for name in TORCHTITAN),
    ],
)
@pytest.mark.timeout(150)
def test_an_example_runs_and_agrees(pool: Pool, name: str) -> None:
    needed = {"hugging_face": "transformers", "torchtitan_llama": "torchtitan"}.get(name)
    if needed and importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    ranks, told = (QUICK | SLOW | TORCHTITAN)[name]
    script = str(EXAMPLES / f"{name}.py")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    printed = pool(ranks).run(run_script, script, store.port, timeout_s=140.0, replace=True)[0]
    for part in told:
        assert part in printed


SMALL = "--check --rows 5 --requests 12 --rate 1 --layers 1 --dim 32 --length 32 --new 8 --block 8"


@pytest.mark.parametrize(
    "options",
    [
        "--piece 16",
        pytest.param("--piece 8 --cache static --pieces changing", marks=pytest.mark.slow),
        pytest.param("--piece 16 --pad --pieces changing", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(200)
def test_requests_are_served_without_a_compilation(pool: Pool, options: str) -> None:
    """Eager's tokens, by steps of 1 to 5 rows that the warm-up has compiled."""
    script = str(EXAMPLES / "serve.py")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = (*SMALL.split(), *options.split())
    ran = pool(2).run(run_script, script, store.port, *given, timeout_s=190, replace=True)
    assert "1 to 5 rows a step" in ran[0]
    assert "Programs in the warm-up, 0 0 after it" in ran[0]
    assert "tokens equal eager's" in ran[0]


def each_number_of_rows(most: int) -> tuple[list[int], list[int]]:
    """Numbers of rows whose tokens are not those of eager's `most` rows, and how many Programs
    there are when the warm-up is done, and at the end."""
    sys.path.insert(0, str(EXAMPLES))
    serve: Any = importlib.import_module("serve")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = serve.Model(32, 1, 8)
    serve.shard(model, mesh)
    step = torch.compile(model, backend="interlace", fullgraph=True, dynamic=False)
    sizes = {"length": 16, "block": 8, "piece": 8, "layers": 1, "head": 8, "rows": most}
    args = SimpleNamespace(cache="paged", pieces="fixed", **sizes)
    wrong: list[int] = []
    with torch.inference_mode():
        ours, eager = (serve.Server(call, 2, args) for call in (step, model))
        ours.warm_up()
        programs = [sum(len(graph.bound) for graph in backend.graphs)]
        requests = [serve.Request([i] * 8, 8, 9, 0.0, [1 + 2 * i, 2 + 2 * i]) for i in range(most)]
        tokens: list[int] = []
        for rows in (most, *random.Random(0).sample(range(1, most + 1), most)):
            for request in requests:
                request.known = 7
            found = (ours if tokens else eager).run(requests[:rows], 1)
            tokens = tokens or found
            wrong += [rows] if found != tokens[:rows] else []
        programs.append(sum(len(graph.bound) for graph in backend.graphs))
    torch.compiler.reset()
    return wrong, programs


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_1_to_256_rows_are_decoded_without_a_compilation(pool: Pool) -> None:
    """In any order: 9 Programs of rows and that of a piece serve all of them."""
    for ran in pool(2).run(each_number_of_rows, 256, timeout_s=290):
        assert ran == ([], [10, 10])


def test_hugging_face_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(EXAMPLES / "hugging_face.py"))
    assert str(ended.value).endswith('needs transformers: pip install "transformers>=5.17"')


def command_here(command: list[str], *, cwd: Path, **_: Any) -> subprocess.CompletedProcess[str]:
    """`python -m interlace ...` in this process, where torch is there."""
    with chdir(cwd):
        done = CliRunner().invoke(app, command[3:])
    return subprocess.CompletedProcess(command, done.exit_code, done.stdout, done.stderr)


@pytest.mark.usefixtures("launched_on_pool")
def test_the_notebook(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells run in order, without Jupyter, and its command on the ranks of the pool; what it
    shows last is the page."""
    notebook = json.loads((EXAMPLES / "timeline.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(subprocess, "run", command_here)
    names: dict[str, Any] = {}
    for cell in cells:
        exec("".join(cell["source"]), names)
    shown = capsys.readouterr().out
    for part in ("sound (2 ranks", "equal, bit for bit", "predicted  mean", "measured   mean"):
        assert part in shown
    assert names["measured"].ranks == (0, 1)
    assert "iframe" in names["Page"](names["page"])._repr_html_()


def test_each_example_has_a_line_in_the_readme() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    for path in [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")]:
        assert f"[{path.name}]({path.name})" in listed
