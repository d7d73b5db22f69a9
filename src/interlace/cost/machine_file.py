"""Calibration files: a Machine as JSON, written whole or not at all, and read with care.

>>> save(machine, default_path("4 x NVIDIA H200"))
>>> default_path("4 x NVIDIA H200").name
'4-x-nvidia-h200-linux-x86_64.json'
>>> machine = load("mine.json", gpus="4 x NVIDIA H200")
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import re
import stat
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

from interlace.cost.machine import Curve, Machine
from interlace.errors import CalibrationError

SCHEMA = 6
"""Raised with the fields."""

_TABLES = ("gemm_flops", "issue", "links", "between", "curves")
"""Fields of pairs, which are objects in the file."""
_POSITIVE = frozenset(
    ("memory_bandwidth", "bandwidth", "units", "lanes", "seconds", "m", "k", "n", "world")
) | {"gemm_flops", "gemm_tile", "gemm_tiles", "attention", "sustained"}
_UNFILED = ("captured", "kernels", "packed_kernels")


def save(machine: Machine, path: str | os.PathLike[str]) -> None:
    """Writes a calibration file for this host, whole or not at all."""
    fields = _filed(machine.replace(host=machine.host or fingerprint()))
    text = json.dumps({"schema": SCHEMA, "machine": fields}, indent=1) + "\n"
    target = Path(path)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            draft = Path(folder) / target.name
            draft.write_text(text)
            draft.replace(target)
    except OSError as error:
        raise CalibrationError(f"cannot write calibration file {target}: {error}") from error


def load(
    path: str | os.PathLike[str], *, any_host: bool = False, gpus: str | None = None
) -> Machine:
    """Reads a calibration file; see `Machine.load`."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe may never have a writer
            raise CalibrationError(f"calibration file {path} is no file: name one that was saved")
        data: object = json.loads(Path(path).read_text())
    except OSError as error:
        why = f"cannot read calibration file {path} ({error.strerror or error})"
        raise CalibrationError(f"{why}: `interlace calibrate --out {path}` makes one") from error
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"calibration file {path} is not JSON: {error}") from error
    try:
        top = _typed(dict, data, "its text")
        if top.get("schema") != SCHEMA:
            raise CalibrationError(
                f"schema {top.get('schema')!r}; this version reads schema {SCHEMA}: calibrate again"
            )
        machine: Machine = _record(Machine, top.get("machine"), "machine")
        if "other" not in dict(machine.gemm_flops) or machine.backend not in dict(machine.links):
            raise CalibrationError(
                "gemm_flops needs an entry 'other', and links one for the backend "
                f"{machine.backend!r}"
            )
        if machine.between and machine.backend not in dict(machine.between):
            raise CalibrationError(f"between needs a link for the backend {machine.backend!r}")
    except CalibrationError as error:
        raise CalibrationError(f"calibration file {path}: {error}") from None
    here = fingerprint(gpus or "")
    trusted = any_host or (machine.device != "cpu" and gpus is None)
    if not trusted and machine.host not in ("", here):
        raise CalibrationError(
            f"calibration file {path} was made for {machine.host!r}, and this is {here!r}: "
            "calibrate here, or load it with any_host=True"
        )
    return machine


def fingerprint(gpus: str = "") -> str:
    """This host as calibration files know it: its GPUs, or its cores, and its system.

    The caller names the GPUs, such as `4 x NVIDIA H200`: nothing here asks a driver.
    """
    system = f"{platform.system()} {platform.machine()}"
    return f"{gpus}, {system}" if gpus else f"{system}, {os.cpu_count() or 1} cores"


def default_path(gpus: str = "") -> Path:
    """Where this host's calibration file is written, and looked for."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    name = re.sub(r"[^a-z0-9_]+", "-", fingerprint(gpus).lower())
    return folder / "interlace" / f"{name}.json"


def _filed(value: Any) -> Any:
    """A value as the file has it."""
    if isinstance(value, Curve):
        return value.points
    if not dataclasses.is_dataclass(value):
        return [*map(_filed, value)] if isinstance(value, tuple) else value  # pyright: ignore
    names = [field.name for field in dataclasses.fields(value) if field.name not in _UNFILED]
    found = {name: getattr(value, name) for name in names}
    return {
        name: {key: _filed(each) for key, each in item} if name in _TABLES else _filed(item)
        for name, item in found.items()
    }


def _record(kind: Any, value: object, place: str) -> Any:
    """The dataclass that an object of the file stands for."""
    given = _typed(dict, value, place)
    hints = get_type_hints(kind)
    required = {f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
    unknown, missing = (
        sorted({*given} - {*hints} | {*given} & {*_UNFILED}),
        sorted(required - {*given}),
    )
    if unknown or missing:
        raise CalibrationError(f"{place}: missing fields {missing}, unknown fields {unknown}")
    return kind(**{n: _read(hints[n], item, f"{place}.{n}", n) for n, item in given.items()})


def _read(hint: Any, value: Any, place: str, field: str) -> Any:
    """The value of a field of this type."""
    inner = get_args(hint)
    if hint is Curve:
        return _curve(value, place)
    if dataclasses.is_dataclass(hint):
        return _record(hint, value, place)
    if not inner:
        return _number(value, place, field) if hint in (int, float) else _typed(hint, value, place)
    if field in _TABLES:
        kind = get_args(inner[0])[1]
        items = _typed(dict, value, place).items()
        return tuple((key, _read(kind, item, f"{place}.{key}", field)) for key, item in items)
    listed = _typed(list, value, place)
    kinds = (inner[0],) * len(listed) if inner[-1] is ... else inner
    if len(listed) != len(kinds):
        raise CalibrationError(f"{place} is {len(kinds)} numbers, not {value!r}")
    pairs = zip(kinds, listed, strict=True)
    return tuple(
        [_read(kind, item, f"{place}[{i}]", field) for i, (kind, item) in enumerate(pairs)]
    )


def _curve(value: object, place: str) -> Curve:
    points = _read(tuple[tuple[float, float], ...], value, place, "seconds")
    rising = all(low < high and quick <= slow for (low, quick), (high, slow) in pairwise(points))
    if not points or not rising:
        raise CalibrationError(
            f"{place} is {value!r}: its points go from few bytes to many, and the time never falls"
        )
    return Curve(points)


def _typed(kind: Any, value: object, place: str) -> Any:
    if isinstance(value, kind):
        return value
    words = {dict: "a JSON object", list: "a list", str: "text", bool: "true or false"}
    raise CalibrationError(f"{place} is {value!r}; it should be {words[kind]}")


def _number(value: Any, place: str, field: str) -> float:
    positive = field in _POSITIVE
    if isinstance(value, int | float) and not isinstance(value, bool):
        if 0 < value < math.inf or (value == 0 and not positive):
            return value
    raise CalibrationError(f"{place} is {value!r}; give a number {'>' if positive else '>='} 0")
