"""Timelines, predicted and measured, for people to look at.

perfetto.py   a trace for Perfetto, with arrows between ops that order each other
html.py       one self-contained page: the gain, rows, text, sites, overlap (its parts: page/)
page_data.py  what the page's script reads
memory.py     the memory of a run as a picture
summary.py    the page's figures: its head, the tables of sites and of overlap
figures.py    the overlap figures as text or data
account.py    where the time of a measured run went, in parts that add up
tracks.py     runs, what stands in one row, the arrows, and how files are written

    plain = Run((serial,), simulate(serial), label="serial")
    runs = [Run((executor.program,), simulated, executor.timeline(), before=plain)]
    write_page(runs, "step.html")
    write_perfetto(runs, "step.json")

A run loads neither page nor trace: the names of html.py and perfetto.py are imported when used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from interlace.trace.figures import figures_json, figures_rows, figures_text
from interlace.trace.tracks import Arrow, Run, Track, arrows, tracks

if TYPE_CHECKING:
    from interlace.trace.html import html_page, write_page
    from interlace.trace.perfetto import write_perfetto

__all__ = [
    "Arrow",
    "Run",
    "Track",
    "arrows",
    "figures_json",
    "figures_rows",
    "figures_text",
    "html_page",
    "tracks",
    "write_page",
    "write_perfetto",
]

_LAZY = {"html_page": "html", "write_page": "html", "write_perfetto": "perfetto"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
