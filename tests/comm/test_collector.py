"""The garbage collector is off while anyone wants it off, and as it was afterwards."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from interlace.comm.cuda.driver import uncollected


@pytest.fixture(autouse=True)
def _on_again() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.parametrize("was", [True, False], ids=["on", "off"])
def test_it_is_off_while_any_is_in(was: bool, seed: int) -> None:
    """They come and go in any order, as threads do."""
    draw = random.Random(seed)
    for _ in range(50):
        (gc.enable if was else gc.disable)()
        inside: list[AbstractContextManager[None]] = []
        for _ in range(draw.randrange(1, 12)):
            if inside and draw.random() < 0.4:
                inside.pop(draw.randrange(len(inside))).__exit__(None, None, None)
            else:
                inside.append(uncollected())
                inside[-1].__enter__()
            assert gc.isenabled() == (was and not inside)
        while inside:
            assert not gc.isenabled()
            inside.pop(draw.randrange(len(inside))).__exit__(None, None, None)
        assert gc.isenabled() == was
