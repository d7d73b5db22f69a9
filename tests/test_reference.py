"""The reference of Python: each callable that a page shows is described, and called in an example.

Pages are read as mkdocstrings reads them: `::: interlace.compile` shows that object, with the
members that its options leave. Examples are the Python blocks of a page and the `Example` of a
docstring; those of one page are one script, which two ranks run in the order of the page.
"""

from __future__ import annotations

import ast
import builtins
import doctest
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import griffe
import pytest
import torch
import yaml
from tests.support.pool import Pool
from tests.test_docs import run_blocks
from tests.test_rooms import FIRST_WORDS_TO_AVOID
from torch import nn

import interlace
import interlace.nn
from interlace import errors, float8, optim
from interlace.cost import Machine, Timeline
from interlace.nn import functional
from interlace.passes import run_pipeline
from interlace.tensor_parallel import OverlapColwise, OverlapColwiseGroup

ROOT = Path(__file__).parents[1]
PAGES = {path.name: path.read_text() for path in (ROOT / "docs/reference/api").glob("*.md")}
PARTS = re.compile(
    r"^```python\n(.*?)^```$|^::: (\S+)\n((?: {4}[^\n]*\n)*)", re.DOTALL | re.MULTILINE
)
FORMER = re.compile(r"^(removed|others): |: (None|InitVar\[None\])$")
"""Parameters that went: they are refused, with what replaces them."""
ELSEWHERE = ("interlace.errors.",)
"""Errors: only the blocks of their page are held here."""
RESULT = re.compile(r"(The|An?|Each|This|True|Seconds|Number|FLOPs)\b|.*\b[Rr]eturns\b|.*\bgives\b")
"""Beginning of a sentence that says what a method returns; functions have a section for it."""


@functools.cache
def modules() -> griffe.ModulesCollection:
    """Both packages, read without being imported."""
    loader = griffe.GriffeLoader(search_paths=[ROOT / "src"])
    for package in ("interlace", "interlace_check"):
        loader.load(package)
    loader.resolve_aliases()
    return loader.modules_collection


@dataclass(frozen=True)
class Shown:
    """An object of a page."""

    page: str
    item: Any
    name: str
    parent: Any = None

    def __str__(self) -> str:
        return self.item.path

    @functools.cached_property
    def text(self) -> str:
        """The docstring; of a class with that of its constructor, as mkdocstrings merges them."""
        items = (
            [self.item, self.item.members.get("__init__")] if self.item.is_class else [self.item]
        )
        return "\n\n".join(i.docstring.value for i in items if i is not None and i.docstring)

    @functools.cached_property
    def sections(self) -> dict[str, Any]:
        """The sections of the docstring by their kind."""
        parsed = griffe.Docstring(self.text, parent=self.item).parse(
            "google", warn_unknown_params=False, warn_missing_types=False
        )
        return {section.kind.value: section for section in parsed}

    @property
    def parameters(self) -> set[str]:
        """The names of the parameters that a caller may give."""
        if is_error(self.item):
            return set()
        given = [p for p in self.item.parameters if not FORMER.search(f"{p.name}: {p.annotation}")]
        names = {p.name for p in given if not str(p.annotation).startswith("Unpack[")}
        return names - {"self", "cls"}

    @property
    def fields(self) -> set[str]:
        """The attributes of a class that have a docstring, and so stand on the page; and `name`."""
        if not self.item.is_class:
            return set()
        members = self.item.all_members.items()
        return {name for name, m in members if m.is_attribute and (m.docstring or name == "name")}


def is_error(item: Any) -> bool:
    """True for an error or a warning."""
    return item.is_class and item.path.startswith("interlace.errors.")


def members_of(page: str, item: Any, options: dict[str, Any]) -> Iterator[Shown]:
    """The members that the page shows: functions of a module, methods of a class."""
    wanted, filters = options.get("members"), options.get("filters", ["!^_"])
    for name, member in item.members.items():
        hidden = any(re.search(pattern[1:], name) for pattern in filters)
        if hidden or (wanted is not None and name not in (wanted or ())):
            continue
        if member.is_alias and not (item.is_module and name in (item.exports or ())):
            continue
        target = member.final_target if member.is_alias else member
        if target.is_function or (target.is_class and item.is_module):
            if target.docstring or not item.is_class:
                yield Shown(page, target, name, item if item.is_class else None)


def shown_on(page: str) -> Iterator[Shown | str]:
    """The blocks and the objects of a page, in order."""
    for code, name, given in PARTS.findall(PAGES[page]):
        if code:
            yield code
            continue
        options = (yaml.safe_load(given) or {}).get("options", {}) if given else {}
        item = modules()[name]
        item = item.final_target if item.is_alias else item
        if not item.is_module:
            yield Shown(page, item, name.rpartition(".")[2])
        if item.is_class or item.is_module:
            yield from members_of(page, item, options)


SHOWN = [o for page in sorted(PAGES) for o in shown_on(page) if isinstance(o, Shown)]
CALLABLES = [shown for shown in SHOWN if not shown.item.is_attribute]
OURS = [shown for shown in CALLABLES if not shown.item.path.startswith(ELSEWHERE)]


def example_of(shown: Shown) -> str:
    """The lines of the docstring's `Example`."""
    section = shown.sections.get("examples")
    return "\n".join(text for _, text in section.value) if section else ""


@functools.cache
def calls_on(page: str) -> frozenset[str]:
    """The names that the examples of a page call, or use as attributes of what they have."""
    codes = [part if isinstance(part, str) else example_of(part) for part in shown_on(page)]
    plain = [doctest.script_from_examples(c) if c.startswith(">>> ") else c for c in codes]
    nodes = [node for code in plain for node in ast.walk(ast.parse(code))]
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    bases = [base for node in nodes if isinstance(node, ast.ClassDef) for base in node.bases]
    names |= {base.id for base in bases if isinstance(base, ast.Name)}
    called = {node.func for node in nodes if isinstance(node, ast.Call)}
    return frozenset(names | {func.id for func in called if isinstance(func, ast.Name)})


@functools.cache
def results() -> str:
    """The annotations of what the callables and the attributes of the pages give."""
    given = [str(s.item.returns) for s in SHOWN if s.item.is_function]
    classes = [s.item for s in SHOWN if s.item.is_class]
    given += [str(m.annotation) for c in classes for m in c.members.values() if m.is_attribute]
    return " ".join(given)


@pytest.mark.parametrize("shown", OURS, ids=str)
def test_a_callable_is_described(shown: Shown) -> None:
    """A sentence at the top; then each parameter, the result, and errors that there are."""
    first = shown.text.split("\n\n")[0]
    assert first.endswith((".", ":")), f"no sentence: {first!r}"
    assert first.split(maxsplit=1)[0] not in FIRST_WORDS_TO_AVOID
    kind = "parameters"
    told = [item.name for item in shown.sections[kind].value] if kind in shown.sections else []
    names = {name.strip(" *") for item in told for name in item.split(",")}
    unknown = names - {p.name.lstrip("*") for p in shown.item.parameters}
    assert not unknown or any(p.kind.value.startswith("variadic") for p in shown.item.parameters)
    if shown.parent is not None:
        names |= set(re.findall(r"`(\w+)\b", shown.text))
    assert not shown.parameters - names - shown.fields, "parameters without a description"
    if shown.item.is_function and str(shown.item.returns) not in ("None", "NoReturn"):
        assert {"returns", "yields"} & shown.sections.keys() or (
            shown.parent is not None and RESULT.match(first)
        ), "the result has no description"


def named_errors(shown: Shown) -> set[str]:
    """The errors of the section `Raises`."""
    told = shown.sections["raises"].value if "raises" in shown.sections else []
    return {name.strip() for item in told for name in str(item.annotation).strip("()").split(",")}


@pytest.mark.parametrize("shown", OURS, ids=str)
def test_errors_of_a_callable_are_those_that_there_are(shown: Shown) -> None:
    """Named ones are raised somewhere, and those that the body raises are named."""
    names = named_errors(shown)
    assert names <= vars(errors).keys() | vars(builtins).keys()
    assert names <= raised_anywhere() | vars(builtins).keys()
    body = ast.parse(shown.item.source) if shown.item.is_function else ast.parse("")
    own = {name for name in raises_of(body) if name in vars(errors)}
    text = shown.text + (shown.parent.docstring.value if shown.parent else "")
    assert own <= set(re.findall(r"\w+Error", text)), "an error of the body is not named"


LINEAR, ONE = nn.Linear(4, 4), torch.zeros(1, 1)
SERIAL = "def f(tp: Team[2], x: f32[4], y: out[f32[4]]):\n    main: copy(x, y)\n"
WRONG: dict[str, Callable[[], object]] = {
    "compile": lambda: interlace.compile(1),  # type: ignore[arg-type]
    "explain": lambda: interlace.explain("nowhere.ilc"),
    "report": lambda: interlace.report(LINEAR, "step.html"),
    "export": lambda: interlace.export(LINEAR, "generated"),
    "load": lambda: interlace.load("nowhere.ilc"),
    "load_set": lambda: interlace.load_set("nowhere.ilc"),
    "parse": lambda: interlace.parse("x"),
    "parse_set": lambda: interlace.parse_set(""),
    "program": lambda: interlace.program(team=2, mesh={"tp": 2}),
    "Program.instantiate": lambda: interlace.parse(SERIAL).instantiate(2),
    "check": lambda: interlace.check(1),  # type: ignore[arg-type]
    "simulate": lambda: interlace.simulate(interlace.parse(SERIAL), "tpu"),  # type: ignore[arg-type]
    "Executor": lambda: interlace.Executor(interlace.parse(SERIAL)),
    "run_pipeline": lambda: run_pipeline(interlace.parse(SERIAL), "nothing"),
    "Machine.load": lambda: Machine.load("nowhere.json"),
    "Timeline.from_json": lambda: Timeline.from_json("x"),
    "Recipe": lambda: float8.Recipe(scale="all"),  # type: ignore[arg-type]
    "convert_to_float8": lambda: float8.convert_to_float8(nn.GELU()),
    "linear": lambda: float8.linear(ONE, ONE, None, float8.Recipe()),
    "quantize": lambda: float8.quantize(ONE, torch.int8),
    "wgrad": lambda: float8.wgrad([], []),
    "cross_entropy": lambda: functional.cross_entropy(ONE, ONE),
    "linear_cross_entropy": lambda: functional.linear_cross_entropy(ONE, ONE, ONE),
    "CrossEntropyLoss": lambda: interlace.nn.CrossEntropyLoss(nothing=1),
    "all_gather_linear": lambda: functional.all_gather_linear(ONE, ONE, group=None),
    "linear_all_reduce": lambda: functional.linear_all_reduce(ONE, ONE, group=None),
    "GroupedLinear": lambda: interlace.nn.GroupedLinear(0, 1, 1),
    "Adam": lambda: optim.Adam(LINEAR.parameters(), master_weights="x"),
    "AdamW": lambda: optim.AdamW(LINEAR.parameters(), amsgrad=True),
    "Muon": lambda: optim.Muon(LINEAR.parameters(), ns_steps=-1),
    "GradAccumulator": lambda: optim.GradAccumulator(nn.Parameter(ONE, requires_grad=False)),
    "OverlapColwise": lambda: OverlapColwise(input_layouts="rows"),  # type: ignore[arg-type]
    "OverlapColwiseGroup": lambda: OverlapColwiseGroup(()),
}
"""Calls that are refused, by the object that they are of."""


@pytest.mark.parametrize("name", WRONG)
def test_an_error_is_named_where_it_is_raised(name: str) -> None:
    ours = [s for s in OURS if not s.item.path.startswith("interlace_check.")]
    (shown,) = [s for s in ours if (f"{s.parent.name}." if s.parent else "") + s.name == name]
    with pytest.raises((errors.InterlaceError, TypeError)) as caught:
        WRONG[name]()
    assert type(caught.value).__name__ in named_errors(shown)


def raises_of(tree: ast.AST) -> Iterator[str]:
    """The names of the errors that some code raises by itself."""
    for node in ast.walk(tree):
        match node:
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name))):
                yield name


@functools.cache
def raised_anywhere() -> frozenset[str]:
    """The errors that some file of the packages names: raised, or made to be raised."""
    files = [p for p in (ROOT / "src").rglob("*.py") if p.name != "errors.py"]
    return frozenset(n for path in files for n in re.findall(r"\b(\w+Error)\(", path.read_text()))


@pytest.mark.parametrize("shown", [s for s in CALLABLES if not is_error(s.item)], ids=str)
def test_a_callable_stands_in_an_example(shown: Shown) -> None:
    """It is called on its page; or it is a class whose objects others give."""
    given = shown.item.is_class and re.search(rf"\b{shown.name}\b", results())
    assert given or shown.name in calls_on(shown.page) or shown.name == "forward"


NOTHING_RECORDED = """
from unittest import mock
records = mock.patch("interlace.torch_private.flight_records", return_value={})
records.start()
"""
"""Run first: flight recorders of the pool's ranks hold ops of groups that other tests ended."""


@pytest.mark.parametrize("page", PAGES)
def test_examples_of_a_page_run(page: str, pool: Pool, tmp_path: Path) -> None:
    parts = [part for part in shown_on(page) if isinstance(part, str) or part in OURS]
    codes = [part if isinstance(part, str) else example_of(part) for part in parts]
    codes = [NOTHING_RECORDED, *filter(None, codes), "records.stop()"]
    pool(2).run(run_blocks, codes, str(tmp_path), timeout_s=110.0)


WHAT_TO_DO = [
    path
    for folder in ("tutorial", "how-to", "reference", "reference/api")
    for path in sorted((ROOT / "docs" / folder).glob("*.md"))
    if path.stem not in ("check-graphs", "failures", "glossary", "support")
]


@pytest.mark.parametrize("path", WHAT_TO_DO, ids=lambda path: path.stem)
def test_a_page_soon_says_what_to_type(path: Path) -> None:
    """At most five lines of text stand before its first block, headings and comments apart."""
    before, block, _ = path.read_text().partition("\n```")
    lines = [line for line in before.splitlines() if line and not line.startswith(("#", "<!--"))]
    assert block, "there is nothing to type"
    assert len(lines) <= 5, "say it after the first block"
