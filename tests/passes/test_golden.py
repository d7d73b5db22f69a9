"""Golden programs: a pipeline, a Program, and what the pipeline makes of it, in one file each.

Such a file of `tests/golden/passes/` reads:

    # opt: schedule,insert_sync
    def before(...): ...
    # gives
    def before(...): ...

After a change on purpose, write them anew: `python -m tests.passes.test_golden`, and read the diff.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from interlace.ir import parse
from interlace.passes import run_pipeline
from interlace.verify import check

FOLDER = Path(__file__).resolve().parents[1] / "golden" / "passes"
FILES = sorted(FOLDER.glob("*.ilc"))
HEAD, GIVES = "# opt: ", "# gives\n"


def split(path: Path) -> tuple[str, str, str]:
    """The pipeline, the Program before and the text after."""
    head, _, rest = path.read_text().partition("\n")
    assert head.startswith(HEAD), f"{path.name} begins with {HEAD!r} and a pipeline"
    before, gives, after = rest.partition(GIVES)
    assert gives, f"{path.name} has no line {GIVES.strip()!r}"
    return head.removeprefix(HEAD), before, after


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden(path: Path) -> None:
    pipeline, before, after = split(path)
    result = run_pipeline(parse(before), pipeline)
    assert str(result).strip() == after.strip()
    assert parse(str(result)) == result


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_golden_result_is_sound(path: Path) -> None:
    pipeline, before, _ = split(path)
    if not pipeline.endswith(("insert_sync", "fuse")):
        pipeline += ",plan_memory,insert_sync"
    check(run_pipeline(parse(before), pipeline)).raise_if_unsound()


if __name__ == "__main__":
    for path in FILES:
        pipeline, before, _ = split(path)
        result = run_pipeline(parse(before), pipeline)
        path.write_text(f"{HEAD}{pipeline}\n{before}{GIVES}{str(result).strip()}\n")
