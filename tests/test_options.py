"""Options refuse what they cannot take, and say what they can."""

from __future__ import annotations

import dataclasses
import math
import pydoc
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from interlace.errors import OptionError
from interlace.options import Options


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strategy", "fast"),
        ("resharding", "never"),
        ("regions", "jit"),
        ("transport", "mpi"),
        ("memory", "most"),
        ("memory", -1),
        ("memory", 1.5),
        ("timeout_s", 0),
        ("timeout_s", -1.0),
        ("timeout_s", math.inf),
        ("timeout_s", math.nan),
        ("cache", ""),
        ("cache", False),
        ("cache_size", 0),
        ("cache_size", 2.5),
        ("cache_size", "4"),
        ("cache_size", True),
        ("cache_size", None),
        ("timeout_s", "60"),
        ("overlap", "yes"),
        ("overlap", None),
        ("in_order", "no"),
        ("graph", 1),
        ("calibration", 5),
        ("memory", True),
        ("memory", [1]),
        ("strategy", ["peer"]),
    ],
    ids=lambda value: str(value),
)
def test_a_wrong_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name):
        Options(**{name: value})


def test_a_tensor_is_no_choice() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(OptionError, match="memory"):
        Options(memory=torch.ones(2))


def test_unknown_options_are_named_with_the_known_ones() -> None:
    known = r"'stratgy': did you mean 'strategy'\? choose from cache, cache_size, .*, transport$"
    for make in (lambda given: Options(**given), Options.from_dict):
        with pytest.raises(OptionError, match=known):
            make({"stratgy": "peer"})
    with pytest.raises(OptionError, match="unknown option 7: choose from"):
        Options.from_dict({7: "peer"})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [("strategy", "pear", "peer"), ("resharding", "befor", "before"), ("transport", "glo", "gloo")],
)
def test_a_wrong_value_names_the_nearest(name: str, value: Any, near: str) -> None:
    with pytest.raises(OptionError, match=f"{name}='{value}': did you mean '{near}'.*choose from"):
        Options(**{name: value})


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("protocol", "put", "strategy='peer'"),
        ("chunks", 4, "decompose{chunks=...}"),
        ("regather", True, "memory='auto'"),
        ("strategy", "shift", "strategy='ring'"),
        ("strategy", "hierarchical", "strategy='ring'"),
        ("strategy", "broadcast", "strategy='pipeline'"),
    ],
)
def test_an_option_that_went_names_its_replacement(name: str, value: Any, fix: str) -> None:
    for make in (lambda given: Options(**given), Options.from_dict):
        with pytest.raises(OptionError, match=f"went. fix: use .*{re.escape(fix)}"):
            make({name: value})


def test_numbers_and_paths_of_other_types_are_taken() -> None:
    given = Options(
        cache_size=np.int64(4),  # type: ignore[arg-type]
        timeout_s=np.float32(3),  # type: ignore[arg-type]
        calibration=Path("machine.json"),
        strategy=np.str_("peer"),  # type: ignore[arg-type]
    )
    assert given == Options(cache_size=4, timeout_s=3, calibration="machine.json", strategy="peer")
    kept = given.cache_size, given.timeout_s, given.calibration
    assert [type(value) for value in kept] == [int, float, str]


def test_the_former_name_of_the_time_out_is_read() -> None:
    for former in (Options(time_out_s=7), Options.from_dict({"time_out_s": 7})):
        assert former == Options(timeout_s=7.0)
    with pytest.raises(OptionError, match="are one: give timeout_s"):
        Options(timeout_s=7, time_out_s=8)
    with pytest.raises(OptionError, match=r"option timeout_s=-1\.0: give a number of seconds > 0"):
        Options(time_out_s=-1)


def test_help_tells_of_every_option() -> None:
    told = pydoc.plain(pydoc.render_doc(Options))
    for field in dataclasses.fields(Options):
        assert re.search(rf"^ \|      {field.name}: \w", told, re.MULTILINE), field.name
