"""House rules that a machine can check: what may be imported where, and what no file may hold.

Who may import whom is written once, in pyproject.toml (`[tool.importlinter]`, run by `make lint`).
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import interlace

SOURCE = Path(interlace.__file__).parents[1]
PACKAGES = ("interlace", "interlace_check", "interlace_bench")
FILES = {
    str(path.relative_to(SOURCE)): path
    for package in PACKAGES
    for path in sorted((SOURCE / package).rglob("*.py"))
}
WITHOUT_TORCH = (
    "interlace.ir",
    "interlace.verify",
    "interlace.cost",
    "interlace.passes",
    "interlace_check.pipelining",
)

ENVIRONMENT_READERS: dict[str, str] = {
    "interlace_bench/ranks.py": "torchrun's variables; NCCL's default in captures",
    "interlace/commands/demo.py": "sees whether torchrun started it (WORLD_SIZE)",
    "interlace_bench/commands/run.py": "sees whether torchrun started it (WORLD_SIZE)",
    "interlace/commands/doctor.py": "shows MKL_CBWR and gloo's interface; torchrun's variables",
    "interlace/launch.py": "gives ranks what torchrun, torch and NCCL read at a start",
    "interlace/cost/machine_file.py": "finds the user's cache folder (XDG_CACHE_HOME)",
    "interlace/comm/backends.py": "takes gloo's interface, as torch does (GLOO_SOCKET_IFNAME)",
    "interlace/comm/cuda/nccl.py": "tells NCCL, for which there is no other way, what not to map",
}
"""The files that may read the environment, and why; no option of ours is read from it."""

FIRST_WORDS_TO_AVOID = {"What", "Whether", "Those", "That", "Of", "By", "How"}
PICKLING_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
PICKLING_CALLS = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Each file, parsed once."""
    return {name: ast.parse(path.read_text()) for name, path in FILES.items()}


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Runs `code` in a fresh interpreter that finds the same `interlace`."""
    code = f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n{code}"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False
    )


def test_rooms_of_the_schedule_as_data_import_without_torch() -> None:
    """And `import interlace` brings neither it nor the terminal libraries with it."""
    done = run_python(
        "import importlib, interlace\n"
        "heavy = {'torch', 'numpy', 'rich', 'typer', 'multiprocessing'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
        "for name in ('torch', 'triton', 'numpy'): sys.modules[name] = None\n"
        f"for name in {WITHOUT_TORCH}: print(importlib.import_module(name).__name__)\n"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", *WITHOUT_TORCH]


def test_imports_touch_no_cuda_and_a_run_loads_no_page_and_nothing_that_checks_or_measures() -> (
    None
):
    done = run_python(
        "import importlib, pkgutil, torch\n"
        "def refuse(*args, **kwargs): raise AssertionError('CUDA was initialised by an import')\n"
        "torch.cuda._lazy_init = torch.cuda.init = refuse\n"
        "torch.cuda.is_available = torch.cuda.device_count = refuse\n"
        "import interlace.frontend.explain, interlace.frontend.schedules, interlace.runtime\n"
        "rest = ('interlace.trace.html', 'interlace.trace.perfetto', 'interlace_')\n"
        "print([name for name in sys.modules if name.startswith(rest)])\n"
        f"packages = [importlib.import_module(name) for name in {PACKAGES}]\n"
        "names = [module.name for package in packages\n"
        "    for module in pkgutil.walk_packages(package.__path__, package.__name__ + '.')]\n"
        "for name in names:\n"
        "    if name == 'interlace.integrations.torchtitan': continue\n"  # torchtitan asks for CUDA
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error:\n"  # CPU builds of torch do not bring it along
        "        assert error.name == 'triton', error\n"
        "assert not torch.cuda.is_initialized()\n"
        "print(len(names))\n"
    )
    assert done.returncode == 0, done.stderr
    loaded, count = done.stdout.splitlines()
    assert loaded == "[]"
    assert int(count) == len(FILES) - len(PACKAGES), "a directory without __init__.py is no package"


def test_files_say_what_they_are() -> None:
    """A module docstring says what, why, with an example."""
    assert not [name for name, tree in trees().items() if not ast.get_docstring(tree)]


def test_docstrings_say_what_a_thing_is_or_does() -> None:
    """The first word is a noun or a verb of the field: "True if ...", not "Whether ..."."""
    told = [
        f"{name}:{node.lineno}: {node.value.value.split(maxsplit=1)[0]}"
        for name, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and node.value.value.split(maxsplit=1)[0] in FIRST_WORDS_TO_AVOID
    ]
    assert not told, "\n".join(told)


def test_files_keep_the_rules() -> None:
    """No pickle, no environment variable as an option, no state that a function rebinds."""
    breaches = [told for name, tree in trees().items() for told in find_breaches(tree, name)]
    assert not breaches, "\n".join(breaches)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle"),
        ("dist.all_gather_object(xs, x)", "all_gather_object"),
        ("torch.load(path)", "torch.load"),
        ("import os\nos.environ['A']", "environ"),
        ("from os import getenv", "getenv"),
        ("import os as o\no.getenv('A')", "getenv"),
        ("x = 0\ndef f():\n    global x\n    x = 1", "global"),
    ],
)
def test_each_rule_fires(code: str, told: str) -> None:
    assert any(told in breach for breach in find_breaches(ast.parse(code), "made_up.py"))


def test_allow_list_is_in_use() -> None:
    """An entry that is needed no longer goes."""
    for name in ENVIRONMENT_READERS:
        found = find_breaches(trees()[name], "made_up.py")
        assert any("environment" in breach for breach in found), name


def find_breaches(tree: ast.Module, name: str):
    """Yields one line for each breach of a house rule."""
    for node in ast.walk(tree):
        where = f"{name}:{getattr(node, 'lineno', 0)}"
        match node:
            case ast.Import(names=names) if {
                n.name.split(".")[0] for n in names
            } & PICKLING_MODULES:
                yield f"{where}: imports pickle or the like"
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in PICKLING_MODULES:
                yield f"{where}: imports from pickle or the like"
            case ast.ImportFrom(module="os", names=names):
                for alias in names:
                    if alias.name in ("environ", "getenv") and name not in ENVIRONMENT_READERS:
                        yield f"{where}: reads the environment ({alias.name})"
            case ast.Attribute(attr="environ" | "getenv" as attr) if (
                name not in ENVIRONMENT_READERS
            ):
                yield f"{where}: reads the environment ({attr})"
            case ast.Attribute(attr=attr) if attr in PICKLING_CALLS:
                yield f"{where}: {attr} pickles over the wire"
            case ast.Attribute(attr="load", value=ast.Name(id="torch")):
                yield f"{where}: torch.load reads pickle; use a text format or safetensors"
            case ast.Global():
                yield f"{where}: `global` rebinds module state: {', '.join(node.names)}"
            case _:
                pass
