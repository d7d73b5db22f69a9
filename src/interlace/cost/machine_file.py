"""Calibration files: a Machine as JSON, written whole or not at all, and read with care.

save(machine, "mine.json")
machine = load("mine.json", gpus="4 x NVIDIA H200")

What is malformed, of another schema or measured elsewhere is a CalibrationError that says which.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

from interlace.cost.curve import Curve
from interlace.cost.location import fingerprint
from interlace.cost.machine import GemmTime, Link, Machine
from interlace.cost.site_times import SiteKey, SiteTime
from interlace.errors import CalibrationError

SCHEMA = 2
"""Raised with the fields, and with a model whose predictions the measured sites hold."""

_FILED = tuple(f.name for f in dataclasses.fields(Machine) if f.name not in ("captured", "kernels"))
_SITE = ("kind", "dtype", "m", "k", "n", "world", "graph")


def save(machine: Machine, path: str | os.PathLike[str]) -> None:
    """Writes a calibration file for this host, whole or not at all."""
    fields = _fields(machine.replace(host=machine.host or fingerprint()))
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
        raise CalibrationError(f"cannot read calibration file {path}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"calibration file {path} is not JSON: {error}") from error
    top = _table(data, f"calibration file {path}")
    if top.get("schema") != SCHEMA:
        raise CalibrationError(
            f"calibration file {path} has schema {top.get('schema')!r}; this version reads "
            f"schema {SCHEMA}: calibrate again"
        )
    machine = _machine(_table(top.get("machine"), f"'machine' in {path}"), str(path))
    here = fingerprint(gpus or "")
    trusted = any_host or (machine.device != "cpu" and gpus is None)
    if not trusted and machine.host not in ("", here):
        raise CalibrationError(
            f"calibration file {path} was made for {machine.host!r}, and this is {here!r}: "
            "calibrate here, or load it with any_host=True"
        )
    return machine


def _fields(machine: Machine) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(machine, name) for name in _FILED}
    fields["gemm_flops"] = dict(machine.gemm_flops)
    fields["issue"] = dict(machine.issue)
    fields["gemms"] = [dataclasses.asdict(time) for time in machine.gemms]
    fields["links"] = {}
    for name, link in machine.links:
        curves = {kind: curve.points for kind, curve in link.curves}
        figures = {f.name: getattr(link, f.name) for f in dataclasses.fields(link)}
        fields["links"][name] = {**figures, "curves": curves}
    fields["sites"] = [
        {
            **dataclasses.asdict(time.site),
            "strategy": time.strategy,
            "seconds": time.seconds,
            "predicted_s": time.predicted_s,
        }
        for time in machine.sites
    ]
    return fields


def _machine(fields: dict[str, Any], path: str) -> Machine:
    known = {f.name: f for f in dataclasses.fields(Machine) if f.name in _FILED}
    unknown = sorted(set(fields) - set(known))
    required = {
        name
        for name, field in known.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    missing = sorted(required - set(fields))
    if unknown or missing:
        raise CalibrationError(
            f"calibration file {path}: missing fields {missing}, unknown fields {unknown}"
        )
    given = dict(fields)
    given["gemm_flops"] = _figures(fields["gemm_flops"], f"'gemm_flops' in {path}", path, True)
    given["issue"] = _figures(fields.get("issue", {}), f"'issue' in {path}", path, False)
    links = _table(fields["links"], f"'links' in {path}")
    given["links"] = tuple((name, _link(name, value, path)) for name, value in links.items())
    rows, columns = _numbers(fields.get("gemm_tile", (1, 1)), 2, "gemm_tile", path)
    given["gemm_tile"] = int(rows), int(columns)
    tiles = [_numbers(t, 3, "a gemm_tile", path) for t in _list(fields, "gemm_tiles", path)]
    given["gemm_tiles"] = tuple((int(rows), int(columns), rate) for rows, columns, rate in tiles)
    given["gemms"] = tuple(_gemm(row, path) for row in _list(fields, "gemms", path))
    given["sites"] = tuple(_site(row, path) for row in _list(fields, "sites", path))
    for name in ("name", "device", "host", "backend"):
        if not isinstance(given.get(name, ""), str):
            raise CalibrationError(f"calibration file {path}: {name} is {given[name]!r}, no text")
    for name in ("memory_bandwidth", "units", "lanes", "fused"):
        if name in given:
            _positive(given[name], name, path)
    for name in ("launch_s", "issue_s", "event_s", "doubt_s"):
        if name in given:
            _number(given[name], name, path)
    machine = Machine(**given)
    if "other" not in dict(machine.gemm_flops) or machine.backend not in dict(machine.links):
        raise CalibrationError(
            f"calibration file {path}: gemm_flops needs an entry 'other', and links one for the "
            f"backend {machine.backend!r}"
        )
    return machine


def _link(name: str, value: object, path: str) -> Link:
    figures = dict(_table(value, f"link {name!r} in {path}"))
    curves = _table(figures.pop("curves", {}), f"'curves' of link {name!r} in {path}")
    try:
        link = Link(**figures, curves=tuple((k, _curve(k, v, path)) for k, v in curves.items()))
    except TypeError as error:
        raise CalibrationError(f"link {name!r} in {path}: {error}") from error
    _positive(link.bandwidth, f"bandwidth of {name}", path)
    for field in ("latency_s", "lane", "steals"):
        _number(getattr(link, field), f"{field} of {name}", path)
    return link


def _curve(kind: str, value: object, path: str) -> Curve:
    what = f"curve {kind}"
    if not isinstance(value, list) or not value:
        raise CalibrationError(f"calibration file {path}: {what} is {value!r}, no list of points")
    found = [_numbers(point, 2, f"a point of {what}", path) for point in cast("list[Any]", value)]
    points = tuple((nbytes, seconds) for nbytes, seconds in found)
    for (low, quick), (high, slow) in pairwise(points):
        if low >= high or quick > slow:
            raise CalibrationError(
                f"calibration file {path}: the points of {what} go from few bytes to many, and "
                "the time never falls"
            )
    return Curve(points)


def _gemm(value: object, path: str) -> GemmTime:
    row = _table(value, f"a matmul in {path}")
    for name in ("m", "k", "n", "seconds"):
        _positive(row.get(name), f"{name} of a matmul", path)
    try:
        return GemmTime(**row)
    except TypeError as error:
        raise CalibrationError(f"a matmul in {path}: {error}") from error


def _site(value: object, path: str) -> SiteTime:
    row = dict(_table(value, f"a site in {path}"))
    for name in ("m", "k", "n", "world", "seconds"):
        _positive(row.get(name), f"{name} of a site", path)
    _number(row.get("predicted_s", 0.0), "predicted_s of a site", path)
    try:
        key = SiteKey(**{name: row.pop(name) for name in _SITE if name in row})
        return SiteTime(site=key, **row)
    except TypeError as error:
        raise CalibrationError(f"a site in {path}: {error}") from error


def _table(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CalibrationError(f"{what} should be a JSON object, not {type(value).__name__}")
    return cast("dict[str, Any]", value)


def _list(fields: dict[str, Any], name: str, path: str) -> list[Any]:
    value = fields.get(name, [])
    if not isinstance(value, list):
        raise CalibrationError(f"calibration file {path}: {name} is {value!r}, no list")
    return cast("list[Any]", value)


def _figures(value: object, what: str, path: str, positive: bool) -> tuple[tuple[str, float], ...]:
    check = _positive if positive else _number
    return tuple((str(k), check(v, k, path)) for k, v in _table(value, what).items())


def _numbers(value: object, count: int, name: str, path: str) -> list[float]:
    if not isinstance(value, list | tuple) or len(cast("list[Any]", value)) != count:
        raise CalibrationError(
            f"calibration file {path}: {name} is {'two' if count == 2 else count} numbers, not "
            f"{value!r}"
        )
    return [_positive(number, name, path) for number in cast("list[Any]", value)]


def _number(value: object, name: str, path: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise CalibrationError(f"calibration file {path}: {name} is {value!r}, not a number >= 0")
    return float(value)


def _positive(value: object, name: str, path: str) -> float:
    number = _number(value, name, path)
    if number == 0:
        raise CalibrationError(f"calibration file {path}: {name} is 0; give a number > 0")
    return number
