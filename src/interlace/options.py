"""The one set of options, frozen and keyword-only.

    interlace.compile(module, x, mesh=mesh, options=Options(strategy="peer", timeout_s=30))
    torch.compile(model, backend="interlace", options={"strategy": "ring"})

Every field can be given to `torch.compile(options=...)`, `interlace.compile` and the commands.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, fields
from numbers import Integral, Real
from typing import Any, Literal, get_args

from interlace.errors import OptionError, choose_from
from interlace.strategies import REPLACED, StrategyName, names

LONGEST_S = 30 * 86_400.0
"""The longest time-out, in seconds: every wait is bounded."""
Backend = Literal["gloo", "nccl", "ucc", "peer"]
BACKENDS: tuple[str, ...] = get_args(Backend)
"""Transports: what moves the bytes of collectives."""
Transport = Backend | Literal["auto"]
Resharding = Literal["auto", "before", "after"]
Regions = Literal["auto", "eager", "inductor"]

_CHOICES: dict[str, tuple[object, ...]] = {
    "resharding": get_args(Resharding),
    "regions": get_args(Regions),
    "transport": ("auto", *BACKENDS),
}

_SWITCH = (bool,), bool, "True or False"
_TYPES: dict[str, tuple[tuple[type, ...], Callable[[Any], object], str]] = {
    **dict.fromkeys(("overlap", "in_order", "graph", "static_outputs", "trace"), _SWITCH),
    "cache_size": ((Integral,), int, "a whole number"),
    "memory": ((Integral,), int, "'auto' or a whole number of bytes"),
    "timeout_s": ((Real,), float, "a number of seconds"),
    "calibration": ((str, os.PathLike), os.fspath, "the path of a file"),
    "schedules": ((str, os.PathLike), os.fspath, "the path of a folder"),
    "cache": ((str, os.PathLike), os.fspath, "'auto', 'off' or the path of a folder"),
}
"""Types that the other options may have, and are kept as; a `bool` is no number."""


GONE = {
    "protocol": "strategy='peer', which takes get or put for each site by the cost model",
    "chunks": "the pass decompose{chunks=...} in `interlace opt -p` and `run_pipeline`; strategies "
    "choose how finely they cut",
    "regather": "memory='auto', which gathers again where matmuls hide that, or memory=BYTES, the "
    "most that forward saves for backward",
}
"""Options that went, and what stands for each; errors name it for one release."""


def _refuse_unknown(values: Mapping[Any, object]) -> None:
    known = sorted(field.name for field in fields(Options))
    for name in values:
        if name in GONE:
            raise OptionError(f"option {name} went. fix: use {GONE[name]}")
        if name not in {*known, "time_out_s"}:
            raise OptionError(f"unknown option {name!r}: {choose_from(str(name), known)}")
    asked = values.get("strategy")
    if isinstance(asked, str) and asked in REPLACED:
        raise OptionError(f"strategy {asked!r} went. fix: use strategy={REPLACED[asked]!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Options for overlapping and running a program. The defaults suit most users.

    Raises OptionError where an option has a value that it cannot take.

    Attributes:
        overlap: False keeps every site serial: one stream, no decomposition.
        in_order: run the overlapped Program one op after another, as the reference run of an
            overlapped one. That order is verified too, since it can deadlock where the streams
            do not.
        strategy: how sites are overlapped: `serial`, `pipeline`, `ring`,
            `peer`, `fused`, `exchange` or `copies`; `auto` asks the cost model,
            with `serial` always a candidate.
        resharding: where a gather or scatter stands that can stand on either side of a computation:
            `before` or `after` it, or where it moves fewer bytes (`auto`).
        regions: what runs the operators that are no site: `eager`, `inductor`, or by device
            (`auto`).
        memory: most bytes that a compiled graph saves on each rank for backward, or `auto`.
            Gathered rows are kept, or their shard alone is and backward gathers them again: with
            `auto` where matmuls hide that and the shard is no larger than what it replaces; within
            a budget as seldom as it allows, first where that takes the least predicted time. A
            budget that cannot be met is refused with the number that can. Sizes that change count
            as they were when the graph was traced. If the caller modifies the saved
            tensor before backward, backward raises an error.
        transport: what moves bytes, where a strategy leaves a choice: `gloo`, `nccl`, `ucc` or
            `peer`; `auto` takes the backend of the process group.
        graph: capture the Program in CUDA graphs and replay them.
        static_outputs: with `graph`, hand out the graph's own output buffers instead of copies,
            also where the caller keeps them until the next run.
        calibration: path of a calibration file; None takes what `interlace calibrate` wrote for
            this host, or else the built-in model of the device.
        schedules: path of a folder of schedules, as `interlace.export` writes them: a compiled
            graph runs the text that is there for it in place of a generated one. A text that does
            not fit is refused.
        cache: where schedules and their proofs are kept for later processes: `auto` is beside
            torch's own cache, unless torch is told to keep none; a path is a folder; `off` keeps
            nothing. What cannot be used is made anew.
        timeout_s: every wait for another rank is bounded by this many seconds; time while the
            whole job is suspended does not count. None takes the time-out of the process group
            itself. A rank whose process has ended is not waited for, and after a minute a
            warning names who is late.
        cache_size: Executors kept per compiled function before the least recently used is dropped.
        trace: record the time of every op (`Executor.timeline()`).
    """

    overlap: bool = True
    in_order: bool = False
    strategy: StrategyName = "auto"
    resharding: Resharding = "auto"
    regions: Regions = "auto"
    memory: int | Literal["auto"] = "auto"
    transport: Transport = "auto"
    graph: bool = False
    static_outputs: bool = False
    calibration: str | os.PathLike[str] | None = None
    schedules: str | os.PathLike[str] | None = None
    cache: str | os.PathLike[str] = "auto"
    timeout_s: float | None = None
    cache_size: int = 64
    trace: bool = False
    time_out_s: InitVar[float | None] = None
    """The former name of `timeout_s`, read for one release."""

    def __new__(cls, **values: object) -> Options:
        """Refuses what `__init__` does not know, with the option that may be meant."""
        _refuse_unknown(values)
        return object.__new__(cls)

    def __post_init__(self, time_out_s: float | None) -> None:
        if time_out_s is not None:
            if self.timeout_s is not None:
                raise OptionError("options timeout_s and time_out_s are one: give timeout_s")
            object.__setattr__(self, "timeout_s", time_out_s)
        for name, (types, plain, what) in _TYPES.items():
            value = getattr(self, name)
            if value is None and name in ("calibration", "schedules", "timeout_s"):
                continue
            if name == "memory" and isinstance(value, str) and value == "auto":
                continue
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise OptionError(f"option {name}={value!r}: give {what}")
            object.__setattr__(self, name, plain(value))
        for name, choices in {"strategy": names(), **_CHOICES}.items():
            value = getattr(self, name)
            if not any(isinstance(value, type(c)) and value == c for c in choices):
                names_of = choose_from(str(value), map(str, choices))
                raise OptionError(f"option {name}={value!r}: {names_of}")
        if self.timeout_s is not None and not 0 < self.timeout_s <= LONGEST_S:
            raise OptionError(
                f"option timeout_s={self.timeout_s!r}: give a number of seconds > 0, "
                f"at most {LONGEST_S:g}"
            )
        if self.memory != "auto" and self.memory < 0:
            raise OptionError(f"option memory={self.memory}: give 'auto' or bytes >= 0")
        if not self.cache:
            raise OptionError("option cache='': give 'auto', 'off' or the path of a folder")
        if self.cache_size < 1:
            raise OptionError("option cache_size must be >= 1")
        if self.static_outputs and not self.graph:
            raise OptionError("option static_outputs=True says what a graph gives: set graph=True")

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Options:
        """Options from a mapping such as `torch.compile(options=...)`; unknown names raise."""
        _refuse_unknown(values)  # first: a key may be no word
        return cls(**values)
