"""Texts of schedules with damage: tokens, lines, characters and numbers that are changed."""

from __future__ import annotations

import random
import re
from functools import lru_cache

from tests.verify.schedules import GOLDEN

TOKEN = re.compile(r"\w+|\s+|[^\w\s]")
LONGEST = 6000
ODD = [
    *["0", "-1", "1", "2", "3", "7", "200", "9223372036854775807", "9223372036854775808"],
    *[
        "1" + "0" * 30,
        "1" * 5000,
        "1e9",
        "1.5",
        "0x10",
        "1_000",
        "1j",
        "nan",
        "inf",
        "None",
        "True",
    ],
    *[
        '""',
        "'",
        '"',
        "#",
        "\\",
        "\n",
        "\t",
        "\r",
        "    ",
        "(",
        ")",
        "[",
        "]",
        "(" * 300,
        "-" * 300,
    ],
    *["*", "**", "@", "//", "%", ":=", "...", "lambda: 0", 'f"{x}"', 'b"a"', "x" * 300],
    *["\x00", "\u202e", "\u00e9", "\ud800", "S", "tp", "tp.rank", "tp.others", "self", "__class__"],
    *["Team[0]", "Team[[0, 0]]", "Team[[0], [0]]", "Team[200]", "Size[8]", "S // 0", "S // 3"],
    *["f32[0]", "f32[()]", "f64", "c128", "u8", "bool", 'storage="s"', "offset=8", "rng=True"],
    *["mutates=True", "host_sync()", "record(e)", "wait(e)", "free(x)", "return"],
    *["barrier(team=tp)", "ranks(0)", "rank(0)", "assume(S >= 1)", "table(tp, 1, 1)", "def"],
]
"""Words at the edges of the grammar, and beyond them. There are few ranks: a check of 1,000
that all signal each other takes some seconds."""
NUMBERS = ["0", "1", "2", "3", "5", "100", "200", "99999999", "4611686018427387904"]


@lru_cache
def texts() -> tuple[str, ...]:
    """The golden schedules that are not too long."""
    found = (path.read_text() for path in sorted(GOLDEN.rglob("*.ilc")))
    return tuple(text for text in found if len(text) < LONGEST)


@lru_cache
def words() -> tuple[str, ...]:
    """All tokens of the golden schedules."""
    return tuple(sorted({word for text in texts() for word in TOKEN.findall(text)}))


def mutated(rng: random.Random, originals: tuple[str, ...]) -> str:
    """One of these texts with one to five changes."""
    text = rng.choice(originals)
    for _ in range(rng.choice([1, 1, 1, 2, 3, 5])):
        change = rng.choice([_token, _token, _token, _line, _line, _character, _number])
        text = change(rng, text, originals) if text else text
    return text


def _token(rng: random.Random, text: str, _: tuple[str, ...]) -> str:
    tokens = TOKEN.findall(text)
    place, new = rng.randrange(len(tokens)), rng.choice(rng.choice([ODD, words()]))
    match rng.randrange(4):
        case 0:
            del tokens[place]
        case 1:
            tokens[place] = new
        case 2:
            tokens.insert(place, new)
        case _:
            other = rng.randrange(len(tokens))
            tokens[place], tokens[other] = tokens[other], tokens[place]
    return "".join(tokens)


def _line(rng: random.Random, text: str, originals: tuple[str, ...]) -> str:
    lines = text.split("\n")
    place, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    match rng.randrange(4):
        case 0:
            del lines[place]
        case 1:
            lines.insert(place, lines[other])
        case 2:
            lines[place], lines[other] = lines[other], lines[place]
        case _:
            lines[place] = rng.choice(rng.choice(originals).split("\n"))
    return "\n".join(lines)


def _character(rng: random.Random, text: str, _: tuple[str, ...]) -> str:
    place = rng.randrange(len(text))
    new = chr(rng.choice([rng.randrange(32, 127), rng.randrange(0x3000)]))
    return text[:place] + new + text[place + rng.randrange(2) :]


def _number(rng: random.Random, text: str, _: tuple[str, ...]) -> str:
    found = list(re.finditer(r"\d+", text))
    if not found:
        return text
    number = rng.choice(found)
    return text[: number.start()] + rng.choice(NUMBERS) + text[number.end() :]
