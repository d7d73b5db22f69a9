"""The page: nothing from outside, nothing unescaped, and it works in a browser."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.trace.chromium import Tab, dump_dom, tab
from tests.trace.samples import RANKS, TEXT, run, sample, serial_sample

from interlace.cost.memory import COPIES, run_memory
from interlace.cost.timeline import Span, Timeline
from interlace.ir import Loc, Program, Remark, Site, parse
from interlace.trace import Run, html_page, write_page
from interlace.trace.figures import milliseconds, percent
from interlace.trace.page_data import page_data

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
    path = write_page(
        [Run((program,), run(program), run(program, "measured"))], tmp_path / "t.html"
    )
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
    assert f"<td>{percent(timeline.figures(1).hidden)}</td>" in page
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
    assert len(re.findall('<tr tabindex="0" class="c[0-9]" data-site=', page)) == 2 * len(
        program.sites
    )


def test_several_runs_keep_their_programs_apart():
    program = sample()
    forward = Run((program.replace(name="forward"),), run(program), name="forward")
    backward = Run((program.replace(name="backward"),), run(program), run(program), "backward")
    data = page_data([forward, backward])
    panels: Any = data["panels"]
    assert [panel["title"] for panel in panels] == [
        *("backward · predicted", "forward · predicted", "backward · predicted")
    ]
    rows = [panel["parts"][0]["rows"] for panel in panels]
    assert [{row["program"] for row in each} for each in rows] == [{1}, {0}, {1}]
    sites: Any = data["sites"]
    used = [{span[4] for row in each for span in row["spans"]} for each in rows]
    assert [{(sites[i]["program"], sites[i]["id"]) for i in u if i >= 0} for u in used] == [
        {(1, 1), (1, 2)},
        {(0, 1), (0, 2)},
        {(1, 1), (1, 2)},
    ]
    page = html_page([forward, backward])
    assert "<td>backward predicted</td>" in page


def compared(name: str = "") -> Run:
    """The sample beside its serial schedule, predicted and measured."""
    plain, program = serial_sample(), sample()
    before = Run((plain,), run(plain), run(plain, "measured", 1.3), label="serial")
    return Run((program,), run(program), run(program, "measured", 1.2), name, before=before)


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of a table's body, below a heading."""
    body = page.split(f"<h2>{heading}</h2>")[1].split("<tbody>")[1].split("</tbody>")[0]
    return [re.findall("<td>(.*?)</td>", row) for row in body.split("</tr>")[:-1]]


def head(page: str) -> str:
    return page.split('<section id="head">')[1].split("</section>")[0]


def test_the_head_says_what_the_table_says():
    page = html_page([compared("forward")])
    rows = {row[0]: row[2:] for row in table(page, "Overlap") if row[1] == "mean"}
    serial, ours = rows["forward serial measured"], rows["forward overlapped measured"]
    run_ = "forward, measured"
    assert f"<b>{serial[3]} → {ours[3]}</b> of communication hidden; {run_}" in head(page)
    assert f"<b>{serial[4]} → {ours[4]}</b> of it exposed, mean over ranks; {run_}" in head(page)
    assert serial[3] == "0%" != ours[3]


def test_the_head_sums_all_runs():
    runs = [compared("forward"), compared("backward")]
    before, after = (
        sum(it.makespan_s for run in runs if (it := part(run).measured))
        for part in (lambda run: run.before, lambda run: run)
    )
    assert before > after
    gain = f"<b>{before / after:.2f}x</b> as fast as serial; forward + backward, measured"
    assert gain in head(html_page(runs))


def test_a_prediction_alone_has_no_measured_columns():
    page = html_page([Run((sample(),), run(sample()))])
    assert "exposed, predicted" in page
    assert "<th>measured" not in page
    assert "as fast as" not in page.split("<main>")[0]


def test_sites_have_predicted_and_measured_columns():
    run_ = compared()
    page = html_page([run_])
    headings = re.findall("<th>(.*?)</th>", page.split('id="sites"')[1].split("</thead>")[0])
    rows = [dict(zip(headings, row, strict=True)) for row in table(page, "Sites")]
    assert (rows[0]["serial"], rows[0]["predicted"]) == ("2.00 ms", "1.40 ms")
    assert run_.measured is not None
    spans = [s for s in run_.measured.spans if (s.rank, s.site) == (3, 1)]
    busy = [span for span in spans if span.kind in ("compute", "comm")]
    took = max(span.end_s for span in busy) - min(span.start_s for span in busy)
    assert rows[0]["measured"] == milliseconds(took), "of the slowest rank, without waits before"
    assert rows[1]["exposed, measured"] == rows[1]["measured"], "nothing hides the all-reduce"


def test_the_serial_schedule_stands_above_on_one_scale_in_the_same_colours():
    data = page_data([compared()])
    panels: Any = data["panels"]
    sites: Any = data["sites"]
    for panel in panels:
        serial, ours = panel["parts"]
        assert [part["label"] for part in (serial, ours)] == ["serial", "overlapped"]
        assert panel["makespan"] == max(serial["makespan"], ours["makespan"])
        colours = [
            {
                sites[s[4]]["module"]: sites[s[4]]["group"]
                for row in part["rows"]
                for s in row["spans"]
            }
            for part in (serial, ours)
        ]
        assert colours[0] == colours[1]
        for part in (serial, ours):
            assert all(part["exposed"][rank] for rank in range(RANKS))
    own = panels[0]["parts"][1]["exposed"][0]
    measured = compared().measured
    assert measured is not None
    assert sum(length for _, length in own) == pytest.approx(measured.figures(0).exposed_s * 1e6)


def test_chromium_draws_every_row(tmp_path: Path):
    program = sample()
    predicted, measured = run(program), run(program, "measured", 1.3)
    path = write_page([Run((program,), predicted, measured)], tmp_path / "t.html")
    dom = dump_dom(path, "op=0:3&theme=dark")
    assert 'data-ready="yes"' in dom
    assert 'data-theme="dark"' in dom
    panels = re.findall(r'class="panel" data-rows="(\d+)" data-spans="(\d+)"', dom)
    assert panels == [(str(2 * RANKS), str(len(t.spans))) for t in (measured, predicted)]
    assert dom.index("measured · all_gather_linear") < dom.index("predicted · all_gather_linear")
    titles = re.findall(r"<div(?: class=\"[a-z]*\")?>(rank \d · \w+)</div>", dom)
    rows = [f"rank {rank} · {stream}" for rank in range(RANKS) for stream in ("main", "comm")]
    assert titles == [*rows, *rows]
    detail = dom[dom.index('id="detail"') :]
    assert 'main: call("aten.mm.out", full[tp.rank], w' in detail.split("</section>")[0]
    assert re.search(r'<li data-op="0:3"[^>]*class="[^"]*picked"', dom)


def test_chromium_shows_all_lines_of_a_long_op(tmp_path: Path):
    program = parse(TEXT.replace("full", "rows_of_all_ranks_that_the_next_matmul_multiplies"))
    timeline = run(program)
    page = html_page([Run((program,), timeline)])
    counts = Counter(re.findall(r'data-op="(0:\d+)"', page))
    op, count = counts.most_common(1)[0]
    assert count > 1
    dom = dump_dom(write_page([Run((program,), timeline)], tmp_path / "t.html"), f"op={op}")
    assert len(re.findall(rf'<li data-op="{op}"[^>]*class="[^"]*picked"', dom)) == count
    detail = dom[dom.index('id="detail"') :].split("</section>")[0]
    assert re.search(r"<code>main: call\(.+\)</code>", detail), "the whole op, in one line"


def test_chromium_runs_nothing_hostile(tmp_path: Path):
    program, timeline = hostile("".join(HOSTILE))
    path = write_page([Run((program,), timeline, timeline)], tmp_path / "t.html")
    dom = dump_dom(path)
    assert 'data-ready="yes"' in dom
    assert "<title>owned" not in dom
    assert "<title>1</title>" not in dom


@pytest.fixture(scope="module")
def shown() -> Iterator[Tab]:
    with tab() as opened:
        yield opened


PIXELS = """(() => {
  const { canvas } = data.panels[0], high = canvas.height;
  const { data: found } = canvas.getContext("2d").getImageData(0, 0, canvas.width, high);
  const [r, g, b] = [1, 3, 5].map(at => parseInt(ink["%s"].slice(at, at + 2), 16));
  let count = 0;
  for (let i = 0; i < found.length; i += 4) {
    if (found[i] === r && found[i + 1] === g && found[i + 2] === b) count++;
  }
  return count;
})()"""
"""How many pixels of the first panel have a colour."""


def test_photographs(shown: Tab, tmp_path: Path):
    """Light, dark, hovered, narrow and on paper; the pictures are in the test's folder."""
    page = write_page([compared("forward")], tmp_path / "t.html", "a step")
    shown.open(page, 1280, 900)
    light = shown.photograph(tmp_path / "light.png")
    assert shown.evaluate(PIXELS % "exposed") > 200, "exposed communication is marked"
    assert shown.evaluate("[...document.querySelectorAll('.labels .head')].length") == 4
    box = shown.evaluate("data.panels[0].canvas.getBoundingClientRect().toJSON()")
    shown.move(box["x"] + 30, box["y"] + 24 + 26 + 10)  # the serial schedule's first row
    assert shown.photograph(tmp_path / "hover.png") != light
    tip = shown.evaluate("tip.hidden ? '' : tip.innerText")
    assert tip.startswith("main: all_gather(x, full")
    assert "rank 0 · main · comm" in tip
    shown.open(page, 1280, 900, dark=True)
    assert shown.photograph(tmp_path / "dark.png") != light
    assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 29)"
    paper = shown.print(tmp_path / "paper.pdf")
    assert paper.startswith(b"%PDF")
    assert 1 <= paper.count(b"/Type /Page\n") <= 4
    shown.media("print", dark=True)
    assert shown.photograph(tmp_path / "print.png", whole=True)
    assert shown.evaluate("ink.card") == "#ffffff", "paper is white"
    assert not shown.evaluate("document.querySelector('.tools').offsetHeight")
    shown.open(page, 390, 844)
    shown.photograph(tmp_path / "narrow.png", whole=True)
    assert shown.evaluate("root.scrollWidth") <= 390, "nothing sticks out"


def test_the_keyboard_does_it_all(shown: Tab, tmp_path: Path):
    shown.open(write_page([compared("forward")], tmp_path / "t.html"), 1280, 900)
    picked = "data.names[picked.at[2][3]]"
    shown.key("n")
    shown.key("n")
    assert shown.evaluate(picked) == "collective", "the second op of the first row"
    shown.key("+")
    assert shown.evaluate("view.to - view.from") == pytest.approx(0.6)
    begin = shown.evaluate("view.from")
    shown.key("ArrowLeft")
    assert shown.evaluate("view.from") == pytest.approx(begin - 0.06)
    shown.key("0")
    assert shown.evaluate("[view.from, view.to]") == [0, 1]
    shown.key("/")
    shown.call("Input.insertText", text="loss all_reduce")
    assert shown.evaluate("document.getElementById('found').textContent").startswith("2 of ")
    shown.key("Enter", "\r")
    assert shown.evaluate("data.sites[picked.at[2][4]].module") == "loss"
    assert "all_reduce(y, y" in shown.evaluate("detail.innerText")
    shown.key("Escape")
    assert shown.evaluate("[picked.matches, picked.op]") == [None, None]


def test_colours_and_labels(shown: Tab, tmp_path: Path):
    """Computation has a colour that no site has; a label is as much of the module as fits."""
    shown.open(write_page([compared()], tmp_path / "t.html"), 1280, 900)
    rows = shown.evaluate("data.panels[0].parts[1].rows[0].spans.map(s => [s[5], shade(s)])")
    colours = {kind: {colour for k, colour in rows if k == kind} for kind in (0, 1)}
    assert colours[0] == {shown.evaluate("ink.plain")}
    assert not colours[0] & {*shown.evaluate("ink.sites")}
    assert colours[1] < {*shown.evaluate("ink.sites")}
    text = """(room => {
      const row = data.panels[0].parts[1].rows[0], pen = data.panels[0].canvas.getContext("2d");
      return label(pen, row, row.spans.find(s => s[5] === COMPUTE), room);
    })(%d)"""
    texts = [shown.evaluate(text % room) for room in (300, 90, 45, 15, 3)]
    assert texts == ["layers.0.mlp.up · mm", "layers.0.mlp.up", "mlp.up", "up", ""]


def test_sites_and_remarks_of_a_text_are_folded(shown: Tab, tmp_path: Path):
    program = sample().replace(remarks=(Remark("decompose", "a remark"),))
    shown.open(write_page([Run((program,), run(program))], tmp_path / "t.html"), 1280, 900)
    folded = shown.evaluate("document.querySelector('#text details details').innerText")
    assert folded == "2 sites, 1 remark"
    numbers = "[...document.querySelectorAll('#text ol')].map(ol => [ol.start, ol.children.length])"
    counts = shown.evaluate(numbers)
    ends = list(itertools.accumulate((count for _, count in counts), initial=1))
    assert [start for start, _ in counts] == ends[:-1], "lines are numbered as in the file"
    assert ends[-1] - 1 == len(str(program).splitlines())


def test_rows_of_one_rank(shown: Tab, tmp_path: Path):
    shown.open(write_page([compared()], tmp_path / "t.html"), 1280, 900)
    labels = "data.panels[0].labels.innerText"
    assert len(shown.evaluate(labels).splitlines()) == 2 + RANKS + 2 * RANKS
    shown.evaluate("show('2')")
    assert shown.evaluate(labels).splitlines() == [
        *("serial", "rank 2 · main", "overlapped", "rank 2 · main", "rank 2 · comm")
    ]


def test_a_hundred_thousand_ops(shown: Tab, tmp_path: Path):
    spans = tuple(
        Span(rank, "main", i, "aten.mm.out", i * 1e-6, (i + 1) * 1e-6, None, kind)
        for rank in range(4)
        for i, kind in zip(range(25_000), itertools.cycle(("compute", "comm")), strict=False)
    )
    shown.open(write_page([Run((), Timeline(spans, "big"))], tmp_path / "t.html"), 1280, 900)
    assert shown.evaluate("Number(data.panels[0].box.dataset.spans)") == 100_000
    assert shown.evaluate(PIXELS % "exposed") > 1000


def test_the_memory_of_each_run_is_drawn() -> None:
    program = sample()
    memory = run_memory(program)
    page = html_page([Run((program,), run(program), name="forward")])
    assert f"<h3>forward · {memory.line()}</h3><svg" in page
    assert page.count('<rect class="column"') == len(program.ops)
    full = 8192 * 8192 * 2
    assert f"op 2 notify ready: {memory.peak:,} bytes" in page
    assert memory.nbytes("slots") == COPIES * full
    assert '<polygon class="slots"' in page
    assert '<polygon class="inputs"' not in page, "none is given up"


def test_the_memory_of_a_long_program_shows_its_peak() -> None:
    ops = [f'    main: call("aten.neg.default", x, out=(a{i} := f32[{i + 1}]))' for i in range(900)]
    program = parse("\n".join(["def long(x: f32[1]):", *ops, "    return a0"]))
    page = html_page([Run((program,))])
    assert page.count('<rect class="column"') == 300
    assert f"op 899 aten.neg.default: {900 * 4 + 4:,} bytes" in page
