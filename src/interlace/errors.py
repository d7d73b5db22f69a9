"""Every error a user can see, in one place.

Each says what happened, where, and how to fix it. Invariants of Interlace's own code are `assert`s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class InterlaceError(Exception):
    """Base of every error that Interlace raises on purpose."""


class ParseError(InterlaceError):
    """The text of a Program, or a file of another tool, is malformed; the message shows where."""


class ProgramError(InterlaceError):
    """A Program breaks a structural rule (unknown name, wrong shape, view out of bounds, ...)."""


class RecordingError(InterlaceError):
    """A recorded run cannot be read: a file of its folder is missing, malformed or too large."""


class SizeError(InterlaceError):
    """A question about named sizes has different answers within a class of sizes."""


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
    """A requested communication backend or build tool is missing."""


class TeamError(InterlaceError):
    """A team does not fit the world: sizes that do not divide, unknown ranks, a missing group."""


class AgreementError(InterlaceError):
    """Ranks disagree on the program that they prepare or run, or one of them is missing."""


class CommTimeoutError(InterlaceError):
    """A wait timed out; the message names the rank, the op, the module and the source line."""


class PeerError(InterlaceError):
    """Another rank failed or died; the message names it and repeats what it said."""


class ScheduleError(InterlaceError):
    """A schedule from a file does not fit its graph; the message lists the differences."""


class SharedMemoryError(InterlaceError):
    """Shared memory is too small for the symmetric buffers, or the system refuses it."""


class ExecutorError(InterlaceError):
    """An Executor was used wrongly, or failed while issuing a Program and needs `reset()`."""


class OptionError(InterlaceError):
    """An option has an invalid value."""


class CacheWarning(UserWarning):
    """A cache is too small, so calls may be compiled repeatedly; warned once per cache."""


class InputError(InterlaceError, ValueError):
    """A tensor or an argument of a layer or a loss is invalid, or does not fit the others."""


class TargetError(InterlaceError, IndexError):
    """A target is not a class: neither in the vocabulary nor `ignore_index`."""


class OptimizerError(InterlaceError, ValueError):
    """An optimizer cannot take an argument, a parameter or a state."""


class GroupError(InterlaceError, ValueError):
    """Rows, group sizes and weights of a grouped operation do not fit each other."""


class GradientError(InterlaceError, RuntimeError):
    """A gradient arrived after its sum was reduced, or from an unexpected place."""


class ReplicaError(InterlaceError, RuntimeError):
    """Ranks hold different weights where they should hold the same."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint at what a wrong name may stand for, such as `did you mean 'peer'?`; empty where no
    known name is near."""
    from difflib import get_close_matches

    # Comparing takes its time: names of other lengths, and long ones, are not near.
    close = [each for each in sorted(set(known)) if abs(len(each) - len(name)) <= 8][:5_000]
    near = get_close_matches(name, close, n=2, cutoff=0.6) if len(name) <= 60 else []
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def choose_from(name: str, known: Iterable[str]) -> str:
    """The end of an error on a wrong name: the nearest names, and all that are known."""
    listed = list(dict.fromkeys(known))
    return f"{nearest(name, listed)} choose from {', '.join(listed)}".lstrip()


def refuse_removed(
    name: str, options: Mapping[str, object], replacements: Mapping[str, str]
) -> None:
    """Raises OptionError for an option that `name` had in a former release, TypeError for one that
    never was.
    """
    for option in options:
        if option not in replacements:
            raise TypeError(f"{name}() got an unexpected keyword argument {option!r}")
        raise OptionError(f"{option} is no option of {name} any more. fix: {replacements[option]}")
