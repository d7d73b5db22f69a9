"""Reads the CSV that `_dump_csv` of torch's pipeline schedules writes: a row is a rank.

    >>> parse_csv("0F0,0SEND_F0\\n1RECV_F0,1F0\\n").cells[1]
    (Action(kind='RECV_F', ...), Action(kind='F', ...))

Accepted as torch accepts it: rows of different lengths, blank cells (a step in which a rank waits),
spaces around a token, either end of line.
"""

from __future__ import annotations

import csv
import io
import os
import sys
from pathlib import Path

from interlace.errors import ParseError
from interlace.ir.text.load import unreadable
from interlace_check.pipelining.schedule import PipelineOrder

MAX_CHARACTERS = 1 << 24
MAX_CELLS = 1 << 16
"""Actions of all ranks together, with blank cells: 8 ranks with 8,192 each."""
MAX_RANKS = 1 << 10


def read_csv(path: str | os.PathLike[str]) -> PipelineOrder:
    """The schedule of a file, or of standard input for `-`. Raises ParseError."""
    try:
        if str(path) == "-":
            return parse_csv(sys.stdin.read(MAX_CHARACTERS + 1), "<stdin>")
        with Path(path).open(encoding="utf-8", newline="") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error
    return parse_csv(text, Path(path).name)


def parse_csv(text: str, file: str = "schedule.csv") -> PipelineOrder:
    """The schedule of a CSV text. Raises ParseError, which names row, column, token and fix."""
    if len(text) > MAX_CHARACTERS:
        raise ParseError(
            f"{file} holds more than {MAX_CHARACTERS:,} characters: check a schedule "
            "of fewer microbatches"
        )
    order = PipelineOrder.of(_rows(text, file), file)
    if not any(map(any, order.cells)):
        raise ParseError(f"{file} holds no action; fix: dump the schedule with `_dump_csv`")
    return order


def _rows(text: str, file: str) -> list[list[str]]:
    rows: list[list[str]] = []
    cells = 0
    reader = csv.reader(io.StringIO(text, newline=""))
    try:
        for row in reader:
            cells += len(row)
            if cells > MAX_CELLS or len(rows) >= MAX_RANKS:
                raise ParseError(
                    f"{file} holds more than {MAX_RANKS:,} ranks or {MAX_CELLS:,} actions: check a "
                    "schedule of fewer microbatches"
                )
            rows.append(row)
    except csv.Error as error:
        raise ParseError(
            f"{file}, line {reader.line_num}: {error}; fix: write plain CSV"
        ) from error
    return rows
