"""Options that every benchmark has, each written once, and sizes in words.

@benchmark
def layer(dim: ... = 4096, *, given: BenchOptions) -> None: ...  # with --device, --out, ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from interlace.commands.options import Device, Json, TimeOut
from interlace.commands.output import command
from interlace.commands.pages import check_places
from interlace.errors import OptionError

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
RESULTS = Path("benchmarks/results")
"""Folder of rows that are meant to be committed."""

Bars = Annotated[bool, typer.Option("--check", help="Judge the bars; code 1 if one is missed.")]
Shapes = Annotated[
    str, typer.Option(help="Shapes instead: 'ag_gemm:M,K,N gemm_rs:M,K,N gemm_ar:M,K,N'.")
]
Small = Annotated[
    bool | None, typer.Option("--small/--large", help="Small sizes; default: on a CPU.")
]
Verbose = Annotated[bool, typer.Option("--verbose", help="Say on stderr what is under way.")]
World = Annotated[int | None, typer.Option(help="Ranks; default: a rank for each GPU.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options of every benchmark, with which `interlace_bench.ranks` runs it."""

    out: Annotated[Path, typer.Option(help="Folder of the CSV rows.")] = RESULTS
    name: Annotated[str, typer.Option(help="Name of the CSV file.")] = ""
    device: Device = "auto"
    commit: Annotated[str, typer.Option(help="Commit, where git cannot tell.")] = ""
    time_out: TimeOut = 580
    verbose: Verbose = False
    json: Json = False

    @property
    def path(self) -> Path | None:
        """The file to which rows are appended as they come."""
        return self.out / f"{self.name}.csv" if self.name else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceOptions(BenchOptions):
    """The options of a benchmark in which ways to compute one thing take turns."""

    only: Annotated[
        str, typer.Option(help="Names of what is raced, with commas; default: all.")
    ] = ""
    seconds: Annotated[
        float, typer.Option(help="Time for timing; what does not fit is left out.")
    ] = 80

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that every race has."""
        if self.seconds <= 0:
            raise OptionError("nothing to measure: give --seconds > 0")
        only = tuple(words(self.only))
        return {"commit": self.commit, "only": only, "seconds": self.seconds}


def benchmark(function: Callable[..., None]) -> Callable[..., None]:
    """A command that has, in place of its parameter `given`, the options of that one's type."""
    name, options = function.__name__, get_type_hints(function)["given"]
    hints = get_type_hints(options, include_extras=True)
    defaults = {item.name: item.default for item in fields(options)} | {"name": name}

    @functools.wraps(function)
    def run(**values: Any) -> None:
        given = options(**{key: values.pop(key) for key in defaults})
        check_places(given.path)
        function(given=given, **values)

    own = inspect.signature(function, eval_str=True)
    kind = inspect.Parameter.KEYWORD_ONLY
    both = [item for key, item in own.parameters.items() if key != "given"]
    both += [
        inspect.Parameter(key, kind, default=default, annotation=hints[key])
        for key, default in defaults.items()
    ]
    made: Any = command(run)
    made.__signature__ = own.replace(parameters=both)
    made.__annotations__ = {}
    return made


def nbytes(text: str) -> int:
    """Bytes of text such as 64MiB, 1K or 4096."""
    word = text.strip().upper().removesuffix("B").removesuffix("I")
    number, unit = (word[:-1], word[-1]) if word[-1:] in ("K", "M", "G") else (word, "")
    if not number.isdecimal() or int(number) < 1:
        raise OptionError(f"{text!r} is no size: write it as 4096, 64KiB or 1GiB")
    return int(number) * UNITS[unit]


def words(text: str) -> list[str]:
    """The words of an option that takes several, with commas between."""
    return [word.strip() for word in text.split(",") if word.strip()]
