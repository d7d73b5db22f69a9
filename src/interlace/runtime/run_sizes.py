"""The named sizes of the run under way, and what depends on them.

A Program is bound once for a class of sizes. Whoever needs a size as a number follows it:

    sizes = RunSizes({"S": 128})
    sizes.follow((S // 2, 64), tell)      # tell((64, 64)) now
    sizes.turn((96,))                     # tell((48, 64)): runs are of S = 96 from now on
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from interlace.ir import Box
from interlace.ir.sizes import Int, Size, at

Tell = Callable[[tuple[int, ...]], object]
Evaluate = Callable[..., Sequence[tuple[int, ...]]]
T = TypeVar("T")


class Sized(Generic[T]):
    """Holder of something that is made for the sizes of the run, and made anew for others."""

    now: T


class RunSizes:
    """The values of a Program's named sizes, and those who are told them."""

    def __init__(self, values: Mapping[str, int]) -> None:
        self.values = dict(values)
        self._followed: list[tuple[Tell, tuple[Int, ...]]] = []
        self._numbers: Evaluate | None = None

    @property
    def at(self) -> tuple[int, ...]:
        """The values, in the order of the names."""
        return tuple(self.values.values())

    def follow(self, sizes: Sequence[Int], tell: Tell) -> None:
        """Calls `tell` with the numbers that these sizes are, now and whenever others come."""
        if any(isinstance(size, Size) for size in sizes):
            self._followed.append((tell, tuple(sizes)))
            self._numbers = None
        tell(tuple([at(size, self.values) for size in sizes]))

    def sized(self, sizes: Sequence[Int], make: Callable[[tuple[int, ...]], T]) -> Sized[T]:
        """Holds what `make` makes of the numbers that these sizes are."""
        held = Sized[T]()
        self.follow(sizes, lambda numbers: setattr(held, "now", make(numbers)))
        return held

    def follow_box(self, box: Box, tell: Callable[..., object], *more: Int) -> None:
        """The same for a box, whose numbers are its offset, sizes and strides; `more` are told
        behind it."""
        numbers = *more, box.offset, *box.sizes, *box.strides
        if not any(isinstance(number, Size) for number in numbers):
            tell(box, *more)
            return
        ndim, count = len(box.sizes), len(more)

        def told(numbers: tuple[int, ...]) -> None:
            here = numbers[count:]
            sizes, strides = here[1 : ndim + 1], here[ndim + 1 :]
            tell(Box(here[0], sizes, strides, box.dtype), *numbers[:count])

        self.follow(numbers, told)

    def turn(self, at: Sequence[int]) -> None:
        """Tells all who follow the numbers for these values of the named sizes; after an error,
        those for the values before."""
        before = self.at
        try:
            self._tell(at)
        except BaseException:
            self._tell(before)
            raise

    def _tell(self, at: Sequence[int]) -> None:
        evaluate = self._numbers
        if evaluate is None:
            asked = [sizes for _, sizes in self._followed]
            evaluate = self._numbers = evaluator(self.values, asked)
        self.values.update(zip(self.values, at, strict=True))
        for (tell, _), numbers in zip(self._followed, evaluate(*at), strict=True):
            tell(numbers)

    def clear(self) -> None:
        """Forgets who follows, and the memory that they hold."""
        self._followed.clear()
        self._numbers = None


def evaluator(names: Iterable[str], asked: Sequence[tuple[Int, ...]]) -> Evaluate:
    """Returns one function of the values of these names for all sizes, from their text: evaluated
    one by one they take ten times as long, in every run of other sizes."""
    given = {name: f"_{number}" for number, name in enumerate(names)}  # a name may be a keyword
    texts = [
        f"({''.join(f'{s.renamed(given) if isinstance(s, Size) else s},' for s in sizes)})"
        for sizes in asked
    ]
    return eval(f"lambda {', '.join(given.values())}: ({''.join(f'{text},' for text in texts)})")
