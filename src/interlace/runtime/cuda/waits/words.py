"""Waits for words and writes of words, and those of a stream that can be issued as one.

    step = Words.of("write", driver, lane, words, value)     # a function without arguments
    steps = brought_together([(lane, step), ...])

Note [In one call]
    What a stream does with words in a row is one call of the driver, and one node of a graph: less
    time of the host, and less between a put and the next one. Of two such steps with those of other
    streams between them in the list, a wait may be issued later and a write earlier, but neither
    the other way: streams may share a queue of the device, in which nothing overtakes a wait, and
    only the order of the list is known to end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from interlace.comm.cuda.driver import Batch, Driver

if TYPE_CHECKING:
    from interlace.runtime.cuda.lanes import Lane, Thunk

Part = tuple[str, tuple[int, ...], Callable[[], int]]
"""`wait` or `write`, which words, and what they are to reach, or become, in this run."""


class Words:
    """Waits and writes of words by one stream, in this order: `run` issues them."""

    def __init__(self, driver: Driver, lane: Lane, parts: tuple[Part, ...]) -> None:
        self.driver, self.lane, self.parts = driver, lane, parts
        self.count = sum(len(words) for _, words, _ in parts)
        self.kinds = {kind for kind, _, _ in parts}
        self.run = self._bound()

    @classmethod
    def of(
        cls, kind: str, driver: Driver, lane: Lane, words: Sequence[int], value: Callable[[], int]
    ) -> Words | None:
        """Waits until the words have reached a value, or writes it; None for no words."""
        return cls(driver, lane, ((kind, tuple(words), value),)) if words else None

    def __call__(self) -> None:
        self.run()

    def then(self, other: Words) -> Words:
        return Words(self.driver, self.lane, (*self.parts, *other.parts))

    def _bound(self) -> Callable[[], None]:
        driver, lane, parts = self.driver, self.lane, self.parts
        if self.count == 1:
            ((kind, (word,), value),) = parts
            issue = driver.wait if kind == "wait" else driver.write
            return lambda: issue(lane.handle, word, value())
        batch = driver.batch(*((kind, words) for kind, words, _ in parts))
        if len(parts) == 1:
            ((_, _, value),) = parts
            return lambda: batch.run(lane.handle, value())
        values = [value for _, _, value in parts]
        return lambda: batch.run(lane.handle, *[value() for value in values])


def brought_together(steps: Sequence[tuple[Lane | None, Thunk]]) -> list[Thunk]:
    """The steps, each with its stream, with fewer calls; None: the host waits there."""
    found: list[Thunk | None] = []
    last: dict[int, int] = {}  # by stream: its last step
    for lane, step in steps:
        if lane is None:
            last.clear()
            found.append(step)
            continue
        index = last.get(id(lane), -1)
        before = found[index] if index >= 0 else None
        if isinstance(step, Words) and isinstance(before, Words):
            fits = before.count + step.count <= Batch.LIMIT
            if fits and (step.kinds == {"write"} or index == len(found) - 1):
                found[index] = before.then(step)
                continue
            if fits and before.kinds == {"wait"}:
                found[index] = None
                step = before.then(step)
        last[id(lane)] = len(found)
        found.append(step)
    return [step.run if isinstance(step, Words) else step for step in found if step is not None]
