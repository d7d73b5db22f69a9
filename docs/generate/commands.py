"""The pages reference/cli.md and reference/options.md, from the commands and from `Options`."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from markdown_table import table

from interlace.cli import app
from interlace.options import Options
from interlace_bench.commands.commands import bench

CLI_HEAD = """# Command line

<!-- Written by docs/generate from the commands. Change those, then run `make docs`. -->

`interlace COMMAND`, or `python -m interlace COMMAND`; `-h` and `--help` show this for one command.

```console
$ interlace doctor
$ interlace check all_gather_linear.ilc --json
```

| exit code | meaning |
| --- | --- |
| 0 | success |
| 1 | the verdict is bad: an unsound schedule, a missed bar, a broken part |
| 2 | wrong input or usage |
| 70 | a fault of Interlace itself, with a traceback |
| 130 | interrupted |

With `--json`, results and errors of the input are printed as JSON. Errors of usage, such as an
unknown option, are text on stderr.
"""

OPTIONS_HEAD = """# Options

<!-- Written by docs/generate from interlace.Options. Change that, then run `make docs`. -->

```python
import interlace

options = interlace.Options(strategy="ring", timeout_s=60.0)  # compile(model, options=options)
```

`interlace.compile` and `Executor` take this frozen dataclass.
`torch.compile(..., backend="interlace", options={"strategy": "ring"})` takes the same names as a
dict, and some commands have options of the same names. An unknown name or value raises
`OptionError`.
"""


def cli_page() -> str:
    """The text of reference/cli.md."""
    return "\n".join([CLI_HEAD, *_sections(app, "interlace", "##")])


def options_page() -> str:
    """The text of reference/options.md."""
    told, types = field_docstrings(), get_type_hints(Options)
    parts = [OPTIONS_HEAD]
    for field in dataclasses.fields(Options):
        value = _value(types[field.name])
        parts.append(f"## `{field.name}`\n\n{value}; default `{field.default!r}`\n")
        parts.append(told[field.name] + "\n")
    return "\n".join(parts)


def field_docstrings() -> dict[str, str]:
    """What the docstring of `Options` says of each field."""
    section = (inspect.getdoc(Options) or "").partition("Attributes:\n")[2]
    _, *found = re.split(r"^    (\w+): ", section, flags=re.MULTILINE)
    texts = (textwrap.dedent(f"        {text}").strip() for text in found[1::2])
    return {name: text[0].upper() + text[1:] for name, text in zip(found[::2], texts, strict=True)}


def _sections(commands: typer.Typer, prefix: str, mark: str) -> Iterator[str]:
    group: Any = typer.main.get_command(commands)
    context: Any = typer.Context(group)
    for name in group.list_commands(context):
        command, title = group.get_command(context, name), f"{prefix} {name}"
        if hasattr(command, "commands"):
            yield f"{mark} {title}\n\n{command.help}\n"
            yield from _sections(bench, title, mark + "#")
            continue
        arguments = [p for p in command.params if not p.opts[0].startswith("-")]
        usage = " ".join([title, *(p.metavar or p.name.upper() for p in arguments), "[OPTIONS]"])
        yield f"{mark} {title}\n\n```text\n{usage}\n```\n\n{textwrap.dedent(command.help or '')}\n"
        hints = inspect.signature(command.callback, eval_str=True).parameters
        yield table(
            ("option", "value", "default", "meaning"),
            (_row(p, hints[p.name].annotation) for p in command.params if p.name in hints),
        )


def _row(param: Any, annotation: Any) -> tuple[str, str, str, str]:
    names = ", ".join(f"`{o}`" for o in (*param.opts, *param.secondary_opts))
    names = names if param.opts[0].startswith("-") else f"`{param.metavar or param.name.upper()}`"
    default = "required" if param.required else ""
    unset = any(param.default is value for value in (None, "", False))
    if not (param.required or unset):
        default = f"`{param.default}`"
    value = "" if getattr(param, "is_flag", False) else _value(annotation)
    return names, value, default, param.help or ""


def _value(annotation: Any) -> str:
    """A type as words: its choices, or the name of the type."""
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(_value(a) for a in get_args(annotation) if a is not type(None))
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if get_origin(annotation) is list:
        return f"{_value(get_args(annotation)[0])}, repeated"
    names = {"str": "text", "int": "integer", "float": "number", "Path": "path"}
    return names.get(name := str(annotation.__name__), name)
