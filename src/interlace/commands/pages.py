"""The files that commands write of runs: a page, a trace, a timeline as data.

check_places(html, out)                         # before long work
written = write_files(runs, html=html, facts=[("machine", machine.name)])
tell_written(written, json)
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.commands.files import make_folder
from interlace.commands.output import say
from interlace.errors import InputError

if TYPE_CHECKING:
    from interlace.trace import Run


def check_places(*paths: Path | None) -> None:
    """Raises InterlaceError for a file that could not be written at the end of long work."""
    for path in paths:
        if path is not None and path.is_dir():
            raise InputError(f"{path} is a directory: name a file in it")
        if path is not None:
            make_folder(path.resolve().parent)


def write_files(
    runs: Sequence[Run],
    *,
    html: Path | None = None,
    perfetto: Path | None = None,
    out: Path | None = None,
    facts: Sequence[tuple[str, str]] = (),
) -> list[Path]:
    """Writes what is wanted of these runs and gives the paths; `out` has the first timeline."""
    from interlace.trace import write_page, write_perfetto
    from interlace.trace.tracks import write_whole

    written: list[Path] = []
    if out is not None:
        written.append(write_whole(out, runs[0].timelines[0].to_json() + "\n"))
    if html is not None:
        written.append(write_page(runs, html, facts=facts))
    if perfetto is not None:
        written.append(write_perfetto(runs, perfetto))
    return written


def tell_written(paths: Sequence[Path], json: bool) -> None:
    """Names the files, unless JSON is all that is printed."""
    for path in () if json else paths:
        say(f"wrote {path}")
