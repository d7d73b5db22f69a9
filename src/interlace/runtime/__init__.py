"""Executors: bind a Program once, run it many times.

executor.py    the Executor: prepare, run, reset, close
engine.py      the seam: what a device's engine gets and gives
cpu.py         the CPU engine, a thread a stream
plan.py        what a concrete Program says before anything is allocated
values.py      the per-run table that calls read their arguments from
operators.py   what the names of a schedule stand for in torch, and what they may not
calls.py       Calls bound to torch operators;  regions.py: groups of them
host_ops.py    events, copies, collectives, messages and signals, bound for threads
agreement.py   ranks agree on a Program before they run it
flight.py      what every stream was doing, for errors
machine.py     the machine that `auto` asks: the calibration of this host, or the built-in model
inputs.py, ranks.py: checks of what a caller gives;  results.py: what it gets back
shares.py      what an Executor shares with the other ranks, and gives back at its end
copies.py      copies that keep the strides of what they are copies of
quick.py       runs on the CPU of one stream, with little of Python;  flat.py: in a team
"""

from interlace.runtime.cuda.watchdog import synchronize
from interlace.runtime.engine import Context, Engine, executor_for
from interlace.runtime.executor import Executor

__all__ = ["Context", "Engine", "Executor", "executor_for", "synchronize"]
