"""Writes the generated files of docs/, or checks that they are up to date.

$ python docs/generate            # writes
$ python docs/generate --check    # ends with code 1 if a file is out of date

ops.py              reference/ops.md, from the dataclasses of `interlace.ir`
commands.py         reference/cli.md and reference/options.md, from the commands and `Options`
bugs.py             explanation/public-bugs.md, from tests/golden/bugs/
measurements.py     explanation/measurements.md, from benchmarks/results/
layers.py           layers.svg, the picture of the home page: measured bars
pictures.py         explanation/*.svg: what the simulator predicts for each strategy
curves.py           tutorial/pretrain-*.svg: losses of the pretraining example, measured
markdown_table.py   a table
"""

from __future__ import annotations

import sys
from pathlib import Path

from bugs import bugs_page
from commands import cli_page, options_page
from curves import curves
from layers import layer_bars
from measurements import measurements_page
from ops import ops_page
from pictures import pictures

DOCS = Path(__file__).resolve().parents[1]


def main() -> int:
    """Writes the files, or checks them."""
    texts = {
        "reference/cli.md": cli_page(),
        "reference/options.md": options_page(),
        "reference/ops.md": ops_page(),
        "explanation/public-bugs.md": bugs_page(),
        "explanation/measurements.md": measurements_page(),
        **layer_bars(),
        **{f"explanation/{name}": text for name, text in pictures().items()},
        **{f"tutorial/{name}": text for name, text in curves().items()},
    }
    stale = [n for n, t in texts.items() if not (DOCS / n).exists() or (DOCS / n).read_text() != t]
    if "--check" in sys.argv[1:]:
        for name in stale:
            print(f"docs/{name} is out of date: run `make docs`", file=sys.stderr)
        return len(stale) > 0
    for name in stale:
        (DOCS / name).write_text(texts[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
