"""The documents: generated pages are up to date, schedules in them sound, links alive."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from interlace.ir.text.parser import parse
from interlace.verify import check

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def blocks(language: str) -> dict[str, str]:
    """The fenced blocks of one language, by page and number."""
    return {
        f"{page}-{i}": code
        for page, text in PAGES.items()
        for i, (kind, code) in enumerate(BLOCK.findall(text))
        if kind == language
    }


PYTHON = blocks("python")
SCHEDULES = {name: code for name, code in PYTHON.items() if re.match(r"def \w+\(.*Team\[", code)}

TWO_RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
QUICK_START_CHECK = """
eager = mlp._orig_mod
gradients = [p.grad.to_local() for p in eager.parameters()]
eager.zero_grad()
eager_loss = eager(x).square().mean()
eager_loss.backward()
torch.testing.assert_close(loss, eager_loss)
for ours, parameter in zip(gradients, eager.parameters(), strict=True):
    torch.testing.assert_close(ours, parameter.grad.to_local())
print("equal to eager")
torch.distributed.destroy_process_group()
"""

LOSS_CHECK = """
torch.testing.assert_close(same, loss)
logits = head(hidden)
wanted = torch.nn.functional.cross_entropy(logits, target, label_smoothing=0.1)
wanted = wanted + 1e-4 * logits.logsumexp(1).square().mean()
torch.testing.assert_close(loss, wanted)
assert hidden.grad.any()
print("as told")
"""
ADAM_CHECK = """
states = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.dim())
weights = sum(p.numel() for p in model.parameters())
assert states + 2 * weights == 8 * weights
print("as told")
"""
MUON_CHECK = """
first, *lines = optimizer.explain().splitlines()
assert first == "Muon: 2 parameters, 24,576 elements, AdamW: 2 parameters, 64,192 elements"
assert any(line.startswith("Muon, 12 of 16x64  1.weight") for line in lines)
assert len(optimizer.state) == 4
print("as told")
"""
REDUCER_CHECK = """
mine = torch.cat([p.detach().float().flatten() for p in experts.parameters()])
others = [torch.empty_like(mine) for _ in range(2)]
dist.all_gather(others, mine)
assert torch.equal(others[0], others[1])
torch.manual_seed(0)
assert not torch.equal(experts.weight, GroupedLinear(4, 256, 512, dtype=torch.bfloat16).weight)
dist.destroy_process_group()
print("as told")
"""
ACCUMULATOR_CHECK = """
before = experts.weight.grad
total = before.clone()
torch.manual_seed(0)
x = torch.randn(64, 256)
experts(x, [10, 0, 30, 24]).square().mean().backward()
(more,) = torch.autograd.grad(experts(x, [10, 0, 30, 24]).square().mean(), [experts.weight])
assert experts.weight.grad is before
assert torch.equal(before, total + more)
print("as told")
"""
PARALLEL_CHECK = """
def whole(tensor):
    parts = [torch.empty_like(tensor) for _ in range(ranks)]
    dist.all_gather(parts, tensor.detach().contiguous())
    return torch.cat(parts)

rows, gates, ups = (whole(t).requires_grad_() for t in (x, gate, up))
downs = whole(down.T).T
wanted = (torch.nn.functional.silu(rows @ gates.T) * (rows @ ups.T)) @ downs.T
torch.testing.assert_close(whole(y), wanted, rtol=1e-3, atol=0.1)
(wanted.square().sum() / y.numel()).backward()
torch.testing.assert_close(whole(gate.grad), gates.grad, rtol=1e-3, atol=0.1)
torch.testing.assert_close(whole(x.grad), rows.grad, rtol=1e-3, atol=0.1)
dist.destroy_process_group()
print("as told")
"""
FLOAT8_LAYERS_CHECK = """
def whole(tensor):
    parts = [torch.empty_like(tensor) for _ in range(ranks)]
    dist.all_gather(parts, tensor.detach().contiguous())
    return torch.cat(parts).float()

def near(found, wanted):
    assert (found - wanted).norm() < 0.2 * wanted.norm()  # three roundings to FP8

ups, downs = whole(up).requires_grad_(), whole(down.T).T.requires_grad_()
wanted = torch.relu(whole(x) @ ups.T) @ downs.T
near(whole(y), wanted)
(wanted.square().sum() / y.numel()).backward()
near(whole(up.grad), ups.grad)
near(whole(down.grad.T).T, downs.grad)
dist.destroy_process_group()
print("as told")
"""
FLOAT8_MODEL_CHECK = """
from interlace.float8 import Float8Linear
assert [isinstance(layer, Float8Linear) for layer in model] == [True, False, False]
assert model[0].weight.grad.any()
print("as told")
"""
FLOAT8_CHECK = """
for found, wanted in ((y, x @ w.T), (dx, dy @ w), (dw, dy.T @ x)):
    assert (found - wanted).norm() < 0.1 * wanted.norm()
print("as told")
"""
STYLES_CHECK = """
from torch.distributed.nn.functional import all_gather
rows = torch.cat(all_gather(x.detach()), 1).requires_grad_()
layers = [expand.gate, expand.up, expand.down]
weights = [(layer.weight.full_tensor(), layer.bias.full_tensor()) for layer in layers]
a, b = (torch.nn.functional.linear(rows, *pair) for pair in weights[:2])
wanted = torch.nn.functional.linear(torch.nn.functional.silu(a) * b, *weights[2])
rank = dist.get_rank()
torch.testing.assert_close(y, wanted.chunk(2, 1)[rank], rtol=1e-4, atol=1e-5)
(wanted.square().sum() / y.numel()).backward()
torch.testing.assert_close(x.grad, rows.grad.chunk(2, 1)[rank], rtol=1e-4, atol=1e-5)
dist.destroy_process_group()
print("as told")
"""
REGISTERED_CHECK = """
assert y.tolist() == [[20.0 + i // 4] * 8 for i in range(8)]
dist.destroy_process_group()
print("as told")
"""
LAYER_WISE_CHECK = """
mine = torch.cat([p.detach().flatten() for p in model.parameters()])
others = [torch.empty_like(mine) for _ in range(2)]
dist.all_gather(others, mine)
assert torch.equal(others[0], others[1])
assert len(muon.state) == 2 and muon.param_groups[0]["lr"] > 0.019
dist.destroy_process_group()
print("as told")
"""
LAYER_WISE_SHARDED_CHECK = """
whole = torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])
assert whole.isfinite().all()
assert optimizer.explain().count(", home ") == 2
dist.destroy_process_group()
print("as told")
"""
SHARDED_LAYER_WISE_CHECK = """
assert len(inner.state) == 8 and all(s["momentum_buffer"].to_local().shape == (128, 256)
                                     for s in inner.state.values())
dist.destroy_process_group()
print("as told")
"""
SCHEDULES_READ = """
import pathlib
pathlib.Path("all_gather_linear.ilc").write_text(PROGRAM)
x, w = torch.randn(64, 256), torch.randn(256, 512)
dist.barrier()
"""
SCHEDULES_CHECK = """
assert {path.name.split("-")[0] for path in paths} == {"forward", "backward"}
assert "a file of the option schedules" in edited.explain()
parts = [torch.empty_like(x) for _ in range(2)]
dist.all_gather(parts, x)
torch.testing.assert_close(y, torch.cat(parts) @ w)
dist.destroy_process_group()
print("as told")
"""
FORGET = """
import gc
for _name in [name for name in globals() if not name.startswith("_") and name != "gc"]:
    del globals()[_name]
gc.collect()
"""
"""The end of scripts with ranks. Whatever holds a mesh keeps its groups' threads, and torch aborts
where one of them wants the GIL while the interpreter ends."""
PIECES = {
    name: (code, told)
    for told, word in (
        (LOSS_CHECK, "LinearCrossEntropyLoss"),
        (ADAM_CHECK, "exp_avg_sq_dtype"),
        (MUON_CHECK, "muon_groups"),
        (REDUCER_CHECK, "GradReducer"),
        (ACCUMULATOR_CHECK, "GradAccumulator"),
        (PARALLEL_CHECK, "gate, up = ("),
        (FLOAT8_LAYERS_CHECK, "recipe=Recipe())"),
        (FLOAT8_MODEL_CHECK, "convert_to_float8(model"),
        (FLOAT8_CHECK, "dw = wgrad("),
        (STYLES_CHECK, "parallelize(expand"),
        (LAYER_WISE_CHECK, "LayerWise(muon"),
        (LAYER_WISE_SHARDED_CHECK, "parallelize_module(model"),
        (SHARDED_LAYER_WISE_CHECK, "LayerWise(inner"),
    )
    for name, code in PYTHON.items()
    if name.startswith(("README.md", "docs/float8.md", "docs/layer_wise.md")) and word in code
}


def test_op_table_is_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate_ops.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr


def test_every_op_is_in_the_table() -> None:
    import interlace.ir as ir

    page = PAGES["docs/ops.md"]
    ours = [kind for kind in ir.Op.__subclasses__() if kind.__module__ == ir.Op.__module__]
    assert not {kind.__name__ for kind in ours if f"### {kind.__name__}\n" not in page}


def test_there_are_schedules_to_check() -> None:
    assert len(SCHEDULES) >= 2


def test_there_are_training_pieces_to_run() -> None:
    assert len(PIECES) == 13


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_in_a_page_is_sound(name: str) -> None:
    program = parse(SCHEDULES[name])
    assert parse(str(program)) == program
    check(program).raise_if_unsound()


def test_builder_in_the_reference_makes_a_sound_program() -> None:
    (code,) = (code for code in PYTHON.values() if "with interlace.program(" in code)
    names: dict[str, Any] = {}
    exec(code, names)
    program = names["p"].program
    assert len(program.ops) == 14
    check(program).raise_if_unsound()


def test_counterexample_in_the_readme_is_real() -> None:
    """What the README shows for a schedule with a line deleted is what the verifier says."""
    (code,) = (code for name, code in SCHEDULES.items() if name.startswith("README.md"))
    deleted = "    main: wait(e1)\n"
    assert deleted in code
    report = check(parse(code.replace(deleted, "")))
    (shown,) = blocks("text").values()
    assert shown.strip() in str(report)


def run_script(script: Path, *launch: str) -> str:
    """What a script prints, on CPUs."""
    if launch:
        script.write_text(script.read_text() + FORGET)
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *launch, str(script)],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)},
        cwd=script.parent,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_quick_start_of_the_readme_runs(tmp_path: Path) -> None:
    """The README's first script, on two ranks, beside eager DTensor."""
    readme = [code for name, code in PYTHON.items() if name.startswith("README.md")]
    (code,) = (code for code in readme if "import init_device_mesh" in code)
    (step,) = (code for code in PYTHON.values() if "step = interlace.compile(mlp" in code)
    script = tmp_path / "train.py"
    script.write_text(code + step + QUICK_START_CHECK)
    assert run_script(script, *TWO_RANKS).count("equal to eager") == 2


@pytest.mark.parametrize("name", PIECES)
def test_training_pieces_of_the_readme_run(name: str, tmp_path: Path) -> None:
    """Each script of the README does what is said beside it; the one with ranks on two."""
    code, told = PIECES[name]
    script = tmp_path / "train.py"
    script.write_text(code + told)
    if "init_process_group" in code:
        assert run_script(script, *TWO_RANKS).count("as told") == 2
    else:
        assert "as told" in run_script(script)


def test_registered_parameters_as_told(tmp_path: Path) -> None:
    """The page's script on two ranks, and its schedules without what it says can be left out."""
    page = "docs/registered.md"
    (code,) = (c for n, c in PYTHON.items() if n.startswith(page) and "Executor(" in c)
    script = tmp_path / "gather.py"
    script.write_text(code + REGISTERED_CHECK)
    assert run_script(script, *TWO_RANKS).count("as told") == 2
    texts = [c for n, c in SCHEDULES.items() if n.startswith(page)]
    (text,) = (text for text in texts if "done" in text)
    for word in ("done", "begun"):
        lines = [line for line in text.splitlines() if f"({word}" not in line]
        assert len(lines) == len(text.splitlines()) - 2
        assert check(parse("\n".join(lines))).kinds() == {"race"}


def test_schedules_as_files_as_told(tmp_path: Path) -> None:
    """The page's scripts, one after another, on two ranks; the last with the README's schedule."""
    model, traced, alone = (c for n, c in PYTHON.items() if n.startswith("docs/schedules.md"))
    (program,) = (code for name, code in SCHEDULES.items() if name.startswith("README.md"))
    given = f"PROGRAM = {program!r}\n" + SCHEDULES_READ
    script = tmp_path / "schedules.py"
    script.write_text(model + traced + given + alone + SCHEDULES_CHECK)
    assert run_script(script, *TWO_RANKS).count("as told") == 2


@pytest.mark.parametrize("name", PYTHON)
def test_python_in_a_page_is_python(name: str) -> None:
    ast.parse(PYTHON[name])


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    here = (ROOT / page).parent
    for target in LINK.findall(PAGES[page]):
        if "://" not in target:
            assert (here / target).exists(), f"{page} links to {target}"
