"""Timelines as one self-contained HTML page: nothing is fetched, and it opens from a file.

The head says what overlap gained. Below it stand the timelines, measured before predicted: rows are
ranks x streams, the schedule that a run is compared with above its own on one time scale.
Computation has one colour, communication that of its site, and exposed communication is marked. The
page zooms, pans, searches, shows an op's text under the pointer, and has the Programs' text, the
sites, the overlap figures and a picture of the memory beside it.

    write_page([Run((executor.program,), simulated, executor.timeline())], "step.html")

Every string is escaped, and the page's own policy lets no script run but ours (by its hash), so a
module path or a remark cannot become markup or code. Markup, script and style stand in `page/`;
`page_data.py` has what the script reads, `summary.py` the figures.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from interlace.cost.memory import HEADINGS as MODULES
from interlace.cost.memory import IN_WORDS, KINDS
from interlace.cost.timeline import Figures
from interlace.ir import Program
from interlace.ir.text.printer import TextLine, print_lines
from interlace.trace.figures import HEADINGS, milliseconds, percent
from interlace.trace.memory import memory_figures
from interlace.trace.page_data import COLOURS, PageSite, numbered, page_data, site_groups
from interlace.trace.summary import head_figures, overlap_rows, site_headings, site_rows
from interlace.trace.tracks import Run, write_whole

LINES = 500
"""Lines of text that are laid out together, when they come in sight."""
FOLDED = ("site", "remark")
"""Lines of a Program that say nothing of its order."""
SCRIPTS = ("model.js", "draw.js", "act.js")
"""The page's one script, in this order."""


def write_page(
    runs: Sequence[Run], path: str | Path, name: str = "", facts: Sequence[tuple[str, str]] = ()
) -> Path:
    """Writes the page of runs, such as forward and backward, whole or not at all; returns the path.

    `facts` are shown at the top, such as `("verifier", "sound")`.
    """
    return write_whole(path, html_page(runs, name, facts))


def html_page(runs: Sequence[Run], name: str = "", facts: Sequence[tuple[str, str]] = ()) -> str:
    """The page as text."""
    shades = {key: group % COLOURS for key, group in site_groups(runs).items()}
    plain = [run.before.label for run in runs if run.before for _ in run.before.programs]
    labels = [""] * sum(len(run.programs) for run in runs) + plain
    listed = [
        _listing(place, program, shades, label)
        for place, (program, label) in enumerate(zip(numbered(runs), labels, strict=True))
    ]
    names = dict.fromkeys(program.name for run in runs for program in run.programs)
    name = name or " + ".join(names) or "timeline"
    style, script = _part("page.css"), "\n" + "\n".join(map(_part, SCRIPTS))
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'"
    return Template(_part("page.html")).substitute(
        policy=escape(policy),
        name=escape(name),
        style=style,
        facts="".join(f"<li><b>{escape(key)}</b> {escape(value)}</li>" for key, value in facts),
        head=_head(runs),
        listings="".join(listed),
        figures=_table(HEADINGS, overlap_rows(runs)),
        sites=_sites(runs, shades),
        memory=_memory(runs),
        data=script_json(page_data(runs)),
        script=script,
    )


def _part(name: str) -> str:
    """A file of `page/`."""
    return files("interlace.trace").joinpath("page", name).read_text(encoding="utf-8")


def script_json(value: object) -> str:
    """JSON that may stand inside a script element: nothing in it ends the element or a comment."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _head(runs: Sequence[Run]) -> str:
    """The gain of overlap, of all runs together."""
    label = next((run.before.label for run in runs if run.before), "")
    names = " + ".join(run.name for run in runs if run.name)
    items: list[str] = []
    for place, (source, figures) in enumerate(head_figures(runs)):
        of = escape(", ".join(filter(None, (names, source))))
        gains = [
            (f"<b>{value}</b>" if not place else value, what)
            for value, what in _gains(figures, label)
        ]
        items += [f"<li>{value} {what}; {of}</li>" for value, what in gains]
    return f"<ul>{''.join(items)}</ul>" if items else ""


def _gains(figures: Sequence[Figures], label: str) -> Iterator[tuple[str, str]]:
    """Gains of a schedule over the one it is compared with: its speed, and the share it hides."""
    last = figures[-1].makespan_s
    if len(figures) > 1 and last > 0:
        yield f"{figures[0].makespan_s / last:.2f}x", f"as fast as {escape(label)}"
    if any(it.comm_s > 0 for it in figures):
        yield " → ".join(percent(it.hidden) for it in figures), "of communication hidden"
        exposed = " → ".join(milliseconds(it.exposed_s) for it in figures)
        yield exposed, "of it exposed, mean over ranks"


def _listing(place: int, program: Program, shades: Mapping[PageSite, int], label: str) -> str:
    """A Program's text, its sites and remarks folded; all of it is closed if it has a label."""
    text, number = "", 1
    for folded, group in itertools.groupby(print_lines(program), lambda it: it.tag[0] in FOLDED):
        lines = list(group)
        for begin in range(0, len(lines), LINES):
            rows = [_row(place, program, line, shades) for line in lines[begin : begin + LINES]]
            long = ' class="long"' if len(rows) == LINES else ""
            part = f'<ol start="{number}"{long}>{"".join(rows)}</ol>'
            number += len(rows)
            text += (
                f"<details><summary>{_counts(program)}</summary>{part}</details>"
                if folded
                else part
            )
    caption = f"{escape(f'{label} {program.name}'.strip())} · {len(program.ops)} ops"
    return f"<details{'' if label else ' open'}><summary>{caption}</summary>{text}</details>"


def _counts(program: Program) -> str:
    counts = (len(program.sites), "sites"), (len(program.remarks), "remarks")
    return ", ".join(f"{num} {word if num > 1 else word[:-1]}" for num, word in counts if num)


def _row(place: int, program: Program, line: TextLine, shades: Mapping[PageSite, int]) -> str:
    """A line of text, which knows its op and site."""
    family, index = line.tag
    attributes = f' data-op="{place}:{index}"' if family == "op" else ""
    site = program.ops[index].site if family == "op" else None
    site = program.sites[index].id if family == "site" else site
    if site is not None and (place, site) in shades:
        attributes += f' class="c{shades[place, site]}"'
    text = _coloured(line.text) if family == "op" else escape(line.text)
    return f"<li{attributes}>{text or ' '}</li>"


def _coloured(line: str) -> str:
    """A line of text, escaped, its stream's name in bold."""
    head, colon, rest = line.partition(": ")
    if colon and head.strip().isidentifier():
        return f"<b>{escape(head)}</b>: {escape(rest)}"
    return escape(line)


def _sites(runs: Sequence[Run], shades: Mapping[PageSite, int]) -> str:
    """The table of sites; the script lights up their spans."""
    rows = site_rows(runs)
    if not rows:
        return ""
    given = [
        f' tabindex="0" class="c{shades[place, site]}" data-site="{place}:{site}"'
        for place, site in rows
    ]
    found = _table(site_headings(runs), [*rows.values()], given, ' id="sites"')
    return f'<div><h2>Sites</h2>{SITES_SAID}<div class="wide">{found}</div></div>'


def _memory(runs: Sequence[Run]) -> str:
    """A picture of each run's memory, and what is alive at its peak."""
    found = "".join(
        f"<h3>{escape(name)} · {escape(memory.line())}</h3>{picture}"
        f'<div class="wide">{_table(MODULES, memory.rows())}</div>'
        for name, memory, picture in memory_figures(runs)
    )
    keys = " ".join(
        f'<span><i class="key {kind}"></i>{words}</span>'
        for kind, words in zip(KINDS, IN_WORDS, strict=True)
    )
    said = f'<p class="soft">{MEMORY_SAID}</p><p class="legend">{keys}</p>'
    return f'<div id="memory"><h2>Memory</h2>{said}{found}</div>' if found else ""


MEMORY_SAID = """Counted from the Program, op by op in the order of its list, on the rank that \
takes most; inputs that stay the caller's are left out. The tables list what is alive then."""
SITES_SAID = """<p class="soft">Serial and predicted are the cost model's, of the site alone. \
Measured is from the first start of a site's computation and communication to the last end, on its \
slowest rank; ops of other sites may run between.</p>"""


def _table(
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    attributes: Sequence[str] = (),
    of_table: str = "",
) -> str:
    """A table; `attributes` are those of its rows."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    body = "".join(
        f"<tr{given}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for given, row in zip(attributes or [""] * len(rows), rows, strict=True)
    )
    return f"<table{of_table}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
