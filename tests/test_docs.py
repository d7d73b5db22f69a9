"""The documents: their code runs, their links lead somewhere, generated pages are up to date.

The Python blocks of a page are one script: they run in order, in one namespace, on real ranks. A
block of a schedule (`def f(tp: Team[2], ...)`) is verified instead. `AFTER` has what a block must
have done. In pages with titled schedules, console blocks run as well: what they show is compared
with what the commands print, but for numbers, and `...` stands for any lines. Commands of other
pages (torchrun, GPUs, hosts) are parsed.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import doctest
import gc
import io
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import typer
from tests.support.pool import Pool
from typer.testing import CliRunner

import interlace
import interlace.float8
import interlace.nn
import interlace.nn.functional
import interlace.optim
import interlace.tensor_parallel
from interlace.cli import app
from interlace.ir.text.parser import parse
from interlace.verify import check

ROOT = Path(__file__).parents[1]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in [
        *sorted(ROOT.glob("*.md")),
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "benchmarks").glob("*.md")),
    ]
}
BLOCK = re.compile(r"^```(\w*)(?: title=\"([^\"\n]*)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    number: int
    language: str
    title: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}-{self.number}"

    @property
    def is_schedule(self) -> bool:
        """Whether it is the text of a Program."""
        return self.language == "python" and bool(re.match(r"def \w+\(.*(Team|Size)\[", self.code))


BLOCKS = [
    Block(page, number, *found)
    for page, text in PAGES.items()
    for number, found in enumerate(BLOCK.findall(text))
]
PYTHON = [block for block in BLOCKS if block.language == "python"]
SCHEDULES = [block for block in PYTHON if block.is_schedule]
NOT_RUN = {
    "README.md": "runs below, and so do the schedules that it writes",
    "docs/how-to/hosts.md": "runs on two hosts, in tests/e2e/test_launching.py",
    "docs/reference/ops.md": "shows one op each",
}
SLOW = {"docs/how-to/fsdp2.md", "docs/how-to/hugging-face.md"}
FOUR_RANKS = {"docs/how-to/fsdp2.md"}
SHOWN = {"docs/tutorial/first-model.md": 0, "docs/how-to/find-races.md": 1}
"""Pages whose text blocks show what their code prints, and the first such block."""


def of_page(page: str, language: str = "python") -> list[Block]:
    """The blocks of a page that run."""
    return [b for b in BLOCKS if (b.page, b.language) == (page, language) and not b.is_schedule]


SCRIPTS = {page: of_page(page) for page in PAGES if of_page(page) and page not in NOT_RUN}
SCRIPTS = {page: blocks for page, blocks in SCRIPTS.items() if "/api/" not in page}
"""By page, what runs here; pages of the reference run in test_reference.py."""

MLP = """
import torch, torch.nn as nn, interlace
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
model = parallelize_module(model, mesh, plan)
x = torch.randn(64, 64)
"""
README_SCHEDULE = next(block.code for block in SCHEDULES if block.page == "README.md")
BEFORE = {
    "docs/how-to/cuda-graphs.md": MLP,
    "docs/how-to/hugging-face.md": """
import os, transformers, torch.distributed as dist
sizes = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
if dist.get_rank() == 0:
    transformers.LlamaForCausalLM(config).save_pretrained("model")
dist.barrier()
os.environ["WORLD_SIZE"] = "2"
""",
    "program = interlace.load(": f"""
import pathlib
pathlib.Path("all_gather_linear.ilc").write_text({README_SCHEDULE!r})
x, w = torch.randn(64, 256), torch.randn(256, 512)
dist.barrier()
""",
}
"""What a page, or the block with these words, finds done."""
AFTER = {
    'from_pretrained("model"': """
del os.environ["WORLD_SIZE"]
assert all(type(layer.mlp.down_proj.weight).__name__ == "DTensor" for layer in model.model.layers)
""",
    "compiled = model(x)": "assert loss.isfinite()",
    "class DropWaits": "assert len(waits) == 3",
    "faster = run_pipeline(": """
assert len([op for op in faster.ops if isinstance(op, Wait)]) == 2
""",
    "for rows in (80, 96, 112)": """
assert "sound where" in interlace.explain(model)
""",
    "def decoder(": """
torch.testing.assert_close(decoder(model, x, mesh)(x), model(x))
""",
    'raise ValueError("a bad batch")': "torch.testing.assert_close(y, mlp(x))",
    "not called yet": """
assert "2 communications" in interlace.explain(model)
""",
    "def save(model": """
def step(model, optimizer):
    model(torch.ones(16, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.synchronize()
    return model.weight.detach().clone()

model = torch.nn.Linear(64, 64, bias=False)
muon, mesh = torch.optim.Muon(model.parameters()), init_device_mesh("cpu", (2,))
with LayerWise(muon, model, mesh) as optimizer:
    first = step(model, optimizer)
    save(model, optimizer, "checkpoint")
    assert not torch.equal(step(model, optimizer), first)
    load(model, optimizer, "checkpoint")
    assert torch.equal(model.weight, first)
""",
    'options=Options(schedules="mine")': """
assert {path.name.split("-")[0] for path in Path("mine").iterdir()} == {"forward", "backward"}
assert "a file of the option schedules" in edited.explain()
""",
    "program = interlace.load(": """
parts = [torch.empty_like(x) for _ in range(2)]
dist.all_gather(parts, x)
torch.testing.assert_close(y, torch.cat(parts) @ w)
""",
    '"2": RowwiseParallel(output_layouts=Shard(0))}': """
assert "forward: 2 communications, sound" in interlace.explain(model)
""",
    "block.compile(": 'assert interlace.explain(model).count("sound") == 4',
}
"""By words of a block, what holds once it has run."""


def run_blocks(codes: list[str], folder: str) -> str:
    """On one rank: runs a page's code in `folder`; what it printed."""
    before, printed, module = os.getcwd(), io.StringIO(), ModuleType("page")
    os.chdir(folder)
    sys.modules["page"] = module  # where dataclasses look
    try:
        with (
            mock.patch.object(dist, "init_process_group", return_value=None),
            contextlib.redirect_stdout(printed),
        ):
            for number, code in enumerate(codes):
                if code.startswith(">>> "):
                    run_doctest(code, vars(module))
                    continue
                path = Path(folder, f"block{number}.py")  # which TorchDynamo may look into
                path.write_text(code)
                exec(compile(code, str(path), "exec"), vars(module))
    finally:
        os.chdir(before)
    vars(sys.modules.pop("page")).clear()
    torch.compiler.reset()
    gc.collect()
    return printed.getvalue()


def run_doctest(code: str, names: dict[str, Any]) -> None:
    """Runs the example of a docstring; fails where it prints something else."""
    test = doctest.DocTestParser().get_doctest(code, names, "example", None, None)
    test.globs, told = names, list[str]()  # not a copy: later examples go on from here
    assert not doctest.DocTestRunner().run(test, out=told.append, clear_globs=False).failed, (
        "".join(told)
    )


def with_checks(blocks: list[Block]) -> list[str]:
    """The code of blocks, each between what it finds done and what must hold after it."""
    codes = [BEFORE.get(blocks[0].page, "")]
    for block in blocks:
        codes += [code for word, code in BEFORE.items() if word in block.code]
        codes.append(block.code)
        codes += [code for word, code in AFTER.items() if word in block.code]
    return codes


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[pytest.mark.slow] if p in SLOW else []) for p in SCRIPTS]
)
def test_code_of_a_page_runs(page: str, pool: Pool, tmp_path: Path) -> None:
    if page == "docs/how-to/hugging-face.md":
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
    ranks = pool(4 if page in FOUR_RANKS else 2)
    printed = ranks.run(run_blocks, with_checks(SCRIPTS[page]), str(tmp_path), timeout_s=110.0)
    if page in SHOWN:
        for shown in of_page(page, "text")[SHOWN[page] :]:
            assert_shows(shown.code.splitlines(), printed[0])


def test_each_check_belongs_to_one_block() -> None:
    found = Counter(w for w in AFTER for blocks in SCRIPTS.values() for b in blocks if w in b.code)
    assert found == dict.fromkeys(AFTER, 1)


# the README's script

PYTHONPATH = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
ENVIRON = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": PYTHONPATH}
README_CHECK = """
eager = mlp._orig_mod
gradients = [p.grad.to_local() for p in eager.parameters()]
eager.zero_grad()
eager_loss = eager(x).square().mean()
eager_loss.backward()
torch.testing.assert_close(loss, eager_loss)
for ours, parameter in zip(gradients, eager.parameters(), strict=True):
    torch.testing.assert_close(ours, parameter.grad.to_local())
"""


@pytest.mark.usefixtures("launched_on_pool")
def test_script_of_the_readme_runs(pool: Pool, tmp_path: Path) -> None:
    """Beside eager DTensor; and the schedules that it writes run alone."""
    (block,) = of_page("README.md")
    codes = [block.code, README_CHECK]
    printed, others = pool(2).run(run_blocks, codes, str(tmp_path), timeout_s=110.0)
    assert "2 communications, sound" in printed
    assert not others, "rank 0 prints"
    assert (tmp_path / "step.html").exists()
    kinds = sorted(path.name.split("-")[0] for path in (tmp_path / "generated").glob("*.ilc"))
    assert kinds == ["backward"] * 2 + ["forward"] * 2
    (overlapped,) = (tmp_path / "generated").glob("forward-????????.ilc")
    assert f"generated/{overlapped.name}" in printed.splitlines()
    done = CliRunner().invoke(app, ["run", str(overlapped), "--check-against", "serial"])
    assert done.exit_code == 0, done.output
    assert "against serial" in done.output


# schedules


@pytest.mark.parametrize("block", SCHEDULES, ids=str)
def test_schedule_in_a_page_is_sound(block: Block) -> None:
    program = parse(block.code)
    assert parse(str(program)) == program
    if program.rank is None:  # else it is one rank's half of an exchange
        assert check(program).sound is not block.title.startswith("broken")


def test_counterexample_in_the_readme_is_real() -> None:
    """What the README shows for a schedule with a line deleted is what the verifier says."""
    deleted = "    main: wait(e1)\n"
    assert deleted in README_SCHEDULE
    report = check(parse(README_SCHEDULE.replace(deleted, "")))
    (shown,) = of_page("README.md", "text")
    assert_shows(shown.code.splitlines(), str(report))


def test_builder_in_the_reference_makes_a_sound_program() -> None:
    (code,) = (b.code for b in of_page("docs/reference/text.md") if "interlace.program(" in b.code)
    names: dict[str, Any] = {}
    exec(code, names)
    assert len(names["p"].program.ops) == 14
    check(names["p"].program).raise_if_unsound()


# commands


def commands_of(block: Block) -> Iterator[tuple[list[str], list[str]]]:
    """The words of each command of a console block, and the lines that it shows."""
    for part in re.split(r"^\$ ", block.code.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
        line, *shown = part.splitlines()
        yield shlex.split(line, comments=True), shown


CONSOLES = [block for block in BLOCKS if block.language == "console"]
RUN_HERE = ("check", "explain", "opt", "run", "show", "simulate")


@pytest.mark.parametrize("block", CONSOLES, ids=str)
def test_commands_of_a_page_exist(block: Block) -> None:
    """Every `interlace` command of a console block takes the options that it is given."""
    for words, _ in commands_of(block):
        place = words.index("-m") + 1 if "-m" in words else 0
        if words[place] != "interlace":
            continue
        command: Any = typer.main.get_command(app)
        words = words[place + 1 :]
        while hasattr(command, "commands"):
            command, words = command.get_command(typer.Context(command), words[0]), words[1:]
        command.make_context("interlace", words)


@pytest.mark.usefixtures("launched_on_pool")
@pytest.mark.parametrize(
    "page", sorted({b.page for b in SCHEDULES if b.title and b.page != "README.md"})
)
def test_commands_on_the_schedules_of_a_page(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run, and print what the page shows."""
    monkeypatch.chdir(tmp_path)
    for block in SCHEDULES:
        if block.page == page and block.title:
            Path(block.title).write_text(block.code)
    ran = 0
    for block in (b for b in CONSOLES if b.page == page):
        for words, shown in commands_of(block):
            if words[0] == "interlace" and words[1] in RUN_HERE:
                done = CliRunner().invoke(app, words[1:])
                broken = any(word.startswith("broken") for word in words)
                assert done.exit_code == broken, done.output
                assert_shows(shown, done.output)
                ran += 1
    assert ran


def assert_shows(shown: list[str], printed: str) -> None:
    """Each shown line stands in what was printed, in this order; numbers may differ."""
    rest = iter([plain(line) for line in printed.splitlines()])
    for line in filter(None, map(plain, shown)):
        assert line == "..." or line in rest, f"{line!r} is not in:\n{printed}"


def plain(line: str) -> str:
    """A line without its numbers, digests and the width of its spaces."""
    return " ".join(re.sub(r"\b[0-9a-f]{8}\b|\d+(\.\d+)?(e-?\d+)?", "#", line).split())


# pages


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_in_a_page_is_python(block: Block) -> None:
    ast.parse(block.code)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    here = (ROOT / page).parent
    for target in LINK.findall(BLOCK.sub("", PAGES[page])):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (here / path).resolve() if path else ROOT / page
        assert found.exists(), f"{page} links to {target}"
        if anchor:
            assert anchor in anchors(found.read_text()), f"{page} links to {target}"


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings."""
    found = (re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in HEADING.findall(text))
    return {re.sub(r"[-\s]+", "-", heading) for heading in found}


def test_terms_of_the_glossary_are_linked() -> None:
    """Each from a page of the documentation, or from another term."""
    glossary = "docs/reference/glossary.md"
    linked = re.findall(r"\(#([\w-]+)\)", PAGES[glossary])
    for page, text in PAGES.items():
        if page != glossary:
            linked += re.findall(r"glossary\.md#([\w-]+)", text)
    assert anchors(PAGES[glossary]) - {"glossary"} == {*linked}


def test_generated_pages_lose_nothing() -> None:
    assert "| `--seed` | integer | `0` |" in PAGES["docs/reference/cli.md"]
    assert not re.search(r"(?<![/(\w])\w+\.md", PAGES["docs/reference/ops.md"]), "not a link"


def test_generated_files_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "docs" / "generate"), "--check"]
    done = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_every_op_is_in_the_table() -> None:
    import interlace.ir as ir

    page = PAGES["docs/reference/ops.md"]
    ours = [kind for kind in ir.Op.__subclasses__() if kind.__module__ == ir.Op.__module__]
    assert not {kind.__name__ for kind in ours if f"### {kind.__name__}\n" not in page}


def test_every_public_name_is_in_the_reference() -> None:
    pages = [text for page, text in PAGES.items() if page.startswith("docs/reference/")]
    described = {line.rpartition(".")[2] for text in pages for line in text.splitlines()}
    layers = interlace.nn, interlace.nn.functional, interlace.tensor_parallel, interlace.float8
    for module in (interlace, *layers, interlace.optim):
        elsewhere = {"InterlaceError", "Options", "errors", "E4M3", "E5M2"}
        assert {*module.__all__} - elsewhere <= described


def test_site_builds_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    """Strictly: a broken link, a missing page or docstring fails."""
    command = ("-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path))
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for path in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|link|img)\b[^>]*(?:src|href)=\"?https?:[^>]*", path.read_text()
        )
        assert not [tag for tag in loaded if "canonical" not in tag], path


def test_support_matrix_names_what_has_rows_and_what_ci_runs() -> None:
    """A GPU with the torch of its rows, and each torch that CI names; no row is of another."""
    lines = PAGES["docs/reference/support.md"].splitlines()
    measured: set[tuple[str, str]] = set()
    for path in (ROOT / "benchmarks" / "results").glob("*.csv"):
        with path.open() as file:
            measured |= {(row["gpu"], row["torch"]) for row in csv.DictReader(file)}
    for gpu, version in measured:
        name = re.search(r"H\d+", gpu.upper())
        device, minor = name[0] if name else "CPU", ".".join(version.split(".")[:2])
        if "cpu" in version and name:  # predicted without the GPU
            continue
        assert [line for line in lines if device in line and minor in line and "rows" in line]
    ci = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    for python, minor in re.findall(r'python: "([\d.]+)", torch: "==([\d.]+)\.\*"', ci):
        assert [line for line in lines if f"{minor} with Python {python}" in line and "CI" in line]


LAYER_70B = {"model": "llama3-70b", "commit": "2b39269"}
LAYER_8B = {"model": "llama3-8b", "commit": "2b39269"}
LAYER_8B_2 = {"model": "llama3-8b", "commit": "784924f"}
DECODE = {"step": "decode", "commit": "cef4721"}
LOGITS = {"op": "cross-entropy", "shape": "8192x128256", "dtype": "bf16", "commit": "46f82d8"}
LOGITS |= {"does": "forward+backward"}
LINEAR = {"op": "linear-cross-entropy", "commit": "46f82d8"}
ADAM = {"shape": "1.40e9 all bf16", "commit": "46f82d8"}
MUON = {"shape": "8 layers of llama3-8b", "commit": "46f82d8"}
OWNERS, OWNERS_2 = {"commit": "a05769b"}, {"commit": "ac4be33"}
CHANGES: list[tuple[str, str, str, dict[str, str], str, str]] = [
    ("transformer", "22.3 ms | 20.3 ms", "1.24 to 3.33", LAYER_70B, "inductor", "compile"),
    ("transformer", "8.8 ms | 10.4 ms", "0.60 to 1.48", LAYER_8B, "inductor", "compile"),
    ("transformer", "12.2 ms | 11.6 ms", "1.02 to 2.45", LAYER_8B_2, "inductor", "compile"),
    ("transformer", "10.4 ms | 6.4 ms", "1.48 to 2.56", LAYER_8B, "compile", "compile-graph"),
    ("transformer", "20.3 ms | 20.6 ms", "3.33 to 5.61", LAYER_70B, "compile", "compile-graph"),
    ("transformer", "20.3 ms | 19.7 ms", "3.33 to 2.61", LAYER_70B, "compile", "compile-fp8"),
    ("transformer", "20.6 ms | 14.7 ms", "5.61 to 6.25", LAYER_70B, "compile-graph",
     "compile-fp8-graph"),
    ("layer", "445 us | 181 us", "", DECODE, "interlace-graph", "interlace.compile-graph"),
    ("kernels", "4.63 ms | 1.57 ms", "6.30 to 2.10", LOGITS, "torch", "interlace"),
    ("kernels", "41.3 ms | 42.6 ms", "6.30 to 1.41", LINEAR, "torch", "interlace"),
    ("kernels", "7.19 ms | 4.97 ms", "", ADAM, "torch", "interlace"),
    ("kernels", "285 ms | 196 ms", "0.42 to 0.54", MUON, "torch", "interlace"),
    ("optimizer", "90.2 ms | 76.6 ms", "", OWNERS, "synchronous", "overlap"),
    ("optimizer", "106.5 ms | 109.3 ms", "", OWNERS_2, "synchronous", "overlap"),
]  # fmt: skip
"""Lines of the page on tuning: a file, times and memory as shown, and the rows that they are of."""


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change[1])
def test_figures_of_the_page_on_tuning_are_rows(
    change: tuple[str, str, str, dict[str, str], str, str],
) -> None:
    name, times, memory, chosen, *ways = change
    page = PAGES["docs/how-to/tuning.md"]
    assert [line for line in page.splitlines() if times in line and memory in line]
    with (ROOT / "benchmarks" / "results" / f"{name}.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if {**row, **chosen} == row]
    for way, time, size in zip(
        ways, times.split(" | "), (memory or "-").split(" to "), strict=False
    ):
        *_, row = (row for row in rows if row["way"] == way)  # the last of several runs
        figure, unit = time.split()
        taken = float(row.get("median_us") or 1e3 * float(row["step_ms"]))
        taken /= 1e3 if unit == "ms" else 1
        assert f"{taken:.{len(figure.partition('.')[2])}f}" == figure
        if memory:
            assert f"{float(row['peak_bytes']) / 1e9:.2f}" == size


GATHER = {"commit": "eb5699a", "op": "ag_gemm", "m": "8192", "k": "8192", "n": "2560"}
GATHER |= {"world": "4", "mode": "eager", "dtype": "bf16"}
README_FIGURES = [
    ("all-gather and matmul of 8192 x 8192 x 2560", GATHER, "sequential", "auto", "gemm torch"),
    ("step of a 70B layer", LAYER_70B, "inductor", "compile", "ideal"),
    ("the same in FP8, CUDA graphs", LAYER_70B, "", "compile-fp8-graph", ""),
    ("step of an 8B layer, CUDA graphs", LAYER_8B, "inductor-graph", "compile-graph", "ideal"),
    ("step of an 8B layer, without graphs", LAYER_8B, "inductor", "compile", "ideal"),
]


LAYERS_8B = ("llama3-8b", "whole", "8")
"""The model, form and number of layers of the memory that README gives."""


def row_of(chosen: dict[str, str], way: str) -> dict[str, str]:
    """The last measured row of a run that has these fields."""
    name, column = ("overlap", "strategy") if "op" in chosen else ("transformer", "way")
    wanted = chosen | {column: way}
    with (ROOT / "benchmarks" / "results" / f"{name}.csv").open() as file:
        *_, row = (row for row in csv.DictReader(file) if {**row, **wanted} == row)
    return row


def test_figures_of_the_readme_are_rows() -> None:
    lines = [line for line in PAGES["README.md"].splitlines() if line.endswith(" |")]
    for title, chosen, *ways in README_FIGURES:
        cells = [title]
        for way in ways:
            row = row_of(chosen, way) if way else {}
            cell = f"{float(row['median_us']) / 1e3:.1f} ms" if row else "not measured"
            cell = f"{float(row['median_us']):.0f} us" if chosen is GATHER else cell
            cells.append(cell)
        assert f"| {' | '.join(cells)} |" in lines
    runs = [row_of(GATHER | {"commit": commit}, "async-tp") for commit in ("ed488af", "2b39269")]
    others = " and ".join(f"{float(row['median_us']):.0f}" for row in runs)
    assert f"took {others} us for the first one" in PAGES["README.md"]
    with (ROOT / "benchmarks" / "results" / "memory_of_layers.csv").open() as file:
        memory = list(csv.DictReader(file))
    grown = {
        row["way"]: row["torch_peak_growth"]
        for row in memory
        if (row["model"], row["form"], row["layers"]) == LAYERS_8B
    }
    for way in ("interlace", "inductor"):
        assert f"Inductor's ({float(grown[way]) / 1e9:.2f} GB for 8B" in PAGES["README.md"]
    big = [row for row in memory if (row["model"], row["sequence"]) == ("llama3-70b", "8192")]
    peaks = {row["way"]: float(row["torch_peak_bytes"]) / 1e9 for row in big}
    peaks["fp8"] = min(float(r["torch_peak_bytes"]) / 1e9 for r in big if r["commit"] == "93e12496")
    assert [f"{peaks[way]:.1f}" for way in ("interlace", "fp8", "inductor")] == [
        "2.1",
        "2.1",
        "2.4",
    ]
    assert (
        "one 70B layer peaks at 2.1 GB, in FP8\ntoo, where Inductor's bf16 takes 2.4"
        in (PAGES["README.md"])
    )
    bf16 = [row for row in big if row["way"] != "fp8"]
    ours, theirs = (
        next(float(row["device_bytes"]) / 1e9 for row in bf16 if row["way"] == way)
        for way in ("interlace", "inductor")
    )
    assert f"with slots, {ours:.1f} and {theirs:.1f};" in PAGES["README.md"]
    page = PAGES["docs/explanation/measurements.md"]
    assert f"{ours:.2f} GB of the device\nbeyond its weights, Inductor's {theirs:.2f} GB" in page


def test_figures_of_the_home_page_are_rows() -> None:
    """And those of its picture, which a generated file has, are of the run that README shows."""
    page = PAGES["docs/index.md"]

    def gain(chosen: dict[str, str], *ways: str) -> str:
        theirs, ours = (float(row_of(chosen, way)["median_us"]) for way in ways)
        return f"{theirs / ours:.2f}x"

    assert f"**{gain(GATHER, 'sequential', 'auto')}**" in page
    assert f"**{gain(LAYER_70B, 'inductor', 'compile')}**" in page
    assert f"gains {gain(LAYER_8B, 'inductor-graph', 'compile-graph')} in CUDA graphs" in page
    assert "10.4 ms against 8.8" in page, "as in README's table"
    bugs = re.findall(r"^## ", PAGES["docs/explanation/public-bugs.md"], re.MULTILINE)
    shown = re.search(r"\*\*(\d+)\*\*\n\n +\[public bugs\]", page)
    assert shown
    assert int(shown[1]) == len(bugs)
    drawn = (ROOT / "docs" / "layers.svg").read_text()
    for figure in ("7.4 ms", "6.4 ms", "5.4 ms", "22.3 ms", "20.3 ms", "19.0 ms", "14.7 ms"):
        assert f">{figure}" in drawn
        assert figure in PAGES["README.md"]


def test_memory_of_checkpoints_inside_of_graphs_is_of_rows() -> None:
    with (ROOT / "benchmarks" / "results" / "memory_of_layers.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["form"] == "blocks+checkpoint"]
    kept = {row["way"]: f"{float(row['rest_bytes']) / 1e9:.2f} GB" for row in rows}
    page = " ".join(PAGES["docs/explanation/measurements.md"].split())
    assert f"{kept['interlace']} for blocks of 8B's dimensions at 8192 tokens" in page
    assert f"(Inductor keeps {kept['inductor']})" in page


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) < 10_000
