"""All-to-alls of uneven parts: one side holds the parts of all ranks, the other a rank's own."""

from __future__ import annotations

import pytest

from interlace.ir import parse, parse_set
from interlace.verify import check

TABLES = """    rows = table(tp, 2, 3, 4)
    own = table(tp, 6, 9, 12)
"""
CUT = "x: f32[9, 2], y: out[f32[own[tp.rank], 2]]"
MERGED = "x: f32[own[tp.rank], 2], y: out[f32[9, 2]]"
CALL = "    main: all_to_all(x, y, team=tp, splits=rows)"


@pytest.mark.parametrize("params", [CUT, MERGED], ids=["cut", "merged"])
def test_either_side_may_hold_all_parts(params: str) -> None:
    """Also on rank 1, whose own part is the mean."""
    report = check(parse(f"def f(tp: Team[3], {params}):\n{TABLES}{CALL}"))
    assert report.sound, report


def test_it_is_the_same_side_on_all_ranks() -> None:
    texts = [
        f"def f(tp: Team[[0, 1, 2]], {params}):\n    ranks({rank})\n{TABLES}{CALL}"
        for rank, params in enumerate((MERGED, MERGED, CUT))
    ]
    (finding,) = check(parse_set("\n\n\n".join(texts))).errors
    assert "members disagree on the cut side" in finding.message
    assert {op.rank for op in finding.ops} == {0, 2}
