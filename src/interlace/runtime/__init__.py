"""Executors: bind a Program once, run it many times.

executor.py   the Executor: prepare, run, reset, close; no device in it
engine.py     the seam: what a device must offer, and what its engine binds from
inputs.py     checks of what a caller gives
values.py     the per-run table that calls read their arguments from; copies that keep strides
flight.py     what every stream was doing, for errors and for timelines
machine.py    the machine that `auto` asks: the calibration of this host, or the built-in model

prepare/      what ranks do together before the first run: agree and plan
calling/      from the name of an operator or a region to one bound function
host/         the CPU;  cuda/: GPUs
"""

from interlace.runtime.engine import Engine, EngineContext, engine_for
from interlace.runtime.executor import Executor

__all__ = ["Engine", "EngineContext", "Executor", "engine_for"]
