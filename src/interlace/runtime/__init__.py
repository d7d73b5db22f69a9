"""Executors: bind a Program once, run it many times.

executor.py   the Executor: prepare, run, reset, close
engine.py     the seam: what a device's engine gets and gives
values.py     the per-run table that calls read their arguments from
inputs.py     checks of what a caller gives;  results.py: what it gets back
flight.py     what every stream was doing, for errors;  spans.py: when, as a Timeline
machine.py    the machine that `auto` asks: the calibration of this host, or the built-in model
releases.py   whose memory a tensor is, and when it may go;  copies.py: copies that keep strides

prepare/      what ranks do together before the first run: agree, plan, share
calling/      from the name of an operator or a region to one bound function
host/         the CPU;  cuda/: GPUs
"""

from interlace.runtime.cuda.waits.watchdog import synchronize
from interlace.runtime.engine import Context, Engine, executor_for
from interlace.runtime.executor import Executor

__all__ = ["Context", "Engine", "Executor", "executor_for", "synchronize"]
