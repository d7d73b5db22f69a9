"""Symbolic sizes: integers that differ from run to run, such as `S // 2` or `2 * B * S`.

A `Size` is a polynomial of named sizes with integer values. Arithmetic is exact; what has one value
for all sizes is a plain `int` again:

    >>> S = named("S")
    >>> 4 * (S + 1) - 4 * S
    4

A comparison is answered by the class of sizes for which it is decided. A `Size` never becomes an
`int` by itself, so no dependence goes unnoticed: what would need that (such as `range(S)`) is a
`SizeError`.

    >>> with deciding(SizeClass((NamedSize("S", value=128),))) as known:
    ...     half = S // 2 if S > 7 else S
    >>> half, str(known.size_class())
    (S // 2, 'S >= 8, S % 2 == 0')

Note [Decided for a class]
    Code that branches on sizes runs on symbolic ones unchanged: within `deciding`, a comparison is
    answered for the given values, and what was answered is noted unless it follows from what was
    noted before. All that the code did then holds for every size with the same answers: that is
    the `SizeClass`. What cannot be answered for a class is a `SizeError`: a graph that communicates
    is then bound for that very size, and one that does not runs as it was traced.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache, reduce, wraps
from itertools import combinations
from types import MappingProxyType
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

from interlace.errors import SizeError

P = ParamSpec("P")
T = TypeVar("T")
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

    def partly_at(self, values: Mapping[str, int]) -> Int:
        """The same with the sizes that have a value here as numbers."""
        terms: Counter[Monomial] = Counter()
        for monomial, count in self.terms.items():
            left = tuple([name for name in monomial if name not in values])
            terms[left] += count * math.prod(values[n] for n in monomial if n in values)
        return _made(terms, self.over)

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


DECIDER: ContextVar[Known | None] = ContextVar("decider", default=None)
"""The current decider; None where no class of sizes is being decided."""


def _deciding(size: Size) -> Known:
    known = DECIDER.get()
    if known is None:
        raise SizeError(f"{size} was compared where no values of {sorted(size.names)} are given")
    return known


def _listed(values: Mapping[str, int]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())


# Classes of sizes


@dataclass(frozen=True, slots=True)
class Fact:
    """Condition of a class beyond ranges: `value > 0`, `<= 0`, `== 0` or `!= 0`."""

    value: Size
    relation: str

    def holds(self, values: Mapping[str, int]) -> bool:
        """True if the condition holds for these values."""
        return RELATIONS[self.relation](self.value.at(values), 0)

    def __str__(self) -> str:
        return f"{self.value} {self.relation} 0"


RELATIONS: Mapping[str, Callable[[int, int], bool]] = MappingProxyType(
    {">": operator.gt, "<=": operator.le, "==": operator.eq, "!=": operator.ne}
)


@dataclass(frozen=True, slots=True)
class NamedSize:
    """A named size: the value that decisions were made for, and which other values it may have."""

    name: str
    value: int
    low: int = 0
    high: int = MOST
    modulus: int = 1
    rest: int = 0
    """Remainder of a value that is divided by `modulus`."""

    @property
    def narrowed(self) -> bool:
        """True if some values are excluded."""
        return self.low > 0 or self.high < MOST or self.modulus > 1

    def holds(self, value: int) -> bool:
        """True if the size may have this value."""
        return self.low <= value <= self.high and value % self.modulus == self.rest


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Which sizes a Program is for: those of each name, and facts about several of them."""

    sizes: tuple[NamedSize, ...] = ()
    facts: tuple[Fact, ...] = ()

    @property
    def values(self) -> dict[str, int]:
        """The sizes that decisions were made for."""
        return {size.name: size.value for size in self.sizes}

    def holds(self, values: Mapping[str, int]) -> bool:
        """True if sizes of these values are in the class."""
        return all(size.holds(values[size.name]) for size in self.sizes) and all(
            fact.holds(values) for fact in self.facts
        )

    def renamed(self, names: Mapping[str, str]) -> SizeClass:
        """The sizes with other names; those that get none are left out."""
        kept = [replace(size, name=names[size.name]) for size in self.sizes if size.name in names]
        facts = [replace(fact, value=fact.value.renamed(names)) for fact in self.facts]
        return SizeClass(tuple(kept), tuple(facts))

    def bucket(self, names: Collection[str], alike: bool = False) -> SizeClass:
        """The part of the class where these sizes are below the next power of two, for which memory
        is laid out; `alike`: and not below the last, so that predictions are of as much work."""
        known = Known(self)
        for size in self.sizes:
            if size.name in names:
                bits = size.value.bit_length()
                low = (1 << bits) >> 1 if alike else 0
                known.narrow(replace(size, low=low, high=(1 << bits) - 1))
        return known.size_class()

    @property
    def pinned(self) -> dict[str, int]:
        """The sizes that have one value in the whole class."""
        return {size.name: size.value for size in self.sizes if size.low == size.high}

    def pin(self, names: Collection[str]) -> SizeClass:
        """The part of the class where these sizes have the values that decisions were made for."""
        known = Known(self)
        for size in self.sizes:
            if size.name in names:
                known.narrow(replace(size, low=size.value, high=size.value))
        return known.size_class()

    def alone(self) -> SizeClass:
        """The class of the values that decisions were made for, and no others."""
        return SizeClass(tuple(replace(s, low=s.value, high=s.value) for s in self.sizes))

    def __and__(self, other: SizeClass) -> SizeClass:
        """The sizes that are in both."""
        known = Known(self)
        for size in other.sizes:
            known.narrow(size)
        return SizeClass(
            known.size_class().sizes, tuple(dict.fromkeys((*self.facts, *other.facts)))
        )

    def assumptions(self) -> tuple[str, ...]:
        """The conditions on its sizes, as the text of a Program writes them."""
        told: list[str] = []
        for size in self.sizes:
            if size.low == size.high:
                told.append(f"{size.name} == {size.low}")
                continue
            told += [f"{size.name} >= {size.low}"] if size.low else []
            told += [f"{size.name} <= {size.high}"] if size.high < MOST else []
            told += [f"{size.name} % {size.modulus} == {size.rest}"] if size.modulus > 1 else []
        return (*told, *map(str, self.facts))

    def __str__(self) -> str:
        return ", ".join(self.assumptions())


FIXED = SizeClass()
"""No named sizes."""


class Known:
    """The values that answers are given for, and what the answers were."""

    def __init__(self, given: SizeClass) -> None:
        self.values = given.values
        self.sizes = {size.name: size for size in given.sizes}
        self.facts: dict[Fact, None] = dict.fromkeys(given.facts)
        self.cache: dict[object, Any] = {}
        """Results of `cached` functions."""

    def size_class(self) -> SizeClass:
        """The sizes for which all answers are the same."""
        facts = tuple(fact for fact in self.facts if not self._follows(fact))
        return SizeClass(tuple(self.sizes.values()), facts)

    def is_positive(self, value: Int) -> bool:
        """True if the value is greater than 0."""
        if isinstance(value, int):
            return value > 0
        low, high = self.bounds(value)
        if low > 0 or high <= 0:
            return low > 0
        found = value.at(self.values) > 0
        self.note(Fact(value, ">" if found else "<="))
        return found

    def is_zero(self, value: Int) -> bool:
        """True if the value is 0."""
        if isinstance(value, int):
            return value == 0
        low, high = self.bounds(value)
        if low > 0 or high < 0:
            return False
        found = value.at(self.values) == 0
        self.note(Fact(value, "==" if found else "!="))
        return found

    def rest(self, value: Size, by: int) -> int:
        """The rest when it is divided, from now on the same for the whole class."""
        over = value.over * by
        for name in sorted(value.names):  # the same on all ranks
            if _modular(value, over, self.sizes) is None:
                self._refine(value, over, name)
        rest = _modular(value, over, self.sizes)
        assert rest is not None
        return rest // value.over

    def narrow(self, size: NamedSize) -> None:
        """Notes that a named size has only values that another of that name may have."""
        mine = self.sizes.setdefault(size.name, size)
        self.values.setdefault(size.name, size.value)
        low, high = max(mine.low, size.low), min(mine.high, size.high)
        modulus = math.lcm(mine.modulus, size.modulus)
        rest = mine.value % modulus
        self.sizes[size.name] = replace(mine, low=low, high=high, modulus=modulus, rest=rest)

    def _refine(self, value: Size, over: int, name: str) -> None:
        """Notes the rest of one named size, by the least modulus that settles the terms with it."""
        known = self.sizes[name]
        counts = [count for monomial, count in value.terms.items() if name in monomial]
        modulus = math.lcm(known.modulus, *(over // math.gcd(over, count) for count in counts))
        self.sizes[name] = replace(known, modulus=modulus, rest=known.value % modulus)

    def bounds(self, value: Size) -> tuple[float, float]:
        """Bounds of its terms' sum, which has its sign; a name that all terms have is apart, since
        the others may cancel."""
        common = _common(value)
        low, high = self._sum(value, common)
        least, most = self._product(common)
        ends = [end and factor and end * factor for end in (low, high) for factor in (least, most)]
        return min(ends), max(ends)

    def _sum(self, value: Size, without: Counter[str]) -> tuple[float, float]:
        low: float = 0  # whole numbers, which are exact, or infinite
        high: float = 0
        for monomial, count in value.terms.items():
            least, most = self._product(Counter(monomial) - without)
            ends = count * least, count * most if most else 0
            low, high = low + min(ends), high + max(ends)
        return low, high

    def _product(self, names: Counter[str]) -> tuple[float, float]:
        least: float = 1
        most: float = 1
        for name in names.elements():
            size = self.sizes[name]
            least *= size.low
            most = most * (size.high if size.high < MOST else math.inf) if size.high else 0
        return least, most

    def _follows(self, fact: Fact) -> bool:
        low, high = self.bounds(fact.value)
        match fact.relation:
            case ">":
                return low > 0
            case "<=":
                return high <= 0
            case "!=":
                return low > 0 or high < 0
            case _:
                return False

    def note(self, fact: Fact) -> None:
        """Notes what holds for the values at hand, as a range of one size where it is one."""
        if not self._tighten(fact):
            self.facts[fact] = None

    def _tighten(self, fact: Fact) -> bool:
        """Narrows the range of one named size if the fact bounds just that; else returns False."""
        terms = dict(fact.value.terms)
        constant = terms.pop((), 0)
        if len(terms) != 1 or len(names := next(iter(terms))) != 1:
            return False
        size, (count,) = self.sizes[names[0]], terms.values()
        edge = Fraction(-constant, count)
        above, below = math.floor(edge) + 1, math.ceil(edge) - 1
        match fact.relation, count > 0:
            case (">", True):
                low, high = above, size.high
            case (">", False):
                low, high = size.low, below
            case ("<=", True):
                low, high = size.low, math.floor(edge)
            case ("<=", False):
                low, high = math.ceil(edge), size.high
            case ("==", _):
                low = high = int(edge)
            case _:  # the values on one side of it
                low, high = (above, size.high) if size.value > edge else (size.low, below)
        low, high = max(low, size.low), min(high, size.high)
        self.sizes[size.name] = replace(size, low=low, high=high)
        return True


class Settled(Known):
    """Answers only what holds for a whole class, and notes nothing: what is not known to be equal
    counts as different, and what may be positive or not is a `SizeError`."""

    def is_positive(self, value: Int) -> bool:
        if isinstance(value, int):
            return value > 0
        low, high = self.bounds(value)
        if low > 0 or Fact(value, ">") in self.facts:
            return True
        if high <= 0 or Fact(value, "<=") in self.facts:
            return False
        raise SizeError(f"whether {value} > 0 is not the same for all of a class")

    def is_zero(self, value: Int) -> bool:
        if isinstance(value, int):
            return value == 0
        return self.bounds(value) == (0, 0) or Fact(value, "==") in self.facts

    def rest(self, value: Size, by: int) -> int:
        found = _modular(value, value.over * by, self.sizes)
        if found is None:
            raise SizeError(f"{value} % {by} is not the same for all of a class")
        return found // value.over


def _common(value: Size) -> Counter[str]:
    """The names that all terms have."""
    first, *others = map(Counter, value.terms)
    for other in others:
        first &= other
    return first


def _modular(value: Size, over: int, sizes: Mapping[str, NamedSize]) -> int | None:
    """The terms' sum modulo `over`, where what is known of the named sizes settles it."""
    total = 0
    for monomial, count in value.terms.items():
        rest, modulus = count, 0  # exact
        for name in monomial:
            # a modulo m, times b modulo n: known modulo gcd(m * b, n * a, m * n)
            each = sizes[name]
            known = each.modulus if each.low != each.high else 0
            other = each.rest if known else each.low
            modulus = math.gcd(modulus * other, known * rest, modulus * known)
            rest = rest * other % modulus if modulus else rest * other
        if modulus % over:
            return None
        total += rest
    return total % over


@contextlib.contextmanager
def deciding(given: SizeClass) -> Generator[Known]:
    """Questions about sizes are answered for the values at hand: Note [Decided for a class].

    Within another `deciding` that one goes on; without named sizes there is nothing to decide.
    """
    outer = DECIDER.get()
    if outer is not None or not given.sizes:
        yield outer or Known(given)
        return
    with _answering(Known(given)) as known:
        yield known


@contextlib.contextmanager
def settled(given: SizeClass) -> Generator[None]:
    """Questions about sizes are answered by what holds for all of a class: ranks that ask other
    questions, as of views of their own, are for the same sizes all the same."""
    with _answering(Settled(given)) if given.sizes else contextlib.nullcontext():
        yield


def unnoted() -> contextlib.AbstractContextManager[None]:
    """The same within `deciding`, for what has been decided so far."""
    known = DECIDER.get()
    return contextlib.nullcontext() if known is None else settled(known.size_class())


@contextlib.contextmanager
def _answering(known: Known) -> Generator[Known]:
    token = DECIDER.set(known)
    try:
        yield known
    finally:
        DECIDER.reset(token)


@contextlib.contextmanager
def supposing() -> Generator[None]:
    """Questions are answered for the values at hand and not noted: for predictions of time, whose
    choice holds for all of a bucket."""
    known = DECIDER.get()
    if known is None:
        yield
        return
    own = Known(known.size_class())
    own.cache.update(known.cache)
    with _answering(own):
        yield


def cached(maxsize: int) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """`functools.lru_cache` for functions that ask about sizes: what was noted for one class holds
    for that one alone."""

    def decorate(fn: Callable[P, T]) -> Callable[P, T]:
        usual = lru_cache(maxsize)(fn)

        @wraps(fn)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            known = DECIDER.get()
            if known is None:
                return usual(*args, **kwargs)  # pyright: ignore[reportArgumentType]
            key = fn, args, tuple(kwargs.items())
            if key not in known.cache:
                known.cache[key] = fn(*args, **kwargs)
            return known.cache[key]

        return call

    return decorate
