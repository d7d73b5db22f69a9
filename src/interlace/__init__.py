"""Interlace hides communication under computation in multi-GPU PyTorch programs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from interlace import errors
from interlace.errors import InterlaceError
from interlace.options import Options

if TYPE_CHECKING:
    from interlace.comm.resets import reset_teams as reset
    from interlace.comm.teams import release_teams as release
    from interlace.cost import simulate
    from interlace.frontend.compile import compile
    from interlace.frontend.explain import explain, report, timelines
    from interlace.frontend.schedules import export
    from interlace.ir.build import program
    from interlace.ir.text.load import load, load_set
    from interlace.ir.text.parser import parse, parse_set
    from interlace.runtime import Executor
    from interlace.runtime.cuda.waits.watchdog import synchronize
    from interlace.verify import check
    from interlace_check.graphs import check_graph
    from interlace_check.pipelining import check_pipelining
    from interlace_check.recorded import check_recorded, save_recording

__all__ = [
    "Executor",
    "InterlaceError",
    "Options",
    "check",
    "check_graph",
    "check_pipelining",
    "check_recorded",
    "compile",
    "errors",
    "explain",
    "export",
    "load",
    "load_set",
    "parse",
    "parse_set",
    "program",
    "release",
    "report",
    "reset",
    "save_recording",
    "simulate",
    "synchronize",
    "timelines",
]
__version__ = "0.1.0"

_LAZY = {
    "Executor": ("interlace.runtime", "Executor"),
    "check": ("interlace.verify", "check"),
    "check_graph": ("interlace_check.graphs", "check_graph"),
    "check_pipelining": ("interlace_check.pipelining", "check_pipelining"),
    "check_recorded": ("interlace_check.recorded", "check_recorded"),
    "compile": ("interlace.frontend.compile", "compile"),
    "explain": ("interlace.frontend.explain", "explain"),
    "export": ("interlace.frontend.schedules", "export"),
    "load": ("interlace.ir.text.load", "load"),
    "load_set": ("interlace.ir.text.load", "load_set"),
    "parse": ("interlace.ir.text.parser", "parse"),
    "parse_set": ("interlace.ir.text.parser", "parse_set"),
    "program": ("interlace.ir.build", "program"),
    "release": ("interlace.comm.teams", "release_teams"),
    "report": ("interlace.frontend.explain", "report"),
    "reset": ("interlace.comm.resets", "reset_teams"),
    "save_recording": ("interlace_check.recorded", "save_recording"),
    "simulate": ("interlace.cost", "simulate"),
    "synchronize": ("interlace.runtime.cuda.waits.watchdog", "synchronize"),
    "timelines": ("interlace.frontend.explain", "timelines"),
}
"""Names that are imported when they are first asked for: from where, and what they are there."""


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, what = _LAZY[name]
    return getattr(import_module(module), what)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
