"""One action of a pipeline schedule, as torch.distributed.pipelining writes it in a cell.

    >>> parse_action("2RECV_B3")
    Action(kind='RECV_B', stage=2, microbatch=3, parts=())
    >>> str(parse_action("(0F1;1B0)OVERLAP_F_B"))
    '(0F1;1B0)OVERLAP_F_B'

The tokens are those of torch 2.11 to 2.15. torch's own loader matches the beginning of a cell and
skips the rest; here the whole cell must be an action.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from interlace.errors import ParseError

COMPUTE = ("F", "B", "I", "W")
"""Forward, full backward, backward for the input, backward for the weights."""
BACKWARD = ("B", "I")
"""Kinds of action that compute the gradient of a stage's input."""
SENDS = ("SEND_F", "SEND_B")
RECEIVES = ("RECV_F", "RECV_B")
WAITS = ("WAIT_SEND_F", "WAIT_SEND_B")
WITH_MICROBATCH = (*COMPUTE, *SENDS, *RECEIVES, *WAITS)
WITHOUT_MICROBATCH = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD")
OVERLAP = "OVERLAP_F_B"

MAX_DIGITS = 9
"""Digits of a stage or of a microbatch."""
MAX_PARTS = 8
"""Parts of an `OVERLAP_F_B`; torch makes two."""
_TOKEN = re.compile(r"([0-9]+)([A-Z_]+)([0-9]*)", re.ASCII)
_CELL = re.compile(r"\(([^()]*)\)([A-Z_]+)", re.ASCII)
_HOW = "write STAGE KIND MICROBATCH without spaces, such as 2F0, 3SEND_F1 or 1UNSHARD"


@dataclass(frozen=True, slots=True)
class Action:
    """Action of one rank at one place of a schedule.

    `stage` is -1 for `OVERLAP_F_B`, whose `parts` are its actions; `microbatch` is None for kinds
    that concern a whole stage.
    """

    kind: str
    stage: int
    microbatch: int | None = None
    parts: tuple[Action, ...] = ()

    def leaves(self) -> Iterator[Action]:
        """The parts of an `OVERLAP_F_B`, in order, else the action itself."""
        yield from self.parts or (self,)

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(map(str, self.parts))}){self.kind}"
        return f"{self.stage}{self.kind}{'' if self.microbatch is None else self.microbatch}"


def parse_action(text: str) -> Action | None:
    """The action of a cell, or None for a blank cell. Raises ParseError, which says the fix."""
    text = text.strip()
    if not text:
        return None
    if not text.startswith("("):
        return _single(text)
    match = _CELL.fullmatch(text)
    if match is None:
        raise ParseError("fix: write the parts as (0F1;1B0)OVERLAP_F_B, with nothing after it")
    inside, kind = match.groups()
    if kind != OVERLAP:
        raise ParseError(f"only {OVERLAP} has parts, not {kind[:40]!r}; fix: write {OVERLAP}")
    words = inside.split(";")
    if len(words) > MAX_PARTS:
        raise ParseError(f"{len(words)} parts; fix: at most {MAX_PARTS} in one {OVERLAP}")
    parts = tuple(_single(word.strip()) for word in words)
    for part in parts:
        if part.kind not in COMPUTE:
            raise ParseError(f"{part} is no computation; fix: give {OVERLAP} parts such as 0F1;1B0")
    return Action(OVERLAP, -1, None, parts)


def _single(text: str) -> Action:
    match = _TOKEN.match(text)
    if match is None:
        raise ParseError(f"not an action; fix: {_HOW}")
    stage, kind, microbatch = match.groups()
    if kind not in WITH_MICROBATCH and kind not in WITHOUT_MICROBATCH:
        known = ", ".join((*WITH_MICROBATCH, *WITHOUT_MICROBATCH))
        raise ParseError(f"unknown kind {kind[:40]!r}; fix: use one of {known}")
    if kind in WITHOUT_MICROBATCH and microbatch:
        raise ParseError(f"{kind} takes no microbatch; fix: write {stage[:MAX_DIGITS]}{kind}")
    if match.end() < len(text):
        rest = text[match.end() :][:40]
        raise ParseError(f"{rest!r} stands behind the action {match[0][:40]}; fix: remove it")
    if kind in WITH_MICROBATCH and not microbatch:
        raise ParseError(f"{kind} needs a microbatch; fix: write {stage[:MAX_DIGITS]}{kind}0")
    if max(len(stage), len(microbatch)) > MAX_DIGITS:
        raise ParseError(f"a number of more than {MAX_DIGITS} digits; fix: count stages from 0")
    return Action(kind, int(stage), int(microbatch) if microbatch else None)
