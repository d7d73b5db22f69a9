"""A model's schedules as files: exported, edited, run in place of the generated ones, refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.frontend.models import local
from tests.support.pool import Pool
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import interlace
from interlace.errors import ExecutorError, ScheduleError
from interlace.frontend import backend
from interlace.frontend.explain import graphs_of
from interlace.options import Options


def mlp(width: int = 16, act: type[nn.Module] = nn.Tanh) -> nn.Module:
    """The README's model, small, with the same weights every time."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), act(), nn.Linear(width, 8))
    plan = {
        "0": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(output_layouts=Shard(0)),
    }
    return parallelize_module(model, mesh, plan)


def batch() -> torch.Tensor:
    """This rank's rows."""
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))


def step(folder: str | None, compiled: bool = False, **options: Any) -> tuple[Any, list[Any]]:
    """What was compiled, and the loss and gradients of one step."""
    model, x = mlp(), batch()
    given: dict[str, Any] = {"schedules": folder, **options}
    if compiled:
        torch.compiler.reset()
        made: Any = torch.compile(model, backend=backend, options=given)
        loss = made(x).square().mean()
    else:
        made = interlace.compile(model, x, options=given)
        loss = made(x).square().mean()
    loss.backward()
    return made, [loss.detach(), *(local(p.grad) for p in model.parameters())]


def export_edit_and_run(folder: str, dynamo: bool) -> list[str]:
    """The names of the files; an edited text runs, and gives what the generated one gave."""
    made, wanted = step(None, dynamo, strategy="peer")
    mine = interlace.export(made, folder)
    dist.barrier()
    forward = next(path for path in mine if path.name.startswith("forward"))
    if dist.get_rank() == 0:
        forward.write_text(with_another_order(forward.read_text()))
    dist.barrier()
    edited, found = step(folder, dynamo)
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours, theirs)
    programs = [bound.program for graph in graphs_of(edited) for bound in graph.bound]
    streams = [program.streams() for program in programs]
    assert "other" in streams[0]
    assert "other" not in streams[1]
    texts = [remark.text for program in programs for remark in program.remarks]
    assert texts.count("its text is a file of the option schedules") == 2
    for graph in (*graphs_of(made), *graphs_of(edited)):
        graph.close()
    return sorted(path.name for path in mine)


def with_another_order(text: str) -> str:
    """The text with its communication on a stream of another name, and two ops in other order."""
    assert "    comm: " in text
    lines = text.replace("    comm: ", "    other: ").replace('"comm"', '"other"').splitlines()
    at = next(i for i, line in enumerate(lines) if 'call("aten.div' in line)
    lines[at - 1 : at + 1] = lines[at], lines[at - 1]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("dynamo", [False, True])
def test_an_edited_text_runs(pool: Pool, tmp_path: Path, dynamo: bool) -> None:
    names, others = pool(2).run(export_edit_and_run, str(tmp_path), dynamo)
    assert names == others
    assert [name.split("-")[0] for name in names] == ["backward", "backward", "forward", "forward"]
    assert [name.endswith(".serial.ilc") for name in names] == [False, True, False, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for path in tmp_path.iterdir():
        assert interlace.check(interlace.load(path)).sound


def said(model: nn.Module, folder: Path) -> str:
    """How compiling with a folder of schedules ends: an error's type and text, or nothing."""
    try:
        interlace.compile(
            model, batch(), options=Options(schedules=str(folder), timeout_s=20)
        ).close()
    except interlace.InterlaceError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def after_edits(folder: Path, edits: dict[str, Any]) -> dict[str, str]:
    """What is said after each edit of the forward schedule on some of the ranks."""
    told: dict[str, str] = {}
    compiled = interlace.compile(mlp(), batch(), options=Options(strategy="peer"))
    for name, (ranks, old, new) in edits.items():
        own = folder / f"{name}-{dist.get_rank()}"
        forward = next(p for p in interlace.export(compiled, own) if "forward" in p.name)
        if dist.get_rank() in ranks:
            text = forward.read_text()
            assert old in text, text
            forward.write_text(text.replace(old, new))
        told[name] = said(mlp(), own)
    told["names"] = forward.name
    compiled.close()
    return told


EDITS = {
    "none": ((0, 1), "x", "x"),
    "another_size": ((0, 1), "v_2_bias: f32[8]", "v_2_bias: f32[1, 8]"),
    "another_name": ((0, 1), "v_2_bias", "bias"),
    "more_results": ((0, 1), "return reduce_scatter", "return tanh"),
    "an_input_is_written": (
        (0, 1),
        "    main: wait(e1",
        "    main: copy(div, v_2_bias)\n    main: wait(e1",
    ),
    "no_program": ((0, 1), "def ", "define "),
    "a_race": ((0, 1), "    main: wait(e1, site=1)\n", ""),
    "on_one_rank": ((1,), "return reduce_scatter, ", "return "),
    "other_texts": ((1,), "aten.tanh.default", "aten.sigmoid.default"),
}


def test_a_text_that_does_not_fit_is_refused_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    for rank, told in enumerate(pool(2).run(after_edits, tmp_path, EDITS)):
        assert told["none"] == ""
        assert (
            "input v_2_bias: f32[1, 8] in the file, f32[8] in the graph" in (told["another_size"])
        )
        assert "input bias: f32[8] in the file, none in the graph" in told["another_name"]
        assert "result 1: f32[8, 8] in the file, f32[4, 8] in the graph" in told["more_results"]
        assert "written in place: v_2_bias in the file, none in the" in told["an_input_is_written"]
        assert told["no_program"].startswith("ParseError: forward-")
        path = tmp_path / f"a_race-{rank}" / told["names"]
        assert told["a_race"].startswith(f"SoundnessError: {path} is unsound:\nunsound: ")
        assert "nothing orders" in told["a_race"]
        lines = path.read_text().splitlines()
        shown = re.findall(r"^    > (\d+) \| (.*)$", told["a_race"], re.MULTILINE)
        assert shown
        assert all(text.startswith(lines[int(number) - 1].strip()) for number, text in shown)
        assert f"from {path.name}:{shown[0][0]}" in told["a_race"]
        kind = "ScheduleError: " if rank else "AgreementError: rank 1: "
        assert told["on_one_rank"].startswith(kind)
        assert "result 1: f32[8, 8] in the file, f32[4, 8] in the graph" in told["on_one_rank"]
        assert told["other_texts"].startswith("AgreementError: ranks give ")
        assert "different texts: rank 0 has forward-" in told["other_texts"]


def of_other_models(folder: Path) -> list[str]:
    """What is said where the model is not the one that was exported."""
    compiled = interlace.compile(mlp(), batch())
    interlace.export(compiled, folder)
    compiled.close()
    dist.barrier()
    found = [said(mlp(width=32), folder), said(mlp(act=nn.Sigmoid), folder)]
    found.append(said(mlp(), folder / "none"))
    dist.barrier()
    for path in folder.glob("forward-*"):
        path.unlink(missing_ok=True)
    dist.barrier()
    found.append(said(mlp(), folder))
    (folder / "mine.ilc").write_text("def mine(x: f32[4]): ...")
    return [*found, said(mlp(), folder)]


def test_schedules_of_another_model_are_refused(pool: Pool, tmp_path: Path) -> None:
    for wider, other, nowhere, backward_alone, mine in pool(2).run(of_other_models, tmp_path):
        for told in (wider, other):
            assert "ScheduleError: no schedule in" in told
            assert "is for this forward graph: forward-" in told
            assert "or torch have changed since they were exported; or they are of the" in told
        assert "there is no schedule in that folder" in nowhere
        assert backward_alone == ""
        assert "mine.ilc would never run: no graph's schedule has that name" in mine
        assert "the schedule of this forward graph is forward-" in mine


def test_export_keeps_what_was_edited(tmp_path: Path) -> None:
    compiled = interlace.compile(nn.Linear(4, 4), torch.ones(2, 4))
    paths = interlace.export(compiled, tmp_path)
    assert interlace.export(compiled, tmp_path) == paths
    generated = paths[0].read_text()
    paths[0].write_text("# mine\n" + generated)
    paths[1].unlink()
    with pytest.raises(ScheduleError, match=rf"{paths[0].name}: .* edited.*overwrite=True"):
        interlace.export(compiled, tmp_path)
    assert paths[0].read_text().startswith("# mine\n")
    assert not paths[1].exists()
    assert interlace.export(compiled, tmp_path, overwrite=True) == paths
    assert paths[0].read_text() == generated


def test_nothing_to_export() -> None:
    with pytest.raises(ExecutorError, match="no schedule to export: call the compiled model"):
        interlace.export(interlace.compile(nn.ReLU()), "nowhere")


def sizes_that_change(folder: Path) -> list[bool]:
    """A class of sizes runs by its text, for each of the sizes."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    w = torch.randn(8, 8)

    def rows(x: Any) -> Any:
        return all_gather_tensor(x, 0, mesh["tp"]) @ w

    call = torch.compile(rows, backend="interlace", dynamic=True)
    xs = [torch.randn(count, 8) for count in (24, 20, 30)]
    with torch.no_grad():
        wanted = [call(x) for x in xs]
        interlace.export(call, folder / str(dist.get_rank()))
        torch.compiler.reset()
        given = Options(schedules=str(folder / str(dist.get_rank())))
        again = torch.compile(
            rows,
            backend="interlace",
            dynamic=True,
            options=given,  # pyright: ignore
        )
        found = [torch.equal(again(x), y) for x, y in zip(xs, wanted, strict=True)]
    assert interlace.explain(again).count("a file of the option") == 1
    return found


def test_sizes_that_change(pool: Pool, tmp_path: Path) -> None:
    assert pool(2).run(sizes_that_change, tmp_path) == [[True] * 3] * 2
