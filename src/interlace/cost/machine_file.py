"""Calibration files: a Machine as JSON, written whole or not at all, and read with care.

    save(machine, default_path("4 x NVIDIA H200"))
    machine = load("mine.json", gpus="4 x NVIDIA H200")

One for each kind of host lies in the user's cache folder (`$XDG_CACHE_HOME/interlace`, or
`~/.cache/interlace`). What is malformed, of another schema or measured elsewhere is a
CalibrationError that says which.

    >>> fingerprint("4 x NVIDIA H200")
    '4 x NVIDIA H200, Linux x86_64'
    >>> default_path("4 x NVIDIA H200").name
    '4-x-nvidia-h200-linux-x86_64.json'
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
from typing import Any, cast

from interlace.cost.machine import Curve, GemmTime, Link, Machine
from interlace.cost.site_times import SiteKey, SiteTime
from interlace.errors import CalibrationError

SCHEMA = 2
"""Raised with the fields, and with a model whose predictions the measured sites hold."""

_FILED = tuple(f.name for f in dataclasses.fields(Machine) if f.name not in ("captured", "kernels"))
_SITE = tuple(f.name for f in dataclasses.fields(SiteKey))


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
    reader = _MachineReader(str(path))
    top = reader.table(data, f"calibration file {path}")
    if top.get("schema") != SCHEMA:
        raise CalibrationError(
            f"calibration file {path} has schema {top.get('schema')!r}; this version reads "
            f"schema {SCHEMA}: calibrate again"
        )
    machine = reader.machine(reader.table(top.get("machine"), f"'machine' in {path}"))
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

    Whoever has looked for GPUs says so, as in `4 x NVIDIA H200`: nothing here asks a driver.
    """
    system = f"{platform.system()} {platform.machine()}"
    return f"{gpus}, {system}" if gpus else f"{system}, {os.cpu_count() or 1} cores"


def default_path(gpus: str = "") -> Path:
    """Where this host's calibration file is written, and looked for."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    name = re.sub(r"[^a-z0-9_]+", "-", fingerprint(gpus).lower())
    return folder / "interlace" / f"{name}.json"


def _fields(machine: Machine) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(machine, name) for name in _FILED}
    fields["gemm_flops"] = dict(machine.gemm_flops)
    fields["issue"] = dict(machine.issue)
    fields["gemms"] = [dataclasses.asdict(time) for time in machine.gemms]
    fields["links"] = {}
    for name, link in machine.links:
        curves = {kind: curve.points for kind, curve in link.curves}
        fields["links"][name] = {**dataclasses.asdict(link), "curves": curves}
    sites = [dataclasses.asdict(time) for time in machine.sites]
    fields["sites"] = [site.pop("site") | site for site in sites]
    return fields


class _MachineReader:
    """Turns the JSON of one file into a Machine, or says what is wrong with it."""

    def __init__(self, path: str) -> None:
        self.path = path

    def error(self, text: str) -> CalibrationError:
        return CalibrationError(f"calibration file {self.path}: {text}")

    def machine(self, fields: dict[str, Any]) -> Machine:
        known = {f.name: f for f in dataclasses.fields(Machine) if f.name in _FILED}
        required = {n for n, f in known.items() if f.default is dataclasses.MISSING}
        unknown, missing = sorted(set(fields) - set(known)), sorted(required - set(fields))
        if unknown or missing:
            raise self.error(f"missing fields {missing}, unknown fields {unknown}")
        for name in ("name", "device", "host", "backend"):
            if not isinstance(fields.get(name, ""), str):
                raise self.error(f"{name} is {fields[name]!r}, no text")
        for name in {"memory_bandwidth", "units", "lanes", "fused"} & set(fields):
            self.positive(fields[name], name)
        for name in {"launch_s", "issue_s", "event_s", "doubt_s"} & set(fields):
            self.number(fields[name], name)
        links = self.table(fields["links"], f"'links' in {self.path}")
        speeds = self.table(fields["gemm_flops"], f"'gemm_flops' in {self.path}")
        issue = self.table(fields.get("issue", {}), f"'issue' in {self.path}")
        rows, columns = self.numbers(fields.get("gemm_tile", (1, 1)), 2, "gemm_tile")
        tiles = [self.numbers(t, 3, "a gemm_tile") for t in self.items(fields, "gemm_tiles")]
        read: dict[str, Any] = {
            "gemm_flops": tuple((kind, self.positive(v, kind)) for kind, v in speeds.items()),
            "issue": tuple((what, self.number(v, what)) for what, v in issue.items()),
            "links": tuple((name, self.link(name, value)) for name, value in links.items()),
            "gemm_tile": (int(rows), int(columns)),
            "gemm_tiles": tuple((int(rows), int(columns), rate) for rows, columns, rate in tiles),
            "gemms": tuple(map(self.gemm, self.items(fields, "gemms"))),
            "sites": tuple(map(self.site, self.items(fields, "sites"))),
        }
        machine = Machine(**{**fields, **read})
        if "other" not in speeds or machine.backend not in links:
            raise self.error(
                "gemm_flops needs an entry 'other', and links one for the backend "
                f"{machine.backend!r}"
            )
        return machine

    def link(self, name: str, value: object) -> Link:
        figures = dict(self.table(value, f"link {name!r} in {self.path}"))
        what = f"'curves' of link {name!r} in {self.path}"
        curves = self.table(figures.pop("curves", {}), what)
        try:
            link = Link(**figures, curves=tuple((k, self.curve(k, v)) for k, v in curves.items()))
        except TypeError as error:
            raise CalibrationError(f"link {name!r} in {self.path}: {error}") from error
        self.positive(link.bandwidth, f"bandwidth of {name}")
        for field in ("latency_s", "lane", "steals"):
            self.number(getattr(link, field), f"{field} of {name}")
        return link

    def curve(self, kind: str, value: object) -> Curve:
        what = f"curve {kind}"
        if not isinstance(value, list) or not value:
            raise self.error(f"{what} is {value!r}, no list of points")
        points = [
            self.numbers(point, 2, f"a point of {what}") for point in cast("list[Any]", value)
        ]
        for (low, quick), (high, slow) in pairwise(points):
            if low >= high or quick > slow:
                raise self.error(
                    f"the points of {what} go from few bytes to many, and the time never falls"
                )
        return Curve(tuple((nbytes, seconds) for nbytes, seconds in points))

    def gemm(self, value: object) -> GemmTime:
        row = self.table(value, f"a matmul in {self.path}")
        for name in ("m", "k", "n", "seconds"):
            self.positive(row.get(name), f"{name} of a matmul")
        try:
            return GemmTime(**row)
        except TypeError as error:
            raise CalibrationError(f"a matmul in {self.path}: {error}") from error

    def site(self, value: object) -> SiteTime:
        row = dict(self.table(value, f"a site in {self.path}"))
        for name in ("m", "k", "n", "world", "seconds"):
            self.positive(row.get(name), f"{name} of a site")
        self.number(row.get("predicted_s", 0.0), "predicted_s of a site")
        try:
            key = SiteKey(**{name: row.pop(name) for name in _SITE if name in row})
            return SiteTime(site=key, **row)
        except TypeError as error:
            raise CalibrationError(f"a site in {self.path}: {error}") from error

    def table(self, value: object, what: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise CalibrationError(f"{what} should be a JSON object, not {type(value).__name__}")
        return cast("dict[str, Any]", value)

    def items(self, fields: dict[str, Any], name: str) -> list[Any]:
        value = fields.get(name, [])
        if not isinstance(value, list):
            raise self.error(f"{name} is {value!r}, no list")
        return cast("list[Any]", value)

    def numbers(self, value: object, count: int, name: str) -> list[float]:
        if not isinstance(value, list | tuple) or len(cast("list[Any]", value)) != count:
            words = "two" if count == 2 else count
            raise self.error(f"{name} is {words} numbers, not {value!r}")
        return [self.positive(number, name) for number in cast("list[Any]", value)]

    def number(self, value: object, name: str) -> float:
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
            return float(value)
        raise self.error(f"{name} is {value!r}, not a number >= 0")

    def positive(self, value: object, name: str) -> float:
        number = self.number(value, name)
        if number == 0:
            raise self.error(f"{name} is 0; give a number > 0")
        return number
