"""Options refuse what they cannot take, and say what they can."""

from __future__ import annotations

import math
from typing import Any

import pytest

from interlace.errors import OptionError
from interlace.options import Options


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strategy", "fast"),
        ("protocol", "push"),
        ("resharding", "never"),
        ("regions", "jit"),
        ("transport", "mpi"),
        ("regather", "maybe"),
        ("time_out_s", 0),
        ("time_out_s", -1.0),
        ("time_out_s", math.inf),
        ("time_out_s", math.nan),
        ("cache_size", 0),
        ("chunks", -1),
    ],
    ids=lambda value: str(value),
)
def test_a_wrong_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name):
        Options(**{name: value})


def test_unknown_options_are_named_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match=r"'stratgy': known are .*strategy"):
        Options.from_dict({"stratgy": "peer"})
