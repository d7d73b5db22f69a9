"""What a stranger's schedule may reach: operators of the dispatcher, and nothing by attribute."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import interlace.float8  # noqa: F401  (registers operators)
from interlace.commands.check import look_up
from interlace.errors import ExecutorError, InterlaceError, ProgramError
from interlace.frontend import backend
from interlace.frontend.importing.normalise import GET_STATE, SET_STATE
from interlace.ir import parse
from interlace.ir.operators import FUNCTIONS, WORDS, facts_of, refusal, table
from interlace.kernels import KERNELS
from interlace.options import Options
from interlace.runtime import Executor
from interlace.runtime.calling.operators import decode, resolve

X = torch.arange(12.0).view(3, 4)

ATTRIBUTES = [
    "operator.call",
    "operator.attrgetter",
    "aten.__getattr__.__func__.__globals__.get",
    "aten.__getattr__.default",
    "aten.mm.__class__",
    "aten.mm.default.__call__",
    "import_module.__call__",
    "import_module.default",
    "load_library.__call__",
    "load_library.default",
    "loaded_libraries.add",
    "aten._dir.append",
    "higher_order.cond.default",
    "prim.Print.default",
    "os.system.default",
]
BOUNDLESS = ["aten._reshape_alias.default", "aten._reshape_alias_copy.out", "aten.set_.default"]
FILES = ["aten.from_file.default", "aten.from_file.out", "aten.from_file", "aten.save.default"]


@pytest.mark.parametrize("fn", [*ATTRIBUTES, *FILES, *BOUNDLESS])
def test_nothing_is_reached_by_attribute_and_no_file_is_touched(fn: str) -> None:
    with pytest.raises(ProgramError):
        resolve(fn)
    text = f'def f(x: f32[3, 4]):\n    main: call("{fn}", x, out=(y := f32[3, 4]))\n    return y\n'
    with pytest.raises(ProgramError):
        Executor(parse(text)).prepare()


@pytest.mark.parametrize("fn", ["operator.call", "aten.mm.default.__call__", "aten.save.default"])
def test_nor_in_a_region(fn: str) -> None:
    text = f"""
def f(x: f32[3, 4]):
    @region
    def r(a):
        b = {fn}(a)
        return b
    main: call("r", x, out=(y := f32[3, 4]))
    return y
"""
    with pytest.raises(ProgramError, match=f"'{fn}'"):
        Executor(parse(text)).prepare()


INJECTED = {
    "input": """
def f(x: f32[3, 4]):
    @region
    def r(a: "a, b=open('{path}', 'w')"):
        t = aten.mul.Tensor(value["a, b=open('{path}', 'w')"], 2.0)
        return t
    main: call("r", x, out=(y := f32[3, 4]))
    return y
""",
    "keyword": """
def f(x: f32[3, 4]):
    @region
    def r(a):
        t = aten.mul.Tensor(a, kwargs=(("other=2.0, **dict(q=open('{path}', 'w')), z", 1),))
        return t
    main: call("r", x, out=(y := f32[3, 4]))
    return y
""",
}


@pytest.mark.parametrize("regions", ["eager", "inductor"])
@pytest.mark.parametrize("name", INJECTED)
def test_names_never_become_code(name: str, regions: str, tmp_path: Path) -> None:
    """Inductor's graphs are printed as Python and run: of ours, no word of the text is in them."""
    if regions == "inductor" and not shutil.which("g++"):
        pytest.skip("there is no C++ compiler here")
    path = tmp_path / "written"
    text = INJECTED[name].replace("{path}", str(path))
    executor = Executor(parse(text), options=Options.from_dict({"regions": regions}))
    if name == "keyword":
        with pytest.raises(ProgramError, match="no name of an argument"):
            executor.prepare()
    else:
        with executor.prepare():
            assert torch.equal(executor.run([X])[0], X * 2)
    assert not path.exists()


@pytest.mark.parametrize("word", ["@load", "@ops", "@hub", "@__dict__", "@classes", "@"])
def test_words_are_of_a_table(word: str) -> None:
    with pytest.raises(ProgramError, match="no value named"):
        decode(word, torch.device("cpu"))
    text = 'def f(x: f32[3]):\n    main: call("aten.to.other", x, "{}", out=(y := f32[3]))\n'
    with pytest.raises(ProgramError, match="no value named"):
        Executor(parse(text.format(word))).prepare()


def test_the_tables_are_of_what_there_is() -> None:
    assert set(FUNCTIONS) == set(KERNELS)
    ours = {
        name for name in torch._C._dispatch_get_all_op_names() if name.startswith("interlace::")
    }
    dotted = {
        f"{n}.default" if n.count(".") == 1 else n for n in (o.replace("::", ".") for o in ours)
    }
    float8 = {name for name in dotted if "float8" in name}
    known = {fn for fn in table() if fn.startswith("interlace.")}
    assert known == {GET_STATE, SET_STATE, "interlace.exchange_rows.default"} | float8
    assert len(float8) == 12
    for word in WORDS:
        decode(word, torch.device("cpu"))


def aten_operators() -> Iterator[tuple[str, Any]]:
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.partition(".")
        if name.startswith("aten::"):
            schema = torch._C._get_schema(name, overload)
            yield f"{name.replace('::', '.')}.{overload or 'default'}", schema


CHOICES = {
    *("reduce", "rounding_mode", "norm", "approximate", "ord", "p", "mode", "pad_mode", "padding"),
    *("padding_side", "side", "interpolation", "indexing", "driver", "UPLO", "activation"),
    *("algorithm", "equation", "assert_msg", "api_name", "a", "b"),
}
"""Arguments of aten that are text and name a choice or a message."""

VIEWS_WITHOUT_BOUNDS = {
    f"aten.{name}"
    for name in (
        *("_reshape_alias", "_reshape_alias_copy", "set", "set_"),
        *("_nested_view_from_buffer", "_nested_view_from_buffer_copy"),
    )
}
"""Operators of aten that make views of memory without a look at where it ends."""


def test_every_operator_of_aten_is_found_unless_it_touches_files() -> None:
    """An operator with text of another kind, as a new torch may bring, has to be looked at."""
    found = 0
    for fn, schema in aten_operators():
        texts = {arg.name for arg in schema.arguments if "str" in str(arg.type)}
        boundless = fn.rpartition(".")[0] in VIEWS_WITHOUT_BOUNDS
        facts = facts_of(fn)
        refused = bool(texts - CHOICES) or boundless or (facts is not None and facts.remakes)
        assert refused == (refusal(fn) is not None), (fn, texts)
        if refusal(fn) is None:
            assert str(resolve(fn)) == fn
            found += 1
    assert found > 2500


@torch.library.custom_op("interlace_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    """An operator that a user registered."""
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


OTHERS = {
    "debugprims.load_tensor.default": '"/a/file", (3, 4), (4, 1), dtype=f32, device="@device"',
    "inductor._reinterpret_tensor.default": "x, (3, 4), (4, 1), 100000000",
    "_c10d_functional.all_reduce.default": 'x, "sum", "0"',
    "profiler._record_function_enter_new.default": '"a name"',
    "interlace_test.twice.default": "x",
    "interlace_test.twice": "x",
}
"""Operators that torch and this process registered: they read files and foreign memory, wait for
other ranks, or do what nobody here knows."""


@pytest.mark.parametrize("fn", OTHERS)
@pytest.mark.parametrize("place", ["call", "region"])
def test_operators_of_others_are_not_called_unless_they_are_named(fn: str, place: str) -> None:
    call = f'call("{fn}", {OTHERS[fn]}, out=(y := f32[3, 4]))'
    region = f"    @region\n    def r(x):\n        y = {fn}({OTHERS[fn]})\n        return y\n"
    if place == "region":
        call = 'call("r", x, out=(y := f32[3, 4]))'
    body = region if place == "region" else ""
    program = parse(f"def f(x: f32[3, 4]):\n{body}    main: {call}\n    return y\n")
    with pytest.raises(ProgramError, match=f"a schedule may not call '{fn}'"):
        Executor(program).prepare()
    with pytest.raises(ProgramError, match=f"a schedule may not call '{fn}'"):
        look_up([program])
    assert len(look_up([program], [fn])) == 1
    for allowed in (fn, "interlace_test") if fn.startswith("interlace_test.") else ():
        with Executor(program, operators=[allowed]).prepare() as executor:
            assert torch.equal(executor.run([X])[0], X * 2)


def test_an_operator_of_others_in_a_model_of_this_process_runs() -> None:
    compiled = torch.compile(lambda x: twice(x) + 1, backend=backend)
    assert torch.equal(compiled(X), X * 2 + 1)


def test_an_overload_must_be_named_where_there_are_several() -> None:
    with pytest.raises(ProgramError, match=r"no operator named 'aten\.add'.* aten\.add\.Tensor"):
        resolve("aten.add")
    assert str(resolve("aten.relu")) == "aten.relu.default"
    assert str(resolve("aten.__and__.Tensor")) == "aten.__and__.Tensor"
    assert str(resolve("prims.convert_element_type.default")) == (
        "prims.convert_element_type.default"
    )


def test_a_shell_is_out_of_reach(tmp_path: Path) -> None:
    """The schedule that ran a command: it walked from an operator to `os.system`."""
    path = tmp_path / "touched"
    steps = "aten.__getattr__.__func__.__globals__.get"
    text = f"""
def f(x: f32[1]):
    main: call("{steps}", "os", out=(y := f32[1]))
    main: call("operator.call", "touch {path}", out=(z := f32[1]))
    return z
"""
    with pytest.raises(InterlaceError) as raised, Executor(parse(text)).prepare() as executor:
        executor.run([torch.ones(1)])
    assert not isinstance(raised.value, ExecutorError)
    assert not path.exists()
