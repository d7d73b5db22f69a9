"""Machine: the few figures from which op times follow, built in or read from a calibration file.

A calibration file is JSON: a schema version, the host it was measured on, and the fields below.

    >>> machine = default_machine("cpu")
    >>> machine.replace(lanes=1).save("mine.json")
    >>> Machine.load("mine.json").lanes
    1

Every figure is of one rank. Ranks must choose alike, so all of them load the same file, or take the
same built-in model (which is why that does not look at the machine it runs on).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from interlace.errors import CalibrationError
from interlace.ir import DType

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """What moves bytes between ranks: a message of n bytes takes `latency_s + n / bandwidth`."""

    latency_s: float
    bandwidth: float
    """Bytes a second into (or out of) one rank."""
    lane: float = 0.0
    """How much of a compute lane a transfer occupies: 1 for a core that copies, 0 for an engine."""
    steals: float = 0.0
    """The fraction of compute speed that a transfer costs the rank while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A model of the machine that runs each rank."""

    name: str
    device: str
    host: str = ""
    """Where it was measured (`fingerprint()`); empty for a built-in model."""
    gemm_flops: tuple[tuple[str, float], ...]
    """Floating point operations a second of a large matmul, by element type (`other`: the rest)."""
    gemm_tile: tuple[int, int] = (1, 1)
    """Rows and columns of the tile that one unit computes,"""
    units: int = 1
    """and how many units compute at once: a matmul takes whole waves of tiles."""
    memory_bandwidth: float
    """Bytes a second that a pointwise op reads and writes."""
    launch_s: float
    """What each compute op takes besides its work."""
    issue_s: float
    """How long the host takes to issue an op."""
    event_s: float = 0.0
    """How long a stream takes for an event, a signal or a slot."""
    lanes: int = 1
    """How many streams of a rank run at full speed at once; more share them."""
    backend: str
    """What runs collectives that name no backend."""
    links: tuple[tuple[str, Link], ...]
    """By transport: `gloo`, `nccl`, and `peer` for one-sided copies."""

    def replace(self, **changes: Any) -> Machine:
        """This machine with some figures changed."""
        return dataclasses.replace(self, **changes)

    def flops(self, dtype: DType) -> float:
        """The speed of a matmul of that element type."""
        speeds = dict(self.gemm_flops)
        return speeds.get(str(dtype), speeds["other"])

    def link(self, transport: str | None) -> Link:
        """The link of a transport; an unknown one is taken to be like the default backend."""
        links = dict(self.links)
        return links.get(transport or self.backend, links[self.backend])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a calibration file for this host, whole or not at all."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["gemm_flops"] = dict(self.gemm_flops)
        fields["links"] = {name: dataclasses.asdict(link) for name, link in self.links}
        fields["host"] = self.host or fingerprint()
        text = json.dumps({"schema": SCHEMA, "machine": fields}, indent=2) + "\n"
        target = Path(path)
        try:
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                draft = Path(folder) / target.name
                draft.write_text(text)
                draft.replace(target)
        except OSError as error:
            raise CalibrationError(f"cannot write calibration file {target}: {error}") from error

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, any_host: bool = False) -> Machine:
        """Reads a calibration file; `any_host` takes one that was measured elsewhere."""
        try:
            data: object = json.loads(Path(path).read_text())
        except OSError as error:
            raise CalibrationError(f"cannot read calibration file {path}: {error}") from error
        except ValueError as error:
            raise CalibrationError(f"calibration file {path} is not JSON: {error}") from error
        top = _table(data, f"calibration file {path}")
        if top.get("schema") != SCHEMA:
            raise CalibrationError(
                f"calibration file {path} has schema {top.get('schema')!r}; this version reads "
                f"schema {SCHEMA}: calibrate again"
            )
        machine = _machine(_table(top.get("machine"), f"'machine' in {path}"), str(path))
        here = fingerprint()
        if not any_host and machine.host not in ("", here):
            raise CalibrationError(
                f"calibration file {path} was made for {machine.host!r}, and this is {here!r}: "
                "calibrate here, or load it with any_host=True"
            )
        return machine


def fingerprint() -> str:
    """This host as calibration files know it: system, architecture, cores."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count() or 1} cores"


def _table(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise CalibrationError(f"{what} should be a JSON object, not {type(value).__name__}")
    return cast("dict[str, Any]", value)


def _machine(fields: dict[str, Any], path: str) -> Machine:
    known = {field.name: field for field in dataclasses.fields(Machine)}
    unknown = sorted(set(fields) - set(known))
    required = {name for name, field in known.items() if field.default is dataclasses.MISSING}
    missing = sorted(required - set(fields))
    if unknown or missing:
        raise CalibrationError(
            f"calibration file {path}: missing fields {missing}, unknown fields {unknown}"
        )
    given = dict(fields)
    speeds = _table(fields["gemm_flops"], f"'gemm_flops' in {path}")
    given["gemm_flops"] = tuple((str(k), _positive(v, k, path)) for k, v in speeds.items())
    links: list[tuple[str, Link]] = []
    for name, value in _table(fields["links"], f"'links' in {path}").items():
        try:
            link = Link(**_table(value, f"link {name!r} in {path}"))
        except TypeError as error:
            raise CalibrationError(f"link {name!r} in {path}: {error}") from error
        _positive(link.bandwidth, f"bandwidth of {name}", path)
        for field in ("latency_s", "lane", "steals"):
            _number(getattr(link, field), f"{field} of {name}", path)
        links.append((name, link))
    given["links"] = tuple(links)
    tile = fields.get("gemm_tile", (1, 1))
    if not isinstance(tile, list | tuple) or len(cast("list[Any]", tile)) != 2:
        raise CalibrationError(f"calibration file {path}: gemm_tile is two numbers, not {tile!r}")
    rows, columns = (int(_positive(size, "gemm_tile", path)) for size in cast("list[Any]", tile))
    given["gemm_tile"] = rows, columns
    for name in ("name", "device", "host", "backend"):
        if not isinstance(given.get(name, ""), str):
            raise CalibrationError(f"calibration file {path}: {name} is {given[name]!r}, no text")
    for name in ("memory_bandwidth", "units", "lanes"):
        if name in given:
            _positive(given[name], name, path)
    for name in ("launch_s", "issue_s", "event_s"):
        if name in given:
            _number(given[name], name, path)
    machine = Machine(**given)
    if "other" not in dict(machine.gemm_flops) or machine.backend not in dict(machine.links):
        raise CalibrationError(
            f"calibration file {path}: gemm_flops needs an entry 'other', and links one for the "
            f"backend {machine.backend!r}"
        )
    return machine


def _number(value: object, name: str, path: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise CalibrationError(f"calibration file {path}: {name} is {value!r}, not a number >= 0")
    return float(value)


def _positive(value: object, name: str, path: str) -> float:
    number = _number(value, name, path)
    if number == 0:
        raise CalibrationError(f"calibration file {path}: {name} is 0; give a number > 0")
    return number


def default_machine(device: str = "cpu") -> Machine:
    """The built-in model of a device: `cpu`, or `cuda` (an H200 with its NVLink peers)."""
    match device.split(":")[0]:
        case "cpu":
            return CPU
        case "cuda" | "h200":
            return H200
        case other:
            raise CalibrationError(
                f"no built-in model of device {other!r}: use cpu or cuda, or a calibration file"
            )


CPU = Machine(
    name="cpu",
    device="cpu",
    gemm_flops=(("f32", 60e9), ("f64", 30e9), ("bf16", 60e9), ("other", 10e9)),
    memory_bandwidth=8e9,
    launch_s=8e-6,
    issue_s=4e-6,
    event_s=10e-6,
    lanes=2,
    backend="gloo",
    links=(
        ("gloo", Link(latency_s=150e-6, bandwidth=1.0e9, lane=1.0)),
        ("peer", Link(latency_s=20e-6, bandwidth=4.0e9, lane=1.0)),
    ),
)
"""A core a rank for compute, and one more to copy with."""

H200 = Machine(
    name="h200",
    device="cuda",
    gemm_flops=(
        *(("bf16", 830e12), ("f16", 830e12), ("f32", 50e12), ("f64", 55e12)),
        *(("f8e4m3", 1500e12), ("f8e5m2", 1500e12), ("other", 50e12)),
    ),
    gemm_tile=(128, 256),
    units=132,
    memory_bandwidth=3.9e12,
    launch_s=3e-6,
    issue_s=6e-6,
    event_s=1e-6,
    lanes=1,
    backend="nccl",
    links=(
        ("nccl", Link(latency_s=40e-6, bandwidth=300e9, steals=0.1)),
        ("peer", Link(latency_s=11e-6, bandwidth=360e9)),
        ("gloo", Link(latency_s=300e-6, bandwidth=1.0e9)),
    ),
)
"""Fitted to four H200s with 18 NVLinks a pair: gathers of 16 to 1024 MB, copies of 2 to 16 MB."""
