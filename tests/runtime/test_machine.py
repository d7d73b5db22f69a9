"""Which machine chooses: the file named, the one of this host, or the built-in model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.frontend.models import Function
from tests.support.pool import Pool

import interlace
from interlace.cost import Machine, default_machine, default_path
from interlace.cost.machine import Link
from interlace.errors import CalibrationError, InterlaceError
from interlace.options import Options
from interlace.runtime import machine as machine_file
from interlace.runtime.machine import machine_for, shared_machine

CPU = default_machine("cpu")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this host's file is looked for, in a cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = default_path()
    path.parent.mkdir()
    return path


def test_the_file_of_this_host_is_found(here: Path) -> None:
    assert machine_for(Options(), "cpu") == CPU
    CPU.replace(name="mine").save(here)
    assert machine_for(Options(), "cpu").name == "mine"
    assert shared_machine(Options(), "cpu").name == "cpu", "other hosts may have none"
    other = here.parent / "other.json"
    CPU.replace(name="other").save(other)
    for find in (machine_for, shared_machine):
        assert find(Options(calibration=str(other)), "cpu").name == "other"


def test_a_file_that_cannot_be_read_is_told_of(here: Path) -> None:
    here.write_text("{}")
    with pytest.warns(UserWarning, match="the built-in model chooses strategies.*schema"):
        assert machine_for(Options(), "cpu") == CPU
    with pytest.raises(CalibrationError, match="schema"):
        machine_for(Options(calibration=str(here)), "cpu")


def test_a_graph_costs_the_host_nothing(here: Path) -> None:
    model = Machine.load  # a file of GPUs, read where there are none
    default_machine("cuda").save(here)
    assert model(here).replayed.captured
    assert default_machine("cuda").replayed.issue_s == 0


@pytest.mark.parametrize("why", [None, "the GPU has compute capability 8.0"])
def test_kernels_are_counted_on_where_the_gpu_runs_them(
    why: str | None, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_file, "refuse_device", lambda _: why)
    monkeypatch.setattr(machine_file, "gpus_of", lambda _: "")
    default_machine("cuda").save(here)
    for options in (Options(), Options(graph=True)):
        monkeypatch.setattr(machine_file, "refuse_packed", lambda: None)
        found = machine_for(options, "cuda")
        assert (found.kernels, found.captured) == (why is None, options.graph)
        assert found.packed_kernels == found.kernels
        monkeypatch.setattr(machine_file, "refuse_packed", lambda: "another Triton")
        assert machine_for(options, "cuda") == found.replace(packed_kernels=False)
        here_too = machine_for(Options(), "cpu")
        assert (here_too.kernels, here_too.packed_kernels) == (True, True)


def calls(seconds: float) -> tuple[Any, ...]:
    """Strategy, remarks and explanation where this rank's links have that latency; and what became
    of ranks with calibrations of their own."""
    import torch.distributed._functional_collectives as funcol

    rank, group = dist.get_rank(), dist.group.WORLD
    links = tuple((name, Link(latency_s=seconds, bandwidth=1e8)) for name, _ in CPU.links)
    path = default_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        CPU.replace(name="mine", links=links).save(path)
    dist.barrier()
    own = Path(f"{path}.{rank}")
    slow = tuple((name, Link(latency_s=1.0, bandwidth=1e8)) for name, _ in CPU.links)
    (CPU.replace(name="mine", links=links) if rank == 0 else CPU.replace(links=slow)).save(own)

    def fn(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return funcol.all_gather_tensor(x, 0, group) @ w  # pyright: ignore[reportArgumentType]

    x, w = torch.randn(512, 64), torch.randn(64, 2048)
    compiled = interlace.compile(Function(fn), x, w)
    torch.testing.assert_close(compiled(x, w), fn(x, w), rtol=1e-4, atol=1e-4)
    site, program = compiled.program.sites[0], compiled.program
    remarks = [r.text for r in program.remarks if r.pass_name == "frontend"]
    told: list[str] = []
    for calibration in (own, f"{path}.missing" if rank == 0 else own):
        try:
            interlace.compile(Function(fn), x, w, options=Options(calibration=calibration))
        except InterlaceError as error:
            told.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    if rank == 0:
        path.unlink()
    return site.strategy, remarks, compiled.explain(), told


def test_ranks_choose_by_one_file_and_none_where_files_differ(pool: Pool) -> None:
    results = pool(2).run(calls, 1e-9)
    for strategy, remarks, text, (differ, _) in results:
        assert strategy != "serial"
        assert not remarks
        assert "fastest (mine)" in text
        assert "serial " in text.splitlines()[2]
        assert "peer/get " in text.splitlines()[2]
        assert differ == results[0][3][0], "the same on all ranks"
        assert differ.startswith("AgreementError: ranks give 'inference' different calibrations")
        assert "rank 0 has calibration='mine (" in differ
        assert "rank 1 calibration='cpu (" in differ
    (_, _, _, (_, missing)), (_, _, _, (_, heard)) = results
    assert missing.startswith("CalibrationError: cannot read")
    assert "rank 0: cannot read" in heard
