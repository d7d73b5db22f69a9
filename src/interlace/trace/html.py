"""Timelines as one self-contained HTML page: nothing is fetched, and it opens from a file.

Rows are ranks x streams, the predicted run above the measured one; a colour is a site. The page
zooms, pans, shows an op's text under the pointer, and has the Program's text, its sites and the
overlap figures beside it.

    write_page([Run((executor.program,), simulated, executor.timeline())], "step.html")

Every string is escaped, and the page's own policy lets no script run but ours (by its hash), so a
module path or a remark cannot become markup or code. Markup, script and style stand in `page/`;
the script reads `page_data`: names and sites stand there once, Programs are numbered
through all runs, and so are the keys of ops and sites (`program:op`, `program:site`).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from interlace.cost.timeline import KINDS, Timeline
from interlace.ir import Program, Site
from interlace.ir.text.printer import print_lines
from interlace.trace.figures import HEADINGS, figures_rows
from interlace.trace.tracks import Run, arrows, ranks_of, title, tracks, write_whole

PageSite = tuple[int, int]
"""A Program's place in the page, and a site's id."""
SCRIPTS = ("model.js", "draw.js", "act.js")
"""The page's one script, in this order."""


def write_html(
    predicted: Timeline | None,
    measured: Timeline | None,
    path: str | Path,
    *,
    program: Program | Sequence[Program] | None = None,
    name: str = "",
    facts: Sequence[tuple[str, str]] = (),
) -> Path:
    """Writes the page of one run; `program` is what ran (a sequence for a set of Programs)."""
    programs = (program,) if isinstance(program, Program) else tuple(program or ())
    return write_page([Run(programs, predicted, measured)], path, name, facts)


def write_page(
    runs: Sequence[Run], path: str | Path, name: str = "", facts: Sequence[tuple[str, str]] = ()
) -> Path:
    """Writes the page of runs, such as forward and backward, whole or not at all; returns the path.

    `facts` are shown at the top, such as `("verifier", "sound")`.
    """
    return write_whole(path, html_page(runs, name, facts))


def html_page(runs: Sequence[Run], name: str = "", facts: Sequence[tuple[str, str]] = ()) -> str:
    """The page as text."""
    programs = [program for run in runs for program in run.programs]
    name = name or " + ".join(dict.fromkeys(p.name for p in programs)) or "timeline"
    style, script = _part("page.css"), "\n" + "\n".join(map(_part, SCRIPTS))
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'"
    return Template(_part("page.html")).substitute(
        policy=escape(policy),
        name=escape(name),
        style=style,
        facts="".join(f"<li><b>{escape(key)}</b> {escape(value)}</li>" for key, value in facts),
        listings="".join(_listing(place, program) for place, program in enumerate(programs)),
        figures=_table(HEADINGS, _figures(runs)),
        sites=_sites(programs),
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


def _figures(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """The overlap figures of all runs."""
    return [
        (f"{run.name} {row[0]}".strip(), *row[1:])
        for run in runs
        for row in figures_rows(run.timelines)
    ]


def _listing(place: int, program: Program) -> str:
    """A Program's text, each line knowing its op and site."""
    rows: list[str] = []
    for line in print_lines(program):
        family, index = line.tag
        attributes = f' data-op="{place}:{index}"' if family == "op" else ""
        site = program.ops[index].site if family == "op" else None
        site = program.sites[index].id if family == "site" else site
        if site is not None:
            attributes += f' data-site="{place}:{site}"'
        text = _coloured(line.text) if family == "op" else escape(line.text)
        rows.append(f"<li{attributes}>{text or ' '}</li>")
    caption = f"{escape(program.name)} · {len(program.ops)} ops"
    return f"<h2>{caption}</h2><ol>{''.join(rows)}</ol>"


def _coloured(line: str) -> str:
    """A line of text, escaped, its stream's name in bold."""
    head, colon, rest = line.partition(": ")
    if colon and head.strip().isidentifier():
        return f"<b>{escape(head)}</b>: {escape(rest)}"
    return escape(line)


SITES = ("", "program", "site", "module", "kind", "strategy", "serial", "predicted", "reason")


def _sites(programs: Sequence[Program]) -> str:
    """The table of sites; the script colours its rows and lights up their spans."""
    rows = {
        f' tabindex="0" data-site="{place}:{site.id}"': (
            "",
            program.name,
            str(site.id),
            site.module,
            site.kind,
            " ".join(filter(None, (site.strategy, site.protocol))),
            _ms(site.serial_ms),
            _ms(site.predicted_ms),
            site.reason,
        )
        for place, program in enumerate(programs)
        for site in program.sites
    }
    if not rows:
        return ""
    found = _table(SITES, list(rows.values()), list(rows), ' id="sites"')
    return f'<div><h2>Sites</h2><div class="wide">{found}</div></div>'


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.3g} ms"


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


# -- what the script reads ----------------------------------------------------------------------


def page_data(runs: Sequence[Run]) -> dict[str, object]:
    """Everything that the page's script reads."""
    programs = [program for run in runs for program in run.programs]
    sites = {(i, site.id): site for i, program in enumerate(programs) for site in program.sites}
    places: dict[PageSite, int] = {key: i for i, key in enumerate(sites)}
    names: dict[str, int] = {}
    panels: list[dict[str, object]] = []
    first = 0
    for run in runs:
        owner = {
            rank: i
            for i, program in enumerate(run.programs, start=first)
            for rank in ranks_of(program)
        }
        between = [[a.kind, a.name, *a.source, *a.target] for a in arrows(run.programs)]
        for timeline in run.timelines:
            panels.append(_panel(timeline, owner, places, names, run.name) | {"arrows": between})
        first += len(run.programs)
    unknown = Site(id=0, kind="")  # a span may name a site that no Program here knows
    return {
        "panels": panels,
        "names": list(names),
        "kinds": KINDS,
        "sites": [_site(key, sites.get(key, unknown)) for key in places],
        "locs": [[str(op.loc) for op in program.ops] for program in programs],
    }


def _panel(
    timeline: Timeline,
    owner: dict[int, int],
    places: dict[PageSite, int],
    names: dict[str, int],
    name: str,
) -> dict[str, object]:
    """A timeline's rows; times in microseconds from its first span."""
    origin = min((span.start_s for span in timeline.spans), default=0.0)
    rows: list[dict[str, object]] = []
    for track in tracks(timeline):
        program = owner.get(track.rank, -1)
        spans: list[list[float]] = []
        for span in track.spans:
            site = -1
            if span.site is not None:
                site = places.setdefault((program, span.site), len(places))
            start, length = round((span.start_s - origin) * 1e6, 3), round(span.seconds * 1e6, 3)
            label = names.setdefault(span.name, len(names))
            spans.append([start, length, span.op_index, label, site, KINDS.index(span.kind)])
        row = {"title": track.title, "rank": track.rank, "program": program, "spans": spans}
        rows.append(row)
    return {
        "title": title(timeline, name),
        "source": f"{name} {timeline.source}".strip(),
        "rows": rows,
        "makespan": timeline.makespan_s * 1e6,
    }


def _site(key: PageSite, site: Site) -> dict[str, object]:
    return {
        "program": key[0],
        "id": key[1],
        "kind": site.kind,
        "module": site.module,
        "strategy": site.strategy,
    }
