"""Output of `interlace bench`: a table of the rows, the failed ones, bars; or all as JSON.

columns = {"way": "{way}", "median us": "{median_us:.1f}"}        # formats of a row
conclude(report, "one layer", columns, "{step} {way}", given)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from interlace.commands.output import UNSOUND, print_json, say, table
from interlace_bench.commands.options import BenchOptions

if TYPE_CHECKING:
    from interlace_bench.bars import BarVerdict


def conclude(
    report: dict[str, Any],
    headline: str,
    columns: Mapping[str, str],
    place: str,
    given: BenchOptions,
    verdicts: Sequence[BarVerdict] = (),
) -> None:
    """The rows for scripts or for people: a table, what was not timed, the bars; code 1 where one
    is missed. `columns` and `place` are formats of a row."""
    from interlace_bench.bars import missed
    from interlace_bench.rows import plain

    if given.json:
        bars = [verdict.to_json() for verdict in verdicts]
        print_json({"schema": 1, **plain(report), "bars": bars})
    else:
        facts = report["facts"]
        say(f"{facts['gpu']}, torch {facts['torch']}, {headline}\n")
        cells = [[_cell(form, row) for form in columns.values()] for row in report["rows"]]
        good = [line for line, row in zip(cells, report["rows"], strict=True) if not row["error"]]
        table(tuple(columns), good)
        failed = [row for row in report["rows"] if row["error"]]
        if failed:
            say("\nnot timed:")
        for row in failed:
            say(f"  {place.format_map(row)}: {row['error']}")
        if report.get("skipped"):
            say(f"no time left for: {'; '.join(report['skipped'])}")
        if verdicts:
            say("")
            _show_bars(verdicts)
        say(f"\nwrote {given.path}")
    if missed(verdicts):
        raise typer.Exit(UNSOUND)


def _cell(form: str, row: Mapping[str, Any]) -> str:
    """One cell; what a row has in bytes is there in GiB as well."""
    gib = {f"{name}_gib": row[name] / 2**30 for name in row if name.endswith("_bytes")}
    text = form.format_map({**row, **gib})
    return "-" if text.startswith("nan") else text


def _show_bars(verdicts: Sequence[BarVerdict]) -> None:
    cells = [
        [v.bar, v.limit, f"{v.figure:.3f}", "pass" if v.passed else "MISSED"]
        + [str(value) for value in v.of.values()]
        for v in verdicts
    ]
    table(("bar", "limit", "figure", "", *verdicts[0].of), cells, title="bars")
