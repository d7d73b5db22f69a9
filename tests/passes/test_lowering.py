"""Which passes the options ask for."""

from __future__ import annotations

import pytest

from interlace.options import Options
from interlace.passes.pipeline import lowering


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("regions", ["auto", "eager", "inductor"])
def test_regions_are_formed_where_they_are_compiled(regions: str, overlap: bool) -> None:
    names = [item.name for item in lowering(Options(regions=regions, overlap=overlap))]
    assert ("form_regions" in names) == (regions == "inductor")
    assert names[0] == "find_sites"
    assert names[-1] == ("fuse" if overlap else "insert_sync")
    assert ("schedule" in names) == overlap
