"""The page: nothing from outside, nothing unescaped, and it works in a browser."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.trace.chromium import dump_dom
from tests.trace.samples import RANKS, TEXT, run, sample

from interlace.cost.timeline import Span, Timeline
from interlace.ir import Loc, Program, Remark, Site, parse
from interlace.trace import Run, html_page, write_html
from interlace.trace.html import page_data

HOSTILE = (
    "</script><script>document.title='owned'</script>",
    '"><img src=x onerror="document.title=\'owned\'">',
    "<!--<script>",
    "' onmouseover='document.title=1'",
    "]]>&amp;\u2028\u2029&lt;b&gt;",
)


class Tags(HTMLParser):
    """The elements of a page and their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def tags(page: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Tags()
    parser.feed(page)
    return parser.found


def hostile(text: str) -> tuple[Program, Timeline]:
    """The sample with `text` in every string that reaches the page."""
    program = sample()
    first, *rest = program.ops
    loc = Loc(module=text, file=text, line=1)
    program = program.replace(
        name=text,
        ops=tuple(dataclasses.replace(op, loc=loc) for op in (first, *rest)),
        sites=(Site(id=1, kind=text, module=text, strategy=text, reason=text),),
        remarks=(Remark(text, text),),
    )
    spans = tuple(
        Span(s.rank, s.stream + text, s.op_index, text, s.start_s, s.end_s, s.site, s.kind)
        for s in run(sample()).spans
    )
    return program, Timeline(spans, text, "measured")


def test_the_page_is_one_file_that_fetches_nothing(tmp_path: Path):
    program = sample()
    path = write_html(run(program), run(program, "measured"), tmp_path / "t.html", program=program)
    assert list(tmp_path.iterdir()) == [path]
    page = path.read_text()
    for tag, attributes in tags(page):
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not {"src", "href", "style", "srcset", "action"} & set(attributes), (tag, attributes)
    assert not re.search(r"https?:|url\(|@import|\bfetch\(|XMLHttpRequest|WebSocket", page)
    assert "default-src &#x27;none&#x27;" in page


@pytest.mark.parametrize("text", HOSTILE, ids=["script", "image", "comment", "quote", "entities"])
def test_hostile_strings_stay_text(text: str):
    plain = [tag for tag, _ in tags(html_page([Run((sample(),), run(sample()))]))]
    program, timeline = hostile(text)
    page = html_page([Run((program,), timeline, name=text)], text, [(text, text)])
    found = tags(page)
    assert {tag for tag, _ in found} <= {*plain}
    assert sum(tag == "script" for tag, _ in found) == 2
    assert not [a for _, attributes in found for a in attributes if a.startswith("on")]
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    assert text in json.loads(data[1])["names"]
    assert not set("<>&\u2028") & set(data[1])


def test_the_figures_and_sites_are_there_without_a_script():
    program = sample()
    timeline = run(program)
    page = html_page([Run((program,), timeline)])
    assert f"<td>{timeline.figures(1).hidden:.0%}</td>" in page
    assert "<td>peer is 1.4x faster than serial</td>" in page
    assert page.count("<li data-op=") == len(program.ops)


def test_a_set_of_programs_keeps_the_sites_of_each_apart():
    program = sample()
    stages = [
        program.replace(name="first", ranks=(0, 1, 2, 3)),
        program.replace(name="second", ranks=(4, 5, 6, 7)),
    ]
    page = html_page([Run(tuple(stages), run(program))])
    assert 'data-op="0:3"' in page
    assert 'data-op="1:3"' in page
    assert page.count('<tr tabindex="0" data-site=') == 2 * len(program.sites)


def test_several_runs_keep_their_programs_apart():
    program = sample()
    forward = Run((program.replace(name="forward"),), run(program), name="forward")
    backward = Run((program.replace(name="backward"),), run(program), run(program), "backward")
    data = page_data([forward, backward])
    panels: Any = data["panels"]
    assert [panel["title"] for panel in panels] == [
        *("forward · predicted", "backward · predicted", "backward · predicted")
    ]
    assert [{row["program"] for row in panel["rows"]} for panel in panels] == [{0}, {1}, {1}]
    sites: Any = data["sites"]
    used = [{span[4] for row in panel["rows"] for span in row["spans"]} for panel in panels]
    assert [{(sites[i]["program"], sites[i]["id"]) for i in u if i >= 0} for u in used] == [
        {(0, 1), (0, 2)},
        {(1, 1), (1, 2)},
        {(1, 1), (1, 2)},
    ]
    page = html_page([forward, backward])
    assert "<td>backward predicted</td>" in page


def test_chromium_draws_every_row(tmp_path: Path):
    program = sample()
    predicted, measured = run(program), run(program, "measured", 1.3)
    path = write_html(predicted, measured, tmp_path / "t.html", program=program)
    dom = dump_dom(path, "op=0:3&theme=dark")
    assert 'data-ready="yes"' in dom
    assert 'data-theme="dark"' in dom
    panels = re.findall(r'class="panel" data-rows="(\d+)" data-spans="(\d+)"', dom)
    assert panels == [(str(2 * RANKS), str(len(t.spans))) for t in (predicted, measured)]
    assert dom.index("predicted · all_gather_linear") < dom.index("measured · all_gather_linear")
    titles = re.findall(r"<div(?: class=\"[a-z]*\")?>(rank \d · \w+)</div>", dom)
    rows = [f"rank {rank} · {stream}" for rank in range(RANKS) for stream in ("main", "comm")]
    assert titles == [*rows, *rows]
    detail = dom[dom.index('id="detail"') :]
    assert 'main: call("aten.mm.out", full[tp.rank], w' in detail.split("</section>")[0]
    assert re.search(r'<li data-op="0:3"[^>]*class="picked"', dom)


def test_chromium_shows_all_lines_of_a_long_op(tmp_path: Path):
    program = parse(TEXT.replace("full", "rows_of_all_ranks_that_the_next_matmul_multiplies"))
    timeline = run(program)
    page = html_page([Run((program,), timeline)])
    counts = Counter(re.findall(r'data-op="(0:\d+)"', page))
    op, count = counts.most_common(1)[0]
    assert count > 1
    dom = dump_dom(write_html(timeline, None, tmp_path / "t.html", program=program), f"op={op}")
    assert len(re.findall(rf'<li data-op="{op}"[^>]*class="picked"', dom)) == count
    detail = dom[dom.index('id="detail"') :].split("</section>")[0]
    assert re.search(r"<code>main: call\(.+\)</code>", detail), "the whole op, in one line"


def test_chromium_runs_nothing_hostile(tmp_path: Path):
    program, timeline = hostile("".join(HOSTILE))
    path = write_html(timeline, timeline, tmp_path / "t.html", program=program)
    dom = dump_dom(path)
    assert 'data-ready="yes"' in dom
    assert "<title>owned" not in dom
    assert "<title>1</title>" not in dom
