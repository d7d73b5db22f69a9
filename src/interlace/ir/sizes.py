"""Symbolic sizes: integers that differ from run to run, such as `S // 2` or `2 * B * S`.

A `Size` is a polynomial of named sizes with integer values. Arithmetic is exact; what has one value
for all sizes is a plain `int` again:

    >>> S = named("S")
    >>> 4 * (S + 1) - 4 * S
    4

A comparison is answered by the class of sizes for which it is decided: see size_class.py. A `Size`
never becomes an `int` by itself, so no dependence goes unnoticed: what would need that (such as
`range(S)`) is a `SizeError`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import reduce
from itertools import combinations
from types import MappingProxyType
from typing import Any, NoReturn, Protocol, cast

from interlace.errors import SizeError

Monomial = tuple[str, ...]
"""The sizes that are multiplied, sorted; () is the constant term."""
MOST = 1 << 40
"""No named size is larger."""
UNBOUNDED = MOST**4
"""Stands for the largest value of what has none."""
MAX_TERMS = 256
"""Terms of a product, at most."""


class Size:
    """A polynomial of named sizes over a common divisor: `terms` by monomial, divided by `over`."""

    __slots__ = ("_hash", "over", "terms")

    def __init__(self, terms: Mapping[Monomial, int], over: int = 1) -> None:
        self.terms: Mapping[Monomial, int] = MappingProxyType(dict(sorted(terms.items())))
        self.over = over
        self._hash = hash((tuple(self.terms.items()), over))

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        return Size, (dict(self.terms), self.over)

    @property
    def names(self) -> frozenset[str]:
        """The sizes that it depends on."""
        return frozenset(name for monomial in self.terms for name in monomial)

    def at(self, values: Mapping[str, int]) -> int:
        """The integer that it is for these values."""
        total = sum(c * math.prod(values[n] for n in m) for m, c in self.terms.items())
        value, rest = divmod(total, self.over)
        if rest:
            raise SizeError(f"{self} is no whole number where {_listed(values)}")
        return value

    def renamed(self, names: Mapping[str, str]) -> Size:
        """The same of sizes of other names."""
        terms = {tuple(sorted(names.get(n, n) for n in m)): c for m, c in self.terms.items()}
        return Size(terms, self.over)

    def same(self, other: object) -> bool:
        """True if it is the same polynomial."""
        return (
            isinstance(other, Size)
            and self._hash == other._hash
            and self.over == other.over
            and self.terms == other.terms
        )

    # Arithmetic

    def __add__(self, other: Int) -> Int:
        more, over = _parts(other)
        terms = {m: c * over for m, c in self.terms.items()}
        for monomial, count in more.items():
            terms[monomial] = terms.get(monomial, 0) + count * self.over
        return _made(terms, self.over * over)

    __radd__ = __add__

    def __neg__(self) -> Size:
        return Size({m: -c for m, c in self.terms.items()}, self.over)

    def __abs__(self) -> Int:
        return -self if self < 0 else self

    def __sub__(self, other: Int) -> Int:
        return self + -other

    def __rsub__(self, other: Int) -> Int:
        return -self + other

    def __mul__(self, other: Int) -> Int:
        more, over = _parts(other)
        if len(self.terms) * len(more) > MAX_TERMS:
            raise SizeError(f"a product of more than {MAX_TERMS} terms of named sizes")
        terms: dict[Monomial, int] = {}
        for mine, count in self.terms.items():
            for theirs, times in more.items():
                monomial = tuple(sorted((*mine, *theirs)))
                terms[monomial] = terms.get(monomial, 0) + count * times
        return _made(terms, self.over * over)

    __rmul__ = __mul__

    def __floordiv__(self, other: Int) -> Int:
        return divmod(self, other)[0]

    def __rfloordiv__(self, other: Int) -> Int:
        return _divmod(other, self)[0]

    def __mod__(self, other: Int) -> Int:
        return divmod(self, other)[1]

    def __rmod__(self, other: Int) -> Int:
        return _divmod(other, self)[1]

    def __divmod__(self, other: Int) -> tuple[Int, Int]:
        return _divmod(self, other)

    def __rdivmod__(self, other: Int) -> tuple[Int, Int]:
        return _divmod(other, self)

    # Answers

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, int | Size):
            return False
        if self.same(other):
            return True
        known = DECIDER.get()
        return known is not None and known.is_zero(self - other)

    def __lt__(self, other: Int) -> bool:
        return _deciding(self).is_positive(other - self)

    def __gt__(self, other: Int) -> bool:
        return _deciding(self).is_positive(self - other)

    def __le__(self, other: Int) -> bool:
        return not self > other

    def __ge__(self, other: Int) -> bool:
        return not self < other

    def __bool__(self) -> bool:
        return not _deciding(self).is_zero(self)

    def __index__(self) -> NoReturn:
        raise SizeError(
            f"{self} has no one value: a Program for a class of sizes cannot count to it"
        )

    def __str__(self) -> str:
        text = ""
        for monomial, count in sorted(
            self.terms.items(), key=lambda term: (-len(term[0]), term[0])
        ):
            sign = ("-" if not text else " - ") if count < 0 else ("" if not text else " + ")
            factors = [str(abs(count))] if abs(count) != 1 or not monomial else []
            text += sign + " * ".join((*factors, *monomial))
        if self.over == 1:
            return text
        return f"{text} // {self.over}" if " " not in text else f"({text}) // {self.over}"

    __repr__ = __str__  # as a Program's text has it, also in tuples


Int = int | Size


def named(name: str) -> Size:
    """The size of that name."""
    return Size({(name,): 1})


def names_of(values: Iterable[object]) -> frozenset[str]:
    """The names in those of some values that are sizes."""
    return frozenset(name for value in values if isinstance(value, Size) for name in value.names)


def at(value: Int, values: Mapping[str, int]) -> int:
    """The integer that a size is for these values."""
    return value.at(values) if isinstance(value, Size) else value


def number(value: Int) -> int:
    """A size of what has no named sizes, such as a Program that runs."""
    return cast("int", value)


def numbers(values: tuple[Int, ...]) -> tuple[int, ...]:
    """Several of them."""
    return cast("tuple[int, ...]", values)


def divided(value: Int, by: int) -> Int:
    """The quotient of what is known to have no rest."""
    terms, over = _parts(value)
    return _made(terms, over * by)


def at_hand(value: Int) -> int:
    """The integer that a size is for the values at hand, not noted: for predictions of time."""
    return value.at(_deciding(value).values) if isinstance(value, Size) else value


def least(value: Int) -> int:
    """The smallest number that a size may be in the class, or one below it; nothing is noted."""
    return value if isinstance(value, int) else -greatest(-value)


def greatest(value: Int) -> int:
    """The largest number that a size may be in the class, or one above it; nothing is noted."""
    if isinstance(value, int):
        return value
    high = _deciding(value).bounds(value)[1]
    return int(high) // value.over if high < math.inf else UNBOUNDED


def never_above(one: Int, other: Int) -> bool:
    """True if `one <= other` holds for a whole class of sizes; nothing is noted."""
    if isinstance(one, int) and isinstance(other, int):
        return one <= other
    return greatest(one - other) <= 0


def fixed(value: Int) -> int:
    """The integer that a size is for the values at hand, which it then is for the whole class."""
    if isinstance(value, int):
        return value
    known = _deciding(value)
    found = value.at(known.values)
    if value == found:
        return found
    raise SizeError(f"{value} is not {found} for all of a class")


def counted(value: Int, by: Int, most: int) -> int:
    """`min(value // by, most)` as a number, which it then is for the whole class."""
    if isinstance(value, int) and isinstance(by, int):
        return min(value // by, most)
    if value >= most * by:
        return most
    found = at_hand(value) // at_hand(by)
    if found * by <= value < (found + 1) * by:
        return found
    raise SizeError(f"{value} // {by} is not {found} for all of a class")


def gcd(*values: Int) -> int:
    """A number that divides all of these; the greatest one, if they are numbers."""
    parts = [_parts(value) for value in values]
    over = math.lcm(*(below for _, below in parts))
    return math.gcd(*(count for terms, _ in parts for count in terms.values())) if over == 1 else 1


def divisors(values: Iterable[Int]) -> Iterator[Int]:
    """Yields common divisors: numbers, and products of named sizes; the smallest first."""
    terms = [term for value in values for term in _parts(value)[0].items() if term[1]]
    most = math.gcd(*(count for _, count in terms)) or 1
    names = [Counter(monomial) for monomial, _ in terms] or [Counter[str]()]
    common = names[0]
    for other in names[1:]:
        common &= other
    shared = sorted(common.elements())
    monomials = sorted(
        {m for n in range(len(shared) + 1) for m in combinations(shared, n)}, key=len
    )
    for monomial in monomials:
        for number in (n for n in range(1, most + 1) if most % n == 0):
            yield _made({monomial: number}, 1)


def _parts(value: Int) -> tuple[Mapping[Monomial, int], int]:
    return (value.terms, value.over) if isinstance(value, Size) else ({(): value}, 1)


def _made(terms: Mapping[Monomial, int], over: int) -> Int:
    kept = {m: c for m, c in terms.items() if c}
    common = reduce(math.gcd, kept.values(), over)
    if common != 1:
        kept, over = {m: c // common for m, c in kept.items()}, over // common
    if not kept:
        return 0
    if over == 1 and len(kept) == 1 and () in kept:
        return kept[()]
    return Size(kept, over)


def _divmod(value: Int, by: Int) -> tuple[Int, Int]:
    if not isinstance(by, Size):
        assert isinstance(value, Size)
        rest = _deciding_rest(value, by)
        return divided(value - rest, by), rest
    if _deciding(by).is_zero(by):
        raise ZeroDivisionError(f"{value} // {by}")
    quotient = _exact(value, by)
    if quotient is not None:
        return quotient, 0
    known = _deciding(by)
    floor = at(value, known.values) // by.at(known.values)
    if known.is_positive(by) and not known.is_positive(floor * by - value):
        if known.is_positive((floor + 1) * by - value):
            return floor, value - floor * by
    raise SizeError(f"{value} // {by} is not the same expression for a whole class of sizes")


def _deciding_rest(value: Size, by: int) -> int:
    known = DECIDER.get()
    if known is not None:
        return known.rest(value, by)
    if value.over == 1 and all(count % by == 0 for count in value.terms.values()):
        return 0
    return _deciding(value).rest(value, by)


def _exact(value: Int, by: Size) -> Int | None:
    """The quotient where one polynomial divides the other: leading terms, one after another."""
    left, found = value, _ZERO
    (lead, count), over = max(by.terms.items(), key=_degree), by.over
    while True:
        terms, below = _parts(left)
        if not any(terms.values()):
            return found
        top, times = max(terms.items(), key=_degree)
        rest = list(top)
        for name in lead:
            if name not in rest:
                return None
            rest.remove(name)
        factor, remainder = divmod(times * over, below * count)
        if remainder:
            return None
        term = _made({tuple(rest): factor}, 1)
        found, left = found + term, left - term * by


_ZERO: Int = 0


def _degree(term: tuple[Monomial, int]) -> tuple[int, Monomial]:
    return len(term[0]), term[0]


class Decider(Protocol):
    """Interface that answers questions about sizes: `size_class.Known` implements it."""

    values: dict[str, int]
    cache: dict[object, Any]

    def is_positive(self, value: Int) -> bool:
        """True if the value is greater than 0."""
        ...

    def is_zero(self, value: Int) -> bool:
        """True if the value is 0."""
        ...

    def rest(self, value: Size, by: int) -> int:
        """The rest when it is divided."""
        ...

    def bounds(self, value: Size) -> tuple[float, float]:
        """The least and the greatest number that its terms may add up to."""
        ...


DECIDER: ContextVar[Decider | None] = ContextVar("decider", default=None)
"""The current decider; None where no class of sizes is being decided."""


def _deciding(size: Size) -> Decider:
    known = DECIDER.get()
    if known is None:
        raise SizeError(f"{size} was compared where no values of {sorted(size.names)} are given")
    return known


def _listed(values: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())
