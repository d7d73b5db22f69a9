"""Texts changed at random: whatever comes of it, parsing and checking end with an answer.

python -m tests.verify.test_mutants 20000        # as many as one has patience for
"""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import pytest

from interlace.errors import InterlaceError
from interlace.ir import parse_set
from interlace.verify import check

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
WORD = re.compile(r"\w+|[^\w\s]")


def texts() -> list[list[str]]:
    """The lines of each schedule of the tests."""
    found: list[list[str]] = []
    for path in sorted(GOLDEN.rglob("*.ilc")):
        parts = re.split(r"(?m)^(?=def )", path.read_text())
        found += [part.splitlines() for part in parts if part.startswith("def ")]
    return found


def mutant(draw: random.Random, sources: list[list[str]]) -> str:
    """A schedule with a few lines or words left out, doubled, moved, or taken from another."""
    lines = list(draw.choice(sources))
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(lines))
        kind = draw.random()
        if kind < 0.15 and len(lines) > 2:
            del lines[at]
        elif kind < 0.3:
            lines.insert(at, draw.choice(lines))
        elif kind < 0.4:
            lines.insert(draw.randrange(1, len(lines) + 1), draw.choice(draw.choice(sources)[1:]))
        elif kind < 0.5:
            lines.insert(draw.randrange(len(lines)), lines.pop(at))
        elif words := [*WORD.finditer(lines[at])]:
            other = draw.choice(WORD.findall("\n".join(draw.choice(sources))))
            new = draw.choice(
                ("", "0", "-1", "99999999999", "tp.rank", "()", "[0:0]", other, other)
            )
            word = draw.choice(words)
            lines[at] = lines[at][: word.start()] + new + lines[at][word.end() :]
    return "\n".join(lines) + "\n"


def run(seed: int, count: int) -> dict[str, int]:
    """How many were refused, found unsound and found sound."""
    draw, sources = random.Random(seed), texts()
    met = {"refused": 0, "unsound": 0, "sound": 0}
    for _ in range(count):
        text = mutant(draw, sources)
        try:
            report = check(parse_set(text))
            told = str(report)
        except InterlaceError:
            met["refused"] += 1
        except Exception as error:
            raise AssertionError(f"{error!r} for\n{text}") from error
        else:
            assert report.sound == told.startswith("sound"), text
            met["sound" if report.sound else "unsound"] += 1
    return met


@pytest.mark.timeout(300)
def test_texts_changed_at_random(seed: int) -> None:
    met = run(seed, 150)
    assert min(met.values()) >= 3, met


if __name__ == "__main__":
    seed = random.SystemRandom().getrandbits(32)
    print("seed", seed)
    print(run(seed, int(sys.argv[1])))
