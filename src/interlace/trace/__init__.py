"""Timelines, predicted and measured, for people to look at.

perfetto.py   a trace for Perfetto, with arrows between ops that order each other
html.py       one self-contained page: the gain, rows, text, sites, overlap (its parts: page/)
page_data.py  what the page's script reads
summary.py    the page's figures: its head, the tables of sites and of overlap
figures.py    the overlap figures as text or data
tracks.py     runs, what stands in one row, the arrows, and how files are written

    plain = Run((serial,), simulate(serial), label="serial")
    runs = [Run((executor.program,), simulated, executor.timeline(), before=plain)]
    write_page(runs, "step.html")
    write_perfetto(runs, "step.json")
"""

from interlace.trace.figures import figures_json, figures_rows, figures_text
from interlace.trace.html import html_page, write_page
from interlace.trace.perfetto import write_perfetto
from interlace.trace.tracks import Arrow, Run, Track, arrows, tracks

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
