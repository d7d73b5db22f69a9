"""Every error a user can see, in one place.

Each says what happened, where, and how to mend it. `InterlaceError` catches them all:

    try:
        executor.run(inputs)
    except interlace.InterlaceError as error:
        print(error)

Invariants of our own code are `assert`s and never reach a user on purpose.
"""

from __future__ import annotations


class InterlaceError(Exception):
    """Base of every error that Interlace raises on purpose."""


class ParseError(InterlaceError):
    """The text of a Program is malformed; the message shows the line and its neighbours."""


class ProgramError(InterlaceError):
    """A Program breaks a structural rule (unknown name, wrong shape, view out of bounds, ...)."""


class SizeError(InterlaceError):
    """A question about symbolic sizes has no one answer for a class of them."""


class SoundnessError(InterlaceError):
    """The verifier found a race, a deadlock or a lifetime fault; the message is the counterexample.

    `findings` holds the `interlace.verify.Finding`s behind the message.
    """

    def __init__(self, message: str, findings: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.findings = findings


class PassError(InterlaceError):
    """A pass name or a pass option does not exist, or a pass was given a Program it cannot take."""


class UnsupportedError(InterlaceError):
    """An operator, a sharding or a combination of options that Interlace cannot lower."""


class CalibrationError(InterlaceError):
    """A calibration file is missing, malformed or made for another machine."""


class BackendError(InterlaceError):
    """A communication backend or a build tool that was asked for is not there."""


class TeamError(InterlaceError):
    """A team does not fit the world: sizes that do not divide, unknown ranks, a missing group."""


class AgreementError(InterlaceError):
    """Ranks disagree on the program they prepare or run, or one of them did not come."""


class CommTimeoutError(InterlaceError):
    """A wait passed its time-out; the message names the rank, the op, the module and the line."""


class PeerError(InterlaceError):
    """Another rank failed or died; the message names it and repeats what it said."""


class ScheduleError(InterlaceError):
    """A schedule from a file does not fit the graph that it is to run; the message lists how."""


class SharedMemoryError(InterlaceError):
    """There is too little shared memory for the symmetric buffers, or the system refuses it."""


class ExecutorError(InterlaceError):
    """An Executor was used wrongly, or raised while it issued a Program and is now poisoned."""


class OptionError(InterlaceError):
    """An option has a value that it cannot take."""


class CacheWarning(UserWarning):
    """A cache drops what comes again, and so compiles it again and again; told once for each."""


class InputError(InterlaceError, ValueError):
    """A tensor or an argument of a layer or a loss does not fit the others, or cannot be so."""


class TargetError(InterlaceError, IndexError):
    """A target is no class: neither of the vocabulary nor `ignore_index`."""


class OptimizerError(InterlaceError, ValueError):
    """An optimizer was given an argument, a parameter or a state that it cannot take."""


class GroupError(InterlaceError, ValueError):
    """Rows and group sizes of a grouped operation do not fit each other, or its weights."""


class GradientError(InterlaceError, RuntimeError):
    """A gradient came when its sum was already being reduced, or from where it is not awaited."""


class ReplicaError(InterlaceError, RuntimeError):
    """Ranks hold different weights where they should hold the same."""
